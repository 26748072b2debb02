"""Plays on machines that run OSWorld's server: `gym.name=osworld`.

A task is OSWorld's own JSON object, in `params["osworld"]`: its `config` is the
set-up, its `evaluator` the verdict (see `osworld_evaluation`). An episode takes
one of the `machines` for itself: `start` has it reset, sets the task up and
looks; `act` runs pyautogui code and looks; `close` gives the machine back.

Promises: a task that needs what the protocol cannot give is refused by name
before a machine is touched; every call has a deadline; an action is sent once;
a failure raises `OSWorldError`, so it is no reward of 0.

Does not start virtual machines or revert their snapshots: `reset` names a
function that does. Without one an episode begins where the last one ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib

from cua_gyms import machines as machines_lib
from cua_gyms.osworld import actions as osworld_actions
from cua_gyms.osworld import evaluation as osworld_evaluation

_LOG = logging.getLogger(__name__)
Kind = gui_action.GuiActionKind
DEFAULT_URL = "http://127.0.0.1:5000"
PASSWORD_VARIABLE = "OSWORLD_CLIENT_PASSWORD"
_NO_RESET = "none"

# Set-up steps that are one call: type -> (path, parameters it may have).
_CALLS = {
  "launch": ("/setup/launch", ("command", "shell")),
  "open": ("/setup/open_file", ("path",)),
  "activate_window": (
    "/setup/activate_window",
    ("window_name", "strict", "by_class"),
  ),
  "close_window": (
    "/setup/close_window",
    ("window_name", "strict", "by_class"),
  ),
  "change_wallpaper": ("/setup/change_wallpaper", ("path",)),
}
_STEPS = {
  **{name: fields for name, (_, fields) in _CALLS.items()},
  "execute": ("command", "shell", "until", "stdout", "stderr"),
  "command": ("command", "shell", "until", "stdout", "stderr"),
  "sleep": ("seconds",),
  "download": ("files",),
  "upload_file": ("files",),
}


class OSWorldError(http_lib.CallError):
  """A request to a machine failed."""


def check_task(task: Mapping[str, Any]) -> None:
  """Raises:

  ValueError: the machine's server alone cannot do a part of the task.
  """
  osworld_evaluation.plan(task.get("evaluator"))
  evaluator = task["evaluator"]
  for where, steps in (
    ("config", task.get("config")),
    ("evaluator.postconfig", evaluator.get("postconfig")),
  ):
    for i, step in enumerate(steps or ()):
      kind = step.get("type") if isinstance(step, Mapping) else None
      if kind not in _STEPS:
        wrong = registry.unknown_name("set-up step", kind, _STEPS)
        raise ValueError(f"{where}[{i}].type: {wrong}")
      unknown = sorted(set(step.get("parameters") or {}) - set(_STEPS[kind]))
      if unknown:
        raise ValueError(
          f"{where}[{i}]: {kind} takes no {unknown[0]!r}; known:"
          f" {', '.join(_STEPS[kind])}"
        )


class OSWorldGym:
  """A gym on machines with OSWorld's server; see the module docstring.

  Attributes:
    url: Address of the episode's machine, None without one.
  """

  def __init__(
    self,
    machines: str | Sequence[str] = DEFAULT_URL,
    *,
    reset: Any = None,
    width: int | None = None,
    height: int | None = None,
    settle_s: float = 2.0,
    scroll_px: float = 40.0,
    upload_root: str = "",
    call_s: float = 130.0,
    start_s: float = 600.0,
    python: str = "python",
  ):
    """Args:

      machines: addresses of servers, one or a list of them.
      reset: a function `url -> address | None`, sync or async, or its path,
        called before each episode, that resets the machine and returns its
        address, as it may move; "none" for no reset.
      width, height: Size that screens must have; None takes any.
      settle_s: Seconds between an action and its screenshot.
      scroll_px: pixels that one notch of the wheel stands for.
      upload_root: the directory that tasks may upload files from; "" for none.
      call_s: deadline of a call; OSWorld's server ends commands after 120 s.
      start_s: deadline of waiting for a machine, and of its reset.
      python: on the machine.

    Raises:
      ValueError: a setting that cannot be.
    """
    self._machines = machines_lib.addresses(machines, DEFAULT_URL)
    if reset is None:
      raise ValueError(
        "the osworld gym needs 'reset': package.module:function that reverts"
        " a machine, or none to begin where the last episode ended"
      )
    if isinstance(reset, str) and reset != _NO_RESET:
      try:
        reset = registry.import_path(reset)
      except ImportError as error:
        raise ValueError(f"reset={reset}: {error}") from None
    self._reset: Callable[[str], Any] | None = (
      None if reset == _NO_RESET else reset
    )
    options_lib.check_seconds({"call_s": call_s, "start_s": start_s})
    for name, value, right in (
      ("scroll_px", scroll_px, lambda v: 0 < v < 1e6),
      ("settle_s", settle_s, lambda v: 0 <= v <= 600),
    ):
      number = isinstance(value, (int, float)) and not isinstance(value, bool)
      if not number or not right(value):
        raise ValueError(f"{name}={value!r} must be a number > 0")
    self._size = (width, height)
    self._settle_s, self._scroll_px = settle_s, scroll_px
    self._root = pathlib.Path(upload_root).resolve() if upload_root else None
    self._call_s, self._start_s, self._python = call_s, start_s, python
    self._http: http_lib.Http | None = None
    self._held: str | None = None
    self._task: Mapping[str, Any] | None = None
    self._failed = False
    self._stuck: concurrency.StuckCall | None = None
    self._screen = (0, 0)
    self.url: str | None = None

  # --- the protocol of gyms ---------------------------------------------------

  async def start(self, task: base.Task) -> base.Observation:
    spec = task.params.get("osworld")
    if not isinstance(spec, Mapping):
      raise ValueError(
        f"task {task.task_id}: params.osworld must be a task of OSWorld, an"
        " object with 'instruction', 'config' and 'evaluator'"
      )
    try:
      check_task(spec)
    except ValueError as error:
      raise ValueError(f"task {task.task_id}: {error}") from None
    await self.close()
    self._held = await machines_lib.require(
      self._machines, self._start_s, "machines", OSWorldError
    )
    self.url = self._held
    if self._reset is not None:
      moved = await concurrency.acall(
        self._reset,
        self._held,
        seconds=self._start_s,
        what="the machine's reset",
        on_stuck=self._note,
      )
      if moved:
        (self.url,) = machines_lib.addresses(moved, DEFAULT_URL)
    await self._ready()
    self._task, self._failed = spec, False
    await self._set_up("config", spec.get("config"))
    return await self._look(instruction=str(spec.get("instruction") or ""))

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    if self._task is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if action.kind is Kind.WAIT:
      await asyncio.sleep(min(action.duration or 2.0, 30.0))
      return await self._look()
    if action.kind in (Kind.ANSWER, Kind.TERMINATE):
      self._failed = action.success is False  # OSWorld's FAIL.
      return await self._look(done=True)
    if action.kind is Kind.SCREENSHOT:
      return await self._look()
    try:
      code = osworld_actions.code(action, self._scroll_px)
    except ValueError as error:
      return await self._look(text=f"Error: {error}")
    if code is not None:
      command = [self._python, "-c", osworld_actions.PREFIX + code]
      reply = await self.execute(command)
      if reply.get("returncode"):
        raise OSWorldError(
          f"{self.url}: an action ended with {reply['returncode']}:"
          f" {str(reply.get('error'))[-500:]}"
        )
      await asyncio.sleep(self._settle_s)
    return await self._look()

  async def evaluate(self) -> base.Evaluation:
    if self._task is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    evaluator = self._task["evaluator"]
    await self._set_up("evaluator.postconfig", evaluator.get("postconfig"))
    try:
      score, details = await osworld_evaluation.judge(
        self, evaluator, self._failed
      )
    except ValueError as error:
      raise OSWorldError(f"{self.url}: {error}") from error
    return base.Evaluation(score, score >= 1.0, details)

  async def close(self) -> None:
    """Gives the machine back; idempotent."""
    machine, self._held, self.url, self._task = self._held, None, None, None
    http, self._http = self._http, None
    stuck, self._stuck = self._stuck, None
    if machine is not None and stuck is not None:
      # A machine is returned to the pool only once its reset has ended.
      stuck.then(lambda: machines_lib.give_back(machine))
    elif machine is not None:
      machines_lib.give_back(machine)
    if http is not None:
      await concurrency.to_the_end(http.aclose())

  def _note(self, stuck: concurrency.StuckCall) -> None:
    self._stuck = stuck

  # --- the machine ------------------------------------------------------------

  async def execute(
    self, command: str | list[str], shell: bool = False
  ) -> Mapping[str, Any]:
    """{"output", "error", "returncode"} of a command, run once."""
    reply = await self.ask("POST", "/execute", command=command, shell=shell)
    if reply.get("status") != "success":
      raise OSWorldError(f"{self.url}/execute: {str(reply)[:500]}")
    return reply

  async def file(self, path: str) -> bytes | None:
    """Returns a file's bytes, None when there is none."""
    try:
      return await self._call("POST", "/file", data={"file_path": path})
    except OSWorldError as error:
      if error.status == 404:
        return None
      raise

  async def ask(self, method: str, path: str, **body: Any) -> Any:
    """Returns the JSON object that a call answers with."""
    return await self._client().ask(
      method, self._at(path), self._call_s, body=body or None
    )

  async def _call(self, method: str, path: str, **more: Any) -> bytes:
    return await self._client().call(
      method, self._at(path), self._call_s, **more
    )

  def _at(self, path: str) -> str:
    if self.url is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return self.url + path

  def _client(self) -> http_lib.Http:
    if self._http is None:
      self._http = http_lib.Http(OSWorldError)
    return self._http

  async def _ready(self) -> None:
    """Waits for the server, and checks the size of its screen."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + self._start_s
    while True:
      try:
        size = await self.ask("POST", "/screen_size")
        break
      except OSWorldError as error:
        if loop.time() > deadline or 400 <= error.status < 500:
          raise
        await asyncio.sleep(0.5)
    width, height = size.get("width"), size.get("height")
    machines_lib.check_size(
      f"screen of {self.url}", (width, height), self._size, OSWorldError
    )
    self._screen = (width, height)

  async def _look(self, **more: Any) -> base.Observation:
    data = await self._call("GET", "/screenshot")
    try:
      pixels = await http_lib.read(
        lambda: wire.from_png(data), len(data), self._call_s, "a screenshot"
      )
    except wire.WireError as error:
      raise OSWorldError(f"{self.url}: {error}") from None
    return base.Observation(pixels, **more)

  async def _set_up(self, where: str, steps: Any) -> None:
    for i, step in enumerate(steps or ()):
      kind, fields = step["type"], dict(step.get("parameters") or {})
      try:
        await self._step(kind, fields)
      except (OSWorldError, KeyError, TypeError) as error:
        raise OSWorldError(
          f"{where}[{i}] ({kind}): {type(error).__name__}: {error}",
          error.status if isinstance(error, OSWorldError) else 0,
        ) from error

  async def _step(self, kind: str, fields: dict[str, Any]) -> None:
    if kind in _CALLS:
      path = _CALLS[kind][0]
      await self._call("POST", path, body=fields)
    elif kind == "sleep":
      await asyncio.sleep(min(float(fields["seconds"]), 300.0))
    elif kind == "download":
      for file in fields["files"]:
        body = {"url": file["url"], "path": file["path"]}
        await self._call("POST", "/setup/download_file", body=body)
    elif kind == "upload_file":
      for file in fields["files"]:
        await self._upload(file["local_path"], file["path"])
    else:
      await self._execute_until(fields)

  async def _execute_until(self, fields: dict[str, Any]) -> None:
    command, until = self._filled(fields["command"]), fields.get("until") or {}
    deadline = asyncio.get_running_loop().time() + self._start_s
    while True:
      reply = await self.execute(command, fields.get("shell", False))
      if not until or any(
        (
          "returncode" in until and reply["returncode"] == until["returncode"],
          "stdout" in until and until["stdout"] in reply["output"],
          "stderr" in until and until["stderr"] in reply["error"],
        )
      ):
        return
      if asyncio.get_running_loop().time() > deadline:
        raise OSWorldError(
          f"{self.url}: {command!r} did not come to {until!r} within"
          f" {self._start_s:g} s"
        )
      await asyncio.sleep(0.3)

  def _filled(self, command: Any) -> Any:
    """Fills in the names in braces that OSWorld's commands use."""
    if isinstance(command, list):
      return [self._filled(word) for word in command]
    width, height = self._screen
    for name, value in (
      ("CLIENT_PASSWORD", os.environ.get(PASSWORD_VARIABLE, "")),
      ("SCREEN_WIDTH_HALF", width // 2),
      ("SCREEN_HEIGHT_HALF", height // 2),
      ("SCREEN_WIDTH", width),
      ("SCREEN_HEIGHT", height),
    ):
      command = command.replace("{" + name + "}", str(value))
    return command

  async def _upload(self, local: str, path: str) -> None:
    if self._root is None:
      raise OSWorldError(
        "the task uploads a file of this machine; set"
        " gym.options.upload_root to the directory it may come from"
      )
    source = (self._root / local).resolve()
    if not source.is_relative_to(self._root) or not source.is_file():
      raise OSWorldError(f"{local!r} is not a file under {self._root}")
    await self._call(
      "POST",
      "/setup/upload",
      data={"file_path": path},
      files={"file_data": (source.name, source.read_bytes())},
    )
