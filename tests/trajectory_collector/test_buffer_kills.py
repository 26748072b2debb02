"""A buffer service that is killed at any instant loses and repeats nothing."""

import collections
import contextlib
import random
import socket
import threading
import time

import buffer_kills
import buffer_services
import httpx
import pytest

GROUP = 4
WRITERS = 4


class Clients:
  """Writers and a reader that do not give up, and what they were answered."""

  def __init__(self, url):
    self.client = httpx.Client(
        base_url=url, timeout=10, trust_env=False, verify=False
    )
    self.ending = threading.Event()
    self.written = set()
    self.accepted = collections.Counter()
    self.late = 0
    self.faults = []

  def call(self, path, body):
    """The answer, however often the service is killed in between."""
    due = time.monotonic() + 60
    while time.monotonic() < due:
      with contextlib.suppress(httpx.TransportError):
        return self.client.post(path, json=body)
      time.sleep(0.01)
    raise AssertionError(f"{path} was not answered for 60 s")

  def write(self, writer):
    number = 0
    while not self.ending.is_set() or number % GROUP:
      uid = f"{writer}-{number}"
      answer = self.call("/buffer/write", buffer_services.item(
          uid, f"{writer}-{number // GROUP}", float(number % 2),
          text="x" * random.Random(uid).randrange(60_000),
      ))  # pyformat: disable
      assert answer.status_code == 200, answer.text
      self.written.add(uid)
      number += 1

  def read(self):
    while not self.ending.is_set() or self.accepted.keys() < self.written:
      got = self.call("/get_rollout_data", {"lease_s": 2, "batch_size": GROUP})
      data = got.json().get("data", {})
      if not data.get("data"):
        time.sleep(0.05)
        continue
      acked = self.call("/buffer/ack", {"lease": data["lease"]})
      if acked.status_code == 404:  # The lease was over; they come again.
        self.late += 1
        continue
      assert acked.status_code == 200, acked.text
      self.accepted.update(item["uid"] for item in data["data"])

  def guarded(self, target, *args):
    try:
      target(*args)
    except BaseException as error:  # pylint: disable=broad-except
      self.faults.append(error)
      self.ending.set()


def kill_often(folder, kills):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  service = buffer_kills.KilledService(
      folder, port, "--group-size", str(GROUP)
  )
  clients = Clients(f"http://127.0.0.1:{port}")
  threads = [
      threading.Thread(target=clients.guarded, args=(clients.write, n))
      for n in range(WRITERS)
  ]
  reader = threading.Thread(target=clients.guarded, args=(clients.read,))
  rng = random.Random(0)
  try:
    service.tell("start")
    clients.call("/get_rollout_data", {})
    for thread in (*threads, reader):
      thread.start()
    for _ in range(kills):
      time.sleep(rng.uniform(0.05, 0.6))
      service.tell("kill")
      service.tell("start")
      before = len(clients.written)
      due = time.monotonic() + 60
      while len(clients.written) == before and time.monotonic() < due:
        time.sleep(0.01)
        if clients.faults:
          raise clients.faults[0]
    clients.ending.set()
    for thread in (*threads, reader):
      thread.join(60)
      assert not thread.is_alive()
  finally:
    clients.ending.set()
    service.close()
  if clients.faults:
    raise clients.faults[0]
  assert len(clients.written) >= kills * GROUP
  assert set(clients.accepted) == clients.written, "acknowledged, and lost"
  assert set(clients.accepted.values()) == {1}, "delivered again"


def test_three_kills_lose_and_repeat_nothing(tmp_path):
  kill_often(tmp_path, 3)


@pytest.mark.slow
def test_fifty_kills_lose_and_repeat_nothing(tmp_path):
  kill_often(tmp_path, 50)
