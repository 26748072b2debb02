"""A run needs the packages that pyproject.toml requires, and no others."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tomllib

from packaging import requirements
from packaging import utils
import pytest
import trials

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required():
  """Canonical names of the packages that an installation without extras has."""
  names, todo = set(), [(r, "") for r in PROJECT["dependencies"]]
  while todo:
    text, extra = todo.pop()
    requirement = requirements.Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
      continue
    name = utils.canonicalize_name(requirement.name)
    for extra in ("", *requirement.extras):
      if (name, extra) not in names:
        names.add((name, extra))
        requires = importlib.metadata.distribution(name).requires or ()
        todo.extend((r, extra) for r in requires)
  return {name for name, _ in names}


def others():
  """Modules that the development environment has beside those packages."""
  names = required()
  return {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if module not in ("tunix", "tunix_multi_turn")
    and not {utils.canonicalize_name(o) for o in owners} & names
  }


class BaseOnly(importlib.abc.MetaPathFinder):
  """Finds `tunix` in this clone alone, and none of `modules`."""

  def __init__(self, modules):
    self.modules = frozenset(modules)

  def find_spec(self, name, path=None, target=None):
    del path, target
    if name.partition(".")[0] in self.modules:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name not in ("tunix", "tunix.rl", "tunix.rl.queue"):
      return None
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(ROOT.joinpath(*name.split(".")))]
    return spec


def child(program, *args, cwd):
  """Runs `program` where nothing but the required packages can be imported."""
  code = (
    "import json, sys\n"
    "import test_base_packages as base\n"
    "sys.meta_path.insert(0, base.BaseOnly(json.loads(sys.argv.pop(1))))\n"
  )
  paths = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), str(ROOT)]
  return subprocess.run(
    [sys.executable, "-c", code + program, json.dumps(sorted(others())), *args],
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
  )


def test_what_is_hidden_is_there_to_be_hidden():
  assert {"pandas", "datasets", "omegaconf", "torch", "uvicorn"} <= others()
  assert not {"jax", "numpy", "optax", "pydantic", "yaml"} & others()


@pytest.mark.slow
def test_a_run_needs_the_required_packages_alone(tmp_path):
  process = child(
    """
import small_runs
status = small_runs.run_train(
    __import__("pathlib").Path("runs"), "steps=1", small_runs.ONE_LAYER,
    "warm_start.source=none", "tracking.tensorboard=true", "run.name=bare")
from tunix.rl.queue import group_queue
assert group_queue.GroupQueue.__bases__ == (object,)
import tunix
assert tunix.__file__ is None
sys.exit(status)
""",
    cwd=tmp_path,
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert list(tmp_path.rglob("report.html"))
  assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_a_wrong_setting_is_refused_before_jax_has_started(tmp_path):
  process = child(
    """
import runpy
sys.argv[1:] = ["learner.steps=-1", "gym=deskto"]
try:
  runpy.run_module("tunix.rl.multi_turn.train", run_name="__main__",
                   alter_sys=True)
finally:
  assert "flax" not in sys.modules and "orbax" not in sys.modules
""",
    cwd=tmp_path,
  )
  assert process.returncode == 2, process.stderr[-3000:]
  assert "learner.steps=-1" in process.stderr and "deskto'" in process.stderr


ALONE = [
  ("train", ["mesh.tensor=3"], "but JAX sees 2 cpu devices"),
  ("train", ["policy.trajectory_pixels=9"], "resizes no screenshot"),
  ("train", ["policy=own:few", "policy.config.sed=1"], "argument 'sed'"),
  ("train", ["policy=own:few", "policy.dtype=bfloat16"], "no compute_dtype"),
  (
    "train",
    ["policy=qwen3_vl_tiny", "policy.config.layers=2"],
    "'layers' cannot be changed",
  ),
  (
    "train",
    ["warm_start.recordings=own.py", "warm_start.steps=1"],
    "warm_start.recordings=own.py",
  ),
  ("train", ["engine.slots=100000"], "<= 65536"),
  ("evaluate", ["http://127.0.0.1:9/v1", "gym=desktop"], "start the server"),
]
"""Command, its arguments, and words of its refusal."""


@pytest.mark.parametrize(
  "command, arguments, words",
  # A process each; the rest walk the path of the first two.
  trials.by_default([*ALONE[:2], ALONE[-1]], ALONE, unlike=ALONE),
  ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_needs_neither_devices_nor_weights_is_refused_without_jax(
  command, arguments, words, tmp_path
):
  (tmp_path / "own.py").write_text("def few(seed=0, width=1):\n  pass\n")
  process = child(
    f"""
import os, runpy
sys.path.insert(0, "")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.argv[1:] = {arguments!r}
try:
  runpy.run_module("tunix.rl.multi_turn.{command}", run_name="__main__",
                   alter_sys=True)
finally:
  assert "jax" not in sys.modules
""",
    cwd=tmp_path,
  )
  assert process.returncode == 2, process.stderr[-3000:]
  assert words in process.stderr


def test_the_package_is_imported_at_once_and_without_a_word(tmp_path):
  ended = child(
    """
import time
before = time.process_time()
import tunix.rl.multi_turn as mt
assert "jax" not in sys.modules
from tunix.rl.multi_turn.api import runs
print(time.process_time() - before, *dir(mt))
""",
    cwd=tmp_path,
  )
  assert ended.returncode == 0 and not ended.stderr, ended.stderr[-3000:]
  seconds, *names = ended.stdout.split()
  assert float(seconds) < 1.5
  assert names == [
      "BusyError", "ConfigError", "Episode", "EvaluationRun", "Run",
      "TrainingRun", "evaluate", "load", "play", "train",
  ]  # fmt: skip


def test_publishing_episodes_names_its_extra(tmp_path):
  process = child(
    """
from tunix.rl.multi_turn.reporting import publishing
try:
  publishing._write_episodes(None, None, {})
except publishing.PublishError as error:
  print(error)
""",
    cwd=tmp_path,
  )
  assert "pip install 'tunix-multi-turn[hub]'" in process.stdout, process.stderr


def test_an_agent_of_google_tunix_names_its_extra(tmp_path):
  process = child(
    """
from tunix.rl.multi_turn.core import registry
try:
  registry.import_path("tunix.rl.agentic.agents.tool_agent:ToolAgent")
except ImportError as error:
  print(error)
""",
    cwd=tmp_path,
  )
  assert "pip install 'tunix-multi-turn[google-tunix]'" in process.stdout
