"""The loop that feeds a queue from a rollout buffer service, at its ends."""

import asyncio
import json
import types

import buffer_services
import pytest
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run.recorded_data import buffer_loop
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector import sampling_rule
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.queue import admission
from tunix.rl.queue import group_queue

pytestmark = pytest.mark.timeout(120)

GENERATOR = """
import json
import urllib.request

TASK_TYPE = "told"


def run_rollout(data):
  for item in data["items"]:
    request = urllib.request.Request(
        data["remote_buffer_url"] + "/buffer/write",
        json.dumps(item).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=20).close()
  if data.get("fails"):
    raise RuntimeError("it has no wood")
"""


BOUNDED_GENERATOR = """
from agent_services.rollout_buffer import generating

TASK_TYPE = "bounded"
READS = ["input_file", "remote_buffer_url"]


async def play(job):
  return {
      "messages": [{"role": "assistant", "content": "x"}],
      "reward": float(job.number % 2), "tokens": [1, 2, 3],
      "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.0],
      "versions": [None, 0, 0],
  }


def run_rollout(data):
  generating.run(data, play)
"""


@pytest.fixture(name="running")
def _running(tmp_path):
  folder = tmp_path / "generators"
  folder.mkdir()
  (folder / "told_generator.py").write_text(GENERATOR)
  (folder / "bounded_generator.py").write_text(BOUNDED_GENERATOR)
  with buffer_services.Running(
    tmp_path / "buffer", generators=[folder]
  ) as running:
    yield running


def exact(name, count=2):
  """A group's items with tokens and log-probs."""
  return [
    buffer_services.item(
      f"{name}-{n}",
      name,
      float(n % 2),
      tokens=[1, 2, 3],
      loss_mask=[0, 1, 1],
      logprobs=[None, -1.0, -2.0],
      versions=[None, 0, 0],
      extra_info={"timestamp": 1.0},
    )
    for n in range(count)
  ]


def loop_of(
  running,
  payload=None,
  groups_per_step=2,
  raw=True,
  reports=None,
  rule=None,
  max_staleness=4,
  **settings,
):
  queue = group_queue.GroupQueue(
    groups_per_step, admission.QueueConfig(max_staleness=max_staleness)
  )
  settings = data_sections.BufferConfig(
    url=running.url, poll_s=0.02, start=payload is not None, **settings
  )
  body = {
    "task_type": "told",
    "num_repeat_per_sample": 2,
    "group_rules": "raw",
    **(payload or {}),
  }
  loop = buffer_loop.BufferLoop(
    lambda: client.BufferClient(running.url),
    settings,
    reader_lib.EpisodeReader(
      None, None, images_lib.ImageStore(), parser="hermes", rule=rule
    ),
    queue,
    batch_size=2 * groups_per_step,
    group_size=2,
    raw=raw,
    min_valid=1,
    payload=(lambda skip: body) if payload is not None else None,
    observers=types.SimpleNamespace(
      on_event=(lambda event: None) if reports is None else reports.append
    ),
  )
  return loop, queue


def run(loop, seconds=30):
  asyncio.run(asyncio.wait_for(loop.run(), seconds))


def test_what_is_left_when_a_generator_is_over_is_read_and_the_queue_closes(
  running,
):
  items = [one for name in "abc" for one in exact(name)]
  loop, queue = loop_of(running, {"items": items})
  run(loop)
  # Three groups; a read took two at a time.
  assert loop.counts["accepted"] == 3
  names = [queue.get(timeout=5).group_id for _ in range(3)]
  assert [n.partition("@")[0] for n in names] == ["a", "b", "c"]
  with pytest.raises(group_queue.QueueClosed):
    queue.get(timeout=5)
  assert "is finished, and nothing is left to read" in loop.over


