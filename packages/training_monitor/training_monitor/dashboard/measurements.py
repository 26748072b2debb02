"""Renders evaluations and baselines: success by family and checkpoint.

Promises: sampled and greedy attempts are never added up; the figure of a
measurement is that of its sampled attempts, of the greedy ones where it has no
others. The terminal and the report name the same figures.
"""

from __future__ import annotations

from typing import Annotated, Any, Mapping, Sequence

import sqlalchemy as sa

from training_monitor.core.statistics import comparison
from training_monitor.core.statistics import success_rates
from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors
from training_monitor.server import query as query_lib

_COLUMNS_SHOWN = 8
_MOST_CHECKPOINTS = 500
_MOST_ROLLOUTS = 20_000

Row = dict[str, Any]
MODES = ("sampled", "greedy")


class EvalsQuery(query_lib.PageQuery):
  """Evaluations of a mode, sampled where there are such; page 0 is newest."""

  mode: Annotated[str, query_lib.one_of(MODES)] | None = None
  page: query_lib.Id = 0


class EvalDiffQuery(query_lib.PageQuery):
  """Keys of the two measurements that are compared, `<kind>-<id>`."""

  a: str | None = None
  b: str | None = None


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

  def eval_diff(self, request: page_request.PageRequest) -> page_request.Page:
    """Compares two measurements attempt by attempt."""
    training = request.id()
    run = self._head(request.project, training)
    with database.reading(self._engine) as connection:
      every = checkpoints(connection, training)
      by_key = {one["key"]: one for one in every}
      if len(every) < 2:
        raise errors.ApiError(
          404, "this run has fewer than two evaluations or baselines yet"
        )
      asks = request.read(EvalDiffQuery)
      keys = {"a": asks.a or every[-2]["key"], "b": asks.b or every[-1]["key"]}
      wrong = [
        errors.fault(side, key, f"give one of {', '.join(by_key)}")
        for side, key in keys.items()
        if key not in by_key
      ]
      if wrong:
        raise errors.wrong(wrong)
      attempts = {
        side: self._attempts(connection, by_key[key])
        for side, key in keys.items()
      }
    pairs = paired(attempts["a"], attempts["b"])
    gained = [p for p in pairs if p["b"]["won"] and not p["a"]["won"]]
    lost = [p for p in pairs if p["a"]["won"] and not p["b"]["won"]]
    return page_request.Page("eval_diff.html", {
        "run": run, "tab": "evals", "every": every, "a": by_key[keys["a"]],
        "b": by_key[keys["b"]], "pairs": len(pairs), "gained": gained,
        "lost": lost, **_by_task(pairs),
        "both": sum(p["a"]["won"] and p["b"]["won"] for p in pairs),
        "neither": sum(
            not p["a"]["won"] and not p["b"]["won"] for p in pairs
        ),
        "alone": {
            side: len(attempts[side]) - len(pairs) for side in ("a", "b")
        },
    })  # fmt: skip

  def _attempts(self, connection: sa.Connection, one: Row) -> list[Row]:
    r, t = tables.rollout, tables.task
    rows = connection.execute(
        sa.select(
            r.c.id, r.c.task_id, t.c.task_id.label("name"), t.c.description,
            t.c.app_name, r.c.temperature, r.c.reward, r.c.num_turns,
            r.c.task_success, r.c.status_message,
        )
        .join(t, t.c.id == r.c.task_id)
        .where(*_completed(one))
        .order_by(r.c.id)
        .limit(_MOST_ROLLOUTS)
    )  # fmt: skip
    return [
      {**row._mapping, "won": bool(row.task_success)}  # pylint: disable=protected-access
      for row in rows
    ]


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


def paired(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
  """Returns pairs of attempts at the same task and mode, in order."""
  waiting: dict[Any, list[Row]] = {}
  for one in first:
    waiting.setdefault(_attempt_key(one), []).append(one)
  for rows in waiting.values():
    rows.reverse()
  pairs = []
  for other in second:
    if partners := waiting.get(_attempt_key(other)):
      pairs.append({"a": partners.pop(), "b": other})
  return pairs


def _by_task(pairs: Sequence[Row]) -> Row:
  """Counts tasks with more wins and with fewer, and tests the split.

  Attempts at one task, sampled or greedy, are not independent: a task counts
  once. `chance` is None where no task changed.
  """
  change: dict[int, int] = {}
  for pair in pairs:
    task, by = pair["a"]["task_id"], pair["b"]["won"] - pair["a"]["won"]
    change[task] = change.get(task, 0) + by
  better = sum(by > 0 for by in change.values())
  worse = sum(by < 0 for by in change.values())
  chance = comparison.sign_test(better, worse) if better + worse else None
  return {"better": better, "worse": worse, "chance": chance}


def _attempt_key(one: Mapping[str, Any]) -> tuple[int, bool]:
  return one["task_id"], one["temperature"] == 0
