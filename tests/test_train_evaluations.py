"""Evaluations in the midst of a run: of which weights, and beside what."""

import json
import shutil
import time

import pytest
import small_runs
from tunix.rl.multi_turn import evaluate
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.run.evaluations import evaluation

pytestmark = pytest.mark.timeout(400)
NEW = (small_runs.ONE_LAYER, "warm_start.source=none")


@pytest.mark.slow
def test_a_resumed_run_makes_up_for_an_evaluation(tmp_path):
  assert small_runs.run_train(tmp_path, *NEW, "name=m", "steps=2") == 0
  resume = f"resume={tmp_path / 'm'}"
  assert train.main([resume, "steps=3", "eval.every=2"]) == 0
  summary = small_runs.summary_of(tmp_path / "m")
  assert set(summary["eval"]) == {"warm_start", "step_2", "final"}


def test_evaluations_measure_the_weights_of_their_step(tmp_path, monkeypatch):
  measured = {}

  def evaluate(run, name):
    measured[name] = run.engine.version

  monkeypatch.setattr(evaluation, "evaluate", evaluate)
  assert small_runs.run_train(
      tmp_path, *NEW, "name=v", "steps=3", "learner.publish_every=2",
      "queue.max_staleness=1", "eval.every=1",
  ) == 0  # fmt: skip
  assert measured == {
    "warm_start": 0,
    "step_1": 1,
    "step_2": 2,
    "step_3": 3,
    "final": 3,
  }


@pytest.mark.slow
def test_no_training_episode_begins_during_an_evaluation(tmp_path, monkeypatch):
  """Such an episode would hold tabs that the evaluation waits for, and wait
  for the evaluation in lockstep: both would stand still until a deadline."""
  kinds = []
  attach, evaluate = train.Run.attach_observers, evaluation.evaluate

  class Witness:
    def on_event(self, event):
      if isinstance(event, events.EpisodeStarted):
        kinds.append(event.split)

  def attach_both(run, resume_step):
    attach(run, resume_step)
    run.observers.add(Witness())

  def evaluate_late(run, name):
    kinds.append(name)
    time.sleep(1.0)  # In which groups of the next update would begin.
    evaluate(run, name)
    kinds.append(name)

  monkeypatch.setattr(train.Run, "attach_observers", attach_both)
  monkeypatch.setattr(evaluation, "evaluate", evaluate_late)
  assert small_runs.run_train(
      tmp_path, *NEW, "name=h", "steps=2", "eval.every=1",
      "eval.modes=[sampled]",
  ) == 0  # fmt: skip
  begun, ended = (i for i, what in enumerate(kinds) if what == "step_1")
  assert kinds[begun + 1 : ended] == ["eval"] * 4
  assert kinds[:begun].count("train") >= 8
  assert kinds[ended:].count("train") >= 8


def comparable(results):
  """An evaluation without its seconds."""
  ignored = ("seconds", "seconds_waited", "beside", "spread", "versions")
  return {
    k: comparable(v) if isinstance(v, dict) else v
    for k, v in results.items()
    if k not in ignored
  }


