"""Collecting beside a learner, under every rule of admission: no token beyond
the bound is trained on, each task is dealt once and none is left out."""

import asyncio
import collections
import random

import collector_fakes as fakes
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import loop_cases as cases
import trials
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.queue import group_queue


class LongTailed(fakes.ScriptEnv):
  """Takes its time for each of three turns; few episodes take long."""

  def __init__(self, rng):
    super().__init__((0.0, 0.0, 1.0))
    self.seconds = min(0.02, 0.0005 * rng.lognormvariate(0, 1.5))

  async def step(self, action):
    await asyncio.sleep(self.seconds)
    return await super().step(action)


def tokens_of(group):
  """The versions of the tokens in a group's loss."""
  return [
    int(version)
    for member in group
    for sequence in member.sequences
    for version in sequence.versions[sequence.loss_mask]
  ]


async def play(tasks, per_step, config, part_size, seed):
  """Collects all tasks beside a learner; returns what it took, what was
  dropped for its age, the tasks in the order of their starts, the queue."""
  rng = random.Random(seed)
  dropped, started = [], []

  def pair(task):
    started.append(task)
    return fakes.ListAgent(), LongTailed(rng)

  client = cases.SeededClient()
  collector = cases.make_collector(
    client, pair, part_size=part_size, concurrency=8
  )
  parts = collector.config.parts
  queue = group_queue.GroupQueue(
    per_step * parts, config, on_drop=lambda g, _: dropped.append(g)
  )
  loop = tc.CollectLoop(collector, iter(tasks), queue)
  running = asyncio.ensure_future(loop.run())
  taken = []
  try:
    while True:
      batch = (await queue.lease(timeout=30)).groups
      taken.extend((queue.version, group) for group in batch)
      await asyncio.sleep(rng.random() * 0.01)  # An update.
      client.version = queue.version + 1
      queue.set_version(client.version)
  except group_queue.QueueClosed:
    pass
  await running
  for _ in range(queue.qsize()):  # Fewer than a batch.
    taken.append((queue.version, queue.get(timeout=30)))
  return taken, dropped, started, queue


@settings(max_examples=trials.count(60), deadline=None)
@given(
  admission=st.sampled_from(["started", "recent", "finished"]),
  stale_policy=st.sampled_from(["drop", "trim"]),
  max_staleness=st.integers(1, 3),
  part_size=st.sampled_from([0, 2]),
  per_step=st.integers(1, 3),
  count=st.integers(1, 14),
  seed=st.integers(0, 2**16),
)
def test_the_bound_holds_and_each_task_is_dealt_once(
  admission, stale_policy, max_staleness, part_size, per_step, count, seed
):
  config = group_queue.QueueConfig(
    max_staleness=max_staleness, stale_policy=stale_policy, admission=admission
  )
  tasks = [f"task {i}" for i in range(count)]
  taken, dropped, started, queue = asyncio.run(
    play(tasks, per_step, config, part_size, seed)
  )
  for version, group in taken:
    lags = [version - of_token for of_token in tokens_of(group)]
    assert lags and 0 <= min(lags) and max(lags) <= max_staleness
  # Started in the order of the source, four episodes each.
  assert started == [task for task in tasks for _ in range(4)]
  groups = [*(group for _, group in taken), *dropped]
  episodes = collections.Counter(
    member.trajectory_id for group in groups for member in group
  )
  assert set(episodes.values()) == {1} and len(episodes) == 4 * count
  assert len({group.group_id for group in groups}) == count
  counters = queue.counters()
  assert counters["running"] == counters["ready"] == 0
  assert counters["max_lag"] <= max_staleness
