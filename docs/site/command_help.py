"""The directive `command-help`: what a command prints for `--help`.

    ```{command-help} tunix.rl.multi_turn.plan
    ```

Promises: the text is the command's own, of this clone; one that fails or prints
nothing is a warning of the build.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util import docutils
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TIMEOUT_S = 120


class CommandHelp(docutils.SphinxDirective):
  """A module and the arguments before `--help`."""

  required_arguments = 1
  final_argument_whitespace = True
  option_spec = {"class": directives.class_option}

  def run(self) -> list[nodes.Node]:
    module, *words = self.arguments[0].split()
    shown = [nodes.literal_block(text := help_of(module, *words), text)]
    shown[0]["language"] = "none"
    if not text:
      _LOG.warning("%s prints no help", module, location=self.get_location())
    return shown


def help_of(module: str, *words: str) -> str:
  """Returns what `python -m module words --help` prints; "" if it failed.

  The launcher prints the same without running google-tunix's code first.
  """
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "79",
    "NO_COLOR": "1",
  }
  done = subprocess.run(
    [
      *(sys.executable, "-m", "tunix_multi_turn"),
      *(module.removeprefix("tunix.rl.multi_turn."), *words, "--help"),
    ],
    capture_output=True,
    check=False,
    cwd=_ROOT,
    env=environment,
    text=True,
    timeout=_TIMEOUT_S,
  )
  if done.returncode:
    return ""
  return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).strip()


def setup(app: Any) -> dict[str, Any]:
  app.add_directive("command-help", CommandHelp)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
