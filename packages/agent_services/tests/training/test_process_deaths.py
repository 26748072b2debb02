"""A run leaves no process behind, and no port, whatever ends it."""

import json
import os
import shutil
import subprocess
import sys

import process_deaths
import pytest
import trials

STATUS = {
    "normal": 0, "reward": 1, "SIGINT": 130, "SIGINT twice": 130,
    "SIGTERM": 130, "SIGHUP": -1, "SIGKILL": -9, "leader": -9,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
  not shutil.which("chromium-headless-shell"), reason="needs make browser"
)
def test_eight_ways_to_die_leave_nothing(tmp_path):
  """Of a server's port, a browser, a monitor and its uploader."""
  ways = process_deaths.WAYS
  if trials.share() < 1:
    ways = ("SIGTERM", "leader")
  helpers = os.pathsep.join(p for p in sys.path if p.endswith("helpers"))
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": helpers}
  env.setdefault("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
  process = subprocess.run(
      [sys.executable, process_deaths.__file__, str(tmp_path / "runs"),
       "--ways", ",".join(ways)],
      env=env, capture_output=True, text=True, timeout=850, check=False,
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-3000:]
  entries = [json.loads(line) for line in process.stdout.splitlines()]
  assert [entry["way"] for entry in entries] == list(ways)
  for entry in entries:
    log = " ".join(entry["seen"])
    for name in ("chrom", " serve ", " uploader "):
      assert name in log, (entry["way"], name)
    assert not entry["left"] and entry["port_is_free"], entry
  assert {e["way"]: e["status"] for e in entries} == {
    way: STATUS[way] for way in ways
  }
