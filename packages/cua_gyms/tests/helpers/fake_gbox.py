"""gbox's HTTP API, as its clients know it, with a desktop in each box.

Refuses what the real one refuses: no key, fields it does not know, boxes that
are not there. `log` has each request's path and body.
"""

import re

from starlette import applications
from starlette import requests
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import desktop

KEY = "gbox-key"
_FIELDS = {
  "click": {"x", "y", "button", "double", "modifierKeys"},
  "tap": {"x", "y"},
  "move": {"x", "y"},
  "drag": {"start", "end", "path", "duration"},
  "swipe": {"start", "end", "direction", "distance", "duration"},
  "scroll": {"x", "y", "scrollX", "scrollY", "direction", "distance"},
  "long-press": {"x", "y", "duration"},
  "press-button": {"buttons"},
  "press-key": {"keys", "combination"},
  "type": {"text"},
  "screenshot": {
    "clip",
    "outputFormat",
    "presignedExpiresIn",
    "saveToAlbum",
    "scrollCapture",
  },
}
_DURATION = re.compile(r"[0-9]+(ms|s|m|h)")


class FakeGbox:
  """An ASGI application; `boxes` are those that run."""

  def __init__(self, task, answers=None):
    self._task = task
    self._answers = answers or {}  # path's end -> (status, body), once
    self.boxes = {}
    self.terminated = []
    self.log = []
    post = ["POST"]
    self.asgi = applications.Starlette(
      routes=[
        routing.Route("/api/v1/boxes/{kind}", self._create, methods=post),
        routing.Route(
          "/api/v1/boxes/{box}/actions/{action}", self._act, methods=post
        ),
        routing.Route("/api/v1/boxes/{box}/{what}", self._do, methods=post),
      ]
    )

  async def _body(self, request: requests.Request):
    body = await request.json()
    path = request.url.path.removeprefix("/api/v1")
    self.log.append((path, body))
    if request.headers.get("authorization") != f"Bearer {KEY}":
      return body, responses.JSONResponse({"message": "no key"}, 401)
    for end in list(self._answers):
      if path.endswith(end):
        status, said = self._answers.pop(end)
        return body, responses.JSONResponse(said, status)
    return body, None

  async def _create(self, request):
    body, refused = await self._body(request)
    if refused:
      return refused
    assert set(body) <= {"config", "timeout", "wait"}, body
    assert _DURATION.fullmatch(body["timeout"])
    assert _DURATION.fullmatch(body["config"]["expiresIn"])
    box = f"box-{len(self.boxes) + len(self.terminated)}"
    gym = desktop.DesktopGym()
    gym.start_sync(self._task)
    self.boxes[box] = gym
    return responses.JSONResponse(
      {
        "id": box,
        "status": "running",
        "type": request.path_params["kind"],
        "config": body["config"],
      }
    )

  def _gym(self, request):
    return self.boxes.get(request.path_params["box"])

  async def _do(self, request):
    body, refused = await self._body(request)
    if refused:
      return refused
    what, gym = request.path_params["what"], self._gym(request)
    if gym is None:
      return responses.JSONResponse({"message": "no such box"}, 404)
    if what == "terminate":
      self.terminated.append(request.path_params["box"])
      del self.boxes[request.path_params["box"]]
      return responses.Response(status_code=200)
    assert what == "commands" and body["command"][:2] == ["sh", "-c"]
    won = gym.evaluate_sync().success
    out = {"is-it-solved": f"{won}\n", "true": ""}.get(body["command"][2])
    return responses.JSONResponse(
      {
        "exitCode": 127 if out is None else 0,
        "stdout": out or "",
        "stderr": "" if out is not None else "not found",
      }
    )

  async def _act(self, request):
    body, refused = await self._body(request)
    if refused:
      return refused
    name, gym = request.path_params["action"], self._gym(request)
    if gym is None:
      return responses.JSONResponse({"message": "no such box"}, 404)
    unknown = set(body) - _FIELDS[name] - {"options", "model"}
    assert not unknown, (name, unknown)
    if name == "screenshot":
      return responses.JSONResponse(_shot(gym))
    action = _to_gui(name, body)
    if action is not None:
      gym.act_sync(action)
    reply = {"actionId": "a", "message": "ok"}
    wanted = body["options"]["screenshot"]
    if "after" in wanted["phases"]:
      assert wanted["outputFormat"] == "base64"
      assert _DURATION.fullmatch(wanted["delay"])
      reply["screenshot"] = {"after": _shot(gym)}
    return responses.JSONResponse(reply)


def _shot(gym):
  data = wire.screenshot_to_json(gym.scene.screenshot())["data"]
  return {"uri": f"data:image/png;base64,{data}"}


def _to_gui(name, body):
  make = gui_action.GuiAction
  if name in ("click", "tap"):
    return make(
      "click",
      x=body["x"],
      y=body["y"],
      button=body.get("button", "left"),
      count=2 if body.get("double") else 1,
    )
  if name == "type":
    return make("type", text=body["text"])
  if name == "press-key":
    return make("key", keys=body["keys"])
  if name == "scroll":
    return make(
      "scroll", x=body["x"], y=body["y"], dx=body["scrollX"], dy=body["scrollY"]
    )
  if name in ("drag", "swipe"):
    start, end = body["start"], body["end"]
    return make("drag", x=start["x"], y=start["y"], x2=end["x"], y2=end["y"])
  return None
