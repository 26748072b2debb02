"""Counts that a kill does not change."""

import collections
import itertools
import json

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import run_counts
from tunix.rl.multi_turn.reporting import summary_writer

Status = trajectory_lib.TrajectoryStatus
SUCCEEDED, FAILED = Status.SUCCEEDED, Status.FAILED


def group(index, statuses=(SUCCEEDED, FAILED), attempt=0):
  name = f"train-{index:06d}" + (f"-r{attempt}" if attempt else "")
  return trajectory_lib.TrajectoryGroup(
    group_id=name,
    task_id="t",
    trajectories=tuple(
      trajectory_lib.Trajectory(task={}, status=s, trajectory_id=f"{name}.{i}")
      for i, s in enumerate(statuses)
    ),
    attempt=attempt,
  )


def collected(group_, outcome="accepted"):
  """The events of a group's collection."""
  for member in group_:
    if member.status is FAILED:
      yield events.Fault("step", "E", "x", member.trajectory_id)
    yield events.EpisodeFinished(member, group_.group_id, group_.task_id)
  yield events.GroupFinished(group_, outcome)


def trained(step, *groups):
  yield events.StepFinished(step, step, {}, tuple(groups))


def evaluated(name, episodes=3):
  for mode in ("sampled", "greedy"):
    yield events.EvalStarted(name, mode, 2 * episodes)
    for i in range(episodes):
      member = trajectory_lib.Trajectory(
        task={}, status=SUCCEEDED, trajectory_id=f"eval-{i:06d}.0"
      )
      yield events.EpisodeFinished(member, f"eval-{i:06d}", "t", "eval")
    yield events.Fault("close", "E", "x", "eval-000001.0")
  yield events.EvalFinished(name, {"by_task": {}, "headline": "sampled"})


def whole_run():
  """Each event, and the groups that a store holds after it."""
  store = {}
  groups = [group(i) for i in range(6)]
  groups[2] = group(2, attempt=1)
  for event in evaluated("initial"):
    yield event, dict(store)
  for step in range(3):
    two = groups[2 * step : 2 * step + 2]
    for group_ in two:
      if group_.attempt:
        for event in collected(group(2, (FAILED, FAILED)), "requeued"):
          yield event, dict(store)
      for event in collected(group_):
        if isinstance(event, events.GroupFinished):
          store[group_.group_id] = group_
        yield event, dict(store)
    for event in trained(step + 1, *two):
      yield event, dict(store)
    yield ("save", [m.group_id for m in two]), dict(store)
    for group_ in two:
      del store[group_.group_id]
  for event in collected(group(7, (FAILED,)), "dropped"):
    yield event, dict(store)
  for event in evaluated("final"):
    yield event, dict(store)


def test_a_kill_at_any_event_changes_no_count(tmp_path):
  """Resumed from the last save, the rest is played; without a store, what it
  held is collected again."""
  straight = run_counts.RunCounts()
  for event, _ in whole_run():
    if not isinstance(event, tuple):
      straight.on_event(event)
  want = straight.totals()
  assert want["groups"] == {"accepted": 6, "dropped": 1, "requeued": 1}
  assert want["episodes"]["eval/succeeded"] == 12
  length = len(list(whole_run()))
  path = tmp_path / "summary.json"
  for killed in range(1, length):
    writer = summary_writer.SummaryWriter(path)
    writer.on_event(events.RunStarted("r", {}))
    saves = 0
    saved = None
    for event, _ in itertools.islice(whole_run(), killed):
      if isinstance(event, tuple):
        saves += 1
        saved = json.loads(json.dumps(writer.counts.training()))
      else:
        writer.on_event(event)
    measured = set(files.read_json(path).get("eval", {}))
    again = summary_writer.SummaryWriter(path, resume_step=saves)
    again.counts.restore_training(saved, None)
    count, evaluation = 0, ""
    for event, _ in whole_run():
      name = getattr(event, "name", None)
      if isinstance(event, tuple):
        count += 1
      elif (
        name is not None
        or getattr(event, "split", "") == "eval"
        or ((getattr(event, "trajectory_id", "") or "").startswith("eval"))
      ):
        evaluation = name or evaluation
        if evaluation == "final" or evaluation not in measured:
          again.on_event(event)
      elif count >= saves:
        again.on_event(event)
    got = again.counts.totals()
    assert got == want, killed


