"""Promises of the observers about the files they write."""

import dataclasses
import json
import threading

import numpy as np
import peer_threads
from PIL import Image
import pytest
import synthetic_run
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import metrics as metrics_lib
from tunix.rl.multi_turn.reporting import metrics_writer
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import step_metrics
from tunix.rl.multi_turn.reporting import summary_writer
from tunix.rl.multi_turn.reporting import trajectory_writer
from tunix.rl.queue import group_queue

Status = trajectory_lib.TrajectoryStatus
Config = reporting_settings.ReportConfig


def step(number, time=0.0, **metrics):
  return events.StepFinished(number, number, metrics, time=time)


def lines(path):
  return [json.loads(text) for text in path.read_text().splitlines()]


# --- metrics.jsonl ------------------------------------------------------------


def test_a_step_is_on_disk_when_its_event_has_returned(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path / "run" / "metrics.jsonl")
  writer.on_event(step(1, time=5.0, loss=np.float32(0.5)))
  assert lines(tmp_path / "run" / "metrics.jsonl") == [
    {"step": 1, "version": 1, "time": 5.0, "loss": 0.5}
  ]


def test_what_is_not_finite_is_null_and_the_line_stays_strict_json(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path / "m.jsonl")
  writer.on_event(step(1, loss=float("nan"), grad_norm=np.inf))
  text = (tmp_path / "m.jsonl").read_text()
  data = json.loads(text, parse_constant=lambda name: pytest.fail(name))
  assert data["loss"] is None and data["grad_norm"] is None


def test_resuming_removes_the_steps_that_will_be_made_again(tmp_path):
  path = tmp_path / "m.jsonl"
  writer = metrics_writer.MetricsWriter(path)
  for number in range(1, 6):
    writer.on_event(step(number))
  writer.close()
  with path.open("a") as file:
    file.write('{"step": 6, "torn')
  writer = metrics_writer.MetricsWriter(path, resume_step=3)
  writer.on_event(step(4))
  assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
  metrics_writer.MetricsWriter(path)
  assert not path.read_text()


def test_undocumented_metrics_are_named_once(tmp_path, caplog):
  writer = metrics_writer.MetricsWriter(tmp_path / "m.jsonl")
  for number in (1, 2):
    writer.on_event(step(number, loss=1.0, mystery=2.0))
  assert caplog.text.count("mystery") == 1
  assert "loss" not in caplog.text
  assert lines(tmp_path / "m.jsonl")[1]["mystery"] == 2.0


def test_the_reference_of_metrics_in_docs_is_up_to_date(pytestconfig):
  written = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()
  assert written == metrics_lib.reference(), (
    "run: python -m tunix.rl.multi_turn.reporting.metrics > docs/metrics.md"
  )


def test_what_the_dashboard_explains_of_metrics_is_up_to_date(pytestconfig):
  path = "packages/training_monitor/training_monitor/dashboard/metrics.json"
  written = (pytestconfig.rootpath / path).read_text()
  assert written == metrics_lib.explanations() + "\n", "run: make docs"


# --- readings -----------------------------------------------------------------


def test_group_metrics_count_what_the_policy_decided():
  store = images_lib.ImageStore()

  def group(*members):
    return trajectory_lib.TrajectoryGroup("g", "t", members)

  def one(success, **kw):
    return synthetic_run.episode(store, success=success, **kw)

  broken = one(False, status=Status.ENV_ERROR)
  broken.metrics = {"seconds": 2.5, "seconds_model": 0.3}
  metrics = metrics_lib.group_metrics(
    [
      group(one(True, turns=2), one(False), broken),
      group(one(True), one(True, family="enter-text")),
    ]
  )
  assert metrics["groups"] == 2 and metrics["episodes"] == 5
  assert metrics["invalid_episodes"] == pytest.approx(0.2)
  assert metrics["success_rate"] == metrics["reward_mean"] == 0.75
  assert metrics["success_rate/click-button"] == pytest.approx(2 / 3)
  assert metrics["success_rate/enter-text"] == 1.0
  assert metrics["informative_groups"] == 0.5
  assert metrics["turns_mean"] == 1.25
  assert metrics["episode_tokens_mean"] == 3 * 1.25
  assert metrics["episode_seconds_max"] == 2.5
  assert metrics["model_share"] == pytest.approx(1.5 / 4.5)
  assert metrics["status/env_error"] == pytest.approx(0.2)
  assert not metrics_lib.undocumented(metrics)


