"""Converts results of environments, agents and rewards to our types.

Refuses others with a message that names the method, the value and the expected
type. Does not: know deadlines.
"""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

import numpy as np
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency


class NoRewardError(TypeError):
  """A reward without a number in it."""


def bounded(number: object, limit: float) -> float:
  """The reward of a turn or an episode.

  Raises:
    RewardRangeError: it is not finite, or larger than `limit`.
  """
  return reward_range.checked(number, limit, "collect.max_reward")


def total(rewards: Iterable[float], limit: float) -> float:
  """`reward_equality.total` of an episode's rewards, `bounded`."""
  return bounded(reward_equality.total(rewards), limit)


class Agent(Protocol):
  """The part of an agent that is called; each method sync or async.

  `agents.BaseAgent` is one, and so are upstream's `tunix.rl.agentic` agents.
  A `trajectory` with `steps` and a `task` is read where an agent has one.
  """

  @property
  def chat_completions(self) -> Any: ...

  def reset(self) -> Any: ...

  def update_from_env(
    self, observation: object, reward: object, done: object, info: object
  ) -> Any: ...

  def update_from_model(self, response: object) -> Any: ...


class Env(Protocol):
  """The part of an environment that is called; each method sync or async.

  `environments.BaseEnv` is one, and so are upstream's environments. Read where
  an environment has them: `evaluate`, `final_reward_fn`, `task`, and
  `runs_inline`, which allows calls on the event loop itself.
  """

  def reset(self) -> Any: ...

  def step(self, action: object) -> Any: ...

  def close(self) -> Any: ...


def reward_value(
  value: Any, limit: float = reward_range.MAX_REWARD
) -> tuple[float, dict[str, Any]]:
  """(reward, details) of a number, a RewardOutput or an Evaluation.

  Raises:
    NoRewardError: It has another form.
    RewardRangeError: not finite, or larger than `limit`.
  """
  details: dict[str, Any] = {}
  number = value
  if hasattr(value, "score") and hasattr(value, "success"):
    details = {**dict(value.details or {}), "success": bool(value.success)}
    number = value.score
  elif hasattr(value, "reward"):
    details = dict(getattr(value, "metadata", None) or {})
    number = value.reward
  if isinstance(number, np.ndarray) and number.size == 1:
    number = number.item()
  if not isinstance(number, (numbers.Real, np.bool_)):
    raise NoRewardError(
      "a reward must be a finite number, a RewardOutput or an Evaluation,"
      f" got {type(value).__name__}"
    )
  return bounded(number, limit), details


def mend_rewards(
  steps: Sequence[Any], rewards: Sequence[float], limit: float
) -> str | None:
  """Replaces rewards of steps that an agent has made unusable.

  Args:
    steps: An agent's steps.
    given: the environment's rewards of the first of them.
    limit: largest absolute reward of a step, and of their sum.

  Returns:
    The error, None when all was well.
  """
  try:
    total([bounded(step.reward, limit) for step in steps], limit)
    return None
  except Exception as e:  # pylint: disable=broad-except
    for k, step in enumerate(steps):
      step.reward = rewards[k] if k < len(rewards) else 0.0
    return concurrency.describe(e)


def reset_result(result: object) -> tuple[Any, dict[str, Any]]:
  """(observation, info) of what `env.reset` returned."""
  if not isinstance(result, tuple) or len(result) != 2:
    raise TypeError(
      f"reset() must return (observation, info), got {_shape(result)}"
    )
  observation, info = result
  return observation, _info(info, "reset")


