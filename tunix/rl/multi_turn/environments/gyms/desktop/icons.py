"""Holds the pictures of the desktop icons, 20 x 20 layout units each.

Drawn from rectangles and masks so that they stay crisp at every factor. An
unknown name is refused by `draw`.
"""

from __future__ import annotations

from typing import Callable

from tunix.rl.multi_turn.environments.gyms.desktop.canvas import Canvas

_WHITE = (250, 250, 252)
_INK = (30, 36, 52)
_PAINTERS: dict[str, Callable[[Canvas, int, int], None]] = {}


def _icon(name: str):
  def register(paint):
    _PAINTERS[name] = paint
    return paint
  return register


def draw(c: Canvas, name: str, x: int, y: int) -> None:
  """Draws the icon `name` with its top left corner at (x, y)."""
  if name not in _PAINTERS:
    raise KeyError(
        f"no desktop icon is called {name!r}; known: {', '.join(_PAINTERS)}"
    )
  _PAINTERS[name](c, x, y)


@_icon("Mail")
def _mail(c, x, y):
  c.rect(x, y + 3, 20, 14, _INK)
  c.rect(x + 1, y + 4, 18, 12, _WHITE)
  for i in range(9):
    c.rect(x + 1 + i, y + 4 + i * 7 // 9, 2, 1, (214, 60, 60))
    c.rect(x + 17 - i, y + 4 + i * 7 // 9, 2, 1, (214, 60, 60))


@_icon("Music")
def _music(c, x, y):
  c.shape("round3", x, y, 20, 20, (226, 62, 120))
  c.rect(x + 7, y + 4, 2, 11, _WHITE)
  c.rect(x + 14, y + 4, 2, 9, _WHITE)
  c.rect(x + 7, y + 4, 9, 3, _WHITE)
  c.shape("circle", x + 4, y + 12, 5, 5, _WHITE)
  c.shape("circle", x + 11, y + 10, 5, 5, _WHITE)


@_icon("Files")
def _files(c, x, y):
  c.rect(x + 1, y + 2, 8, 4, (196, 140, 20))
  c.shape("round1", x, y + 4, 20, 14, (196, 140, 20))
  c.shape("round1", x, y + 7, 20, 11, (250, 200, 70))


@_icon("Photos")
def _photos(c, x, y):
  c.rect(x, y + 2, 20, 16, _WHITE)
  c.rect(x + 2, y + 4, 16, 12, (110, 190, 240))
  c.shape("circle", x + 12, y + 5, 5, 5, (250, 210, 60))
  c.shape("triangle", x + 2, y + 7, 11, 9, (40, 130, 70))
  c.shape("triangle", x + 9, y + 9, 9, 7, (70, 160, 90))


@_icon("Clock")
def _clock(c, x, y):
  c.shape("circle", x, y, 20, 20, _INK)
  c.shape("circle", x + 2, y + 2, 16, 16, _WHITE)
  c.rect(x + 9, y + 4, 2, 7, _INK)
  c.rect(x + 9, y + 10, 6, 2, (214, 60, 60))


@_icon("Notes")
def _notes(c, x, y):
  c.rect(x + 2, y, 16, 20, (176, 140, 30))
  c.rect(x + 3, y + 1, 14, 18, (255, 238, 140))
  c.rect(x + 3, y + 1, 14, 3, (236, 160, 40))
  for row in (7, 10, 13, 16):
    c.rect(x + 5, y + row, 10 if row < 16 else 6, 1, (120, 96, 30))


@_icon("Maps")
def _maps(c, x, y):
  c.rect(x, y + 2, 20, 17, (236, 240, 220))
  c.rect(x, y + 2, 7, 17, (150, 205, 130))
  c.rect(x + 13, y + 2, 7, 17, (130, 190, 235))
  c.rect(x, y + 12, 20, 2, (250, 220, 110))
  c.shape("circle", x + 6, y, 9, 9, (220, 40, 40))
  c.shape("down", x + 6, y + 5, 9, 9, (220, 40, 40))
  c.rect(x + 9, y + 3, 3, 3, _WHITE)


@_icon("Chat")
def _chat(c, x, y):
  c.shape("round3", x, y + 1, 20, 14, (46, 180, 90))
  c.shape("down", x + 3, y + 11, 8, 9, (46, 180, 90))
  for dot in (4, 9, 14):
    c.rect(x + dot, y + 7, 2, 2, _WHITE)


@_icon("Trash")
def _trash(c, x, y):
  c.rect(x + 7, y + 1, 6, 2, (90, 98, 112))
  c.rect(x + 2, y + 3, 16, 2, (90, 98, 112))
  c.rect(x + 4, y + 6, 12, 14, (160, 170, 186))
  for bar in (6, 9, 12):
    c.rect(x + bar, y + 8, 1, 10, (90, 98, 112))


@_icon("Games")
def _games(c, x, y):
  c.shape("round4", x, y + 4, 20, 13, (96, 70, 190))
  c.rect(x + 4, y + 9, 6, 2, _WHITE)
  c.rect(x + 6, y + 7, 2, 6, _WHITE)
  c.rect(x + 15, y + 7, 2, 2, (250, 210, 60))
  c.rect(x + 12, y + 11, 2, 2, (240, 90, 90))


@_icon("Camera")
def _camera(c, x, y):
  c.rect(x + 6, y + 2, 8, 3, (60, 66, 80))
  c.shape("round2", x, y + 4, 20, 14, (60, 66, 80))
  c.shape("circle", x + 5, y + 6, 10, 10, _WHITE)
  c.shape("circle", x + 7, y + 8, 6, 6, (50, 110, 200))
  c.rect(x + 16, y + 6, 2, 2, (250, 210, 60))


@_icon("Books")
def _books(c, x, y):
  c.rect(x + 1, y + 2, 5, 17, (200, 60, 50))
  c.rect(x + 7, y + 4, 5, 15, (40, 110, 200))
  c.rect(x + 13, y + 1, 6, 18, (40, 150, 90))
  c.rect(x + 2, y + 5, 3, 2, _WHITE)
  c.rect(x + 8, y + 7, 3, 2, _WHITE)
  c.rect(x + 14, y + 4, 4, 2, _WHITE)
