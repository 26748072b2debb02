"""Makes demonstrations in the exact token format that the policy acts in.

`Demonstrator.episode` plays a task of a gym through the ordinary collector, as
a scripted policy that knows the right action. A demonstrator may have habits,
the slips that recorded human demonstrations are full of (a single click where
two are needed, typing without a focused field, a click on the neighbour). A
policy cloned from them knows every right move and prefers some wrong ones;
reinforcement learning mends that.

Promises: a demonstration is a function of its seed; its tokens carry log-prob
0, as a demonstrator is certain. Does not train anything; no JAX.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Awaitable, Callable, Iterable, Mapping

import numpy as np
from tunix.rl.multi_turn.clients import scripted_client
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.trajectory_collector import collect_settings
from tunix.rl.multi_turn.trajectory_collector import episode as engine_lib
from tunix.rl.multi_turn.trajectory_collector import model_calls

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

Habit = Callable[[Any, GuiAction, np.random.Generator], GuiAction]
"""(gym, right action, rng) -> the demonstrator's action instead."""

Pairs = Iterable[tuple[gym_base.Task, int]]
"""Tasks to demonstrate, each with the seed of its demonstration."""


# --- habits ----------------------------------------------------------------


def single_click(
  gym: Any, action: GuiAction, rng: np.random.Generator
) -> GuiAction:
  """Clicks once where a double click is needed."""
  del gym, rng
  if action.kind is Kind.CLICK and action.count > 1:
    return dataclasses.replace(action, count=1)
  return action


def wrong_widget(
  gym: Any, action: GuiAction, rng: np.random.Generator
) -> GuiAction:
  """Clicks another widget than the one asked for."""
  if action.kind is not Kind.CLICK:
    return action
  places = [
    (x, y)
    for _, x, y in gym.referring_expressions()
    if abs(x - action.x) + abs(y - action.y) > 4
  ]
  if not places:
    return action
  x, y = places[int(rng.integers(len(places)))]
  return dataclasses.replace(action, x=float(x), y=float(y))


def skip_focus(
  gym: Any, action: GuiAction, rng: np.random.Generator
) -> GuiAction:
  """Types the quoted text at once instead of clicking the field first."""
  del rng
  if action.kind is not Kind.CLICK:
    return action
  parts = gym.episode.spec.instruction.split('"')
  return GuiAction(Kind.TYPE, text=parts[1]) if len(parts) > 2 else action


HABITS: dict[str, Habit] = {
  "single_click": single_click,
  "wrong_widget": wrong_widget,
  "skip_focus": skip_focus,
}


_TRIES = 3
"""Times that a demonstration is played while its environment breaks it."""


class UnsolvableError(LookupError):
  """The oracle cannot solve this instance."""


POINT_GRID = (32, 24)
"""Columns and rows that the shipped policy's points were snapped to in
pretraining, at every screenshot size: it has met no other numbers."""


_POINTING = (Kind.CLICK, Kind.DRAG)


async def value(result: object) -> Any:
  """Returns an oracle's answer, which may be a coroutine."""
  return await result if asyncio.iscoroutine(result) else result


async def right_action(oracle: gyms.Oracle, env: Any) -> GuiAction:
  """Returns the oracle's next action in pixels of the gym.

  Raises:
    LookupError: The oracle cannot solve the task.
  """
  action = await value(oracle.act(env.gym))
  return action or GuiAction(Kind.TERMINATE)


async def named(oracle: gyms.Oracle, env: Any, action: GuiAction) -> str | None:
  """Returns the oracle's phrase for what an action (in gym pixels) touches.

  None where it points at nothing that has a name.
  """
  if action.kind not in _POINTING or action.x is None or action.y is None:
    return None
  return await value(oracle.describe(env.gym, action.x, action.y))


async def written(
  oracle: gyms.Oracle,
  env: Any,
  parser: Any,
  action: GuiAction,
  grid: tuple[int, int] | None,
) -> str:
  """Returns an action in the parser's grammar, after the name of its target.

  Args:
    oracle: names the target.
    env: a `CUAEnv`.
    parser: a GUI-action parser.
    action: Action in pixels of the gym.
    grid: see `Demonstrator`.
  """
  target = await named(oracle, env, action)
  sx, sy = env.scale  # The oracle counts the gym's pixels.
  return parser.format_gui_action(
    action.scaled(1 / sx, 1 / sy), *env.size, target, grid=grid
  )


