"""A process whose groups do not come, and the others that give more.

The loops, queues and processes are the run's own; the learner only keeps what
it is given.
"""

import queue
import threading
import time
import types

import peer_threads
import pytest
import queue_groups
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.queue import group_queue


class Learner:
  """Counts updates and keeps each one's groups."""

  config = types.SimpleNamespace(
    publish_every=1, dynamic_sampling=0, groups_per_step=4
  )
  groups_per_step = 2

  def __init__(self):
    self.counters = types.SimpleNamespace(updates=0)
    self.version, self.learned = 0, []
    self.advantages, self.left_out = {}, ()

  def policy_state(self):
    return None

  def update(self, groups):
    time.sleep(0.03)
    self.learned.append([g.group_id for g in groups])
    self.version += 1
    self.counters.updates += 1
    return {}


def collecting(queue, stuck, name):
  """A thread that fills a queue as it admits groups, but while `stuck`."""

  def work():
    number = 0
    try:
      while True:
        ticket = queue.acquire_start()
        while stuck.is_set():
          time.sleep(0.005)
        version = ticket.start_version
        queue.put(queue_groups.group(f"{name}{number}", version), ticket)
        number += 1
    except group_queue.QueueClosed:
      pass

  thread = threading.Thread(target=work, daemon=True)
  thread.start()
  return thread


def run(peers, steps, stuck_in, order="admission", staleness=0, share_s=0.2):
  """(groups of each update, dealt groups of each, the queue's counters)."""
  config = group_queue.QueueConfig(max_staleness=staleness)
  queue = group_queue.GroupQueue(2, config, order=order)
  stuck = threading.Event()
  learner = Learner()
  loop = loop_lib.LearnerLoop(
    learner,
    queue,
    lambda *_: None,
    wait_timeout_s=60,
    processes=peers,
    share_timeout_s=share_s,
  )
  thread = collecting(queue, stuck, "abc"[peers.index])
  dealt = []
  for step in range(steps):
    (stuck.set if step in stuck_in.get(peers.index, ()) else stuck.clear)()
    dealt.append(loop.step()["dealt_groups"])
    counters = queue.counters()
    assert counters["accepted"] + counters["running"] <= (
      (staleness + queue.version + 1) * 2
    )
  stuck.clear()
  queue.close()
  thread.join(20)
  return learner.learned, dealt, queue.counters()


@pytest.mark.parametrize("order", group_queue.ORDERS)
def test_the_others_give_what_a_stuck_process_does_not(order):
  stuck = {1: {1, 2}}
  results = peer_threads.run_all(
    3, lambda peers: run(peers, 8, stuck, order=order)
  )
  (a, _, _), (b, dealt, queue), (c, _, _) = results
  for step in range(8):
    assert len(a[step]) + len(b[step]) + len(c[step]) == 6, step
  # Groups that were there when it got stuck are its share still.
  assert dealt[0] == 0 and sum(dealt[1:3]) >= 2
  assert [len(g) for g in b] == [2 - d for d in dealt]
  assert dealt[-1] == 0  # It gives its share again.
  assert queue["forfeited"] == sum(dealt)
  everything = [g for of in (a, b, c) for step in of for g in step]
  assert len(everything) == len(set(everything))


def test_while_all_are_in_time_nothing_is_dealt():
  results = peer_threads.run_all(2, lambda p: run(p, 4, {}, share_s=30.0))
  for learned, dealt, _ in results:
    assert dealt == [0.0] * 4 and [len(g) for g in learned] == [2] * 4
  assert results[0][0] == [[f"a{2 * i}", f"a{2 * i + 1}"] for i in range(4)]


def test_when_all_are_stuck_they_wait():
  def work(peers):
    threading.Timer(0.8, peers_stuck[peers.index].clear).start()
    return run_with(peers, peers_stuck[peers.index])

  peers_stuck = [threading.Event() for _ in range(2)]

  def run_with(peers, stuck):
    stuck.set()
    queue = group_queue.GroupQueue(2)
    learner = Learner()
    loop = loop_lib.LearnerLoop(
      learner,
      queue,
      lambda *_: None,
      wait_timeout_s=60,
      processes=peers,
      share_timeout_s=0.1,
    )
    thread = collecting(queue, stuck, "ab"[peers.index])
    loop.step()
    queue.close()
    thread.join(20)
    return learner.learned

  results = peer_threads.run_all(2, work)
  assert sum(len(step) for of in results for step in of) == 4