def trajectories_of(directory):
  lines = (directory / "trajectories.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def tokens_of(episodes):
  """Sampled tokens of evaluated episodes by mode, task and attempt."""
  return {
    (e["mode"], e["trajectory_id"], e["version"]): [
      s["tokens"] for s in e["sequences"]
    ]
    for e in episodes
    if e["split"] == "eval"
  }


SAVING = (
  # The entropy bonus moves weights at each update, though nothing is solved.
  "algorithm.entropy_coef=0.1",
  "learner.learning_rate=0.3",
  "learner.warmup_steps=0",
  "learner.skip_zero_advantage=false",
  "steps=3",
  "eval.every=1",
  "eval.attempts=2",
  "checkpoint.keep_best=pass_at_2",
  "checkpoint.keep=1",
)


@pytest.fixture(scope="module")
def blocking(tmp_path_factory):
  """A run whose evaluations hold its training."""
  tmp_path = tmp_path_factory.mktemp("blocking")
  assert small_runs.run_train(tmp_path, *NEW, "name=b", *SAVING) == 0
  return tmp_path / "b"


@pytest.mark.slow
def test_beside_collection_the_same_episodes_are_played(blocking, tmp_path):
  """To the token, greedy and sampled, of each update's own weights."""
  assert (
    small_runs.run_train(tmp_path, *NEW, "name=s", *SAVING, "eval.beside=true")
    == 0
  )
  own, other = (
    small_runs.summary_of(d)["eval"] for d in (tmp_path / "s", blocking)
  )
  assert list(own) == list(other)
  for name in own:
    assert comparable(own[name]) == comparable(other[name])
  for step in (1, 2, 3):
    results = own[f"step_{step}"]
    assert results["versions"] == [step, step]
    assert results["beside"] and results["seconds"] > 0
    assert results["seconds_waited"] >= 0
  played = tokens_of(trajectories_of(blocking))
  assert tokens_of(trajectories_of(tmp_path / "s")) == played
  of_first, of_last = (
    {key[:2]: tokens for key, tokens in played.items() if key[2] == step}
    for step in (1, 3)
  )
  assert of_first.keys() == of_last.keys()
  assert of_first != of_last  # Else any weights would do.
  train_tokens = [
    sorted(
      str(e["sequences"]) for e in trajectories_of(d) if e["split"] == "train"
    )
    for d in (tmp_path / "s", blocking)
  ]
  assert train_tokens[0] == train_tokens[1]


def test_the_best_checkpoint_is_kept(blocking):
  """Of equal values the earliest: nothing is solved here."""
  data = json.loads((blocking / "best.json").read_text())
  assert data == {"step": 1, "metric": "pass_at_2", "value": 0.0}
  names = {d.name for d in (blocking / "checkpoints").iterdir()}
  assert names == {"1", "3"}


def test_the_last_update_is_evaluated_once(blocking):
  evaluations = small_runs.summary_of(blocking)["eval"]
  assert evaluations["final"] == evaluations["step_3"]
  played = [
    (e["mode"], e["trajectory_id"])
    for e in trajectories_of(blocking)
    if e["split"] == "eval" and e["version"] == 3
  ]
  assert played and len(set(played)) == len(played)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_the_run_did(blocking, tmp_path):
  for name, checkpoint in (("step_1", "best"), ("step_3", "newest")):
    assert evaluate.main([
        str(blocking), f"checkpoint={checkpoint}", f"dir={tmp_path}",
        f"name={name}", "attempts=2", "report.progress=none",
    ]) == 0  # fmt: skip
    data = json.loads((tmp_path / name / "evaluation.json").read_text())
    other = small_runs.summary_of(blocking)["eval"][name]
    assert comparable(data["results"]) == comparable(other)
    own = tokens_of(trajectories_of(tmp_path / name))
    steps = tokens_of(trajectories_of(blocking))
    assert own and all(steps[key] == own[key] for key in own)
    assert {version for _, _, version in own} == {int(name[5:])}


@pytest.mark.slow
def test_an_evaluation_beside_is_made_up_for_of_its_own_weights(
  blocking, tmp_path
):
  """A stop in the midst of it: the update's checkpoint outlives newer ones."""

  patch = pytest.MonkeyPatch()
  # As if each were still under way when the run is stopped.
  patch.setattr(evaluation.BesideEvaluations, "finished", lambda self: None)
  patch.setattr(evaluation.BesideEvaluations, "wait", lambda self: None)
  options = ("name=m", *SAVING, "eval.beside=true", "eval.every=2")
  try:
    assert small_runs.run_train(tmp_path, *NEW, *options) == 0
  finally:
    patch.undo()
  directory = tmp_path / "m"
  assert "step_2" not in small_runs.summary_of(directory)["eval"]
  names = {d.name for d in (directory / "checkpoints").iterdir()}
  assert names == {"2", "3"}
  assert train.main([f"resume={directory}", "steps=4"]) == 0
  own = small_runs.summary_of(directory)["eval"]
  other = small_runs.summary_of(blocking)["eval"]
  assert own["step_2"]["versions"] == [2, 2]
  assert comparable(own["step_2"]) == comparable(other["step_2"])
  assert {"step_2", "step_4", "final"} <= set(own)


@pytest.mark.slow
def test_a_run_goes_back_to_its_best_checkpoint(blocking, tmp_path, capsys):
  directory = tmp_path / "b"
  shutil.copytree(blocking, directory)
  resume = f"resume={directory}"
  assert train.main([resume, "checkpoint.resume_from=2"]) == 2
  assert "there are 1, 3" in capsys.readouterr().err
  assert train.main([resume, "checkpoint.resume_from=3", "steps=2"]) == 2
  assert "give learner.steps=5" in capsys.readouterr().err
  assert train.main([resume, "checkpoint.resume_from=best", "steps=2"]) == 0
  summary = small_runs.summary_of(directory)
  assert summary["step"] == 2 and summary["status"] == "completed"
  assert "step_3" not in summary["eval"]
  other = small_runs.summary_of(blocking)["eval"]["step_1"]
  assert summary["eval"]["step_1"] == other
  names = {d.name for d in (directory / "checkpoints").iterdir()}
  assert names == {"1", "2"}
  assert [m["step"] for m in small_runs.metrics_of(directory)] == [1, 2]
  assert "resume_from: newest" in (directory / "config.yaml").read_text()
