"""Renders evaluations and baselines: success by family and checkpoint.

Promises: sampled and greedy attempts are never added up; the figure of a
measurement is that of its sampled attempts, of the greedy ones where it has no
others. The terminal and the report name the same figures.
"""

from __future__ import annotations

from typing import Annotated, Any, Sequence

import sqlalchemy as sa

from training_monitor.core.statistics import success_rates
from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import query as query_lib

_COLUMNS_SHOWN = 8
_MOST_CHECKPOINTS = 500

Row = dict[str, Any]
MODES = ("sampled", "greedy")


class EvalsQuery(query_lib.PageQuery):
  """Evaluations of a mode, sampled where there are such; page 0 is newest."""

  mode: Annotated[str, query_lib.one_of(MODES)] | None = None
  page: query_lib.Id = 0


def checkpoints(connection: sa.Connection, training: int) -> list[Row]:
  """Returns every measurement of a run, baselines first, then by step.

  `wins` of `done` attempts of `mode` are its figure: the sampled ones, or the
  greedy ones where there are no others.
  """
  measurements = []
  r = tables.rollout
  for kind, t in (("baseline", tables.baseline), ("eval", tables.eval_)):
    step = t.c.step if kind == "eval" else sa.literal(0)
    order = t.c.step if kind == "eval" else t.c.id
    own = sa.and_(r.c.source_type == kind, r.c[f"{kind}_id"] == t.c.id)
    greedy = sa.func.coalesce(r.c.temperature, 1.0) == 0
    sampled = sa.exists().where(own, sa.not_(greedy)).correlate(t)
    # The count follows from a rate and its successes, unless there are none.
    tries = sa.case(
      (
        t.c.success_rate == 0,
        sa.select(sa.func.count())
        .where(
          own,
          r.c.status == "completed",
          sa.case((greedy, 0), else_=1) == sa.case((sampled, 1), else_=0),
        )
        .correlate(t)
        .scalar_subquery(),
      )
    )
    rows = connection.execute(
        sa.select(
            t.c.id, step.label("step"), t.c.status, t.c.status_message,
            t.c.model_path, t.c.success_rate, t.c.successful_tasks,
            t.c.completed_tasks, t.c.total_tasks, t.c.avg_turns,
            t.c.start_time, t.c.end_time, tries.label("tries"),
            sa.case((sampled, 0), else_=1).label("greedy"),
        )
        .where(t.c.training_id == training)
        .order_by(order.desc())
        .limit(_MOST_CHECKPOINTS)
    )  # fmt: skip
    for row in reversed(list(rows)):
      one = dict(row._mapping)  # pylint: disable=protected-access
      wins, rate = one["successful_tasks"] or 0, one["success_rate"]
      # Rates are over completed rollouts; failed ones do not count.
      count = round(wins / rate) if rate else one["tries"] or 0
      name = one["status_message"] or kind
      if kind == "eval":
        name = f"step {one['step']}"
      measurements.append(
          {**one, "kind": kind, "key": f"{kind}-{one['id']}", "name": name,
           "wins": wins, "done": count, "mode": MODES[one["greedy"]]}
      )  # fmt: skip
  return measurements


def beside(
  connection: sa.Connection, training: int, kind: str, id_: int
) -> list[Row | None]:
  """Returns the measurement before one, that one, and the one after.

  In the order of `checkpoints`, however many the run has. Each is its `kind`,
  `id` and `name`; all are None where the run has no such measurement.
  """
  b, e = tables.baseline, tables.eval_
  both = sa.union_all(
    sa.select(
      sa.literal("baseline").label("kind"),
      b.c.id,
      sa.literal(0).label("late"),
      b.c.id.label("place"),
      b.c.status_message.label("name"),
    ).where(b.c.training_id == training),
    sa.select(
      sa.literal("eval"), e.c.id, sa.literal(1), e.c.step, sa.null()
    ).where(e.c.training_id == training),
  ).subquery()
  own = connection.execute(
    sa.select(both).where(both.c.kind == kind, both.c.id == id_)
  ).one_or_none()
  if own is None:
    return [None, None, None]
  here = sa.tuple_(sa.literal(own.late), sa.literal(own.place))
  at = sa.tuple_(both.c.late, both.c.place)
  neighbours = [
    connection.execute(
      sa.select(both).where(condition).order_by(*order).limit(1)
    ).one_or_none()
    for condition, order in (
      (at < here, (both.c.late.desc(), both.c.place.desc())),
      (at > here, (both.c.late, both.c.place)),
    )
  ]
  return [
    None
    if one is None
    else {
      "kind": one.kind,
      "id": one.id,
      "name": f"step {one.place}"
      if one.kind == "eval"
      else one.name or one.kind,
    }
    for one in (neighbours[0], own, neighbours[1])
  ]


