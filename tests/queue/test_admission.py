"""Which groups GroupQueue admits, and in which order it delivers them."""

import asyncio
import queue as std_queue
import random

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import queue_groups
import trials
from tunix.rl.queue import group_queue

GroupQueue = group_queue.GroupQueue
QueueConfig = group_queue.QueueConfig
group = queue_groups.group
names = queue_groups.names


def test_admission_gate_is_the_formula():
  q = GroupQueue(2, QueueConfig(max_staleness=1))
  tickets = [q.acquire_start(timeout=0) for _ in range(4)]
  assert [t.index for t in tickets] == [0, 1, 2, 3]
  with pytest.raises(std_queue.Full, match="4 running"):
    q.acquire_start(timeout=0)
  for ticket in tickets[:2]:
    q.put(group(ticket.index), ticket)
  with pytest.raises(std_queue.Full):  # Accepted ones count as well.
    q.acquire_start(timeout=0)
  q.get_batch()
  with pytest.raises(std_queue.Full):  # And consumed ones do.
    q.acquire_start(timeout=0)
  q.set_version(1)
  assert q.acquire_start(timeout=0).start_version == 1
  q.release_start(tickets[2])
  q.acquire_start(timeout=0)
  q.acquire_start(timeout=0)
  with pytest.raises(std_queue.Full):
    q.acquire_start(timeout=0)


def test_the_gate_does_not_starve_after_drops():
  """All of a version's groups turn out stale: new ones are admitted."""
  q = GroupQueue(2, QueueConfig(max_staleness=0))
  for ticket in [q.acquire_start(), q.acquire_start()]:
    q.put(group(ticket.index, 0), ticket)
  q.set_version(1)
  fresh = [q.acquire_start(timeout=0) for _ in range(4)]
  q.put(group("a", 1), fresh[0])
  q.put(group("b", 1), fresh[1])
  assert names(q.get_batch(timeout=0)) == ["a", "b"]


def test_a_batch_is_ordered_by_admission():
  q = GroupQueue(3)
  tickets = [q.acquire_start() for _ in range(3)]
  for ticket in (tickets[2], tickets[0], tickets[1]):
    q.put(group(ticket.index), ticket)
  assert names(q.get_batch(timeout=0)) == ["0", "1", "2"]


def test_admission_order_forgets_released_tickets():
  q = GroupQueue(1, QueueConfig(max_staleness=1), order="admission")
  t0, t1 = q.acquire_start(), q.acquire_start()
  q.put(group("b"), t1)
  q.release_start(t0)
  assert q.get(timeout=0).group_id == "b"


def test_admission_order_waits_for_the_slow_one():
  q = GroupQueue(2, QueueConfig(max_staleness=1, capacity=2), order="admission")
  tickets = [q.acquire_start() for _ in range(4)]
  q.put(group(1), tickets[1])
  q.put(group(2), tickets[2])
  with pytest.raises(std_queue.Empty):
    q.get_batch(timeout=0)
  with pytest.raises(std_queue.Full):
    q.put(group(3), tickets[3], timeout=0)
  # Full, but this is the one the consumer waits for.
  q.put(group(0), tickets[0], timeout=0)
  assert names(q.get_batch(timeout=0)) == ["0", "1"]


def test_late_groups_make_room_for_others():
  config = QueueConfig(max_staleness=2, admission="recent")
  q = GroupQueue(1, config)
  assert not q.bounds_running
  late = [q.acquire_start(timeout=0) for _ in range(3)]
  with pytest.raises(std_queue.Full, match="3 running"):
    q.acquire_start(timeout=0)
  q.put(group("first"), late[0])  # It waits and counts.
  q.set_version(1)
  assert q.acquire_start(timeout=0).index == 3  # A version's, as ever.
  with pytest.raises(std_queue.Full):
    q.acquire_start(timeout=0)
  q.set_version(2)
  # One that waits and one that started a version ago, of five.
  fresh = [q.acquire_start(timeout=0) for _ in range(3)]
  with pytest.raises(std_queue.Full, match="6 running"):
    q.acquire_start(timeout=0)
  # A group that is tried again starts now, and counts again.
  q.release_start(fresh[0])
  assert q.refresh_start(late[1]).start_version == 2
  with pytest.raises(std_queue.Full):
    q.acquire_start(timeout=0)
  assert names(q.get_batch(timeout=0)) == ["first"]


