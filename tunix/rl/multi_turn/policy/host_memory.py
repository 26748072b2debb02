"""Tunes glibc to keep XLA's CPU buffers instead of freeing them each step.

XLA:CPU allocates its temporaries anew at every call. glibc serves such sizes
with mmap, so each training step pays a page fault for every 4 KiB it touches:
for a policy of two million parameters some 280,000 a step, a seventh of the
step's CPU time. `tune` makes glibc keep freed memory, until `release`.

Threads that libraries start when they are imported (pyarrow, by way of
upstream's package) have arenas of their own before anything here runs, which
cannot hold large blocks. One arena for all (MALLOC_ARENA_MAX=1 when a process
starts) can, but threads then wait for each other in it, which costs more than
the faults: docs/performance.md has the figures.

What a compiler or a stage has freed lies between buffers that live on, where
later ones do not fit; `release` gives it back to the system.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


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


def release() -> None:
  """Returns freed memory to the system; for the ends of stages, not of steps.

  Nothing happens where the C library is not glibc.
  """
  if not sys.platform.startswith("linux"):
    return
  try:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
  except (OSError, AttributeError):
    pass
