"""`python -m tunix.rl.multi_turn.monitor`; see `server.serve`."""

import sys

if __name__ == "__main__":
  try:
    from tunix.rl.multi_turn.monitor.server import serve
  except ImportError as error:
    print(
        f"error: {error}; pip install 'tunix-multi-turn[monitor]'",
        file=sys.stderr,
    )
    sys.exit(2)
  sys.exit(serve.main())
