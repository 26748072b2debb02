"""AndroidWorld's protocol, against a server as its source has it."""

import asyncio

from cua_gyms import machines
from cua_gyms.android_world import gym as android_world
import fake_android_world
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import http_server

GuiAction = gui_action.GuiAction


@pytest.fixture(name="phone")
def _phone():
  fake = fake_android_world.FakeAndroidWorld()
  with http_server.LoopbackServer(fake.asgi) as server:
    yield fake, server.url


def task(name="enter-text", index=0):
  where = {"task_type": name, "task_idx": index}
  return base.Task("t", name, params={"android_world": where})


def paths(fake):
  return [path for path, _ in fake.log]


async def test_a_task_is_played_on_a_phone(phone):
  fake, url = phone
  own = desktop.DesktopGym()
  expected = own.start_sync(
    desktop.DesktopTasks().train_task("enter-text", 1, 0)
  )
  gym = android_world.AndroidWorldGym(url, width=128, height=96)
  shown = await gym.start(task(index=1))
  assert shown.instruction == expected.instruction
  assert (shown.screenshot == expected.screenshot).all()
  while (action := desktop.oracle_action(own)) is not None:
    own.act_sync(action)
    shown = await gym.act(action)
    assert not shown.text
  assert fake.gym.evaluate_sync().success
  # The policy has not ended the episode.
  unfinished = await gym.evaluate()
  assert unfinished.score == 0.0 and unfinished.details["state_score"] == 1.0
  assert (await gym.act(GuiAction("terminate", success=True))).done
  assert (await gym.evaluate()).success
  await gym.close()
  await gym.close()
  assert paths(fake)[:5] == [
    "/health",
    "/reset",
    "/task/initialize",
    "/task/goal",
    "/screenshot",
  ]
  assert paths(fake)[-1] == "/task/tear_down"
  assert paths(fake).count("/task/tear_down") == 1


@pytest.mark.parametrize(
    "action, body",
    [
        (GuiAction("click", x=5.4, y=7.6),
         {"action_type": "click", "x": 5, "y": 8}),
        (GuiAction("click", x=1, y=2, count=2),
         {"action_type": "double_tap", "x": 1, "y": 2}),
        (GuiAction("long_press", x=1, y=2),
         {"action_type": "long_press", "x": 1, "y": 2}),
        (GuiAction("type", text="a b"),
         {"action_type": "input_text", "text": "a b"}),
        (GuiAction("scroll", dy=30),
         {"action_type": "scroll", "direction": "down"}),
        (GuiAction("scroll", dx=-9, dy=3),
         {"action_type": "scroll", "direction": "left"}),
        # The server's "left" moves the finger to the right.
        (GuiAction("swipe", x=0, y=5, x2=50, y2=9),
         {"action_type": "swipe", "direction": "left"}),
        (GuiAction("swipe", x=0, y=50, x2=4, y2=9),
         {"action_type": "swipe", "direction": "up"}),
        (GuiAction("system_button", text="back"),
         {"action_type": "navigate_back"}),
        (GuiAction("key", keys=("enter",)), {"action_type": "keyboard_enter"}),
        (GuiAction("open_app", text="Clock"),
         {"action_type": "open_app", "app_name": "Clock"}),
        (GuiAction("answer", text="4"), {"action_type": "answer", "text": "4"}),
        (GuiAction("terminate", success=False),
         {"action_type": "status", "goal_status": "infeasible"}),
        (GuiAction("wait"), {"action_type": "wait"}),
    ],
)  # fmt: skip
async def test_each_action_is_the_servers_own(action, body):
  assert android_world.to_action(action) == body


async def test_what_a_phone_has_not_is_told_and_not_sent(phone):
  fake, url = phone
  gym = android_world.AndroidWorldGym(url)
  await gym.start(task())
  for action in (
    GuiAction("key", keys=("ctrl", "c")),
    GuiAction("move", x=1, y=1),
    GuiAction("click", x=1, y=1, button="right"),
    GuiAction("system_button", text="menu"),
    GuiAction("type", text=""),
    GuiAction("scroll"),
  ):
    shown = await gym.act(action)
    assert shown.text.startswith("Error: ") and not shown.done, action
  assert "/execute_action" not in paths(fake)
  await gym.close()


async def test_failures_are_errors_and_give_the_phone_back(phone):
  fake, url = phone
  gym = android_world.AndroidWorldGym(url, start_s=0.5)
  with pytest.raises(ValueError, match="params.android_world"):
    await gym.start(base.Task("t", "f"))
  with pytest.raises(android_world.AndroidWorldError, match="500"):
    await gym.start(task(index=9))
  await gym.close()
  for path, answer, words in (
    ("/screenshot", ({"pixels": [[1, 2]]}, 200), "numbers from 0 to 255"),
    ("/screenshot", ({"pix": 1}, 200), "no screenshot"),
    ("/task/initialize", ({"detail": "adb is gone"}, 500), "adb is gone"),
    ("/health", ({"detail": "Environment not initialized"}, 500), "not init"),
  ):
    fake.broken = {path: answer}
    with pytest.raises(android_world.AndroidWorldError, match=words):
      await gym.start(task())
    fake.broken.clear()
    await gym.close()
  await gym.start(task())
  fake.broken = {"/task/score": ({"score": None}, 200)}
  with pytest.raises(android_world.AndroidWorldError, match="score.*None"):
    await gym.evaluate()
  other = android_world.AndroidWorldGym(url, start_s=0.2)
  with pytest.raises(android_world.AndroidWorldError, match="became free"):
    await other.start(task())
  fake.broken = {"/task/tear_down": ({"detail": "x"}, 500)}
  await gym.close()  # Logged; the phone is free again.
  await other.start(task())
  await other.close()
  sized = android_world.AndroidWorldGym(url, width=1080)
  with pytest.raises(android_world.AndroidWorldError, match="gym.width=128"):
    await sized.start(task())
  await sized.close()
  assert await machines.take([url], 0.0) == url
  machines.give_back(url)


async def test_the_suite_is_a_task_set(phone):
  fake, url = phone
  ask = lambda options, families=(): asyncio.to_thread(
    gyms.get("android_world").make_tasks, families, {"machines": url, **options}
  )
  task_set = await ask({})
  assert task_set.families() == ("click-button", "enter-text")
  task_set = await ask({"combinations": 4, "suite_seed": 7}, ("enter-text",))
  assert ("/suite/reinitialize", {"n_task_combinations": "4", "seed": "7"}) in (
    fake.log
  )
  train = {task_set.train_task("enter-text", i).task_id for i in range(9)}
  held_out = task_set.eval_task("enter-text", 0)
  assert len(train) == 3 and held_out.task_id not in train
  assert held_out.params["android_world"]["task_idx"] == 3
  with pytest.raises(ValueError, match="enter-text"):
    await ask({}, ("enter-txt",))
  with pytest.raises(ValueError, match="combinations=1"):
    await ask({"combinations": 1})
  fake.instances["click-button"] = 1
  with pytest.raises(ValueError, match="combinations to 2"):
    await ask({})
