"""Plays on phones behind AndroidWorld servers: `gym.name=android_world`.

A task is an instance of a type of the server's suite: `params["android_world"]`
is `{"task_type", "task_idx"}`. An episode takes one of the `machines` for
itself: `start` goes home, initializes the task and looks; `act` executes one
action and looks; `close` tears the task down and gives the phone back.

Promises: every call has a deadline and an action is sent once; a failure
raises `AndroidWorldError`. As in AndroidWorld's own runs, an episode that the
policy did not end (by an answer or by terminating) scores 0.

The server's actions are coarser than ours: it scrolls and swipes the whole
screen in four directions, and presses enter after a text that is typed.
"""

from __future__ import annotations

import logging
from typing import Any, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib

from cua_gyms import machines as machines_lib

_LOG = logging.getLogger(__name__)
Kind = gui_action.GuiActionKind
DEFAULT_URL = "http://127.0.0.1:5000"
_BUTTONS = {
  "back": "navigate_back",
  "home": "navigate_home",
  "enter": "keyboard_enter",
}


class AndroidWorldError(http_lib.CallError):
  """A request to the server failed."""


def to_action(action: gui_action.GuiAction) -> dict[str, Any]:
  """AndroidWorld's JSON of an action.

  Raises:
    ValueError: the phone or the server lacks the action; the text names it.
  """
  kind = action.kind
  at = {}
  if action.x is not None and action.y is not None:
    at = {"x": round(action.x), "y": round(action.y)}
  if kind is Kind.CLICK:
    if action.button != "left" or action.keys or action.count == 3:
      raise ValueError("a phone is tapped once or twice, without keys")
    name = "double_tap" if action.count == 2 else "click"
    return {"action_type": name, **at}
  if kind is Kind.LONG_PRESS:
    return {"action_type": "long_press", **at}
  if kind is Kind.TYPE:
    if not action.text:
      raise ValueError("there is no text to type")
    return {"action_type": "input_text", "text": action.text}
  if kind is Kind.KEY and action.keys == ("enter",):
    return {"action_type": "keyboard_enter"}
  if kind is Kind.SYSTEM_BUTTON and action.text in _BUTTONS:
    return {"action_type": _BUTTONS[action.text]}
  if kind is Kind.OPEN_APP:
    return {"action_type": "open_app", "app_name": action.text}
  if kind is Kind.SCROLL:
    # Both mean by "down" that what is below comes into view.
    way = _direction(action.dx, action.dy)
    return {"action_type": "scroll", "direction": way}
  if kind is Kind.SWIPE:
    way = _direction(
      (action.x2 or 0.0) - (action.x or 0.0),
      (action.y2 or 0.0) - (action.y or 0.0),
    )
    # The server swipes right for "left" and the other way round.
    way = {"left": "right", "right": "left"}.get(way, way)
    return {"action_type": "swipe", "direction": way}
  if kind is Kind.WAIT:
    return {"action_type": "wait"}
  if kind is Kind.ANSWER:
    return {"action_type": "answer", "text": action.text}
  if kind is Kind.TERMINATE:
    status = "infeasible" if action.success is False else "complete"
    return {"action_type": "status", "goal_status": status}
  what = "+".join(action.keys) or action.text or ""
  raise ValueError(f"this phone has no {kind.value} {what}".rstrip())


def _direction(dx: float, dy: float) -> str:
  if abs(dx) > abs(dy):
    return "right" if dx > 0 else "left"
  if not dy:
    raise ValueError("there is no direction to go")
  return "down" if dy > 0 else "up"


