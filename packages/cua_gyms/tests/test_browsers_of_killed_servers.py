"""A gym server that is killed leaves no browser behind."""

import asyncio

import browsers
from cua_gyms import genv
import nursery
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

pytestmark = [*browsers.needed(), pytest.mark.slow, pytest.mark.timeout(300)]
WAIT = gui_action.GuiAction(gui_action.GuiActionKind.WAIT, duration=0.05)
TASK = base.Task(
  "click-test",
  "click-test",
  params={"genv": {"identifier": "click-test@train:0:0"}},
)
SERVER = """
import tunix_multi_turn
tunix_multi_turn.light()
from tunix.rl.multi_turn.net import connections
from cua_gyms.gym_server import __main__ as server
from cua_gyms import miniwob
import uvicorn
def run(arguments):
  server.main(arguments)
"""


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_killed_server_leaves_no_browser(workers):
  port = nursery.free_port()
  with nursery.Nursery(SERVER) as server:
    for _ in range(2):
      await asyncio.to_thread(
          server.start, "miniwob", "--families", "click-test", "--port", port,
          "--workers", workers,
      )  # fmt: skip
      gym = genv.GenvGym(f"http://127.0.0.1:{port}", "miniwob")
      await gym.start(TASK)
      await gym.act(WAIT)
      children = nursery.descendants(server.pid)
      assert len(children) > 1 + workers  # A browser is several processes.
      await asyncio.to_thread(server.end)
      assert not await asyncio.to_thread(nursery.outliving, children)
      with pytest.raises(genv.GenvUnavailableError):
        await gym.act(WAIT)
      await gym.close()
