"""Writes what a command says to a person: texts, and commands to run next.

Promises: a command works where it is typed: in the working directory of the
process that printed it, whether or not a virtual environment is activated.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys
from typing import Sequence

PACKAGE = "tunix.rl.multi_turn"
MAKE_VARIABLE = "TUNIX_MAKE_TARGET"
"""Set by a Makefile's target that runs a command: its name."""


def show(text: str) -> None:
  """Prints a text that a reader may leave early, as `| head` does."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def python() -> str:
  """This environment's interpreter, as a shell finds it.

  `python` where that is what PATH has, else its path, relative to the working
  directory if it lies below.
  """
  here = sys.executable or "python"
  for name in ("python", "python3"):
    program = shutil.which(name)
    # Not resolved: a virtual environment's interpreter is a link to another.
    if program and os.path.abspath(program) == os.path.abspath(here):
      return name
  path, cwd = pathlib.Path(os.path.abspath(here)), pathlib.Path.cwd()
  if path.is_relative_to(cwd) and cwd != cwd.parent:
    return shlex.quote(f"./{path.relative_to(cwd)}")
  return shlex.quote(str(path))


def command(module: str, *arguments: str) -> str:
  """The line that runs a module of the package.

  Args:
    module: below the package, e.g. "train".
    *arguments: Arguments as the program reads them; quoted here.
  """
  target = os.environ.get(MAKE_VARIABLE, "")
  if target and target == module:
    # Make expands $ before the shell of the recipe splits the words.
    words = _words(arguments).replace("$", "$$")
    return f"make {target} ARGS={shlex.quote(words)}"
  return program(f"{PACKAGE}.{module}", *arguments)


def program(module: str, *arguments: str) -> str:
  """The line that runs a module by its whole name."""
  line = f"{python()} -m {module}"
  return " ".join([line, *([_words(arguments)] if arguments else [])])


def _words(arguments: Sequence[str]) -> str:
  return " ".join(shlex.quote(argument) for argument in arguments)
