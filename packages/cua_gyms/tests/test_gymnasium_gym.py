"""Any gymnasium environment behind the gym protocol."""

import asyncio
import importlib.util
import threading
import time

from cua_gyms.gymnasium import gym as gymnasium_gym
import gymnasium
import numpy as np
import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import concurrency


class Corridor(gymnasium.Env):
  """A dot walks left and right; +1 at the right end, cut after ten steps."""

  metadata = {"render_modes": ["rgb_array"]}
  observation_space = gymnasium.spaces.Discrete(5)
  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, render_mode="rgb_array"):
    self.render_mode = render_mode
    self.closed = 0
    self.threads = set()
    self._canvas = np.zeros((8, 40, 3), np.uint8)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.threads.add(threading.current_thread().name)
    self.at = int(self.np_random.integers(3))
    self.steps = 0
    self.options = options
    return self.at, {"instruction": "Walk right."}

  def step(self, action):
    self.threads.add(threading.current_thread().name)
    self.at = min(4, max(0, self.at + (1 if action else -1)))
    self.steps += 1
    end = self.at == 4
    return self.at, float(end), end, self.steps >= 10, {"at": self.at}

  def render(self):
    self._canvas[:] = 0
    self._canvas[:, self.at * 8 : self.at * 8 + 8] = 255
    return self._canvas  # the same array each time, as some environments do

  def close(self):
    self.closed += 1


KEYS = gymnasium_gym.KeyAdapter({"left": 0, "right": 1})
TASK = base.Task("t/0", "corridor", seed=3)


def key(name):
  return GuiAction("key", keys=(name,))


def run(coroutine):
  return asyncio.run(asyncio.wait_for(coroutine, 60))


async def play(gym, actions, task=TASK):
  observations = [await gym.start(task)]
  for action in actions:
    observations.append(await gym.act(action))
  return observations, await gym.evaluate()


def test_an_episode_to_success():
  env = Corridor()

  async def body():
    gym = gymnasium_gym.GymnasiumGym(lambda: env, KEYS)
    observations, result = await play(gym, [key("right")] * 6)
    await gym.close()
    await gym.close()
    return observations, result

  observations, result = run(body())
  assert observations[0].instruction == "Walk right."
  assert observations[0].screenshot.shape == (8, 40, 3)
  assert observations[-1].done and result.success and result.score == 1.0
  assert observations[-1].info["ignored"] == "the episode is over"
  first, last = observations[0].screenshot, observations[-1].screenshot
  assert last[0, -1].all() and not first[0, -1].any()  # frames are copies
  assert not first.flags.writeable
  assert env.closed == 1 and env.threads == {"gymnasium-gym"}


@pytest.mark.parametrize(
  "end,least,won",
  (
    ("terminated", 1.0, False),
    ("truncated", 1.0, False),
    ("truncated", 0.0, True),
    ("any", 0.0, True),
    ("terminated", 0.0, False),
  ),
)
def test_the_success_criterion(end, least, won):
  async def body():
    gym = gymnasium_gym.GymnasiumGym(
      Corridor, KEYS, success_end=end, success_return=least
    )
    return await play(gym, [key("left")] * 10)

  observations, result = run(body())
  assert observations[-1].done and result.success is won
  assert result.details == {"return": 0.0, "end": "truncated", "turns": 10}


def test_score_can_be_the_return():
  async def body():
    gym = gymnasium_gym.GymnasiumGym(
      Corridor, KEYS, score="return", success_return=2.0
    )
    return await play(gym, [key("right")] * 5)

  _, result = run(body())
  assert result.score == 1.0 and not result.success


def test_terminate_ends_without_a_step_and_unmapped_keys_do_nothing():
  env = Corridor()

  async def body():
    gym = gymnasium_gym.GymnasiumGym(lambda: env, KEYS)
    return await play(
      gym,
      [
        key("up"),
        GuiAction("click", x=1, y=1),
        GuiAction("type", text="up"),
        GuiAction("screenshot"),
        GuiAction("terminate", success=True),
      ],
    )

  observations, result = run(body())
  assert [("ignored" in o.info) for o in observations] == [
    False,
    True,
    True,
    True,
    False,
    False,
  ]
  assert "left, right" in observations[1].info["ignored"]
  assert observations[-1].done and not result.success and env.steps == 0


def test_the_same_seed_starts_the_same_and_options_arrive():
  env = Corridor()

  async def body():
    gym = gymnasium_gym.GymnasiumGym(lambda: env, KEYS)
    task = base.Task("t", "corridor", seed=5, params={"options": {"a": 1}})
    one = await gym.start(task)
    two = await gym.start(task)
    assert env.options == {"a": 1}
    return one.screenshot, two.screenshot

  assert np.array_equal(*run(body()))


