"""Carries out `GuiAction`s on a tab.

Positions are pixels of a screenshot; those outside it are clamped to its edge,
as a real pointer is. An action that does nothing reports why.
"""

from __future__ import annotations

import dataclasses
import math

from tunix.rl.multi_turn.core import gui_action

from cua_gyms.chromium import axtree
from cua_gyms.chromium import keys as keys_lib
from cua_gyms.chromium import tab as tab_lib

_Kind = gui_action.GuiActionKind
ENDS = frozenset({_Kind.ANSWER, _Kind.TERMINATE})
_ON_ELEMENT = frozenset({_Kind.FILL, _Kind.FOCUS})
MAX_WAIT_S = 60.0
MAX_TEXT = 20_000
"""Characters of one action; what types more does nothing."""
_LONG_PRESS_S = 1.0
_NUMBERS = ("x", "y", "x2", "y2", "dx", "dy", "duration")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of an action.

  Attributes:
    ignored: the reason that the action did nothing; "" if it did.
    clamped: whether a position lay outside the screenshot.
  """

  ignored: str = ""
  clamped: bool = False

  def info(self) -> dict[str, str | bool]:
    """Returns the fields to put into `info`: those that are not empty."""
    notes = (("ignored", self.ignored), ("clamped", self.clamped))
    return {name: value for name, value in notes if value}


async def perform(
  tab: tab_lib.Tab,
  action: gui_action.GuiAction,
  width: int,
  height: int,
  scale: float = 1.0,
  tree: axtree.PageTree | None = None,
) -> Outcome:
  """Carries out an action; those of `ENDS` and a screenshot do nothing.

  Args:
    tab: the tab.
    action: GUI action in pixels of the screenshot.
    width, height: Size of the screenshot.
    scale: Pixels of the screenshot for each CSS pixel of the page.
    tree: Tree whose ids the action may name; None where the page is shown as a
      screenshot only.

  Raises:
    DevToolsError: the browser failed.
  """
  if action.element is not None and tree is None:
    return Outcome("elements have no ids here: the page is a screenshot")
  for name in _NUMBERS:
    number = getattr(action, name)
    if number is not None and not math.isfinite(number):
      return Outcome(f"{name} is {number}: no position, distance or duration")
  if action.text is not None and len(action.text) > MAX_TEXT:
    return Outcome(
      f"text of {len(action.text)} characters; at most {MAX_TEXT} at a time"
    )
  inside = True

  def place(x: float | None, y: float | None) -> tuple[float, float]:
    nonlocal inside
    if x is None or y is None:
      return tab.pointer
    inside &= 0 <= x < width and 0 <= y < height
    return (
      min(max(x, 0.0), width - 1.0) / scale,
      min(max(y, 0.0), height - 1.0) / scale,
    )

  async def where(
    element: str | None, x: float | None, y: float | None
  ) -> tuple[float, float]:
    if element is None or tree is None or action.kind in _ON_ELEMENT:
      return place(x, y)
    return await tree.locate(element)

  try:
    end = await where(action.element2, action.x2, action.y2)
    start = await where(action.element, action.x, action.y)
    if tree is not None and action.kind is _Kind.FILL:
      await tree.fill(action.element or "", action.text or "")
      ignored = ""
    elif tree is not None and action.kind is _Kind.FOCUS:
      await tree.focus(action.element or "")
      ignored = ""
    else:
      ignored = await _do(tab, action, start, end, scale)
  except (keys_lib.UnknownKey, axtree.Unreachable) as error:
    ignored = str(error)
  return Outcome(ignored, not inside)


async def _do(
  tab: tab_lib.Tab,
  action: gui_action.GuiAction,
  start: tuple[float, float],
  end: tuple[float, float],
  scale: float,
) -> str:
  kind = action.kind
  seconds = action.duration
  if seconds is not None:
    seconds = min(max(seconds, 0.0), MAX_WAIT_S)
  if kind is _Kind.CLICK:
    modifiers = keys_lib.modifier_bits(action.keys)
    await tab.click(*start, action.button, action.count, modifiers)
  elif kind is _Kind.MOVE:
    await tab.move(*start)
  elif kind is _Kind.DRAG:
    await tab.drag(*start, *end, action.button)
  elif kind is _Kind.SWIPE:
    await tab.drag(*start, *end)
  elif kind is _Kind.LONG_PRESS:
    held_s = _LONG_PRESS_S if seconds is None else seconds
    await tab.press(*start, 1000 * held_s)
  elif kind is _Kind.SCROLL:
    await tab.scroll(*start, action.dx / scale, action.dy / scale)
  elif kind is _Kind.TYPE:
    await tab.type_text(action.text or "")
  elif kind is _Kind.KEY:
    await tab.press_keys(action.keys, 1000 * (seconds or 0.0))
  elif kind is _Kind.SYSTEM_BUTTON and action.text == "enter":
    await tab.press_keys(("enter",))
  elif kind is _Kind.SYSTEM_BUTTON and action.text == "back":
    return await tab.back()
  elif kind is _Kind.WAIT:
    await tab.pause(1000 * (1.0 if seconds is None else seconds))
  elif kind not in ENDS and kind is not _Kind.SCREENSHOT:
    what = f"{kind.value} {action.text!r}" if action.text else kind.value
    return f"a web page has no {what}"
  return ""
