"""`miniwob` and `browser` behind the gym server, in its worker processes."""

import asyncio
import os
import pathlib
import signal
import time

import browsers
from cua_gyms import genv
from cua_gyms import miniwob
from cua_gyms import workers as workers_lib
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import gym_app
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.net import http_server
import web_sites

# A process imports everything once, on two cores perhaps shared with others.
pytestmark = [*browsers.needed(), pytest.mark.timeout(240)]
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
WAIT = Action(Kind.WAIT, duration=0.05)


def named(name: str) -> base.Task:
  return base.Task(
    name, name.split("@")[0], params={"genv": {"identifier": name}}
  )


def client(url: str, gym_id: str) -> genv.GenvGym:
  return genv.GenvGym(base_url=url, gym_id=gym_id)


def children(parent: int) -> list[int]:
  """Chromium processes below a process; they lead groups of their own."""
  pids = []
  for entry in pathlib.Path("/proc").iterdir():
    if not entry.name.isdigit():
      continue
    try:
      fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
      chromium = b"--remote-debugging-pipe" in (entry / "cmdline").read_bytes()
    except OSError:
      continue
    if chromium and int(fields[1]) == parent and fields[0] != "Z":
      pids.append(int(entry.name))
  return pids


async def test_both_are_served_from_processes_that_may_die():
  ears = web_sites.Ears()
  site = web_sites.Site(ears.port)
  specs = [
      catalog.ServedGym(
          gym_id="miniwob", gym="miniwob", families=("click-test", "click-tab"),
          train_tasks=2, eval_tasks=1,
      ),
      catalog.ServedGym(
          gym_id="site", gym="browser",
          settings={
              "evaluator": "web_sites:greeted", "width": 400, "height": 420,
              "start_urls": [site.url],
              "pages": {"greet": {"url": site.url + "/?seed={seed}"}},
          },
          train_tasks=2, eval_tasks=1,
      ),
  ]  # fmt: skip
  workers = workers_lib.GymWorkers(2, imports=("web_sites",))
  app = gym_app.App(specs, make_gym=workers.make, close=workers.aclose)
  try:
    with http_server.LoopbackServer(app.asgi) as server:
      await _play(server.url, workers)
  finally:
    site.close()
    ears.close()
  assert app.store.open == 0 and not workers.pids


async def _play(url: str, workers: workers_lib.GymWorkers) -> None:
  own = miniwob.MiniWobGym(browser=miniwob.Browser())
  task = miniwob.MiniWobTasks().train_task("click-test", 0, 0)
  expected = await own.start(task)
  action = await miniwob.oracle_action(own)
  served = named("click-test@train:0:0")
  one, two = (client(url, "miniwob") for _ in range(2))
  observations = [await gym.start(served) for gym in (one, two)]
  for observation in observations:
    np.testing.assert_array_equal(observation.screenshot, expected.screenshot)
    assert observation.instruction == expected.instruction
  site = client(url, "site")
  shown = await site.start(named("greet@eval:0:0"))
  number = seeds.eval_seed("greet", 0, 0, 10**9)
  assert shown.instruction.startswith(f"Greet seed {number}")
  for act in (
    Action(Kind.CLICK, x=60, y=22),
    Action(Kind.TYPE, text=str(number)),
    Action(Kind.CLICK, x=60, y=62),
  ):
    await site.act(act)
  assert (await site.evaluate()).success
  await site.close()

  # One of the two processes is killed; its browser ends with it.
  victim = workers.pids[0]
  browsers = children(victim)
  assert browsers
  os.kill(victim, signal.SIGKILL)
  outcomes = await asyncio.gather(
    one.act(action), two.act(action), return_exceptions=True
  )
  lost = [o for o in outcomes if isinstance(o, Exception)]
  assert len(lost) == 1 and isinstance(lost[0], genv.GenvExecutionLostError)
  alive = two if isinstance(outcomes[0], Exception) else one
  assert (await alive.evaluate()).success
  end = time.monotonic() + 20
  while any(pathlib.Path(f"/proc/{pid}").exists() for pid in browsers):
    assert time.monotonic() < end, "a browser outlived its process"
    await asyncio.sleep(0.1)
  fresh = client(url, "miniwob")
  assert not (await fresh.start(served)).done
  for gym in (one, two, fresh):
    await gym.close()
  await own.close()
  await own._given_browser.close()  # pylint: disable=protected-access
