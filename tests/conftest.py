"""What all tests share: quick starts, bounded memory.

Processes that tests start import no torch, see `children/sitecustomize.py`.
The collector of garbage looks less often: JAX's modules and traced programs
are many objects that live long.

Promises: after a module of tests, a worker larger than `LARGE_BYTES` drops
what JAX compiled and returns freed pages to the system. Each of the three
workers of `make test` runs some hundred modules, and their compiled programs
alone would outgrow the machine.
"""

import ctypes
import gc
import os
import pathlib
import resource
import sys

import pytest

LARGE_BYTES = 2 << 30

gc.set_threshold(50_000, 20, 100)


def pytest_configure(config) -> None:
  """Lets children of this process find `children/sitecustomize.py`.

  Not where they are workers of pytest-xdist, whose tests need torch.
  """
  workers = config.getoption("numprocesses", None)
  if workers and not hasattr(config, "workerinput"):
    return
  children = str(pathlib.Path(__file__).parent / "helpers" / "children")
  paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  if children not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [children, *filter(None, paths)]
    )


def resident_bytes() -> int:
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * resource.getpagesize()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
  yield
  if "jax" not in sys.modules or resident_bytes() < LARGE_BYTES:
    return
  sys.modules["jax"].clear_caches()
  gc.collect()
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:  # glibc's
    trim(0)
