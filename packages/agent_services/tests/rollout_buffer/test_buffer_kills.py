"""A buffer service that is killed at any instant loses and repeats nothing."""

import asyncio
import collections
import contextlib
import json
import random
import socket
import sqlite3
import threading
import time

from agent_services.rollout_buffer import client
from agent_services.rollout_buffer import store
import buffer_services
import httpx
import nursery
import pytest

GROUP = 4
WRITERS = 3
LEASE_S = 2
SERVICE = """
import tunix_multi_turn
tunix_multi_turn.light()
from tunix.rl.multi_turn.net import connections
from agent_services.rollout_buffer import (
    __main__ as service)
import uvicorn
def run(arguments):
  folder, port = arguments
  service.main(["--dir", folder, "--port", port, "--group-size", "4"])
"""


class Clients:
  """Writers and readers that do not give up, and what they were answered.

  Attributes:
    written: Uids whose write was acknowledged.
    leases: Uids of the items of each acknowledged lease, by its id.
    late: Reads whose lease was over before its acknowledgement arrived.
    repeats: Calls that were made again.
  """

  def __init__(self, url):
    self.url = url
    self.ending = threading.Event()
    self.written = set()
    self.leases = {}
    self.late = self.repeats = 0
    self.faults = []
    self._http = httpx.Client(
      base_url=url, timeout=10, trust_env=False, verify=False
    )

  def call(self, path, body):
    """The answer, however often the service is killed in between."""
    due = time.monotonic() + 60
    while time.monotonic() < due:
      with contextlib.suppress(httpx.TransportError):
        return self._http.post(path, json=body)
      self.repeats += 1
      time.sleep(0.01)
    raise AssertionError(f"{path} was not answered for 60 s")

  def write(self, writer):
    number = 0
    while not self.ending.is_set() or number % GROUP:
      uid = f"{writer}-{number}"
      answer = self.call(
        "/buffer/write",
        buffer_services.item(
          uid,
          f"{writer}-{number // GROUP}",
          float(number % 2),
          text="x" * random.Random(uid).randrange(60_000),
        ),
      )
      assert answer.status_code == 200, answer.text
      self.written.add(uid)
      number += 1

  def _over(self):
    """Whether each written item was read and acknowledged."""
    read = {uid for uids in list(self.leases.values()) for uid in uids}
    return self.ending.is_set() and read >= self.written

  def _accept(self, lease, items):
    assert lease not in self.leases
    self.leases[lease] = [item["uid"] for item in items]

  def read(self):
    """A reader in any language, which leaves the ids to the service."""
    while not self._over():
      got = self.call(
        "/get_rollout_data", {"lease_s": LEASE_S, "batch_size": GROUP}
      )
      data = got.json().get("data", {})
      if not data.get("data"):
        time.sleep(0.05)
        continue
      acknowledged = self.call("/buffer/ack", {"lease": data["lease"]})
      if acknowledged.status_code == 404:  # The items come again.
        assert acknowledged.json()["code"] == "unknown_lease"
        self.late += 1
        continue
      assert acknowledged.status_code == 200, acknowledged.text
      self._accept(data["lease"], data["data"])

  def read_with_client(self):
    """A reader with this package's client, which repeats reads by itself."""

    async def read():
      async with client.BufferClient(self.url) as buffer:
        while not self._over():
          lease = await buffer.lease(GROUP, lease_s=LEASE_S)
          if lease is None:
            await asyncio.sleep(0.05)
            continue
          try:
            await buffer.acknowledge(lease.id)
          except client.BufferError as error:
            assert error.status == 404, error
            self.late += 1
            continue
          items = [one.data for g in lease.groups for one in g.records]
          self._accept(lease.id, items)

    asyncio.run(read())

  def guarded(self, target, *args):
    try:
      target(*args)
    except BaseException as error:  # pylint: disable=broad-except
      self.faults.append(error)
      self.ending.set()

  def start(self):
    calls = [(self.write, n) for n in range(WRITERS)]
    calls += [(self.read,), (self.read_with_client,)]
    threads = [
      threading.Thread(target=self.guarded, args=call) for call in calls
    ]
    for thread in threads:
      thread.start()
    return threads


