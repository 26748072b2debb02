"""Gym servers and clients start without google-tunix, JAX or what they load."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_MIB = 150
CLIENTS = (
  "environments.gyms.genv.genv_gym",
  "environments.gyms.openenv.openenv_gym",
  "environments.play.__main__",
  "environments.gym_server.__main__",
  "agents.run_service.__main__",
  "monitor.client.http_rollout_recorder",
  "monitor.client.ingest_client",
  "monitor.client.event_log",
  "monitor.client.uploader",
  "monitor.serve",
)
HEAVY = (
    "jax", "jaxlib", "flax", "orbax", "transformers", "pandas", "torch",
    "tunix.rl.rl_learner", "tunix.rl.rl_cluster",
)  # fmt: skip
PROGRAM = r"""
import importlib, json, re, sys
import tunix_multi_turn
tunix_multi_turn.light()
for name in sys.argv[1].split(","):
  importlib.import_module("tunix.rl.multi_turn." + name)
peak = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())
mib = int(peak[1]) >> 10
print(json.dumps({"modules": list(sys.modules), "mib": mib}))
"""


def python(*argv, **options):
  env = dict(options.pop("env", os.environ), TESTS_SEE_TORCH="1")
  return subprocess.run(
      [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True,
      timeout=100, check=False, env=env, **options,
  )  # fmt: skip


def test_clients_import_nothing_heavy():
  process = python("-c", PROGRAM, ",".join(CLIENTS))
  assert process.returncode == 0, process.stderr[-2000:]
  modules = json.loads(process.stdout)
  assert not set(HEAVY) & set(modules["modules"])
  assert modules["mib"] <= MOST_MIB


@pytest.mark.slow
def test_google_tunix_is_there_once_it_is_asked_for():
  process = python(
    "-c",
    """
import tunix_multi_turn, sys
tunix_multi_turn.light()
tunix_multi_turn.light()
import tunix
from tunix.rl.multi_turn.core import images
assert tunix_multi_turn.is_light() and "jax" not in sys.modules
from tunix.rl.queue import data_queue
assert tunix_multi_turn.is_light() and not hasattr(tunix, "__no_such__")
from tunix import PeftTrainer
assert not tunix_multi_turn.is_light() and "jax" in sys.modules
from tunix.rl.multi_turn.core import images as again
assert again is images
""",
  )
  assert process.returncode == 0, process.stderr[-2000:]


def test_the_gym_server_and_its_processes_are_light():
  process = subprocess.Popen(
      [sys.executable, "-m", "tunix_multi_turn", "environments.gym_server",
       "desktop", "--port", "0", "--workers", "1"],
      cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
  )  # fmt: skip
  try:
    url = re.search(r"http://\S+", process.stdout.readline())[0]
    with httpx.Client(base_url=url, timeout=60, verify=False) as http:
      created = http.post("/api/v1/desktop/tasks/001")
      assert created.status_code == 200, created.text
    group = [
      int(entry.name)
      for entry in pathlib.Path("/proc").iterdir()
      if entry.name.isdigit() and _group(entry.name) == process.pid
    ]
    assert len(group) > 1  # The server, its fork server, and the gyms.
    for pid in group:
      files = pathlib.Path(f"/proc/{pid}/maps").read_text()
      assert "jaxlib" not in files
      status = pathlib.Path(f"/proc/{pid}/status").read_text()
      peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10
      assert peak <= MOST_MIB, (pid, peak)
  finally:
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)
    process.stdout.close()


def _group(pid):
  try:
    return os.getpgid(int(pid))
  except ProcessLookupError:
    return 0


def test_a_command_without_a_module_says_how():
  process = python("-m", "tunix_multi_turn")
  assert process.returncode == 2 and "\n  gym  " in process.stderr
