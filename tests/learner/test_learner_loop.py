"""From the queue to published weights."""

import asyncio
import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.learner.batches import replay
from tunix.rl.multi_turn.run.recorded_data import offline_feed
from tunix.rl.queue import data_queue
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store


class _Engine:
  """Keeps what is published, and when."""

  def __init__(self, log):
    self.log = log
    self.states = {}

  def update_weights(self, version, params):
    self.log.append(("published", version))
    self.states[version] = params
    future = concurrent.futures.Future()
    future.set_result(version)
    return future


class _Log:
  def __init__(self, log):
    self.log = log

  def on_event(self, event):
    self.log.append((type(event).__name__, event.version))


class _Queue(group_queue.GroupQueue):
  def __init__(self, log, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.log = log

  def set_version(self, version):
    self.log.append(("gate", version))
    super().set_version(version)

  def ack(self, indices=None):
    self.log.append(("ack", self.version))
    return super().ack(indices)


def _loop(case, queue, publish, **kwargs):
  learner = case.learner(
    groups_per_step=2, publish_every=kwargs.pop("publish_every", 1)
  )
  kwargs = dict(wait_timeout_s=60) | kwargs
  return loop_lib.LearnerLoop(learner, queue, publish, **kwargs)


def test_synchronous_training_in_order(case, tmp_path):
  log = []
  engine = _Engine(log)
  queue = _Queue(log, 2)
  config = checkpoint.CheckpointConfig(every=2)
  with checkpoint.LearnerCheckpoints(tmp_path, config) as checkpoints:
    loop = _loop(
      case,
      queue,
      engine.update_weights,
      observers=events.Observers([_Log(log)]),
      checkpoints=checkpoints,
      extras=lambda: {"position": len(log)},
    )
    loop.publish()

    def produce():
      for version in range(3):
        tickets = [queue.acquire_start(timeout=60) for _ in range(2)]
        # Admitted only once the weights of this version are out.
        assert version in engine.states
        for ticket in tickets:
          assert ticket.start_version == version
          queue.put(
            case.group([1.0, 0.0, 0.3], version=version), ticket, timeout=60
          )

    with concurrent.futures.ThreadPoolExecutor() as pool:
      producer = pool.submit(produce)
      assert loop.run(3) == 3
      producer.result(timeout=60)
    assert checkpoints.steps() == [2]
  assert log == [
    ("published", 0),
    ("WeightsPublished", 0),
    ("published", 1),
    ("WeightsPublished", 1),
    ("gate", 1),
    ("StepFinished", 1),
    ("published", 2),
    ("WeightsPublished", 2),
    ("gate", 2),
    ("StepFinished", 2),
    ("ack", 2),  # The save is on disk, and nothing newer was taken.
    ("published", 3),
    ("WeightsPublished", 3),
    ("gate", 3),
    ("StepFinished", 3),
  ]
  counters = queue.counters()
  assert (counters["delivered"], counters["max_lag"]) == (6, 0)
  # What was published stays what it was.
  first, last = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(engine.states[v])])
    for v in (0, 3)
  )
  assert np.abs(first - last).max() > 0


def test_asynchronous_training_is_the_same_loop(case):
  log = []
  engine = _Engine(log)
  queue = group_queue.GroupQueue(2, group_queue.QueueConfig(max_staleness=2))
  loop = _loop(case, queue, engine.update_weights, publish_every=2)
  for _ in range(6):
    ticket = queue.acquire_start(timeout=1)
    queue.put(case.group([1.0, 0.0]), ticket, timeout=1)
  metrics = [loop.step() for _ in range(3)]
  assert [m["staleness_max"] for m in metrics] == [0, 1, 2]
  assert [v for _, v in log] == [2]


class _Killed(Exception):
  pass


