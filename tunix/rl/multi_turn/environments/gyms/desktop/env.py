"""Wraps the desktop as a `gymnasium.Env`: `TunixDesktop/<family>-v0`.

Registered when this module is imported, or the lighter `tunix_multi_turn.envs`;
`gymnasium.make("tunix_multi_turn.envs:TunixDesktop/<family>-v0")` does the
latter by itself. `TunixDesktopFlat/<family>-v0` is the same in arrays: see
`flat`.

Observation: `{"screenshot": uint8[height, width, 3], "instruction": text}`.
Action: `{"kind": index into ACTION_KINDS, "position": float32[2], "target":
float32[2] (where a drag ends), "scroll": float32[2] (dx, dy), "text": what to
type, the keys ("ctrl+a") or the answer}`; the parts that a kind does not use
are ignored. Positions are fractions of width and height in [0, 1], scrolling
is in screens in [-1, 1]; `decode_action` and `encode_action` translate from
and to pixels. Reward: 0, and the task's score at its end. An episode is
truncated after the family's number of turns.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms.desktop import gym as gym_lib

NAMESPACE = "TunixDesktop"
FLAT_NAMESPACE = "TunixDesktopFlat"
ACTION_KINDS = (
    "click", "double_click", "triple_click", "right_click", "move", "drag",
    "scroll", "type", "key", "answer", "wait", "terminate",
)  # fmt: skip
MAX_TEXT = 128
_CHARSET = string.ascii_letters + string.digits + string.punctuation + " "
_CLICKS = {
  "click": ("left", 1),
  "double_click": ("left", 2),
  "triple_click": ("left", 3),
  "right_click": ("right", 1),
}
_Kind = gui_action.GuiActionKind


def decode_action(
  action: dict[str, Any], width: int, height: int
) -> gui_action.GuiAction:
  """Returns an action of the env's space as a GuiAction in pixels."""
  kind = ACTION_KINDS[int(action["kind"])]
  x, y = _pixels(action["position"], width, height)
  if kind in _CLICKS:
    button, count = _CLICKS[kind]
    return gui_action.GuiAction(
      _Kind.CLICK, x=x, y=y, button=button, count=count
    )
  if kind == "drag":
    x2, y2 = _pixels(action["target"], width, height)
    return gui_action.GuiAction(_Kind.DRAG, x=x, y=y, x2=x2, y2=y2)
  if kind == "move":
    return gui_action.GuiAction(_Kind.MOVE, x=x, y=y)
  if kind == "scroll":
    dx, dy = _pixels(action["scroll"], width, height)
    return gui_action.GuiAction(_Kind.SCROLL, x=x, y=y, dx=dx, dy=dy)
  text = str(action["text"])
  if kind == "type":
    return gui_action.GuiAction(_Kind.TYPE, text=text)
  if kind == "answer":
    return gui_action.GuiAction(_Kind.ANSWER, text=text)
  if kind == "key":
    # No key is a turn in which nothing happens.
    if not text:
      return gui_action.GuiAction(_Kind.WAIT)
    return gui_action.GuiAction(_Kind.KEY, keys=(text,))
  return gui_action.GuiAction(_Kind(kind))


def encode_action(
  action: gui_action.GuiAction, width: int, height: int
) -> dict[str, Any]:
  """Returns a GuiAction as an action of the env's space.

  Decoding gives the same pixels again (their middle), except that scrolling
  is cut to one screen an action.

  Raises:
    ValueError: the space has nothing for this kind of action.
  """
  kind = action.kind.value
  if action.kind is _Kind.CLICK:
    by_click = {v: k for k, v in _CLICKS.items()}
    kind = by_click.get((action.button, action.count), "")
  elif action.kind is _Kind.SWIPE:
    kind = "drag"
  elif action.kind is _Kind.LONG_PRESS:
    kind = "right_click"
  elif action.kind is _Kind.SCREENSHOT:
    kind = "wait"
  needs_position = kind in ("drag", "scroll")
  if kind not in ACTION_KINDS or (needs_position and action.x is None):
    raise ValueError(
      f"the {NAMESPACE} action space cannot express {action.to_json()};"
      f" its kinds: {', '.join(ACTION_KINDS)}, drag and scroll with x, y"
    )
  text = "+".join(action.keys) if kind == "key" else action.text or ""
  if len(text) > MAX_TEXT:
    raise ValueError(
      f"text of {len(text)} characters; the {NAMESPACE} action space takes"
      f" {MAX_TEXT} at a time"
    )
  return {
    "kind": np.int64(ACTION_KINDS.index(kind)),
    "position": _fractions(action.x, action.y, width, height),
    "target": _fractions(action.x2, action.y2, width, height),
    "scroll": np.clip(
      np.array([action.dx / width, action.dy / height], np.float32), -1, 1
    ),
    "text": text,
  }


def _pixels(fractions, width: int, height: int) -> tuple[float, float]:
  x, y = fractions
  return float(x) * width, float(y) * height


def _fractions(x, y, width: int, height: int) -> np.ndarray:
  """Fractions at the middle of a pixel, so that rounding cannot leave it."""
  at = [(int(x or 0) + 0.5) / width, (int(y or 0) + 0.5) / height]
  return np.clip(np.array(at, np.float32), 0, 1)


