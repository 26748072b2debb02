"""Any object with screenshot() and act() as a gym."""

import asyncio
import io
import json
import threading

from cua_gyms.computer import gym as computer_lib
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import first_episode
from tunix.rl.multi_turn.run import tasks as run_tasks

Action = gui_action.GuiAction
TASK = desktop.DesktopTasks().train_task("click-button", 0, 0)


class Desk:
  """The embedded desktop as such an object."""

  closed = 0

  def __init__(self, form="array", width=128):
    self._gym = desktop.DesktopGym(width)
    self._form = form

  def start(self, task):
    return self._gym.start_sync(task).instruction

  def screenshot(self):
    pixels = self._gym.scene.screenshot()
    if self._form == "rgba":
      return np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
    if self._form == "pil":
      return Image.fromarray(pixels)
    if self._form == "png":
      out = io.BytesIO()
      Image.fromarray(pixels).save(out, "png")
      return out.getvalue()
    return pixels

  def act(self, action):
    return self._gym.act_sync(action).done

  def evaluate(self, task):
    assert task == TASK
    return self._gym.evaluate_sync().success

  def close(self):
    type(self).closed += 1


class AsyncDesk:
  """The least there may be, and async."""

  def __init__(self):
    self.gym = desktop.DesktopGym()
    self.gym.start_sync(TASK)

  async def screenshot(self):
    return self.gym.scene.screenshot()

  async def act(self, action):
    await asyncio.sleep(0)
    self.gym.act_sync(action)


def is_won(desk, task, answer):
  del task, answer
  return desk.gym.evaluate_sync()


@pytest.mark.parametrize("form", ["array", "rgba", "pil", "png"])
async def test_an_object_is_played_like_any_gym(form):
  own = desktop.DesktopGym()
  observation = own.start_sync(TASK)
  gym = computer_lib.ComputerGym(Desk, options={"form": form})
  shown = await gym.start(TASK)
  np.testing.assert_array_equal(shown.screenshot, observation.screenshot)
  assert shown.instruction == observation.instruction
  action = desktop.oracle_action(own)
  own.act_sync(action)
  assert (await gym.act(action)).done
  assert await gym.evaluate() == base.Evaluation(1.0, True)
  before = Desk.closed
  await gym.close()
  await gym.close()
  assert Desk.closed == before + 1
  await gym.start(TASK)  # A new one.
  await gym.close()


async def test_an_async_object_and_an_evaluator():
  gym = computer_lib.ComputerGym(AsyncDesk(), evaluator=is_won)
  await gym.start(TASK)
  assert not (await gym.act(Action("wait"))).done
  assert (await gym.act(Action("answer", text="x"))).done
  assert gym.answer == "x"
  assert not (await gym.evaluate()).success
  await gym.close()


async def test_a_path_names_what_makes_it():
  gym = gyms.from_config(
    {
      "name": "computer",
      "computer": "tunix.rl.multi_turn.environments.gyms.desktop:DesktopGym",
    }
  )
  with pytest.raises(TypeError, match="DesktopGym has no screenshot"):
    await gym.start(TASK)


async def test_what_nobody_can_judge_is_refused():
  with pytest.raises(TypeError, match="no evaluator"):
    await computer_lib.ComputerGym(AsyncDesk()).start(TASK)
  gym = computer_lib.ComputerGym(AsyncDesk(), evaluator=lambda *a: "yes")
  await gym.start(TASK)
  with pytest.raises(TypeError, match="'yes'"):
    await gym.evaluate()


async def test_a_computer_that_hangs_is_closed_when_it_comes_back():

  free = threading.Event()

  class Slow(Desk):
    closed = 0

    def act(self, action):
      free.wait(30)

  gym = computer_lib.ComputerGym(Slow, timeout_s=1.0)
  await gym.start(TASK)
  with pytest.raises(concurrency.DeadlineExceeded):
    await gym.act(Action("wait"))
  with pytest.raises(RuntimeError, match="still runs"):
    await gym.act(Action("wait"))
  await gym.close()
  assert not Slow.closed
  free.set()
  async with asyncio.timeout(10):
    while not Slow.closed:
      await asyncio.sleep(0.02)


class Canvas:
  """A screen of 40x30 and nothing on it."""

  def screenshot(self):
    return np.zeros((30, 40, 3), np.uint8)

  def act(self, action):
    pass

  def evaluate(self, task):
    return False


class SlowToStart(Canvas):
  async def start(self, task):
    await asyncio.sleep(30)


class CannotStart(Canvas):
  def start(self, task):
    raise OSError("no display")


def _config(tmp_path, *more, computer="Canvas"):
  rows = [{"id": f"t{i}", "name": f"t{i}", "family": "f"} for i in range(10)]
  file = tmp_path / "tasks.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  path = f"{__name__}:{computer}"
  return config_lib.load_config([
      "gym=computer", f"gym.options.computer={path}", "tasks=[f]",
      "task_source.source=jsonl", f"task_source.path={file}",
      "warm_start.source=none", "warm_start.steps=0", *more,
  ])  # fmt: skip


def test_a_screen_of_another_size_is_refused_before_anything_is_played(
  tmp_path,
):
  def try_it(config):
    config, source = run_tasks.resolve(config)
    factory = episodes_lib.EpisodeFactory(config, images_lib.ImageStore())
    first_episode.try_first_episode(config, factory, source)

  with pytest.raises(config_lib.ConfigError, match="40x30; set gym.width=40"):
    try_it(_config(tmp_path))
  sized = ("gym.width=40", "gym.height=30")
  try_it(_config(tmp_path, *sized))
  try_it(_config(tmp_path, "run.dry_run=true"))
  with pytest.raises(config_lib.ConfigError, match="OSError: no display"):
    try_it(_config(tmp_path, *sized, computer="CannotStart"))
  with pytest.raises(config_lib.ConfigError, match="first start"):
    try_it(
      _config(
        tmp_path, *sized, "collect.deadlines.reset=0.3", computer="SlowToStart"
      )
    )