@pytest.mark.parametrize("killed", [False, True])
def test_what_the_last_checkpoint_holds_is_not_trained_on_again(
  case, tmp_path, killed
):
  """Also when the process dies between the save and the acknowledgement."""

  def parts(version, consumed=()):
    store = group_store.SqliteGroupStore(tmp_path / "queue.sqlite")
    store.remove(consumed)
    return group_queue.GroupQueue(
      2, group_queue.QueueConfig(max_staleness=3), version=version, store=store
    )

  queue = parts(0)
  for i in range(6):
    ticket = queue.acquire_start(timeout=1)
    queue.put(case.group([1.0, 0.0], f"g{i}"), ticket, timeout=1)
  with checkpoint.LearnerCheckpoints(tmp_path / "ckpt") as checkpoints:
    loop = _loop(
      case,
      queue,
      lambda *_: None,
      checkpoints=checkpoints,
      extras=lambda: {"mine": 1},
    )
    loop.step()

    def update(groups):
      raise _Killed()

    loop.learner.update = update
    with pytest.raises(_Killed):
      loop.step()  # Takes two groups that go into no checkpoint.
    loop.save()
    if not killed:
      loop.settle()
      assert queue.counters()["acked"] == 2
  with checkpoint.LearnerCheckpoints(tmp_path / "ckpt") as checkpoints:
    extras = checkpoints.restore(case.learner())
  assert extras == {"mine": 1, loop_lib.CONSUMED: [0, 1]}
  queue = parts(1, extras[loop_lib.CONSUMED] if killed else ())
  remaining = [queue.get(timeout=0).group_id for _ in range(queue.qsize())]
  assert remaining == ["g2", "g3", "g4", "g5"]


def test_a_batch_whose_update_failed_is_no_later_one_s(case, tmp_path):
  queue = group_queue.GroupQueue(2, group_queue.QueueConfig(max_staleness=3))
  for i in range(6):
    queue.put(case.group([1.0, 0.0], f"g{i}"))
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    loop = _loop(case, queue, lambda *_: None, checkpoints=checkpoints)
    update = loop.learner.update

    def fails_once(groups):
      loop.learner.update = update
      raise _Killed()

    loop.learner.update = fails_once
    with pytest.raises(_Killed):
      loop.step()
    loop.step()
    loop.save()
    loop.settle()
  assert queue.unacked() == [0, 1]


def test_any_upstream_queue_will_do(case):
  queue = data_queue.SimpleDataQueue()
  for i in range(4):
    queue.put(case.group([1.0, 0.0], f"g{i}"))
  published, learned_from = [], []

  class Keeps:
    def on_event(self, event):
      if isinstance(event, events.StepFinished):
        learned_from.append([g.group_id for g in event.groups])

  loop = _loop(
    case,
    queue,
    lambda version, state: published.append(version),
    observers=events.Observers([Keeps()]),
  )
  assert loop.run(2) == 2
  assert published == [1, 2]
  assert learned_from == [["g0", "g1"], ["g2", "g3"]]


def test_what_a_closed_queue_holds_is_trained_on(case, tmp_path):
  """In a step of its own, smaller and of the same programs."""
  queue = group_queue.GroupQueue(
    2, group_queue.QueueConfig(max_staleness=2), order="admission"
  )
  for i in range(5):
    queue.put(case.group([1.0, 0.0], f"g{i}"), timeout=1)
  groups = _Groups()
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    loop = _loop(
      case,
      queue,
      lambda *_: None,
      observers=events.Observers([groups]),
      checkpoints=checkpoints,
    )
    loop.step()
    compiles = loop.learner.compiles
    queue.close()
    assert loop.run(10) == 2
    assert groups.learned == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert loop.learner.compiles == compiles
    assert loop.learner.counters.optimizer_steps == 3
    with pytest.raises(group_queue.QueueClosed):
      loop.step()
    assert loop.run(10) == 0
    loop.save()
    loop.settle()
  assert queue.unacked() == []


@pytest.mark.parametrize("epochs, sizes", [(1, [2, 1]), (2, [2, 2, 2])])
def test_the_last_recorded_groups_make_a_smaller_step(case, epochs, sizes):
  recorded = [case.group([1.0, 0.0], f"g{i}") for i in range(3)]
  queue = group_queue.GroupQueue(2, offline_feed.queue_config(2))
  feed = offline_feed.OfflineFeed(recorded, queue, epochs=epochs)
  groups = _Groups()
  loop = _loop(
    case, queue, lambda *_: None, observers=events.Observers([groups])
  )
  with concurrent.futures.ThreadPoolExecutor() as pool:
    feeding = pool.submit(asyncio.run, feed.run())
    assert loop.run(10) == len(sizes)
    feeding.result(timeout=60)
  assert [len(step) for step in groups.learned] == sizes
  assert f"are over after {epochs} epochs" in feed.over


