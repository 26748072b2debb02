"""A run's timeline: what is drawn is what was measured, in a bounded file."""

import json

from hypothesis import given
from hypothesis import strategies as st
import pytest
import queue_groups
import small_runs
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import time_metrics
from tunix.rl.multi_turn.reporting import trace_writer

LEARNER = (1, 1)


def written(path):
  return json.loads(path.read_text())


def writer(tmp_path, mib=1.0, **options):
  config = reporting_settings.ReportConfig(profile=True, profile_mib=mib)
  return trace_writer.TraceWriter(
    tmp_path, config, clock=lambda: 1000.0, **options
  )


def slices(spans, *lanes):
  return [
    e
    for e in spans
    if e["ph"] == "X" and (not lanes or (e["pid"], e["tid"]) in lanes)
  ]


def lanes_of(spans):
  out = {}
  for one in slices(spans):
    out.setdefault((one["pid"], one["tid"]), []).append(one)
  return out


def check_nesting(spans):
  """Slices of a lane lie beside or within one another, as viewers need."""
  for lane in lanes_of(spans).values():
    open_ = []
    for one in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
      end = one["ts"] + one["dur"]
      while open_ and open_[-1] <= one["ts"]:
        open_.pop()
      assert not open_ or end <= open_[-1], one
      open_.append(end)


def test_an_update_is_drawn_by_its_measured_phases(tmp_path):
  trace = writer(tmp_path)
  trace.on_event(events.StepFinished(
      1, 1,
      {"time/step": 6.0, "time/wait": 2.0, "time/learn": 3.0,
       "time/publish": 0.5, "time/other": 0.5, "seconds_pack": 1.0,
       "seconds_step": 1.5, "queue_size": 4, "time/engine_decode": 5.0,
       "time/engine_idle": 1.0},
      time=1010.0,
  ))  # fmt: skip
  trace.close()
  result = written(trace.path)
  drawn = {e["name"]: (e["ts"], e["dur"]) for e in slices(result, LEARNER)}
  assert drawn == {
    "wait": (4_000_000, 2_000_000),
    "learn": (6_000_000, 3_000_000),
    "pack": (6_000_000, 1_000_000),
    "step": (7_000_000, 1_500_000),
    "publish": (9_000_000, 500_000),
    "other": (9_500_000, 500_000),
  }
  check_nesting(result)
  counters = {e["name"]: e["args"] for e in result if e["ph"] == "C"}
  assert counters == {
    "groups waiting": {"groups": 4},
    "seconds of an update": {"decode": 5.0, "idle": 1.0},
  }


def test_a_turn_is_drawn_in_the_engine_then_in_its_environment(tmp_path):
  trace = writer(tmp_path)
  trace.on_event(
    events.TurnFinished(
      "a", 3, {"model": 0.5, "env": 0.25, "render": 0.25}, time=1002.0
    )
  )
  trace.close()
  drawn = slices(written(trace.path))
  assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in drawn] == [
    (2, "model", 1_000_000, 750_000),
    (3, "env", 1_750_000, 250_000),
  ]
  assert drawn[0]["args"] == {"episode": "a", "turn": 3}


@given(
  turns=st.lists(
    st.tuples(st.floats(0, 5), st.floats(0, 3), st.floats(0, 3)), max_size=60
  )
)
def test_turns_never_overlap_in_a_lane(tmp_path_factory, turns):
  trace = writer(tmp_path_factory.mktemp("trace"))
  at = 1000.0
  for i, (pause, model, env) in enumerate(turns):
    at += pause
    trace.on_event(
      events.TurnFinished(str(i), 1, {"model": model, "env": env}, time=at)
    )
  trace.close()
  result = written(trace.path)
  check_nesting(result)
  drawn = len(slices(result))
  assert drawn + trace.left_out["turns"] == 2 * len(turns)
  assert result[-1]["args"]["left_out"] == trace.left_out


