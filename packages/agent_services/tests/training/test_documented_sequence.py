"""A whole run by a run service, as the documented sequence diagram has it.

The run, its policy's server, a gym server, a run service and the monitor are
real; the requests that reach them and the run's own events are one log, in the
order in which they happened. Episodes are played one at a time, so that the log
can be equal to the diagram.
"""

import itertools

import gym_servers
import monitor_server
import pytest
import run_services
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.net import http_server

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
STEPS, GROUPS, MEMBERS = 2, 2, 2


def _name(who, method, path):
  """The diagram's word for a request; "" for one that it leaves out."""
  what = path.rstrip("/").rpartition("/")[2]
  if who == "gym" and method == "POST":
    return "create" if "/tasks/" in path else what
  if (who, method, what) == ("service", "POST", "runs"):
    return "run"
  if (who, what) == ("service", "events"):
    return "events"
  if (who, what) == ("policy", "completions"):
    return "model"
  return ""


@pytest.fixture(name="log")
def _log(monkeypatch):
  """Records what happens, in the diagram's words, without evaluations."""
  log = []
  kinds = (
    events.RunStarted,
    events.EpisodeStarted,
    events.EpisodeFinished,
    events.WeightsPublished,
    events.StepFinished,
    events.RunFinished,
    events.EvalStarted,
    events.EvalFinished,
  )
  send = events.Observers.on_event

  def on_event(self, event):
    if isinstance(event, kinds):
      log.append(("run", "", type(event).__name__))
    send(self, event)

  monkeypatch.setattr(events.Observers, "on_event", on_event)
  return log


def _words(log):
  words = []
  evaluating = False
  for who, method, path in log:
    word = path if who == "run" else _name(who, method, path)
    if word == "EvalStarted":
      evaluating = True
    if word and not evaluating:
      words.append(word)
    if word == "EvalFinished":
      evaluating = False
  # A run's events are asked for again and again while it plays.
  return [
    w
    for w, before in zip(words, [None, *words])
    if not (w == before == "events")
  ]


def test_a_run_does_what_the_diagram_shows(tmp_path, log, monkeypatch):
  server = http_server.LoopbackServer
  with (
    gym_servers.serving() as (_, gym_app),
    server(run_services.Logged(gym_app.asgi, "gym", log)) as gym,
    server(
      run_services.Logged(run_services.app_lib.App().asgi, "service", log)
    ) as service,
    monitor_server.sqlite_server(tmp_path / "monitor") as monitor,
  ):
    # From here on, the run's own server is the only new one.
    monkeypatch.setattr(
      http_server,
      "LoopbackServer",
      lambda app, **options: server(
        run_services.Logged(app, "policy", log), **options
      ),
    )
    status = train.main([
        f"run.dir={tmp_path}", "name=r", "rollout.via=proxy",
        "rollout.agent=run_service", f"run_service.base_url={service.url}",
        "run_service.poll_s=0.02", "gym=genv",
        f"gym.options={{base_url: '{gym.url}', gym_id: desktop}}",
        "task_source.source=gym", "tasks=[]", f"monitor.url={monitor.url}",
        "environment.max_turns=3", f"steps={STEPS}", "collect.concurrency=1",
        f"collect.group_size={MEMBERS}", f"learner.groups_per_step={GROUPS}",
        "collect.min_valid=2", "engine.slots=4", "learner.rows=2",
        "eval.episodes_per_task=1",
        "eval.modes=[sampled]", "report.progress=none",
        "algorithm.entropy_coef=0.01", "learner.skip_zero_advantage=false",
    ])  # fmt: skip
    assert status == 0
    assert gym_app.store.open == 0
    words = _words(log)

    # post_training, then the loop over steps, then completed.
    assert words[0] == "RunStarted" and words[-1] == "RunFinished"
    # One turn is tried before anything is collected.
    start = words.index("EpisodeStarted")
    events = ("events", "WeightsPublished")
    trial = [w for w in words[1:start] if w not in events]
    assert trial[:3] == ["create", "run", "model"]
    assert trial[-2:] == ["evaluate", "terminate"]
    words = [words[0], *words[start:]]
    ends = [i for i, w in enumerate(words) if w == "StepFinished"]
    assert len(ends) == STEPS
    model_calls, begun = [], []
    for first, last in zip([0, *ends], ends):
      step = words[first + 1 : last]
      # The update, and the engine has its weights, before the step's event.
      assert step.count("WeightsPublished") >= 1
      step = [w for w in step if w != "WeightsPublished"]
      # The next episode may begin before the step's event.
      episodes, begun = _episodes([*begun, *step])
      assert len(episodes) == GROUPS * MEMBERS
      for episode in episodes:
        turns = episode.count("model")
        model_calls.append(turns)
        acts = [w for w in episode if w != "events"]
        assert acts == [
          "EpisodeStarted",
          "create",
          "run",
          *(["model", "step"] * turns),
          "evaluate",
          "terminate",
          "EpisodeFinished",
        ], episode
        # What was played is read before it is judged.
        assert "events" in episode[: episode.index("evaluate")]
    assert not begun
    _assert_monitored(monitor, model_calls)


def _episodes(step):
  """The log of a step, cut where an episode ends; what is of none that did."""
  episodes, remaining = [], list(step)
  while "EpisodeFinished" in remaining:
    end = remaining.index("EpisodeFinished") + 1
    episodes.append(remaining[:end])
    remaining = remaining[end:]
  return episodes, remaining


def _assert_monitored(monitor, model_calls):
  """The monitor has the run, its steps, and every episode with its turns."""
  (training,) = monitor.rows("training")
  assert training["status"] == "completed"
  history = [
    row["new_status"]
    for row in monitor.rows("status_history")
    if row["entity_type"] == "training"
  ]
  assert history == ["initializing", "running", "completed"]
  steps = {row["id"]: row for row in monitor.rows("step")}
  finished = [s for s in steps.values() if s["status"] == "completed"]
  assert len(finished) == STEPS
  assert all(s["loss"] is not None for s in finished)
  rollouts = [r for r in monitor.rows("rollout") if r["step_id"]]
  assert len(rollouts) == STEPS * GROUPS * MEMBERS
  turns = [t["rollout_id"] for t in monitor.rows("turn")]
  assert sorted(turns.count(r["id"]) for r in rollouts) == sorted(model_calls)
  acted = {a["turn_id"] for a in monitor.rows("action")}
  of_training = {r["id"] for r in rollouts}
  played = {
    t["id"] for t in monitor.rows("turn") if t["rollout_id"] in of_training
  }
  assert len(acted & played) == sum(model_calls)
  order = [r["step_id"] for r in sorted(rollouts, key=lambda r: r["id"])]
  assert [len(list(g)) for _, g in itertools.groupby(order)] == [
    GROUPS * MEMBERS
  ] * STEPS