@dataclasses.dataclass(frozen=True)
class Demonstrator:
  """Plays tasks as the oracle does, except for its habits.

  Before it clicks or drags, it names in the text before the tool call the thing
  that it is about to touch ("the Save button"): to point at what was just named
  is much easier to learn than to find the target and to name nothing.

  Attributes:
    renderer: messages to tokens.
    make_agent: a fresh agent for an episode; its parser writes the actions.
    make_gym: a fresh gym.
    oracle: gives the right actions and the names of things.
    image_store: Receives the screenshots.
    habits: family -> (name in HABITS, probability in [0, 1] that an episode
      is played with it).
    grid: (columns, rows) that clicks are snapped to.
    screenshots: arguments of `ScreenshotTool`.
    deadlines: Deadlines of an episode and of its calls.
  """

  renderer: choice.AnyRenderer
  make_agent: Callable[[], Any]
  make_gym: Callable[[], Any]
  oracle: gyms.Oracle
  image_store: images.ImageStore
  habits: Mapping[str, tuple[str, float]] = dataclasses.field(
    default_factory=dict
  )
  grid: tuple[int, int] | None = None
  screenshots: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  deadlines: collect_settings.Deadlines = collect_settings.Deadlines()

  def __post_init__(self):
    for family, (name, rate) in self.habits.items():
      if name not in HABITS:
        raise ValueError(
          f"habit {name!r} of {family!r} is unknown; known: {', '.join(HABITS)}"
        )
      if not 0 <= rate <= 1:
        raise ValueError(
          f"the rate of habit {name!r} must be in [0, 1], got {rate}"
        )

  async def episode(
    self, task: gym_base.Task, seed: int
  ) -> trajectory.Trajectory:
    """One demonstration of `task`; `seed` decides whether a habit strikes.

    Raises:
      UnsolvableError: the oracle found nothing to act on (LookupError).
    """
    rng = np.random.default_rng((0x0DE3, seed))
    habit, rate = self.habits.get(task.family, ("", 0.0))
    habit_fn = HABITS[habit] if habit and rng.random() < rate else None
    agent, gym = self.make_agent(), self.make_gym()
    parser = agent.tool_parser
    env = cua_env.CUAEnv(
      gym,
      screenshot.ScreenshotTool(self.image_store, **self.screenshots),
      task,
      action_parser=parser,
    )

    unsolvable: list[LookupError] = []

    async def act(prompt: policy_client.TokenPrompt, session: str):
      del prompt, session
      if getattr(agent, "is_summarizing", False):
        oracle: Any = self.oracle  # Settings need one that can.
        summary = await value(oracle.summarize(gym))
        return completion_ids(self.renderer, summary)
      try:
        action = await right_action(self.oracle, env)
      except LookupError as error:
        unsolvable.append(error)
        raise
      if habit_fn is not None:
        action = habit_fn(gym, action, rng)
      text = await written(self.oracle, env, parser, action, self.grid)
      return completion_ids(self.renderer, text)

    model = model_calls.PolicyModel(
      scripted_client.ScriptedClient(act),
      self.renderer,
      policy_client.SamplingParams(max_new_tokens=1024),
      runs_inline=True,
    )
    engine = engine_lib.TrajectoryCollectEngine(
      agent,
      env,
      model,
      max_steps=env.max_steps,
      timeout=self.deadlines.episode,
      deadlines=self.deadlines,
    )
    played = await engine.collect()
    if unsolvable:
      raise UnsolvableError(str(unsolvable[0])) from unsolvable[0]
    return played

  async def episodes(
    self, tasks: Pairs, at_once: int = 1
  ) -> list[trajectory.Trajectory]:
    """Demonstrations of (task, seed) pairs; see `play_all`."""
    return await play_all(self.episode, tasks, at_once)

  async def sequences(self, tasks: Pairs) -> list[trajectory.TokenSequence]:
    """Training sequences of all `episodes` of the tasks."""
    played = await self.episodes(tasks)
    return [s for episode in played for s in episode.sequences]


async def play_all(
  play_one: Callable[[gym_base.Task, int], Awaitable[trajectory.Trajectory]],
  tasks: Pairs,
  at_once: int = 1,
) -> list[trajectory.Trajectory]:
  """Demonstrations of the tasks, in order, unsolvable ones left out.

  A demonstration that its environment broke is played again.

  Args:
    play_one: (task, seed) -> its demonstration, or UnsolvableError.
    tasks: Tasks to play.
    at_once: episodes in flight; more than one is for environments that wait.

  Raises:
    RuntimeError: an episode broke `_TRIES` times.
  """
  slots = asyncio.Semaphore(at_once)

  async def play(
    task: gym_base.Task, seed: int
  ) -> trajectory.Trajectory | None:
    async with slots:
      for _ in range(_TRIES):
        try:
          played = await play_one(task, seed)
        except UnsolvableError:
          return None
        if played.status.is_policy_outcome:
          return played
    raise RuntimeError(
      f"the demonstration of {task.task_id} broke {_TRIES} times: "
      f"{played.error}"
    )

  playing = [asyncio.ensure_future(play(*pair)) for pair in tasks]
  try:
    return [p for p in await asyncio.gather(*playing) if p is not None]
  finally:
    for task in playing:
      task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)


def completion_ids(renderer: choice.AnyRenderer, text: str) -> np.ndarray:
  """int32[S] of a completion: the text and the end-of-turn token.

  A thinking policy's reasoning, which its prompt has opened, is closed first.
  """
  text = getattr(renderer, "answer_prefix", "") + text
  return np.append(
    renderer.encode(text), np.int32(renderer.stop_token_ids[0])
  ).astype(np.int32)
