"""Adapts environments whose observation is one string.

The second family of environments: `await reset() -> str`, lines "role: text",
and `await step(text) -> (str, reward, done, info)`. `TextEnvAdapter` makes one
a `base_env.BaseEnv`.
"""

from __future__ import annotations

import abc
from typing import Any, Iterable

from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.net import concurrency


class BaseEnv(abc.ABC):
  """One environment plays one episode at a time."""

  @abc.abstractmethod
  async def reset(self) -> str:
    """Starts an episode and returns its observation."""

  @abc.abstractmethod
  async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
    """Takes the model's text: (next observation, reward, done, info)."""

  async def close(self) -> None:
    """Frees the environment's resources; idempotent."""


TextEnv = BaseEnv


def transcript(turns: Iterable[tuple[str, str]]) -> str:
  """One "role: text" line a turn."""
  return "\n".join(f"{role}: {text}" for role, text in turns)


class TextEnvAdapter(base_env.BaseEnv):
  """A text environment as an ordinary one.

  The observation's lines become one user message; an action's text is what
  the policy answered.
  """

  def __init__(self, env: BaseEnv, max_steps: int = 10):
    if max_steps < 1:
      raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    self.env = env
    self.max_steps = max_steps
    self.step_count = 0

  async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    self.step_count = 0
    return {"question": await self._call("reset")}, {}

  async def step(self, action: object) -> base_env.StepResult:
    if not isinstance(action, str) and hasattr(action, "action"):
      action = action.action
    if not isinstance(action, str):
      raise ValueError(
        "a text environment takes the policy's text, got"
        f" {type(action).__name__}"
      )
    self.step_count += 1
    text, reward, ended, info = await self._call("step", action)
    observation = {"text": text} if text else {}
    ended = bool(ended) or self.step_count >= self.max_steps
    return observation, float(reward), ended, dict(info)

  async def close(self) -> None:
    if getattr(self.env, "close", None) is not None:
      await self._call("close")

  async def _call(self, name: str, *args: Any) -> Any:
    """Calls the environment, sync code in a thread."""
    what = f"{type(self.env).__name__}.{name}"
    return await concurrency.acall(getattr(self.env, name), *args, what=what)
