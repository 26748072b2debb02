"""Gyms in processes of their own: equal to others, and walled off."""

import asyncio
import os
import signal

from cua_gyms import genv
from cua_gyms import workers as workers_lib
from cua_gyms.gym_server import gym_app
import gym_servers
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import http_server

# A process imports everything once, on two cores perhaps shared with others.
pytestmark = pytest.mark.timeout(240)
WAIT = gui_action.GuiAction("wait")


@pytest.fixture(name="workers")
async def _workers():
  workers = workers_lib.GymWorkers(2, imports=("gym_servers",))
  yield workers
  pids = workers.pids
  await workers.aclose()
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


async def test_gyms_in_processes_are_the_same_gyms(workers):
  gyms = [await workers.make({"name": "desktop"}) for _ in range(4)]
  assert len(workers.pids) == 2
  for i, gym in enumerate(gyms):
    task = desktop.DesktopTasks().train_task("click-button", i, 0)
    own = desktop.DesktopGym()
    np.testing.assert_array_equal(
      (await gym.start(task)).screenshot, own.start_sync(task).screenshot
    )
    action = desktop.oracle_action(own)
    own.act_sync(action)
    assert (await gym.act(action)).done
    assert await gym.evaluate() == own.evaluate_sync()
    await gym.close()
    await gym.close()
  with pytest.raises(workers_lib.WorkerGymError, match="no episode"):
    bare = await workers.make({"name": "desktop"})
    await bare._worker.call(bare._id, "make", {"name": "desktop"})  # pylint: disable=protected-access
    await bare.act(WAIT)


async def test_a_call_that_is_given_up_ends_in_its_process(workers):
  gym = await workers.make({"name": "naughty"})
  with pytest.raises(TimeoutError):
    async with asyncio.timeout(0.5):
      await gym.start(gym_servers.NaughtyTasks(()).train_task("hang-start", 0))
  other = await workers.make({"name": "naughty"})
  await other.start(gym_servers.NaughtyTasks(()).train_task("ok", 0))
  await other.close()


async def test_kill_9_of_a_worker_ends_its_episodes_and_no_other():
  """Behind the server: a typed error, new executions in a new process."""
  workers = workers_lib.GymWorkers(2)
  app = gym_app.App(
    [gym_servers.desktop()], make_gym=workers.make, close=workers.aclose
  )
  with http_server.LoopbackServer(app.asgi) as server:
    gyms = [gym_servers.gym(server.url) for _ in range(6)]
    for i, gym in enumerate(gyms):
      await gym.start(gym_servers.instance("enter-text", i))
    before = set(workers.pids)
    assert len(before) == 2
    victim = min(before)
    # One is in the middle of a call when it happens.
    calls = [asyncio.ensure_future(gym.act(WAIT)) for gym in gyms]
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*calls, return_exceptions=True)
    outcomes = await asyncio.gather(
      *(gym.act(WAIT) for gym in gyms), return_exceptions=True
    )
    lost = [o for o in outcomes if isinstance(o, Exception)]
    assert len(lost) == 3, outcomes
    for error in lost:
      assert isinstance(error, genv.GenvExecutionLostError)
      assert error.code == "worker_died"
    await gym_servers.until(lambda: app.store.open == 3)
    fresh = [gym_servers.gym(server.url) for _ in range(2)]
    for gym in fresh:
      await gym.start(gym_servers.instance("enter-text", 9))
      await gym.act(WAIT)
    # A loss is noticed without any call.
    os.kill(workers.pids[0], signal.SIGKILL)
    await gym_servers.until(
      lambda: any(e.code == "worker_died" for e in app.store.reap())
    )
    extra = gym_servers.gym(server.url)
    await extra.start(gym_servers.instance("enter-text", 1))
    await extra.close()
    after = set(workers.pids)
    assert victim not in after and len(after) == 2 and workers.deaths == 2
    for gym in gyms + fresh:
      await gym.close()
    assert app.store.open == 0
  assert not workers.pids
