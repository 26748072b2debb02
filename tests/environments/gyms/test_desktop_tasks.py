"""Grounding phrases, tasks, the protocol, pictures and the font."""

import asyncio

import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets

TASKS = desktop.DesktopTasks()


def start(name, seed=0, level=0, size=(128, 96)):
  gym = desktop.DesktopGym(*size)
  gym.start_sync(TASKS.task(name, seed, level))
  return gym


def scene_with(*things, size=(160, 120)):
  """A scene of one window that holds `things`."""
  scene = scene_lib.Scene(*size)
  win = scene.add(containers.Window(2, 2, 150, 110, "Test"))
  for thing in things:
    win.add(thing)
  return scene


# -- grounding -----------------------------------------------------------------


def test_phrases_point_at_what_they_name():
  gym = desktop.DesktopGym(224, 160)
  kinds = set()
  for seed in range(120):
    gym.random_scene(seed)
    scene = gym.scene
    named = gym.referring_expressions()
    assert len({phrase for phrase, _, _ in named}) == len(named)
    for phrase, x, y in named:
      assert 0 <= x < 224 and 0 <= y < 160
      widget = scene.hit(x // scene.k, y // scene.k)
      if "title bar" in phrase:
        assert isinstance(widget, containers.Window)
        assert f" {widget.name} " in phrase
      else:
        assert phrase in widget.phrases()
      kinds.add(widget.kind)
  assert kinds >= {
    "button",
    "field",
    "check box",
    "radio button",
    "drop-down",
    "slider",
    "shape",
    "icon",
    "tab",
    "row",
    "box",
    "close box",
    "window",
    "dialog",
  }


def test_ambiguous_names_are_left_out():
  scene = scene_with(
    widgets.Button(10, 30, 40, 16, "Save"),
    widgets.Button(60, 30, 40, 16, "Save"),
    widgets.Button(60, 60, 40, 16, "Open"),
  )
  phrases = [phrase for phrase, _, _ in scene.referring_expressions()]
  assert "the Open button" in phrases
  assert "the Save button" not in phrases


def test_covered_widgets_are_left_out():
  scene = scene_with(widgets.Button(10, 30, 40, 16, "Save"))
  scene.add(containers.Window(5, 20, 90, 60, "Over"))
  phrases = [phrase for phrase, _, _ in scene.referring_expressions()]
  assert "the Save button" not in phrases
  assert "the close box of the Over window" in phrases


# -- tasks, protocol, drawing --------------------------------------------------


def test_train_and_eval_seeds_never_meet():
  train = {
    TASKS.train_task(name, i, seed).seed
    for name in desktop.QUICKSTART_FAMILIES
    for i in range(200)
    for seed in range(3)
  }
  # Families that shared seeds would share what is easy, too.
  held_out = {
    TASKS.eval_task(name, i, seed).seed
    for name in desktop.QUICKSTART_FAMILIES
    for i in range(200)
    for seed in range(3)
  }
  assert len(train) == len(held_out) == 6 * 200 * 3
  assert max(train) < desktop.EVAL_SEEDS_FROM <= min(held_out)


def test_tasks_are_data():
  tasks = gyms.get("desktop").make_tasks(["open-icon"], {"difficulty": 2})
  task = tasks.train_task("open-icon", 3)
  assert task == tasks.train_task("open-icon", 3)
  assert task.task_id == f"desktop/open-icon/2/{task.seed}"
  assert base.Task.from_json(task.to_json()) == task
  gym = gyms.make("desktop", width=160, height=112)
  assert gym.start_sync(task).instruction == task.instruction


def test_the_asynchronous_protocol():
  async def run():
    gym = desktop.DesktopGym()
    for seed in range(2):
      observation = await gym.start(TASKS.task("close-dialog", seed))
      while not observation.done:
        observation = await gym.act(desktop.oracle_action(gym))
      assert (await gym.evaluate()).success
    await gym.close()
    await gym.close()
    with pytest.raises(RuntimeError):
      await gym.evaluate()

  asyncio.run(run())


def test_screenshots_are_read_only_and_shared_until_a_change():
  gym = start("click-button")
  one = gym.scene.screenshot()
  with pytest.raises(ValueError):
    one[0, 0, 0] = 1
  assert gym.act_sync(GuiAction("key", keys=("f9",))).screenshot is one


def test_every_glyph_differs_from_every_other():
  printable = [chr(c) for c in range(33, 127)]
  glyphs = {}
  for factor in (1, 2, 3, 4):
    for char in printable:
      mask = font.text_mask(char, factor)
      assert mask.size[1] == font.LINE * factor
      key = (mask.size, mask.tobytes())
      assert key not in glyphs, (char, glyphs[key], factor)
      glyphs[key] = char


def test_text_width_is_the_width_that_is_drawn():
  for text in ("Save", "Wizard il!", "a", "Ünknown"):
    assert font.text_mask(text).size[0] == font.text_width(text)
    assert font.text_mask(text, bold=True).size[0] == font.text_width(
      text, bold=True
    )
  assert font.fit("Hello", 12) == "He"
  assert font.fit("Hello", 12, tail=True) in ("lo", "llo")
  assert font.text_width(font.fit("Hello", 12)) <= 12
