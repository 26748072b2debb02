"""Plays on machines of gbox (https://gbox.ai), one box an episode.

`start` makes a box, runs the task's set-up commands in it and takes a
screenshot; `act` is one HTTP call whose answer has the screenshot after it;
`close` terminates the box, which also expires by itself. A task's `params`:

* `setup`: shell commands; one that fails fails the start.
* `evaluate`: `{"command": …, "stdout": … or "contains": …}`; success is the
  exit code 0 and that output. Or the setting `evaluator` names a function
  `(gym, task) -> Evaluation`, sync or async, which may use `gym.run`.

Promises: every call has a deadline and is made once (an action that may have
been carried out is not sent again); a failure raises `GboxError`.

Does not use gbox's own models, recording or storage: screenshots come as
base64, in the answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Iterator, Mapping
import urllib.parse

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib

_LOG = logging.getLogger(__name__)
Kind = gui_action.GuiActionKind
DEFAULT_BASE_URL = "https://gbox.ai/api/v1"
URL_VARIABLE, KEY_VARIABLE = "GBOX_CLIENT_BASE_URL", "GBOX_API_KEY"
_ANDROID_BUTTONS = ("home", "back", "menu")
_LONGEST_WAIT_S = 30.0


class GboxError(http_lib.CallError):
  """gbox refused, failed, or did not answer in time."""


def needs(options: Mapping[str, Any]) -> Iterator[str]:
  """`GymSpec.needs`: a key."""
  del options
  if not os.environ.get(KEY_VARIABLE):
    yield f"${KEY_VARIABLE} is not set; machines of gbox are made with a key"


class GboxGym:
  """A gym on one gbox machine an episode; see the module docstring.

  Attributes:
    box_id: Id of the box of the running episode, None without one.
  """

  def __init__(
    self,
    *,
    base_url: str = "",
    kind: str = "linux",
    box: Mapping[str, Any] | None = None,
    evaluator: Any = None,
    settle_s: float = 0.5,
    call_s: float = 60.0,
    create_s: float = 300.0,
    close_s: float = 20.0,
  ):
    """Args:

      base_url: Address of the service; "" for $GBOX_CLIENT_BASE_URL, else
        gbox's own. The key comes from $GBOX_API_KEY.
      kind: "linux" or "android".
      box: a box's `config`, e.g. {"expiresIn": "30m", "envs": {…}}.
      evaluator: function, or "package.module:function".
      settle_s: Seconds between an action and its screenshot.
      call_s, create_s, close_s: deadlines of a call, of a box's creation, and
        of its end.

    Raises:
      ValueError: a setting that cannot be.
    """
    named = "base_url"
    if not base_url and os.environ.get(URL_VARIABLE):
      base_url, named = os.environ[URL_VARIABLE], f"${URL_VARIABLE}"
    self._url = http_lib.address(
      base_url or DEFAULT_BASE_URL, named, DEFAULT_BASE_URL
    )
    if kind not in ("linux", "android"):
      raise ValueError(f"kind={kind!r} must be linux or android")
    options_lib.check_seconds(
      {"call_s": call_s, "create_s": create_s, "close_s": close_s}
    )
    if (
      isinstance(settle_s, bool)
      or not isinstance(settle_s, (int, float))
      or (not 0 <= settle_s <= _LONGEST_WAIT_S)
    ):
      raise ValueError(
        f"settle_s={settle_s!r} must be a number of seconds, at most"
        f" {_LONGEST_WAIT_S:g}"
      )
    self._kind = kind
    self._config = {"expiresIn": "60m", **(box or {})}
    if isinstance(evaluator, str):
      evaluator = registry.import_path(evaluator)
    self._evaluator = evaluator
    self._settle_s = settle_s
    self._call_s, self._create_s, self._close_s = call_s, create_s, close_s
    self._http: http_lib.Http | None = None
    self._task: base.Task | None = None
    self._pointer = (0.0, 0.0)
    self._answer = ""
    self.box_id: str | None = None

  @property
  def answer(self) -> str:
    """The policy's answer, "" for none; evaluators read it."""
    return self._answer

  # --- the protocol of gyms ---------------------------------------------------

  async def start(self, task: base.Task) -> base.Observation:
    if self._evaluator is None:
      check = task.params.get("evaluate")
      if not isinstance(check, Mapping) or not isinstance(
        check.get("command"), str
      ):
        raise ValueError(
          f"task {task.task_id}: a gbox task needs params.evaluate with a"
          " 'command', or the gym an evaluator"
        )
    setup = task.params.get("setup") or ()
    if not isinstance(setup, (list, tuple)) or not all(
      isinstance(command, (str, list)) for command in setup
    ):
      raise ValueError(
        f"task {task.task_id}: params.setup={setup!r} must be a list of"
        " commands"
      )
    await self._end()
    self._task, self._answer, self._pointer = task, "", (0.0, 0.0)
    await self._create()
    for command in setup:
      code, out, err = await self.run(command)
      if code:
        raise GboxError(
          f"box {self.box_id}: the set-up {command!r} ended with {code}:"
          f" {(err or out)[-500:]}"
        )
    return await self._look()

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    if action.kind is Kind.WAIT:
      await asyncio.sleep(min(action.duration or 1.0, _LONGEST_WAIT_S))
      return await self._look()
    if action.kind in (Kind.ANSWER, Kind.TERMINATE):
      self._answer = action.text or self._answer
      return await self._look(ended=True)
    if action.kind is Kind.SCREENSHOT:
      return await self._look()
    calls = self._calls(action)
    if isinstance(calls, str):
      return await self._look(text=calls)
    reply: Mapping[str, Any] = {}
    for i, (name, body) in enumerate(calls):
      shots: dict[str, Any] = {"phases": []}
      if i + 1 == len(calls):
        shots = {
          "phases": ["after"],
          "outputFormat": "base64",
          "delay": f"{int(self._settle_s * 1000)}ms",
        }
      body = {**body, "options": {"screenshot": shots}}
      reply = await self._action(name, body)
    if action.x is not None and action.y is not None:
      self._pointer = (action.x, action.y)
    if action.x2 is not None and action.y2 is not None:
      self._pointer = (action.x2, action.y2)
    pictures = reply.get("screenshot")
    after = pictures.get("after") if isinstance(pictures, Mapping) else None
    if not isinstance(after, Mapping) or not after.get("uri"):
      return await self._look()
    return base.Observation(await self._pixels(after))

  async def evaluate(self) -> base.Evaluation:
    if self._task is None or self.box_id is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    if self._evaluator is not None:
      return base.as_evaluation(
        await concurrency.acall(
          self._evaluator,
          self,
          self._task,
          seconds=self._call_s,
          what="the evaluator",
        )
      )
    check = self._task.params["evaluate"]
    code, out, _ = await self.run(check["command"])
    passed = code == 0
    if "stdout" in check:
      passed = passed and out.strip() == str(check["stdout"]).strip()
    if "contains" in check:
      passed = passed and str(check["contains"]) in out
    details = {"exit_code": code, "stdout": out[-2000:]}
    return base.Evaluation(float(passed), passed, details)

  async def close(self) -> None:
    """Terminates the box; idempotent, and in time."""
    http, self._http = self._http, None
    await self._end(http)

  async def run(
    self, command: str | list[str], seconds: float | None = None
  ) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in the box."""
    limit = min(seconds or self._call_s, self._call_s)
    words = ["sh", "-c", command] if isinstance(command, str) else command
    reply = await self._post(
      f"/boxes/{self._id()}/commands",
      {"command": words, "timeout": f"{max(1, int(limit))}s"},
      self._call_s,
    )
    code = reply.get("exitCode")
    if isinstance(code, bool) or not isinstance(code, int):
      raise GboxError(f"box {self.box_id}: a command ended without exitCode")
    return code, str(reply.get("stdout") or ""), str(reply.get("stderr") or "")

  # --- actions ----------------------------------------------------------------

  def _calls(
    self, action: gui_action.GuiAction
  ) -> list[tuple[str, dict[str, Any]]] | str:
    """Returns gbox's calls for an action, or the reason that it has none."""
    kind = action.kind
    at = {} if action.x is None else {"x": action.x, "y": action.y}
    to = {} if action.x2 is None else {"x": action.x2, "y": action.y2}
    if kind is Kind.CLICK:
      if self._kind == "android":
        return [("tap", at)] * action.count
      body: dict[str, Any] = {**at, "button": action.button}
      if action.keys:
        body["modifierKeys"] = list(action.keys)
      pairs = [("click", {**body, "double": True})] * (action.count // 2)
      return pairs + [("click", {**body, "double": False})] * (action.count % 2)
    if kind is Kind.MOVE:
      return [("move", at)]
    if kind is Kind.DRAG:
      start = at or dict(zip("xy", self._pointer))
      return [("drag", {"start": start, "end": to})]
    if kind is Kind.SWIPE:
      body = {"start": at, "end": to}
      if action.duration is not None:
        body["duration"] = _ms(action.duration)
      return [("swipe", body)]
    if kind is Kind.SCROLL:
      at = at or dict(zip("xy", self._pointer))
      # Both sides mean by > 0 that what is below comes into view.
      return [("scroll", {**at, "scrollX": action.dx, "scrollY": action.dy})]
    if kind is Kind.TYPE:
      return [("type", {"text": action.text})]
    if kind is Kind.KEY:
      keys = list(action.keys)
      return [("press-key", {"keys": keys, "combination": len(keys) > 1})]
    if kind is Kind.LONG_PRESS:
      seconds = 1.0 if action.duration is None else action.duration
      return [("long-press", {**at, "duration": _ms(seconds)})]
    if kind is Kind.SYSTEM_BUTTON:
      if action.text == "enter":
        return [("press-key", {"keys": ["enter"], "combination": False})]
      if self._kind == "android" and action.text in _ANDROID_BUTTONS:
        return [("press-button", {"buttons": [action.text]})]
      return f"Error: this machine has no button {action.text!r}"
    return f"Error: this machine has no action {kind.value!r}"

  async def _action(self, name: str, body: Mapping[str, Any]) -> Any:
    return await self._post(
      f"/boxes/{self._id()}/actions/{name}", body, self._call_s + self._settle_s
    )

  async def _look(
    self, text: str = "", ended: bool = False
  ) -> base.Observation:
    shot = await self._action("screenshot", {"outputFormat": "base64"})
    return base.Observation(await self._pixels(shot), text=text, done=ended)

  async def _pixels(self, shot: Mapping[str, Any]) -> Any:
    uri = shot.get("uri")
    size = len(uri) if isinstance(uri, str) else 0
    try:
      return await http_lib.read(
        lambda: wire.screenshot_from_json(uri, "screenshot.uri"),
        size,
        self._call_s,
        "a screenshot",
      )
    except wire.WireError as error:
      raise GboxError(f"box {self.box_id}: {error}") from None

  # --- HTTP -------------------------------------------------------------------

  def _id(self) -> str:
    if self.box_id is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return urllib.parse.quote(self.box_id, safe="")

  async def _create(self) -> None:
    """Makes the episode's box.

    If the caller is cancelled, the box is terminated once the answer brings its
    id; before that, it cannot be named.
    """
    url, http = self._url, self._client()
    seconds = max(1, min(300, int(self._create_s)))
    body = {"config": self._config, "timeout": f"{seconds}s", "wait": True}
    waits = True

    async def make() -> str:
      try:
        reply = await _post(
          http, f"{url}/boxes/{self._kind}", body, self._create_s
        )
        box, status = reply.get("id"), reply.get("status")
        if not isinstance(box, str) or not box:
          raise GboxError(f"{url} made a box without an id: {str(reply)[:200]}")
        if not waits or status not in (None, "running"):
          await self._terminate(http, box)
        if status not in (None, "running"):
          raise GboxError(f"box {box} is {status!r}, not running, when made")
        return box
      finally:
        if not waits:
          await http.aclose()

    making = asyncio.ensure_future(make())
    try:
      self.box_id = await concurrency.to_the_end(making)
    except asyncio.CancelledError:
      if making.done():  # At the same moment: `close` terminates it.
        if not making.cancelled() and making.exception() is None:
          self.box_id = making.result()
      else:
        waits, self._http = False, None  # The connections are `make`'s now.
      raise

  async def _end(self, http: http_lib.Http | None = None) -> None:
    """Terminates the box, if there is one, and closes `http`."""
    box, self.box_id, self._task = self.box_id, None, None
    calls = http or self._http

    async def end() -> None:
      if box is not None:
        await self._terminate(calls or self._client(), box)
      if http is not None:
        await http.aclose()

    # The box is terminated even if the caller is cancelled.
    await concurrency.to_the_end(end())

  async def _terminate(self, http: http_lib.Http, box: str) -> None:
    where = f"{self._url}/boxes/{urllib.parse.quote(box, safe='')}/terminate"
    try:
      await http.call("POST", where, self._close_s, body={"wait": False})
    except GboxError as error:
      if error.status not in (404, 410):
        # It expires by itself; an episode is not undone by that.
        _LOG.warning("box %s was not terminated: %s", box, error)

  def _client(self) -> http_lib.Http:
    if self._http is None:
      key = os.environ.get(KEY_VARIABLE, "")
      self._http = http_lib.Http(
        GboxError,
        headers={"authorization": f"Bearer {key}"} if key else {},
        proxies=True,
      )
    return self._http

  async def _post(
    self, path: str, body: Mapping[str, Any], seconds: float
  ) -> dict[str, Any]:
    return await _post(self._client(), self._url + path, body, seconds)


async def _post(
  http: http_lib.Http, url: str, body: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
  try:
    return await http.ask("POST", url, seconds, body=body)
  except GboxError as error:
    if error.status == 401:
      raise GboxError(f"{error}; is ${KEY_VARIABLE} right?", 401) from None
    raise


def _ms(seconds: float) -> str:
  """Duration in gbox's notation, capped at the longest wait."""
  return f"{int(min(seconds, _LONGEST_WAIT_S) * 1000)}ms"
