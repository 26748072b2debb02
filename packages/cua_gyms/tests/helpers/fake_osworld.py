"""OSWorld's in-VM server as its source has it, with a desktop on its screen.

Commands are real: `/execute` runs them, in a home of their own and with a
module `pyautogui` whose functions have that package's signatures and act on the
desktop over HTTP. `log` has each request's path and body.
"""

import asyncio
import email
import email.policy
import os
import pathlib
import shlex
import subprocess
import sys
import urllib.parse

from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import desktop

# The signatures are those of PyAutoGUI 0.9.54.
_PYAUTOGUI = """
import json, os, urllib.request
FAILSAFE = True
_BUTTONS = ("left", "middle", "right", "primary", "secondary")

def _send(**action):
  request = urllib.request.Request(
      os.environ["FAKE_SCREEN"], json.dumps(action).encode())
  urllib.request.urlopen(request, timeout=60).read()

def click(x=None, y=None, clicks=1, interval=0.0, button="primary",
          duration=0.0, tween=None, logScreenshot=None, _pause=True):
  assert button in _BUTTONS
  _send(kind="click", x=x, y=y, count=clicks, button=button)

def moveTo(x=None, y=None, duration=0.0, tween=None, logScreenshot=False,
           _pause=True):
  _send(kind="move", x=x, y=y)

def dragTo(x=None, y=None, duration=0.0, tween=None, button="primary",
           logScreenshot=None, _pause=True, mouseDownUp=True):
  _send(kind="drag", x2=x, y2=y)

def scroll(clicks, x=None, y=None, logScreenshot=None, _pause=True):
  _send(kind="scroll", dy=-20.0 * clicks)

def hscroll(clicks, x=None, y=None, logScreenshot=None, _pause=True):
  _send(kind="scroll", dx=20.0 * clicks)

def typewrite(message, interval=0.0, logScreenshot=None, _pause=True):
  _send(kind="type", text=message)

def hotkey(*args, interval=0.0, logScreenshot=None):
  _send(kind="key", keys=list(args))

def keyDown(key, logScreenshot=None, _pause=True):
  _send(kind="wait")

def keyUp(key, logScreenshot=None, _pause=True):
  _send(kind="wait")

def mouseDown(x=None, y=None, button="primary", duration=0.0, tween=None,
              logScreenshot=None, _pause=True):
  _send(kind="move", x=x, y=y)

mouseUp = mouseDown
"""


class FakeOSWorld:
  """An ASGI application; `url` must be set once it is served."""

  def __init__(self, task, home: pathlib.Path):
    self.gym = desktop.DesktopGym()
    self.task = task
    self.gym.start_sync(task)
    self.home = home
    self.url = ""
    self.log = []
    self.broken = set()
    self.hang_s = 0.0
    (home / "lib").mkdir()
    (home / "lib" / "pyautogui.py").write_text(_PYAUTOGUI)
    get, post = ["GET"], ["POST"]
    self.asgi = applications.Starlette(
      routes=[
        routing.Route("/screenshot", self._screenshot, methods=get),
        routing.Route("/terminal", self._terminal, methods=get),
        routing.Route("/screen_size", self._size, methods=post),
        routing.Route("/execute", self._execute, methods=post),
        routing.Route("/file", self._file, methods=post),
        routing.Route("/list_directory", self._list, methods=post),
        routing.Route("/setup/upload", self._upload, methods=post),
        routing.Route("/setup/{what}", self._set_up, methods=post),
        routing.Route("/fake/act", self._act, methods=post),
      ]
    )

  def revert(self, url):
    """Restores the machine's first state, as a provider does."""
    assert url == self.url
    self.log.append(("revert", url))
    self.gym.start_sync(self.task)

  def _path(self, given):
    return pathlib.Path(str(given).replace("~", str(self.home)))

  async def _screenshot(self, request):
    self.log.append(("screenshot", None))
    await asyncio.sleep(self.hang_s)
    if "screenshot" in self.broken:
      return responses.Response(b"<html>", media_type="image/png")
    return responses.Response(
      wire.to_png(self.gym.scene.screenshot()), media_type="image/png"
    )

  async def _terminal(self, request):
    return responses.JSONResponse({"output": "$ ls", "status": "success"})

  async def _size(self, request):
    return responses.JSONResponse({"width": 128, "height": 96})

  async def _execute(self, request):
    data = await request.json()
    self.log.append(("execute", data))
    shell = data.get("shell", False)
    command = data.get("command", "" if shell else [])
    if isinstance(command, str) and not shell:
      command = shlex.split(command)
    if not shell and command and command[0] == "python":
      # -S: what is installed here is not on the machine, and takes time.
      command = [sys.executable, "-S", *command[1:]]
    env = {
      "HOME": str(self.home),
      "PATH": os.environ["PATH"],
      "PYTHONPATH": str(self.home / "lib"),
      "FAKE_SCREEN": self.url + "/fake/act",
    }
    run = lambda: subprocess.run(
      command,
      shell=shell,
      text=True,
      timeout=60,
      env=env,
      cwd=self.home,
      capture_output=True,
    )
    try:
      done = await asyncio.to_thread(run)
    except Exception as error:  # As the server does.
      return responses.JSONResponse(
        {"status": "error", "message": str(error)}, 500
      )
    return responses.JSONResponse(
      {
        "status": "success",
        "output": done.stdout,
        "error": done.stderr,
        "returncode": done.returncode,
      }
    )

  async def _file(self, request):
    path = self._path((await _form(request))["file_path"].decode())
    if not path.exists():
      return responses.JSONResponse({"error": "File not found"}, 404)
    return responses.Response(path.read_bytes())

  async def _list(self, request):
    path = self._path((await request.json())["path"])
    children = [
      {"type": "file", "name": p.name} for p in sorted(path.iterdir())
    ]
    tree = {"type": "directory", "name": path.name, "children": children}
    return responses.JSONResponse({"directory_tree": tree})

  async def _upload(self, request):
    form = await _form(request)
    path = self._path(form["file_path"].decode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(form["file_data"])
    return responses.PlainTextResponse("File Uploaded")

  async def _set_up(self, request):
    data = await request.json()
    self.log.append((request.path_params["what"], data))
    if request.path_params["what"] == "open_file" and (
      not self._path(data["path"]).exists()
    ):
      return responses.PlainTextResponse("Application/file not found", 404)
    return responses.PlainTextResponse("done")

  async def _act(self, request):
    data = await request.json()
    if data.get("button") == "primary":
      del data["button"]
    self.log.append(("act", data))
    data = {k: v for k, v in data.items() if v is not None}
    self.gym.act_sync(gui_action.GuiAction.from_json(data))
    return responses.Response()


async def _form(request):
  """The fields of a form, in either of the encodings that a browser has."""
  body, kind = await request.body(), request.headers["content-type"]
  if kind == "application/x-www-form-urlencoded":
    pairs = urllib.parse.parse_qsl(body)  # Bytes in, bytes out.
    return {name.decode(): value for name, value in pairs}
  head = f"content-type: {kind}\r\n\r\n".encode()
  message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
  return {
    part.get_param("name", header="content-disposition"): part.get_payload(
      decode=True
    )
    for part in message.iter_parts()
  }