def test_the_queue_its_refusals_and_evaluations(tmp_path):
  trace = writer(tmp_path)
  group = queue_groups.group()
  for outcome, why, at in (
    ("accepted", "", 1001.0),
    ("accepted", "", 1002.0),
    ("requeued", "too few are valid", 1003.0),
  ):
    trace.on_event(events.GroupFinished(group, outcome, why, time=at))
  trace.on_event(events.EvalStarted("step_4", "sampled", 2, time=1004.0))
  trace.on_event(events.EvalStarted("step_4", "greedy", 2, time=1005.0))
  trace.on_event(events.EvalFinished("step_4", {}, time=1006.5))
  trace.on_event(events.RunFinished("completed", time=1007.0))
  trace.close()
  result = written(trace.path)
  waiting = [e["args"]["groups"] for e in result if e["ph"] == "C"]
  assert waiting == [1, 2]
  assert any(e["name"] == "requeued: too few are valid" for e in result)
  (evaluation,) = slices(result, (1, 2))
  assert evaluation["name"] == "step_4"
  assert (evaluation["ts"], evaluation["dur"]) == (4_000_000, 2_500_000)
  assert result[-1]["name"] == "end" and result[-1]["ts"] == 7_000_000


def test_the_file_is_bounded_and_turns_end_before_updates_do(tmp_path):
  trace = writer(tmp_path, mib=0.05)
  metrics = {"time/wait": 0.5, "time/learn": 0.5}
  for i in range(600):
    at = 1000.0 + i
    trace.on_event(
      events.TurnFinished(
        f"episode-{i}", 1, {"model": 0.5, "env": 0.4}, time=at
      )
    )
    if i % 60 == 59:
      trace.on_event(events.StepFinished(i // 60, 0, metrics, time=at))
  trace.close()
  assert trace.path.stat().st_size <= 0.05 * (1 << 20)
  result = written(trace.path)
  steps = {e["args"]["step"] for e in slices(result, LEARNER)}
  assert trace.left_out["turns"] > 100 and len(steps) == 10
  assert result[-1]["args"]["left_out"] == trace.left_out
  trace = writer(tmp_path, mib=0.01)
  for i in range(1000):
    trace.on_event(events.StepFinished(i, 0, metrics, time=1000.0 + i))
  trace.close()
  assert trace.path.stat().st_size <= 0.01 * (1 << 20)
  assert written(trace.path)[-1]["args"]["left_out"]["others"] > 0


def test_it_is_read_after_a_crash_and_a_resumed_run_has_its_own(tmp_path):
  trace = writer(tmp_path)
  trace.on_event(events.StepFinished(1, 1, {"time/learn": 1.0}, time=1002.0))
  text = trace.path.read_text().rstrip().rstrip(",")  # As viewers do.
  assert slices(json.loads(text + "]"), LEARNER)
  resumed = writer(tmp_path, resume_step=1)
  assert resumed.path.name == "trace-1.json"
  resumed.close()
  resumed.close()
  resumed.on_event(events.RunFinished("completed"))  # Late.
  assert slices(written(resumed.path)) == []


def test_the_uploader_is_read_now_and_then(tmp_path):
  trace = writer(tmp_path)
  trace.uploader = lambda: {"waiting": 3, "dropped": 0}
  for at in (1000.0, 1000.5, 1001.0, 1003.0):
    trace.on_event(events.EvalStarted("a", "greedy", 1, time=at))
  trace.close()
  read = [e for e in written(trace.path) if e["name"] == "uploader"]
  assert [e["ts"] for e in read] == [0, 1_000_000, 3_000_000]
  assert read[0]["args"] == {"waiting": 3, "dropped": 0}


@pytest.mark.slow
def test_a_run_writes_its_timeline(tmp_path):
  """`profile=true`: drawn is what metrics.jsonl has."""
  assert small_runs.run_train(
      tmp_path, small_runs.ONE_LAYER, "warm_start.source=none", "run.name=a",
      "steps=2", "profile=true", "eval.modes=[greedy]", "monitor.embedded=true",
  ) == 0  # fmt: skip
  spans = written(tmp_path / "a" / "trace.json")
  check_nesting(spans)
  for row in small_runs.metrics_of(tmp_path / "a"):
    drawn = {
      e["name"]: e["dur"] / 1e6
      for e in slices(spans, LEARNER)
      if e.get("args", {}).get("step") == row["step"]
    }
    for phase in time_metrics.LEARNER:
      assert drawn.get(phase, 0.0) == pytest.approx(
        row[f"time/{phase}"], abs=0.05
      ), phase
  names = {(e["pid"], e["name"]) for e in slices(spans)}
  assert {(2, "model"), (3, "env"), (1, "warm_start"), (1, "final")} <= names
  counters = {e["name"] for e in spans if e["ph"] == "C"}
  assert counters == {"groups waiting", "seconds of an update", "uploader"}
