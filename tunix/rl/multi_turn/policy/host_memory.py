"""Tunes glibc to keep XLA's CPU buffers instead of freeing them each step.

XLA:CPU allocates its temporaries anew at every call. glibc serves such sizes
with mmap, so each training step pays a page fault for every 4 KiB it touches:
for a policy of two million parameters some 280,000 a step, a seventh of the
step's CPU time. `tune` makes glibc keep freed memory. It changes speed only;
the process holds on to its peak memory.

Threads that libraries start when they are imported (pyarrow, by way of
upstream's package) have arenas of their own before anything here runs, which
cannot hold large blocks. Huge pages make that cheap: with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1, read when a process starts, a step has a
few thousand faults. The Makefile sets it; `advice` recommends it where it is
not set. One arena for all threads (MALLOC_ARENA_MAX=1) has no faults, but
threads wait for each other in it: a step took 3.1 s with it, 2.8 without, and
2.2 with huge pages (`benchmarks/bench_learner.py --beside torch`, two cores).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys

import jax

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_VARIABLE, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tune() -> bool:
  """Tunes this process's allocator; call it before JAX starts its threads.

  Returns:
    Whether the C library took the settings; False where it is not glibc.
  """
  if not sys.platform.startswith("linux"):
    return False
  try:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
  except (OSError, AttributeError):
    return False
  settings = (
      (_M_MMAP_MAX, 0),  # A step's buffer is above any mmap threshold.
      (_M_TRIM_THRESHOLD, -1),  # Never.
      (_M_TOP_PAD, 1 << 26),
      # Other arenas than the main one cannot hold large blocks.
      (_M_ARENA_MAX, 1),
  )
  return all(mallopt(name, value) == 1 for name, value in settings)


def huge_pages_on_request() -> bool:
  """Whether Linux gives huge pages to memory that asks for them, not to all."""
  try:
    return "[madvise]" in _HUGE_PAGES.read_text(encoding="ascii")
  except OSError:
    return False


def advice() -> str | None:
  """Advice to make this process faster next time; None if there is none."""
  if _TUNABLE in os.environ.get(_VARIABLE, "") or not huge_pages_on_request():
    return None
  if jax.default_backend() != "cpu":
    return None
  return (
      f"{_VARIABLE}={_TUNABLE}=1 in the environment makes updates on a CPU"
      " faster"
  )
