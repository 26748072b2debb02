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
later ones do not fit; `release` gives it back to the system. A large policy's
buffers are gigabytes: one that does not fit doubles what the process takes, so
`settle` lets the system have them back after each step, as glibc does by
itself. At 135 million parameters the faults then take 7 % of the CPU time.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def _of_libc(name: str) -> Any:
  """Returns a function of the C library; None where it is not glibc."""
  if not sys.platform.startswith("linux"):
    return None
  try:
    return getattr(ctypes.CDLL("libc.so.6"), name)
  except (OSError, AttributeError):
    return None


def tune() -> bool:
  """Tunes this process's allocator; call it before JAX starts its threads.

  Returns:
    Whether the C library took the settings; False where it is not glibc.
  """
  mallopt = _of_libc("mallopt")
  settings = (
    (_M_MMAP_MAX, 0),  # A step's buffer is above any mmap threshold.
    (_M_TRIM_THRESHOLD, -1),  # Never.
    (_M_TOP_PAD, 1 << 26),
    # Other arenas than the main one cannot hold large blocks.
    (_M_ARENA_MAX, 1),
  )
  return mallopt is not None and all(mallopt(*pair) == 1 for pair in settings)


KEPT = 1 << 28
"""Bytes of parameters up to which a policy's freed buffers are kept."""


def settle(model: Any) -> None:
  """Ends what `tune` began if the nnx module has more than `KEPT` bytes."""
  from flax import nnx  # pylint: disable=g-import-not-at-top
  import jax  # pylint: disable=g-import-not-at-top

  parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
  mallopt = _of_libc("mallopt")
  if parameter_bytes <= KEPT or mallopt is None:
    return
  # glibc's own values: mallopt.3, "M_MMAP_MAX" and the largest threshold.
  for name, value in (
    (_M_MMAP_THRESHOLD, 1 << 25),
    (_M_MMAP_MAX, 65536),
    (_M_TRIM_THRESHOLD, 1 << 26),
  ):
    mallopt(name, value)
  release()


def release() -> None:
  """Returns freed memory to the system; for the ends of stages, not of steps.

  Nothing happens where the C library is not glibc.
  """
  trim = _of_libc("malloc_trim")
  if trim is not None:
    trim(0)
