"""Any gym as a gymnasium environment."""

import time
import warnings

import gym_servers
import gymnasium
from gymnasium.utils import env_checker
import numpy as np
import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms import gym_env
from tunix.rl.multi_turn.environments.gyms.desktop import env as desktop_env
from tunix.rl.multi_turn.net import concurrency

from tunix_multi_turn import envs

SIZE = {"width": 128, "height": 96}


def act(action, width=128, height=96):
  return desktop_env.encode_action(action, width, height)


def naughty(family, **more):
  more = {"width": 48, "height": 32, **more}
  return gym_env.GymEnv("naughty", family, **more)


def test_the_ids_are_gyms_that_make_their_own_tasks():
  assert envs.GymEnv is gym_env.GymEnv
  for name in envs.GYMS:
    assert gyms.get(name).tasks is not None
    assert gymnasium.spec(f"Tunix/{name}-v0").kwargs == {"gym": name}


def test_passes_gymnasiums_own_checker():
  env = gym_env.GymEnv("desktop", render_mode="rgb_array", **SIZE)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    env_checker.check_env(env, skip_render_check=True)
  env.close()


@pytest.mark.parametrize("split", ("train", "eval"))
def test_it_plays_the_episodes_of_the_desktops_own_environment(split):
  settings = {"split": split, **SIZE}
  one = gym_env.GymEnv(
    "desktop", "enter-text", options={"difficulty": 1}, **settings
  )
  two = desktop_env.DesktopEnv("enter-text", difficulty=1, **settings)
  for seed in range(3):
    a, info = one.reset(seed=seed)
    b, other = two.reset(seed=seed)
    assert info["task_id"] == other["task_id"]
    over = False
    while not over:
      assert np.array_equal(a["screenshot"], b["screenshot"])
      assert a["instruction"] == b["instruction"] == info["instruction"]
      action = act(desktop.oracle_action(two.gym))
      a, *ends, info = one.step(action)
      b, *outcome, _ = two.step(action)
      assert ends == outcome
      over = ends[1] or ends[2]
    assert ends == [1.0, True, False] and info["success"] is True
    with pytest.raises(RuntimeError, match="call reset"):
      one.step(action)
  one.close()


def test_an_episode_is_truncated_and_judged_after_its_turns():
  env = naughty("ok", turns=2)
  env.reset(seed=0)
  wait = act(GuiAction("wait"))
  assert env.step(wait)[1:4] == (0.0, False, False)
  _, reward, ended, cut, info = env.step(wait)
  assert (reward, ended, cut, info["success"]) == (0.25, False, True, False)
  gym_servers.NaughtyGym.open_now = 1
  env.close()
  env.close()
  assert gym_servers.NaughtyGym.open_now == 0


def test_a_gym_that_hangs_is_given_up_and_closed_in_time():
  env = naughty("hang-start", timeout=0.3)
  began = time.monotonic()
  with pytest.raises(concurrency.DeadlineExceeded, match="0.3 s"):
    env.reset(seed=0)
  env.close()
  assert time.monotonic() - began < 10


@pytest.mark.parametrize(
  "family, kind", (("fail-start", RuntimeError), ("fail-step", ValueError))
)
def test_a_gyms_own_error_arrives_as_it_is(family, kind):
  env = naughty(family)
  with pytest.raises(kind, match="no screen|window is gone"):
    env.reset(seed=0)
    env.step(act(GuiAction("wait")))
  env.close()


def test_what_the_instructions_space_lacks_is_a_question_mark():
  class Gym(gym_servers.NaughtyGym):
    async def start(self, task):
      observation = await super().start(task)
      return base.Observation(observation.screenshot, "Drück “OK” ☺")

  spec = gyms.GymSpec(make=Gym, tasks=gym_servers.NaughtyTasks)
  gyms.register("umlauts", spec)
  try:
    env = gym_env.GymEnv("umlauts", "ok", width=48, height=32)
    observation, info = env.reset(seed=0)
    assert observation["instruction"] == "Dr?ck ?OK? ?"
    assert info["instruction"] == "Drück “OK” ☺"
    assert env.observation_space.contains(observation)
    env.close()
  finally:
    gyms.unregister("umlauts")


@pytest.mark.parametrize(
  "kwargs, words",
  (
    ({"gym": "nothing"}, "unknown gym 'nothing'"),
    ({"gym": "desktop"}, "give width and height"),
    ({"gym": "desktop", "split": "test", **SIZE}, "split"),
    ({"gym": "desktop", "render_mode": "human", **SIZE}, "render_mode"),
    ({"gym": "desktop", "family": "nope", **SIZE}, "nope"),
    ({"gym": "desktop", "turns": 0, **SIZE}, "turns=0"),
    ({"gym": "desktop", "timeout": -1, **SIZE}, "timeout=-1"),
    ({"gym": "desktop", "options": {"colour": 1}, **SIZE}, "colour"),
    ({"gym": "miniwob", "width": 64, "height": 64}, "at least 160x210"),
  ),
)
def test_wrong_settings_are_named(kwargs, words):
  with pytest.raises(ValueError, match=words):
    gym_env.GymEnv(**kwargs)


def test_another_size_than_the_gyms_is_named():
  env = naughty("ok", width=64, height=64)
  with pytest.raises(ValueError, match="give width=48, height=32"):
    env.reset(seed=0)
  env.close()
