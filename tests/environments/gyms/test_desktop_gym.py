"""The desktop's behaviour: widgets, keys, undo, evaluation, bad input."""

import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets

TASKS = desktop.DesktopTasks()


def start(name, seed=0, level=0, size=(128, 96)):
  gym = desktop.DesktopGym(*size)
  gym.start_sync(TASKS.task(name, seed, level))
  return gym


def click(scene, widget, count=1, button="left"):
  x, y = scene.point(widget)
  return GuiAction("click", x=x, y=y, count=count, button=button)


def press(gym, widget, **kwargs):
  return gym.act_sync(click(gym.scene, widget, **kwargs))


def keys(gym, *names):
  return gym.act_sync(GuiAction("key", keys=names))


def scene_with(*things, size=(160, 120)):
  """A scene of one window that holds `things`."""
  scene = scene_lib.Scene(*size)
  win = scene.add(containers.Window(2, 2, 150, 110, "Test"))
  for thing in things:
    win.add(thing)
  return scene


# -- deciding events, evaluation by state --------------------------------------


def test_the_wrong_button_ends_the_episode_without_reward():
  gym = start("click-button")
  observation = press(gym, gym.episode.w["buttons"][1])
  assert observation.done and gym.evaluate_sync() == base.Evaluation(
    0.0, False, {"decided": True, "turns": 1}
  )


def test_a_click_on_the_background_decides_nothing():
  gym = start("click-button", 3)
  window = gym.scene.items[0]
  observation = gym.act_sync(GuiAction("click", x=window.x + 5, y=window.y + 7))
  assert not observation.done
  assert press(gym, gym.episode.w["buttons"][0]).done
  assert gym.evaluate_sync().success


def test_after_the_end_nothing_changes_any_more():
  gym = start("click-button")
  last = press(gym, gym.episode.w["buttons"][0])
  again = press(gym, gym.episode.w["buttons"][1])
  assert again.done and again.info["ignored"] == "the episode is over"
  assert np.array_equal(last.screenshot, again.screenshot)
  assert gym.evaluate_sync().success
  assert gym.evaluate_sync().details["turns"] == 1


def test_closing_the_window_of_a_task_loses_it():
  gym = start("enter-text")
  observation = press(gym, gym.scene.items[-1].close_box)
  assert observation.done and not gym.evaluate_sync().success


def test_time_decay():
  gym = desktop.DesktopGym(time_decay=0.1)
  task = TASKS.task("enter-text", 0)
  gym.start_sync(task)
  gym.act_sync(GuiAction("wait"))
  while desktop.oracle_action(gym) is not None:
    gym.act_sync(desktop.oracle_action(gym))
  assert gym.evaluate_sync().score == pytest.approx(0.9**2)


def test_success_is_read_from_state_not_from_pixels(monkeypatch):
  def no_picture(_):
    raise AssertionError("evaluation drew a picture")

  gym = start("enter-text")
  field = gym.episode.w["fields"][0]
  press(gym, field)
  observation = gym.act_sync(
    GuiAction("type", text=gym.episode.spec.data["text"])
  )
  assert observation.done
  monkeypatch.setattr(scene_lib.Scene, "screenshot", no_picture)
  assert gym.evaluate_sync().success


# -- undo ----------------------------------------------------------------------


def test_typing_without_focus_does_nothing():
  gym = start("enter-text")
  before = gym.scene.screenshot()
  observation = gym.act_sync(
    GuiAction("type", text=gym.episode.spec.data["text"])
  )
  assert not observation.done and "focus" in observation.info["ignored"]
  assert np.array_equal(before, observation.screenshot)


@pytest.mark.parametrize("level", (0, 1, 2))
def test_a_wrong_word_can_be_mended(level):
  gym = start("enter-text", 4, level)
  field = gym.episode.w["fields"][-1]
  press(gym, field)
  gym.act_sync(GuiAction("type", text="nonsense"))
  for _ in range(10):
    action = desktop.oracle_action(gym)
    if action is None:
      break
    gym.act_sync(action)
  assert gym.evaluate_sync().success