def test_frames_are_resized_and_positions_scaled_back():
  seen_actions = []

  def adapter(action):
    seen_actions.append(action)
    return 1

  async def body():
    gym = gymnasium_gym.GymnasiumGym(Corridor, adapter, size=(80, 24))
    return await play(
      gym, [GuiAction("click", x=60, y=12), GuiAction("scroll", x=8, y=3, dy=6)]
    )

  observations, _ = run(body())
  assert observations[0].screenshot.shape == (24, 80, 3)
  assert (seen_actions[0].x, seen_actions[0].y) == (30, 4)
  assert (seen_actions[1].x, seen_actions[1].y) == (4, 1)
  assert (seen_actions[1].dx, seen_actions[1].dy) == (0, 2)


class Hanging(Corridor):
  """Hangs in the first step of the first instance."""

  instances = []

  def __init__(self):
    super().__init__()
    self.free = threading.Event()
    self.number = len(self.instances)
    self.instances.append(self)

  def step(self, action):
    if self.number == 0:
      self.free.wait(30)
    return super().step(action)


def test_a_hanging_environment_is_left_and_replaced():
  Hanging.instances.clear()

  async def body():
    gym = gymnasium_gym.GymnasiumGym(Hanging, KEYS)
    await gym.start(TASK)
    ticks = 0

    async def tick():
      nonlocal ticks
      while True:
        ticks += 1
        await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    with pytest.raises(concurrency.DeadlineExceeded, match="act .* 2 s"):
      await concurrency.acall(
        gym.act, key("right"), seconds=2.0, what="the gym's act"
      )
    ticking.cancel()
    assert ticks >= 3  # the loop ran on
    with pytest.raises(RuntimeError, match="start"):
      await gym.act(key("right"))
    _, result = await play(gym, [key("right")] * 4)
    assert result.success
    await gym.close()
    hung, fresh = Hanging.instances
    hung.free.set()
    for _ in range(500):  # once free, its thread closes it
      if hung.closed:
        break
      await asyncio.sleep(0.01)
    assert hung.closed == 1 and fresh.closed == 1

  run(body())


def test_a_cancelled_call_leaves_the_environment():
  Hanging.instances.clear()

  async def body():
    gym = gymnasium_gym.GymnasiumGym(Hanging, KEYS)
    await gym.start(TASK)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(gym.act(key("right")), 0.1)
    _, result = await play(gym, [key("right")] * 4)
    assert result.success
    Hanging.instances[0].free.set()
    await gym.close()

  run(body())


def test_threads_of_hanging_environments_are_bounded(monkeypatch):
  free = threading.Event()

  class Hangs(Corridor):
    def step(self, action):
      free.wait(30)
      return super().step(action)

  world = gymnasium_gym._World
  monkeypatch.setattr(gymnasium_gym, "MAX_ABANDONED", 2)

  async def none_abandoned():
    deadline = time.monotonic() + 10  # Threads of earlier tests end soon.
    while world.abandoned:
      assert time.monotonic() < deadline, world.abandoned
      await asyncio.sleep(0.01)

  async def body():
    await none_abandoned()
    gym = gymnasium_gym.GymnasiumGym(Hangs, KEYS)
    for lost in (1, 2):
      await gym.start(TASK)
      with pytest.raises(concurrency.DeadlineExceeded):
        await concurrency.acall(gym.act, key("right"), seconds=1.0)
      assert len(world.abandoned) == lost
    with pytest.raises(concurrency.PoolExhaustedError, match="mend the env"):
      await gym.start(TASK)
    await gym.close()
    free.set()
    await none_abandoned()
    await gym.start(TASK)
    await gym.close()

  run(body())


class Broken(Corridor):
  def step(self, action):
    raise {0: ZeroDivisionError, 1: StopIteration}[action]("boom")


def test_errors_of_the_environment_arrive():
  async def body(name, error):
    gym = gymnasium_gym.GymnasiumGym(Broken, KEYS)
    await gym.start(TASK)
    with pytest.raises(error, match="boom"):
      await gym.act(key(name))
    await gym.close()

  run(body("left", ZeroDivisionError))
  run(body("right", RuntimeError))


class Picture(Corridor):
  def render(self):
    return None


