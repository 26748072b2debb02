"""Scores executions with validators: parts of a verdict, each with a weight.

A gym's own verdict is the validator "state". A task may name more of them in
`params["validators"]`, a list of `{"type": …, "weight": …, and its settings}`;
each type is a registered function. The score of an execution is the weighted
mean of its validators' scores, and it succeeds when all of them pass; with the
state alone both are the gym's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base

from cua_gyms.gym_server import schemas


@dataclasses.dataclass(frozen=True)
class Submission:
  """A client's submission at the end.

  Attributes:
    answer_text: the policy's answer, "" for none.
    context_text: further text of the policy.
    facts: values by name.
    data: the request's execution_data.
  """

  answer_text: str = ""
  context_text: str = ""
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Check = Callable[
  [base.Evaluation, Submission, Mapping[str, Any]], tuple[float, bool]
]
"""(the gym's verdict, a submission, settings) -> (score, passed)."""

CHECKS: registry.Registry[Check] = registry.Registry("validator")


@CHECKS.register("state")
def state(verdict, submission, settings):
  """The gym's own verdict."""
  del submission, settings
  return verdict.score, verdict.success


@CHECKS.register("answer")
def answer(verdict, submission, settings):
  """The answer equals one of `expected`, or (`contains`) holds one."""
  del verdict
  expected = settings.get("expected", "")
  options = expected if isinstance(expected, (list, tuple)) else [expected]
  text = " ".join(submission.answer_text.casefold().split())
  accepted = [" ".join(str(o).casefold().split()) for o in options]
  if settings.get("contains"):
    passed = any(w in text for w in accepted)
  else:
    passed = text in accepted
  return float(passed), passed


@CHECKS.register("facts")
def facts(verdict, submission, settings):
  """The share of `expected` facts that were submitted with their values."""
  del verdict
  expected = settings.get("expected") or {}
  right = sum(submission.facts.get(k) == v for k, v in expected.items())
  score = right / len(expected) if expected else 1.0
  return score, right == len(expected)


def specs(task: base.Task) -> list[dict[str, Any]]:
  """Returns a task's validators with ids and weights; by default the state.

  Raises:
    ValueError: naming the wrong entry.
  """
  entries = task.params.get("validators")
  if entries is None:
    return [{"id": "state", "type": "state", "weight": 1.0}]
  out = []
  for i, one in enumerate(entries):
    kind = one.get("type") if isinstance(one, Mapping) else None
    if not isinstance(kind, str) or kind not in CHECKS:
      wrong = registry.unknown_name("validator", kind, CHECKS.names())
      raise ValueError(f"validators[{i}].type: {wrong}")
    weight = one.get("weight", 1.0)
    if (
      isinstance(weight, bool)
      or not isinstance(weight, (int, float))
      or not (0 <= weight < math.inf)
    ):
      raise ValueError(
        f"validators[{i}].weight={weight!r} must be a number >= 0"
      )
    out.append({"id": kind, **one, "weight": float(weight)})
  if not sum(one["weight"] for one in out) > 0:
    raise ValueError("validators: their weights add up to 0")
  return out


def judge(
  task: base.Task, verdict: base.Evaluation, submission: Submission
) -> schemas.Result:
  """Scores by the weighted mean of the task's validators; success: all pass.

  Raises:
    ValueError: the task's validators are wrong.
  """
  results: list[schemas.ValidatorResult] = []
  for one in specs(task):
    score, passed = CHECKS.get(one["type"])(verdict, submission, one)
    results.append(
      {
        "id": str(one["id"]),
        "type": one["type"],
        "pass": bool(passed),
        "score": float(score),
        "weight": one["weight"],
      }
    )
  return {
    "score": _mean(results),
    "success": all(v["pass"] for v in results),
    "validators": results,
  }


def _mean(results: Sequence[schemas.ValidatorResult]) -> float:
  if len(results) == 1:
    return results[0]["score"]  # To the last bit.
  weights = sum(v["weight"] for v in results)
  return sum(v["weight"] * v["score"] for v in results) / weights
