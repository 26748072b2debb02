"""Scales how many cases a test of a property or of a product tries.

`TUNIX_TEST_EXAMPLES` is the share of the cases, 0 to 1: a quarter by default,
all of them in `make test-all`. conftest.py applies it to every property.
"""

import os
import random

import pytest

_LEAST = 10


def share() -> float:
  return float(os.environ.get("TUNIX_TEST_EXAMPLES", "0.25"))


def count(full: int) -> int:
  """Examples of a property that has `full` of them at most."""
  return min(full, max(_LEAST, round(full * share())))


def some(cases) -> list:
  """A fixed sample of the cases, in their order."""
  cases = list(cases)
  chosen = random.Random(0).sample(range(len(cases)), count(len(cases)))
  return [cases[i] for i in sorted(chosen)]


def by_default(kept, cases, ids=None, unlike=()) -> list:
  """Cases of a parametrised test: `kept` in the default run, the others slow.

  Args:
    kept: Part of `cases`; they walk the path of each.
    cases: arguments, a tuple of them where the test takes several.
    ids: a name of each case; None where it names itself.
    unlike: The slow cases that `.ci/run` tries, where the others resemble them
      or `kept`; `make test-all` tries all.
  """
  cases, kept = list(cases), list(kept)
  absent = [case for case in kept if case not in cases]
  if absent:
    raise ValueError(f"by_default() keeps {absent}, which are no cases")
  tried = cases if share() >= 1 else [*kept, *unlike]
  return [
    pytest.param(
      *(case if isinstance(case, tuple) else (case,)),
      marks=() if case in kept else pytest.mark.slow,
      id=None if ids is None else ids[place],
    )
    for place, case in enumerate(cases)
    if case in tried
  ]


def in_full(reason: str):
  """Marks what only `make test-all` tries.

  Args:
    reason: What `.ci/run` tries in its place.
  """
  return pytest.mark.skipif(share() < 1, reason=f"make test-all; here {reason}")
