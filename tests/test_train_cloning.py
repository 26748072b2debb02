"""Cloning that is stopped and goes on."""

import numpy as np
import pytest
from safetensors import numpy as safetensors
import small_runs
import trials
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(400)
CLONED = (
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "warm_start.steps=4",
  "warm_start.batch_size=4",
  "warm_start.demonstrations=12",
  "steps=0",
  "eval.on=false",
  "checkpoint.every=3",
)


class Stops:
  """Stops a run after an update of cloning."""

  def __init__(self, run, after):
    self._run, self._after = run, after

  def on_event(self, event):
    cloning = isinstance(event, events.Progress) and "cloning" in event.stage
    if cloning and event.done == self._after:
      self._run.stop.set()


def weights(directory):
  return safetensors.load_file(directory / "warm_start" / "model.safetensors")


@pytest.fixture(scope="module", name="complete")
def _complete(tmp_path_factory):
  """The weights of a run that was not stopped."""
  directory = tmp_path_factory.mktemp("whole")
  assert small_runs.run_train(directory, *CLONED, "name=whole") == 0
  return weights(directory / "whole")


@pytest.mark.parametrize("after", (2, 3) if trials.share() == 1 else (2,))
@pytest.mark.slow
def test_cloning_goes_on_where_it_stopped(tmp_path, capsys, complete, after):
  """As if it had not, whether the last update was just saved or not."""
  run = small_runs.make_run(tmp_path, *CLONED, "name=parts")
  run.observers.add(Stops(run, after))
  assert train.run_to_end(run) == 130
  directory = tmp_path / "parts"
  assert not (directory / "warm_start").exists()
  (step,) = (p.name for p in (directory / "cloning").iterdir())
  assert step == str(after)
  capsys.readouterr()
  assert train.main([f"resume={directory}", "report.progress=lines"]) == 0
  stderr = capsys.readouterr().err
  assert f"playing demonstrations again {after}/{after}" in stderr
  assert f"cloning demonstrations {after} " not in stderr
  assert not (directory / "cloning").exists()
  parts = weights(directory)
  assert complete.keys() == parts.keys()
  for name, array in complete.items():
    np.testing.assert_array_equal(parts[name], array, err_msg=name)
  model, _, _ = checkpoint.load_policy(str(directory / "warm_start"))
  assert model is not None
