"""A run service that is killed under load: its runs are gone, and say so.

The service keeps runs in memory. A kill ends them; what a client must be able
to rely on is that a run of which the end was reported is whole, that the next
call about any other run is answered with a typed 404, that a dead run asks no
model, that no process stays, and that the next service serves at once.
"""

import asyncio
import collections
import random

from agent_services.runs import client as client_lib
import httpx
import nursery
import pytest
import run_services
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLIENTS = 4
STEPS = 4
MOVE = run_services.call(action="mouse_move", coordinate=[500, 500])
SERVICE = """
import tunix_multi_turn
tunix_multi_turn.light()
from agent_services.run_service import __main__ as service
from tunix.rl.multi_turn.net import connections
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import desktop_gym as gym
import uvicorn
def run(arguments):
  service.main(arguments)
"""


class Load:
  """Runs that several clients start and follow, one after the other.

  Attributes:
    calls: Model calls by the name of the run's model, one name a run.
    whole: Names of runs that were followed to their end.
    lost: Model calls by name, as its client learnt that the run is gone.
    refused: Starts that no service answered.
    faults: Errors that no client may see.
  """

  def __init__(self, url):
    self.url = url
    self.model_url = ""
    self.ending = False
    self.calls = collections.Counter()
    self.whole, self.lost = set(), {}
    self.refused = 0
    self.faults = []
    self.newest = ""  # Id of a run.

  async def answer(self, method, path, body):
    """Answers as the model server."""
    del method, path
    if not body:  # Of a service that was killed as it asked.
      return 400, {}
    self.calls[httpx.Response(200, content=body).json()["model"]] += 1
    await asyncio.sleep(0.02)
    return 200, run_services.completion(MOVE)

  async def play(self, number):
    runs = client_lib.RunServiceClient(self.url, poll_s=0.02, timeout_s=20)
    index = 0
    while not self.ending:
      index += 1
      await self._one(runs, f"{number}-{index}")
    await runs.aclose()

  async def _one(self, runs, name):
    task = gyms.get("desktop").make_tasks((), {}).train_task("click-button", 0)
    try:
      run = await runs.start({
          "task": "Move.", "agent": "tool", "maxSteps": STEPS,
          "model": {
              "baseUrl": self.model_url, "name": name, "provider": "openai",
          },
          "env": {
              "type": "gym", "gym": "desktop", "task": task.to_json(),
              "width": 128, "height": 96,
          },
      })  # fmt: skip
    except client_lib.RunServiceError as error:
      if error.answer is not None:
        self.faults.append(error)
      self.refused += 1
      await asyncio.sleep(0.05)
      return
    self.newest = run
    try:
      events = [event async for event in runs.follow(run, 30.0)]
    except client_lib.RunServiceError as error:
      code = error.answer.content if error.answer else b""
      if error.status != 404 or b'"unknown_run"' not in code:
        self.faults.append(error)
      self.lost[name] = self.calls[name]
      return
    kinds = collections.Counter(event["type"] for event in events)
    if (kinds["model_output"], kinds["run_end"], self.calls[name]) != (
      STEPS,
      1,
      STEPS,
    ):
      self.faults.append(f"run {name}: {kinds}, {self.calls[name]} calls")
    self.whole.add(name)

  async def more(self, seconds=60.0):
    """Waits until another run is whole."""
    before = len(self.whole)
    async with asyncio.timeout(seconds):
      while len(self.whole) == before:
        await asyncio.sleep(0.01)


async def test_kills_lose_runs_as_typed_failures_and_leave_nothing():
  port = nursery.free_port()
  chance = random.Random(0)
  kills = nursery.kills()
  load = Load(f"http://127.0.0.1:{port}")
  children = set()
  with (
    nursery.Nursery(SERVICE) as service,
    run_services.scripted(load.answer) as (load.model_url, _),
  ):
    await asyncio.to_thread(service.start, "--port", port)
    async with (
      asyncio.TaskGroup() as clients,
      httpx.AsyncClient(verify=False, trust_env=False) as direct,
    ):
      for number in range(CLIENTS):
        clients.create_task(load.play(number))
      for _ in range(kills):
        await load.more()
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        children |= nursery.descendants(service.pid)
        former = load.newest
        await asyncio.to_thread(service.end)
        await asyncio.to_thread(service.start, "--port", port)
        for path in ("", "/events", "/steps", "/trajectory", "/tokens"):
          reply = await direct.get(f"{load.url}/runs/{former}{path}")
          assert (reply.status_code, reply.json()["code"]) == (
            404,
            "unknown_run",
          )
      await load.more()
      load.ending = True
    await asyncio.sleep(1.0)
    children |= nursery.descendants(service.pid)
  print(
    f"{kills} kills: {len(load.whole)} runs whole, {len(load.lost)} lost,"
    f" {load.refused} starts unanswered, {sum(load.calls.values())} calls"
  )
  assert not load.faults
  assert load.lost and load.whole
  assert all(load.calls[name] == calls for name, calls in load.lost.items())
  assert not nursery.outliving(children), "processes outlive their service"