def test_a_stopped_run_keeps_the_rest_for_later(case):
  queue = group_queue.GroupQueue(2)
  queue.put(case.group([1.0, 0.0]), timeout=1)
  queue.close()
  loop = _loop(case, queue, lambda *_: None)
  stop = threading.Event()
  stop.set()
  assert loop.step(stop) is None
  assert queue.qsize() == 1


def test_waiting_ends(case):
  queue = group_queue.GroupQueue(2)
  loop = _loop(case, queue, lambda *_: None, wait_timeout_s=0.3)
  with pytest.raises(loop_lib.StarvedError, match="2 groups"):
    loop.step()
  stop = threading.Event()
  stop.set()
  assert loop.step(stop) is None
  assert loop.run(5, stop) == 0
  queue.fail(RuntimeError("the collector broke"))
  with pytest.raises(group_queue.QueueFailed) as caught:
    loop.step()
  assert "broke" in str(caught.value.__cause__)


def test_weights_that_never_arrive_are_reported(case):
  loop = _loop(
    case,
    data_queue.SimpleDataQueue(),
    lambda *_: concurrent.futures.Future(),
    publish_timeout_s=0.1,
  )
  with pytest.raises(TimeoutError, match="did not reach"):
    loop.publish()


def test_weights_may_arrive_while_the_next_groups_are_awaited(case):
  """A slow engine holds up the weights after, not the update between."""
  published = []

  def publish(version, state):
    del state
    published.append((version, concurrent.futures.Future()))
    return published[-1][1]

  queue = group_queue.GroupQueue(2, group_queue.QueueConfig(max_staleness=2))
  loop = _loop(case, queue, publish, publish_ahead=True, publish_timeout_s=0.1)
  for _ in range(4):
    ticket = queue.acquire_start(timeout=1)
    queue.put(case.group([1.0, 0.0]), ticket, timeout=1)
  loop.step()
  assert [version for version, _ in published] == [1]
  assert queue.version == 1  # Admitted: requests are served with version 1.
  with pytest.raises(TimeoutError, match="version 1 did not reach"):
    loop.step()
  published[0][1].set_exception(RuntimeError("no memory"))
  with pytest.raises(RuntimeError, match="no memory"):
    loop.await_weights()


def test_contradictions_are_refused(case):
  queue = group_queue.GroupQueue(2)
  with pytest.raises(ValueError, match="max_staleness=0"):
    _loop(case, queue, lambda *_: None, publish_every=2)


# --- groups of equal rewards are replaced -------------------------------------


def _dynamic(case, queue, times, **kwargs):
  learner = case.learner(groups_per_step=2, dynamic_sampling=times)
  return loop_lib.LearnerLoop(
    learner, queue, lambda *_: None, wait_timeout_s=60, **kwargs
  )


class _Groups:
  """Groups of the steps, and those that were replaced."""

  def __init__(self):
    self.learned, self.dropped = [], []

  def on_event(self, event):
    if isinstance(event, events.StepFinished):
      self.learned.append([g.group_id for g in event.groups])
    elif isinstance(event, events.GroupFinished):
      self.dropped.append((event.group.group_id, event.outcome, event.reason))


EVEN, VARIED = [1.0, 1.0], [1.0, 0.0]


def _produce(case, queue, rewards):
  """Puts groups as the queue admits them; returns its thread."""

  def work():
    for i, members in enumerate(rewards):
      ticket = queue.acquire_start(timeout=60)
      queue.put(
        case.group(members, f"g{i}", version=ticket.start_version),
        ticket,
        timeout=60,
      )

  pool = concurrent.futures.ThreadPoolExecutor(1)
  return pool.submit(work)


