"""Asks JAX for its devices and makes a run's preflight checks: a process.

Its input is the line {"argv": […]}, its output {"ready": facts} or {"fatal":
text}, as `net.line_process` has it. Run as a file, in a process of its own:
JAX may hang there.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

# Found by the path of this file, installed or not.
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[4])

import tunix_multi_turn  # noqa: E402


def main() -> int:
  # Whatever is imported may print: the answer goes where nothing else does.
  answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  argv = json.loads(sys.stdin.readline())["argv"]
  try:
    facts: dict[str, Any] = {"ready": _facts(argv)}
  except Exception as error:  # pylint: disable=broad-except
    # A driver fails in its own ways, all for the user to see.
    text = " ".join(f"{type(error).__name__}: {error}".split())
    facts = {"fatal": text[:400]}
  print(json.dumps(facts), file=answer, flush=True)
  return 0


def _facts(argv: list[str]) -> dict[str, Any]:
  tunix_multi_turn.light()
  import jax  # pylint: disable=g-import-not-at-top

  devices = [
    {
      "kind": one.device_kind,
      "memory": (one.memory_stats() or {}).get("bytes_limit"),
    }
    for one in jax.local_devices()
  ]
  from tunix.rl.multi_turn import config as config_lib  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import preflight  # pylint: disable=g-import-not-at-top

  config = config_lib.load_config(argv)
  problems: list[str] = []
  try:
    preflight.before_building(config)
  except config_lib.ConfigError as error:
    problems = list(error.problems)
  return {
    "jax": jax.__version__,
    "platform": jax.default_backend(),
    "devices": devices,
    "problems": problems,
    "weights": preflight.bytes_of_weights(config),
  }


if __name__ == "__main__":
  sys.exit(main())
