"""Test session: runs on CPU, finds the package also when not installed."""

import os
import pathlib

import hypothesis
import pytest
import trials

_HERE = pathlib.Path(__file__).resolve().parent

# Before anything imports JAX. An explicit choice of the caller wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests and the processes they start compile many equal programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(_HERE / ".pytest_cache" / "jax"),
)
# Also what compiles fast: it is compiled by every run and engine of the tests.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


SLOW_S = 600
"""Limit of a slow test that names none, its fixtures included."""


def _extend_tunix() -> None:
  """Makes `tunix.rl.multi_turn` of this clone importable uninstalled."""
  import tunix.rl  # pylint: disable=g-import-not-at-top

  ours = str(_HERE / "tunix" / "rl")
  if ours not in tunix.rl.__path__:
    tunix.rl.__path__.append(ours)


_extend_tunix()


def pytest_configure(config) -> None:
  """Scales the examples of properties: a quarter; all beside slow tests."""
  slow = config.getoption("markexpr", "") != "not slow"
  os.environ.setdefault("TUNIX_TEST_EXAMPLES", "1" if slow else "0.25")
  # How long an example takes says how busy the machine is, not what is wrong.
  # Of what is loaded already, as by Hypothesis in CI, the rest stays as it is;
  # and tests that have settings of their own begin with these.
  hypothesis.settings.register_profile(
      "any_machine",
      max_examples=trials.count(hypothesis.settings.default.max_examples),
      deadline=None,
      suppress_health_check=[hypothesis.HealthCheck.too_slow],
  )
  hypothesis.settings.load_profile("any_machine")


def pytest_collection_modifyitems(items) -> None:
  """Gives slow tests time, and puts their files first.

  Begun last, one of them would run alone.
  """
  slow = {item.path for item in items if item.get_closest_marker("slow")}
  for item in items:
    if item.get_closest_marker("slow") and not item.get_closest_marker(
        "timeout"
    ):
      item.add_marker(pytest.mark.timeout(SLOW_S))
  items.sort(key=lambda item: item.path not in slow)