@pytest.mark.parametrize("level", (0, 1, 2))
def test_a_wrong_tick_can_be_undone(level):
  gym = start("click-checkboxes", 2, level)
  targets = gym.episode.spec.data["wanted"]
  wrong = gym.episode.w["boxes"][targets:]
  assert wrong
  box = wrong[0]
  was = box.ticked
  if was:
    return  # the oracle test covers ticked ones
  assert not press(gym, box).done
  for other in gym.episode.w["boxes"][:targets]:
    if not other.ticked:
      assert not press(gym, other).done  # right set, and one too many
  while desktop.oracle_action(gym) is not None:
    press(gym, box) if box.ticked else gym.act_sync(desktop.oracle_action(gym))
  assert gym.evaluate_sync().success


def test_a_drop_beside_the_box_can_be_mended():
  gym = start("drag-to-target", 1)
  shape = gym.episode.w["shapes"][0]
  x, y = gym.scene.point(shape)
  box = gym.episode.w["boxes"][0]
  x2 = 20 if box.x > 60 else 110
  observation = gym.act_sync(GuiAction("drag", x=x, y=y, x2=x2, y2=50))
  assert not observation.done
  gym.act_sync(desktop.oracle_action(gym))
  assert gym.evaluate_sync().success


def test_a_wrong_choice_in_a_list_can_be_changed():
  gym = start("choose-option")
  drop = gym.episode.w["lists"][0]
  goal = gym.episode.spec.data["wanted"][0]
  press(gym, drop)
  other = next(i for i in range(3) if i not in (goal, drop.value))
  assert not press(gym, gym.scene.menu.children[other]).done
  assert drop.value == other
  while desktop.oracle_action(gym) is not None:
    gym.act_sync(desktop.oracle_action(gym))
  assert gym.evaluate_sync().success


def test_a_single_click_only_selects_an_icon():
  gym = start("open-icon")
  icon = gym.episode.w["icons"][0]
  assert not press(gym, icon).done and gym.scene.focus is icon
  assert not press(gym, icon).done  # two turns are no double click
  assert press(gym, icon, count=2).done
  assert gym.evaluate_sync().success


def test_the_wrong_icon_opened_loses():
  gym = start("open-icon")
  assert press(gym, gym.episode.w["icons"][1], count=2).done
  assert not gym.evaluate_sync().success


# -- keyboard ------------------------------------------------------------------


def test_a_login_by_keyboard_alone():
  gym = start("login-form", 0)
  user, secret = gym.episode.spec.data["want"]
  keys(gym, "tab")
  gym.act_sync(GuiAction("type", text=user))
  keys(gym, "Tab")
  observation = gym.act_sync(GuiAction("type", text=secret + "\n"))
  assert observation.done and gym.evaluate_sync().success


def test_submitting_a_wrong_form_loses():
  gym = start("login-form", 0)
  gym.act_sync(desktop.oracle_action(gym))
  assert keys(gym, "Return").done
  assert not gym.evaluate_sync().success


def test_a_drop_down_by_keyboard():
  drop = widgets.DropDown(10, 30, 60, 16, "size", ("A", "B", "C"))
  scene = scene_with(drop)
  scene.act(GuiAction("key", keys=("tab",)))
  scene.act(GuiAction("key", keys=("enter",)))
  assert scene.menu is not None
  scene.act(GuiAction("key", keys=("down",)))
  scene.act(GuiAction("key", keys=("down",)))
  scene.act(GuiAction("key", keys=("enter",)))
  assert scene.menu is None and drop.options[drop.value] == "B"
  scene.act(GuiAction("key", keys=("enter",)))
  scene.act(GuiAction("key", keys=("escape",)))
  assert scene.menu is None and drop.options[drop.value] == "B"


