"""Plays a simulated schedule through the real loops; see `simulate_async.py`.

Real are the collector, the collecting loop, the queue with its admission and
its bound, and the learner's loop with its publishing, in two threads as in a
run. Environments and the policy sleep for what a simulated episode takes, and
an update is a sleep of fixed length. Tokens are sampled at an even pace while
the policy sleeps, each with the version of the weights of its moment.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import dataclasses
import itertools
import threading
import time
from typing import Any

import numpy as np
import simulate_async
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner import config as learner_config
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.queue import group_queue

_EOT = 1
_TOKENS = 400  # Of an episode of mean length.


class _Agent:
  """Keeps its messages, and acts by its answer."""

  def __init__(self):
    self.messages: list[dict[str, str]] = []

  @property
  def chat_completions(self) -> list[dict[str, str]]:
    return self.messages

  def reset(self) -> None:
    self.messages = [{"role": "system", "content": "s"}]
    self.trajectory = trajectory_lib.Trajectory()

  def update_from_env(self, observation, reward, is_last, info=None) -> None:
    if self.trajectory.task is None:
      self.trajectory.task = observation
    if not is_last:
      self.messages.append({"role": "user", "content": str(observation)})

  def update_from_model(self, response):
    self.messages.append({"role": "assistant", "content": response})
    return trajectory_lib.Action(response)


class _Env:
  """An environment whose step takes its time; its first words tell it all."""

  runs_inline = True

  def __init__(self, seconds: float, turns: int, share: float, unit: float):
    self._seconds, self._share, self._unit = seconds, share, unit
    self._turns = self._left = turns

  async def reset(self):
    return f"{self._seconds:.9f}", {}

  async def step(self, action):
    await asyncio.sleep(self._seconds * self._share / self._turns * self._unit)
    self._left -= 1
    return f"{self._seconds:.9f}", 1.0, not self._left, {}

  async def close(self):
    pass


class _Renderer:
  """The prompt is the episode's seconds, in thousands of a token id."""

  stop_token_ids = (_EOT,)
  image_token_id = 2

  def render(self, messages, add_generation_prompt=True):
    micro = int(float(messages[-1]["content"]) * 1e6)
    return policy_client.TokenPrompt(np.array([7, micro + 10]))

  def bridge(self, new_messages, *, last_sampled_is_eot):
    return self.render(new_messages)

  def decode(self, ids):
    return "x"


class _Policy:
  """Sleeps a turn's seconds; knows when which weights took over."""

  runs_inline = True

  def __init__(self, costs: simulate_async.Costs, unit: float):
    self._costs, self._unit = costs, unit
    self._since = [time.perf_counter()]

  def update_weights(self, version: int, state: Any) -> None:
    if version:
      self._since.append(time.perf_counter())

  async def generate(self, prompt, sampling, *, session):
    costs = self._costs
    seconds = (int(prompt.tokens[-1]) - 10) / 1e6
    seconds *= (1 - costs.env_share) / costs.turns
    began = time.perf_counter()
    await asyncio.sleep(seconds * self._unit)
    count = max(1, round(seconds / costs.episode_s * _TOKENS))
    at = np.linspace(began, time.perf_counter(), count, endpoint=False)
    versions = [bisect.bisect_right(self._since, t) - 1 for t in at]
    return policy_client.Completion(
      np.array([9] * (count - 1) + [_EOT]),
      np.full(count, -1.0),
      np.array(versions),
      policy_client.FinishReason.STOP,
    )

  async def release(self, session):
    pass


@dataclasses.dataclass(frozen=True)
class _Counters:
  updates: int


class _Learner:
  """An update is a sleep; keeps the account of what it was given."""

  def __init__(self, groups: int, seconds: float):
    self.config = learner_config.LearnerConfig(groups_per_step=groups)
    self.groups_per_step = groups
    self.seconds = seconds
    self.version = 0
    self.advantages: dict[str, np.ndarray] = {}
    self.left_out: dict[str, tuple[str, ...]] = {}
    self.account = simulate_async.Account()
    self.busy = 0.0

  @property
  def counters(self) -> _Counters:
    return _Counters(updates=self.version)

  def policy_state(self) -> None:
    return None

  def update(self, groups):
    began = time.perf_counter()
    for member in itertools.chain.from_iterable(groups):
      for sequence in member.sequences:
        versions = sequence.versions[sequence.loss_mask]
        for version, count in collections.Counter(versions.tolist()).items():
          self.account.trained[self.version - version] += count
      if member.num_sampled:
        self.account.lengths.append(float(member.task))
    time.sleep(max(0.0, self.seconds - (time.perf_counter() - began)))
    self.version += 1
    self.busy += self.seconds
    return {}


