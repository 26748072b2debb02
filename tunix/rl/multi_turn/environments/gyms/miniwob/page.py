"""One browser tab that shows MiniWoB++ pages, one episode after another.

`WobPage` loads a task's page, starts an instance of it, carries out mouse and
keyboard input, lets the page's time pass and takes screenshots.

Promises:
* A screenshot shows the page after everything that was done before it: a
  marker beside the task's area takes a new colour in the same script that
  reads the page's state, and the first frame with that colour is the one.
* The page's time is virtual. It stands still except for the milliseconds that
  `shot` and `advance` give it, so timers, animations, dates and the page's
  time limit depend on the actions alone, never on how long the policy thinks.
  (A script that runs before the page's own takes the place of its clock. The
  browser's own virtual time is not used: pages cannot be loaded reliably
  under it.)
* The clipboard is the page's own, windows that it opens are closed, dialogs
  are accepted, and it cannot leave its document.
* After an error (`dead` is set) the tab is of no more use: open another.

Does not know `GuiAction`, rewards as scores, or the pool of tabs.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import pathlib
from typing import Any

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.environments.gyms.miniwob import devtools
from tunix.rl.multi_turn.environments.gyms.miniwob import keys as keys_lib

WIDTH, HEIGHT = 160, 210  # The task's area, which is all that a policy sees.
_VIEW_WIDTH, _VIEW_HEIGHT = 360, 240  # Smaller ones make pages scroll.
_MARKER_X, _MARKER_SIZE = 200, 8
_FRAME_WAITS_S = (0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 2.0, 2.0, 2.0)
_PARKED = (_VIEW_WIDTH - 20.0, _VIEW_HEIGHT - 20.0)  # A pointer at rest.
_NO_LIMIT_MS = 2_000_000_000  # Fits the 31 bits of a timer.
_STARTS_PER_LOAD = 50  # So that what an instance leaves behind cannot pile up.
_BUTTON_BITS = {"left": 1, "right": 2, "middle": 4, "back": 8, "forward": 16}

_PRELUDE = (
    (pathlib.Path(__file__).parent / "prelude.js")
    .read_text(encoding="utf-8")
    .replace("MARKER_X", str(_MARKER_X))
    .replace("MARKER_SIZE", str(_MARKER_SIZE))
)


@dataclasses.dataclass(frozen=True, eq=False)
class Shot:
  """What the page shows and what it says about the episode.

  Attributes:
    pixels: uint8[210, 160, 3]; None where no screenshot was asked for.
    done: the episode has ended.
    raw_reward: the page's verdict, -1 to 1; 0 until it is done.
    timed_reward: the same, smaller the later the page says it was earned.
    reason: the page's own words, mostly None.
    page_ms: page time since the instance's start.
  """

  pixels: np.ndarray | None
  done: bool
  raw_reward: float
  timed_reward: float
  reason: str | None
  page_ms: float


class WobPage:
  """A tab in a context of its own. See the module docstring.

  Attributes:
    target, context: its DevTools ids.
    url: of the page it shows, "" when it shows none.
    dead: why it is of no more use, or None.
    pointer: where the mouse is, in pixels.
  """

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
    self.pointer = (0.0, 0.0)
    self._deadline_s = deadline_s
    self._number = 0
    self._starts = 0  # Since its page was loaded.
    self._unacknowledged: list[int] = []
    self._frame: asyncio.Future | None = None
    self._loaded: asyncio.Future | None = None

  @classmethod
  async def open(
      cls,
      chromium: devtools.Chromium,
      context: str,
      deadline_s: float = 60.0,
  ) -> WobPage:
    """Opens a tab in a browser context.

    Args:
      chromium: the browser.
      context: id of a browser context made for this tab alone.
      deadline_s: for each command and each wait of this tab, seconds.

    Raises:
      DevToolsError
    """
    call = chromium.call
    target = await call(
        "Target.createTarget",
        {
            "url": "about:blank",
            "width": _VIEW_WIDTH,
            "height": _VIEW_HEIGHT,
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
    for method, callback in (
        ("Page.screencastFrame", self._on_frame),
        ("Page.loadEventFired", self._on_load),
        ("Page.javascriptDialogOpening", self._on_dialog),
    ):
      chromium.listen(self.session, method, callback)
    await self._all((
        ("Page.enable", {}),
        (
            "Emulation.setDeviceMetricsOverride",
            {
                "width": _VIEW_WIDTH,
                "height": _VIEW_HEIGHT,
                "deviceScaleFactor": 1,
                "mobile": False,
            },
        ),
        ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
        ("Page.addScriptToEvaluateOnNewDocument", {"source": _PRELUDE}),
        ("Page.startScreencast", {"format": "png", "everyNthFrame": 1}),
    ))
    # Until the blank page has loaded its event could pass for another's.
    await self.evaluate(
        "new Promise(done => document.readyState === 'complete'"
        " ? done() : addEventListener('load', () => setTimeout(done)))"
    )
    return self

  # Episodes.

  async def start(
      self,
      url: str,
      seed: int,
      *,
      data_mode: str = "default",
      time_limit: bool = False,
      images: tuple[str, ...] = (),
      reload: bool = True,
  ) -> tuple[Shot, str]:
    """Starts an instance; returns its first screenshot and its goal.

    Args:
      url: of the task's page.
      seed: decides the instance.
      data_mode: "default", "train" or "test", for pages that have a split.
      time_limit: keep the page's own limit (in its time).
      images: addresses of the pictures that the page may show later, loaded
        before it starts.
      reload: load the page anew even when it is shown already. Without this,
        traces of the last episode may remain.
    """
    self._starts += 1
    if reload or self.url != url or self._starts > _STARTS_PER_LOAD:
      await self._load(url)
      self._starts = 1
    # Away from the task, or what lies under the last click would be hovered.
    await self.move(*_PARKED)
    arguments = (
        int(seed), data_mode, 0 if time_limit else _NO_LIMIT_MS, list(images)
    )
    goal = await self.evaluate(f"__tunix.start(...{json.dumps(arguments)})")
    return await self.shot(), goal

  async def _load(self, url: str) -> None:
    self.url = ""
    self._loaded = asyncio.get_running_loop().create_future()
    result = await self._post("Page.navigate", {"url": url})
    if "errorText" in result:
      raise devtools.CommandFailed(f"cannot load {url}: {result['errorText']}")
    try:
      await asyncio.wait_for(self._loaded, self._deadline_s)
    except asyncio.TimeoutError:
      raise devtools.CommandTimeout(
          f"{url} was not loaded in {self._deadline_s:g} s"
      ) from None
    self.url = url

  async def advance(self, milliseconds: float, settle: bool = False) -> Shot:
    """`shot` without the pixels."""
    return await self._step(milliseconds, settle)

  async def shot(self, milliseconds: float = 0, settle: bool = False) -> Shot:
    """A screenshot of the page after some of its time, and its state.

    Args:
      milliseconds: page time to let pass first.
      settle: first let the browser draw once, which is when it tells the page
        that something was scrolled; costs a sixtieth of a second.
    """
    for identifier in self._unacknowledged:
      self._acknowledge(identifier)
    self._unacknowledged.clear()
    self._frame = asyncio.get_running_loop().create_future()
    try:
      for wait_s in _FRAME_WAITS_S:
        # A new number each time: the browser may have dropped the frame.
        self._number = self._number % 65535 + 1
        state = await self._step(milliseconds, settle)
        milliseconds, settle = 0, False
        try:
          pixels = await asyncio.wait_for(asyncio.shield(self._frame), wait_s)
        except asyncio.TimeoutError:
          continue
        return dataclasses.replace(state, pixels=pixels)
    finally:
      if self._frame.done() and not self._frame.cancelled():
        self._frame.exception()  # Marked as seen.
      self._frame = None
    raise devtools.CommandTimeout(
        f"no screenshot of {self.url} in {sum(_FRAME_WAITS_S):.0f} s"
    )

  async def _step(self, milliseconds: float, settle: bool) -> Shot:
    done, raw, timed, reason, page_ms = await self.evaluate(
        f"__tunix.step({self._number}, {milliseconds}, {json.dumps(settle)})"
    )
    return Shot(
        None, bool(done), float(raw), float(timed), reason, float(page_ms)
    )

  async def evaluate(self, expression: str) -> Any:
    """The JSON value of a JavaScript expression in the page, or its promise.

    Raises:
      CommandFailed: with the text of what the page's script threw.
    """
    result = await self._post(
        "Runtime.evaluate",
        {"expression": expression, "returnByValue": True, "awaitPromise": True},
    )
    thrown = result.get("exceptionDetails")
    if thrown:
      text = thrown.get("exception", {}).get("description", thrown["text"])
      raise devtools.CommandFailed(f"{self.url}: {text[:500]}")
    return result["result"].get("value")

  # Input.

  async def click(
      self, x: float, y: float, button: str, count: int, modifiers: int = 0
  ) -> None:
    """Moves to (x, y) and clicks `count` times."""
    commands = [self._mouse("mouseMoved", x, y, modifiers=modifiers)]
    for number in range(1, count + 1):
      for kind in ("mousePressed", "mouseReleased"):
        commands.append(self._mouse(kind, x, y, button, number, modifiers))
    await self._all(commands)

  async def move(self, x: float, y: float) -> None:
    await self._all((self._mouse("mouseMoved", x, y),))

  async def press(self, x: float, y: float, hold_ms: float) -> None:
    """Moves to (x, y) and holds the left button for a while."""
    await self._all((
        self._mouse("mouseMoved", x, y),
        self._mouse("mousePressed", x, y, "left", 1),
    ))
    await self.advance(hold_ms)
    await self._all((self._mouse("mouseReleased", x, y, "left", 1),))

  async def drag(
      self, x: float, y: float, x2: float, y2: float, button: str = "left"
  ) -> None:
    """Presses at (x, y), moves in a straight line and releases at the end."""
    await self._all((
        self._mouse("mouseMoved", x, y),
        self._mouse("mousePressed", x, y, button, 1),
    ))
    steps = int(min(8, max(2, np.hypot(x2 - x, y2 - y) // 16)))
    for step in range(1, steps + 1):
      # Awaited one by one: moves that queue up are merged into one.
      part = step / steps
      await self._all((
          self._mouse(
              "mouseMoved",
              x + (x2 - x) * part,
              y + (y2 - y) * part,
              button,
              0,
          ),
      ))
    await self._all((self._mouse("mouseReleased", x2, y2, button, 1),))

  async def scroll(self, x: float, y: float, dx: float, dy: float) -> None:
    """Turns the wheel at (x, y) by pixels; dy > 0 shows what is below."""
    method, params = self._mouse("mouseWheel", x, y)
    await self._all(((method, params | {"deltaX": dx, "deltaY": dy}),))
    # The wheel is answered before the scrolling that it causes is sent to the
    # page; this move comes after that.
    await self._all((self._mouse("mouseMoved", x, y),))

  async def type_text(self, text: str) -> None:
    await self._all(keys_lib.text_events(text))

  async def press_keys(
      self, names: tuple[str, ...], hold_ms: float = 0
  ) -> None:
    """Presses keys together.

    Raises:
      UnknownKey: before anything is pressed.
    """
    down, up = keys_lib.key_events(names)
    await self._all(down)
    if hold_ms > 0:
      await self.advance(hold_ms)
    await self._all(up)

  def _mouse(
      self, kind, x, y, button="none", count=0, modifiers=0
  ) -> keys_lib.Command:
    self.pointer = (x, y)
    params = {"type": kind, "x": x, "y": y, "modifiers": modifiers}
    if button != "none":
      params["button"] = button
      params["clickCount"] = count
      if kind != "mouseReleased":
        params["buttons"] = _BUTTON_BITS[button]
    return "Input.dispatchMouseEvent", params

  # Plumbing.

  def _post(self, method: str, params: dict[str, Any]) -> asyncio.Future:
    if self.dead is not None:
      future = asyncio.get_running_loop().create_future()
      future.set_exception(self.dead)
      future.exception()  # Marked as seen: only one of several is awaited.
      return future
    return self.chromium.post(method, params, self.session, self._deadline_s)

  async def _all(self, commands) -> None:
    """Sends commands in one go, in order, and waits for all of them."""
    for future in [self._post(*command) for command in commands]:
      await future

  def _acknowledge(self, identifier: int) -> None:
    self.chromium.send(
        "Page.screencastFrameAck", {"sessionId": identifier}, self.session
    )

  def _on_frame(self, params: dict[str, Any]) -> None:
    if self._frame is None or self._frame.done():
      # Nobody looks: left unanswered, so that an animated page does not go on
      # sending pictures.
      self._unacknowledged.append(params["sessionId"])
      return
    self._acknowledge(params["sessionId"])
    picture = Image.open(io.BytesIO(base64.b64decode(params["data"])))
    pixels = np.asarray(picture.convert("RGB"))
    middle = _MARKER_SIZE // 2
    red, green, _ = pixels[middle, _MARKER_X + middle].tolist()
    if red + 256 * green == self._number:
      self._frame.set_result(pixels[:HEIGHT, :WIDTH].copy())

  def _on_load(self, _: dict[str, Any]) -> None:
    if self._loaded is not None and not self._loaded.done():
      self._loaded.set_result(None)

  def _on_dialog(self, _: dict[str, Any]) -> None:
    self.chromium.send(
        "Page.handleJavaScriptDialog", {"accept": True}, self.session
    )

  def fail(self, error: devtools.DevToolsError) -> None:
    """Marks the tab as dead and ends everything that waits for it."""
    if self.dead is not None:
      return
    self.dead = error
    self.chromium.fail_session(self.session, error)
    for future in (self._frame, self._loaded):
      if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # Retrieved, in case its waiter is gone.

  def close(self) -> None:
    """Closes the tab and its context. Idempotent; does not wait."""
    self.fail(devtools.PageCrashed("the page was closed"))
    for method in (
        "Page.screencastFrame",
        "Page.loadEventFired",
        "Page.javascriptDialogOpening",
    ):
      self.chromium.listen(self.session, method, None)
    self.chromium.send(
        "Target.disposeBrowserContext", {"browserContextId": self.context}
    )
