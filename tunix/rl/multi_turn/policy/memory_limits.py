"""Reports the memory that this machine and its devices have.

Imports JAX only to ask a device.
"""

from __future__ import annotations

import os
import pathlib

_LIMITS = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def host_bytes() -> int:
  """This machine's memory, or what its cgroup may use."""
  limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  for file in _LIMITS:
    try:
      text = pathlib.Path(file).read_text(encoding="ascii").strip()
    except OSError:
      continue
    if text.isdigit():  # "max" without a limit.
      limit = min(limit, int(text))
  return limit


def process_bytes() -> int:
  """Memory of this process beside JAX's arrays; 0 where Linux does not say."""
  import jax  # pylint: disable=g-import-not-at-top

  try:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  except OSError:
    return 0
  resident = pages * os.sysconf("SC_PAGE_SIZE")
  if jax.default_backend() == "cpu":
    resident -= sum(array.nbytes for array in jax.live_arrays())
  return max(resident, 0)


def device_bytes() -> int | None:
  """Memory of one device that JAX may use, the host's on a CPU.

  None where the device does not report it.
  """
  import jax  # pylint: disable=g-import-not-at-top

  if jax.default_backend() == "cpu":
    return host_bytes()
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("bytes_limit")


def human(size: float) -> str:
  """Returns the bytes as people read them."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if abs(size) < 1024:
      return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
    size /= 1024
  return f"{size:,.1f} TiB"