def test_groups_in_a_store_are_not_collected_again_and_count():
  counts = run_counts.RunCounts()
  groups = [group(i) for i in range(4)]
  for one in groups[:3]:
    for event in collected(one):
      counts.on_event(event)
  for event in trained(1, groups[0]):
    counts.on_event(event)
  saved = json.loads(json.dumps(counts.training()))
  for event in collected(groups[3]):
    counts.on_event(event)
  want = counts.totals()
  again = run_counts.RunCounts()
  # The last one was stored after the checkpoint: its faults are not known.
  again.restore_training(saved, groups[1:])
  got = again.totals()
  assert got["groups"] == want["groups"] == {"accepted": 4}
  assert got["episodes"] == want["episodes"]
  assert got["faults"] == {"step/E": 3}
  # A missing group was dropped for its age.
  again.restore_training(saved, groups[2:])
  assert again.totals()["groups"] == {"accepted": 4, "dropped": 1}


def test_late_faults_belong_to_their_group():
  counts = run_counts.RunCounts()
  group_ = group(0)
  for event in (*collected(group_), *trained(1, group_)):
    counts.on_event(event)
  counts.on_event(events.Fault("close", "E", "x", "train-000000.1"))
  assert counts.training()["settled"]["faults"] == {"close/E": 1, "step/E": 1}
  assert counts.training()["accepted"] == {}


# --- groups in parts ----------------------------------------------------------


def in_parts(index):
  """A group of four in two parts."""
  full = group(index, (SUCCEEDED, FAILED, FAILED, SUCCEEDED))
  return tuple(
    trajectory_lib.TrajectoryGroup(
      full.group_id,
      "t",
      full.trajectories[at : at + 2],
      peer_rewards=(0.0, 0.0)[:at],
    )
    for at in (0, 2)
  )


def fed(counts, *groups):
  for event in itertools.chain(*groups):
    counts.on_event(event)
  return counts


def test_a_group_in_parts_counts_once():
  one, two = in_parts(0)
  counts = fed(run_counts.RunCounts(2), collected(one), collected(two))
  want = {
    "episodes": {"train/failed": 2, "train/succeeded": 2},
    "groups": {"accepted": 1},
    "faults": {"step/E": 2},
  }
  assert counts.totals() == want
  late = fed(run_counts.RunCounts(2), collected(one), trained(1, one))
  fed(late, collected(two), trained(2, two))
  assert late.totals() == want
  stale = [events.GroupFinished(part, "dropped") for part in (one, two)]
  assert fed(counts, stale).totals()["groups"] == {"accepted": 1, "dropped": 1}


def test_stored_parts_count_once_after_a_kill():
  settled, waiting = in_parts(0), in_parts(1)
  counts = run_counts.RunCounts(2)
  fed(counts, collected(settled[0]), trained(1, settled[0]))
  fed(counts, collected(waiting[0]), collected(waiting[1]))
  # An episode of the part to come has ended.
  (ended, *_) = collected(settled[1])
  fed(counts, [ended])
  saved = json.loads(json.dumps(counts.training()))
  fed(counts, itertools.islice(collected(settled[1]), 1, None))
  want = counts.totals()
  for stored, again in (
    # Stored after the checkpoint.
    ((settled[1], *waiting), ()),
    # Under way at the kill, and collected again.
    (waiting, collected(settled[1])),
  ):
    resumed = run_counts.RunCounts(2)
    resumed.restore_training(saved, stored)
    got = fed(resumed, again).totals()
    assert got["groups"] == want["groups"] == {"accepted": 2}
    assert got["episodes"] == want["episodes"]
  # One part of a group is dropped for its age, and then the other.
  resumed = run_counts.RunCounts(2)
  resumed.restore_training(saved, waiting[1:])
  fed(resumed, [events.GroupFinished(waiting[1], "dropped")])
  assert resumed.totals()["groups"] == {"accepted": 2, "dropped": 1}
  assert resumed.totals()["episodes"] == saved_episodes(saved)


def saved_episodes(saved):
  parts = (saved["settled"], *saved["accepted"].values())
  total = collections.Counter()
  for counts in parts:
    total.update(counts["episodes"])
  return dict(total)
