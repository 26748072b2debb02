"""What all tests share: a bound on the memory that a worker keeps.

Promises: after a module of tests, a worker larger than `LARGE_BYTES` drops
what JAX compiled and returns freed pages to the system. Each of the three
workers of `make test` runs some hundred modules, and their compiled programs
alone would outgrow the machine.
"""

import ctypes
import gc
import pathlib
import resource
import sys

import pytest

LARGE_BYTES = 2 << 30


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
