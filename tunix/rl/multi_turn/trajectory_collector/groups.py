"""Collects groups: n episodes of one task, each with its own random numbers.

With `greedy_call` one more episode of the task is played beside a group's
members, greedily, for algorithms whose baseline it is; with `expert_call` an
expert's, beside members of which none succeeded.

Promises: a group always completes, whatever its environments do; episodes in
flight are bounded; every seed is a hash of (run seed, split, group index,
attempt, sample), so members differ and a run repeats; cancelling a group
closes its episodes.

Does not: accept, requeue or drop groups (`collect_loop` does), or know how they
are trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import random
from typing import (
  Any,
  AsyncGenerator,
  AsyncIterator,
  Awaitable,
  Callable,
  Iterable,
)

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.trajectory_collector import adapters
from tunix.rl.multi_turn.trajectory_collector import collect_settings
from tunix.rl.multi_turn.trajectory_collector import episode
from tunix.rl.multi_turn.trajectory_collector import model_calls
from tunix.rl.multi_turn.trajectory_collector import teardown

Trajectory = trajectory_lib.Trajectory
TrajectoryGroup = trajectory_lib.TrajectoryGroup
Status = trajectory_lib.TrajectoryStatus

Pair = tuple[adapters.Agent, adapters.Env]
EpisodeFactory = Callable[[Any], Pair | Awaitable[Pair]]
"""task -> (agent, env), or an awaitable of it. A sync factory runs on the
event loop: slow work belongs into the environment's reset."""


def task_id_of(task: object) -> str:
  """`task.task_id`, `task["task_id"]`, or a hash of the task's JSON.

  A task that cannot be written as JSON is identified by its repr. A
  repr with an address in it differs in every process: such a task's episodes
  do not repeat in a second run; give it a `task_id`.
  """
  task_id = getattr(task, "task_id", None)
  if task_id is None and isinstance(task, dict):
    task_id = task.get("task_id")
  if task_id is not None:
    return str(task_id)
  try:
    text = json.dumps(trajectory_lib.encode(task), sort_keys=True)
  except (TypeError, ValueError, RecursionError):
    text = repr(task)
  data = text.encode(errors="replace")
  return hashlib.blake2b(data, digest_size=8).hexdigest()


GREEDY, EXPERT = "greedy", trajectory_lib.EXPERT
"""Names, in place of numbers, of episodes beside a group's members."""


def announce(
  group: TrajectoryGroup, split: str, emit: Callable[[events.Event], object]
) -> None:
  """Emits the beginning and the end of each episode that ended elsewhere."""
  about: dict[str, Any] = dict(
    group_id=group.group_id, task_id=group.task_id, split=split
  )
  for member in group.played:
    emit(events.EpisodeStarted(trajectory_id=member.trajectory_id, **about))
    emit(events.EpisodeFinished(trajectory=member, **about))


