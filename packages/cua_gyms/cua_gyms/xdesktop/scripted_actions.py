"""Reads screenshots and makes actions for scripted oracles.

A script is a generator of `GuiAction`s. It has its task, keyboard shortcuts
and where things lie within a window; where the window is, and that one has
come or gone, it reads from the screenshot, by the color that only the title
bar of the window with the keyboard has.
"""

from __future__ import annotations

from typing import Callable, Iterator

import numpy as np
from tunix.rl.multi_turn.core import gui_action

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
Script = Iterator[Action]
TITLE_COLOR = (0x1F, 0x5F, 0xA8)
TITLE_HEIGHT = 24
"""Of a title bar, in pixels of the screen (etc/themerc.txt)."""
_WAIT_S = 0.3
_MAX_WAITS = 40


class Unsolvable(LookupError):
  """The screenshot does not show the target that the script needs."""


class Hand:
  """Screenshots and actions for a script; see the module docstring."""

  def __init__(self, look: Callable[[], np.ndarray], zoom: int = 1):
    """Args:

    look: the newest screenshot, uint8[H, W, 3].
    zoom: pixels of the screen a pixel of it.
    """
    self._look = look
    self._zoom = zoom

  # -- what is seen ------------------------------------------------------------

  def frame(self) -> tuple[float, float] | None:
    """Top left corner of the window that has the keyboard, or None.

    In pixels of the screen.
    """
    screen = self._look()
    near = np.ones(screen.shape[:2], bool)
    # A reduced picture mixes the bar with the border around it.
    mixed = self._zoom > 1
    for channel, value in enumerate(TITLE_COLOR):
      apart = np.abs(screen[..., channel].astype(np.int16) - value)
      near &= apart <= (16 if mixed else 6)
    rows = np.flatnonzero(near.sum(1) > 60 // self._zoom)
    if not rows.size:
      return None
    bar = near[rows[0] : rows[0] + TITLE_HEIGHT // self._zoom]
    bar_x = int(np.flatnonzero(bar.any(0))[0])
    border = 0.0 if mixed else 1.0
    return bar_x * self._zoom - border, int(rows[0]) * self._zoom - border

  def corner(self) -> tuple[float, float]:
    """Top left corner of the window that has the keyboard.

    Raises:
      Unsolvable: no window has the keyboard.
    """
    frame = self.frame()
    if frame is None:
      raise Unsolvable("no window has the keyboard")
    return frame

  # -- single actions ----------------------------------------------------------

  def key(self, chord: str) -> Action:
    """Keys pressed together: "ctrl+s"."""
    return Action(Kind.KEY, keys=tuple(chord.split("+")))

  def type(self, text: str) -> Action:
    return Action(Kind.TYPE, text=text)

  def at(self, x: float, y: float) -> tuple[float, float]:
    """Converts pixels of the screen to pixels of the screenshot."""
    return x // self._zoom, y // self._zoom

  def click(self, dx: float, dy: float, *, count: int = 1) -> Action:
    """Clicks a point of the focused window, relative to its corner."""
    window_x, window_y = self.corner()
    x, y = self.at(window_x + dx, window_y + dy)
    return Action(Kind.CLICK, x=x, y=y, count=count)

  def click_desktop(self, x: float, y: float) -> Action:
    """Clicks a point of the screen."""
    x, y = self.at(x, y)
    return Action(Kind.CLICK, x=x, y=y)

  def wait(self, seconds: float = _WAIT_S) -> Action:
    return Action(Kind.WAIT, duration=seconds)

  # -- actions and what must follow --------------------------------------------

  def switch(self, action: Action) -> Script:
    """Yields `action` and waits until another window has the keyboard.

    Raises:
      Unsolvable: no other window gets the keyboard.
    """
    before = self.frame()
    yield action
    for _ in range(_MAX_WAITS):
      if self.frame() not in (before, None):
        return
      yield self.wait()
    raise Unsolvable(f"no window came after {action.to_json()}")

  def insist(self, action: Action) -> Script:
    """Does `switch`, and repeats the action while it has no effect.

    A file dialog that still reads its folder ignores Enter.

    Raises:
      Unsolvable: no other window gets the keyboard.
    """
    before = self.frame()
    for _ in range(_MAX_WAITS // 5):
      yield action
      for _ in range(5):
        if self.frame() not in (before, None):
          return
        yield self.wait()
    raise Unsolvable(f"no window came after {action.to_json()}")

  def change(self, action: Action) -> Script:
    """Yields `action` and waits until the picture differs.

    Raises:
      Unsolvable: the picture stays the same.
    """
    before = self._look()
    yield action
    for _ in range(_MAX_WAITS):
      if not np.array_equal(self._look(), before):
        return
      yield self.wait()
    raise Unsolvable(f"nothing changed after {action.to_json()}")
