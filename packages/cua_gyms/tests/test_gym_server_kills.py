"""A gym server that is killed under load: lost episodes are typed failures.

The server keeps executions in memory. A kill ends them; what a client must be
able to rely on is that no step was carried out twice, that its next call says
that the execution is gone, that no process stays, and that the next server
serves at the same port at once.
"""

import asyncio
import collections
import dataclasses
import random

from cua_gyms import genv
import gym_servers
import httpx
import nursery
import pytest
import scripted_http
import tenacity
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.tools import screenshot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WAIT = gui_action.GuiAction("wait")
EAGER = {
  kind: dataclasses.replace(policy, tries=40, wait=tenacity.wait_fixed(0.1))
  for kind, policy in genv.RETRIES.items()
}
"""Retries of a client that does not wait 10 s for a server to start."""
CLIENTS = 6
STEPS = 8
SERVER = """
import tunix_multi_turn
tunix_multi_turn.light()
from tunix.rl.multi_turn.net import connections
from cua_gyms.gym_server import __main__ as server
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import desktop_gym as gym
import uvicorn
def run(arguments):
  server.main(arguments)
"""


class Load:
  """Episodes that are played one after the other by several clients.

  Attributes:
    started: Ids of executions.
    steps: Acknowledged steps.
    ends: Episodes, by their end: "whole", or the class of the error.
    faults: Errors that no client may see.
  """

  def __init__(self, url, gym_id):
    self.url, self.gym_id = url, gym_id
    self.ending = False
    self.started = set()
    self.steps = 0
    self.ends = collections.Counter()
    self.faults = []

  async def play(self, number):
    index = 0
    async with httpx.AsyncClient(
      base_url=f"{self.url}/api/v1/{self.gym_id}",
      verify=False,
      trust_env=False,
      timeout=20,
    ) as direct:
      while not self.ending:
        index += 1
        client = genv.GenvClient(self.url, self.gym_id, retries=EAGER)
        gym = gym_servers.gym(self.url, self.gym_id, client=client)
        try:
          await self._episode(gym, direct, 1000 * number + index)
          self.ends["whole"] += 1
        except genv.GenvError as error:
          self.ends[type(error).__name__] += 1
          if not isinstance(
            error, (genv.GenvExecutionLostError, genv.GenvUnavailableError)
          ):
            self.faults.append(error)
          await asyncio.sleep(0.05)
        finally:
          await gym.close()

  async def _episode(self, gym, direct, index):
    await gym.start(gym_servers.instance("enter-text", index % 500))
    execution = gym.execution_id
    if execution in self.started:
      self.faults.append(f"execution {execution} was created twice")
    self.started.add(execution)
    for step in range(1, STEPS + 1):
      await gym.act(WAIT)
      self.steps += 1
      try:
        answer = await direct.get(f"/executions/{execution}")
      except httpx.TransportError:
        continue
      if answer.status_code == 200 and answer.json()["steps"] != step:
        self.faults.append(f"{answer.json()['steps']} steps, not {step}")

  async def more(self, seconds=60.0):
    """Waits until another step is acknowledged."""
    before = self.steps
    async with asyncio.timeout(seconds):
      while self.steps == before:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 2])
async def test_kills_lose_episodes_as_failures_and_leave_nothing(workers):
  port = nursery.free_port()
  chance = random.Random(workers)
  kills = nursery.kills(3 if workers else 5)  # Each imports everything.
  load = Load(f"http://127.0.0.1:{port}", "desktop")
  arguments = ("desktop", "--port", port, "--workers", workers)
  orphans = []
  with nursery.Nursery(SERVER) as server:
    await asyncio.to_thread(server.start, *arguments)
    async with asyncio.TaskGroup() as clients:
      for number in range(CLIENTS):
        clients.create_task(load.play(number))
      for _ in range(kills):
        await load.more()
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        children = nursery.descendants(server.pid)
        assert bool(children) == bool(workers)
        former = max(load.started)
        await asyncio.to_thread(server.end)
        orphans += await asyncio.to_thread(nursery.outliving, children)
        await asyncio.to_thread(server.start, *arguments)
        async with httpx.AsyncClient(verify=False, trust_env=False) as direct:
          reply = await direct.get(
            f"{load.url}/api/v1/desktop/executions/{former}"
          )
        assert (reply.status_code, reply.json()["code"]) == (
          404,
          "unknown_execution",
        )
      await load.more()
      load.ending = True
    children = nursery.descendants(server.pid)
  orphans += await asyncio.to_thread(nursery.outliving, children)
  print(
    f"{kills} kills, {workers} workers: {len(load.started)} executions,"
    f" {load.steps} steps acknowledged, {dict(load.ends)}"
  )
  assert not load.faults
  assert not orphans, "processes outlive their server"
  assert load.ends["whole"] and load.ends["GenvExecutionLostError"]


async def test_an_episode_whose_server_is_killed_is_the_environment_s_failure():
  port = nursery.free_port()
  store = images.ImageStore()
  with nursery.Nursery(SERVER) as server:

    def start():
      server.start("desktop", "--port", port)

    async def model(messages):
      del messages
      await asyncio.to_thread(server.end)
      await asyncio.to_thread(start)
      return scripted_http.call(action="mouse_move", coordinate=[5, 5])

    await asyncio.to_thread(start)
    env = cua_env.CUAEnv(
      gym_servers.gym(f"http://127.0.0.1:{port}"),
      screenshot.ScreenshotTool(store),
      gym_servers.instance("enter-text", 1),
    )
    engine = tc.TrajectoryCollectEngine(tool_agent.ToolAgent(), env, model)
    episode = await engine.collect()
  assert episode.status is trajectory.TrajectoryStatus.ENV_ERROR
  assert "GenvExecutionLostError" in episode.error
  assert "404" in episode.error