@pytest.mark.parametrize(
  "given_keys,want",
  (
    (("Control", "A"), "ctrl+a"),
    (("ctrl+a",), "ctrl+a"),
    (("shift", "ctrl", "T"), "ctrl+shift+t"),
    (("Return",), "enter"),
    (("Esc",), "escape"),
    (("+",), "+"),
    (("ArrowDown",), "down"),
    (("a",), "a"),
    (("A",), "A"),
    (("cmd", "v"), "meta+v"),
    (("Page_Up",), "pageup"),
    (("pgdn",), "pagedown"),
    ((" ",), "space"),
    (("kp_enter",), "enter"),
    (("shift_l", "back_space"), "shift+backspace"),
    (("Control_R+minus",), "ctrl+-"),
    (("Hyper",), "hyper"),
  ),
)
def test_key_names(given_keys, want):
  assert scene_lib.normal_keys(given_keys) == want


def test_editing_a_field():
  field = widgets.TextField(10, 30, 90, 16, "name")
  scene = scene_with(field)
  scene.act(click(scene, field))
  scene.act(GuiAction("type", text="hello"))
  for combo, want in (
    ("backspace", "hell"),
    ("home", "hell"),
    ("delete", "ell"),
    ("x", "xell"),
    ("end", "xell"),
    ("shift+Y", "xellY"),
    ("space", "xellY "),
    ("ctrl+a", "xellY "),
    ("ctrl+x", ""),
    ("ctrl+v", "xellY "),
    ("left", "xellY "),
    ("shift+left", "xellY "),
    ("backspace", "xell "),
  ):
    scene.act(GuiAction("key", keys=(combo,)))
    assert field.text == want, combo
  scene.act(click(scene, field, count=3))
  scene.act(GuiAction("type", text="new"))
  assert field.text == "new"
  scene.act(GuiAction("type", text="z" * 1000))
  assert len(field.text) == widgets.MAX_TEXT
  scene.screenshot()


def test_a_secret_field_shows_stars_and_is_not_copied():
  shown = []
  for text in ("cat", "dog"):
    field = widgets.TextField(10, 30, 90, 16, "password", secret=True)
    scene = scene_with(field)
    scene.act(click(scene, field))
    scene.act(GuiAction("type", text=text))
    scene.act(GuiAction("key", keys=("ctrl", "a")))
    scene.act(GuiAction("key", keys=("ctrl", "c")))
    assert field.text == text and scene.clipboard == ""
    shown.append(scene.screenshot())
  assert np.array_equal(*shown)


def test_radio_buttons_exclude_each_other():
  group = []
  one = widgets.RadioButton(10, 30, "Tea", group)
  two = widgets.RadioButton(10, 50, "Milk", group)
  scene = scene_with(one, two)
  scene.act(click(scene, one))
  assert (one.chosen, two.chosen) == (True, False)
  scene.act(GuiAction("key", keys=("down",)))
  assert (one.chosen, two.chosen) == (False, True)


def test_a_slider_by_drag_click_and_keys():
  slider = widgets.Slider(10, 40, 111, "volume", 10, 0)
  scene = scene_with(slider)
  for value in range(11):
    slider.value = 0
    x, y = scene.point(slider)
    x2, _ = scene.to_px(*slider.at(value))
    scene.act(GuiAction("drag", x=x, y=y, x2=x2, y2=0))
    assert slider.value == value
    slider.value = 5
    scene.act(GuiAction("click", x=x2, y=y))
    assert slider.value == value
  scene.act(GuiAction("key", keys=("left",)))
  assert slider.value == 9
  scene.act(GuiAction("key", keys=("home",)))
  assert slider.value == 0


# -- windows, menus, scrolling -------------------------------------------------


def scrolling_scene():
  area = containers.ScrollArea(10, 30, 80, 60, 20 * 14)
  for i in range(20):
    area.add(items.Row(11, 30 + 14 * i, 70, 14, f"Row {i}"))
  return scene_with(area), area


def test_scrolling_by_wheel_bar_keys_and_swipe():
  scene, area = scrolling_scene()
  assert scene.point(area.children[10]) is None
  info = scene.act(GuiAction("scroll", x=30, y=50, dy=100))
  assert info == {} and area.offset == 100
  assert scene.point(area.children[9]) is not None
  scene.act(GuiAction("scroll", x=30, y=50, dy=-1000))
  assert area.offset == 0
  bar = area.x + area.w - 3
  scene.act(GuiAction("drag", x=bar, y=34, x2=bar, y2=119))
  assert area.offset == area.limit
  scene.act(GuiAction("key", keys=("pageup",)))
  assert area.offset < area.limit
  area.offset = 0
  scene.act(GuiAction("swipe", x=30, y=80, x2=30, y2=40))
  assert area.offset == 40
  scene.act(click(scene, area.children[5]))
  assert area.children[5].chosen