def test_without_a_valid_episode_means_are_absent_not_zero():
  store = images_lib.ImageStore()
  broken = synthetic_run.episode(store, success=False, status=Status.ENV_ERROR)
  group = trajectory_lib.TrajectoryGroup("g", "t", (broken,))
  metrics = metrics_lib.group_metrics([group])
  assert metrics["invalid_episodes"] == 1.0
  assert "reward_mean" not in metrics and "success_rate" not in metrics


def test_engine_metrics_are_differences_of_counters():
  before = {"decode_tokens": 100, "seconds_idle": 1.0, "prompt_tokens": 10}
  after = {
    "completed": 30,
    "decode_tokens": 300,
    "decode_places": 400,
    "drafted_tokens": 60,
    "accepted_tokens": 45,
    "seconds_idle": 1.5,
    "prompt_tokens": 110,
    "prefilled_tokens": 25,
    "compiles_after_warm_up": 2,
  }
  metrics = metrics_lib.engine_metrics(before, after, 2.0)
  assert metrics["rollout_tokens_per_second"] == 100
  assert metrics["rollout_calls_per_second"] == 15
  assert metrics["prefix_reuse"] == 0.75
  assert metrics["batch_occupancy"] == (200 - 45) / 400
  assert metrics["draft_acceptance"] == 0.75
  assert metrics["engine_busy"] == 0.75
  assert metrics["engine_compiles"] == 2
  of_two = metrics_lib.engine_metrics(before, after, 2.0, engines=2)
  assert of_two["engine_busy"] == 0.875
  assert not metrics_lib.undocumented(metrics)


class _Engine:
  def stats(self):
    return {"decode_tokens": 0.0}


def test_a_step_is_described_by_the_groups_it_learned_from():
  store = images_lib.ImageStore()

  def group(name, success, **kw):
    member = synthetic_run.episode(store, success=success, **kw)
    return trajectory_lib.TrajectoryGroup(name, "t", (member, member))

  events_ = []

  class Keeps:
    def on_event(self, event):
      events_.append(event)

  queue = group_queue.GroupQueue(1)
  adds = step_metrics.StepMetrics(events.Observers([Keeps()]), queue, _Engine())
  broken = group("a", False, status=Status.ENV_ERROR)
  adds.on_event(events.GroupFinished(broken, "requeued", "none is valid"))
  for name, success in (("a", True), ("b", False), ("c", False)):
    finished = group(name, success)
    adds.on_event(events.GroupFinished(finished, "accepted"))
    if name == "a":
      learned_from = finished
  # b and c are for later updates, and the broken attempt was for none.
  adds.on_event(
    events.StepFinished(1, 1, {"loss": 2.0}, groups=(learned_from,))
  )
  row = events_[-1].metrics
  assert (row["groups"], row["episodes"], row["loss"]) == (1, 2, 2.0)
  assert row["success_rate"] == 1.0 and row["invalid_episodes"] == 0.0
  assert row["refused_groups"] == 1.0
  assert not metrics_lib.undocumented(row)
  adds.on_event(events.StepFinished(2, 2, {}, groups=()))
  assert events_[-1].metrics["refused_groups"] == 0.0
  assert "reward_mean" not in events_[-1].metrics


class _Counters:
  """An engine and a queue that show given counters."""

  def __init__(self, shown):
    self.shown = shown

  def stats(self):
    return dict(self.shown)

  counters = stats


