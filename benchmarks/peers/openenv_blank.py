"""The environment of blank_gym.py, on the server of the package `openenv`.

Runs in the environment that `make openenv` makes:

    openenv_blank.py PORT SESSIONS SCREENSHOT

SCREENSHOT is the JSON that an observation holds. Prints "ready"; ends when its
standard input does.
"""

import json
import sys
import threading

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action
from openenv.core.env_server.types import Observation
from openenv.core.env_server.types import State
import uvicorn

PORT, SESSIONS, SHOT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class GuiAction(Action):
  kind: str
  x: float | None = None
  y: float | None = None
  duration: float | None = None


class Screen(Observation):
  screenshot: dict = {}
  instruction: str = ""
  text: str = ""


class BlankEnvironment(Environment):
  """Shows the same screen after every action."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def __init__(self):
    super().__init__()
    self._state = State()
    self._shot = json.loads(SHOT)

  def reset(self, seed=None, episode_id=None, **kwargs):
    self._state = State(episode_id=episode_id or "one", step_count=0)
    return Screen(screenshot=self._shot, instruction="Wait.", done=False)

  def step(self, action, timeout_s=None, **kwargs):
    self._state.step_count += 1
    return Screen(screenshot=self._shot, reward=0.0, done=False)

  @property
  def state(self):
    return self._state


def main():
  app = create_fastapi_app(
    BlankEnvironment, GuiAction, Screen, max_concurrent_envs=SESSIONS
  )
  server = uvicorn.Server(
    uvicorn.Config(app, host="127.0.0.1", port=PORT, log_level="warning")
  )

  def end():
    sys.stdin.read()
    server.should_exit = True

  threading.Thread(target=end, daemon=True).start()
  print("ready", flush=True)
  server.run()


main()
