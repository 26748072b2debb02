"""Drives a browser tab that shows MiniWoB++ pages, episode after episode.

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
import math
import pathlib
from typing import Any

import numpy as np
from PIL import Image

from cua_gyms import miniwob
from cua_gyms.chromium import devtools
from cua_gyms.chromium import tab as tab_lib

WIDTH, HEIGHT = miniwob.PAGE_SIZE  # The part that a policy sees.
_VIEW_WIDTH, _VIEW_HEIGHT = 360, 240  # Smaller ones make pages scroll.
_MARGIN = 40  # Room for the marker, beside the part in a screenshot.
_MARKER_SIZE = 8
_FRAME_WAITS_S = (0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 2.0, 2.0, 2.0)
_NO_LIMIT_MS = 2_000_000_000  # Fits the 31 bits of a timer.
# A renderer keeps a little of each page that it has shown: after 100 starts it
# has grown by some 15 MB. A new tab has a new one.
STARTS_PER_TAB = 100
_STARTS_PER_LOAD = 50  # So that what an instance leaves behind cannot pile up.

_PRELUDE = (
  (pathlib.Path(__file__).parent / "prelude.js")
  .read_text(encoding="utf-8")
  .replace("MARKER_SIZE", str(_MARKER_SIZE))
)


@dataclasses.dataclass(frozen=True, eq=False)
class Shot:
  """A screenshot, and the page's state of the episode.

  Attributes:
    pixels: uint8[H, W, 3], see `WobPage.show`; None where no screenshot was
      asked for.
    done: the episode has ended.
    raw_reward: the page's verdict, -1 to 1; 0 until it is done.
    timed_reward: the same, smaller the later in page time it was earned.
    reason: the page's own words, mostly None.
    page_ms: page time since the instance's start.
  """

  pixels: np.ndarray | None
  done: bool
  raw_reward: float
  timed_reward: float
  reason: str | None
  page_ms: float


class WobPage(tab_lib.Tab):
  """A tab that shows MiniWoB++ pages; see the module docstring.

  Attributes:
    url: Address of the page it shows, "" when it shows none.
    width, height: Size of a screenshot, in CSS pixels.
  """

  VIEW = (_VIEW_WIDTH, _VIEW_HEIGHT)

  def __init__(self, *args: Any):
    """Use `open`."""
    super().__init__(*args)
    self.width: float = WIDTH
    self.height: float = HEIGHT
    self._view = self.VIEW
    self._number = 0
    self._starts = 0  # Since its page was loaded.
    self._all_starts = 0
    self._unacknowledged: list[int] = []
    self._frame: asyncio.Future | None = None
    self._loaded: asyncio.Future | None = None

  async def _prepare(self) -> None:
    self.listen("Page.screencastFrame", self._on_frame)
    self.listen("Page.loadEventFired", self._on_load)
    await self.show(WIDTH, HEIGHT)
    await self.all(
      (
        ("Page.addScriptToEvaluateOnNewDocument", {"source": _PRELUDE}),
        ("Page.startScreencast", {"format": "png", "everyNthFrame": 1}),
      )
    )

  async def show(self, width: float, height: float, scale: float = 1) -> None:
    """Sets the area of a screenshot, from the page's top left corner.

    Args:
      width, height: CSS pixels, at least those of the task's area.
      scale: pixels of a screenshot for each of them.
    """
    self.width, self.height = width, height
    self.url = ""  # Laid out for another view: load it anew.
    self._view = (
      max(_VIEW_WIDTH, math.ceil(width) + _MARGIN),
      max(_VIEW_HEIGHT, math.ceil(height)),
    )
    await self.view(*self._view, scale)

  # Episodes.

  @property
  def worn(self) -> bool:
    """Whether the next episode should use another tab."""
    return self._all_starts >= STARTS_PER_TAB

  async def start(
    self,
    url: str,
    seed: int,
    *,
    data_mode: str = "default",
    time_limit: bool = False,
    images: tuple[str, ...] = (),
    reload: bool = True,
    pixels: bool = True,
  ) -> tuple[Shot, str]:
    """Starts an instance; returns its first screenshot and its goal.

    Args:
      url: Address of the task's page.
      seed: decides the instance.
      data_mode: "default", "train" or "test", for pages that have a split.
      time_limit: keep the page's own limit (in its time).
      images: addresses of the pictures that the page may show later, loaded
        before it starts.
      reload: load the page anew even when it is shown already. Without this,
        traces of the last episode may remain.
      pixels: Whether a screenshot is taken.
    """
    self._starts += 1
    self._all_starts += 1
    if reload or self.url != url or self._starts > _STARTS_PER_LOAD:
      await self._load(url)
      self._starts = 1
    # Away from the task, or what lies under the last click would be hovered.
    await self.move(self._view[0] - 20.0, self._view[1] - 20.0)
    arguments = (
      int(seed),
      data_mode,
      0 if time_limit else _NO_LIMIT_MS,
      list(images),
    )
    goal = await self.evaluate(f"__tunix.start(...{json.dumps(arguments)})")
    return await (self.shot() if pixels else self.advance(0)), goal

  async def _load(self, url: str) -> None:
    self.url = ""
    self._loaded = asyncio.get_running_loop().create_future()
    result = await self.post("Page.navigate", {"url": url})
    if "errorText" in result:
      # The page is a file, so what aborts its loading is the end of the process
      # that renders it, or a navigation that the last page had begun.
      aborted = result["errorText"] == "net::ERR_ABORTED"
      kind = devtools.PageCrashed if aborted else devtools.CommandFailed
      raise kind(f"cannot load {url}: {result['errorText']}")
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

  async def pause(self, milliseconds: float) -> None:
    await self.advance(milliseconds)

  async def shot(self, milliseconds: float = 0, settle: bool = False) -> Shot:
    """Returns the page's state and a screenshot after some of its time.

    Args:
      milliseconds: page time to let pass first.
      settle: first let the browser draw once, when it notifies the page that
        something was scrolled; costs a sixtieth of a second.
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
    ended, raw, timed, reason, page_ms = await self.evaluate(
      f"__tunix.step({self._number}, {milliseconds}, {json.dumps(settle)})"
    )
    return Shot(
      None, bool(ended), float(raw), float(timed), reason, float(page_ms)
    )

  def _acknowledge(self, identifier: int) -> None:
    self.send("Page.screencastFrameAck", {"sessionId": identifier})

  def _on_frame(self, params: dict[str, Any]) -> None:
    if self._frame is None or self._frame.done():
      # No call waits for a frame: it is left unanswered, so that an animated
      # page sends no more.
      self._unacknowledged.append(params["sessionId"])
      return
    self._acknowledge(params["sessionId"])
    picture = Image.open(io.BytesIO(base64.b64decode(params["data"])))
    if any(
      abs(side - css * self.scale) >= 1
      for side, css in zip(picture.size, self._view)
    ):
      return  # From before the view was changed.
    pixels = np.asarray(picture.convert("RGB"))
    middle = round(_MARKER_SIZE // 2 * self.scale)
    red, green, _ = pixels[middle, -middle].tolist()
    if red + 256 * green == self._number:
      height, width = (round(s * self.scale) for s in (self.height, self.width))
      self._frame.set_result(pixels[:height, :width].copy())

  def _on_load(self, _: dict[str, Any]) -> None:
    if self._loaded is not None and not self._loaded.done():
      self._loaded.set_result(None)

  def _waiting(self) -> tuple[asyncio.Future | None, ...]:
    return self._frame, self._loaded