def test_readings_of_several_processes_are_those_of_all_their_work():
  store = images_lib.ImageStore()

  def group(name, success, **kw):
    member = synthetic_run.episode(store, success=success, **kw)
    return trajectory_lib.TrajectoryGroup(name, "t", (member, member))

  deals = [
    [group("a", True, turns=3), group("b", False)],
    [group("c", False, family="enter-text")],
    [group("d", False, status=Status.ENV_ERROR)],
  ]
  slow, busy = deals[1][0].trajectories[0], deals[0][0].trajectories[0]
  slow.metrics = {"seconds": 9.0, "seconds_model": 1.0, "seconds_setup": 2.0}
  busy.metrics |= {"truncated_turns": 2.0}
  before = {"decode_tokens": 5, "seconds_idle": 0.0}
  afters = [
      {"decode_tokens": 105, "decode_places": 200, "prompt_tokens": 10,
       "prefilled_tokens": 5, "lockstep_timeouts": 1},
      {"decode_tokens": 25, "decode_places": 100, "prompt_tokens": 90,
       "prefilled_tokens": 15, "compiles_after_warm_up": 3},
      {"decode_tokens": 5},
  ]  # fmt: skip

  def step(peers, groups, after, ready, replaced):
    engine = _Counters(before)
    queue = _Counters({"ready": ready, "dropped_stale": ready})
    events_ = []
    adds = step_metrics.StepMetrics(events.Observers(), queue, engine, peers)
    adds._downstream.on_event = events_.append  # pylint: disable=protected-access
    for _ in range(ready):
      adds.on_event(events.GroupFinished(groups[0], "requeued", "why"))
    engine.shown = after
    metrics = {
      "loss": 2.0,
      "replaced_groups": replaced,
      "seconds_wait": replaced,
    }
    adds.on_event(events.StepFinished(1, 1, metrics, groups=tuple(groups)))
    return events_[-1].metrics

  results = peer_threads.run_all(
    3,
    lambda peers: step(
      peers,
      deals[peers.index],
      afters[peers.index],
      peers.index,
      4.0 + peers.index,
    ),
  )
  assert results[0] == results[1] == results[2]
  own = results[0]
  want = metrics_lib.group_metrics([g for deal in deals for g in deal])
  assert want["success_rate"] == pytest.approx(1 / 3)
  for name, value in want.items():
    assert own[name] == pytest.approx(value), name
  assert own["status/env_error"] == pytest.approx(0.25)
  assert own["success_rate/enter-text"] == 0.0
  assert own["episode_seconds_max"] == 9.0
  assert own["prefix_reuse"] == pytest.approx(0.8)
  assert own["batch_occupancy"] == pytest.approx(0.4)
  assert (own["lockstep_timeouts"], own["engine_compiles"]) == (1, 3)
  assert (own["queue_size"], own["dropped_stale"]) == (3, 3)
  assert (own["refused_groups"], own["replaced_groups"]) == (3, 15)
  assert (own["seconds_wait"], own["loss"]) == (6.0, 2.0)
  assert not metrics_lib.undocumented(own)


# --- trajectories.jsonl -------------------------------------------------------


def test_episodes_come_back_as_they_were_with_their_screenshots(tmp_path):
  store = images_lib.ImageStore()
  episode = synthetic_run.episode(store, turns=3)
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, store, Config(episodes=8)
  )
  writer.on_event(events.WeightsPublished(7, 0.0))
  writer.on_event(synthetic_run.finished(episode))
  assert writer.close()
  (line,) = lines(tmp_path / "trajectories.jsonl")
  assert (line["version"], line["family"], line["split"]) == (
    7,
    "click-button",
    "train",
  )
  again = trajectory_lib.Trajectory.from_json(line)
  assert again.steps == episode.steps
  assert again.sequences == episode.sequences
  refs = trajectory_writer.image_refs(line)
  assert {s.image.sha256 for s in episode.sequences[0].images} < set(refs)
  for ref in refs.values():
    with Image.open(tmp_path / "images" / f"{ref.sha256}.png") as image:
      pixels = np.asarray(image)
    assert images_lib.hash_pixels(pixels) == ref.sha256


def test_a_long_run_keeps_few_episodes_evenly_and_only_their_images(tmp_path):
  store = images_lib.ImageStore()
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, store, Config(episodes=16, max_pending=1000)
  )
  for i in range(150):
    writer.on_event(
      synthetic_run.finished(synthetic_run.episode(store, seed=i // 2))
    )
    if i % 3 == 0:
      writer.on_event(
        synthetic_run.finished(synthetic_run.episode(store, seed=i), "eval")
      )
  assert writer.close()
  records = lines(tmp_path / "trajectories.jsonl")
  train = [line["index"] for line in records if line["split"] == "train"]
  evals = [line["index"] for line in records if line["split"] == "eval"]
  assert train == list(range(0, 150, 16))
  assert evals == list(range(0, 50, 16))
  expected = set()
  for line in records:
    expected |= set(trajectory_writer.image_refs(line))
  assert {p.stem for p in (tmp_path / "images").glob("*.png")} == expected
  assert not writer.counters["dropped"] and not writer.counters["failed"]


def test_a_resumed_run_goes_on_where_the_file_ends(tmp_path):
  store = images_lib.ImageStore()

  def tell(writer, count):
    for i in range(count):
      writer.on_event(
        synthetic_run.finished(synthetic_run.episode(store, seed=i))
      )
    assert writer.close()

  config = Config(episodes=16)
  tell(trajectory_writer.TrajectoryWriter(tmp_path, store, config), 20)
  with (tmp_path / "trajectories.jsonl").open("a") as file:
    file.write('{"index": 99, "torn')
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, store, Config(episodes=16), resume=True
  )
  tell(writer, 20)
  index = [line["index"] for line in lines(tmp_path / "trajectories.jsonl")]
  assert len(index) <= 12 and index == sorted(set(index))
  assert len(set(np.diff(index))) == 1  # Still evenly spread.


class _SlowStore:
  """Holds the writing thread until it is let go."""

  def __init__(self):
    self.gate = threading.Event()

  def get(self, ref):
    self.gate.wait(30)
    raise KeyError(ref.sha256)


def test_a_slow_disk_drops_and_counts_but_never_blocks(tmp_path):
  store = _SlowStore()
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, store, Config(episodes=1000, max_pending=4)
  )
  episode = synthetic_run.episode(images_lib.ImageStore())
  for _ in range(50):
    writer.on_event(synthetic_run.finished(episode))
  assert writer.counters["dropped"] >= 45
  assert not writer.flush(timeout_s=0.05)
  store.gate.set()
  assert writer.close()
  count = len(lines(tmp_path / "trajectories.jsonl"))
  assert count + writer.counters["dropped"] == 50
  assert writer.counters["images_missing"] == 2 * count


