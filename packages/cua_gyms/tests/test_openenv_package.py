"""The package `openenv` itself, at either end.

It lives in an environment of its own, made by `make openenv`: what it asks for
does not go together with what this project pins. Skipped where there is none.
"""

import asyncio
import json
import os
import pathlib
import socket
import subprocess

from cua_gyms.openenv import openenv_gym as openenv
from cua_gyms.openenv import openenv_tasks
import gym_servers
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop

_ROOT = pathlib.Path(__file__).parents[3]
PYTHON = pathlib.Path(
  os.environ.get("OPENENV_PYTHON", _ROOT / ".venv-openenv/bin/python")
)
PEER = _ROOT / "packages/cua_gyms/tests/helpers/openenv_peer.py"
pytestmark = [
  pytest.mark.peer("openenv"),
  pytest.mark.skipif(not PYTHON.exists(), reason="no openenv: make openenv"),
  # The package takes 10 s to import on a busy machine.
  pytest.mark.timeout(240),
]
GuiAction = gui_action.GuiAction


def _solution():
  gym, actions = desktop.DesktopGym(), []
  gym.start_sync(desktop.DesktopTasks().train_task("click-button", 0, 0))
  while (action := desktop.oracle_action(gym)) is not None:
    gym.act_sync(action)
    actions.append(action)
  return [GuiAction("wait").to_json(), *(a.to_json() for a in actions)]


async def test_openenvs_own_clients_play_our_gyms():
  """Its generic and its typed client, each in a process of its own."""
  with gym_servers.serving(capacity=4) as (url, app):
    where = url + "/openenv/desktop"

    async def run(what):
      process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        str(PEER),
        what,
        where,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
      )
      out, _ = await asyncio.wait_for(
        process.communicate(json.dumps(_solution()).encode()), 200
      )
      return json.loads(out)

    played, typed = await asyncio.gather(run("play"), run("typed"))
    await gym_servers.until(lambda: not app.store.open)
  assert played["screen"] == [128, 96] and played["instruction"]
  assert played["first"] == [None, False]
  assert played["last"] == [1.0, True] and played["evaluation"] is True
  assert played["state"]["step_count"] == len(_solution())
  assert "reset begins another" in played["over"]
  assert "VALIDATION_ERROR" in played["refused"]
  assert "action.x" in played["refused"]
  assert played["child"]
  assert typed == {
    "last": [1.0, True],
    "steps": len(_solution()),
    "metadata": ["episode_id", "evaluation", "task_id"],
  }


@pytest.fixture(scope="module", name="lamps")
def _lamps():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  process = subprocess.Popen(
    [PYTHON, PEER, "serve", str(port)], stdin=subprocess.PIPE
  )
  try:
    for _ in range(800):
      with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
          break
      assert process.poll() is None, "the server has ended"
      asyncio.run(asyncio.sleep(0.25))
    yield f"http://127.0.0.1:{port}"
  finally:
    process.stdin.close()
    try:
      process.wait(30)
    finally:
      process.kill()


async def test_a_server_of_openenvs_own_is_a_gym(lamps):
  gym = openenv.OpenEnvGym(lamps, width=40, height=30)
  shown = await gym.start(base.Task("t", "lamp", seed=12))
  assert shown.screenshot.shape == (30, 40, 3)
  assert shown.screenshot[12, 12].tolist() == [255, 255, 0]
  assert shown.instruction == "Click the lamp."
  missed = await gym.act(GuiAction("click", x=1, y=1))
  assert not missed.done
  hit = await gym.act(GuiAction("click", x=12, y=12))
  assert hit.done
  verdict = await gym.evaluate()
  assert verdict.score == 1.0 and verdict.success
  await gym.close()


async def test_its_refusals_and_failures_are_typed_errors(lamps):
  gyms = [openenv.OpenEnvGym(lamps) for _ in range(2)]
  for gym in gyms:
    await gym.start(base.Task("t", "lamp"))
  full = openenv.OpenEnvGym(lamps, timeouts={"start": 0.5})
  with pytest.raises(openenv.OpenEnvCapacityError):
    await full.start(base.Task("t", "lamp"))
  # An action that it does not take is the policy's fault: it reads so.
  answer = await gyms[0].act(GuiAction("scroll", dx=1.0))
  assert answer.text.startswith("Error: ") and "dx" in answer.text
  bad = openenv.OpenEnvGym(lamps, actions=lambda a: {"kind": "explode"})
  await gyms[1].close()
  await bad.start(base.Task("t", "lamp"))
  with pytest.raises(openenv.OpenEnvError, match="lamp is broken") as caught:
    await bad.act(GuiAction("wait"))
  assert caught.value.code == "EXECUTION_ERROR"
  await bad.close()
  await gyms[0].close()


async def test_a_server_without_tasks_is_given_seeds(lamps):
  tasks = await asyncio.to_thread(
    openenv_tasks.server_tasks, (), base_url=lamps
  )
  assert isinstance(tasks, openenv_tasks.SeededTasks)
  (family,) = tasks.families()
  gym = openenv.OpenEnvGym(lamps)
  await gym.start(tasks.train_task(family, 0, 1))
  await gym.close()