def test_scrolling_over_nothing_says_so():
  scene, _ = scrolling_scene()
  info = scene.act(GuiAction("scroll", x=130, y=100, dy=30))
  assert "nothing scrolls" in info["ignored"]


def test_a_dialog_blocks_what_is_behind():
  button = widgets.Button(10, 30, 40, 16, "Save")
  scene = scene_with(button)
  dialog = scene.add(containers.Window(60, 60, 80, 40, "Ask", modal=True))
  info = scene.act(click(scene, button))
  assert info["ignored"] == "a dialog is open" and button.pressed == 0
  scene.act(GuiAction("key", keys=("escape",)))
  assert dialog not in scene.items
  scene.act(click(scene, button))
  assert button.pressed == 1


def test_a_press_raises_a_window_and_its_title_moves_it():
  scene = scene_lib.Scene(200, 160)
  one = scene.add(containers.Window(5, 5, 80, 60, "One"))
  inner = one.add(widgets.Button(10, 40, 30, 16, "OK"))
  two = scene.add(containers.Window(60, 30, 80, 60, "Two"))
  assert scene.front_window() is two
  scene.act(GuiAction("click", x=20, y=12))
  assert scene.front_window() is one
  scene.act(GuiAction("drag", x=20, y=12, x2=50, y2=42))
  assert (one.x, one.y) == (35, 35) and (inner.x, inner.y) == (40, 70)


def test_a_context_menu_opens_by_right_click_and_long_press():
  for kind in ("click", "long_press"):
    scene = scene_lib.Scene(160, 120)
    icon = scene.add(items.Icon(20, 20, "Mail"))
    icon.context_items = ("Cut", "Pin")
    x, y = scene.point(icon)
    extra = {"button": "right"} if kind == "click" else {}
    scene.act(GuiAction(kind, x=x, y=y, **extra))
    assert [c.name for c in scene.menu.children] == ["Cut", "Pin"]
    scene.act(GuiAction("click", x=150, y=110))  # beside: only closes
    assert scene.menu is None and scene.events == []


def test_a_button_fires_only_when_the_pointer_is_let_go_on_it():
  button = widgets.Button(10, 30, 40, 16, "Save")
  scene = scene_with(button)
  x, y = scene.point(button)
  scene.act(GuiAction("drag", x=x, y=y, x2=x + 80, y2=y))
  assert button.pressed == 0
  scene.act(GuiAction("drag", x=x, y=y, x2=x + 3, y2=y))
  assert button.pressed == 1


def test_tabs_show_one_page():
  gym = start("switch-tab", 0, 1)
  box = gym.episode.w["box"]
  named = {phrase for phrase, _, _ in gym.referring_expressions()}
  assert f"the {box.name} check box" not in named
  gym.act_sync(desktop.oracle_action(gym))
  named = {phrase for phrase, _, _ in gym.referring_expressions()}
  assert f"the {box.name} check box" in named


# -- bad input -----------------------------------------------------------------


def test_positions_outside_are_clamped():
  button = widgets.Button(110, 70, 40, 40, "Corner")
  scene = scene_lib.Scene(150, 110)
  scene.add(button)
  info = scene.act(GuiAction("click", x=1e9, y=5000))
  assert info == {"clamped": True} and button.pressed == 1


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_positions_that_are_no_numbers_are_ignored(bad):
  scene = scene_lib.Scene(128, 96)
  assert "ignored" in scene.act(GuiAction("click", x=bad, y=3))


def test_unsupported_kinds_are_ignored_with_a_reason():
  gym = start("click-button")
  observation = gym.act_sync(GuiAction("open_app", text="Mail"))
  assert "open_app" in observation.info["ignored"] and not observation.done
  observation = gym.act_sync(GuiAction("system_button", text="home"))
  assert "home" in observation.info["ignored"]
  observation = gym.act_sync(GuiAction("drag", x2=3, y2=4))
  assert "pointer" in observation.info["ignored"]


