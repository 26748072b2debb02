"""The promises of GroupQueue: gates, bounds, wake-ups, durability."""

import asyncio
import dataclasses
import math
import queue as std_queue
import random
import threading
import time

from hypothesis import settings
from hypothesis import stateful
from hypothesis import strategies as st
import pytest
import queue_groups
import trials
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import data_queue
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

GroupQueue = group_queue.GroupQueue
QueueConfig = group_queue.QueueConfig
group = queue_groups.group
names = queue_groups.names


def test_is_a_data_queue():
  q = GroupQueue(1, QueueConfig(max_staleness=1))
  assert isinstance(q, data_queue.AbstractDataQueue)
  a, b = group("a"), group("b")
  q.put(a)
  q.put(b)
  assert q.qsize() == 2
  assert q.get() is a
  assert q.get(block=False) is b
  with pytest.raises(std_queue.Empty):
    q.get(block=False)
  with pytest.raises(std_queue.Empty):
    q.get(timeout=0.01)


@pytest.mark.parametrize(
  "kwargs, name",
  [
    ({"groups_per_step": 0}, "groups_per_step"),
    ({"config": {"max_staleness": -1}}, "max_staleness"),
    ({"config": {"capacity": 1}}, "capacity"),
    ({"config": {"stale_policy": "wait"}}, "stale_policy"),
    ({"order": "random"}, "order"),
    ({"version": -1}, "version"),
  ],
)
def test_bad_settings_are_refused(kwargs, name):
  with pytest.raises(ValueError, match=name):
    config = QueueConfig(**kwargs.pop("config", {}))
    GroupQueue(**{"groups_per_step": 2, "config": config, **kwargs})


def test_only_groups_get_in():
  with pytest.raises(TypeError, match="int"):
    GroupQueue(1).put(3)


def test_tickets_are_used_once():
  q = GroupQueue(2)
  ticket = q.acquire_start()
  q.put(group(), ticket)
  with pytest.raises(ValueError, match="not running"):
    q.put(group(), ticket)
  with pytest.raises(ValueError, match="not running"):
    q.release_start(ticket)
  assert q.counters()["put"] == 1


def test_stale_groups_are_dropped_and_refunded():
  dropped = []
  q = GroupQueue(
    1,
    QueueConfig(max_staleness=1),
    on_drop=lambda g, why: dropped.append((g, why)),
  )
  t0, t1 = q.acquire_start(), q.acquire_start()
  q.put(group("old", 5, 0), t0)
  q.put(group("fresh", 1), t1)
  q.set_version(1)
  assert q.qsize() == 2
  q.set_version(2)
  assert q.qsize() == 1
  assert dropped[0][0].group_id == "old"
  assert "version 0" in dropped[0][1]
  # Refunded: of the four admitted at version 2, one is left.
  assert q.counters()["accepted"] == 1
  for _ in range(3):
    q.acquire_start(timeout=0)
  assert q.get().group_id == "fresh"
  # A group that is already too old when it comes is not delivered either.
  q.put(group("late", 0))
  assert q.qsize() == 0
  assert q.counters()["dropped_stale"] == 2
  assert q.counters()["max_lag"] == 1


async def test_a_released_group_counts_at_its_last_delivery_only():
  q = GroupQueue(1, QueueConfig(max_staleness=4))
  q.set_version(1)
  await q.push(group("a", 0))
  lease = await q.lease()
  q.set_version(3)
  await q.release(lease)
  assert q.counters()["delivered"] == q.counters()["mean_lag"] == 0
  await q.lease()
  counters = q.counters()
  assert (counters["delivered"], counters["mean_lag"]) == (1, 3)


def test_trimming_keeps_what_is_young_enough():
  q = GroupQueue(1, QueueConfig(max_staleness=1, stale_policy="trim"))
  mixed = trajectory_lib.Trajectory(
    status=trajectory_lib.TrajectoryStatus.SUCCEEDED,
    reward=1.0,
    sequences=[
      trajectory_lib.TokenSequence(
        tokens=[5, 6, 7, 8, 9],
        loss_mask=[False, True, True, False, True],
        logprobs=[0, -0.5, -0.6, 0, -0.7],
        versions=[-1, 0, 1, -1, 2],
        turn_ids=[0, 0, 0, 1, 1],
        entropies=[0, 0.1, 0.2, 0, 0.3],
        support=[[-1], [6], [7], [-1], [9]],
      )
    ],
  )
  old = dataclasses.replace(
    mixed, reward=0.0, sequences=[queue_groups.sequence(0)]
  )
  whole = trajectory_lib.TrajectoryGroup("g", "t", (mixed, old))
  q.put(whole)
  for version in (1, 2):
    q.set_version(version)
  (taken,) = q.get_batch(timeout=0)
  first, second = taken
  (sequence,) = first.sequences
  assert sequence.loss_mask.tolist() == [False, False, True, False, True]
  assert sequence.versions.tolist() == [-1, -1, 1, -1, 2]
  assert sequence.tokens.tolist() == [5, 6, 7, 8, 9]
  assert sequence.support.tolist() == [[-1], [-1], [7], [-1], [9]]
  assert sequence.logprobs.tolist() == pytest.approx([0, 0, -0.6, 0, -0.7])
  assert (first.stale_tokens, second.stale_tokens) == (1, 1)
  # A member of which nothing is trained on is still compared with.
  assert (second.num_sampled, second.is_trainable) == (0, True)
  assert taken.rewards == (1.0, 0.0)
  assert taken.oldest_version == 1 and q.counters()["max_lag"] == 1
  assert q.counters()["trimmed_tokens"] == 2
  again = trajectory_lib.TrajectoryGroup.from_json(taken.to_json())
  assert again.to_json() == taken.to_json() and again.rewards == (1.0, 0.0)
  # The group itself is as it was.
  assert whole.trajectories[0].num_sampled == 3


