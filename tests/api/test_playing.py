"""Episodes and evaluations from Python, as their commands make them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading

import chat_server
import pytest
import tunix.rl.multi_turn as mt
from tunix.rl.multi_turn.api import cell
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.play import session as session_lib

ADD = {
  "environment": "tool",
  "eval.episodes_per_task": 6,
  "eval.modes": ["sampled"],
  "collect.concurrency": 4,
  "report.progress": "none",
}


def evaluate(tmp_path, url, **settings):
  return mt.evaluate(url, "add", dir=tmp_path, **{**ADD, **settings})


def test_a_call_evaluates_and_returns_the_figures(tmp_path):
  with chat_server.serving() as (url, server):
    server.wrong = lambda a, b, seed: seed % 2
    ended = evaluate(tmp_path, url, name="s", attempts=4)
  data = json.loads((tmp_path / "s" / "evaluation.json").read_text())
  assert isinstance(ended, mt.EvaluationRun) and ended.status == "completed"
  assert ended.results == data["results"] and ended.error is None
  outcomes = ended.outcomes
  assert len(outcomes) == 24
  assert 0 < outcomes["success"].mean() == ended.success_rate < 1
  assert ended.interval[0] < ended.success_rate < ended.interval[1]
  read = mt.load(tmp_path / "s")
  assert repr(read) == repr(ended) and "24 of 24 episodes" in repr(read)
  assert "Evaluation on held-out seeds" in read._repr_html_()
  assert len(ended.episodes) == 24


def test_an_evaluation_that_failed_is_continued(tmp_path):
  quick = {
    "evaluate.tries": 1,
    "evaluate.give_up_after": 3,
    "collect.concurrency": 1,
  }
  with chat_server.serving() as (url, server):
    server.dies_after = 4
    with pytest.raises(RuntimeError, match="3 episodes in a row") as failure:
      evaluate(tmp_path, url, name="d", **quick)
    assert str(tmp_path / "d") in str(failure.value)
    server.dies_after = None
    evaluation = mt.load(tmp_path / "d").resume()
  assert evaluation.status == "completed" and len(evaluation.outcomes) == 6
  assert evaluation.success_rate == 1.0


@pytest.mark.parametrize(
  "policy, tasks, settings, problem",
  [
    ("tiny_lv", None, {}, "did you mean 'tiny_vl'"),
    (3, None, {}, "policy=3: give a run"),
    ("oracle", None, {}, "policy='oracle': an oracle is not measured"),
    ("tiny_vl", [3], {}, "tasks=3 is no family"),
    ("tiny_vl", None, {"dry_run": True}, "unknown key 'dry_run'"),
    ("tiny_vl", None, {"run": {"dry_run": True}}, "leave it out"),
    ("tiny_vl", "ad", {"environment": "tool"}, "did you mean 'add'"),
    ("http://127.0.0.1:9/v1", "add", ADD, "cannot be reached"),
  ],
)
def test_a_wrong_evaluation_is_one_clear_error(
  policy, tasks, settings, problem, tmp_path
):
  with pytest.raises(mt.ConfigError, match=problem):
    mt.evaluate(policy, tasks, **{**settings, "run.dir": str(tmp_path)})
  assert cell.take("free").release() is None


def test_the_oracle_plays_the_task_that_an_evaluation_plays():
  episode = mt.play(
    "oracle", "enter-text", gym="desktop", index=2, **{"eval.seed": 0}
  )
  task = desktop.DesktopTasks(("enter-text",)).eval_task("enter-text", 2, 0)
  assert episode.task_id == task.task_id and episode.success
  trajectory = episode.trajectory
  assert [s.info["gui_actions"] for s in trajectory.steps] == [
    [s.action] for s in trajectory.steps
  ]
  assert trajectory.reward == trajectory.steps[-1].reward == 1.0
  assert episode.screenshot(0).size == (128, 96)
  assert episode.film().html.count("data:image") == episode.turns + 1


def test_a_script_plays_a_task_of_its_own():
  task = desktop.DesktopTasks(("click-button",)).train_task(
    "click-button", 5, 0
  )
  oracle = mt.play("oracle", task, gym="desktop").trajectory
  right = gui_action.GuiAction.from_json(oracle.steps[0].action)
  miss = gui_action.GuiAction("click", x=0, y=0)
  episode = mt.play([right], task, gym="desktop")
  assert episode.success and episode.task_id == task.task_id
  assert not mt.play([miss], task, gym="desktop").success
  named = mt.play(
    [right], "click-button", gym="desktop", index=5, split="train"
  )
  assert named.success and named.task_id == task.task_id


def test_screens_of_an_episode_go_with_it():
  episode = mt.play("oracle", "click-button", gym="desktop")
  directory = episode._run.directory
  assert list(directory.rglob("*.png"))
  del episode
  assert not directory.exists()


def test_a_policy_plays_one_episode(tmp_path, capsys):
  with chat_server.serving() as (url, _):
    episode = mt.play(url, "add", environment="tool", index=3)
  assert episode.success and episode.split == "eval"
  assert episode.trajectory.steps[0].model_response
  assert capsys.readouterr().out == ""


def test_a_server_that_breaks_the_episode_is_named():
  with chat_server.serving() as (url, server):
    server.dies_after = 1
    with pytest.raises(RuntimeError, match="server broke|episodes in a row"):
      mt.play(url, "add", environment="tool", **{"evaluate.tries": 1})


def test_the_stop_button_ends_an_oracles_episode_and_its_gym(monkeypatch):
  """As ipykernel does it: SIGINT to the thread that runs the cell."""
  closed, begun = [], threading.Event()

  class Endless(desktop.DesktopGym):
    async def act(self, action):
      begun.set()
      await asyncio.sleep(0.05)
      return await super().act(action)

    async def close(self):
      closed.append(True)
      await super().close()

  spec = dataclasses.replace(gyms.get("desktop"), make=Endless)
  gyms.gym_registry.GYMS.register("endless", spec)
  stopper = threading.Thread(
    target=lambda: begun.wait(30) and os.kill(os.getpid(), signal.SIGINT)
  )
  stopper.start()
  before = signal.getsignal(signal.SIGINT)
  wait = [gui_action.GuiAction("wait")] * 100_000
  task = dataclasses.replace(
    desktop.DesktopTasks(("click-button",)).train_task("click-button", 0, 0),
    max_turns=100_000,
  )
  try:
    with pytest.raises(RuntimeError, match="stopped before its end"):
      mt.play(wait, task, gym="endless")
  finally:
    stopper.join()
    gyms.gym_registry.GYMS.unregister("endless")
  assert closed and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
  "policy, task, settings, problem",
  [
    ("oracle", "enter-texx", {}, "did you mean 'enter-text'"),
    ("oracle", 3, {}, "task=3 must be a family's name"),
    ("oracle", None, {"index": -1}, "index=-1 must be"),
    ("oracle", None, {"split": "test"}, "split='test' must be"),
    ("oracle", None, {"mode": "best"}, "mode='best' must be"),
    (["click"], None, {}, "a script is a list of GuiActions"),
    ("oracle", "add", {"environment": "tool"}, "acts on no gym"),
    ("tiny_vl", None, {"mode": "quick"}, "mode='quick' must be"),
    ("runs/none", None, {}, "there is no such directory"),
  ],
)
def test_a_wrong_episode_is_one_clear_error(policy, task, settings, problem):
  with pytest.raises(mt.ConfigError, match=problem):
    mt.play(policy, task, **settings)


def test_a_session_ends_a_task_whose_turns_are_used_up():
  gym = desktop.DesktopGym()
  session = session_lib.Session("desktop", gym, by="script")
  wait = gui_action.GuiAction("wait")

  async def played():
    task = desktop.DesktopTasks(("click-button",)).train_task(
      "click-button", 0, 0
    )
    try:
      return task, await session.play(task, iter([wait] * 1000))
    finally:
      await session.close()

  task, verdict = asyncio.run(played())
  assert not verdict.success
  assert len(session.actions) <= (task.max_turns or session_lib.MAX_TURNS)
