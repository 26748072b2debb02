"""Evaluations in the midst of a run: of which weights, and beside what."""

import time

import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.run import evaluation

pytestmark = pytest.mark.timeout(400)
NEW = (small_runs.NANO, "warm_start.source=none")


def test_a_resumed_run_makes_up_for_an_evaluation(tmp_path):
  assert small_runs.run_train(tmp_path, *NEW, "name=m", "steps=2") == 0
  resume = f"resume={tmp_path / 'm'}"
  assert train.main([resume, "steps=3", "eval.every=2"]) == 0
  summary = small_runs.summary_of(tmp_path / "m")
  assert set(summary["eval"]) == {"initial", "warm_start", "step_2", "final"}


def test_evaluations_measure_the_weights_of_their_step(tmp_path, monkeypatch):
  measured = {}

  def evaluate(run, name):
    measured[name] = run.engine.version

  monkeypatch.setattr(evaluation, "evaluate", evaluate)
  assert small_runs.run_train(
      tmp_path, *NEW, "name=v", "steps=3", "learner.publish_every=2",
      "queue.max_staleness=1", "eval.every=1",
  ) == 0  # pyformat: disable
  assert measured == {
      "initial": 0, "warm_start": 0,
      "step_1": 1, "step_2": 2, "step_3": 3, "final": 3,
  }  # pyformat: disable


def test_no_training_episode_begins_during_an_evaluation(
    tmp_path, monkeypatch
):
  """It would hold tabs that the evaluation's episodes wait for, while it waits
  for them in lockstep: both would stand still until a deadline."""
  seen = []
  attach, evaluate = train.Run.attach_observers, evaluation.evaluate

  class Witness:

    def on_event(self, event):
      if isinstance(event, events.EpisodeStarted):
        seen.append(event.split)

  def attach_both(run, resume_step):
    attach(run, resume_step)
    run.observers.add(Witness())

  def evaluate_late(run, name):
    seen.append(name)
    time.sleep(1.0)  # In which groups of the next update would begin.
    evaluate(run, name)
    seen.append(name)

  monkeypatch.setattr(train.Run, "attach_observers", attach_both)
  monkeypatch.setattr(evaluation, "evaluate", evaluate_late)
  assert small_runs.run_train(
      tmp_path, *NEW, "name=h", "steps=2", "eval.every=1",
      "eval.modes=[sampled]",
  ) == 0  # pyformat: disable
  begun, ended = (i for i, what in enumerate(seen) if what == "step_1")
  assert seen[begun + 1 : ended] == ["eval"] * 4
  assert seen[:begun].count("train") >= 8
  assert seen[ended:].count("train") >= 8