class AndroidWorldGym:
  """A gym on phones of AndroidWorld servers; see the module docstring.

  Attributes:
    url: Address of the episode's phone, None without one.
  """

  def __init__(
    self,
    machines: str | Sequence[str] = DEFAULT_URL,
    *,
    width: int | None = None,
    height: int | None = None,
    stabilize: bool = True,
    call_s: float = 120.0,
    start_s: float = 600.0,
    close_s: float = 60.0,
  ):
    """Args:

      machines: addresses of servers, one or a list of them.
      width, height: Size that screens must have; None takes any.
      stabilize: wait for the screen to stand still before it is shown.
      call_s: deadline of a call.
      start_s: deadline of waiting for a phone, and of a task's start.
      close_s: deadline of tearing a task down.

    Raises:
      ValueError: a setting that cannot be.
    """
    self._machines = machines_lib.addresses(machines, DEFAULT_URL)
    options_lib.check_seconds(
      {"call_s": call_s, "start_s": start_s, "close_s": close_s}
    )
    self._size = (width, height)
    self._stabilize = bool(stabilize)
    self._call_s, self._start_s, self._close_s = call_s, start_s, close_s
    self._http: http_lib.Http | None = None
    self._where: dict[str, Any] | None = None
    self._initialized = False
    self._ended = False
    self.url: str | None = None

  async def start(self, task: base.Task) -> base.Observation:
    spec = task.params.get("android_world")
    if not isinstance(spec, Mapping) or not isinstance(
      spec.get("task_type"), str
    ):
      raise ValueError(
        f"task {task.task_id}: params.android_world must be an object with"
        " 'task_type' and 'task_idx'"
      )
    index = spec.get("task_idx", 0)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
      raise ValueError(
        f"task {task.task_id}: params.android_world.task_idx={index!r} must"
        " be a whole number >= 0"
      )
    await self.close()
    self.url = await machines_lib.require(
      self._machines, self._start_s, "phones", AndroidWorldError
    )
    where = {"task_type": spec["task_type"], "task_idx": index}
    start_s = self._start_s
    await self._ask("GET", "/health", start_s)
    await self._ask("POST", "/reset", start_s, params={"go_home": "true"})
    # `close` tears the task down even if its start fails.
    self._where, self._initialized, self._ended = where, True, False
    await self._ask("POST", "/task/initialize", start_s, params=where)
    goal = await self._ask("GET", "/task/goal", self._call_s, params=where)
    first = await self._look(instruction=str(goal.get("goal") or ""))
    machines_lib.check_size(
      f"screen of {self.url}", first.size, self._size, AndroidWorldError
    )
    return first

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    if self._where is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if action.kind is Kind.SCREENSHOT:
      return await self._look()
    try:
      body = to_action(action)
    except ValueError as error:
      return await self._look(text=f"Error: {error}")
    await self._ask("POST", "/execute_action", self._call_s, body=body)
    self._ended = action.kind in (Kind.ANSWER, Kind.TERMINATE)
    return await self._look(done=self._ended)

  async def evaluate(self) -> base.Evaluation:
    if self._where is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    reply = await self._ask(
      "GET", "/task/score", self._call_s, params=self._where
    )
    raw = reply.get("score")
    try:
      state = wire.number(
        float(raw) if raw is True or raw is False else raw, "score"
      )
    except wire.WireError as error:
      raise AndroidWorldError(f"{self.url}: {error}") from None
    score = state if self._ended else 0.0
    return base.Evaluation(
      score,
      score >= 1.0,
      {"state_score": state, "ended_by_policy": self._ended},
    )

  async def close(self) -> None:
    """Tears the task down and gives the phone back; idempotent."""
    url, where, begun = self.url, self._where, self._initialized
    http, self._http = self._http, None
    self.url, self._where, self._initialized = None, None, False

    async def end() -> None:
      try:
        if begun and url is not None and http is not None:
          await http.ask(
            "POST", f"{url}/task/tear_down", self._close_s, params=where
          )
      except AndroidWorldError as error:
        # The next episode's reset has to cope; the phone is not lost by it.
        _LOG.warning("%s was not torn down: %s", where, error)
      finally:
        if url is not None:
          machines_lib.give_back(url)
        if http is not None:
          await http.aclose()

    # Runs on if cancelled; the phone is lent again only after it.
    await concurrency.to_the_end(end())

  async def _look(self, **more: Any) -> base.Observation:
    raw = await self._client().call(
      "GET",
      f"{self.url}/screenshot",
      self._call_s,
      params={"wait_to_stabilize": "true" if self._stabilize else "false"},
    )
    # Millions of numbers in text: not for the event loop.
    pixels = await http_lib.read(
      lambda: _pixels(raw), len(raw), self._call_s, "a screenshot"
    )
    if isinstance(pixels, str):
      raise AndroidWorldError(f"{self.url}: {pixels}")
    return base.Observation(pixels, **more)

  async def _ask(
    self, method: str, path: str, seconds: float, **more: Any
  ) -> dict[str, Any]:
    return await self._client().ask(
      method, f"{self.url}{path}", seconds, **more
    )

  def _client(self) -> http_lib.Http:
    if self._http is None:
      self._http = http_lib.Http(AndroidWorldError)
    return self._http


def _pixels(raw: bytes) -> np.ndarray | str:
  """uint8[H, W, 3] of a screenshot's answer, or a text that names its fault."""
  try:
    pixels = np.asarray(json_text.parse(raw)["pixels"])
  except (ValueError, KeyError, TypeError) as error:
    return f"no screenshot: {type(error).__name__}: {error}"
  try:
    return wire.from_numbers(pixels)
  except wire.WireError as error:
    return str(error)
