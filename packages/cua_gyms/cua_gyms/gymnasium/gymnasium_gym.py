"""Makes any `gymnasium.Env` with `render_mode="rgb_array"` a gym.

The policy sees the rendered frame and acts with `GuiAction`s; an *adapter*, a
function `(GuiAction) -> env action`, translates. `KeyAdapter` (keys to
discrete actions) and `DesktopAdapter` (our own desktop's action space) are
ready; an action that an adapter cannot translate is ignored with a note in
`info`, and the environment does not step.

Every call into the environment runs on one daemon thread of the gym's own, so
a slow or hanging environment never blocks the event loop, and environments
with thread affinity work. When a caller gives up on a call, the gym abandons
that thread with its environment and makes new ones at the next `start`, unless
the process already holds `MAX_ABANDONED` such threads.

Does not: impose deadlines; the collector does. Not done: rendering without a
frame (`None`), vector environments.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Callable, Mapping, Sequence

import gymnasium
import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.gyms.desktop import env as desktop_env
from tunix.rl.multi_turn.environments.gyms.desktop import scene as desktop_scene
from tunix.rl.multi_turn.net import concurrency

Adapter = Callable[[gui_action.GuiAction], Any]
_Kind = gui_action.GuiActionKind
_ENDINGS = ("terminated", "truncated", "any")
_LOG = logging.getLogger(__name__)
MAX_ABANDONED = 64
"""Threads of hanging environments that a process may hold at once."""
EVAL_SEEDS_FROM = seeds.EVAL_SEEDS_FROM


class Untranslatable(ValueError):
  """Raised by an adapter for an action that its environment does not have."""


@dataclasses.dataclass(frozen=True)
class KeyAdapter:
  """Keys to discrete actions, e.g. `{"left": 0, "right": 1}` for CartPole.

  A typed text that is itself a key of the table counts as that key.

  Attributes:
    keys: key combination ("left", "ctrl+a") -> environment action.
    wait: environment action of `wait`, None when there is none.
  """

  keys: Mapping[str, Any]
  wait: Any = None

  def __post_init__(self):
    if not self.keys:
      raise ValueError("a KeyAdapter needs at least one key in `keys`")
    normal = {
      desktop_scene.normal_keys((key,)): value
      for key, value in self.keys.items()
    }
    object.__setattr__(self, "keys", normal)

  def __call__(self, action: gui_action.GuiAction) -> Any:
    name = ""
    if action.kind is _Kind.KEY:
      name = desktop_scene.normal_keys(action.keys)
    elif action.kind is _Kind.TYPE:
      name = desktop_scene.normal_keys(((action.text or "").strip(),))
    elif action.kind is _Kind.WAIT and self.wait is not None:
      return self.wait
    if name not in self.keys:
      raise Untranslatable(
        f"no action of the environment for {action.to_json()}; keys:"
        f" {', '.join(self.keys)}"
      )
    return self.keys[name]


@dataclasses.dataclass(frozen=True)
class DesktopAdapter:
  """Pointer and keys for `TunixDesktop/…` of `width` x `height` pixels."""

  width: int = 128
  height: int = 96

  def __call__(self, action: gui_action.GuiAction) -> Any:
    try:
      return desktop_env.encode_action(action, self.width, self.height)
    except ValueError as e:
      raise Untranslatable(str(e)) from e


_KNOWN: dict[str, dict[str, Any]] = {
  "CartPole": {
    "adapter": {"type": "keys", "keys": {"left": 0, "right": 1}},
    "instruction": "Keep the pole upright. Press left or right.",
    "success_end": "truncated",
    "score": "return",
  },
  "FrozenLake": {
    "adapter": {
      "type": "keys",
      "keys": {"left": 0, "down": 1, "right": 2, "up": 3},
    },
    "instruction": (
      "Walk to the gift, around the holes. Press left, down, right or up."
    ),
  },
  "MountainCar": {
    "adapter": {"type": "keys", "keys": {"left": 0, "right": 2}, "wait": 1},
    "instruction": "Drive up to the flag. Press left or right.",
    "success_return": -200.0,
    "score": "return",
  },
}


def default_settings(env_id: str) -> dict[str, Any]:
  """Default settings of an environment known here.

  Our own desktop's and a few of gymnasium's; {} for any other, which needs at
  least an adapter.
  """
  env_id = env_id.rpartition(":")[2]
  if env_id.startswith("TunixDesktop/"):
    return {"adapter": {"type": "desktop"}}
  return dict(_KNOWN.get(env_id.rsplit("-v", 1)[0], {}))


class _World:
  """An environment and the one daemon thread that makes and uses it.

  Attributes:
    env: set and used on the thread only.
    abandoned: worlds of the process whose environments hang, now.
  """

  abandoned: set[_World] = set()

  def __init__(self):
    if len(self.abandoned) >= MAX_ABANDONED:
      raise concurrency.PoolExhaustedError(
        f"{len(self.abandoned)} calls into gymnasium environments outlived"
        " their deadlines and still hold their threads, as many as a process"
        f" may lose (MAX_ABANDONED={MAX_ABANDONED}); mend the environment"
        " that hangs, or raise collect.deadlines if it is only slow"
      )
    self.env: gymnasium.Env | None = None
    pool = concurrency.WorkerPool(1, 0, idle=None, name="gymnasium-gym")
    self.runner = concurrency.CallRunner(pool, grace=0.0)

  def close_env(self) -> None:
    """Closes the environment; runs on its thread. Idempotent."""
    env, self.env = self.env, None
    if env is not None:
      env.close()

  def abandon(self, stuck: concurrency.StuckCall) -> None:
    """Leaves the environment to its thread, which closes it once it is free."""
    self.abandoned.add(self)
    stuck.then(self._freed)
    self.runner.close(0.0)
    _LOG.warning(
      "%s was given up in a call; %d threads are held by such environments",
      type(self.env).__name__ if self.env else "an environment",
      len(self.abandoned),
    )

  def _freed(self) -> None:
    try:
      self.close_env()
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("closing an environment that had hung failed")
    self.abandoned.discard(self)


class GymnasiumGym:
  """A gym around a `gymnasium.Env`. Made on any thread, used on one loop."""

  def __init__(
    self,
    env: str | Callable[[], gymnasium.Env],
    adapter: Adapter | Mapping[str, Any],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    instruction: str = "",
    success_return: float = 1.0,
    success_end: str = "terminated",
    score: str = "success",
    size: Sequence[int] | None = None,
  ):
    """Args:

    env: gymnasium id, with the module that registers it if need be
      (`module:Id-v0`), or a function that makes an environment whose render
      mode is rgb_array.
    adapter: GuiAction -> environment action; raises `Untranslatable`. Or a
      mapping of one: `{"type": "keys", "keys": {…}, "wait": …}` or
      `{"type": "desktop", "width": …, "height": …}`.
    env_kwargs: Arguments for `gymnasium.make` when `env` is an id.
    instruction: Instruction of episodes where neither the task nor the
      environment's `info["instruction"]` has one.
    success_return: least sum of rewards of a success.
    success_end: how a successful episode ends: "terminated", "truncated"
      (surviving to the time limit, as in CartPole) or "any".
    score: "success" (0 or 1) or "return" (the sum of rewards itself).
    size: (width, height) to resize frames to; positions of actions are
      scaled back. None keeps the environment's.
    """
    if success_end not in _ENDINGS:
      raise ValueError(
        f"success_end must be one of {', '.join(_ENDINGS)}, got {success_end!r}"
      )
    if score not in ("success", "return"):
      raise ValueError(f'score must be "success" or "return", got {score!r}')
    if size is not None and (len(size) != 2 or min(size) < 1):
      raise ValueError(f"size must be (width, height) > 0, got {size!r}")
    if not isinstance(env, str) and env_kwargs:
      raise ValueError("env_kwargs are for an env given by its id")
    if isinstance(adapter, Mapping):
      adapter = _adapter(adapter)
    if not callable(adapter):
      raise ValueError(f"adapter must be callable, got {adapter!r}")
    self._make = env
    self._kwargs = dict(env_kwargs or {})
    self._adapter = adapter
    self._instruction = instruction
    self._success_return = float(success_return)
    self._success_end = success_end
    self._score = score
    self._size = None if size is None else (size[0], size[1])
    self._world: _World | None = None
    self._frame = np.zeros((0, 0, 3), np.uint8)
    self._frame_size = (0, 0)
    self._end = ""
    self._clear()

  # -- the protocol ------------------------------------------------------------

  async def start(self, task: base.Task) -> base.Observation:
    """Resets the environment with the task's seed.

    `task.params["options"]` is passed on to `reset`.
    """
    self._clear()
    options = task.params.get("options")

    def reset(world):
      if world.env is None:
        world.env = self._new_env()
      _, info = world.env.reset(seed=task.seed, options=options)
      return _render(world.env), info

    frame, info = await self._call(reset)
    self._keep(frame)
    text = task.instruction or info.get("instruction") or self._instruction
    self._started = True
    return base.Observation(self._frame, str(text), info=dict(info))

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Steps the environment with the translated action.

    `terminate` ends the episode without a step.
    """
    if not self._started:
      raise RuntimeError("no episode is running; call start(task) first")
    if self._end:
      return self._observe({"ignored": "the episode is over"})
    self._turns += 1
    if action.kind is _Kind.TERMINATE:
      self._end = "stopped"
      return self._observe({})
    if action.kind is _Kind.SCREENSHOT:
      return self._observe({})
    try:
      move = self._adapter(self._scaled(action))
    except Untranslatable as e:
      return self._observe({"ignored": str(e)})

    def step(world):
      _, reward, terminated, truncated, info = world.env.step(move)
      frame = _render(world.env)
      return frame, float(reward), terminated, truncated, info

    frame, reward, terminated, truncated, info = await self._call(step)
    self._keep(frame)
    self._return += reward
    if terminated:
      self._end = "terminated"
    elif truncated:
      self._end = "truncated"
    return self._observe(dict(info))

  async def evaluate(self) -> base.Evaluation:
    """The outcome so far; an episode that has not ended is no success."""
    if not self._started:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    ended = self._end in ("terminated", "truncated")
    success = (
      ended
      and self._success_end in (self._end, "any")
      and self._return >= self._success_return
    )
    score = self._return if self._score == "return" else float(success)
    return base.Evaluation(
      score,
      success,
      {"return": self._return, "end": self._end, "turns": self._turns},
    )

  async def close(self) -> None:
    """Closes the environment; idempotent."""
    self._started = False
    if self._world is None:
      return
    try:
      await self._call(_World.close_env)
    finally:
      if self._world is not None:
        self._world.runner.close(0.0)
        self._world = None

  # -- inside ------------------------------------------------------------------

  def _clear(self) -> None:
    self._started = False
    self._return = 0.0
    self._turns = 0
    self._end = ""

  def _new_env(self) -> gymnasium.Env:
    if isinstance(self._make, str):
      env = gymnasium.make(self._make, render_mode="rgb_array", **self._kwargs)
    else:
      env = self._make()
    if env.render_mode != "rgb_array":
      mode = env.render_mode
      env.close()
      raise ValueError(
        f"the environment has render_mode={mode!r}; make it with"
        ' render_mode="rgb_array"'
      )
    return env

  async def _call(self, function: Callable[[_World], Any]) -> Any:
    """Runs it on the world's thread; leaves a world that a call holds."""
    if self._world is None:
      self._world = _World()
    return await self._world.runner.call(
      function,
      self._world,
      what="the environment's call",
      on_stuck=self._abandon,
    )

  def _abandon(self, stuck: concurrency.StuckCall) -> None:
    world, self._world = self._world, None
    self._started = False
    if world is not None:
      world.abandon(stuck)

  def _keep(self, frame: np.ndarray) -> None:
    self._frame_size = (frame.shape[1], frame.shape[0])
    if self._size is not None and self._size != self._frame_size:
      image = Image.fromarray(frame)
      frame = np.asarray(image.resize(self._size, Image.Resampling.BILINEAR))
    else:
      frame = frame.copy()  # some environments draw into the same array again
    frame.flags.writeable = False
    self._frame = frame

  def _observe(self, info: Mapping[str, Any]) -> base.Observation:
    return base.Observation(self._frame, done=bool(self._end), info=info)

  def _scaled(self, action: gui_action.GuiAction) -> gui_action.GuiAction:
    """Positions from the screenshot's pixels to the environment's."""
    width, height = self._frame.shape[1], self._frame.shape[0]
    sx, sy = self._frame_size[0] / width, self._frame_size[1] / height
    return action.scaled(sx, sy)