def last_screenshots(
  connection: sa.Connection, rollouts: Sequence[int]
) -> dict[int, str]:
  """Maps a rollout to the hash of its last turn's last screenshot."""
  if not rollouts:
    return {}
  t, o = tables.turn, tables.obs
  later = t.alias("later")
  last = (
    sa.select(sa.func.max(later.c.turn))
    .where(later.c.rollout_id == t.c.rollout_id)
    .correlate(t)
    .scalar_subquery()
  )
  rows = connection.execute(
    sa.select(t.c.rollout_id, o.c.screenshot_uri)
    .join(o, o.c.turn_id == t.c.id)
    .where(
      t.c.rollout_id.in_(rollouts),
      t.c.turn == last,
      o.c.screenshot_uri.is_not(None),
    )
    .order_by(o.c.id)
  )
  return {
    rollout: uri.removeprefix("sha256:")
    for rollout, uri in rows
    if uri.startswith("sha256:")
  }


def cell(wins: int, tries: int) -> Row | None:
  """Returns a success rate with Wilson's interval; None without a try."""
  if not tries:
    return None
  low, high = success_rates.wilson_interval(wins, tries)
  return {
    "wins": wins,
    "tries": tries,
    "rate": wins / tries,
    "low": low,
    "high": high,
  }


class MeasurementPages(page_request.RunTab):
  """See the module docstring."""

  # --- evaluations ------------------------------------------------------------

  def evals(self, request: page_request.PageRequest) -> page_request.Page:
    """Renders success by task family and checkpoint."""
    training = request.id()
    run = self._head(request.project, training)
    asks = request.read(EvalsQuery)
    page = asks.page
    with database.reading(self._engine) as connection:
      every = checkpoints(connection, training)
      end = len(every) - page * _COLUMNS_SHOWN
      shown = every[max(0, end - _COLUMNS_SHOWN) : max(0, end)]
      counted = {one["key"]: self._by_family(connection, one) for one in shown}
    modes = [
      mode
      for mode in MODES
      if any(mode in counts for counts in counted.values())
    ]
    mode = asks.mode or (modes[0] if modes else MODES[0])
    cells: dict[str, dict[str, Row | None]] = {}
    totals: dict[str, dict[str, Row | None]] = {m: {} for m in modes}
    for key, counts in counted.items():
      for family, (wins, tries) in counts.get(mode, {}).items():
        cells.setdefault(family, {})[key] = cell(wins, tries)
      for name in modes:
        sums = counts.get(name, {}).values()
        totals[name][key] = cell(
          sum(w for w, _ in sums), sum(n for _, n in sums)
        )
    return page_request.Page("evals.html", {
        "run": run, "tab": "evals", "shown": shown, "all": len(every),
        "families": sorted(cells), "cells": cells,
        "totals": sorted(totals.items(), key=lambda one: one[0] != mode),
        "mode": mode, "modes": modes, "pairs": _neighbours(shown),
        "older": page + 1 if end > _COLUMNS_SHOWN else None,
        "newer": page - 1 if page else None, "every": every,
    })  # fmt: skip

  def _by_family(
    self, connection: sa.Connection, one: Row
  ) -> dict[str, dict[str, tuple[int, int]]]:
    """Maps mode and family to (successes, completed) of a measurement."""
    r, t = tables.rollout, tables.task
    family = sa.func.coalesce(t.c.app_name, t.c.task_id)
    greedy = sa.case((r.c.temperature == 0, 1), else_=0)
    by_mode: dict[str, dict[str, tuple[int, int]]] = {}
    for name, mode, wins, tries in connection.execute(
      sa.select(
        family,
        greedy,
        sa.func.sum(sa.func.coalesce(r.c.task_success, 0)),
        sa.func.count(),
      )
      .join(t, t.c.id == r.c.task_id)
      .where(*_completed(one))
      .group_by(family, greedy)
    ):
      # PostgreSQL's sum is a Decimal.
      by_mode.setdefault(MODES[mode], {})[name] = int(wins), tries
    return by_mode


def _completed(one: Row) -> tuple[sa.ColumnElement[bool], ...]:
  """Returns the conditions on a measurement's completed rollouts."""
  r = tables.rollout
  return (
    r.c.source_type == one["kind"],
    r.c[f"{one['kind']}_id"] == one["id"],
    r.c.status == "completed",
  )


def _neighbours(shown: Sequence[Row]) -> dict[str, str]:
  """Maps each shown measurement's key to the key of the one before it."""
  return {
    later["key"]: earlier["key"] for earlier, later in zip(shown, shown[1:])
  }
