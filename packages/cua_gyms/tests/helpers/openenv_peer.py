"""Runs in an environment that has the package `openenv`, and not this one.

    openenv_peer.py play URL     plays our desktop with its generic client
    openenv_peer.py typed URL    the same with a typed one
    openenv_peer.py serve PORT   serves an environment of its own

`serve` ends when its standard input does.
"""

import asyncio
import json
import sys
import threading

from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action
from openenv.core.env_server.types import Observation
from openenv.core.env_server.types import State


class GuiAction(Action):
  kind: str
  x: float | None = None
  y: float | None = None
  text: str | None = None
  button: str = "left"
  count: int = 1


class Screen(Observation):
  screenshot: list = []
  instruction: str = ""
  text: str = ""


class Board(State):
  lit: int = 0


class LampEnvironment(Environment):
  """A lamp at a pixel of the seed; clicking it wins."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def __init__(self):
    super().__init__()
    self._state = Board()
    self._lamp = (0, 0)

  def reset(self, seed=None, episode_id=None, **kwargs):
    number = seed or 0
    self._lamp = (number % 40, number % 30)
    self._state = Board(episode_id=episode_id or "one", step_count=0)
    return self._show()

  def step(self, action, timeout_s=None, **kwargs):
    if action.kind == "explode":
      raise RuntimeError("the lamp is broken")
    self._state.step_count += 1
    hit = (
      action.kind == "click"
      and (round(action.x), round(action.y)) == self._lamp
    )
    return self._show(float(hit), hit)

  @property
  def state(self):
    return self._state

  def _show(self, reward=None, done=False):
    rows = [[[0, 0, 0] for _ in range(40)] for _ in range(30)]
    x, y = self._lamp
    rows[y][x] = [255, 255, 0]
    return Screen(
      screenshot=rows, instruction="Click the lamp.", reward=reward, done=done
    )


class TypedClient(EnvClient[GuiAction, Screen, State]):
  def _step_payload(self, action):
    return action.model_dump()

  def _parse_result(self, payload):
    shown = payload["observation"]
    seen = Screen(
      screenshot=[shown["screenshot"]["width"]],
      instruction=shown["instruction"],
      text=shown["text"],
      done=payload["done"],
      reward=payload["reward"],
      metadata=shown["metadata"],
    )
    return StepResult(seen, seen.reward, seen.done)

  def _parse_state(self, payload):
    return State(**payload)


async def play(url):
  out = {}
  async with GenericEnvClient(base_url=url) as env:
    first = await env.reset(task="click-button@train:0:0")
    shown = first.observation["screenshot"]
    out["screen"] = [shown["width"], shown["height"]]
    out["instruction"] = first.observation["instruction"]
    out["first"] = [first.reward, first.done]
    for action in json.loads(sys.stdin.read()):
      result = await env.step(action)
    out["last"] = [result.reward, result.done]
    out["evaluation"] = result.metadata["evaluation"]["success"]
    out["state"] = await env.state()
    try:
      await env.step({"kind": "click"})
    except RuntimeError as error:
      out["over"] = str(error)
    await env.reset(seed=7)
    try:
      await env.step({"kind": "click", "x": "a", "y": 1})
    except RuntimeError as error:
      out["refused"] = str(error)
    child = await env.new_session()
    second = await child.reset(seed=7)
    out["child"] = second.observation["instruction"]
  return out


async def typed(url):
  async with TypedClient(base_url=url) as env:
    await env.reset(task="click-button@train:0:0")
    result = None
    for action in json.loads(sys.stdin.read()):
      action.pop("keys", None)
      result = await env.step(GuiAction(**action))
    state = await env.state()
    return {
      "last": [result.reward, result.done],
      "steps": state.step_count,
      "metadata": sorted(result.observation.metadata),
    }


def serve(port):
  import uvicorn

  app = create_fastapi_app(
    LampEnvironment, GuiAction, Screen, max_concurrent_envs=2
  )
  server = uvicorn.Server(
    uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
  )

  def end():
    sys.stdin.read()
    server.should_exit = True

  threading.Thread(target=end, daemon=True).start()
  server.run()


if __name__ == "__main__":
  what, where = sys.argv[1:]
  if what == "serve":
    serve(int(where))
  else:
    print(json.dumps(asyncio.run({"play": play, "typed": typed}[what](where))))