class _Watch:
  """Counts the episodes in flight and what they sampled."""

  def __init__(self, account: simulate_async.Account):
    self.account = account
    self._lock = threading.Lock()
    self._in_flight = 0
    self._since = time.perf_counter()
    self._started: dict[str, float] = {}
    self.taken = 0.0
    self.extra: list[float] = []  # Real seconds beside an episode's own.
    self.unit = 1.0

  def on_event(self, event: Any) -> None:
    kind = type(event).__name__
    if kind not in ("EpisodeStarted", "EpisodeFinished"):
      return
    with self._lock:
      self.advance()
      self._in_flight += 1 if kind == "EpisodeStarted" else -1
      if kind == "EpisodeStarted":
        self._started[event.trajectory_id] = self._since
      else:
        seconds = float(event.trajectory.task)
        took = self._since - self._started.pop(event.trajectory.trajectory_id)
        self.extra.append(took / self.unit - seconds)
        self.account.sampled += event.trajectory.num_sampled
        self.account.ended.append(seconds)

  def advance(self) -> None:
    now = time.perf_counter()
    self.taken += (now - self._since) * self._in_flight
    self._since = now


def play(
  costs: simulate_async.Costs,
  rules: simulate_async.Rules,
  steps: int,
  warm: int,
  seed: int = 0,
  *,
  unit: float,
) -> tuple[dict[str, Any], dict[str, float]]:
  """Runs the real loops; returns a report as `simulate_async.simulate` does.

  Also returns the costs that the run measured, in simulated seconds: `learn_s`,
  the learner's time of a step without its waiting, and `turn_s`, the time of a
  turn beside its share of the episode's seconds.

  Args:
    costs: Costs with `empty_speed` 1 and a slot for each episode in flight, as
      the policy here has no batch.
    rules: Rules of the run.
    steps, warm, seed: See `simulate_async.simulate`.
    unit: Real seconds that stand for one simulated second.
  """
  if costs.empty_speed != 1 or costs.slots < costs.concurrency:
    raise ValueError(
      "the real loops sleep, so that a batch costs nothing: give"
      " empty_speed=1 and slots >= concurrency"
    )
  draws = simulate_async.draw_groups(costs, rules, seed)
  policy = _Policy(costs, unit)
  learner = _Learner(rules.groups_per_step, costs.learn_s * unit)
  watch = _Watch(learner.account)
  watch.unit = unit

  def pair(task):
    seconds = task["seconds"].pop()
    return _Agent(), _Env(seconds, costs.turns, costs.env_share, unit)

  long = 1e6
  collector = tc.GroupCollector(
    pair,
    tc.PolicyModel(policy, _Renderer()),
    tc.CollectConfig(
      group_size=rules.group_size,
      min_valid=rules.part_size or 2,
      part_size=rules.part_size,
      concurrency=costs.concurrency,
      deadlines=tc.Deadlines(model=long, step=long, turn=long, episode=long),
    ),
    max_turns=costs.turns,
    observers=watch,
  )
  per_step = rules.groups_per_step * rules.parts
  queue = group_queue.GroupQueue(per_step, rules.queue)
  # A member takes the last of what is left.
  tasks = (
    {"task_id": f"t{d.task}", "seconds": list(d.seconds[::-1])} for d in draws
  )
  collecting = tc.CollectLoop(collector, tasks, queue)

  def publish(version: int, state: Any) -> None:
    if version:
      time.sleep(costs.sync_s * unit)
    policy.update_weights(version, state)

  spent: list[float] = []  # By the learner, without its waiting.

  class Steps:
    def on_event(self, event: Any) -> None:
      if type(event).__name__ == "StepFinished":
        metrics = event.metrics
        spent.append(metrics["time/step"] - metrics["time/wait"])

  loop = loop_lib.LearnerLoop(
    learner,
    queue,
    publish,
    observers=Steps(),
    parts=rules.parts,
    wait_timeout_s=600.0,
  )
  loop.publish()
  thread = threading.Thread(
    target=lambda: asyncio.run(collecting.run()), daemon=True
  )
  thread.start()
  try:
    loop.run(warm)
    with watch._lock:  # pylint: disable=protected-access
      watch.advance()
      account = learner.account = watch.account = simulate_async.Account()
      watch.taken = learner.busy = 0.0
      watch.extra.clear()
      loop.seconds.take()
      spent.clear()
      began = time.perf_counter()
    loop.run(warm + steps)
    with watch._lock:  # pylint: disable=protected-access
      watch.advance()
    seconds = time.perf_counter() - began
  finally:
    collecting.stop()
    queue.close()
    thread.join(30.0)
  measured = {
    "learn_s": float(np.mean(spent)) / unit,
    "turn_s": float(np.mean(watch.extra)) / costs.turns,
  }
  report = account.report(
    steps * costs.learn_s * unit / seconds,
    1 - learner.busy / seconds,
    1 - watch.taken / seconds / costs.concurrency,
  )
  return report, measured
