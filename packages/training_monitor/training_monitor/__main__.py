"""Runs `python -m training_monitor`; see `serve`.

`uploader` as its only argument starts a run's uploader: see `client.uploader`.
"""

import gc
import importlib
import sys

_COLLECT = (20_000, 20, 100)


def main() -> int:
  """Runs the command that the arguments name; returns the exit status."""
  is_uploader = sys.argv[1:] == ["uploader"]
  program = importlib.import_module(
    "training_monitor." + ("client.uploader" if is_uploader else "serve")
  )
  # Rows pass through by the thousand and leave no cycles. Looking for cycles in
  # all modules again and again was a twelfth of the work.
  gc.collect()
  gc.freeze()
  gc.set_threshold(*_COLLECT)
  return program.main()


if __name__ == "__main__":
  sys.exit(main())