def step_result(
  result: object, limit: float = reward_range.MAX_REWARD
) -> tuple[Any, float, bool, dict[str, Any]]:
  """(observation, reward, done, info) of what `env.step` returned.

  A RewardOutput's metadata goes into info under "reward_metadata".

  Raises:
    NoRewardError, RewardRangeError: as `reward_value`.
    TypeError: not what a step returns.
  """
  if not isinstance(result, tuple) or len(result) != 4:
    raise TypeError(
      "step() must return (observation, reward, done, info), got"
      f" {_shape(result)}"
    )
  observation, reward, done, info = result
  details: dict[str, Any] = {}
  if type(reward) is not float or not abs(reward) <= limit:
    reward, details = reward_value(reward, limit)
  if type(done) is not bool:
    if not isinstance(done, (np.bool_, numbers.Integral)) or done not in (0, 1):
      raise TypeError(f"step() must return done as a bool, got {done!r}")
    done = bool(done)
  info = _info(info, "step")
  if details:
    info = {**info, "reward_metadata": details}
  return observation, reward, done, info


def env_action(action: object) -> Any:
  """The argument of `env.step`.

  Our environments take the agent's `Action`; upstream's engine hands its
  environments the payload of its own Action class, [] for None.
  """
  if isinstance(action, trajectory.Action):
    return action
  if type(action).__name__ == "Action" and hasattr(action, "action"):
    return [] if action.action is None else action.action
  return action


def env_evaluation(env: Env) -> Callable[[], Any] | None:
  """`env.evaluate` if the environment can be asked for its verdict."""
  evaluate = getattr(env, "evaluate", None)
  if not callable(evaluate):
    return None
  try:
    parameters = inspect.signature(evaluate).parameters.values()
  except (TypeError, ValueError):
    return None
  needed = [p for p in parameters if _is_required(p)]
  return None if needed else evaluate


_BY_NAME = {
  "trajectory": "trajectory",
  "task": "task",
  "env": "env",
  "action": "response",
  "response": "response",
  "answer": "response",
}


