"""Former names of the services, and a run without them."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

ROOM = "tunix.rl.multi_turn"


@pytest.mark.parametrize(
  "former, name",
  [
    ("agents.run_agent", "runs.run_agent"),
    ("agents.run_service.schemas", "run_service.schemas"),
    ("agents.runs", "runs"),
    ("agents.runs.client", "runs.client"),
    ("agents.runs.conversion", "runs.conversion"),
    ("clients.cua_workflow", "cua_workflow"),
    ("clients.run_episodes", "runs.run_episodes"),
    ("serving.requests", "serving.requests"),
    ("trajectory_collector.buffer_service.client", "rollout_buffer.client"),
  ],
)
def test_a_module_by_its_former_name_is_the_same_module(former, name):
  module = importlib.import_module(f"agent_services.{name}")
  assert importlib.import_module(f"{ROOM}.{former}") is module
  assert module.__spec__.name == f"agent_services.{name}"


def test_a_program_by_its_former_name_has_a_file():
  """`python -m` makes it sys.argv[0], which JAX reads."""
  former = importlib.util.find_spec(f"{ROOM}.serving.__main__")
  own = importlib.util.find_spec("agent_services.serving.__main__")
  assert former.origin == own.origin and former.origin.endswith("__main__.py")


_ABSENT = """
import sys
from importlib import metadata
sys.modules["agent_services"] = None
points = metadata.entry_points
metadata.entry_points = lambda **by: (
    points(group="none") if by.get("group", "").endswith("services")
    else points(**by)
)
import tunix_multi_turn
"""


def _without_the_package(program):
  return subprocess.run(
    [sys.executable, "-c", _ABSENT + program],
    capture_output=True,
    text=True,
    timeout=110,
    check=False,
  )


def test_a_command_without_the_package_ends_with_one_line():
  process = _without_the_package(
    "sys.exit(tunix_multi_turn.main(['serve', 'tiny_vl']))"
  )
  assert process.returncode == 2, process.stderr
  assert process.stderr.count("\n") == 1
  assert (
    "pip install -e packages/cua_gyms -e packages/agent_services"
  ) in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rollout.via=proxy", "fleet.via=join"])
def test_a_run_without_the_package_says_what_to_install(tmp_path, setting):
  words = [setting, f"run.dir={tmp_path / 'r'}"]
  process = _without_the_package(
    f"from tunix.rl.multi_turn import train\nsys.exit(train.main({words!r}))"
  )
  assert process.returncode == 2, process.stderr[-2000:]
  assert (
    f"{setting} needs the package agent_services; pip install -e"
    " packages/cua_gyms -e packages/agent_services"
  ) in process.stderr
  assert "Traceback" not in process.stderr and not (tmp_path / "r").exists()
