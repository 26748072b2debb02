"""Scales how many cases a test of a property or of a product tries.

`TUNIX_TEST_EXAMPLES` is the share of the cases, 0 to 1: a quarter by default,
all of them in `make test-all`. conftest.py applies it to every property.
"""

import os
import random

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
