"""Runs `python -m training_monitor`; see `serve`.

`uploader` as its only argument starts a run's uploader: see `client.uploader`.
"""

import gc
import sys

_COLLECT = (20_000, 20, 100)


def main() -> int:
  """Runs the command that the arguments name; returns the exit status."""
  if sys.argv[1:] == ["uploader"]:
    from training_monitor.client import uploader as program  # pylint: disable=g-import-not-at-top
  else:
    from training_monitor import serve as program  # pylint: disable=g-import-not-at-top
  # Rows pass through by the thousand and leave no cycles. Looking for cycles in
  # all modules again and again was a twelfth of the work.
  gc.collect()
  gc.freeze()
  gc.set_threshold(*_COLLECT)
  return program.main()


if __name__ == "__main__":
  sys.exit(main())
