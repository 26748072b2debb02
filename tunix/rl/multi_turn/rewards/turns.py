"""Registers the rewards that judge single turns; see `specs` for the kinds.

Each takes the task and a `Step`, and returns a number or None for a turn that
it leaves out. Their mean over the turns is the episode's reward, or with `per:
turn` each turn gets its own.
"""

from __future__ import annotations

from typing import Any, Callable, Literal, Mapping

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.rewards import patterns
from tunix.rl.multi_turn.rewards import reward_registry


def _format_options(pattern: str = "", parsed: bool = True) -> None:
  del parsed
  patterns.check(pattern, "pattern")


def _at_least(lowest: Mapping[str, int]) -> Callable[..., None]:
  """Returns a check of numbers, by their least values."""

  def check(**options: Any) -> None:
    for name, low in lowest.items():
      if options.get(name, low) < low:
        raise ValueError(f"{name}={options[name]} must be >= {low}")

  return check


@reward_registry.register("format")
@reward_registry.checked(_format_options)
def format_(
  task: Any, step: trajectory.Step, *, pattern: str = "", parsed: bool = True
) -> float | None:
  """1 when a turn's text has the form that is asked for, else 0.

  A summary, which has a form of its own, is left out.

  Args:
    task: not read.
    step: the turn.
    pattern: regular expression that the text must hold; "" for none.
    parsed: whether the turn's calls must parse, and its text must not have
      been cut off.

  Raises:
    ValueError: no regular expression, or one that takes too long.
  """
  del task
  info = step.info or {}
  if info.get("summary"):
    return None
  if parsed and any(
    info.get(key)
    for key in ("parse_error", "parse_errors", "response_truncated")
  ):
    return 0.0
  if not pattern:
    return 1.0
  return float(bool(patterns.found(pattern, step.model_response, "pattern")))


@reward_registry.register("tool_success")
def tool_success(task: object, step: trajectory.Step) -> float | None:
  """Share of a turn's tool calls that gave no error; None without a call."""
  del task
  info = step.info or {}
  calls, failed = info.get("tool_calls"), info.get("tool_errors", 0)
  if not isinstance(calls, int) or calls < 1:
    return None
  return 1.0 - min(int(failed), calls) / calls


@reward_registry.register("length_penalty")
@reward_registry.checked(_at_least({"limit": 0, "ramp": 1}))
def length_penalty(
  task: object, step: trajectory.Step, *, limit: int = 1000, ramp: int = 1000
) -> float:
  """0 up to `limit` characters of a turn's text, falling to -1.

  Args:
    task: not read.
    step: the turn.
    limit: characters that cost nothing.
    ramp: characters over it at which the penalty is -1.

  Raises:
    ValueError: a limit below 0, or a ramp below 1.
  """
  del task
  if limit < 0 or ramp < 1:
    raise ValueError(
      f"length_penalty needs limit >= 0 and ramp >= 1, got {limit}, {ramp}"
    )
  return -min(1.0, max(0, len(step.model_response) - limit) / ramp)


@reward_registry.register("repetition_penalty")
@reward_registry.checked(_at_least({"n": 1}))
def repetition_penalty(
  task: object,
  step: trajectory.Step,
  *,
  n: int = 4,
  unit: Literal["words", "characters"] = "words",
) -> float:
  """Minus the share of a turn's n-grams that stood in it before.

  Args:
    task: not read.
    step: the turn.
    n: words, or characters, that count as one repetition.
    unit: Unit of `n`; characters for scripts without spaces.

  Raises:
    ValueError: n below 1.
  """
  del task
  if n < 1:
    raise ValueError(f"repetition_penalty needs n >= 1, got {n}")
  text = step.model_response
  items: Any = text.split() if unit == "words" else text
  grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
  if not grams:
    return 0.0
  return len(set(grams)) / len(grams) - 1.0
