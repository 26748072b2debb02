"""Implements the `desktop` gym and its tasks: an embedded, deterministic GUI.

`DesktopGym` implements the asynchronous gym protocol without threads, as each
turn takes well under a millisecond; only a screen of more than a megapixel is
drawn in a thread. The synchronous methods underneath (`start_sync`, `act_sync`,
`evaluate_sync`) may be called directly. The same
(family, seed, difficulty, size) and the same actions give the same pixels and
the same outcome, bit for bit. Success is read from the widgets' state, never
from pixels.

Does not enforce `max_turns` (the collector does) and does not know time:
`wait` is a turn in which nothing happens.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.gyms.desktop import families_basic  # noqa: F401
from tunix.rl.multi_turn.environments.gyms.desktop import families_forms  # noqa: F401
from tunix.rl.multi_turn.environments.gyms.desktop import families_pointer  # noqa: F401
from tunix.rl.multi_turn.environments.gyms.desktop import family as family_lib
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import scenes
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import concurrency

QUICKSTART_FAMILIES = (
  "click-button",
  "click-color",
  "close-dialog",
  "enter-text",
  "click-checkboxes",
  "open-icon",
)

_INLINE_PIXELS = 1_000_000
EVAL_SEEDS_FROM = seeds.EVAL_SEEDS_FROM


def families() -> tuple[str, ...]:
  """Names of all task families."""
  return tuple(family_lib.FAMILIES)


def _check_level(difficulty: int) -> int:
  if difficulty not in family_lib.LEVELS:
    raise ValueError(
      f"difficulty must be one of {family_lib.LEVELS}, got {difficulty!r}"
    )
  return int(difficulty)


class DesktopTasks(seeds.SeededTasks):
  """Makes tasks: `desktop/<family>/<difficulty>/<seed>`.

  Families with few instances may show the same words, in another layout, in
  training and in evaluation.
  """

  def __init__(
    self, families: Sequence[str] | None = None, difficulty: int = 0
  ):
    """Args:

    families: task families to offer; None for all.
    difficulty: level when a call does not give one, 0 (clean) to 2.
    """
    names = tuple(families) if families else tuple(family_lib.FAMILIES)
    for name in names:
      family_lib.get(name)
    self._families = names
    self._difficulty = _check_level(difficulty)

  def task(
    self, family: str, seed: int, difficulty: int | None = None
  ) -> base.Task:
    """The instance that a family, a seed >= 0 and a difficulty stand for."""
    if seed < 0:
      raise ValueError(f"seed must be >= 0, got {seed}")
    level = _check_level(self._difficulty if difficulty is None else difficulty)
    kind = family_lib.get(family)
    return base.Task(
      task_id=f"desktop/{family}/{level}/{seed}",
      family=family,
      instruction=family_lib.spec_of(kind, seed, level).instruction,
      seed=seed,
      max_turns=kind.max_turns[level],
      params={"difficulty": level},
    )


class DesktopGym:
  """One desktop; `start` may be called again after an episode."""

  def __init__(
    self, width: int = 128, height: int = 96, time_decay: float = 0.0
  ):
    """Args:

    width, height: size of the screenshots in pixels, at least 128 x 96.
    time_decay: an episode won in turn t scores `(1 - time_decay)^(t - 1)`;
      0 (the default) scores 1 whenever it is won.
    """
    if not 0 <= time_decay < 1:
      raise ValueError(f"time_decay must be in [0, 1), got {time_decay}")
    if width < scene_lib.MIN_WIDTH or height < scene_lib.MIN_HEIGHT:
      raise ValueError(
        f"a desktop needs at least {scene_lib.MIN_WIDTH}x"
        f"{scene_lib.MIN_HEIGHT} pixels for its text to be readable, got"
        f" width={width}, height={height}"
      )
    if problem := bounds.screen_problem(width, height):
      raise ValueError(problem)
    self.width, self.height = int(width), int(height)
    self.time_decay = float(time_decay)
    self.episode: family_lib.Episode | None = None
    self._scene: scene_lib.Scene | None = None

  # -- synchronous ----------------------------------------------------------

  @property
  def scene(self) -> scene_lib.Scene:
    """The scene on the screen now."""
    if self._scene is None:
      raise RuntimeError(
        "the desktop shows nothing yet; call start(task) or"
        " random_scene(seed) first"
      )
    return self._scene

  def start_sync(self, task: base.Task) -> base.Observation:
    """Begins an episode of `task`."""
    kind = family_lib.get(task.family)
    level = _check_level(task.params.get("difficulty", 0))
    self.episode = family_lib.Episode(
      kind, task.seed, level, self.width, self.height
    )
    self._scene = self.episode.scene
    return self._observe({}, self.episode.spec.instruction)

  def act_sync(self, action: gui_action.GuiAction) -> base.Observation:
    """Plays one turn; does nothing after the episode's end."""
    if self.episode is None:
      if self._scene is None:
        raise RuntimeError("no episode is running; call start(task) first")
      return self._observe(self._scene.act(action))  # a scene without a task
    return self._observe(self.episode.act(action))

  def evaluate_sync(self) -> base.Evaluation:
    """Returns the outcome so far; an undecided episode counts as not solved."""
    if self.episode is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    won = self.episode.outcome is True
    turns = self.episode.turns
    score = (1 - self.time_decay) ** max(0, turns - 1) if won else 0.0
    return base.Evaluation(
      score, won, {"decided": self.episode.outcome is not None, "turns": turns}
    )

  def _observe(
    self, info: Mapping[str, Any], instruction: str = ""
  ) -> base.Observation:
    ended = self.episode is not None and self.episode.outcome is not None
    return base.Observation(
      self.scene.screenshot(), instruction, done=ended, info=info
    )

  def random_scene(self, seed: int) -> base.Observation:
    """Shows a random mixture of widgets without a task, and ends any episode.

    Actions still work on it; `evaluate` does not.
    """
    self.episode = None
    self._scene = scenes.random_scene(self.width, self.height, seed)
    return self._observe({})

  def field(self, seed: int, kind: str) -> base.Observation:
    """Shows things of one kind of `scenes.FIELD_KINDS`, as `random_scene`."""
    self.episode = None
    self._scene = scenes.field(self.width, self.height, seed, kind)
    return self._observe({})

  def referring_expressions(self) -> list[tuple[str, int, int]]:
    """(phrase, x, y) of each visible object: its name and centre in pixels.

    Only phrases that mean exactly one thing in the scene are returned.
    """
    return self.scene.referring_expressions()

  def describe(self, x: float, y: float) -> str | None:
    """The phrase for the object at a pixel; None without a unique one."""
    return self.scene.describe(x, y)

  def summarize(self) -> str:
    """Returns what a demonstrator writes as the summary of its turns."""
    if self.episode is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return self.episode.family.summary(self.episode)

  # -- the asynchronous protocol ---------------------------------------------

  async def start(self, task: base.Task) -> base.Observation:
    return await self._drawn(self.start_sync, task)

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    return await self._drawn(self.act_sync, action)

  async def _drawn(
    self, call: Callable[[Any], base.Observation], argument: object
  ) -> base.Observation:
    """`call(argument)`, in a thread where drawing would delay the loop."""
    if self.width * self.height <= _INLINE_PIXELS:
      return call(argument)
    return await concurrency.acall(call, argument, what="drawing a desktop")

  async def evaluate(self) -> base.Evaluation:
    return self.evaluate_sync()

  async def close(self) -> None:
    """Drops the scene; idempotent."""
    self.episode = None
    self._scene = None


def oracle_action(
  gym: DesktopGym, spread: float = 0.0, rng: random.Random | None = None
) -> gui_action.GuiAction | None:
  """Returns the next right action in the gym's episode; None when it is over.

  Args:
    gym: Gym with a running episode, in any state.
    spread: clicks go to the centre of their target at 0, anywhere in the
      middle `spread` part of it up to 1 (all of it); needs `rng`.
    rng: source of the spread.
  """
  episode = gym.episode
  if episode is None:
    raise RuntimeError("no episode is running; call start(task) first")
  if episode.outcome is not None:
    return None
  action: Any = episode.family.oracle(episode)
  if (
    not spread
    or action is None
    or (action.kind is not gui_action.GuiActionKind.CLICK)
  ):
    return action
  if rng is None:
    raise ValueError(f"spread={spread} needs an rng to draw from")
  x, y = family_lib.spread_point(episode, action.x, action.y, spread, rng)
  return dataclasses.replace(action, x=x, y=y)
