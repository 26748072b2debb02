"""Test session: runs on CPU, finds the package also when not installed.

Most of the suite's time would be XLA's, on programs that run for milliseconds:
they are compiled without most optimisations, here and in the processes that
tests start. `make test-all` compiles as a user's run does, as does whatever
sets JAX_DISABLE_MOST_OPTIMIZATIONS=0. Of what is left, the emitters that build
a module of MLIR for each fused kernel take the most; XLA's older ones emit the
same kernels, and each program is one module of LLVM's instead of many. An XLA
that has one of these flags no more ends with an error that names it.
"""

import os
import pathlib
import sys

import hypothesis
import pytest
from xdist.scheduler import loadfile

_HERE = pathlib.Path(__file__).resolve().parent

# Before anything imports JAX, which plug-ins do. An explicit choice of the
# caller wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
  _FLAGS = (
    "--xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
  )
  _CHOSEN = os.environ.get("XLA_FLAGS", "")
  if _FLAGS not in _CHOSEN:  # As it is in workers, and of two the last counts.
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {_CHOSEN}".strip()
# Tests and the processes they start compile many equal programs.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(_HERE / ".pytest_cache" / "jax")
)
# Also what compiles fast: it is compiled by every run and engine of the tests.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Processes that tests start do not run google-tunix's code first.
_LIGHT_START = str(_HERE / "tests" / "helpers" / "light_start")
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _LIGHT_START not in _PATHS:
  os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_LIGHT_START, *_PATHS])
  )

SLOW_S = 600
"""Limit of a slow test that names none, its fixtures included."""


def _extend_tunix() -> None:
  """Makes this clone and its packages importable uninstalled.

  google-tunix's own code waits until a test asks for it, here as in workers.
  """
  packages = [p.parent for p in _HERE.glob("packages/*/pyproject.toml")]
  sys.path += map(str, [_HERE, *packages])
  import tunix_multi_turn  # pylint: disable=g-import-not-at-top

  tunix_multi_turn.light()
  import tunix.rl  # pylint: disable=g-import-not-at-top

  ours = str(_HERE / "tunix" / "rl")
  if ours not in tunix.rl.__path__:
    tunix.rl.__path__.append(ours)


_extend_tunix()


def _begin_apart(config) -> None:
  """Lets each worker collect another part of the tests first.

  All import every test. In a fresh clone the first to import one rewrites its
  assertions and keeps the bytecode, which takes longer than importing it.
  """
  worker = getattr(config, "workerinput", None)
  folders = [pathlib.Path(arg) for arg in config.args]
  below = all(f.is_dir() and _HERE in f.resolve().parents for f in folders)
  if worker is None or not below:
    return
  parts = [
    str(part)
    for folder in folders
    for part in sorted(folder.iterdir())
    if part.match("test_*.py") or part.is_dir() and part.name[0] not in "._"
  ]
  number = int(worker["workerid"].removeprefix("gw"))
  first = number * len(parts) // worker["workercount"]
  config.args[:] = parts[first:] + parts[:first]


def pytest_configure(config) -> None:
  """Properties have no deadline: examples take longer on a busy machine.

  Of the profile that is loaded already, as Hypothesis loads one in CI, the rest
  stays as it is; tests with settings of their own start from these.
  """
  hypothesis.settings.register_profile(
    "any_machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
  )
  hypothesis.settings.load_profile("any_machine")
  _begin_apart(config)


def _scale_examples(test) -> None:
  """Tries a share of a property's examples, see `trials`; once a test."""
  import trials  # pylint: disable=g-import-not-at-top

  test = getattr(test, "__func__", test)
  if not hasattr(test, "hypothesis") or hasattr(test, "examples_scaled"):
    return
  chosen = getattr(test, "_hypothesis_internal_use_settings", None)
  chosen = chosen or hypothesis.settings.default
  test._hypothesis_internal_use_settings = hypothesis.settings(
    chosen, max_examples=trials.count(chosen.max_examples)
  )
  test.examples_scaled = True


class _SharedServers(loadfile.LoadFileScheduling):
  """Plays all files of such a beginning in one worker.

  They share a server, or the run that others are compared with.
  """

  def _split_scope(self, nodeid: str) -> str:
    for beginning in ("tests/vllm/", "tests/sglang/", "tests/run/test_pod_"):
      if nodeid.startswith(beginning):
        return beginning
    return super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  if config.getoption("dist") == "loadfile":
    return _SharedServers(config, log)
  return None


def pytest_collection_modifyitems(items) -> None:
  """Gives slow tests time, and puts their files first, the slowest foremost.

  Workers collect in orders of their own, and must agree on one.
  Begun last, one of them would run alone. How slow a file is, its limits tell.
  Properties get fewer examples.
  """
  for item in items:
    _scale_examples(getattr(item, "obj", None))
  limits: dict[pathlib.Path, float] = {}
  for item in items:
    if item.get_closest_marker("slow") and not item.get_closest_marker(
      "timeout"
    ):
      item.add_marker(pytest.mark.timeout(SLOW_S))
    if item.get_closest_marker("slow"):
      limit = item.get_closest_marker("timeout").args[0]
      limits[item.path] = max(limit, limits.get(item.path, 0))
  items.sort(key=lambda item: (-limits.get(item.path, 0), item.path))
