"""A run's learner, built and compiled beside its first stages."""

import dataclasses
import gc
import logging
import threading
import weakref

from flax import nnx
import jax
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.run import learner_ahead

from tests.helpers import small_runs


def run_of(tmp_path, *argv):
  return train.prepare(
    [
      *small_runs.SMALL,
      small_runs.ONE_LAYER,
      "warm_start.source=none",
      "name=r",
      f"run.dir={tmp_path}",
      *argv,
    ]
  )


@pytest.mark.slow
def test_its_programs_are_compiled_when_it_is_taken_and_used(tmp_path):
  run = run_of(tmp_path, "learner.patches=512", "learner.targets=512")
  builder = learner_ahead.LearnerAhead.where_it_helps(run)
  learner = builder.take(run.policy)
  builder.close(120.0)
  assert learner.compiles["accumulate"] == learner.compiles["apply"] == 1
  run.engine.close()


FIXED = ("learner.patches=512", "learner.targets=512")


@pytest.mark.slow
def test_the_weights_it_was_built_with_are_not_copied_again(
  tmp_path, monkeypatch
):
  begun = []
  monkeypatch.setattr(
    learner_ahead.learner_lib.Learner,
    "begin_from",
    lambda self, model, reference: begun.append((model, reference)),
  )
  run = run_of(tmp_path, *FIXED)
  learner_ahead.LearnerAhead(run).take(run.policy)
  assert not begun
  # The same model object with another array is another policy.
  builder = learner_ahead.LearnerAhead(run)
  model = run.policy.model
  nnx.update(model, jax.tree.map(lambda x: x + 0, nnx.state(model)))
  builder.take(run.policy)
  assert [built for built, _ in begun] == [model]
  # And so is another object.
  builder = learner_ahead.LearnerAhead(run)
  other = nnx.merge(
    nnx.graphdef(model), jax.tree.map(lambda x: x + 1, nnx.state(model))
  )
  builder.take(dataclasses.replace(run.policy, model=other))
  assert [built for built, _ in begun] == [model, other]
  assert not builder._thread.is_alive()
  run.engine.close()


@pytest.mark.slow
def test_it_keeps_no_learner_once_it_is_taken_or_closed(tmp_path):
  run = run_of(tmp_path, *FIXED)
  used, closed = (learner_ahead.LearnerAhead(run) for _ in range(2))
  learner = weakref.ref(used.take(run.policy))
  with pytest.raises(RuntimeError, match="taken already"):
    used.take(run.policy)
  other = weakref.ref(closed._building.result())
  for builder in (used, closed):
    builder.close(120.0)
  gc.collect()
  assert learner() is None and other() is None
  run.engine.close()


def test_a_run_closes_its_parts_before_it_waits_for_compiling(
  tmp_path, monkeypatch
):
  run = run_of(tmp_path, *FIXED)
  order, go = [], threading.Event()
  monkeypatch.setattr(
    learner_ahead.learner_lib.Learner, "compile_ahead", lambda _: go.wait(60)
  )
  with run:
    run._ahead = learner_ahead.LearnerAhead.where_it_helps(run)
    close, unlock = run._ahead.close, run._lock.close

    def closing(timeout_s):
      order.append("compiling")
      go.set()
      close(timeout_s)

    monkeypatch.setattr(run._ahead, "close", closing)
    monkeypatch.setattr(
      run._lock, "close", lambda: (order.append("unlocked"), unlock())
    )
  assert order == ["unlocked", "compiling"]


def test_a_policy_of_image_bounds_builds_nothing_ahead(
  tmp_path, monkeypatch, caplog
):
  run = run_of(tmp_path, *FIXED)
  monkeypatch.setattr(
    type(run.policy.model), "reads_image_patches", True, raising=False
  )
  with caplog.at_level(logging.INFO):
    assert learner_ahead.LearnerAhead.where_it_helps(run) is None
  assert "depend on the largest image" in caplog.text
  run.engine.close()


@pytest.mark.parametrize(
  "argv",
  [
    ["learner.patches=0"],
    ["learner.steps=0", "learner.patches=512", "learner.targets=512"],
  ],
)
def test_nothing_compiles_without_a_shape_or_without_updates(tmp_path, argv):
  run = run_of(tmp_path, *argv)
  assert learner_ahead.LearnerAhead.where_it_helps(run) is None
  run.engine.close()


def test_an_error_of_building_it_is_raised_where_it_is_taken(
  tmp_path, monkeypatch
):
  def refused(*args, **options):
    raise config_lib.ConfigError(["no learner of this kind"])

  run = run_of(tmp_path)
  monkeypatch.setattr(learner_ahead.models, "make_learner", refused)
  builder = learner_ahead.LearnerAhead(run)
  with pytest.raises(config_lib.ConfigError, match="no learner of this kind"):
    builder.take(run.policy)
  builder.close(60.0)
  run.engine.close()


def test_the_default_batch_shape_is_the_default_runs_only():
  shape = lambda *argv: (
    (c := config_lib.load_config(list(argv)).learner).patches,
    c.targets,
  )
  assert shape() == shape("steps=9", "seed=3") == (512, 608)
  for other in (
    "learner.row_length=1024",
    "policy=qwen3_vl_tiny",
    "environment.max_turns=9",
    "gym=miniwob",
  ):
    assert shape(other) == (0, 0), other
  assert shape("learner.patches=1024") == (1024, 608)
