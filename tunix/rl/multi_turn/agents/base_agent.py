"""Defines agents, which keep one episode's messages and steps.

The engine drives it: `reset`, `update_from_env` with the first observation,
then `chat_completions` to the model, `update_from_model` with its text, the
action to the environment, `update_from_env` with the outcome, and so on.
Methods may be sync or async.
"""

from __future__ import annotations

import abc
from typing import Any, Mapping

from tunix.rl.multi_turn.core import trajectory


class BaseAgent(abc.ABC):
  """One agent plays one episode at a time."""

  @property
  @abc.abstractmethod
  def chat_completions(self) -> list[trajectory.Message]:
    """Messages for the model, OpenAI format.

    From turn to turn the same message objects, with new ones at the end; an
    agent that rewrites its history returns other objects where it did.
    """

  @property
  @abc.abstractmethod
  def trajectory(self) -> trajectory.Trajectory:
    """The episode so far."""

  @abc.abstractmethod
  def update_from_env(
      self,
      observation: Any,
      reward: float,
      done: bool,
      info: Mapping[str, Any] | None = None,
  ) -> None:
    """Takes in the environment's answer; the first time, the task."""

  @abc.abstractmethod
  def update_from_model(self, response: str) -> trajectory.Action:
    """Takes in the model's text, appends a step, returns its action."""

  @abc.abstractmethod
  def reset(self) -> None:
    """Forgets the episode."""

  @property
  def current_step(self) -> trajectory.Step | None:
    """The newest step, None before the model's first response."""
    steps = self.trajectory.steps
    return steps[-1] if steps else None