@pytest.mark.parametrize("share_s", [None, 0.05, 30.0])
def test_processes_train_on_all_that_closed_queues_hold(share_s):
  """One has seven groups, one three, one none: each gives what it has."""
  counts = (7, 3, 0)

  def work(peers):
    config = group_queue.QueueConfig(max_staleness=9)
    queue = group_queue.GroupQueue(2, config)
    for i in range(counts[peers.index]):
      queue.put(queue_groups.group(f"{peers.index}{i}"))
    queue.close()
    learner = Learner()
    loop = loop_lib.LearnerLoop(
      learner, queue, lambda *_: None, processes=peers, share_timeout_s=share_s
    )
    assert loop.run(100) == 4
    with pytest.raises(group_queue.QueueClosed):
      loop.step()
    return learner.learned

  assert peer_threads.run_all(3, work) == [
    [["00", "01"], ["02", "03"], ["04", "05"], ["06"]],
    [["10", "11"], ["12"], [], []],
    [[]] * 4,
  ]


def test_those_whose_queues_are_closed_wait_for_a_late_one():
  def work(peers):
    queue = group_queue.GroupQueue(2)
    stuck = threading.Event()
    if peers.index:
      queue.close()
    else:
      stuck.set()
      threading.Timer(0.5, stuck.clear).start()
      thread = collecting(queue, stuck, "a")
    learner = Learner()
    loop = loop_lib.LearnerLoop(
      learner,
      queue,
      lambda *_: None,
      wait_timeout_s=60,
      processes=peers,
      share_timeout_s=0.05,
    )
    loop.step()
    queue.close()
    if not peers.index:
      thread.join(20)
    return learner.learned

  assert peer_threads.run_all(2, work) == [[["a0", "a1"]], [[]]]


def test_a_process_that_waits_for_ever_is_starved_though_others_ended():
  """Its deadline does not begin again with each round of waiting."""

  def work(peers):
    queue = group_queue.GroupQueue(2)
    if peers.index:
      queue.close()
    loop = loop_lib.LearnerLoop(
      Learner(),
      queue,
      lambda *_: None,
      wait_timeout_s=0.5,
      processes=peers,
      share_timeout_s=0.1,
    )
    stop = threading.Event()
    threading.Timer(10, stop.set).start()
    with pytest.raises((loop_lib.StarvedError, peers_lib.PeerError)) as error:
      loop.step(stop)
    return str(error.value)

  for text in peer_threads.run_all(2, work):
    assert "no 2 groups came within 0.5 s" in text


def test_a_stop_of_a_process_whose_queue_is_closed_ends_the_wait_of_all():
  def work(peers):
    stop = threading.Event()
    queue = group_queue.GroupQueue(2)
    if peers.index:
      queue.close()
      threading.Timer(0.4, stop.set).start()
    loop = loop_lib.LearnerLoop(
      Learner(),
      queue,
      lambda *_: None,
      wait_timeout_s=10,
      processes=peers,
      share_timeout_s=0.1,
    )
    return loop.step(stop)

  assert peer_threads.run_all(2, work) == [None, None]


class SlowQueue(group_queue.GroupQueue):
  """Lets every second wait for the last groups end without one."""

  calls = 0

  def get_batch(self, n=None, timeout=None):
    if n == 1:
      self.calls += 1
      if self.calls % 2 == 0:
        raise queue.Empty
    return super().get_batch(n, timeout)


def test_a_wait_for_the_last_groups_loses_none():
  groups = SlowQueue(3)
  for name in ("a0", "a1"):
    groups.put(queue_groups.group(name))
  groups.close()
  learner = Learner()
  learner.groups_per_step = 3
  loop = loop_lib.LearnerLoop(
    learner, groups, lambda *_: None, wait_timeout_s=10
  )
  loop.step()
  assert learner.learned == [["a0", "a1"]]


class ClosingQueue(group_queue.GroupQueue):
  """Loses its only group as too old, and is closed, once it is asked for."""

  def qsize(self):
    size = super().qsize()
    if size:
      self.set_version(5)
      self.close()
    return size


def test_what_is_there_may_be_gone_when_it_is_taken():
  groups = ClosingQueue(2)
  groups.put(queue_groups.group("a0"))
  loop = loop_lib.LearnerLoop(
    Learner(), groups, lambda *_: None, wait_timeout_s=10
  )
  loop._take_ready()
  assert loop._kept == []


def test_a_stop_ends_the_wait_of_all():
  stops = [threading.Event() for _ in range(2)]

  def work(peers):
    loop = loop_lib.LearnerLoop(
      Learner(),
      group_queue.GroupQueue(2),
      lambda *_: None,
      processes=peers,
      share_timeout_s=0.1,
    )
    if peers.index:
      threading.Timer(0.4, stops[1].set).start()
    return loop.step(stops[peers.index])

  assert peer_threads.run_all(2, work) == [None, None]
