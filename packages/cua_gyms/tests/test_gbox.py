"""gbox's machines as a gym, against its protocol."""

import contextlib

from cua_gyms.gbox import gym as gbox
import fake_gbox
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import http_server as serving_lib

Action = gui_action.GuiAction
CHECK = {"evaluate": {"command": "is-it-solved", "stdout": "True"}}


def own_task(family="enter-text"):
  return desktop.DesktopTasks().train_task(family, 0, 0)


def task(**params):
  return base.Task("t", "t", "Do it.", params={**CHECK, **params})


@contextlib.contextmanager
def serving(monkeypatch, answers=None, family="enter-text", key=fake_gbox.KEY):
  fake = fake_gbox.FakeGbox(own_task(family), answers)
  monkeypatch.setenv(gbox.KEY_VARIABLE, key)
  with serving_lib.LoopbackServer(fake.asgi) as server:
    yield fake, server.url + "/api/v1"


async def test_a_task_is_played_in_a_box_of_its_own(monkeypatch):
  own = desktop.DesktopGym()
  observation = own.start_sync(own_task())
  with serving(monkeypatch) as (fake, url):
    gym = gyms.from_config({"name": "gbox", "base_url": url})
    shown = await gym.start(task(setup=["true"]))
    np.testing.assert_array_equal(shown.screenshot, observation.screenshot)
    assert not (await gym.evaluate()).success
    while (action := desktop.oracle_action(own)) is not None:
      observation = own.act_sync(action)
      shown = await gym.act(action)
      np.testing.assert_array_equal(shown.screenshot, observation.screenshot)
    verdict = await gym.evaluate()
    assert (verdict.score, verdict.success) == (1.0, True)
    paths = [path for path, _ in fake.log]
    assert paths[0] == "/boxes/linux"
    # An action is one call: its answer has the screenshot.
    assert paths.count("/boxes/box-0/actions/screenshot") == 1
    await gym.close()
    await gym.close()
    assert fake.terminated == ["box-0"] and not fake.boxes


@pytest.mark.parametrize(
    "action, kind, calls",
    [
        (Action("click", x=1, y=2, count=3), "linux",
         [("click", {"double": True}), ("click", {"double": False})]),
        (Action("click", x=1, y=2, button="right", keys=("ctrl",)), "linux",
         [("click", {"button": "right", "modifierKeys": ["ctrl"]})]),
        (Action("click", x=1, y=2), "android", [("tap", {"x": 1, "y": 2})]),
        (Action("scroll", x=1, y=2, dy=30), "linux",
         [("scroll", {"scrollX": 0.0, "scrollY": 30})]),
        (Action("key", keys=("ctrl", "c")), "linux",
         [("press-key", {"keys": ["ctrl", "c"], "combination": True})]),
        (Action("drag", x2=5, y2=6), "linux",
         [("drag", {"start": {"x": 0.0, "y": 0.0}, "end": {"x": 5, "y": 6}})]),
        (Action("swipe", x=1, y=2, x2=3, y2=4, duration=0.5), "android",
         [("swipe", {"duration": "500ms"})]),
        (Action("long_press", x=1, y=2), "android",
         [("long-press", {"duration": "1000ms"})]),
        (Action("system_button", text="back"), "android",
         [("press-button", {"buttons": ["back"]})]),
        (Action("system_button", text="enter"), "linux",
         [("press-key", {"keys": ["enter"]})]),
        (Action("move", x=3, y=4), "linux", [("move", {"x": 3, "y": 4})]),
    ],
)  # fmt: skip
async def test_each_action_is_gboxs_own(monkeypatch, action, kind, calls):
  with serving(monkeypatch) as (fake, url):
    gym = gbox.GboxGym(base_url=url, kind=kind, settle_s=0)
    await gym.start(task())
    del fake.log[:]
    await gym.act(action)
    assert len(fake.log) == len(calls)
    for (path, body), (name, fields) in zip(fake.log, calls):
      assert path.endswith(f"/actions/{name}")
      assert {k: body[k] for k in fields} == fields
    await gym.close()


async def test_what_a_machine_has_not_is_told_and_not_sent(monkeypatch):
  with serving(monkeypatch) as (fake, url):
    gym = gbox.GboxGym(base_url=url)
    await gym.start(task())
    for action in (
      Action("open_app", text="x"),
      Action("system_button", text="home"),
    ):
      assert "this machine has no" in (await gym.act(action)).text
    assert (await gym.act(Action("answer", text="42"))).done
    assert gym.answer == "42"
    sent = {path.rsplit("/", 1)[1] for path, _ in fake.log}
    assert sent == {"linux", "screenshot"}
    await gym.close()


async def test_an_evaluator_of_ones_own_decides(monkeypatch):

  async def half(gym, of_task):
    code, _, _ = await gym.run("true")
    assert (code, of_task.task_id) == (0, "t")
    return base.Evaluation(0.5, False)

  with serving(monkeypatch) as (_, url):
    gym = gbox.GboxGym(base_url=url, evaluator=half)
    await gym.start(base.Task("t", "t"))
    assert (await gym.evaluate()).score == 0.5
    await gym.close()


@pytest.mark.parametrize(
  "answers, params, words",
  [
    ({"/boxes/linux": (408, {"message": "slow"})}, {}, "408"),
    ({"/boxes/linux": (200, {"status": "running"})}, {}, "without an id"),
    ({"/boxes/linux": (200, {"id": "b", "status": "error"})}, {}, "error"),
    ({}, {"setup": ["nonsense"]}, "the set-up 'nonsense' ended with 127"),
    (
      {"/screenshot": (200, {"uri": "data:image/png;base64,AAAA"})},
      {},
      "not a picture",
    ),
    ({"/screenshot": (500, {})}, {}, "500"),
  ],
)
async def test_a_failure_says_what_failed_and_leaves_no_box(
  monkeypatch, answers, params, words
):
  with serving(monkeypatch, answers) as (fake, url):
    gym = gbox.GboxGym(base_url=url)
    with pytest.raises(gbox.GboxError, match=words):
      await gym.start(task(**params))
    await gym.close()
    assert not fake.boxes


async def test_a_wrong_key_and_nobody_there_are_said(monkeypatch):
  with serving(monkeypatch, key="wrong") as (_, url):
    gym = gbox.GboxGym(base_url=url)
    with pytest.raises(gbox.GboxError, match="GBOX_API_KEY"):
      await gym.start(task())
    await gym.close()
  gym = gbox.GboxGym(base_url="http://127.0.0.1:9/api/v1")
  with pytest.raises(gbox.GboxError, match="127.0.0.1:9"):
    await gym.start(task())
  await gym.close()


async def test_a_task_that_nobody_can_judge_is_refused_before_a_box_is_made():
  with pytest.raises(ValueError, match="params.evaluate"):
    await gbox.GboxGym(base_url="http://127.0.0.1:9").start(base.Task("t", "t"))