def test_parts_of_a_group_are_admitted_together():
  async def main():
    q = GroupQueue(4, QueueConfig(max_staleness=1, admission="recent"))
    start = q.acquire_parts_async
    both = [await start([None] * 3, 0), await start([None] * 3, 0)]
    assert [[t.index for t in tickets] for tickets in both] == [
      [0, 1, 2],
      [3, 4, 5],
    ]
    with pytest.raises(std_queue.Full, match="6 running"):
      await start([None] * 3, 0)  # Two could start, not three.
    for tickets in both:
      for ticket in tickets:
        q.release_start(ticket)
    # Of a resumed run: the parts that are wanting, behind one before them.
    q.expect([6, 8, 9], 10)
    assert [t.index for t in await start([6, 8, 9], 0)] == [6, 8, 9]
    with pytest.raises(ValueError, match="group 8 is already running"):
      await start([7, 8], 0)
    assert q.counters()["running"] == 3  # None of them was started.

  asyncio.run(main())


def test_ready_groups_are_delivered_in_the_order_of_admission():
  """Whichever ended first: the tokens of early ones grow too old first."""
  q = GroupQueue(1, QueueConfig(max_staleness=3))
  tickets = [q.acquire_start() for _ in range(4)]
  for number in (2, 3, 0):
    q.put(group(number), tickets[number])
  assert names(q.get_batch(timeout=0)) == ["0"]
  q.put(group(1), tickets[1])
  assert names(q.get_batch(2, timeout=0)) == ["1", "2"]
  assert names(q.get_batch(timeout=0)) == ["3"]


def test_running_groups_may_be_left_to_the_producer():
  q = GroupQueue(1, QueueConfig(max_staleness=1, admission="finished"))
  assert not q.bounds_running
  tickets = [q.acquire_start(timeout=0) for _ in range(5)]
  for ticket in tickets[:2]:
    q.put(group(ticket.index), ticket)
  with pytest.raises(std_queue.Full, match="2 groups ready"):
    q.acquire_start(timeout=0)
  q.get()
  q.set_version(1)
  q.acquire_start(timeout=0)


def test_refund_admits_more():
  q = GroupQueue(1)
  q.put(group("dull"), q.acquire_start())
  q.get()
  with pytest.raises(std_queue.Full):
    q.acquire_start(timeout=0)
  q.refund(1)
  q.acquire_start(timeout=0)


@settings(max_examples=trials.count(80), deadline=None)
@given(
  admission=st.sampled_from(["started", "recent", "finished"]),
  staleness=st.integers(1, 3),
  per_step=st.integers(1, 4),
  seed=st.integers(0, 2**32),
)
def test_any_run_follows_the_rules(admission, staleness, per_step, seed):
  """A learner, and producers whose groups end in any order."""
  rng = random.Random(seed)
  dropped = []
  config = QueueConfig(
    max_staleness=staleness, stale_policy="trim", admission=admission
  )
  q = GroupQueue(
    per_step, config, on_drop=lambda g, _: dropped.append(int(g.group_id))
  )
  running, ready, delivered = {}, {}, []
  taken = version = 0  # Groups taken of this version, and the version.

  def start():
    counted = {
      "started": running,
      "recent": [
        t for t in running.values() if version - t.start_version < staleness
      ],
      "finished": (),
    }[admission]
    room = (staleness + version + 1) * per_step - len(delivered) - len(ready)
    try:
      ticket = q.acquire_start(timeout=0)
    except std_queue.Full:
      assert room <= len(counted)
      return
    assert room > len(counted)
    assert ticket.index == q.counters()["started"] - 1  # In order, each once.
    running[ticket.index] = ticket

  def end():
    if not running or len(ready) >= q.capacity:
      return
    ticket = running.pop(rng.choice(list(running)))
    newest = rng.randint(ticket.start_version, version)
    q.put(group(ticket.index, ticket.start_version, newest), ticket)
    ready[ticket.index] = newest

  def purge():
    for index, newest in list(ready.items()):
      if newest < version - staleness:
        del ready[index]
        assert index in dropped

  def take():
    try:
      (found,) = q.get_batch(1, timeout=0)
    except std_queue.Empty:
      assert not ready
      return
    assert int(found.group_id) == min(ready)  # None is overtaken.
    del ready[min(ready)]
    delivered.append(int(found.group_id))
    assert found.oldest_version >= version - staleness

  for _ in range(200):
    rng.choices((start, end, take), (2, 2, 1))[0]()
    purge()
    if len(delivered) - taken == per_step:
      taken = len(delivered)
      version += 1
      q.set_version(version)
      purge()
  assert len(set(delivered + dropped)) == len(delivered) + len(dropped)
  everything = sorted([*delivered, *dropped, *ready, *running])
  assert everything == list(range(q.counters()["started"]))