class GroupCollector:
  """Collects groups with one policy; see the module docstring.

  Belongs to one event loop at a time.
  """

  def __init__(
    self,
    make_episode: EpisodeFactory,
    model_call: model_calls.PolicyModel | Callable[..., Any],
    config: collect_settings.CollectConfig = collect_settings.CollectConfig(),
    *,
    max_turns: int = 10,
    seed: int = 0,
    split: str = "train",
    success_reward: float = 0.0,
    final_reward_fn: Callable[..., Any] | None = None,
    observers: events.Observer | None = None,
    runner: concurrency.CallRunner | None = None,
    greedy_call: model_calls.PolicyModel | Callable[..., Any] | None = None,
    expert_call: Any = None,
  ):
    """Args:

    make_episode: see `EpisodeFactory`; called once an episode.
    model_call, success_reward, final_reward_fn, observers, runner: see
      `TrajectoryCollectEngine`.
    config: groups, episodes in flight, deadlines.
    max_turns: turns of an episode, unless the task has its own `max_turns`.
    seed: the run's.
    split: "train" or "eval", for events and seeds.
    greedy_call: Variant of `model_call` that samples the likeliest tokens; it
      plays `TrajectoryGroup.extra`, which counts against
      `config.concurrency` and is no member. None plays none.
    expert_call: Model that plays `TrajectoryGroup.extra` in
      `config.expert_share` of the groups without a success. None plays none.
    """
    if max_turns < 1:
      raise ValueError(f"max_turns must be >= 1, got {max_turns}")
    self.config = config
    self._max_turns = max_turns
    self._seed = seed
    self._split = split
    self._success_reward = success_reward
    self._make_episode = make_episode
    self._model_call = model_call
    self._greedy_call = greedy_call
    self._expert_call = expert_call
    self._final_reward_fn = final_reward_fn
    self.observers = observers
    self._runner = runner or concurrency.EPISODE_RUNNER
    self._slots: asyncio.Semaphore | None = None
    self._slots_loop: asyncio.AbstractEventLoop | None = None
    self._announced = 0
    self._room = asyncio.Event()

  @property
  def beside(self) -> int:
    """Episodes played beside a group's members: 1 with a greedy call."""
    return int(self._greedy_call is not None)

  def announce(self, episodes: int) -> None:
    """Counts episodes that are about to be collected; see `wait_for_room`."""
    self._announced += episodes

  async def wait_for_room(self) -> None:
    """Waits until an announced episode would start at once."""
    while self._announced or self._gate().locked():
      self._room.clear()
      await self._room.wait()

  async def collect(
    self,
    task: object,
    *,
    index: int = 0,
    attempt: int = 0,
    start_version: int = 0,
    group_size: int | None = None,
    samples: Iterable[int] | None = None,
  ) -> TrajectoryGroup:
    """Collects the group of one task.

    Args:
      task: handed to `make_episode`.
      index: the group's number in the run; decides its seeds.
      attempt: 0, or how often this task's group was dropped before.
      start_version: recorded in the group.
      group_size: instead of the config's.
      samples: numbers of the members to play, which decide their seeds; all
        of the group by default.
    """
    if samples is None:
      samples = range(group_size or self.config.group_size)
    greedy_members = (GREEDY,) * self.beside
    task_id, group_id, members = self._start(
      task, index, attempt, (*samples, *greedy_members)
    )
    try:
      trajectories = list(await asyncio.gather(*members))
    except BaseException:
      await _cancel(members)
      raise
    extra = trajectories.pop() if self._greedy_call is not None else None
    if extra is None:
      extra = await self._expert(
        trajectories, task, task_id, group_id, index, attempt
      )
    return TrajectoryGroup(
      group_id=group_id,
      task_id=task_id,
      trajectories=tuple(trajectories),
      start_version=start_version,
      attempt=attempt,
      extra=extra,
    )

  async def collect_parts(
    self,
    task: object,
    *,
    index: int = 0,
    attempt: int = 0,
    start_version: int = 0,
    parts: int,
  ) -> AsyncGenerator[TrajectoryGroup, None]:
    """Collects the group of one task in parts, in the order of its ends.

    A part is yielded when `config.part_size` more members are valid, the last
    one when all have ended, with whatever members are left. Each holds the
    rewards of the valid members of earlier parts. Close the iterator.

    Args:
      task, index, attempt, start_version: as of `collect`.
      parts: Members to collect; fewer than all where a run is resumed in the
        middle of it.
    """
    size, part_size = self.config.group_size, self.config.part_size
    samples = range(size - parts * part_size, size)
    task_id, group_id, members = self._start(task, index, attempt, samples)
    rewards: tuple[float, ...] = ()
    ended: list[Trajectory] = []

    def part() -> TrajectoryGroup:
      return TrajectoryGroup(
        group_id=group_id,
        task_id=task_id,
        trajectories=tuple(ended),
        start_version=start_version,
        attempt=attempt,
        peer_rewards=rewards,
      )

    try:
      for coming in asyncio.as_completed(members):
        ended.append(await coming)
        valid = sum(t.is_trainable for t in ended)
        if valid == part_size:
          outcome = part()
          ended = []
          rewards += tuple(float(t.reward) for t in outcome.valid)
          yield outcome
      if ended:
        yield part()
    finally:
      await _cancel(members)

  def _start(
    self, task: object, index: int, attempt: int, samples: Iterable[int | str]
  ) -> tuple[str, str, list[asyncio.Task[Trajectory]]]:
    """Starts a group's episodes: its task's id, its own, and its members."""
    task_id = task_id_of(task)
    group_id = self.group_id(index, attempt)
    return (
      task_id,
      group_id,
      [
        asyncio.ensure_future(
          self._episode(task, task_id, group_id, index, attempt, sample)
        )
        for sample in samples
      ],
    )

  async def _expert(
    self,
    trajectories: Iterable[Trajectory],
    task: object,
    task_id: str,
    group_id: str,
    index: int,
    attempt: int,
  ) -> Trajectory | None:
    """The success of an expert beside members that all failed, or None.

    Whether such a group has one is drawn from the group's own seed.
    """
    if self._expert_call is None:
      return None
    if any(t.status is Status.SUCCEEDED for t in trajectories):
      return None
    seed = (self._seed, self._split, index, task_id, attempt, EXPERT)
    draw = random.Random(model_calls.derive_seed(*seed)).random()
    if draw >= self.config.expert_share:
      return None
    played = await self._episode(
      task, task_id, group_id, index, attempt, EXPERT
    )
    return played if played.status is Status.SUCCEEDED else None

  def group_id(self, index: int, attempt: int) -> str:
    """Name of a group, with which the names of its episodes begin."""
    suffix = f"-r{attempt}" if attempt else ""
    return f"{self._split}-{index:06d}{suffix}"

  def emit(self, event: events.Event) -> None:
    if self.observers is not None:
      self.observers.on_event(event)

  async def _episode(
    self, task, task_id, group_id, index, attempt, sample
  ) -> Trajectory:
    deadlines = self.config.deadlines
    async with self._slot():
      name = f"{group_id}.{sample}"
      env = None
      try:
        with concurrency.contained("the episode's factory"):
          pair = self._make_episode(task)
        if inspect.isawaitable(pair):
          pair = await self._runner.run(pair, seconds=deadlines.reset)
        agent, env = pair
        collecting = episode.TrajectoryCollectEngine(
          agent,
          env,
          {GREEDY: self._greedy_call, EXPERT: self._expert_call}.get(sample)
          or self._model_call,
          self._final_reward_fn,
          max_steps=getattr(task, "max_turns", None) or self._max_turns,
          gamma=self.config.gamma,
          timeout=deadlines.episode,
          deadlines=deadlines,
          seed=model_calls.derive_seed(
            self._seed, self._split, index, task_id, attempt, sample
          ),
          task=task,
          success_reward=self._success_reward,
          max_reward=self.config.max_reward,
          observers=self.observers,
          runner=self._runner,
          trajectory_id=name,
          group_id=group_id,
          task_id=task_id,
          split=self._split,
        )
      except Exception as e:  # pylint: disable=broad-except
        if env is not None:
          await self._close(env, name)
        return self._stillborn(task, task_id, group_id, name, e)
      return await collecting.collect()

  async def _close(self, env: adapters.Env, name: str) -> None:
    """Closes the environment of an episode that cannot begin."""

    def fault(stage: str, kind: str, message: str) -> None:
      self.emit(events.Fault(stage, kind, message, trajectory_id=name))

    await teardown.run(
      concurrency.Guarded(
        env, runner=self._runner, inline=concurrency.runs_inline(env)
      ),
      None,
      runner=self._runner,
      seconds=self.config.deadlines.close,
      fault=fault,
    )

  @contextlib.asynccontextmanager
  async def _slot(self) -> AsyncIterator[None]:
    """A place among the episodes in flight."""
    try:
      async with self._gate():
        self._announced = max(0, self._announced - 1)
        self._room.set()
        yield
    finally:
      self._room.set()

  def _gate(self) -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if self._slots is None or self._slots_loop is not loop:
      self._slots = asyncio.Semaphore(self.config.concurrency)
      self._slots_loop = loop
    return self._slots

  def _stillborn(self, task, task_id, group_id, name, e) -> Trajectory:
    """The trajectory of an episode that could not be built."""
    text = concurrency.describe(e)
    result = Trajectory(
      task=adapters.writable(task),
      status=Status.ENV_ERROR,
      error=f"EnvCreateError: {text}",
      trajectory_id=name,
    )
    common = dict(group_id=group_id, task_id=task_id, split=self._split)
    self.emit(events.EpisodeStarted(trajectory_id=name, **common))
    self.emit(
      events.Fault(
        stage="create", kind="EnvCreateError", message=text, trajectory_id=name
      )
    )
    self.emit(events.EpisodeFinished(trajectory=result, **common))
    return result


async def _cancel(members: Iterable[asyncio.Task[Trajectory]]) -> None:
  members = list(members)
  for member in members:
    member.cancel()
  await asyncio.gather(*members, return_exceptions=True)