def test_stale_groups_may_fail_the_run():
  q = GroupQueue(1, QueueConfig(stale_policy="error"))
  q.put(group("old", 0))
  q.set_version(1)
  with pytest.raises(group_queue.QueueFailed, match="'old'") as caught:
    q.get(timeout=5)
  assert isinstance(caught.value.__cause__, group_queue.StaleGroupError)


def test_version_does_not_go_back():
  q = GroupQueue(1, version=3)
  with pytest.raises(ValueError, match="3 to 2"):
    q.set_version(2)


def test_batches_that_can_never_be_are_refused():
  q = GroupQueue(2, QueueConfig(max_staleness=0, capacity=8))
  with pytest.raises(ValueError, match="capacity"):
    q.get_batch(9)
  q.acquire_start()
  with pytest.raises(ValueError, match="never admitted"):
    q.get_batch(3)


def test_put_waits_while_full():
  q = GroupQueue(1)
  q.put(group("a"))
  with pytest.raises(std_queue.Full):
    q.put(group("b"), timeout=0.01)
  thread = threading.Thread(target=q.put, args=(group("c"),))
  thread.start()
  assert q.get(timeout=5).group_id == "a"
  assert q.get(timeout=5).group_id == "c"
  thread.join(5)
  assert not thread.is_alive()


def test_a_group_that_is_being_stored_takes_its_place():
  writing, may_end = threading.Event(), threading.Event()

  class SlowStore(group_store.MemoryGroupStore):
    def append(self, index, group):
      writing.set()
      assert may_end.wait(10)
      super().append(index, group)

  q = GroupQueue(1, store=SlowStore())
  thread = threading.Thread(target=q.put, args=(group("a"),))
  thread.start()
  assert writing.wait(5)
  try:
    with pytest.raises(std_queue.Full):
      q.put(group("b"), timeout=0.01)
  finally:
    may_end.set()
    thread.join(5)
  assert names([q.get(timeout=5)]) == ["a"]


# --- Ends -------------------------------------------------------------------


def _waiters(q):
  """One waiter of each kind, in threads and on one event loop."""
  outcomes = {}

  def note(name, call):
    try:
      outcomes[name] = call()
    except BaseException as e:  # pylint: disable=broad-except
      outcomes[name] = e

  async def note_async(name, awaitable):
    try:
      outcomes[name] = await awaitable
    except BaseException as e:  # pylint: disable=broad-except
      outcomes[name] = e

  async def batch():
    return (await q.lease(2)).groups

  async def main():
    await asyncio.gather(
      note_async("aget", batch()),
      note_async("astart", q.acquire_parts_async([None])),
      note_async("aput", q.push(group("more"))),
    )

  threads = [
    threading.Thread(target=note, args=("get", lambda: q.get_batch(2))),
    threading.Thread(target=note, args=("start", q.acquire_start)),
    threading.Thread(target=note, args=("put", lambda: q.put(group("m")))),
    threading.Thread(target=lambda: asyncio.run(main())),
  ]
  for thread in threads:
    thread.start()
  deadline = time.monotonic() + 10
  while q._condition.waiting < 6:
    assert time.monotonic() < deadline
    time.sleep(0.005)
  return threads, outcomes


def _join(threads):
  for thread in threads:
    thread.join(10)
    assert not thread.is_alive()


def _full_queue():
  """A queue on which every kind of call has to wait."""
  q = GroupQueue(2, QueueConfig(capacity=2), order="admission")
  tickets = [q.acquire_start(), q.acquire_start()]
  q.put(group("x"))
  q.put(group("y"))
  assert tickets[0].index == 0  # Runs on; the consumer waits for it.
  return q


