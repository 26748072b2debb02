"""A queue with a store: what survives a crash, and what does not come back."""

import asyncio
import queue as std_queue

import pytest
import queue_groups
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

GroupQueue = group_queue.GroupQueue
QueueConfig = group_queue.QueueConfig
group = queue_groups.group
names = queue_groups.names
sequence = queue_groups.sequence


def test_nothing_accepted_is_lost_and_nothing_consumed_comes_twice(tmp_path):
  path = tmp_path / "run" / "queue.sqlite"

  def make(version):
    return GroupQueue(
      2,
      QueueConfig(max_staleness=2),
      version=version,
      store=group_store.SqliteGroupStore(path),
    )

  q = make(0)
  for ticket in [q.acquire_start() for _ in range(6)]:
    if ticket.index != 4:  # Unfinished when the process dies.
      q.put(group(ticket.index, 0, 1), ticket)
  assert names(q.get_batch()) == ["0", "1"]
  q.set_version(1)
  q.ack()  # The learner's checkpoint holds this batch.
  assert names(q.get_batch()) == ["2", "3"]
  del q  # The second batch was never acknowledged.

  q = make(1)
  assert q.counters()["restored"] == 3
  assert q.known() == {0, 1, 2, 3, 5}
  # Two are consumed, three wait: of eight, three may start.
  first = q.acquire_start(timeout=0, index=4)
  assert first.index == 4
  assert [q.acquire_start(timeout=0).index for _ in range(2)] == [6, 7]
  restored = q.get_batch()
  assert names(restored) == ["2", "3"]
  assert restored[0].valid[0].sequences == [sequence(0)]
  assert names(q.get_batch(1)) == ["5"]
  q.release_start(first)
  with pytest.raises(ValueError, match="accepted before"):
    q.put(group("again"), q.acquire_start(index=0))


def test_resumed_groups_wait_only_for_those_before_them():
  """What came after them must not keep them out; too early is no good."""
  q = GroupQueue(1, QueueConfig(max_staleness=1), order="admission")
  q.expect([0])
  for name in ("b", "c"):
    q.put(group(name))  # Restored: the gate is shut.
  with pytest.raises(std_queue.Full):
    q.acquire_start(timeout=0)
  with pytest.raises(std_queue.Empty):
    q.get(timeout=0)
  with pytest.raises(std_queue.Full):  # Its tokens would be too old.
    q.acquire_start(timeout=0, index=3)
  q.put(group("a"), q.acquire_start(timeout=0, index=0), timeout=0)
  assert [q.get(timeout=0).group_id for _ in range(3)] == ["a", "b", "c"]


def test_stale_drops_do_not_come_back(tmp_path):
  path = tmp_path / "queue.sqlite"
  q = GroupQueue(1, store=group_store.SqliteGroupStore(path))
  q.put(group("old", 0))
  q.set_version(1)
  q = GroupQueue(1, version=1, store=group_store.SqliteGroupStore(path))
  assert q.qsize() == 0


def test_durable_put_from_a_loop(tmp_path):
  store = group_store.SqliteGroupStore(tmp_path / "queue.sqlite")
  q = GroupQueue(
    2, QueueConfig(max_staleness=3), store=store, order="admission"
  )

  async def main():
    tickets = await q.acquire_parts_async([None] * 6)
    await asyncio.gather(*(q.push(group(t.index), t) for t in tickets))

  asyncio.run(main())
  assert [index for index, _ in store.load()] == list(range(6))
  assert names(q.get_batch()) == ["0", "1"]


def test_a_store_that_fails_does_not_accept():
  class Store(group_queue.MemoryGroupStore):
    full = True

    def append(self, index, item):
      if self.full:
        raise OSError("disk full")

  store = Store()
  q = GroupQueue(1, store=store)
  ticket = q.acquire_start()
  with pytest.raises(OSError, match="disk full"):
    q.put(group(), ticket)
  assert q.counters()["accepted"] == 0
  store.full = False
  q.put(group(), ticket)
  assert q.qsize() == 1
