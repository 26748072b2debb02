"""A run that stops goes on: no task twice, none lost."""

import json

import collector_fakes as fakes
import loop_cases as cases
import pytest
import threaded_loop
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store


def test_a_crashed_run_resumes(tmp_path):
  """Each task is trained on once: nothing lost, nothing twice."""
  tasks = [gym_base.Task(f"t{i}", "f") for i in range(24)]

  def parts(version):
    client = cases.SeededClient(version, jitter=0.02)
    queue = group_queue.GroupQueue(
      2,
      group_queue.QueueConfig(max_staleness=4),
      order="admission",
      version=version,
      store=group_store.SqliteGroupStore(tmp_path / "queue.sqlite"),
    )
    loop = threaded_loop.ThreadedLoop(
      cases.make_collector(client, group_size=2),
      tc.TaskSampler(tasks, seed=5, epochs=1),
      queue,
      task_from_json=gym_base.Task.from_json,
    )
    return queue, loop, client

  queue, loop, client = parts(0)
  loop.start()
  trained = [g.task_id for g in queue.get_batch(timeout=30)]
  client.version = 1
  queue.set_version(1)
  # The learner's checkpoint: its weights, and where collecting stands.
  queue.ack()
  state = json.loads(json.dumps(loop.state_dict()))
  # Two further steps, and what was drawn for them, are not in any checkpoint.
  for version in (2, 3):
    queue.get_batch(timeout=30)
    client.version = version
    queue.set_version(version)
  drawn_before = state["next_index"]
  assert fakes.wait_until(lambda: max(queue.known()) > drawn_before)
  loop.stop()
  assert loop.join(20)

  queue, loop, client = parts(1)
  loop.load_state_dict(state)
  loop.start()
  version = 1
  while True:
    try:
      batch = queue.get_batch(timeout=30)
    except group_queue.QueueClosed:
      break
    trained += [g.task_id for g in batch]
    version += 1
    client.version = version
    queue.set_version(version)
  assert loop.join(20)
  assert queue.counters()["dropped_stale"] == 0
  # In admission order: as if nothing had happened.
  uninterrupted = tc.TaskSampler(tasks, seed=5, epochs=1)
  assert trained == [task.task_id for task in uninterrupted]


def test_group_ids_of_a_resumed_run_are_new_without_a_store_too():
  def parts(version):
    client = cases.SeededClient(version)
    queue = group_queue.GroupQueue(1, version=version)
    loop = threaded_loop.ThreadedLoop(
      cases.make_collector(client), tc.TaskSampler(range(50)), queue
    )
    return queue, loop, client

  queue, loop, client = parts(0)
  loop.start()
  ids = [g.group_id for batch in cases.learn(queue, client, 3) for g in batch]
  loop.stop()
  assert loop.join(20)
  state = json.loads(json.dumps(loop.state_dict()))
  queue, loop, _ = parts(3)
  loop.load_state_dict(state)
  loop.start()
  ids.append(queue.get(timeout=20).group_id)
  loop.stop()
  assert loop.join(20)
  assert len(set(ids)) == 4, ids


@pytest.mark.parametrize(
  "admitted, kept",
  [
    (1, [(0, "a"), (1, "b"), (None, "c"), (None, "d")]),
    (3, [(0, "a"), (1, "b"), (2, "c"), (None, "d")]),
  ],
)
def test_a_drawn_task_outlives_every_interrupt(admitted, kept):
  def hanging(task):
    return fakes.ListAgent(), fakes.ScriptEnv(faults={"step": "hang"})

  drawn = [(0, "a"), (1, "b"), (None, "c"), (None, "d")]
  state = {
    "sampler": tc.TaskSampler(range(9)).state_dict(),
    "next_index": 2,
    "unfinished": [{"index": i, "task": task} for i, task in drawn],
  }
  queue = group_queue.GroupQueue(admitted)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(pair=hanging), tc.TaskSampler(range(9)), queue
  )
  loop.load_state_dict(state)
  assert loop.state_dict()["unfinished"] == state["unfinished"]
  loop.start()
  assert fakes.wait_until(lambda: queue.counters()["running"] == admitted)
  loop.stop()
  assert loop.join(20)
  after = loop.state_dict()
  assert [(i["index"], i["task"]) for i in after["unfinished"]] == kept
  assert after["sampler"] == state["sampler"]
