"""Registers the rewards that come with the package.

Each reads the task's `ground_truth` (or `answer`) where it needs one. Their
keyword-only parameters are options, see `specs`; `turns`, `math_answers` and
`llm_judge` have the others.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

from tunix.rl.multi_turn.core import arithmetic
from tunix.rl.multi_turn.rewards import reward_registry

RewardOutput = reward_registry.RewardOutput
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")


def ground_truth(task: object) -> Any:
  """Returns the task's `ground_truth` or `answer`.

  Raises:
    ValueError: the task has neither.
  """
  if isinstance(task, Mapping):
    for key in ("ground_truth", "answer"):
      if task.get(key) is not None:
        return task[key]
  raise ValueError("the task has no 'ground_truth' and no 'answer'")


def last_number(text: str) -> float | None:
  """Returns the last number written in the text, or None."""
  numbers = _NUMBER.findall(text)
  if not numbers:
    return None
  return float(numbers[-1].replace(",", "").replace("$", ""))


@reward_registry.REWARDS.register("exact_match")
def exact_match(
  task: Mapping[str, Any], action: str, *, ignore_case: bool = False
) -> RewardOutput:
  """1 when answer and truth are equal but for the space around them."""
  answer, truth = str(action).strip(), str(ground_truth(task)).strip()
  if ignore_case:
    answer, truth = answer.casefold(), truth.casefold()
  score = float(answer == truth)
  return RewardOutput(score, {"exact_match": score})


def _numeric_options(tolerance: float = 0.0) -> None:
  if not (tolerance >= 0 and math.isfinite(tolerance)):
    raise ValueError(f"tolerance={tolerance} must be >= 0 and finite")


@reward_registry.register("numeric_match")
@reward_registry.checked(_numeric_options)
def numeric_match(
  task: Mapping[str, Any], action: str, *, tolerance: float = 1e-6
) -> RewardOutput:
  """1 when the last number of the answer is the last of the truth.

  Args:
    task: Task with the truth.
    action: the answer.
    tolerance: difference that counts as equal, of the truth or of 1, whichever
      is larger.
  """
  answer = last_number(str(action))
  truth = last_number(str(ground_truth(task)))
  if truth is None:
    raise ValueError(f"ground truth {ground_truth(task)!r:.60} has no number")
  margin = tolerance * max(1.0, abs(truth))
  score = float(answer is not None and abs(answer - truth) <= margin)
  return RewardOutput(score, {"given": answer, "wanted": truth})


@reward_registry.register("calculate")
def calculate(task: Mapping[str, Any], action: str) -> RewardOutput:
  """1 when the answer's last number is the value of the task's question.

  The question, such as "what is 3 * (4 + 5)?", is worked out here; the longest
  run of it that reads as arithmetic counts.
  """
  question = str(task.get("question", ""))
  best = None
  for match in sorted(
    re.findall(r"[-+*/%().\d\s]*\d[-+*/%().\d\s]*", question),
    key=len,
    reverse=True,
  ):
    try:
      best = arithmetic.evaluate(match.strip().rstrip("."))
      break
    except ValueError:
      continue
  if best is None:
    raise ValueError(f"question {question!r:.80} holds no arithmetic")
  answer = last_number(str(action))
  tolerance = 1e-6 * max(1.0, abs(best))
  score = float(answer is not None and abs(answer - best) <= tolerance)
  return RewardOutput(score, {"given": answer, "wanted": best})


@reward_registry.register("success")
def success(
  task: object, action: object, info: Mapping[str, Any] | None = None
) -> RewardOutput:
  """1 when the environment reports the task as solved."""
  del task, action
  score = float(bool((info or {}).get("success", False)))
  return RewardOutput(score, {"success": score})


@reward_registry.register("score")
def score(
  task: object, action: object, info: Mapping[str, Any] | None = None
) -> RewardOutput:
  """Returns the score that the environment's own evaluation gave.

  Raises:
    ValueError: the environment has none.
  """
  del task, action
  evaluation = (info or {}).get("evaluation")
  if not isinstance(evaluation, Mapping) or "score" not in evaluation:
    raise ValueError(
      "the environment has no score of its own; name another reward"
    )
  return RewardOutput(float(evaluation["score"]))


@reward_registry.register("gui_state")
def gui_state(
  task: object,
  action: object,
  info: Mapping[str, Any] | None = None,
  *,
  expect: Mapping[str, Any] | None = None,
  partial: bool = False,
) -> RewardOutput:
  """1 when the gym's final state has the values that are expected, else 0.

  Args:
    task: `expect_state` in it, or in its `params`, goes before `expect`.
    action: not read.
    info: Info with the gym's evaluation.
    expect: path in the evaluation's details, such as "form.name" or "rows.0",
      -> value.
    partial: reward the share of the values that are as expected.

  Raises:
    ValueError: no value is expected, or the environment has no evaluation.
  """
  del action
  evaluation = (info or {}).get("evaluation")
  if not isinstance(evaluation, Mapping):
    raise ValueError(
      "reward 'gui_state' needs an environment that evaluates a state"
    )
  if isinstance(task, Mapping):
    params = task.get("params")
    inner = params.get("expect_state") if isinstance(params, Mapping) else None
    expect = task.get("expect_state") or inner or expect
  if not isinstance(expect, Mapping) or not expect:
    raise ValueError(
      "reward 'gui_state' expects nothing; give `expect`, or tasks with"
      " `expect_state`: path -> value"
    )
  details = evaluation.get("details", {})
  met = {path: _at(details, path) == want for path, want in expect.items()}
  share = sum(met.values()) / len(met)
  wrong = [path for path, right in met.items() if not right]
  return RewardOutput(
    share if partial else float(share == 1.0), {"wrong": wrong}
  )


_ABSENT = object()


def _at(value: object, path: str) -> Any:
  """Returns the part of nested mappings and lists at a dotted path."""
  for key in str(path).split("."):
    if isinstance(value, Mapping):
      value = value.get(key, _ABSENT)
    elif isinstance(value, (list, tuple)) and key.isdigit():
      value = value[int(key)] if int(key) < len(value) else _ABSENT
    else:
      return _ABSENT
  return value


reward_registry.REWARDS.register(
  "math", "tunix.rl.multi_turn.rewards.math_answers:MathReward"
)
reward_registry.REWARDS.register(
  "llm_judge", "tunix.rl.multi_turn.rewards.llm_judge:LLMJudge"
)


@reward_registry.register("zero")
def zero(task: object, action: object) -> RewardOutput:
  """Always 0: for environments that reward by themselves."""
  del task, action
  return RewardOutput(0.0)
