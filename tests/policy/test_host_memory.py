"""The allocator keeps what XLA frees; in a subprocess, as it is for good."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from tunix.rl.multi_turn.policy import host_memory

def faults():
  for _ in range(3):
    np.ones(1 << 24, np.float32)  # 64 MiB: 16,384 pages.
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(10):
    np.ones(1 << 24, np.float32)
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if host_memory.tune():
  assert faults() < 1000, faults()
  print("kept")
else:
  print("no glibc")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults():
  done = subprocess.run(
      [sys.executable, "-c", SCRIPT],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.strip() in ("kept", "no glibc")