def test_close_wakes_every_waiter_and_keeps_what_is_ready():
  q = _full_queue()
  threads, outcomes = _waiters(q)
  q.close()
  _join(threads)
  batches = [outcomes.pop("get"), outcomes.pop("aget")]
  # One of the two consumers got what was there.
  assert sorted(isinstance(b, list) for b in batches) == [False, True]
  rest = [b for b in batches if not isinstance(b, list)] + [*outcomes.values()]
  assert len(rest) == 5
  assert all(isinstance(e, group_queue.QueueClosed) for e in rest)
  with pytest.raises(group_queue.QueueClosed):
    q.get()
  q.close()


def test_fail_wakes_every_waiter_and_ready_groups_come_first():
  q = _full_queue()
  threads, outcomes = _waiters(q)
  q.fail(ZeroDivisionError("collector"))
  _join(threads)
  batches = [outcomes.pop("get"), outcomes.pop("aget")]
  assert sorted(isinstance(b, list) for b in batches) == [False, True]
  rest = [b for b in batches if not isinstance(b, list)] + [*outcomes.values()]
  for e in rest:
    assert isinstance(e, group_queue.QueueFailed)
    assert isinstance(e.__cause__, ZeroDivisionError)
  with pytest.raises(group_queue.QueueFailed, match="collector"):
    q.get()


def test_a_slow_consumer_gets_every_group_after_close():
  q = GroupQueue(10)
  for i in range(10):
    q.put(group(i))
  q.close()
  got = []
  with pytest.raises(group_queue.QueueClosed):
    while True:
      got.append(q.get().group_id)
  assert got == [str(i) for i in range(10)]


def test_a_cancelled_waiter_takes_nothing():
  async def main():
    q = GroupQueue(1)
    waiter = asyncio.ensure_future(q.lease(1))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert waiter.cancelled()
    await q.push(group("a"))
    assert not q._condition.waiting
    with pytest.raises(std_queue.Full):
      await q.push(group("b"), timeout=0.01)
    assert (await q.lease(1, timeout=0.01)).groups
    assert await q.lease(1, timeout=0.01) is None

  asyncio.run(main())


# --- Threads and event loops together ---------------------------------------


@pytest.mark.parametrize("order", group_queue.ORDERS)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_stress(order, max_staleness):
  """Producers in threads and on a loop, one learner: the hard bound holds."""
  per_step, steps = 4, 40
  q = GroupQueue(
    per_step, QueueConfig(max_staleness=max_staleness), order=order
  )
  rng = random.Random(0)
  produced, lock = set(), threading.Lock()

  def made(ticket):
    lag = rng.choice([0, 0, 0, 1])  # Weights may arrive late.
    version = max(0, ticket.start_version - lag * (max_staleness > 0))
    item = group(ticket.index, version, q.version)
    with lock:
      assert ticket.index not in produced
      produced.add(ticket.index)
    return item

  def producer():
    while True:
      try:
        ticket = q.acquire_start()
        if rng.random() < 0.1:
          q.release_start(ticket)
          continue
        item = made(ticket)
        time.sleep(rng.random() * 0.002)
        q.put(item, ticket)
      except group_queue.QueueClosed:
        return

  async def async_producer():
    while True:
      try:
        (ticket,) = await q.acquire_parts_async([None])
        item = made(ticket)
        await asyncio.sleep(rng.random() * 0.002)
        await q.push(item, ticket)
      except group_queue.QueueClosed:
        return

  async def loop():
    await asyncio.gather(*(async_producer() for _ in range(6)))

  threads = [threading.Thread(target=producer) for _ in range(3)]
  threads.append(threading.Thread(target=lambda: asyncio.run(loop())))
  for thread in threads:
    thread.start()
  seen = []
  for step in range(steps):
    batch = q.get_batch(timeout=30)
    assert len(batch) == per_step
    indices = [int(g.group_id) for g in batch]
    assert indices == sorted(indices)
    for item in batch:
      assert step - item.oldest_version <= max_staleness
    seen.extend(indices)
    q.set_version(step + 1)
    assert len(produced) - len(seen) <= (
      (max_staleness + 1) * per_step + q.counters()["dropped_stale"]
    )
  q.close()
  _join(threads)
  assert len(seen) == len(set(seen)) == steps * per_step
  counters = q.counters()
  assert counters["delivered"] == len(seen)
  assert counters["max_lag"] <= max_staleness
  assert counters["running"] == 0 or counters["running"] <= 10
  if order == "admission":
    # Strict: nothing is overtaken. Only late weights can make a group stale.
    assert seen == sorted(seen)


# --- Any sequence of operations ---------------------------------------------


