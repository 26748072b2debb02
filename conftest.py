"""Test session: runs on CPU, finds the package also when not installed."""

import os
import pathlib

import hypothesis
import pytest

_HERE = pathlib.Path(__file__).resolve().parent

# Before anything imports JAX. An explicit choice of the caller wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests and the processes they start compile many equal programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(_HERE / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("MPLBACKEND", "Agg")


# How long an example takes says how busy the machine is, not what is wrong. Of
# what is loaded already, as by Hypothesis in CI, the rest stays as it is; and
# tests that have settings of their own begin with these.
hypothesis.settings.register_profile(
    "any_machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any_machine")

FULL = os.environ.get("TUNIX_TEST_EXAMPLES") == "full"
"""Whether properties are tried on all the examples that their tests name."""

FEWER = 3
"""Otherwise on one of so many, and on 20 at least."""

SLOW_S = 600
"""Limit of a slow test that names none, its fixtures included."""


def _extend_tunix() -> None:
  """Makes `tunix.rl.multi_turn` of this clone importable uninstalled."""
  import tunix.rl  # pylint: disable=g-import-not-at-top

  ours = str(_HERE / "tunix" / "rl")
  if ours not in tunix.rl.__path__:
    tunix.rl.__path__.append(ours)


_extend_tunix()


def _try_fewer_examples(test) -> None:
  """Scales a Hypothesis test's `max_examples`, once."""
  test = getattr(test, "__func__", test)
  chosen = getattr(test, "_hypothesis_internal_use_settings", None)
  if FULL or chosen is None or hasattr(test, "examples_scaled"):
    return
  fewer = max(min(chosen.max_examples, 20), chosen.max_examples // FEWER)
  test._hypothesis_internal_use_settings = hypothesis.settings(
      chosen, max_examples=fewer
  )
  test.examples_scaled = True


def pytest_collection_modifyitems(items) -> None:
  """Gives slow tests time, and puts their files first.

  Begun last, one of them would run alone. Properties get fewer examples.
  """
  for item in items:
    _try_fewer_examples(getattr(item, "obj", None))
  slow = {item.path for item in items if item.get_closest_marker("slow")}
  for item in items:
    if item.get_closest_marker("slow") and not item.get_closest_marker(
        "timeout"
    ):
      item.add_marker(pytest.mark.timeout(SLOW_S))
  items.sort(key=lambda item: item.path not in slow)
