"""The allocator keeps what XLA frees, or returns it; in subprocesses."""

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

# What stays between two buffers keeps the heap from shrinking.
LARGE = """
import pathlib
from flax import nnx
import numpy as np
from tunix.rl.multi_turn.policy import host_memory

def of_bytes(count):
  model = nnx.Module()
  model.weight = nnx.Param(np.broadcast_to(np.zeros((), np.uint8), count))
  return model

def resident():
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * 4096

def grown(between):
  before = resident()
  for size in (1 << 24, 1 << 25):  # 128 and 256 MiB: neither fits the other.
    buffer = np.ones(size, np.float64)
    between.append(bytes(1 << 10))
    del buffer
  return resident() - before

if host_memory.tune():
  kept = []
  host_memory.settle(of_bytes(host_memory.KEPT))
  assert grown(kept) > 1 << 27
  host_memory.settle(of_bytes(host_memory.KEPT + 1))
  assert grown(kept) < 1 << 24
  print("kept")
else:
  print("no glibc")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(
  "script",
  [SCRIPT, pytest.param(LARGE, marks=pytest.mark.slow)],
  ids=["small", "large"],
)
def test_freed_memory_is_used_again_or_returned(script):
  process = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
  )
  assert process.returncode == 0, process.stderr[-2000:]
  assert process.stdout.strip() in ("kept", "no glibc")
