"""The loop that fills a queue from a rollout buffer, with the real service."""

import asyncio
import json
import types

import buffer_services
import numpy as np
import pytest
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.run.recorded_data import buffer_loop
from tunix.rl.multi_turn.run.recorded_data import feeding
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.queue import admission
from tunix.rl.queue import group_queue

EXACT = {
  "tokens": [5, 6],
  "loss_mask": [0, 1],
  "logprobs": [None, -0.5],
  "versions": [None, 0],
}


@pytest.fixture(name="service")
def _service(tmp_path):
  with buffer_services.Running(tmp_path / "buffer") as running:
    assert running.start(num_repeat_per_sample=2, group_rules="raw")
    yield running


def _group(name, first=0, **more):
  return [
    buffer_services.item(
      f"{name}-{first + i}", name, float(i), **{**EXACT, **more}
    )
    for i in range(2)
  ]


class _Loop:
  """A loop with a queue and a reader of its own."""

  def __init__(self, service, state=None):
    self.faults = []
    self.queue = group_queue.GroupQueue(
      1, admission.QueueConfig(max_staleness=100)
    )
    settings = types.SimpleNamespace(poll_s=0.02, retries=-1, lease_s=60.0)
    self.loop = buffer_loop.BufferLoop(
      lambda: client.BufferClient(service.url),
      settings,
      reader_lib.EpisodeReader(None, None, images_lib.ImageStore(), parser=""),
      self.queue,
      batch_size=-1,
      min_valid=1,
      payload=None,
      observers=self,
    )
    self.loop.load_state_dict(state or {})

  def on_event(self, event):
    if isinstance(event, events.Fault):
      self.faults.append(event.message)

  def until(self, condition):
    """Runs the loop until `done()` holds."""

    async def run():
      task = asyncio.create_task(self.loop.run())
      try:
        async with asyncio.timeout(10):
          while not condition() and not task.done():
            await asyncio.sleep(0.01)
          if task.done():
            await task
      finally:
        self.loop.stop()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())

  def members(self):
    """The uids of each group that was queued."""
    return [
      sorted(t.trajectory_id for t in self.queue.get(1))
      for _ in range(self.queue.qsize())
    ]


# What the service takes and a trainer cannot use.
POSITIVE = {"logprobs": [None, 0.5]}


def test_an_item_that_cannot_be_read_costs_its_own_group_only(service):
  bad = _group("b")
  bad[1].update(POSITIVE)
  service.put(*_group("a"), *bad, *_group("c"))
  run = _Loop(service)
  run.until(lambda: run.queue.qsize() == 2)
  assert run.loop.counts["refused"] == 1 and not run.loop.counts["failed_calls"]
  assert run.members() == [["a-0", "a-1"], ["c-0", "c-1"]]
  (fault,) = run.faults
  assert "'b'" in fault and "logprobs must be <= 0" in fault
  assert "b" in run.loop.skipped()


def test_a_refused_group_does_not_keep_its_lease(service):
  bad = _group("b", **POSITIVE)
  service.put(*bad)
  run = _Loop(service)
  run.until(
    lambda: run.loop.counts["refused"] and not service.stats()["leases"]
  )
  assert service.stats()["items"] == 0


def test_pictures_that_cannot_be_read_cost_their_own_group_only(service):
  service.write(*_group("b", images={"ab" * 32: "not base64"}), *_group("c"))
  run = _Loop(service)
  run.until(lambda: run.queue.qsize() == 1)
  assert run.members() == [["c-0", "c-1"]]
  assert "is not base64" in run.faults[0]


def test_many_groups_in_a_row_that_cannot_be_read_end_the_run(
  service, monkeypatch
):
  monkeypatch.setattr(feeding, "MOST_BAD", 3)
  for n in range(3):
    service.put(*_group(f"b{n}", **POSITIVE))
  run = _Loop(service)
  with pytest.raises(ValueError, match="3 groups of the rollout buffer in a"):
    run.until(lambda: False)


UNTRAINED = {
  "tokens": [5, 6],
  "loss_mask": [0, 0],
  "logprobs": None,
  "versions": None,
  "extra_info": {"finish_reason": "length"},
}


def test_groups_without_a_sampled_token_are_reported_and_end_the_run(
  service, monkeypatch
):
  monkeypatch.setattr(feeding, "MOST_BAD", 4)
  for n in range(3):
    service.write(*_group(f"b{n}", **UNTRAINED))
  service.write(*_group("a"))  # One between begins the count anew.
  run = _Loop(service)
  run.until(lambda: run.queue.qsize() == 1)
  assert run.loop.counts["dropped"] == 3
  assert len(run.faults) == 2 and "'b0' is dropped" in run.faults[0]
  assert "0 of 2 episodes can be trained on" in run.faults[0]
  for n in range(4):
    service.write(*_group(f"c{n}", **UNTRAINED))
  run = _Loop(service)
  with pytest.raises(ValueError) as caught:
    run.until(lambda: False)
  text = str(caught.value)
  assert "4 groups of the rollout buffer in a row have too few episodes" in text
  assert "its episodes ended: 2 context_limit without a token" in text
  assert "raise engine.context_length" in text


