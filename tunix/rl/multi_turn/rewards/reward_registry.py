"""Registers reward functions by name and calls them.

A reward function takes `(task, action)`, the task and the policy's answer, and
returns a `RewardOutput` or a number; it may be async. One that also takes an
`info` argument gets the environment's last info. `evaluate` calls any of them.

Promises: a call returns a `RewardOutput` with a finite reward, or raises an
error that names the function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.net import concurrency

RewardFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class RewardOutput:
  """A reward and its parts.

  Attributes:
    reward: scalar.
    metadata: Further values, for logs.
  """

  reward: float
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    reward = self.reward
    if hasattr(reward, "item") and not isinstance(reward, (int, float)):
      reward = reward.item()
    if not isinstance(reward, (bool, int, float)):
      raise ValueError(
        f"a reward must be a finite number, got {self.reward!r:.60}"
      )
    object.__setattr__(
      self, "reward", reward_range.checked(reward, sys.float_info.max)
    )

  def __float__(self) -> float:
    return self.reward


REWARDS: registry.Registry[RewardFn] = registry.Registry("reward")
_REGISTRY = registry.RegistryView(REWARDS)
"""The registry by its name in the source document, as a dict."""


def register(name: str) -> Callable[[RewardFn], RewardFn]:
  """Decorator that adds a reward function.

  Raises:
    ValueError: the name is taken.
  """
  return REWARDS.register(name)


def unregister(name: str) -> bool:
  """Removes a reward function; False when there was none of that name."""
  return REWARDS.unregister(name)


def get_reward_fn(name: str, source: registry.Source = "request") -> RewardFn:
  """Returns the function of that name.

  Args:
    name: Registered, or of an operator "package.module:function".
    source: Who chose the name.

  Raises:
    ValueError: unknown, the message names the nearest one; or a path that a
      request names.
    ImportError: no such module or attribute.
  """
  return REWARDS.get(name, source)


def reward_names() -> tuple[str, ...]:
  return REWARDS.names()


def as_reward(value: Any, source: str = "reward function") -> RewardOutput:
  """Returns a reward function's result as a RewardOutput.

  Raises:
    ValueError: no finite number in it, naming `source`.
  """
  if isinstance(value, RewardOutput):
    return value
  try:
    if hasattr(value, "reward"):  # Another package's RewardOutput.
      return RewardOutput(value.reward, dict(getattr(value, "metadata", {})))
    return RewardOutput(value)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{source}: {error}") from error


@functools.lru_cache(maxsize=256)
def _takes_info(fn: RewardFn) -> bool:
  try:
    parameters = inspect.signature(fn).parameters
  except (TypeError, ValueError):
    return False
  return "info" in parameters


def checked(check: Callable[..., None]) -> Callable[[RewardFn], RewardFn]:
  """Decorates a reward function whose options are checked before a run.

  Args:
    check: takes the options that a run sets, by name; raises ValueError for a
      value that the function cannot use.
  """

  def mark(fn: RewardFn) -> RewardFn:
    vars(fn)["check_options"] = check
    return fn

  return mark


def _prepare(
  fn: RewardFn | str, info: Mapping[str, Any] | None
) -> tuple[RewardFn, dict[str, Any], str]:
  if isinstance(fn, str):
    fn = get_reward_fn(fn, "operator")
  kwargs = {}
  try:
    takes_info = _takes_info(fn)
  except TypeError:  # Not hashable.
    takes_info = _takes_info.__wrapped__(fn)
  if takes_info:
    kwargs["info"] = dict(info or {})
  name = getattr(fn, "__name__", type(fn).__name__)
  return fn, kwargs, f"reward function {name!r}"


def evaluate(
  fn: RewardFn | str,
  task: object,
  action: object,
  info: Mapping[str, Any] | None = None,
  timeout: float | None = None,
) -> RewardOutput:
  """Calls a reward function, by itself or by name, and waits."""
  fn, kwargs, name = _prepare(fn, info)
  if timeout is None and not concurrency.is_async(fn):
    value = fn(task, action, **kwargs)
    if not inspect.isawaitable(value):
      return as_reward(value, name)
    value = concurrency.call(lambda: value, what=name)
  else:
    value = concurrency.call(
      fn, task, action, seconds=timeout, what=name, **kwargs
    )
  return as_reward(value, name)


async def evaluate_async(
  fn: RewardFn | str,
  task: object,
  action: object,
  info: Mapping[str, Any] | None = None,
  timeout: float | None = 30.0,
) -> RewardOutput:
  """`evaluate` for the event loop: sync functions run in a thread.

  Raises:
    concurrency.DeadlineExceeded: after `timeout` seconds.
  """
  fn, kwargs, name = _prepare(fn, info)
  value = await concurrency.acall(
    fn, task, action, seconds=timeout, what=name, **kwargs
  )
  return as_reward(value, name)


def combine_rewards(weights: Mapping[str, float]) -> RewardFn:
  """Returns a weighted sum of rewards; metadata keep each one's name.

  The sum is a plain function if all of its parts are.

  Args:
    weights: registered name or "package.module:function" -> weight.

  Raises:
    ValueError: an unknown name, naming the nearest one.
    ImportError: no such module or attribute.
  """
  return combine_parts(
    {name: (get_reward_fn(name, "operator"), w) for name, w in weights.items()}
  )


def combine_parts(parts: Mapping[str, tuple[RewardFn, float]]) -> RewardFn:
  """`combine_rewards` of functions: name -> (function, weight)."""

  def total(outputs: Mapping[str, RewardOutput]) -> RewardOutput:
    metadata: dict[str, Any] = {
      name: {**out.metadata, "reward": out.reward, "weight": parts[name][1]}
      for name, out in outputs.items()
    }
    value = sum(parts[name][1] * out.reward for name, out in outputs.items())
    return RewardOutput(value, metadata)

  def combined(
    task: object, action: object, info: Mapping[str, Any] | None = None
  ) -> RewardOutput:
    return total(
      {
        name: evaluate(fn, task, action, info)
        for name, (fn, _) in parts.items()
      }
    )

  async def combined_async(
    task: object, action: object, info: Mapping[str, Any] | None = None
  ) -> RewardOutput:
    return total(
      {
        name: await evaluate_async(fn, task, action, info)
        for name, (fn, _) in parts.items()
      }
    )

  is_async = any(concurrency.is_async(fn) for fn, _ in parts.values())
  return combined_async if is_async else combined
