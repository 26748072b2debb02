"""The contract of `GroupTransport`, held by each implementation.

A transport is opened over a folder, and opened again as after a death.
"""

import asyncio
import contextlib

import buffer_services
import pytest
import queue_groups
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

pytestmark = pytest.mark.timeout(120)
LEASE_S = 60.0


class InProcess:
  """A `GroupQueue`, with a store where a death must be survived."""

  def __init__(self, folder, durable):
    self._folder, self.survives = folder, durable

  @contextlib.asynccontextmanager
  async def opened(self):
    path = self._folder / "queue.db"
    store = group_store.SqliteGroupStore(path) if self.survives else None
    yield group_queue.GroupQueue(
      4, group_queue.QueueConfig(max_staleness=8), store=store
    )
    if store is not None:
      store.close()

  async def push(self, transport, name):
    await transport.push(queue_groups.group(name))

  async def lease(self, transport, count=1):
    return await transport.lease(count, timeout=0.05)

  def names(self, lease):
    return queue_groups.names(lease.groups)

  def holder_died(self):
    pass  # Known when the store is opened again.


class OverHttp:
  """A `BufferClient` of a rollout buffer service."""

  survives = True

  def __init__(self, folder):
    self._folder = folder
    self._clock = buffer_services.Clock()

  @contextlib.asynccontextmanager
  async def opened(self):
    with buffer_services.Running(self._folder, clock=self._clock) as running:
      if not running.stats()["total_written"]:
        running.start(num_repeat_per_sample=2, group_rules="raw")
      async with client.BufferClient(running.url) as transport:
        yield transport

  async def push(self, transport, name):
    await transport.push(buffer_services.group(name, (0.0, 1.0)))

  async def lease(self, transport, count=1):
    return await transport.lease(2 * count, lease_s=LEASE_S)

  def names(self, lease):
    return [group.instance_id for group in lease.groups]

  def holder_died(self):
    self._clock.now += LEASE_S + 1


@pytest.fixture(name="kind", params=["memory", "sqlite", "http"])
def _kind(request, tmp_path):
  if request.param == "http":
    return OverHttp(tmp_path)
  return InProcess(tmp_path, request.param == "sqlite")


async def leased(kind, transport, count=1):
  lease = await kind.lease(transport, count)
  return None if lease is None else kind.names(lease)


async def test_groups_are_leased_once_and_in_their_order(kind):
  async with kind.opened() as transport:
    assert await leased(kind, transport) is None
    for name in "abc":
      await kind.push(transport, name)
    assert await leased(kind, transport, 2) == ["a", "b"]
    assert await leased(kind, transport) == ["c"]
    assert await leased(kind, transport) is None


async def test_consumers_at_a_time_share_the_groups(kind):
  names = [f"g{n}" for n in range(8)]
  async with kind.opened() as transport:
    await asyncio.gather(*(kind.push(transport, name) for name in names))
    leases = await asyncio.gather(*(leased(kind, transport) for _ in names))
  assert sorted(name for lease in leases for name in lease) == names


async def test_a_released_group_comes_again_before_later_ones(kind):
  async with kind.opened() as transport:
    for name in "ab":
      await kind.push(transport, name)
    first = await kind.lease(transport)
    await transport.release(first)
    assert await leased(kind, transport) == ["a"]
    assert await leased(kind, transport) == ["b"]
    assert await leased(kind, transport) is None


async def test_a_lease_that_has_ended_does_not_end_the_next_one(kind):
  async with kind.opened() as transport:
    await kind.push(transport, "a")
    former = await kind.lease(transport)
    await transport.release(former)
    assert await leased(kind, transport) == ["a"]
    for late in (transport.release(former), transport.acknowledge(former.id)):
      with contextlib.suppress(http.CallError):  # A service refuses it.
        await late
      assert await leased(kind, transport) is None
    kind.holder_died()
    if not kind.survives:
      return
  async with kind.opened() as transport:  # It was not acknowledged.
    kind.holder_died()
    assert await leased(kind, transport) == ["a"]


async def test_an_acknowledged_group_never_comes_again(kind):
  async with kind.opened() as transport:
    for name in "ab":
      await kind.push(transport, name)
    first = await kind.lease(transport)
    await transport.acknowledge(first.id)
    await transport.acknowledge(first.id)  # As after a lost answer.
    kind.holder_died()
    assert await leased(kind, transport) == ["b"]
  if not kind.survives:
    return
  async with kind.opened() as transport:
    kind.holder_died()
    assert await leased(kind, transport) == ["b"]
    assert await leased(kind, transport) is None


async def test_groups_of_a_consumer_that_died_come_again(kind):
  if not kind.survives:
    pytest.skip("keeps nothing beyond the process")
  async with kind.opened() as transport:
    for name in "abc":
      await kind.push(transport, name)
    first = await kind.lease(transport)
    assert await leased(kind, transport) == ["b"]  # And never acknowledged.
    await transport.acknowledge(first.id)
  async with kind.opened() as transport:
    kind.holder_died()
    assert await leased(kind, transport, 2) == ["b", "c"]
    assert await leased(kind, transport) is None


async def test_a_push_that_was_cut_off_is_all_of_a_group_or_none(kind):
  async with kind.opened() as transport:
    cut = asyncio.ensure_future(kind.push(transport, "a"))
    await asyncio.sleep(0)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    await kind.push(transport, "b")
    names = (await leased(kind, transport)) + (
      await leased(kind, transport) or []
    )
    assert names in (["a", "b"], ["b"])
    assert await leased(kind, transport) is None
