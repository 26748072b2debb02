"""Kept episodes of a run as a table, beside those that were played."""

import json

import pytest
import synthetic_run
import tunix.rl.multi_turn as mt


@pytest.fixture(name="run")
def _run(tmp_path):
  synthetic_run.write(tmp_path / "demo")
  return mt.load(tmp_path / "demo")


def test_a_row_is_an_episode(run):
  episodes = run.episodes
  frame = episodes.to_pandas()
  assert len(frame) == len(episodes) > 3
  assert list(frame["task_id"]) == [e.task_id for e in episodes]
  assert list(frame["success"]) == [e.success for e in episodes]
  assert set(frame["status"]) == {e.status.value for e in episodes}
  solved = episodes.where(split="eval", success=True)
  both = (frame["split"] == "eval") & frame["success"]
  assert len(solved.to_pandas()) == both.sum()
  nothing = episodes.where(family="none").to_pandas()
  assert not len(nothing) and list(nothing) == list(frame)


def test_it_says_how_many_were_played(run):
  path = run.directory / "summary.json"
  count = len(run.episodes)
  summary = json.loads(path.read_text())
  summary["episodes"] = {"train/succeeded": 7000, "eval/failed": 200}
  path.write_text(json.dumps(summary))
  assert run.episodes.played == 7200
  text = f"Episodes({count} kept of 7,200 played, "
  assert repr(run.episodes).startswith(text)
  assert text in run.episodes._repr_html_()
  # A selection is no part of a count that is of all.
  assert repr(run.episodes.where(split="eval")).startswith("Episodes(")
  assert "played" not in repr(run.episodes[:3])
  summary["episodes"] = {"train/failed": count}
  path.write_text(json.dumps(summary))
  assert repr(run.episodes).startswith(f"Episodes({count}, ")