def test_what_cannot_be_written_is_counted_and_the_rest_goes_on(
  tmp_path, caplog
):
  store = images_lib.ImageStore()
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, store, Config(episodes=8)
  )
  bad = synthetic_run.episode(store)
  bad.steps[0].info["pixels"] = np.zeros((200, 200))
  for episode in (bad, bad, synthetic_run.episode(store)):
    writer.on_event(synthetic_run.finished(episode))
  assert writer.close()
  assert writer.counters["failed"] == 2
  assert caplog.text.count("not recorded") == 1
  assert len(lines(tmp_path / "trajectories.jsonl")) == 1


def test_no_thread_outlives_the_writer_and_zero_keeps_nothing(tmp_path):
  before = set(threading.enumerate())
  writer = trajectory_writer.TrajectoryWriter(
    tmp_path, None, Config(episodes=0)
  )
  writer.on_event(
    synthetic_run.finished(synthetic_run.episode(images_lib.ImageStore()))
  )
  writer.on_event(events.RunFinished("completed"))
  assert writer.close() and not set(threading.enumerate()) - before
  assert not (tmp_path / "trajectories.jsonl").exists()


# --- summary.json -------------------------------------------------------------


def test_the_summary_holds_evaluations_counts_and_the_end(tmp_path):
  path = tmp_path / "summary.json"
  writer = summary_writer.SummaryWriter(path, extra=lambda: {"devices": 2})
  store = images_lib.ImageStore()
  writer.on_event(events.RunStarted("r", {}, time=100.0))
  assert files.read_json(path)["status"] == "running"
  writer.on_event(events.EvalFinished("initial", synthetic_run.results(0.1)))
  for status in (Status.SUCCEEDED, Status.FAILED, Status.FAILED):
    episode = synthetic_run.episode(store, status=status)
    writer.on_event(synthetic_run.finished(episode))
  writer.on_event(events.Fault("step", "EnvStepError", "x"))
  writer.on_event(step(3, loss=float("nan")))
  writer.on_event(events.RunFinished("failed", "disk full"))
  data = json.loads(path.read_text())
  assert (data["run_name"], data["status"]) == ("r", "failed")
  assert data["error"] == "disk full" and data["devices"] == 2
  assert data["eval"]["initial"]["by_task"]["click-button"]["episodes"] == 40
  assert data["episodes"] == {"train/failed": 2, "train/succeeded": 1}
  assert data["faults"] == {"step/EnvStepError": 1}
  assert data["step"] == 3 and data["last_metrics"] == {"loss": None}


def test_a_resumed_summary_adds_to_what_was_there(tmp_path):
  path = tmp_path / "summary.json"
  for resume_step in (None, 0):
    writer = summary_writer.SummaryWriter(path, resume_step=resume_step)
    writer.on_event(events.RunStarted("r", {}))
    writer.on_event(events.Fault("close", "Timeout", "x"))
    name = "initial" if resume_step is None else "final"
    writer.on_event(events.EvalFinished(name, synthetic_run.results(0.5)))
    writer.on_event(events.RunFinished("interrupted"))
  data = files.read_json(path)
  assert list(data["eval"]) == ["initial", "final"]
  assert data["faults"] == {"close/Timeout": 2} and data["resumed"] == 1


