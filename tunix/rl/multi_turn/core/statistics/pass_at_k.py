"""Estimates how many tasks k attempts solve, from n >= k attempts at each.

Both estimators are unbiased: the mean, over all choices of k of a task's n
attempts, of whether any of them (`pass_at_k`), or each of them (`pass_hat_k`),
is a success.

Does not: treat an attempt that infrastructure ended; callers leave it out.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

Estimator = Callable[[int, int, int], float]


def pass_at_k(n: int, successes: int, k: int) -> float:
  """Chance that one of k attempts at a task succeeds.

  1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language
  Models Trained on Code", equation 1 (arXiv:2107.03374).

  Args:
    n: attempts made.
    successes: c of them.
    k: 1 <= k <= n.

  Raises:
    ValueError: naming the argument.
  """
  _check(n, successes, k)
  return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
  """Chance that all of k attempts at a task succeed: pass^k.

  C(c, k) / C(n, k): Yao et al. 2024, "tau-bench", section 3
  (arXiv:2406.12045). Arguments and errors as of `pass_at_k`.
  """
  _check(n, successes, k)
  return math.comb(successes, k) / math.comb(n, k)


def table(
  attempts: Sequence[tuple[int, int]], estimator: Estimator
) -> dict[str, dict[str, Any]]:
  """Mean estimates for k = 1, 2, 4, … and the largest k.

  Args:
    attempts: (successes, attempts) of each task.
    estimator: `pass_at_k` or `pass_hat_k`.

  Returns:
    {k as text: {"rate", "tasks"}} of the tasks with at least k attempts.
  """
  most = max((n for _, n in attempts), default=0)
  by_k: dict[str, dict[str, Any]] = {}
  for k in ks_of(most):
    rates = [estimator(n, wins, k) for wins, n in attempts if n >= k]
    by_k[str(k)] = {"rate": math.fsum(rates) / len(rates), "tasks": len(rates)}
  return by_k


def ks_of(most: int) -> list[int]:
  """1, 2, 4, … below `most`, and `most`."""
  below = [1 << i for i in range(max(0, most - 1).bit_length())]
  return [k for k in below if k < most] + ([most] if most else [])


def _check(n: int, successes: int, k: int) -> None:
  if not 0 <= successes <= n:
    raise ValueError(f"need 0 <= successes <= n, got {successes} of {n}")
  if not 1 <= k <= n:
    raise ValueError(f"need 1 <= k <= n, got k={k} of n={n}")