def kill_often(folder, kills):
  port = nursery.free_port()
  clients = Clients(f"http://127.0.0.1:{port}")
  rng = random.Random(0)
  threads = []
  with nursery.Nursery(SERVICE) as service:
    service.start(folder, port)
    try:
      threads = clients.start()
      for _ in range(kills):
        time.sleep(rng.uniform(0.05, 0.6))
        service.end()
        service.start(folder, port)
        before = len(clients.written)
        due = time.monotonic() + 60
        while len(clients.written) == before and time.monotonic() < due:
          time.sleep(0.01)
          if clients.faults:
            raise clients.faults[0]
    finally:
      clients.ending.set()
      for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    service.end()
  if clients.faults:
    raise clients.faults[0]
  account(folder, clients, kills)


def account(folder, clients, kills):
  """Follows each item by its id, in the clients' books and the service's."""
  deliveries = collections.Counter(
    uid for uids in clients.leases.values() for uid in uids
  )
  assert len(clients.written) >= kills * GROUP
  assert not clients.written - deliveries.keys(), "acknowledged, and lost"
  assert not deliveries.keys() - clients.written, "delivered, never written"
  assert set(deliveries.values()) == {1}, "delivered again"
  with contextlib.closing(sqlite3.connect(folder / "buffer.db")) as db:
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    states = dict(db.execute("SELECT uid, state FROM items"))
    assert states == dict.fromkeys(clients.written, store.DONE)
    assert db.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
    leases = dict(db.execute("SELECT id, acknowledged FROM leases"))
    assert all(leases[lease] for lease in clients.leases)
  print(
    f"{kills} kills, {len(clients.written)} items acknowledged and each"
    f" delivered once, {len(clients.leases)} leases, {clients.late} late,"
    f" {clients.repeats} calls repeated"
  )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_lose_and_repeat_nothing(tmp_path):
  """Each acknowledged write is acknowledged by one reader, once."""
  kill_often(tmp_path, nursery.kills())


def test_an_acknowledgement_that_a_kill_cut_off_may_be_repeated(tmp_path):
  """So may a write, and a read under a lease; a final read is given back."""
  port = nursery.free_port()
  clients = Clients(f"http://127.0.0.1:{port}")
  sent = buffer_services.group("a")
  with nursery.Nursery(SERVICE) as service:
    service.start(tmp_path, port)

    def kill():
      service.end()
      service.start(tmp_path, port)

    for n in (1, 0):
      assert clients.call("/buffer/write", sent).json()["new"] == 4 * n
      kill()
    query = {"lease_s": 60, "lease": "mine"}
    first = clients.call("/get_rollout_data", query).json()["data"]
    kill()
    again = clients.call("/get_rollout_data", query).json()["data"]
    assert (again["data"], again["groups"]) == (first["data"], first["groups"])
    kill()
    for count in (4, 0, 0):
      answer = clients.call("/buffer/ack", {"lease": "mine"})
      assert answer.json()["message"] == f"Acknowledged {count} items"
      kill()
    used = clients.call("/get_rollout_data", query)
    assert (used.status_code, used.json()["code"]) == (409, "lease_used")
    unknown = clients.call("/buffer/ack", {"lease": "other"})
    assert (unknown.status_code, unknown.json()["code"]) == (
      404,
      "unknown_lease",
    )

    large = [
      {**one, "text": "x" * 2_000_000} for one in buffer_services.group("b")
    ]
    assert clients.call("/buffer/write", large).status_code == 200
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", port))
    with line:
      line.sendall(
        b"POST /get_rollout_data HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Length: 2\r\n\r\n{}"
      )
      assert line.recv(100)
      kill()
    final = clients.call("/get_rollout_data", {}).json()["data"]["data"]
    assert [i["uid"] for i in final] == [i["uid"] for i in large]
    kill()
    last = clients.call("/get_rollout_data", {})
    assert not json.loads(last.content)["success"]