def test_a_resumed_summary_forgets_what_will_be_measured_again(tmp_path):
  path = tmp_path / "summary.json"
  writer = summary_writer.SummaryWriter(path)
  writer.on_event(events.EvalFinished("initial", synthetic_run.results(0.1)))
  for number in (2, 4):
    writer.on_event(step(number, loss=0.5))
    name = f"step_{number}"
    writer.on_event(events.EvalFinished(name, synthetic_run.results(0.2)))
  writer.on_event(events.EvalFinished("final", synthetic_run.results(0.3)))
  writer.on_event(events.RunFinished("completed"))
  resumed = summary_writer.SummaryWriter(path, resume_step=3)
  resumed.on_event(events.RunStarted("r", {}))
  data = files.read_json(path)
  assert list(data["eval"]) == ["initial", "step_2"]
  assert (data["step"], data["version"]) == (3, 3)
  assert data["last_metrics"] == {}
  # At the step where it ended, everything but the end still holds.
  resumed.on_event(step(4, loss=0.5))
  resumed.on_event(events.EvalFinished("final", synthetic_run.results(0.3)))
  resumed.on_event(events.RunFinished("completed"))
  again = summary_writer.SummaryWriter(path, resume_step=4)
  again.on_event(events.RunStarted("r", {}))
  data = files.read_json(path)
  assert list(data["eval"]) == ["initial", "step_2"]
  assert data["last_metrics"] == {"loss": 0.5}


def test_time_is_booked_on_the_stage_it_was_spent_in(tmp_path):
  path = tmp_path / "summary.json"
  writer = summary_writer.SummaryWriter(path)
  writer.on_event(events.Progress("warm start", 1, 10, time=10.0))
  writer.on_event(events.Progress("warm start", 10, 10, time=14.0))
  writer.on_event(step(1, time=20.0))
  writer.on_event(step(2, time=25.0))
  writer.on_event(events.RunFinished("completed", time=26.0))
  assert files.read_json(path)["stage_seconds"] == {
    "warm start": 10.0,
    "train": 6.0,
  }


def test_a_broken_source_of_extras_costs_only_the_extras(tmp_path):
  path = tmp_path / "summary.json"
  writer = summary_writer.SummaryWriter(path, extra=lambda: 1 / 0)
  writer.on_event(events.RunFinished("completed"))
  data = files.read_json(path)
  assert data["status"] == "completed"
  assert "ZeroDivisionError" in data["extra_error"]


def _turns_of(episode, sampled):
  """One sequence: `sampled[k]` tokens in turn k, an image before each turn."""
  tokens, mask, turns, spans = [1], [False], [0], []
  for turn, count in enumerate(sampled):
    spans.append(
      trajectory_lib.ImageSpan(
        trajectory_lib.ImageRef(sha256=f"{turn:064x}", width=8, height=8),
        len(tokens),
        1,
      )
    )
    tokens += [2, *range(3, 3 + count)]
    mask += [False, *[True] * count]
    turns += [turn] * (1 + count)
  mask = np.array(mask)
  return dataclasses.replace(
    episode,
    sequences=[
      trajectory_lib.TokenSequence(
        tokens=np.array(tokens),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0),
        versions=np.where(mask, 0, -1),
        turn_ids=np.array(turns),
        images=tuple(spans),
      )
    ],
  )


def test_length_and_success_by_turn_and_images():
  episodes = [
    _turns_of(trajectory_lib.Trajectory(task="t", status=ended), sampled)
    for ended, sampled in (
      (Status.SUCCEEDED, [2, 4]),
      (Status.FAILED, [4, 6, 8, 10]),
      (Status.SUCCEEDED, [3]),
    )
  ]
  group = trajectory_lib.TrajectoryGroup("g", "t", tuple(episodes))
  readings = metrics_lib.group_metrics([group])
  for by in ("turn", "images"):
    of = {
      k.partition("/")[2]: v
      for k, v in readings.items()
      if k.startswith(f"success_by_{by}/")
    }
    assert of == {"01": 2 / 3, "02": 1 / 2, "03-04": 0.0}
    assert readings[f"turn_tokens_by_{by}/01"] == 3
    assert readings[f"turn_tokens_by_{by}/02"] == 5
    assert readings[f"turn_tokens_by_{by}/03-04"] == 9
  assert not metrics_lib.undocumented(readings)
  alone = trajectory_lib.TrajectoryGroup("g", "t", (episodes[2],))
  assert not [k for k in metrics_lib.group_metrics([alone]) if "_by_" in k]