@pytest.mark.parametrize(
  "call,message",
  (
    (lambda: desktop.DesktopGym(64, 48), "width=64, height=48"),
    (lambda: desktop.DesktopGym(time_decay=1.0), "time_decay"),
    (lambda: gyms.make("desktop", widht=3), "widht"),
    (lambda: desktop.DesktopTasks(("nope",)), "nope"),
    (lambda: desktop.DesktopTasks(difficulty=3), "difficulty"),
    (lambda: TASKS.task("click-button", -1), "seed"),
    (lambda: gyms.get("desktop").make_tasks((), {"x": 1}), "'x'"),
  ),
)
def test_wrong_settings_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_acting_before_start_is_refused():
  gym = desktop.DesktopGym()
  for call in (
    lambda: gym.act_sync(GuiAction("wait")),
    gym.evaluate_sync,
    lambda: desktop.oracle_action(gym),
    gym.referring_expressions,
  ):
    with pytest.raises(RuntimeError, match="start"):
      call()


numbers = st.one_of(
  st.integers(-50, 300), st.floats(allow_nan=True, allow_infinity=True)
)
names = st.sampled_from(
  (
    "enter",
    "tab",
    "backspace",
    "delete",
    "escape",
    "ctrl",
    "shift",
    "a",
    "c",
    "v",
    "x",
    "up",
    "down",
    "left",
    "right",
    "home",
    "end",
    "space",
    "pageup",
    "pagedown",
    "F5",
    "+",
    "é",
    "ctrl+a",
    "alt+",
    "",
  )
)
actions = st.one_of(
  st.builds(
    GuiAction,
    st.just("click"),
    x=numbers,
    y=numbers,
    button=st.sampled_from(("left", "right", "middle", "back")),
    count=st.integers(1, 3),
  ),
  st.builds(
    GuiAction,
    st.just("drag"),
    x=st.none() | numbers,
    y=st.none() | numbers,
    x2=numbers,
    y2=numbers,
  ),
  st.builds(
    GuiAction, st.just("swipe"), x=numbers, y=numbers, x2=numbers, y2=numbers
  ),
  st.builds(
    GuiAction,
    st.just("scroll"),
    x=st.none() | numbers,
    y=st.none() | numbers,
    dx=numbers,
    dy=numbers,
  ),
  st.builds(
    GuiAction, st.sampled_from(("move", "long_press")), x=numbers, y=numbers
  ),
  st.builds(
    GuiAction,
    st.sampled_from(("type", "answer", "system_button", "open_app")),
    text=st.text(max_size=12) | st.sampled_from(("enter", "back", "\n\t")),
  ),
  st.builds(
    GuiAction,
    st.just("key"),
    keys=st.lists(names, min_size=1, max_size=3).map(tuple),
  ),
  st.sampled_from((GuiAction("wait"), GuiAction("screenshot"))),
)


@settings(max_examples=250, deadline=None)
@given(
  name=st.sampled_from(desktop.families()),
  seed=st.integers(0, 10_000),
  level=st.integers(0, 2),
  size=st.sampled_from(((128, 96), (224, 160), (331, 257))),
  session=st.lists(actions, max_size=12),
)
def test_no_session_raises_and_sessions_repeat(
  name, seed, level, size, session
):
  pictures = []
  for _ in range(2):
    gym = start(name, seed, level, size)
    shown = []
    for action in session:
      observation = gym.act_sync(action)
      assert observation.screenshot.shape == (size[1], size[0], 3)
      pixels = observation.screenshot.tobytes()
      shown.append((pixels, observation.done, dict(observation.info)))
    gym.referring_expressions()
    result = gym.evaluate_sync()
    shown.append((result.score, result.success))
    pictures.append(shown)
  assert pictures[0] == pictures[1]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), session=st.lists(actions, max_size=8))
def test_random_scenes_survive_any_session(seed, session):
  gym = desktop.DesktopGym(160, 112)
  gym.random_scene(seed)
  for action in session:
    gym.act_sync(action)
  gym.referring_expressions()