@pytest.mark.parametrize("members, replaced", [(2, 1), (2, 3), (8, 1)])
def test_a_step_that_lacks_a_group_gets_it_under_the_bound(
  tmp_path, running, members, replaced
):
  """Replaced groups, and groups larger than the run's, do not stop the loop."""
  tasks = tmp_path / "buffer" / "tasks.jsonl"
  tasks.parent.mkdir(exist_ok=True)
  tasks.write_text(
    "".join(
      json.dumps({"instance_id": f"t{i}", "prompt": "x"}) + "\n"
      for i in range(40)
    )
  )
  payload = {
    "task_type": "bounded",
    "input_file": str(tasks),
    "num_process": "4",
    "num_repeat_per_sample": members,
  }
  loop, queue = loop_of(running, payload, groups_per_step=4, max_staleness=0)

  def learn():
    try:
      first = queue.get_batch(4, timeout=30)
      queue.refund(replaced)
      more = queue.get_batch(replaced, timeout=30)
      stats = running.stats()
      return [g.group_id for g in (*first, *more)], stats
    finally:
      loop.stop()

  async def both():
    learning = asyncio.create_task(asyncio.to_thread(learn))
    await loop.run()
    return await learning

  names, stats = asyncio.run(asyncio.wait_for(both(), 100))
  assert len(names) == len(set(names)) == 4 + replaced
  assert stats["total_written"] <= members * (4 + replaced)


def test_items_of_another_sampling_are_masked_and_counted_or_dropped(running):
  """By `sampling_params`, of the whole item or of each turn."""
  own = {"temperature": 0.7, "max_tokens": 8}
  items = [one for name in "abcde" for one in exact(name)]
  for item, params in zip(items, (
      None, own, {**own, "temperature": 1.0}, None,
      [own, {**own, "top_p": 0.9}], [{**own, "temperature": "0"}, own],
      [own] * 3, own, {"temperature": 1}, None,
  )):  # fmt: skip
    if params is not None:
      item["sampling_params"] = params
  for item in items[4:6]:
    item |= {
      "tokens": [1, 2, 3, 4, 5],
      "loss_mask": [0, 1, 1, 0, 1],
      "logprobs": [None, -1.0, -2.0, None, -3.0],
      "versions": [None, 0, 0, None, 0],
    }
  items[9]["extra_info"]["sampling_params"] = {"top_k": 4}
  reports = []
  rule = sampling_rule.SamplingRule(temperature=0.7)
  loop, queue = loop_of(running, {"items": items}, reports=reports, rule=rule)
  run(loop)
  groups = {g.group_id[0]: g for g in (queue.get(timeout=5) for _ in "abc")}
  masks = {
    name: [t.sequences[0].loss_mask.tolist() for t in group]
    for name, group in groups.items()
  }
  assert masks == {
    "a": [[False, True, True]] * 2,
    "b": [[False] * 3, [False, True, True]],
    "c": [
      [False, True, True, False, False],
      [False, False, False, False, True],
    ],
  }
  untrained = {n: [t.untrained_tokens for t in g] for n, g in groups.items()}
  assert untrained == {"a": [0, 0], "b": [2, 0], "c": [1, 2]}
  unusable, masked = [e.message for e in reports if isinstance(e, events.Fault)]
  assert "sampling_params has 3 objects for 1 turns" in unusable
  assert "0 of 2 episodes can be trained on" in masked
  assert "4 sampled tokens are not trained on; see rollout.other" in masked
  refusing = sampling_rule.SamplingRule(temperature=0.7, other="refuse")
  reader = reader_lib.EpisodeReader(
    None, None, images_lib.ImageStore(), parser="hermes", rule=refusing
  )
  with pytest.raises(ValueError, match="b-0.*temperature=1.*leave the field"):
    reader.episode(records.read(items[2]))
  assert reader.episode(records.read(items[1])).num_sampled == 2


def test_a_generator_that_failed_fails_the_run(running):
  loop, queue = loop_of(running, {"items": exact("a"), "fails": True})
  with pytest.raises(buffer_loop.GeneratorFailed, match="it has no wood"):
    run(loop)
  with pytest.raises(group_queue.QueueFailed, match="it has no wood"):
    queue.get_batch(2, timeout=5)


def test_a_start_that_is_refused_is_not_repeated(running):
  loop, queue = loop_of(running, {"task_type": "nobody"})
  with pytest.raises(http.CallError, match="task_type='nobody'"):
    run(loop)
  assert loop.counts["failed_calls"] == 1
  with pytest.raises(group_queue.QueueFailed):
    queue.get(timeout=5)


def test_programs_elsewhere_may_write_when_the_generator_is_over(running):
  loop, queue = loop_of(running, {"task_type": "external"})

  async def scene():
    task = asyncio.ensure_future(loop.run())
    await asyncio.sleep(1)
    assert not task.done()
    items = [*exact("a"), *exact("b")]
    await asyncio.to_thread(running.write, *items)
    groups = (await queue.lease(2, timeout=20)).groups
    loop.stop()
    await asyncio.gather(task, return_exceptions=True)
    return groups

  assert len(asyncio.run(asyncio.wait_for(scene(), 60))) == 2


