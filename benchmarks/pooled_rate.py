"""Success of several runs as one rate, for the tables of benchmarks."""

from __future__ import annotations

from typing import Iterable

from tunix.rl.multi_turn.core.statistics import success_rates


def text(counts: Iterable[tuple[int, int]]) -> str:
  """Returns the pooled rate with its 95 % interval, as "0.50 [0.24, 0.76]".

  Args:
    counts: (successes, episodes) of each run; none gives a dash.
  """
  pairs = list(counts)
  won, of = (sum(pair[i] for pair in pairs) for i in (0, 1))
  if not of:
    return "–"
  low, high = success_rates.wilson_interval(won, of)
  return f"{won / of:.2f} [{low:.2f}, {high:.2f}]"