@pytest.mark.parametrize(
  "make,message",
  ((lambda: Corridor(render_mode=None), "rgb_array"), (Picture, "uint8")),
)
def test_environments_without_frames_are_refused(make, message):
  async def body():
    gym = gymnasium_gym.GymnasiumGym(make, KEYS)
    with pytest.raises(ValueError, match=message):
      await gym.start(TASK)
    await gym.close()

  run(body())


@pytest.mark.peer("gymnasium")
def test_our_desktop_through_gymnasium():
  envs = []

  def make():
    envs.append(
      gymnasium.make(
        "TunixDesktop/login-form-v0",
        render_mode="rgb_array",
        width=160,
        height=112,
      )
    )
    return envs[-1]

  async def body():
    gym = gymnasium_gym.GymnasiumGym(
      make, gymnasium_gym.DesktopAdapter(160, 112)
    )
    for seed in range(3):
      observation = await gym.start(base.Task(f"t/{seed}", "login", seed=seed))
      assert '"' in observation.instruction
      while not observation.done:
        action = desktop.oracle_action(envs[0].unwrapped.gym)
        observation = await gym.act(action)
      assert (await gym.evaluate()).success
    await gym.close()

  run(body())


def test_a_config_builds_the_desktop():
  async def body():
    gym = gyms.from_config(
      {
        "name": "gymnasium",
        "env": "TunixDesktop/press-key-v0",
        "env_kwargs": {"width": 160},
        "adapter": {"type": "desktop", "width": 160},
      }
    )
    observation = await gym.start(TASK)
    assert observation.screenshot.shape == (96, 160, 3)
    observation = await gym.act(GuiAction("key", keys=("f12",)))
    assert observation.done and not (await gym.evaluate()).success
    await gym.close()

  run(body())


def test_families_may_name_the_module_that_registers_them():
  """Gymnasium loads no entry points; `module:Id` imports the module."""
  family = "tunix_multi_turn.envs:TunixDesktop/press-key-v0"
  tasks = gymnasium_gym.FamilyTasks([family])
  assert tasks.families() == (family,)
  settings = gymnasium_gym.default_settings(family)
  assert settings == {"adapter": {"type": "desktop"}}

  async def body():
    gym = gymnasium_gym.GymnasiumGym(family, **settings)
    observation = await gym.start(tasks.train_task(family, 0))
    assert observation.screenshot.shape == (96, 128, 3)
    await gym.close()

  run(body())
  for wrong in (
    "nowhere:Env-v0",
    "json:Env-v0",
    "a b",
    "x:y:z-v0",
    ":",
    "tunix_multi_turn.envs:TunixDesktop/fly-v0",
  ):
    with pytest.raises(ValueError, match="my_module:MyEnv-v0"):
      gymnasium_gym.FamilyTasks([wrong])


def test_tasks_of_an_environment():
  tasks = gymnasium_gym.GymnasiumTasks("CartPole-v1", "Balance.", 50)
  train = {tasks.train_task("CartPole-v1", i).seed for i in range(200)}
  held_out = {tasks.eval_task("CartPole-v1", i).seed for i in range(200)}
  assert max(train) < gymnasium_gym.EVAL_SEEDS_FROM <= min(held_out)
  assert tasks.task("CartPole-v1", 4).task_id == "gymnasium/CartPole-v1/4"
  with pytest.raises(ValueError, match="CartPole-v1"):
    tasks.task("Acrobot-v1", 0)


@pytest.mark.peer("gymnasium")
@pytest.mark.skipif(
  importlib.util.find_spec("pygame") is None,
  reason="gymnasium's own environments draw with pygame",
)
@pytest.mark.parametrize(
  "env_id,keys,moves",
  (
    ("CartPole-v1", {"left": 0, "right": 1}, ("left",) * 6),
    (
      "FrozenLake-v1",
      {"left": 0, "down": 1, "right": 2, "up": 3},
      ("down", "down", "right", "right", "down", "right"),
    ),
  ),
)
def test_a_real_environment(env_id, keys, moves):
  frozen = env_id == "FrozenLake-v1"

  async def body():
    gym = gymnasium_gym.GymnasiumGym(
      env_id,
      gymnasium_gym.KeyAdapter(keys),
      env_kwargs={"is_slippery": False} if frozen else None,
      size=(128, 96),
    )
    observations, result = await play(gym, [key(name) for name in moves])
    await gym.close()
    return observations, result

  observations, result = run(body())
  assert all(o.screenshot.shape == (96, 128, 3) for o in observations)
  first, last = observations[0].screenshot, observations[-1].screenshot
  assert not np.array_equal(first, last)
  assert result.success is frozen
