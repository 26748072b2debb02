"""A run's learner, built and compiled beside its first stages."""

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.run import learner_ahead

from tests.helpers import small_runs


def run_of(tmp_path, *argv):
  return train.prepare(
      [*small_runs.SMALL, "warm_start.source=none", "name=r",
       f"run.dir={tmp_path}", *argv]
  )  # pyformat: disable


def test_its_programs_are_compiled_when_it_is_taken_and_used(tmp_path):
  run = run_of(tmp_path, "learner.patches=512", "learner.targets=512")
  ahead = learner_ahead.LearnerAhead.where_it_helps(run)
  learner = ahead.take(run.policy)
  ahead.close(120.0)
  assert learner.compiles["accumulate"] == learner.compiles["apply"] == 1
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
  ahead = learner_ahead.LearnerAhead(run)
  with pytest.raises(config_lib.ConfigError, match="no learner of this kind"):
    ahead.take(run.policy)
  ahead.close(60.0)
  run.engine.close()


def test_the_default_batch_shape_is_the_default_runs_only():
  shape = lambda *argv: (
      (c := config_lib.load_config(list(argv)).learner).patches, c.targets
  )
  assert shape() == shape("steps=9", "seed=3") == (512, 608)
  for other in (
      "learner.row_length=1024", "policy=qwen3_vl_tiny",
      "environment.max_turns=9", "gym=miniwob",
  ):  # pyformat: disable
    assert shape(other) == (0, 0), other
  assert shape("learner.patches=1024") == (1024, 608)