def reward_arguments(
  fn: Callable[..., Any],
  episode: trajectory.Trajectory,
  last_step: Any,
  env: Env,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Arguments of a final reward function, by its signature.

  Known names get their values. Of functions with other names, one argument is
  the trajectory, two are (task, last response).
  """
  values = {
    "trajectory": episode,
    "task": episode.task,
    "env": env,
    "response": last_step.model_response,
  }
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    return (episode,), {}
  required = [p for p in parameters if _is_required(p)]
  named = [
    p
    for p in parameters
    if p.name in _BY_NAME
    and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  if all(p.name in _BY_NAME for p in required) and all(
    p.kind is not p.POSITIONAL_ONLY for p in required
  ):
    if not required and not named and _takes_positional(parameters):
      return (episode,), {}
    return (), {p.name: values[_BY_NAME[p.name]] for p in named}
  positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
  if len(required) != len(positional) or len(positional) > 2:
    raise TypeError(
      f"final_reward_fn {getattr(fn, '__name__', fn)!r} needs arguments the"
      f" engine does not know: {', '.join(p.name for p in required)}; use"
      " trajectory, task, env or response"
    )
  if len(positional) == 1:
    return (episode,), {}
  return (episode.task, last_step.model_response), {}


def credit(
  steps: Sequence[Any], value: object, limit: float = reward_range.MAX_REWARD
) -> dict[str, Any]:
  """Adds a final reward to an episode's steps; returns its details.

  The last step gets it, apart from what `value.turns` gives to each step. Its
  details join those of an earlier final reward, and so do their `parts`.

  Raises:
    NoRewardError, RewardRangeError: as `reward_value`, of the whole, of a turn
      and of the episode's sum.
    ValueError: more turns than steps.
  """
  reward, details = reward_value(value, limit)
  turns = [reward_value(t, limit)[0] for t in getattr(value, "turns", ())]
  total((reward, *(float(step.reward) for step in steps)), limit)
  if len(turns) > len(steps):
    raise ValueError(
      f"a reward for {len(turns)} turns; the episode has {len(steps)}"
    )
  for step, share in zip(steps, turns):
    step.reward = float(step.reward) + float(share)
  last = steps[-1]
  last.reward = float(last.reward) + reward - math.fsum(turns)
  if details:
    info = last.info or {}
    earlier = info.get("final_reward")
    joined = _joined(earlier, details)
    if "parts" in details:
      joined["parts"] = _joined(_parts(earlier), details["parts"])
    last.info = {**info, "final_reward": joined}
  return details


def _joined(earlier: object, later: object) -> Any:
  if isinstance(earlier, Mapping) and isinstance(later, Mapping):
    return {**earlier, **later}
  return later


def _parts(details: object) -> Any:
  return details.get("parts") if isinstance(details, Mapping) else None


_PLAIN = (str, float, int, bool, type(None))
_MAX_DEPTH = 100


def writable(value: object) -> Any:
  """`value`, its parts that cannot be written as JSON shown as "<Type>".

  Typed values that `trajectory.encode` writes (ImageRef, ToolCall, …) and
  small arrays stay what they are. A dict stays one, whatever is in it.
  """
  if type(value) in _PLAIN:
    return value
  if type(value) is trajectory.Action and type(value.action) in _PLAIN:
    return value
  if type(value) is dict:
    return {str(k): _entry(v) for k, v in value.items()}
  return _entry(value)


def _entry(value: object) -> Any:
  try:
    return _writable(value, 0)
  except Exception:  # pylint: disable=broad-except
    # It holds itself, or reading it runs code that fails.
    return _as_text(value)


def _writable(value: Any, depth: int) -> Any:
  if type(value) in _PLAIN:
    return value
  if depth > _MAX_DEPTH:
    raise RecursionError
  depth += 1
  if isinstance(value, Mapping):
    return {str(k): _writable(v, depth) for k, v in value.items()}
  if type(value) in (list, tuple):
    return type(value)([_writable(v, depth) for v in value])
  if isinstance(value, trajectory.Action):
    return trajectory.Action(_writable(value.action, depth))
  if isinstance(value, np.ndarray) and value.dtype.kind not in "biufU":
    return _as_text(value)
  try:
    trajectory.encode(value)
  except Exception:  # pylint: disable=broad-except
    return _as_text(value)
  return value


def _as_text(value: object) -> str:
  return f"<{type(value).__name__}>"


def is_parse_error(e: BaseException) -> bool:
  """Whether an agent raised it because the policy's text cannot be parsed."""
  return any("ParseError" in t.__name__ for t in type(e).__mro__)


def convert_step(step: object) -> trajectory.Step:
  """Our Step from any object with the source document's fields."""
  if isinstance(step, trajectory.Step):
    return step
  action: Any = getattr(step, "action", None)
  if type(action).__name__ == "Action" and hasattr(action, "action"):
    action = trajectory.Action(action.action)
  return trajectory.Step(
    chat_completions=list(getattr(step, "chat_completions", None) or []),
    thought=getattr(step, "thought", "") or "",
    action=action,
    observation=getattr(step, "observation", None),
    model_response=getattr(step, "model_response", "") or "",
    reward=reward_value(getattr(step, "reward", 0.0))[0],
    done=bool(getattr(step, "done", False)),
    info=dict(getattr(step, "info", None) or {}),
  )


def _info(info: object, method: str) -> dict[str, Any]:
  if info is None:
    return {}
  if type(info) is dict:
    return info
  if not isinstance(info, Mapping):
    raise TypeError(
      f"{method}() must return info as a dict, got {type(info).__name__}"
    )
  return dict(info)


def _shape(result: object) -> str:
  if isinstance(result, tuple):
    return f"a tuple of {len(result)}"
  return type(result).__name__


def _is_required(p: inspect.Parameter) -> bool:
  return p.default is p.empty and p.kind in (
    p.POSITIONAL_ONLY,
    p.POSITIONAL_OR_KEYWORD,
    p.KEYWORD_ONLY,
  )


def _takes_positional(parameters: list[inspect.Parameter]) -> bool:
  return any(p.kind is p.VAR_POSITIONAL for p in parameters)
