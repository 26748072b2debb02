"""Names the figures of an evaluation by which runs choose and compare.

`success_rate`, `mean_reward`, and with several attempts at a task `pass_at_K`
and `pass_hat_K`: of the first mode, or after `greedy.` or `sampled.` of that.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

from . import pass_at_k

_METRIC = re.compile(
  r"(?:(?P<mode>greedy|sampled)\.)?"
  r"(?:(?P<plain>success_rate|mean_reward)"
  r"|(?P<kind>pass_at|pass_hat)_(?P<k>[1-9]\d*))"
)


def problem(metric: str, modes: tuple[str, ...], attempts: int) -> str:
  """Why no evaluation has this metric; "" if all have."""
  match = _METRIC.fullmatch(metric)
  if not match:
    return (
      "it must be success_rate, mean_reward, pass_at_K or pass_hat_K, or one"
      " of them after greedy. or sampled."
    )
  mode = match["mode"] or modes[0]
  if mode not in modes:
    return f"eval.modes={list(modes)} has no {mode}"
  if match["k"]:
    most = attempts if mode == "sampled" else 1
    powers = pass_at_k.ks_of(most) if most > 1 else []
    if int(match["k"]) not in powers:
      return (
        f"with eval.attempts={attempts}, mode {mode} has"
        f" {match['kind']}_K for K in {powers}"
      )
  return ""


def value_of(metric: str, results: Mapping[str, Any]) -> float | None:
  """A metric of an evaluation's JSON; None where it has none."""
  match = _METRIC.fullmatch(metric)
  if match is None:
    raise ValueError(f"metric={metric!r} is none of an evaluation")
  table = results.get(match["mode"], {}) if match["mode"] else results
  if match["plain"]:
    value = table.get(match["plain"])
  else:
    of_k = table.get(f"{match['kind']}_k", {}).get(match["k"], {})
    value = of_k.get("rate")
  return None if value is None or not math.isfinite(value) else float(value)