def test_two_groups_of_an_instance_in_one_read_stay_two(service):
  service.write(*_group("a"), *_group("a", 2))
  run = _Loop(service)
  run.until(lambda: run.queue.qsize() == 2)
  assert run.loop.skipped() == ["a", "a"]
  first, second = [uids for *_, uids in run.loop.state_dict()["queued"]]
  assert [first, second] == [["a-0", "a-1"], ["a-2", "a-3"]]
  assert run.members() == [["a-0", "a-1"], ["a-2", "a-3"]]
  # Its lease is over: both come again, of which one was trained on.
  service.clock.now += 61
  again = _Loop(service, {"finished": [["a", first]]})
  again.until(lambda: again.queue.qsize() == 1)
  assert again.members() == [["a-2", "a-3"]]
  assert again.loop.counts["repeated"] == 1


def test_members_that_were_trained_on_are_known_in_another_group(service):
  service.write(*_group("a"))
  first = _Loop(service)
  first.until(lambda: first.queue.qsize() == 1)
  first.queue.get_batch(1)
  first.queue.ack()
  # The service gives them in another composition: its lease was over.
  again = _Loop(service, first.loop.state_dict())
  service.start(
    num_repeat_per_sample=3, group_rules="raw", task_type="external"
  )
  for name in ("a", "c"):
    service.write(*_group(name), _group(name, 2)[0])
  again.until(lambda: again.queue.qsize() == 1)
  assert again.members() == [["c-0", "c-1", "c-2"]]
  assert again.loop.counts["repeated"] == 1


def test_log_probs_are_filled_where_a_sequence_lacks_one_only():
  """Also where it went through a queue's file; a recorded 0 is recorded."""
  exact = {**EXACT, "logprobs": [None, -0.0]}
  lacking = {
    "tokens": [7, 8, 9],
    "loss_mask": [0, 1, 1],
    "logprobs": [None, -0.5, None],
  }
  item = buffer_services.item("a", sequences=[exact, lacking, EXACT])
  reader = reader_lib.EpisodeReader(
    None, None, images_lib.ImageStore(), parser="", missing_logprobs="recompute"
  )
  episode = reader.episode(records.read(item), version=3)
  group = trajectory_lib.TrajectoryGroup("g", "t", (episode,))
  group = trajectory_lib.TrajectoryGroup.from_json(
    json.loads(json.dumps(group.to_json()))
  )
  requests = []

  def score(sequences):
    requests.extend(sequences)
    return [np.where(s.loss_mask, -2.0, 0.0) for s in sequences]

  (filled,) = reader_lib.fill_logprobs([group], score, 7)
  assert [list(s.tokens) for s in requests] == [[7, 8, 9]]
  first, second, third = filled.trajectories[0].sequences
  assert list(first.logprobs) == [0, 0] and list(first.versions) == [-1, 0]
  assert list(second.logprobs) == [0, -2, -2]
  assert list(second.versions) == [-1, 7, 7]
  assert list(third.logprobs) == [0, -0.5] and list(third.versions) == [-1, 0]
  for member in filled:
    assert records.LOGPROBS_MISSING not in member.metrics
  refusing = reader_lib.EpisodeReader(
    None, None, images_lib.ImageStore(), parser=""
  )
  with pytest.raises(reader_lib.SettingError, match="missing_logprobs=recom"):
    refusing.own(group.trajectories[0])
  refusing.own(filled.trajectories[0])


@pytest.mark.parametrize(
  "tokens, logprob, problem",
  [
    ([7, 64], -0.5, "token id 64 is outside of the vocabulary of 64"),
    ([7, 9], -0.5, "token id 9 is banned"),
    ([7, 8], -200.0, "log-prob is -200, below -50"),
    ([7, 8], 0.5, "must be <= 0"),
  ],
)
def test_what_this_policy_cannot_have_sampled_is_refused(
  tokens, logprob, problem
):
  item = buffer_services.item(
    "a",
    sequences=[
      {"tokens": tokens, "loss_mask": [0, 1], "logprobs": [None, logprob]}
    ],
  )
  reader = reader_lib.EpisodeReader(
    None,
    None,
    images_lib.ImageStore(),
    parser="",
    vocabulary=completion_checks.Vocabulary(64, frozenset({9})),
  )
  with pytest.raises(ValueError, match=problem):
    reader.episode(records.read(item))
