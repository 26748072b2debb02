"""A blocking view of any environment, and its timeout."""

import asyncio
import threading

import pytest
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.net import concurrency


class Env(base_env.BaseEnv):
  """Sync; `step` waits until `gate` is set."""

  def __init__(self):
    self.gate = threading.Event()

  def reset(self):
    return {"question": "q"}, {}

  def step(self, action):
    self.gate.wait(30)
    return {}, 1.0, True, {}


class AsyncEnv(Env):
  async def step(self, action):
    await asyncio.sleep(3600)


@pytest.mark.parametrize("env_type", [Env, AsyncEnv])
def test_timeout_bounds_sync_and_async_code(env_type):
  env = env_type()
  sync = base_env.SyncEnv(env, timeout=0.1)
  assert sync.reset() == ({"question": "q"}, {})
  with pytest.raises(concurrency.DeadlineExceeded, match=r"step .* 0.1 s"):
    sync.step("x")
  env.gate.set()
  sync.close()


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_calls_return_what_the_environment_does(timeout):
  env = Env()
  env.gate.set()
  with base_env.SyncEnv(env, timeout) as sync:
    assert sync.step("x") == ({}, 1.0, True, {})