def action_space() -> gymnasium.spaces.Dict:
  """Returns the space of actions, see the module docstring."""
  spaces = gymnasium.spaces
  return spaces.Dict(
    {
      "kind": spaces.Discrete(len(ACTION_KINDS)),
      "position": spaces.Box(0.0, 1.0, (2,), np.float32),
      "target": spaces.Box(0.0, 1.0, (2,), np.float32),
      "scroll": spaces.Box(-1.0, 1.0, (2,), np.float32),
      "text": spaces.Text(MAX_TEXT, min_length=0, charset=_CHARSET),
    }
  )


def observation_space(
  width: int, height: int, most_text: int = 256
) -> gymnasium.spaces.Dict:
  """Returns the space of observations.

  Args:
    width, height: Size of the screen, in pixels.
    most_text: Characters of an instruction, at most.
  """
  spaces = gymnasium.spaces
  return spaces.Dict(
    {
      "screenshot": spaces.Box(0, 255, (height, width, 3), np.uint8),
      "instruction": spaces.Text(most_text, min_length=0, charset=_CHARSET),
    }
  )


def check_choices(split: str, render_mode: str | None) -> None:
  """Raises:

  ValueError: naming the argument.
  """
  if split not in ("train", "eval"):
    raise ValueError(f'split must be "train" or "eval", got {split!r}')
  if render_mode not in (None, "rgb_array"):
    raise ValueError(
      f'render_mode must be "rgb_array" or None, got {render_mode!r}'
    )


class TaskEnv(gymnasium.Env):
  """Base of environments that play instances of one family of a task set."""

  metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
  tasks: base.TaskSet
  family: str
  split: str

  def draw(self, seed: int | None, options: dict | None) -> base.Task:
    """Draws a task by `seed`, or takes `options["instance"]` of the split."""
    super().reset(seed=seed)
    index = (options or {}).get("instance")
    if index is None:
      index = int(self.np_random.integers(gym_lib.EVAL_SEEDS_FROM))
    train = self.split == "train"
    make = self.tasks.train_task if train else self.tasks.eval_task
    return make(self.family, index, 0)


class DesktopEnv(TaskEnv):
  """One family of desktop tasks; see the module docstring."""

  def __init__(
    self,
    family: str = "click-button",
    *,
    width: int = 128,
    height: int = 96,
    difficulty: int = 0,
    split: str = "train",
    time_decay: float = 0.0,
    render_mode: str | None = None,
  ):
    """Args:

    family: task family.
    width, height: size of the screenshots in pixels.
    difficulty: level, 0 to 2.
    split: "train" or "eval": from which seeds instances are drawn.
    time_decay: see `DesktopGym`.
    render_mode: "rgb_array" or None.
    """
    check_choices(split, render_mode)
    self.gym = gym_lib.DesktopGym(width, height, time_decay)
    self.tasks = gym_lib.DesktopTasks((family,), difficulty)
    self.family = family
    self.split = split
    self.render_mode = render_mode
    self.task: Any = None  # The `base.Task` that is played.
    self.observation_space = observation_space(width, height)
    self.action_space = action_space()

  def reset(self, *, seed: int | None = None, options: dict | None = None):
    """Starts an instance drawn by `seed`.

    Args:
      seed: Seed in gymnasium's sense; equal seeds give equal episodes.
      options: {"instance": n} starts the n-th instance of the split instead.
    """
    self.task = self.draw(seed, options)
    self.gym.start_sync(self.task)
    return self._observation(), self._info({})

  def step(self, action):
    if self.task is None:
      raise RuntimeError("call reset() before step()")
    observation = self.gym.act_sync(
      decode_action(action, self.gym.width, self.gym.height)
    )
    result = self.gym.evaluate_sync()
    turns = result.details["turns"]
    truncated = not observation.done and turns >= self.task.max_turns
    reward = result.score if observation.done else 0.0
    info = self._info(observation.info)
    info["success"] = result.success
    return self._observation(), reward, observation.done, truncated, info

  def render(self):
    """uint8[height, width, 3] of the current screen."""
    if self.render_mode is None:
      gymnasium.logger.warn(
        "render() without a render mode; make the env with"
        ' render_mode="rgb_array"'
      )
      return None
    return self.gym.scene.screenshot().copy()

  def _observation(self) -> dict[str, Any]:
    return {
      "screenshot": self.gym.scene.screenshot().copy(),
      "instruction": self.task.instruction,
    }

  def _info(self, info) -> dict[str, Any]:
    return {
      "task_id": self.task.task_id,
      "instruction": self.task.instruction,
      "success": False,
      **info,
    }


def register_envs() -> None:
  """Makes every family known to gymnasium; safe to call again."""
  package = __name__.rpartition(".")[0]
  for namespace, entry_point in (
    (NAMESPACE, f"{__name__}:DesktopEnv"),
    (FLAT_NAMESPACE, f"{package}.flat:make_flat"),
  ):
    for name in gym_lib.families():
      env_id = f"{namespace}/{name}-v0"
      if env_id not in gymnasium.registry:
        gymnasium.register(
          env_id, entry_point=entry_point, kwargs={"family": name}
        )


register_envs()