def _adapter(settings: Mapping[str, Any]) -> Adapter:
  """Returns the adapter that a mapping describes."""
  settings = dict(settings)
  kind = settings.pop("type", None)
  makers = {"keys": KeyAdapter, "desktop": DesktopAdapter}
  if kind not in makers:
    raise ValueError(
      f"adapter type must be one of {', '.join(makers)}, got {kind!r}"
    )
  return makers[kind](**settings)


def _render(env: gymnasium.Env) -> np.ndarray:
  """Returns the environment's frame, uint8[H, W, 3]."""
  frame = np.asarray(env.render())
  if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
    raise ValueError(
      "the environment's render() must give uint8[H, W, 3], got"
      f" {frame.dtype}{list(frame.shape)}"
    )
  return frame


class GymnasiumTasks(seeds.SeededTasks):
  """Tasks of one environment; the instance is its reset seed."""

  def __init__(
    self, family: str, instruction: str = "", max_turns: int | None = None
  ):
    """Args:

    family: name to report success under, usually the environment's id.
    instruction: Instruction of the tasks, see `base.Task`; may be empty.
    max_turns: turns an episode may take, None for the run's default.
    """
    self._families = (family,)
    self._instruction = instruction
    self._max_turns = max_turns

  def task(self, family: str, seed: int) -> base.Task:
    """Returns the instance whose reset seed is `seed`."""
    if family not in self._families:
      raise ValueError(f"family must be {self._families[0]!r}, got {family!r}")
    return base.Task(
      task_id=f"gymnasium/{family}/{seed}",
      family=family,
      instruction=self._instruction,
      seed=seed,
      max_turns=self._max_turns,
    )


class FamilyTasks:
  """Tasks of several environments, each a family."""

  def __init__(self, families: Sequence[str] | None):
    if not families:
      raise ValueError(
        "gymnasium has no tasks of its own; name environments as families,"
        " e.g. FrozenLake-v1"
      )
    for family in families:
      module, _, env_id = family.rpartition(":")
      try:
        # `spec` knows no modules, and gymnasium 1.0 loads no entry points.
        if module:
          registry.import_module(module)
        gymnasium.spec(env_id)
      except (gymnasium.error.Error, ImportError, ValueError) as error:
        raise ValueError(
          f"{family!r} is no environment of gymnasium: {error} Name one that"
          " is registered, with the module that registers it where that is"
          " not gymnasium itself, e.g. FrozenLake-v1 or my_module:MyEnv-v0"
        ) from None
    self._sets = {family: GymnasiumTasks(family) for family in families}

  def families(self) -> tuple[str, ...]:
    return tuple(self._sets)

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._sets[family].train_task(family, index, seed)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._sets[family].eval_task(family, index, seed)