class QueueMachine(stateful.RuleBasedStateMachine):
  """Compares the queue with the rules of the contract."""

  tickets = stateful.Bundle("tickets")

  @stateful.initialize(
    per_step=st.integers(1, 3),
    staleness=st.integers(0, 2),
    order=st.sampled_from(group_queue.ORDERS),
    stale_policy=st.sampled_from(["drop", "trim"]),
    admission=st.sampled_from(["started", "recent", "finished"]),
  )
  def start(self, per_step, staleness, order, stale_policy, admission):
    self.per_step, self.staleness = per_step, staleness
    self.order = order
    self.trims = stale_policy == "trim"
    # Versions during which a running group counts.
    self.counts_for = {"started": math.inf, "recent": staleness, "finished": 0}[
      admission
    ]
    self.stale_tokens = 0
    self.dropped = []
    self.q = GroupQueue(
      per_step,
      QueueConfig(
        max_staleness=staleness, stale_policy=stale_policy, admission=admission
      ),
      order=order,
      on_drop=lambda g, why: self.dropped.append(int(g.group_id)),
    )
    self.version = 0
    self.running = {}
    self.ready = {}
    self.delivered = []
    self.refunds = 0

  def accepted(self):
    return len(self.ready) + len(self.delivered) - self.refunds

  def limit(self):
    return (self.staleness + self.version + 1) * self.per_step

  def drop_stale(self):
    bound = self.version - self.staleness
    for index, versions in list(self.ready.items()):
      if (max(versions) if self.trims else min(versions)) < bound:
        del self.ready[index]
        assert index in self.dropped
    assert not set(self.dropped) & set(self.ready)

  @stateful.rule(target=tickets)
  def acquire(self):
    running = [
      t
      for t in self.running.values()
      if self.version - t.start_version < self.counts_for
    ]
    allowed = self.accepted() + len(running) < self.limit()
    try:
      ticket = self.q.acquire_start(timeout=0)
    except std_queue.Full:
      assert not allowed
      return stateful.multiple()
    assert allowed
    assert ticket.start_version == self.version
    self.running[ticket.index] = ticket
    return ticket

  @stateful.rule(
    ticket=stateful.consumes(tickets),
    lags=st.lists(st.integers(0, 3), min_size=1, max_size=3),
  )
  def put(self, ticket, lags):
    """Members whose tokens are of several versions, as weights swap."""
    versions = [max(0, self.version - lag) for lag in lags]
    room = len(self.ready) < self.q.capacity
    try:
      self.q.put(group(ticket.index, *versions), ticket, timeout=0)
    except std_queue.Full:
      # Weights moved on without anybody having taken what is ready.
      assert not room
      self.release(ticket)
      return
    del self.running[ticket.index]
    self.ready[ticket.index] = versions
    self.drop_stale()

  @stateful.rule(ticket=stateful.consumes(tickets))
  def release(self, ticket):
    self.q.release_start(ticket)
    del self.running[ticket.index]

  @stateful.rule()
  def learn(self):
    self.version += 1
    self.q.set_version(self.version)
    self.drop_stale()

  @stateful.rule(n=st.integers(1, 3))
  def take(self, n):
    if n > (self.staleness + 1) * self.per_step:
      return
    possible = len(self.ready) >= n
    if self.order == "admission" and possible:
      last = sorted(self.ready)[n - 1]
      possible = not any(index < last for index in self.running)
    try:
      batch = self.q.get_batch(n, timeout=0)
    except std_queue.Empty:
      assert not possible
      return
    assert possible
    assert len(batch) == n
    indices = [int(g.group_id) for g in batch]
    assert indices == sorted(self.ready)[:n]  # Whatever the order.
    for found in batch:
      versions = self.ready.pop(int(found.group_id))
      fresh = [v for v in versions if self.version - v <= self.staleness]
      assert fresh == (versions if not self.trims else fresh) != []
      trained = [
        int(v)
        for member in found
        for sequence in member.sequences
        for v in sequence.versions[sequence.loss_mask]
      ]
      assert trained == fresh  # No token beyond the bound, none lost.
      assert len(found.valid) == len(versions)  # All are compared.
      self.stale_tokens += len(versions) - len(fresh)
    self.delivered.extend(indices)

  @stateful.rule()
  def refund(self):
    if self.delivered and self.refunds < len(self.delivered):
      self.q.refund(1)
      self.refunds += 1

  @stateful.invariant()
  def counts_agree(self):
    if not hasattr(self, "q"):
      return
    counters = self.q.counters()
    assert counters["ready"] == self.q.qsize() == len(self.ready)
    assert counters["running"] == len(self.running)
    assert counters["accepted"] == self.accepted()
    assert counters["delivered"] == len(self.delivered)
    assert counters["dropped_stale"] == len(self.dropped)
    assert counters["max_lag"] <= self.staleness
    assert counters["trimmed_tokens"] == self.stale_tokens
    assert len(set(self.delivered)) == len(self.delivered)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
  max_examples=trials.count(60), stateful_step_count=30, deadline=None
)
