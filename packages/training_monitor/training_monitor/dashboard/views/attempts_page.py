"""Renders two attempts turn by turn, and marks where they first differ.

    /rollouts/9/beside            with an attempt that ended otherwise
    /rollouts/9/beside?other=12   of the group, of another checkpoint or run

They differ in a turn in which their actions do, a few pixels apart counting as
one place (`group_overlays.alike`).

Does not: compare screens or thoughts, which rarely are equal.
"""

from __future__ import annotations

from typing import Any, Sequence

import sqlalchemy as sa

from training_monitor.dashboard import group_overlays
from training_monitor.dashboard import page_request
from training_monitor.dashboard import rollout_list
from training_monitor.dashboard import text
from training_monitor.dashboard.views import rollout_page
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors
from training_monitor.server import query as query_lib

_TURNS = 40
_LONGEST = 600

Row = dict[str, Any]


class BesideQuery(query_lib.PageQuery):
  """Two attempts.

  Attributes:
    other: the second one; without it, one that ended otherwise.
    first: turn that the page begins with.
  """

  other: query_lib.Id | None = None
  first: query_lib.Id = 1


class AttemptPages(page_request.RunTab):
  """See the module docstring."""

  def beside(self, request: page_request.PageRequest) -> page_request.Page:
    asks = request.read(BesideQuery)
    rollout = self._queries.rollout(request.project, str(request.id()))
    run = self._head(request.project, rollout["training_id"])
    with database.reading(self._engine) as connection:
      other = asks.other or _partner(
        connection, request.project, rollout, run["id"]
      )
    if other is None:
      raise errors.ApiError(
        404,
        f"rollout {rollout['id']} is the only attempt at its task in this"
        " run: give another one, other=<id>",
      )
    if other == rollout["id"]:
      raise errors.ApiError(
        400, f"other={other}: give another rollout than this one"
      )
    both = [rollout, self._queries.rollout(request.project, str(other))]
    runs = [run, self._head(request.project, both[1]["training_id"])]
    first = max(1, asks.first)
    with database.reading(self._engine) as connection:
      strips = [rollout_page.strip(connection, one["id"]) for one in both]
      recorded = [
        _said(connection, strip[first - 1 : first - 1 + _TURNS])
        for strip in strips
      ]
      places = [_place(connection, one) for one in both]
    differs = first_difference(*strips)
    count = max(map(len, strips))
    rows = [
      {
        "turn": n,
        "differs": n == differs,
        "sides": [
          _side(strip, words, n) for strip, words in zip(strips, recorded)
        ],
      }
      for n in range(first, min(count, first + _TURNS - 1) + 1)
    ]
    return page_request.Page("beside.html", {
        "run": run, "tab": "beside", "both": list(zip(both, runs, places)),
        "ends": tuple(rollout_list.ENDS), "rows": rows, "differs": differs,
        "count": count, "first": first,
        "before": max(1, first - _TURNS) if first > 1 else None,
        "after": first + _TURNS if first + _TURNS <= count else None,
        "same_task": rollout["task_id"] == both[1]["task_id"],
        "did": None if differs is None else [
            _caption(strip, differs) for strip in strips
        ],
        "differing_page": differs is not None and (
            None if first <= differs < first + _TURNS
            else 1 + (differs - 1) // _TURNS * _TURNS
        ),
    })  # fmt: skip


def first_difference(first: Sequence[Row], second: Sequence[Row]) -> int | None:
  """Returns the first turn, from 1, whose actions differ; None without one."""
  for number, (a, b) in enumerate(zip(first, second), 1):
    if not group_overlays.alike(a["actions"], b["actions"]):
      return number
  if len(first) != len(second):  # One of them ended here.
    return min(len(first), len(second)) + 1
  return None


def _partner(
  connection: sa.Connection, project: int, rollout: Row, training: int
) -> int | None:
  """Returns an attempt that ended otherwise, of the group or else the run.

  One that ended the same way where there is no other.
  """
  r = tables.rollout
  won = int(bool(rollout["task_success"]))
  other = sa.and_(
    r.c.task_id + 0 == rollout["task_id"],
    r.c.id + 0 != rollout["id"],
    sa.func.coalesce(r.c.status, "") == "completed",
  )
  otherwise = sa.func.coalesce(r.c.task_success, 0) == 1 - won
  source_id = r.c[f"{rollout['source_type']}_id"]
  group = sa.true()
  if rollout["group"] is not None:
    group = r.c.group == rollout["group"]
  together = list(
    connection.execute(
      sa.select(
        r.c.id, sa.case((otherwise, 1), else_=0).label("otherwise")
      ).where(
        source_id == rollout[f"{rollout['source_type']}_id"], group, other
      )
    )
  )
  nearest = max(together, key=lambda row: (row.otherwise, row.id), default=None)
  if nearest is not None and nearest.otherwise:
    return nearest.id
  anything = rollout_list.selection(rollout_list.RolloutListQuery())
  for chosen in (anything.narrowed(otherwise), anything):
    places = rollout_list.pick(
      connection, project, training, chosen.narrowed(other), 1
    )
    if places:
      return places[0][1]
    if nearest is not None:
      return nearest.id
  return None


def _said(connection: sa.Connection, strip: Sequence[Row]) -> dict[int, Row]:
  """Maps a turn's id to its {thought, response}."""
  t = tables.turn
  by_turn = {}
  for id_, metrics in connection.execute(
    sa.select(t.c.id, t.c.metrics_json).where(
      t.c.id.in_([one["id"] for one in strip])
    )
  ):
    content = text.read_object(metrics)
    by_turn[id_] = {
      key: str(content[key])[:_LONGEST]
      for key in ("thought", "model_response")
      if content.get(key)
    }
  return by_turn


def _side(
  strip: Sequence[Row], recorded: dict[int, Row], number: int
) -> Row | None:
  if number > len(strip):
    return None
  one = strip[number - 1]
  return {
    **one,
    **{"thought": None, "model_response": None},
    **recorded.get(one["id"], {}),
  }


def _caption(strip: Sequence[Row], number: int) -> str:
  if number > len(strip):
    return "had ended"
  actions = strip[number - 1]["actions"]
  return ", then ".join(g.caption for g in actions[:3]) or "did nothing"


def _place(connection: sa.Connection, rollout: Row) -> str:
  """Returns the stage of training that an attempt was made in, in words."""
  kind = rollout["source_type"]
  if kind == "baseline":
    return "before training"
  source = tables.metadata.tables[kind]
  number = connection.execute(
    sa.select(source.c.step).where(source.c.id == rollout[f"{kind}_id"])
  ).scalar_one()
  return f"{'step' if kind == 'step' else 'evaluation at'} {number}"
