"""What all tests share: quick compilation, and a bound on a worker's memory.

Most of the suite's time would be XLA's, on programs that run for milliseconds:
they are compiled without most optimisations, here and in the processes that
tests start. `make test-all` compiles as a user's run does, as does whatever
sets JAX_DISABLE_MOST_OPTIMIZATIONS=0.

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

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


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
