"""AndroidWorld's server as its source has it, with a desktop for a phone.

Queries and actions are held to the server's own types: a missing parameter is
422, an action that `JSONAction` refuses is 500. `log` has each request.
"""

from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import desktop

_TYPES = (
    "click", "double_tap", "scroll", "swipe", "input_text", "navigate_home",
    "navigate_back", "keyboard_enter", "open_app", "status", "wait",
    "long_press", "answer", "unknown",
)  # fmt: skip
_KEYS = {
    "action_type", "index", "x", "y", "text", "direction", "goal_status",
    "app_name", "keycode", "clear_text",
}  # fmt: skip
_PARAMETERS = {
  "/reset": {"go_home": bool},
  "/screenshot": {"wait_to_stabilize": bool},
  "/suite/task_list": {"max_index": int},
  "/suite/task_length": {"task_type": str},
  **{
    f"/task/{what}": {"task_type": str, "task_idx": int}
    for what in ("initialize", "tear_down", "score", "goal")
  },
}


class FakeAndroidWorld:
  """An ASGI application; every task type is a family of the desktop."""

  def __init__(self, types=("click-button", "enter-text"), instances=2):
    self.instances = {name: instances for name in types}
    self.gym = desktop.DesktopGym()
    self.log = []
    self.broken = {}
    routes = [
      ("/health", "GET", self._ok),
      ("/reset", "POST", self._ok),
      ("/screenshot", "GET", self._screenshot),
      ("/execute_action", "POST", self._execute),
      ("/suite/task_list", "GET", self._list),
      ("/suite/task_length", "GET", self._length),
      ("/suite/reinitialize", "GET", self._reinitialize),
      ("/task/initialize", "POST", self._initialize),
      ("/task/tear_down", "POST", self._ok),
      ("/task/score", "GET", self._score),
      ("/task/goal", "GET", self._goal),
    ]
    self.asgi = applications.Starlette(
      routes=[
        routing.Route(path, self._checked(path, run), methods=[method])
        for path, method, run in routes
      ]
    )

  def _checked(self, path, run):
    async def checked(request):
      query = dict(request.query_params)
      body = await request.json() if path == "/execute_action" else None
      self.log.append((path, body if body is not None else query))
      for name, kind in _PARAMETERS.get(path, {}).items():
        value = query.get(name)
        right = value is not None
        if kind is bool:
          right = value in ("true", "false", "True", "False", "1", "0")
        if kind is int:
          right = right and value.lstrip("-").isdigit()
        if not right:
          return responses.JSONResponse({"detail": f"{name} {value}"}, 422)
      if path in self.broken:
        return responses.JSONResponse(*self.broken[path])
      if "task_idx" in query and not (
        int(query["task_idx"]) < self.instances.get(query["task_type"], 0)
      ):
        return responses.PlainTextResponse("Internal Server Error", 500)
      return await run(query, body)

    return checked

  def _task(self, query):
    return desktop.DesktopTasks().train_task(
      query["task_type"], int(query["task_idx"]), 0
    )

  async def _ok(self, query, body):
    return responses.JSONResponse({"status": "success", "message": "done"})

  async def _screenshot(self, query, body):
    return responses.JSONResponse(
      {"pixels": self.gym.scene.screenshot().tolist()}
    )

  async def _list(self, query, body):
    return responses.JSONResponse({"task_list": list(self.instances)})

  async def _length(self, query, body):
    length = self.instances[query["task_type"]]
    return responses.JSONResponse({"length": length})

  async def _reinitialize(self, query, body):
    for name in self.instances:
      self.instances[name] = int(query["n_task_combinations"])
    return await self._ok(query, body)

  async def _initialize(self, query, body):
    self.gym.start_sync(self._task(query))
    return await self._ok(query, body)

  async def _goal(self, query, body):
    own = desktop.DesktopGym()
    return responses.JSONResponse(
      {"goal": own.start_sync(self._task(query)).instruction}
    )

  async def _score(self, query, body):
    return responses.JSONResponse({"score": self.gym.evaluate_sync().score})

  async def _execute(self, query, body):
    kind = body.get("action_type")
    if (
      set(body) - _KEYS
      or kind not in _TYPES
      or (body.get("direction", "up") not in ("left", "right", "down", "up"))
    ):
      return responses.PlainTextResponse("Internal Server Error", 500)
    action = None
    if kind in ("click", "double_tap"):
      action = gui_action.GuiAction(
        "click", x=body["x"], y=body["y"], count=1 + (kind == "double_tap")
      )
    elif kind == "input_text":
      action = gui_action.GuiAction("type", text=body["text"])
    elif kind == "keyboard_enter":
      action = gui_action.GuiAction("key", keys=("enter",))
    if action is not None:
      self.gym.act_sync(action)
    return await self._ok(query, body)
