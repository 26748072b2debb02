"""The package needs nothing of the framework, and its former names are it."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

_ALL = """
import importlib, pkgutil, sys
sys.modules["tunix"] = None  # An import of it fails.
import training_monitor
names = [
    m.name
    for m in pkgutil.walk_packages(
        training_monitor.__path__, "training_monitor."
    )
    # Of the rooms that the package carries, it needs what these import.
    if not m.name.startswith(
        ("training_monitor.core.", "training_monitor.net.")
    )
    and not m.name.endswith("__main__")
]
for name in names:
  importlib.import_module(name)
bad = {"jax", "jaxlib", "flax", "torch", "transformers"} & set(sys.modules)
assert len(names) > 80 and not bad, (len(names), bad)
"""


def test_every_module_is_imported_without_the_framework_and_jax():
  process = subprocess.run(
    [sys.executable, "-c", _ALL],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.parametrize(
  "name",
  [
    "app",
    "client.ingest_client",
    "client.http_rollout_recorder",
    "client.monitor_context",
    "client.monitor_training_hooks",
    "schema.tables",
    "server.ingest",
  ],
)
def test_a_module_by_its_former_name_is_the_same_module(name):
  pytest.importorskip("tunix.rl.multi_turn", reason="needs the framework")
  module = importlib.import_module(f"training_monitor.{name}")
  former = importlib.import_module(f"tunix.rl.multi_turn.monitor.{name}")
  assert former is module
  assert module.__spec__.name == f"training_monitor.{name}"
  with pytest.raises(ImportError):
    importlib.import_module(f"tunix.rl.multi_turn.monitor.{name}_not")


def test_the_former_room_runs_as_a_program_and_survives_a_reload():
  moved = pytest.importorskip(
    "tunix.rl.multi_turn.moved_rooms", reason="needs the framework"
  )
  room = "tunix.rl.multi_turn.monitor"
  assert importlib.util.find_spec(f"{room}.missing") is None
  finders = list(sys.meta_path)
  importlib.reload(moved).install()
  assert sys.meta_path == finders
  process = subprocess.run(
    [sys.executable, "-m", f"{room}.serve"],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert process.returncode == 0, process.stderr[-3000:]


_ABSENT = """
import sys
sys.modules["training_monitor"] = None
import tunix.rl.multi_turn.monitor
"""


def test_a_former_name_without_its_package_says_what_to_install():
  pytest.importorskip("tunix.rl.multi_turn", reason="needs the framework")
  process = subprocess.run(
    [sys.executable, "-c", _ABSENT],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert "pip install -e packages/training_monitor" in process.stderr


def test_events_of_the_framework_are_recognized_by_their_place_and_name():
  """A trainer's classes are other copies of the modules that are carried."""
  framework = pytest.importorskip("tunix.rl.multi_turn.core.events")
  from training_monitor.client import event_codec
  from training_monitor.client import event_types
  from training_monitor.core import events

  assert framework.RunStarted is not events.RunStarted
  event = framework.RunStarted("r", {"a": 1})
  assert event_types.is_a(event, events.RunStarted)
  assert event_codec.load(event_codec.dump(event)) == events.RunStarted(
    "r", {"a": 1}, time=event.time
  )

  class RunStarted:  # Of this test's module.
    pass

  assert event_types.carried(RunStarted) is RunStarted
