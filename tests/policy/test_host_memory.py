"""The allocator keeps what XLA frees; in a subprocess, as it is for good."""

import os
import subprocess
import sys

import pytest
from tunix.rl.multi_turn.policy import host_memory

SCRIPT = """
import concurrent.futures
import resource
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.policy import host_memory

def allocate(times):
  for _ in range(times):
    b"1" * (1 << 26)  # 16,384 pages; numpy would ask for huge ones itself.

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(8):  # In a thread each: any may get another arena.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(allocate, 4).result()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if host_memory.tune():
  faults()
  found = faults()
  assert found < 50_000, found  # Of 524,288 pages.
  print("kept")
else:
  print("no glibc")
"""


@pytest.mark.skipif(
    not host_memory.huge_pages_on_request(), reason="no huge pages on request"
)
def test_freed_memory_is_used_again_without_page_faults():
  done = subprocess.run(
      [sys.executable, "-c", SCRIPT],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
      env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.strip() in ("kept", "no glibc")


def test_advice_is_given_where_it_helps(monkeypatch, tmp_path):
  mode = tmp_path / "enabled"
  monkeypatch.setattr(host_memory, "_HUGE_PAGES", mode)
  monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
  assert host_memory.advice() is None  # No such Linux.
  for text, helps in (
      ("always [madvise] never", True), ("[always] madvise never", False),
      ("always madvise [never]", False),
  ):  # pyformat: disable
    mode.write_text(text)
    assert bool(host_memory.advice()) == helps
  mode.write_text("always [madvise] never")
  given = host_memory.advice().partition(" ")[0]
  variable, _, value = given.partition("=")
  monkeypatch.setenv(variable, value)
  assert host_memory.advice() is None
