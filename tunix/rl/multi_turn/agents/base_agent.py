"""Defines agents, which keep one episode's messages and steps.

The collector drives an agent: `reset`, `update_from_env` with the first
observation, then in each turn `chat_completions` to the model,
`update_from_model` with its text, the action to the environment and
`update_from_env` with the outcome. Methods may be sync or async.
"""

from __future__ import annotations

import abc
from typing import Any, Mapping

from tunix.rl.multi_turn.core import trajectory as trajectory_lib


class BaseAgent(abc.ABC):
  """One agent plays one episode at a time."""

  @property
  @abc.abstractmethod
  def chat_completions(self) -> list[trajectory_lib.Message]:
    """Messages for the model, OpenAI format.

    Each turn returns the same message objects with new ones at the end; an
    agent that rewrites its history returns new objects from there on.
    """

  @property
  @abc.abstractmethod
  def trajectory(self) -> trajectory_lib.Trajectory:
    """The episode so far."""

  @abc.abstractmethod
  def update_from_env(
    self,
    observation: object,
    reward: float,
    done: bool,
    info: Mapping[str, Any] | None = None,
  ) -> None:
    """Records the environment's answer; the first observation is the task."""

  @abc.abstractmethod
  def update_from_model(self, response: str) -> trajectory_lib.Action:
    """Parses the model's text, appends a step, returns its action."""

  @abc.abstractmethod
  def reset(self) -> None:
    """Drops the episode's messages and steps."""

  def summary_request(
    self, context_tokens: int
  ) -> list[trajectory_lib.Message] | None:
    """Returns messages that ask the policy for a summary; None for no need.

    Called before each turn. An answer goes to `update_from_summary`, which
    appends a step without an action; its class then has `summary_tokens`, the
    longest answer.

    Args:
      context_tokens: Tokens of the last turn's prompt and reply; 0 where the
        model counts none.
    """
    del context_tokens
    return None

  @property
  def current_step(self) -> trajectory_lib.Step | None:
    """The newest step, None before the model's first response."""
    steps = self.trajectory.steps
    return steps[-1] if steps else None
