"""The desktop as a gymnasium environment."""

import warnings

import gymnasium
from gymnasium.utils import env_checker
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import env as env_lib


def make(family="click-button", **kwargs):
  return gymnasium.make(f"TunixDesktop/{family}-v0", **kwargs)


def wait():
  return env_lib.encode_action(GuiAction("wait"), 128, 96)


@pytest.mark.peer("gymnasium")
@pytest.mark.parametrize("family", desktop.families())
def test_passes_gymnasiums_own_checker(family):
  env = make(family, render_mode="rgb_array")
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    env_checker.check_env(env.unwrapped)
  env.close()


@pytest.mark.peer("gymnasium")
def test_made_by_module_and_id():
  env = gymnasium.make(
    "tunix.rl.multi_turn.environments.gyms.desktop.env:"
    "TunixDesktop/open-icon-v0"
  )
  assert env.unwrapped.family == "open-icon"


@pytest.mark.parametrize("family", desktop.families())
@pytest.mark.parametrize("difficulty", (0, 2))
def test_oracle_solves_through_the_action_space(family, difficulty):
  env = make(
    family,
    difficulty=difficulty,
    width=224,
    height=160,
    split="eval",
    render_mode="rgb_array",
  )
  for seed in range(8):
    observation, info = env.reset(seed=seed)
    assert observation["instruction"] == info["instruction"] != ""
    ended = cut = False
    while not (ended or cut):
      action = desktop.oracle_action(env.unwrapped.gym)
      encoded = env_lib.encode_action(action, 224, 160)
      assert env.action_space.contains(encoded)
      observation, reward, ended, cut, info = env.step(encoded)
      assert env.observation_space.contains(observation)
      assert np.array_equal(env.render(), observation["screenshot"])
    assert (ended, cut, reward, info["success"]) == (True, False, 1.0, True)


def test_an_episode_is_truncated_after_its_turns():
  env = make("enter-text")
  env.reset(seed=0)
  ends = [env.step(wait())[1:4] for _ in range(4)]
  assert ends == [(0.0, False, False)] * 3 + [(0.0, False, True)]


def test_a_wrong_end_is_terminated_without_reward():
  env = make("click-button")
  env.reset(seed=0)
  scene = env.unwrapped.gym
  x, y = scene.scene.point(scene.episode.w["buttons"][1])
  action = env_lib.encode_action(GuiAction("click", x=x, y=y), 128, 96)
  assert env.step(action)[1:4] == (0.0, True, False)


def test_seeds_repeat_and_instances_can_be_named():
  one, two = make("open-icon"), make("open-icon")
  for seed in (0, 1):
    a, _ = one.reset(seed=seed)
    b, _ = two.reset(seed=seed)
    assert a["instruction"] == b["instruction"]
    assert np.array_equal(a["screenshot"], b["screenshot"])
    a, first = one.reset()
    b, second = two.reset()
    assert first["task_id"] == second["task_id"]
  _, info = one.reset(options={"instance": 7})
  expected = desktop.DesktopTasks().train_task("open-icon", 7)
  assert info["task_id"] == expected.task_id


@given(
  kind=st.sampled_from(("click", "move", "drag", "scroll")),
  size=st.sampled_from(((128, 96), (224, 160), (640, 480), (1366, 768))),
  data=st.data(),
)
def test_encoding_keeps_the_pixel(kind, size, data):
  width, height = size
  x = data.draw(st.integers(0, width - 1))
  y = data.draw(st.integers(0, height - 1))
  fields = {"x": x, "y": y}
  if kind == "drag":
    fields.update(x2=width - 1 - x, y2=height - 1 - y)
  if kind == "scroll":
    fields.update(dy=y - height // 2)
  action = GuiAction(kind, **fields)
  back = env_lib.decode_action(
    env_lib.encode_action(action, width, height), width, height
  )
  assert back.kind == action.kind
  assert (int(back.x), int(back.y)) == (x, y)
  if kind == "drag":
    assert (int(back.x2), int(back.y2)) == (action.x2, action.y2)
  if kind == "scroll":
    assert round(back.dy) == action.dy


@pytest.mark.parametrize(
  "action",
  (
    GuiAction("type", text="hello"),
    GuiAction("answer", text="4"),
    GuiAction("key", keys=("ctrl", "a")),
    GuiAction("wait"),
    GuiAction("terminate"),
  ),
)
def test_actions_without_a_position_survive(action):
  back = env_lib.decode_action(env_lib.encode_action(action, 128, 96), 128, 96)
  keys = ("+".join(action.keys),) if action.keys else ()
  assert (back.kind, back.text, back.keys) == (action.kind, action.text, keys)


@pytest.mark.parametrize(
  "action",
  (
    GuiAction("open_app", text="Mail"),
    GuiAction("click", x=1, y=1, button="middle"),
    GuiAction("drag", x2=3, y2=3),
    GuiAction("type", text="x" * 500),
  ),
)
def test_what_the_space_lacks_is_refused(action):
  with pytest.raises(ValueError, match="action space"):
    env_lib.encode_action(action, 128, 96)


@pytest.mark.parametrize(
  "kwargs,message",
  (
    ({"split": "test"}, "split"),
    ({"render_mode": "human"}, "render_mode"),
    ({"width": 10}, "width=10"),
    ({"difficulty": 9}, "difficulty"),
    ({"family": "nope"}, "nope"),
  ),
)
def test_wrong_settings_are_named(kwargs, message):
  with pytest.raises(ValueError, match=message):
    desktop.DesktopEnv(**kwargs)
