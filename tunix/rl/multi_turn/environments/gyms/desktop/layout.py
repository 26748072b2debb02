"""Draws random positions without overlap, on a screen of any size."""

from __future__ import annotations

import random
from typing import Sequence

from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words

Rect = tuple[int, int, int, int]


def _overlap(a: Rect, b: Rect, gap: int) -> bool:
  return (
    a[0] < b[0] + b[2] + gap
    and b[0] < a[0] + a[2] + gap
    and a[1] < b[1] + b[3] + gap
    and b[1] < a[1] + a[3] + gap
  )


def _shelves(
  rng: random.Random, area: Rect, sizes: Sequence[tuple[int, int]], gap: int
) -> list[tuple[int, int]] | None:
  """Rows from the top with spare room between them; None if they do not fit."""
  ax, ay, aw, ah = area
  rows: list[list[int]] = [[]]
  used = 0
  for i, (w, _) in enumerate(sizes):
    if w > aw:
      return None
    if rows[-1] and used + gap + w > aw:
      rows.append([])
    used = used + gap + w if rows[-1] else w
    rows[-1].append(i)
  heights = [max(sizes[i][1] for i in row) for row in rows]
  spare = ah - sum(heights) - gap * (len(rows) - 1)
  if spare < 0:
    return None
  out = [(0, 0)] * len(sizes)
  y = ay
  for row, height in zip(rows, heights):
    free = aw - sum(sizes[i][0] for i in row) - gap * (len(row) - 1)
    shift = rng.randrange(spare // len(rows) + 1)
    x = ax
    for i in row:
      x += rng.randrange(free // len(row) + 1)
      out[i] = (x, y + shift)
      x += sizes[i][0] + gap
    y += height + gap + spare // len(rows)
  return out


def place(
  rng: random.Random,
  area: Rect,
  sizes: Sequence[tuple[int, int]],
  gap: int = 3,
  blocked: Sequence[Rect] = (),
) -> list[tuple[int, int]]:
  """Random top left corners for boxes of `sizes` inside `area`.

  Tries random places, larger boxes first; where those keep failing it falls
  back to rows in random order.

  Raises:
    ValueError: the boxes do not fit into the area.
  """
  order = sorted(range(len(sizes)), key=lambda i: -sizes[i][0] * sizes[i][1])
  for _ in range(12):
    spots: dict[int, Rect] = {}
    for i in order:
      spot = free_spot(
        rng, area, sizes[i], (*spots.values(), *blocked), gap, 12
      )
      if spot is None:
        break
      spots[i] = (*spot, *sizes[i])
    else:
      return [spots[i][:2] for i in range(len(sizes))]
  if not blocked:
    shuffled = list(range(len(sizes)))
    rng.shuffle(shuffled)
    for permutation in (shuffled, order):
      rows = _shelves(rng, area, [sizes[i] for i in permutation], gap)
      if rows is not None:
        at = dict(zip(permutation, rows))
        return [at[i] for i in range(len(sizes))]
  raise ValueError(f"{len(sizes)} boxes {list(sizes)} do not fit into {area}")


def free_spot(
  rng: random.Random,
  area: Rect,
  size: tuple[int, int],
  occupied: Sequence[Rect],
  gap: int = 3,
  tries: int = 10,
) -> tuple[int, int] | None:
  """Returns a random free corner for one more box; None when none was found."""
  ax, ay, aw, ah = area
  w, h = size
  if w > aw or h > ah:
    return None
  for _ in range(tries):
    x, y = ax + rng.randrange(aw - w + 1), ay + rng.randrange(ah - h + 1)
    if not any(_overlap((x, y, w, h), other, gap) for other in occupied):
      return x, y
  return None


def window(
  rng: random.Random,
  scene: scene_lib.Scene,
  title: str,
  w: int,
  h: int,
  *,
  grow: bool = True,
  closable: bool = True,
  modal: bool = False,
) -> containers.Window:
  """Adds a window of at least `w` x `h` inside its margins, at random.

  Grows by a random part of the room left over when `grow`.
  """
  w, h = w + 8, h + 8 + containers.TITLE_HEIGHT
  if w > scene.w or h > scene.h:
    raise ValueError(
      f"the window {title!r} of {w}x{h} units does not fit on a desktop of"
      f" {scene.w}x{scene.h}"
    )
  if grow:
    w += rng.randrange(max(1, (scene.w - w) * 2 // 3 + 1))
    h += rng.randrange(max(1, (scene.h - h) * 2 // 3 + 1))
  x, y = rng.randrange(scene.w - w + 1), rng.randrange(scene.h - h + 1)
  return scene.add(
    containers.Window(x, y, w, h, title, closable=closable, modal=modal)
  )


def dialog(
  rng: random.Random,
  scene: scene_lib.Scene,
  title: str,
  message: str,
  labels: Sequence[str],
) -> tuple[containers.Window, list[widgets.Button]]:
  """Adds a modal dialog with a message; returns it and its buttons."""
  sizes = [widgets.Button.size(label) for label in labels]
  total = sum(w for w, _ in sizes)
  width = max(font.text_width(message), total + 6, 70) + 4
  win = window(rng, scene, title, width, 38, modal=True, grow=False)
  x, y, w, h = win.client()
  win.add(widgets.Label(x + 2, y + 4, message))
  gap = (w - total) // (len(labels) + 1)
  button_x, buttons = x + gap, []
  for size, label in zip(sizes, labels):
    buttons.append(win.add(widgets.Button(button_x, y + h - 17, *size, label)))
    button_x += size[0] + gap
  return win, buttons


def clutter(rng: random.Random, scene: scene_lib.Scene, count: int) -> None:
  """Up to `count` icons of other names where the desktop is still free."""
  used = {w.name for item in scene.items for w in item.walk()}
  names = [n for n in words.ICON_NAMES if n not in used]
  blocked = [(i.x, i.y, i.w, i.h) for i in scene.items]
  w, h = items.Icon.SIZE
  for name in rng.sample(names, min(count, len(names))):
    for _ in range(8):
      rect = (rng.randrange(scene.w - w), rng.randrange(scene.h - h), w, h)
      if not any(_overlap(rect, other, 6) for other in blocked):
        scene.items.insert(0, items.Icon(*rect[:2], name))
        blocked.append(rect)
        break


def column(area: Rect, count: int, height: int, gap: int = 3) -> list[int]:
  """Tops of `count` rows of `height`, spread over `area` from its top."""
  _, y, _, h = area
  free = max(0, h - count * height - (count - 1) * gap)
  extra = min(6, free // max(1, count))
  return [y + i * (height + gap + extra) for i in range(count)]
