"""`python -m tunix.rl.multi_turn.monitor`; see `serve`.

`uploader` as its only argument starts a run's uploader: see `client.uploader`.

Run as a file (`python -P …/monitor/__main__.py`) it does the same without the
packages above it: upstream's `tunix` imports JAX, Flax and Orbax with its name,
some seconds and 400 MB that a server of rows has no use for.
"""

import gc
import importlib.util
import pathlib
import sys


def _alone() -> None:
  """Makes `tunix.rl.multi_turn` importable without running `tunix` itself."""
  here = pathlib.Path(__file__).absolute().parents[2]  # tunix/rl
  for name, folder in (("tunix", here.parent), ("tunix.rl", here)):
    spec = importlib.util.spec_from_loader(name, None, is_package=True)
    spec.submodule_search_locations.append(str(folder))
    sys.modules[name] = importlib.util.module_from_spec(spec)


_COLLECT = (20_000, 20, 100)


if __name__ == "__main__":
  if not __package__:
    _alone()
  try:
    if sys.argv[1:] == ["uploader"]:
      from tunix.rl.multi_turn.monitor.client import uploader as program
    else:
      from tunix.rl.multi_turn.monitor import serve as program
  except ImportError as error:
    print(
        f"error: {error}; pip install 'tunix-multi-turn[monitor]'",
        file=sys.stderr,
    )
    sys.exit(2)
  # Rows pass through by the thousand and leave no cycles. Looking for cycles in
  # all modules again and again was a twelfth of the work.
  gc.collect()
  gc.freeze()
  gc.set_threshold(*_COLLECT)
  sys.exit(program.main())
