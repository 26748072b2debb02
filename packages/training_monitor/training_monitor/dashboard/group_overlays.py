"""Draws the attempts of a group on the screen that they all began with.

    group_overlays.add(connection, groups, turn=1)

Successful attempts have green gestures, failed ones red gestures, so that a
glance shows where they part. Without a turn it is the first one in which a
failed attempt did what no successful one did.

Does not: compare screens. From the second turn on attempts may see different
ones; the one drawn is of a successful attempt, where there is one.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import markupsafe
import sqlalchemy as sa

from training_monitor.core import click_overlay
from training_monitor.dashboard import pictures
from training_monitor.dashboard import text
from training_monitor.schema import tables

_SCALE = 1.7
_MOST_ACTIONS = 4000
_MOST_TURNS = 6
"""Turns among which the one is sought in which attempts differ."""
_NEAR_PX = 8.0
"""Gestures at most so far apart are at one place, px."""

Row = dict[str, Any]
Gestures = dict[tuple[int, int], list[click_overlay.Gesture]]


def add(
  connection: sa.Connection, groups: Sequence[Row], turn: int = 0
) -> None:
  """Adds `overlay` to groups of `step_page.grouped`.

  Args:
    connection: Connection to the database.
    groups: Groups with their members.
    turn: Turn, from 1; 0 takes the one in which the attempts first differ.

  An overlay is {turn, sha, width, height, svg, attempts, pair}, or None without
  a screen. An attempt is {id, row, caption}, with what it did in that turn; the
  pair are ids of an attempt that failed and of one that succeeded, or None.
  """
  did = _gestures(
    connection, [m["id"] for g in groups for m in g["members"]], turn
  )
  for group in groups:
    group["turn"] = turn or _differing(group["members"], did)
  screens: dict[int, Row] = {}
  for number in {group["turn"] for group in groups}:
    ids = [m["id"] for g in groups if g["turn"] == number for m in g["members"]]
    screens |= _screens(connection, ids, number)
  for group in groups:
    group["overlay"] = _overlay(group, did, screens)


def _overlay(group: Row, did: Gestures, screens: dict[int, Row]) -> Row | None:
  attempts = [
    {**m, "gestures": did.get((m["id"], group["turn"]), [])}
    for m in group["members"]
  ]
  # Later ones are drawn on top.
  attempts.sort(key=lambda m: (bool(m["task_success"]), -m["id"]))
  screen = next(
    (screens[m["id"]] for m in reversed(attempts) if m["id"] in screens), None
  )
  if screen is None:
    return None
  size = screen["width"], screen["height"]
  ended = [m for m in group["members"] if m["status"] == "completed"]
  lost = [m["id"] for m in ended if not m["task_success"]]
  won = [m["id"] for m in ended if m["task_success"]]
  return {
      **screen, "turn": group["turn"],
      "pair": (lost[0], won[0]) if lost and won else None,
      "svg": markupsafe.Markup(click_overlay.svg_of_attempts([
          ("won" if m["task_success"] else "lost",
           click_overlay.marks(m["gestures"], *size, scale=_SCALE))
          for m in attempts
      ], *size)),
      "attempts": [
          {"id": m["id"], "row": m,
           "caption": ", then ".join(g.caption for g in m["gestures"][:3])}
          for m in reversed(attempts)
      ],
  }  # fmt: skip


def _differing(members: Sequence[Row], did: Gestures) -> int:
  """Returns the turn in which failed attempts part from the others; or 1."""
  won = [m["id"] for m in members if m["task_success"]]
  lost = [m["id"] for m in members if not m["task_success"]]
  for turn in range(1, _MOST_TURNS + 1):
    winners = [did.get((id_, turn), []) for id_ in won]
    if won and any(
      not any(alike(did[id_, turn], other) for other in winners)
      for id_ in lost
      if (id_, turn) in did
    ):
      return turn
  return 1


def alike(
  first: Sequence[click_overlay.Gesture],
  second: Sequence[click_overlay.Gesture],
) -> bool:
  """Returns whether gestures are of one kind, with one text, at one place."""
  return len(first) == len(second) and all(
    a.label == b.label
    and a.text == b.text
    and all(
      (p is None) == (q is None)
      and (p is None or q is None or math.dist(p, q) <= _NEAR_PX)
      for p, q in ((a.at, b.at), (a.to, b.to))
    )
    for a, b in zip(first, second)
  )


def _gestures(
  connection: sa.Connection, rollouts: Sequence[int], turn: int
) -> Gestures:
  """Maps (rollout, turn) to its gestures; to all first turns for turn 0."""
  t, a = tables.turn, tables.action
  gestures: Gestures = {}
  for row in connection.execute(
    sa.select(
      t.c.rollout_id, t.c.turn, a.c.action_type, a.c.tool_name, a.c.tool_args
    )
    .join(a, a.c.turn_id == t.c.id)
    .where(
      t.c.rollout_id.in_(rollouts),
      t.c.turn == turn if turn else t.c.turn <= _MOST_TURNS,
    )
    # Not the bare id: its own order would be taken, through all actions.
    .order_by(a.c.id + 0)
    .limit(_MOST_ACTIONS)
  ):
    gestures.setdefault((row.rollout_id, row.turn), []).append(
      pictures.gesture(
        {
          "action_type": row.action_type,
          "tool_name": row.tool_name,
          "tool_args": text.read_json(row.tool_args),
        }
      )
    )
  return gestures


def _screens(
  connection: sa.Connection, rollouts: Sequence[int], turn: int
) -> dict[int, Row]:
  """Maps a rollout to {sha, width, height} of the screen before its turn."""
  t, o, s = tables.turn, tables.obs, tables.screenshot
  shown: dict[int, str] = {}
  for rollout, uri in connection.execute(
    sa.select(t.c.rollout_id, o.c.screenshot_uri)
    .join(o, o.c.turn_id == t.c.id)
    .where(
      t.c.rollout_id.in_(rollouts),
      t.c.turn == turn,
      o.c.screenshot_uri.is_not(None),
    )
    .order_by(o.c.id + 0)
  ):
    shown.setdefault(rollout, uri.removeprefix("sha256:"))
  sizes = {
    row.sha256: {"sha": row.sha256, "width": row.width, "height": row.height}
    for row in connection.execute(
      sa.select(s.c.sha256, s.c.width, s.c.height).where(
        s.c.sha256.in_(set(shown.values()))
      )
    )
  }
  return {id_: sizes[sha] for id_, sha in shown.items() if sha in sizes}