def test_groups_of_equal_rewards_are_replaced_and_counted(case, tmp_path):
  queue = group_queue.GroupQueue(2, order="admission")
  rounded = [0.1 + 0.2, 0.3]
  rewards = [EVEN, VARIED, rounded, [0.0, 0.0], VARIED, VARIED, VARIED]
  producer = _produce(case, queue, rewards)
  observed = _Groups()
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    loop = _dynamic(
      case,
      queue,
      2,
      observers=events.Observers([observed]),
      checkpoints=checkpoints,
    )
    first, second = loop.step(), loop.step()
    producer.result(timeout=60)
    assert observed.learned == [["g1", "g4"], ["g5", "g6"]]
    assert [name for name, *_ in observed.dropped] == ["g0", "g2", "g3"]
    assert {outcome for _, outcome, _ in observed.dropped} == {"dropped"}
    assert first["replaced_groups"] == 3 and second["replaced_groups"] == 0
    assert first["zero_advantage_groups"] == 0
    counters = queue.counters()
    assert counters["refunded"] == 3 and counters["max_lag"] == 0
    # What was replaced is done with, as what was trained on.
    loop.save()
    loop.settle()
  assert queue.unacked() == []


def test_replacing_is_bounded(case):
  queue = group_queue.GroupQueue(2, order="admission")
  producer = _produce(case, queue, [EVEN] * 4)
  observed = _Groups()
  loop = _dynamic(case, queue, 1, observers=events.Observers([observed]))
  metrics = loop.step()
  producer.result(timeout=60)
  assert metrics["replaced_groups"] == 2
  assert observed.learned == [["g2", "g3"]] and metrics["empty_updates"] == 1


def test_the_last_groups_are_replaced_too(case):
  queue = group_queue.GroupQueue(
    2, group_queue.QueueConfig(max_staleness=2), order="admission"
  )
  for i, members in enumerate((EVEN, VARIED, EVEN)):
    queue.put(case.group(members, f"g{i}"), timeout=1)
  queue.close()
  groups = _Groups()
  loop = _dynamic(case, queue, 2, observers=events.Observers([groups]))
  assert loop.run(5) == 1
  assert groups.learned == [["g1"]]
  assert [name for name, *_ in groups.dropped] == ["g0", "g2"]


def test_without_dynamic_sampling_nothing_is_replaced(case):
  queue = group_queue.GroupQueue(2, order="admission")
  producer = _produce(case, queue, [EVEN, VARIED])
  loop = _dynamic(case, queue, 0)
  metrics = loop.step()
  producer.result(timeout=60)
  assert "replaced_groups" not in metrics
  assert metrics["zero_advantage_groups"] == 1


def test_a_stop_between_replacements_keeps_what_was_taken(case):
  queue = group_queue.GroupQueue(2, order="admission")
  for name, members in (("g0", EVEN), ("g1", VARIED)):
    ticket = queue.acquire_start(timeout=1)
    queue.put(case.group(members, name), ticket, timeout=1)
  observed = _Groups()
  loop = _dynamic(case, queue, 2, observers=events.Observers([observed]))
  stop = threading.Event()
  stop.set()
  assert loop.step(stop) is None
  ticket = queue.acquire_start(timeout=1)  # Admitted for the one replaced.
  queue.put(case.group(VARIED, "g2"), ticket, timeout=1)
  assert loop.step()["replaced_groups"] == 1
  assert observed.learned == [["g1", "g2"]]
  assert loop._consumed == {0, 1, 2}


def test_a_failed_group_that_borrows_a_success_is_not_replaced(case):
  """Of the tasks, only one was solved lately."""
  queue = group_queue.GroupQueue(2, group_queue.QueueConfig(capacity=3))
  successes = replay.SuccessReplay(1)
  successes.lend([case.group([1.0], "old")], 0)
  for name, task, rewards in (
    ("g0", "task", [0.0, 0.0]),
    ("g1", "other", [0.0, 0.0]),
    ("g2", "other", VARIED),
  ):
    group = case.group(rewards, name)
    queue.put(dataclasses.replace(group, task_id=task))
  observed = _Groups()
  loop = _dynamic(
    case, queue, 1, observers=events.Observers([observed]), replay=successes
  )
  metrics = loop.step()
  assert observed.learned == [["g0", "g2"]]
  assert [name for name, *_ in observed.dropped] == ["g1"]
  assert metrics["replaced_groups"] == metrics["borrowed_episodes"] == 1
  assert metrics["optimizer_steps"] == 1