def test_a_buffer_of_other_groups_is_refused_where_others_write(running):
  loop, queue = loop_of(running)
  with pytest.raises(ValueError, match="groups of 16, and .*group_size=2; st"):
    run(loop)
  with pytest.raises(group_queue.QueueFailed, match="--group-size=2"):
    queue.get(timeout=5)
  # One of the right size may normalise rewards.
  running.start(num_repeat_per_sample=2)
  loop, queue = loop_of(running)
  with pytest.raises(ValueError, match="normalises rewards, which algorithm"):
    run(loop)
  loop, queue = loop_of(running, raw=False)  # algorithm.advantage=reward

  async def look():
    task = asyncio.ensure_future(loop.run())
    await asyncio.sleep(0.5)
    assert not task.done()
    loop.stop()
    await asyncio.gather(task, return_exceptions=True)

  asyncio.run(asyncio.wait_for(look(), 30))
  # A rollout that another trainer has started has the size.
  running.start(num_repeat_per_sample=2, group_rules="raw")
  running.write(*exact("a"), *exact("b"))
  loop, queue = loop_of(running)

  async def scene():
    task = asyncio.ensure_future(loop.run())
    groups = (await queue.lease(2, timeout=20)).groups
    loop.stop()
    await asyncio.gather(task, return_exceptions=True)
    return groups

  assert len(asyncio.run(asyncio.wait_for(scene(), 60))) == 2


def equal(name, count=2):
  """Items of a group whose rewards do not differ."""
  return [{**one, "reward": 1.0} for one in exact(name, count)]


async def until(condition):
  async with asyncio.timeout(20):
    while not condition():
      await asyncio.sleep(0.02)


def drops(reports):
  return [
    event.message
    for event in reports
    if isinstance(event, events.Fault) and event.kind == "dropped"
  ]


def test_what_the_service_drops_is_told_at_each_doubling(running, caplog):
  running.start(num_repeat_per_sample=2)
  running.write(*equal("before"))
  assert not running.read()["success"]
  reports = []
  loop, queue = loop_of(running, groups_per_step=1, raw=False, reports=reports)
  dropped = lambda: running.stats()["total_dropped"]

  async def scene():
    task = asyncio.ensure_future(loop.run())
    await asyncio.sleep(0.5)
    assert not drops(reports), "what another run has seen is not told"
    running.write(*equal("a"))
    await until(lambda: len(drops(reports)) == 1)
    running.write(exact("late")[0])
    await until(lambda: running.stats()["waiting_items"] == 1)
    running.clock.now += 301.0
    await until(lambda: dropped() == 5)
    await asyncio.sleep(0.5)
    assert len(drops(reports)) == 1, "3 episodes are not the double of 2"
    running.write(*equal("b"))
    await until(lambda: len(drops(reports)) == 2)
    running.write(*exact("good"))
    assert await queue.lease(1, timeout=20)
    loop.stop()
    await asyncio.gather(task, return_exceptions=True)

  asyncio.run(asyncio.wait_for(scene(), 60))
  first, second = drops(reports)
  assert "dropped 2 episodes since this run began, 1 groups of 2" in first
  assert "dropped 5 episodes since this run began, 2.5 groups of 2" in second
  for word in ("equal", "group_timeout_seconds"):
    assert word in first
  assert first in caplog.text


def test_drops_are_told_where_every_read_has_groups(running):
  running.start(num_repeat_per_sample=2)
  running.write(*equal("a"))
  for n in range(9):
    running.write(*exact(f"g{n}"))
  reports = []
  loop, queue = loop_of(running, groups_per_step=1, raw=False, reports=reports)

  async def scene():
    task = asyncio.ensure_future(loop.run())
    await until(lambda: drops(reports))
    # No learner trains: the queue holds some, and the rest wait to be read.
    assert running.stats()["waiting_items"]
    loop.stop()
    await asyncio.gather(task, return_exceptions=True)

  asyncio.run(asyncio.wait_for(scene(), 60))
  assert len(drops(reports)) == 1 and queue.qsize() >= 1
