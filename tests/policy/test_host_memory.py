"""The allocator keeps what XLA frees; in a subprocess: it cannot be undone."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import concurrent.futures
import resource
import numpy as np
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.policy import host_memory

def allocate(times):
  for _ in range(times):
    np.ones(1 << 24, np.float32)  # 64 MiB: 16,384 pages.

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(8):  # In a thread each: any may get another arena.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(allocate, 4).result()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if host_memory.tune():
  faults()
  found = faults()
  assert found < 1000, found
  print("kept")
else:
  print("no glibc")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults():
  process = subprocess.run(
    [sys.executable, "-c", SCRIPT],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
  )
  assert process.returncode == 0, process.stderr[-2000:]
  assert process.stdout.strip() in ("kept", "no glibc")
