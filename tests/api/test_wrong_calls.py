"""Mistakes in reading a run: an error names the value and what to give."""

import pytest
import synthetic_run
import tunix.rl.multi_turn as mt
from tunix.rl.multi_turn.core import gui_action


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory):
  directory = tmp_path_factory.mktemp("runs")
  synthetic_run.write(directory / "demo")
  (directory / "demo" / "policy").mkdir()
  return directory


@pytest.fixture(name="run")
def _run(runs):
  return mt.load(runs / "demo")


@pytest.mark.slow
def test_a_run_may_be_loaded_again(run):
  assert mt.load(run).directory == run.directory


@pytest.mark.parametrize("wrong", [None, 3, ["runs/demo"]])
def test_what_names_no_directory_is_refused(wrong):
  with pytest.raises(TypeError, match="directory=.*give runs/<name>"):
    mt.load(wrong)


@pytest.mark.parametrize(
  "inside, problem",
  [
    (".", "give .*/demo"),
    ("demo/policy", "give the run, .*/demo"),
    ("demo/none", "give the run, .*/demo"),
    ("none/none", "give runs/<name>"),
  ],
)
def test_a_directory_beside_a_run_names_the_run(runs, inside, problem):
  with pytest.raises(FileNotFoundError, match=problem):
    mt.load(runs / inside)


def test_what_a_run_has_not_is_told(run):
  count = len(run.episodes)
  with pytest.raises(ValueError, match="'reward'.*'reward_mean' or"):
    run.plot("reward")
  with pytest.raises(IndexError, match=f"{count} kept episodes, none at 9999"):
    run.episodes[9999]  # pylint: disable=pointless-statement
  with pytest.raises(IndexError, match=f"{count} kept episodes, none at 9999"):
    run.watch(9999)
  with pytest.raises(TypeError, match="episode='last'.*-1 is the last"):
    run.watch("last")
  with pytest.raises(ValueError, match="split='test' must be"):
    run.episodes.where(split="test")
  screens = len(run.episodes[0].shown.frames)
  with pytest.raises(IndexError, match=f"{screens} screens, none at 99"):
    run.episodes[0].screenshot(99)
  run.episodes[0].screenshot(-1)


def test_an_unknown_kind_of_action_has_the_known_ones():
  with pytest.raises(ValueError, match="'clik'.*mean 'click'. Known: answer,"):
    gui_action.GuiAction("clik", x=1, y=2)
