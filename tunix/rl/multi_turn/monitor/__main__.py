"""Runs `python -m training_monitor` by its former name."""

import sys

if __name__ == "__main__":
  try:
    from training_monitor import __main__ as program
  except ImportError as error:
    print(
        f"error: {error}; pip install -e packages/training_monitor",
        file=sys.stderr,
    )
    sys.exit(2)
  sys.exit(program.main())
