"""Wraps any gym that makes its own tasks as a `gymnasium.Env`.

    import tunix_multi_turn.envs
    env = gymnasium.make("Tunix/miniwob-v0", family="click-test-2")

Spaces, actions and seeds are those of `desktop.env.DesktopEnv`; the reward is
the gym's score, once the episode has ended or is truncated. Characters that the
instruction's space lacks are shown as "?"; `info["instruction"]` has them.

Promises: the gym's coroutines run on one event loop, in a thread of the
environment's own; every call has a deadline.

Does not speak the policy's language: `CUAEnv` parses its text.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import gym_registry
from tunix.rl.multi_turn.environments.gyms import spec as spec_lib
from tunix.rl.multi_turn.environments.gyms.desktop import env as desktop_env
from tunix.rl.multi_turn.net import concurrency

MAX_INSTRUCTION = 2048
_CLOSE_S = 30.0


class _Episode:
  """One episode of a gym for `SyncEnv`, from its start to its verdict."""

  def __init__(self, gym: base.Gym, spec: spec_lib.GymSpec, turns: int):
    self._calls = concurrency.Guarded(gym, name="the gym")
    self._spec = spec
    self._default_turns = turns
    self.task: base.Task | None = None
    self.turns = 0

  @property
  def most_turns(self) -> int:
    return (self.task and self.task.max_turns) or self._default_turns

  async def reset(self) -> base.Observation:
    self.turns = 0
    return await self._calls.call("start", self.task)

  async def step(
    self, action: gui_action.GuiAction
  ) -> tuple[base.Observation, base.Evaluation | None]:
    """(the observation, the verdict if the episode is over)."""
    observation = await self._calls.call("act", action)
    self.turns += 1
    if not observation.done and self.turns < self.most_turns:
      return observation, None
    return observation, await self._calls.call("evaluate")

  async def close(self) -> None:
    try:
      await self._calls.close(seconds=_CLOSE_S)
    finally:
      if (close := self._spec.load_close_shared()) is not None:
        await close()


class GymEnv(desktop_env.TaskEnv):
  """One family of a gym's tasks; see the module docstring."""

  def __init__(
    self,
    gym: str,
    family: str = "",
    *,
    width: int | None = None,
    height: int | None = None,
    split: str = "train",
    turns: int = 30,
    timeout: float = 120.0,
    options: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
  ):
    """Args:

      gym: registered name, or a "module:attribute" path.
      family: Family of tasks; "" for the first of its preset, or of its list.
      width, height: Size of the screenshots in pixels; None: the gym's preset.
      split: "train" or "eval": from which instances are drawn.
      turns: Turn limit of an episode whose task has none of its own.
      timeout: seconds that a start or an action may take.
      options: Options of the gym and its tasks.
      render_mode: "rgb_array" or None.

    Raises:
      ValueError: naming the argument.
      ImportError: the gym's package is missing.
    """
    desktop_env.check_choices(split, render_mode)
    for name, value in (("turns", turns), ("timeout", timeout)):
      if not value > 0:
        raise ValueError(f"{name}={value!r} must be > 0")
    spec = gym_registry.get(gym, "operator")
    width = width or spec.preset.get("gym.width")
    height = height or spec.preset.get("gym.height")
    if not width or not height:
      raise ValueError(
        f"gym {gym!r} has no size of its own: give width and height"
      )
    own = dict(options or {})
    spec.check_screenshots(own)
    if not family:
      preset = spec.preset.get("task_source.families")
      family = (preset or spec.make_tasks(None, own).families())[0]
    own = {
      **spec.options_of(family, size=(width, height), concurrency=1),
      **own,
    }
    if problems := list(spec.misfits(own, width, height)):
      raise ValueError("; ".join(problems))
    self.tasks = spec.make_tasks((family,), own)
    self.gym = spec.make_gym(own)
    self.family = family
    self.split = split
    self.render_mode = render_mode
    self.task: Any = None  # The `base.Task` that is played.
    self._size = width, height
    self._episode = _Episode(self.gym, spec, turns)
    self._sync: Any = base_env.SyncEnv(self._episode, timeout)
    self._seen: Any = None  # The newest `base.Observation`.
    self._over = True
    self.observation_space: Any = desktop_env.observation_space(
      width, height, MAX_INSTRUCTION
    )
    self.action_space = desktop_env.action_space()

  def reset(self, *, seed: int | None = None, options: dict | None = None):
    """As `DesktopEnv.reset`.

    Raises:
      ValueError: the gym shows screenshots of another size.
      DeadlineExceeded: the gym did not start in time.
    """
    self.task = self._episode.task = self.draw(seed, options)
    self._show(self._sync.reset())
    self._instruction = self.task.instruction or self._seen.instruction
    self._over = False
    return self._observation(), self._info({})

  def step(self, action):
    if self._over:
      raise RuntimeError("call reset() before step()")
    observation, verdict = self._sync.step(
      desktop_env.decode_action(action, *self._size)
    )
    self._show(observation)
    self._over = verdict is not None
    info = self._info(observation.info)
    reward = 0.0
    if verdict is not None:
      reward, info["success"] = float(verdict.score), bool(verdict.success)
    truncated = self._over and not observation.done
    return self._observation(), reward, bool(observation.done), truncated, info

  def render(self):
    """uint8[height, width, 3] of the last screenshot; None before a reset."""
    if self.render_mode is None or self._seen is None:
      return None
    return self._seen.pixels.copy()

  def close(self):
    """Closes the gym and what it shares with others of its thread."""
    self._over = True
    self._sync.close()

  def _show(self, observation: base.Observation) -> None:
    width, height = observation.size
    if (width, height) != self._size:
      raise ValueError(
        f"the gym shows {width}x{height}, not"
        f" {self._size[0]}x{self._size[1]}: give width={width},"
        f" height={height}"
      )
    self._seen = observation

  def _observation(self) -> dict[str, Any]:
    characters = self.observation_space["instruction"].character_set
    text = "".join(c if c in characters else "?" for c in self._instruction)
    return {
      "screenshot": np.array(self._seen.pixels),
      "instruction": text[:MAX_INSTRUCTION],
    }

  def _info(self, info: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "task_id": self.task.task_id,
      "instruction": self._instruction,
      "text": self._seen.text,
      "success": False,
      **info,
    }
