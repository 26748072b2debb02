"""Compares two evaluations of the same tasks, task by task.

Pairing removes the variance between tasks, which two intervals side by side do
not. Tasks are paired by mode, place and id; a task that one of the two lacks,
or has no valid attempt at, is counted and left out.

Does not: read files.
"""

from __future__ import annotations

import collections
import math
from typing import Any, Iterable, Mapping

Outcome = Mapping[str, Any]
"""An episode: `mode`, `index`, `task_id`, `family`, `success`, `valid`."""

_SHOWN = 1000


def compare(
  own_outcomes: Iterable[Outcome], other_outcomes: Iterable[Outcome]
) -> dict[str, Any]:
  """The JSON of a comparison, by mode.

  Returns:
    {mode: {"tasks", "unpaired", "rate", "their_rate", "difference" (ours -
    theirs, mean over tasks), "interval" (95 %, normal, of the paired
    differences), "better", "worse", "equal", "p" (two-sided exact sign test of
    the tasks that changed; with one attempt each McNemar's), "changed":
    [{"index", "task_id", "family", "rate", "their_rate"}]}}; `interval` is None
    with fewer than two tasks.

  Raises:
    ValueError: they have no task in common.
  """
  own, other = _rates(own_outcomes), _rates(other_outcomes)
  by_mode: dict[str, Any] = {}
  for mode in dict.fromkeys(key[0] for key in own):
    keys = [k for k in own if k[0] == mode]
    both = [k for k in keys if k in other]
    if both:
      missing = len(keys) - len(both)
      missing += sum(k[0] == mode and k not in own for k in other)
      by_mode[mode] = {"unpaired": missing, **_of_mode(both, own, other)}
  if not by_mode:
    raise ValueError(
      "they have no task in common: mode, place and task id are compared;"
      " evaluate the same gym, tasks, eval.seed and eval.modes"
    )
  return by_mode


def _of_mode(keys: list[Any], own: Any, other: Any) -> dict[str, Any]:
  differences = [own[k][0] - other[k][0] for k in keys]
  n = len(keys)
  mean = math.fsum(differences) / n
  interval = None
  if n > 1:
    squares = math.fsum((d - mean) ** 2 for d in differences)
    half = 1.96 * math.sqrt(squares / (n - 1) / n)
    interval = [max(-1.0, mean - half), min(1.0, mean + half)]
  better = sum(d > 0 for d in differences)
  worse = sum(d < 0 for d in differences)
  changed = [
    {
      "index": k[1],
      "task_id": k[2],
      "family": own[k][1],
      "rate": own[k][0],
      "their_rate": other[k][0],
    }
    for k in keys
    if own[k][0] != other[k][0]
  ]
  return {
    "tasks": n,
    "rate": math.fsum(own[k][0] for k in keys) / n,
    "their_rate": math.fsum(other[k][0] for k in keys) / n,
    "difference": mean,
    "interval": interval,
    "better": better,
    "worse": worse,
    "equal": n - better - worse,
    "p": sign_test(better, worse),
    "changed": changed[:_SHOWN],
  }


def sign_test(better: int, worse: int) -> float:
  """Two-sided exact p-value that a change is as likely for better as for worse.

  McNemar's exact test: twice the binomial tail, 1 at most.
  """
  n, k = better + worse, min(better, worse)
  tail = sum(math.comb(n, i) for i in range(k + 1))
  return min(1.0, 2.0 * tail / 2**n)


def _rates(
  outcomes: Iterable[Outcome],
) -> dict[tuple[str, int, str], tuple[float, str]]:
  """Task -> (its success rate, its family)."""
  successes: dict[Any, list[bool]] = collections.defaultdict(list)
  families: dict[Any, str] = {}
  for one in outcomes:
    if one["valid"]:
      key = (one["mode"], one["index"], one["task_id"])
      successes[key].append(bool(one["success"]))
      families[key] = one["family"]
  return {
    k: (sum(wins) / len(wins), families[k])
    for k, wins in sorted(successes.items())
  }
