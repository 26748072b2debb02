"""The pages of MiniWoB++ as a gymnasium environment."""

import asyncio

import browsers
from cua_gyms import miniwob
import gymnasium
from tunix.rl.multi_turn.environments.gyms.desktop import env as desktop_env

import tunix_multi_turn.envs

pytestmark = browsers.needed()


def test_pages_are_made_and_solved_by_their_id():
  tunix_multi_turn.envs.register()
  env = gymnasium.make("Tunix/miniwob-v0", family="click-test-2")
  observation, _ = env.reset(seed=0)
  assert observation["screenshot"].shape == (210, 160, 3)
  world = env.unwrapped
  # pylint: disable-next=protected-access
  oracle = asyncio.run_coroutine_threadsafe(
    miniwob.oracle_action(world.gym), world._sync._loop
  ).result(20)
  encoded = desktop_env.encode_action(oracle, 160, 210)
  _, reward, ended, _, info = env.step(encoded)
  assert ended and info["success"] and reward > 0
  env.close()
