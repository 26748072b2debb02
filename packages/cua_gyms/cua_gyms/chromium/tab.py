"""Drives one browser tab: the part common to all pages that a gym shows.

`Tab` opens a target in a browser context of its own, carries out mouse and
keyboard input by the DevTools protocol and runs scripts. `pool.Browser` lends
tabs; the gyms' own tabs derive from this one and add screenshots.

Promises:
* Input is sent as events, never as code: no text that is typed can be anything
  but text.
* After an error (`dead` is set) the tab is of no more use: open another.
  Everything that waits for it ends at once.

Does not know `GuiAction` (see `actions`) and takes no screenshots.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Callable, Mapping, TypeVar

import numpy as np

from cua_gyms.chromium import devtools
from cua_gyms.chromium import keys as keys_lib

_BUTTON_BITS = {"left": 1, "right": 2, "middle": 4, "back": 8, "forward": 16}
T = TypeVar("T", bound="Tab")


class Tab:
  """A tab in a context of its own. See the module docstring.

  Attributes:
    chromium: the browser.
    target, context: its DevTools ids.
    url: Address of the page it shows, "" when it shows none.
    dead: Error that made it unusable, or None.
    scale: pixels of the screen for each CSS pixel.
    pointer: Position of the mouse, in CSS pixels.
  """

  VIEW = (360, 240)
  """CSS pixels of the viewport when the tab opens."""

  def __init__(
    self,
    chromium: devtools.Chromium,
    context: str,
    target: str,
    session: str,
    deadline_s: float,
  ):
    """Use `open`."""
    self.chromium = chromium
    self.context = context
    self.target = target
    self.session = session
    self.url = ""
    self.dead: devtools.DevToolsError | None = None
    self.scale = 1.0
    self.pointer = (0.0, 0.0)
    self._deadline_s = deadline_s
    self._listening: list[str] = []
    self._carried: Mapping[str, Any] | None = None  # By the current drag.

  @classmethod
  async def open(
    cls: type[T],
    chromium: devtools.Chromium,
    context: str,
    deadline_s: float = 60.0,
    settings: Mapping[str, Any] | None = None,
  ) -> T:
    """Opens a tab in a browser context.

    Args:
      chromium: the browser.
      context: id of a browser context made for this tab alone.
      deadline_s: Deadline of each command and each wait of this tab, seconds.
      settings: Arguments of `_prepare` of this kind of tab.

    Raises:
      DevToolsError
    """
    call = chromium.call
    width, height = cls.VIEW
    target = await call(
      "Target.createTarget",
      {
        "url": "about:blank",
        "width": width,
        "height": height,
        "browserContextId": context,
      },
      deadline_s=deadline_s,
    )
    attached = await call(
      "Target.attachToTarget",
      {"targetId": target["targetId"], "flatten": True},
      deadline_s=deadline_s,
    )
    self = cls(
      chromium, context, target["targetId"], attached["sessionId"], deadline_s
    )
    self.listen("Page.javascriptDialogOpening", self._on_dialog)
    self.listen("Input.dragIntercepted", self._on_carried)
    await self.all(
      (
        ("Page.enable", {}),
        ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
      )
    )
    await self._prepare(**(settings or {}))
    # Until the blank page has loaded its event could pass for another's.
    await self.evaluate(
      "new Promise(done => document.readyState === 'complete'"
      " ? done() : addEventListener('load', () => setTimeout(done)))"
    )
    return self

  async def _prepare(self, *args: Any, **settings: Any) -> None:
    """Sets up a kind of tab, before anything is shown."""

  async def view(self, width: int, height: int, scale: float = 1.0) -> None:
    """Sets the viewport, in CSS pixels, and device pixels for each of them."""
    # Were the view itself not scaled, too, each screenshot would scale it while
    # it is taken, and misplace input that comes before that is undone.
    await self.all(
      (
        (
          "Emulation.setDeviceMetricsOverride",
          {
            "width": width,
            "height": height,
            "deviceScaleFactor": scale,
            "scale": scale,
            "mobile": False,
            "dontSetVisibleSize": True,
          },
        ),
        (
          "Emulation.setVisibleSize",
          {
            "width": math.ceil(width * scale),
            "height": math.ceil(height * scale),
          },
        ),
        # The browser's own drag and drop takes no notice of a view's scale.
        ("Input.setInterceptDrags", {"enabled": scale != 1}),
      )
    )
    self.scale = scale

  async def evaluate(self, expression: str) -> Any:
    """Evaluates a JavaScript expression, or its promise, to a JSON value.

    Raises:
      CommandFailed: the script raised; the message is its exception's text.
    """
    result = await self.post(
      "Runtime.evaluate",
      {"expression": expression, "returnByValue": True, "awaitPromise": True},
    )
    thrown = result.get("exceptionDetails")
    if thrown:
      text = thrown.get("exception", {}).get("description", thrown["text"])
      raise devtools.CommandFailed(f"{self.url}: {text[:500]}")
    return result["result"].get("value")

  # Input; all positions in CSS pixels.

  async def click(
    self, x: float, y: float, button: str, count: int, modifiers: int = 0
  ) -> None:
    """Moves to (x, y) and clicks `count` times."""
    commands = [self._mouse("mouseMoved", x, y, modifiers=modifiers)]
    for number in range(1, count + 1):
      for kind in ("mousePressed", "mouseReleased"):
        commands.append(self._mouse(kind, x, y, button, number, modifiers))
    await self.all(commands)

  async def move(self, x: float, y: float) -> None:
    await self.all((self._mouse("mouseMoved", x, y),))

  async def press(self, x: float, y: float, hold_ms: float) -> None:
    """Moves to (x, y) and holds the left button for a while."""
    await self.all(
      (
        self._mouse("mouseMoved", x, y),
        self._mouse("mousePressed", x, y, "left", 1),
      )
    )
    await self.pause(hold_ms)
    await self.all((self._mouse("mouseReleased", x, y, "left", 1),))

  async def drag(
    self, x: float, y: float, x2: float, y2: float, button: str = "left"
  ) -> None:
    """Presses at (x, y), moves in a straight line and releases at the end."""
    self._carried = None
    await self.all(
      (
        self._mouse("mouseMoved", x, y),
        self._mouse("mousePressed", x, y, button, 1),
      )
    )
    steps = int(min(8, max(2, np.hypot(x2 - x, y2 - y) // 16)))
    path = [
      (x + (x2 - x) * step / steps, y + (y2 - y) * step / steps)
      for step in range(1, steps + 1)
    ]
    # Once more: a drop target accepts only when it is moved over, not yet
    # when it is entered; and of a drag we may hear just after its move is over.
    path.append((x2, y2))
    kind = "dragEnter"
    for place in path:
      # Awaited one by one: moves that queue up are merged into one.
      if self._carried is None:
        await self.all((self._mouse("mouseMoved", *place, button, 0),))
      else:
        await self.all((self._carry(kind, *place),))
        kind = "dragOver"
    if self._carried is None:
      await self.all((self._mouse("mouseReleased", x2, y2, button, 1),))
      return
    kinds = (kind, "dragOver", "drop")
    await self.all([self._carry(kind, x2, y2) for kind in kinds])

  async def scroll(self, x: float, y: float, dx: float, dy: float) -> None:
    """Turns the wheel at (x, y) by pixels; dy > 0 scrolls down."""
    method, params = self._mouse("mouseWheel", x, y)
    await self.all(((method, params | {"deltaX": dx, "deltaY": dy}),))
    # The wheel is answered before the scrolling that it causes is sent to the
    # page; this move comes after that.
    await self.all((self._mouse("mouseMoved", x, y),))

  async def type_text(self, text: str) -> None:
    await self.all(keys_lib.text_events(text))

  async def press_keys(
    self, names: tuple[str, ...], hold_ms: float = 0
  ) -> None:
    """Presses keys together.

    Raises:
      UnknownKey: before anything is pressed.
    """
    down, up = keys_lib.key_events(names)
    await self.all(down)
    if hold_ms > 0:
      await self.pause(hold_ms)
    await self.all(up)

  async def back(self) -> str:
    """Goes back a page; returns the reason if it cannot, else ""."""
    return "this page has no system_button 'back'"

  async def pause(self, milliseconds: float) -> None:
    """Lets the page's time pass."""
    await asyncio.sleep(milliseconds / 1000)

  def _mouse(
    self, kind, x, y, button="none", count=0, modifiers=0
  ) -> keys_lib.Command:
    self.pointer = (x, y)
    params = {
      "type": kind,
      "x": x * self.scale,
      "y": y * self.scale,
      "modifiers": modifiers,
    }
    if button != "none":
      params["button"] = button
      params["clickCount"] = count
      if kind != "mouseReleased":
        params["buttons"] = _BUTTON_BITS[button]
    return "Input.dispatchMouseEvent", params

  def _carry(self, kind: str, x: float, y: float) -> keys_lib.Command:
    self.pointer = (x, y)
    return "Input.dispatchDragEvent", {
      "type": kind,
      "x": x,
      "y": y,
      "data": self._carried,
    }

  def _on_carried(self, params: Mapping[str, Any]) -> None:
    self._carried = params["data"]

  # Plumbing.

  def listen(self, method: str, callback: Callable[[Any], None]) -> None:
    """Calls `callback(params)` on an event of this tab."""
    self._listening.append(method)
    self.chromium.listen(self.session, method, callback)

  def post(
    self, method: str, params: Mapping[str, Any] | None = None
  ) -> asyncio.Future:
    """Sends a command now; see `devtools.Chromium.post`."""
    if self.dead is not None:
      future = asyncio.get_running_loop().create_future()
      future.set_exception(self.dead)
      future.exception()  # Marked as seen: only one of several is awaited.
      return future
    return self.chromium.post(method, params, self.session, self._deadline_s)

  def send(self, method: str, params: Mapping[str, Any] | None = None) -> None:
    """Sends a command without waiting for its outcome."""
    self.chromium.send(method, params, self.session)

  async def all(self, commands) -> None:
    """Sends commands in one go, in order, and waits for all of them."""
    for future in [self.post(*command) for command in commands]:
      await future

  def _on_dialog(self, params: Mapping[str, Any]) -> None:
    del params
    self.send("Page.handleJavaScriptDialog", {"accept": True})

  def on_popup(self, target: str) -> None:
    """A window that the page has opened; it is closed already."""

  def fail(self, error: devtools.DevToolsError) -> None:
    """Marks the tab as dead and ends everything that waits for it."""
    if self.dead is not None:
      return
    self.dead = error
    self.chromium.fail_session(self.session, error)
    for future in self._waiting():
      if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # Retrieved, in case its waiter is gone.

  def _waiting(self) -> tuple[asyncio.Future | None, ...]:
    """Futures of this tab's own that `fail` ends."""
    return ()

  def close(self) -> None:
    """Closes the tab and its context. Idempotent; does not wait."""
    self.fail(devtools.PageCrashed("the page was closed"))
    for method in self._listening:
      self.chromium.listen(self.session, method, None)
    self._listening.clear()
    self.chromium.send(
      "Target.disposeBrowserContext", {"browserContextId": self.context}
    )
