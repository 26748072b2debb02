"""Renders evaluations, baselines and tasks: success by task and checkpoint."""

from __future__ import annotations

import functools
import math
from typing import Any, Mapping, Sequence

import sqlalchemy as sa
from tunix.rl.multi_turn.core import success_rates
from tunix.rl.multi_turn.monitor.dashboard import curves as curves_lib
from tunix.rl.multi_turn.monitor.dashboard import page_request
from tunix.rl.multi_turn.monitor.schema import database
from tunix.rl.multi_turn.monitor.schema import tables
from tunix.rl.multi_turn.monitor.server import errors
from tunix.rl.multi_turn.monitor.server import queries as queries_lib
from tunix.rl.multi_turn.monitor.server import query as query_lib

_COLUMNS_SHOWN = 8
_MOST_CHECKPOINTS = 500
_MOST_ROLLOUTS = 20_000
_TASKS = 25
_TRIES = 60
_TRIES_LISTED = 24
_OTHER_RUNS = 4
"""How many times as many attempts are read as shown: other runs' are among
them."""

Row = dict[str, Any]
MODES = ("sampled", "greedy")


class EvalsQuery(query_lib.PageQuery):
  """Evaluations of a mode; page 0 has the newest."""

  mode: query_lib.one_of(MODES) | None = None
  page: query_lib.Id = 0


class EvalDiffQuery(query_lib.PageQuery):
  """Keys of the two measurements that are compared, `<kind>-<id>`."""

  a: str | None = None
  b: str | None = None


class TasksQuery(query_lib.PageQuery):
  """Tasks with all words of `q`, behind number `after`."""

  q: query_lib.Search = ""
  after: query_lib.Id | None = None


class TaskQuery(query_lib.PageQuery):
  """Attempts at a task, before number `after`."""

  after: query_lib.Id | None = None


def checkpoints(connection: sa.Connection, training: int) -> list[Row]:
  """Every measurement of a run, baselines first, then by step."""
  found = []
  r = tables.rollout
  for kind, t in (("baseline", tables.baseline), ("eval", tables.eval_)):
    step = t.c.step if kind == "eval" else sa.literal(0)
    order = t.c.step if kind == "eval" else t.c.id
    # The count follows from a rate and its successes, unless there are none.
    tries = sa.case((
        t.c.success_rate == 0,
        sa.select(sa.func.count())
        .where(
            r.c.source_type == kind, r.c[f"{kind}_id"] == t.c.id,
            r.c.status == "completed",
        )
        .correlate(t)
        .scalar_subquery(),
    ))  # pyformat: disable
    rows = connection.execute(
        sa.select(
            t.c.id, step.label("step"), t.c.status, t.c.status_message,
            t.c.model_path, t.c.success_rate, t.c.successful_tasks,
            t.c.completed_tasks, t.c.total_tasks, t.c.avg_turns,
            t.c.start_time, t.c.end_time, tries.label("tries"),
        )
        .where(t.c.training_id == training)
        .order_by(order.desc())
        .limit(_MOST_CHECKPOINTS)
    )  # pyformat: disable
    for row in reversed(list(rows)):
      one = dict(row._mapping)  # pylint: disable=protected-access
      wins, rate = one["successful_tasks"] or 0, one["success_rate"]
      # Rates are over completed rollouts; failed ones do not count.
      done = round(wins / rate) if rate else one["tries"] or 0
      name = one["status_message"] or kind
      if kind == "eval":
        name = f"step {one['step']}"
      found.append(
          {**one, "kind": kind, "key": f"{kind}-{one['id']}", "name": name,
           "wins": wins, "done": done}
      )  # pyformat: disable
  return found


def last_screenshots(
    connection: sa.Connection, rollouts: Sequence[int]
) -> dict[int, str]:
  """Rollout -> hash of the last screenshot of its last turn that has one."""
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
  """A success rate with Wilson's interval; None without a try."""
  if not tries:
    return None
  low, high = success_rates.wilson_interval(wins, tries)
  return {
      "wins": wins, "tries": tries, "rate": wins / tries, "low": low,
      "high": high,
  }  # pyformat: disable


class MeasurementPages:
  """See the module docstring."""

  def __init__(
      self, engine: sa.Engine, queries: queries_lib.Queries,
      curves: curves_lib.Curves, head: Any,
  ):  # pyformat: disable
    self._engine = engine
    self._queries = queries
    self._curves = curves
    self._head = head

  # --- evaluations ------------------------------------------------------------

  def evals(self, request: page_request.PageRequest) -> page_request.Page:
    """Success by task family and checkpoint."""
    training = request.id()
    run = self._head(request.project, training)
    asks = request.read(EvalsQuery)
    mode, page = asks.mode or "", asks.page
    with database.reading(self._engine) as connection:
      every = checkpoints(connection, training)
      end = len(every) - page * _COLUMNS_SHOWN
      shown = every[max(0, end - _COLUMNS_SHOWN) : max(0, end)]
      cells: dict[str, dict[str, Row | None]] = {}
      totals: dict[str, Row | None] = {}
      modes = set()
      for one in shown:
        sums: dict[str, list[int]] = {}
        for family, greedy, wins, tries in self._by_family(connection, one):
          modes.add("greedy" if greedy else "sampled")
          if mode and greedy != (mode == "greedy"):
            continue
          have = sums.setdefault(family, [0, 0])
          have[0] += int(wins)  # PostgreSQL's sum is a Decimal.
          have[1] += tries
        for family, (wins, tries) in sums.items():
          cells.setdefault(family, {})[one["key"]] = cell(wins, tries)
        totals[one["key"]] = cell(
            sum(w for w, _ in sums.values()), sum(n for _, n in sums.values())
        )
    return page_request.Page("evals.html", {
        "run": run, "tab": "evals", "shown": shown, "all": len(every),
        "families": sorted(cells), "cells": cells, "totals": totals,
        "mode": mode, "modes": [m for m in MODES if m in modes],
        "older": page + 1 if end > _COLUMNS_SHOWN else None,
        "newer": page - 1 if page else None, "every": every,
    })  # pyformat: disable

  def _by_family(self, connection: sa.Connection, one: Row) -> list[Any]:
    r, t = tables.rollout, tables.task
    family = sa.func.coalesce(t.c.app_name, t.c.task_id)
    greedy = sa.case((r.c.temperature == 0, 1), else_=0)
    return list(
        connection.execute(
            sa.select(
                family,
                greedy,
                sa.func.sum(sa.func.coalesce(r.c.task_success, 0)),
                sa.func.count(),
            )
            .join(t, t.c.id == r.c.task_id)
            .where(
                r.c.source_type == one["kind"],
                r.c[f"{one['kind']}_id"] == one["id"],
                r.c.status == "completed",
            )
            .group_by(family, greedy)
        )
    )

  def eval_diff(self, request: page_request.PageRequest) -> page_request.Page:
    """Compares two measurements attempt by attempt."""
    training = request.id()
    run = self._head(request.project, training)
    with database.reading(self._engine) as connection:
      every = checkpoints(connection, training)
      known = {one["key"]: one for one in every}
      if len(every) < 2:
        raise errors.ApiError(
            404, "this run has fewer than two evaluations or baselines yet"
        )
      asks = request.read(EvalDiffQuery)
      keys = {
          "a": asks.a or every[0]["key"], "b": asks.b or every[-1]["key"],
      }  # pyformat: disable
      wrong = [
          errors.fault(side, key, f"give one of {', '.join(known)}")
          for side, key in keys.items()
          if key not in known
      ]
      if wrong:
        raise errors.wrong(wrong)
      attempts = {
          side: self._attempts(connection, known[key])
          for side, key in keys.items()
      }
    pairs = paired(attempts["a"], attempts["b"])
    gained = [p for p in pairs if p["b"]["won"] and not p["a"]["won"]]
    lost = [p for p in pairs if p["a"]["won"] and not p["b"]["won"]]
    return page_request.Page("eval_diff.html", {
        "run": run, "tab": "evals", "every": every, "a": known[keys["a"]],
        "b": known[keys["b"]], "pairs": len(pairs), "gained": gained,
        "lost": lost, "chance": sign_test(len(gained), len(lost)),
        "both": sum(p["a"]["won"] and p["b"]["won"] for p in pairs),
        "neither": sum(
            not p["a"]["won"] and not p["b"]["won"] for p in pairs
        ),
        "alone": {
            side: len(attempts[side]) - len(pairs) for side in ("a", "b")
        },
    })  # pyformat: disable

  def _attempts(self, connection: sa.Connection, one: Row) -> list[Row]:
    r, t = tables.rollout, tables.task
    rows = connection.execute(
        sa.select(
            r.c.id, r.c.task_id, t.c.task_id.label("name"), t.c.description,
            t.c.app_name, r.c.temperature, r.c.reward, r.c.num_turns,
            r.c.task_success, r.c.status_message,
        )
        .join(t, t.c.id == r.c.task_id)
        .where(
            r.c.source_type == one["kind"],
            r.c[f"{one['kind']}_id"] == one["id"],
            r.c.status == "completed",
        )
        .order_by(r.c.id)
        .limit(_MOST_ROLLOUTS)
    )  # pyformat: disable
    return [
        {**row._mapping, "won": bool(row.task_success)}  # pylint: disable=protected-access
        for row in rows
    ]

  # --- tasks ------------------------------------------------------------------

  def tasks(self, request: page_request.PageRequest) -> page_request.Page:
    """Families over the steps, and every task with its last attempts."""
    training = request.id()
    run = self._head(request.project, training)
    asks = request.read(TasksQuery)
    search = asks.q
    columns = self._curves.of(training)
    families = []
    for name in sorted(columns.values):
      if name.startswith("success_rate/"):
        values = columns.values[name]
        known = values[values == values]
        tenth = max(1, len(known) // 10)
        families.append({
            "name": name.partition("/")[2], "spark": curves_lib.sample(values),
            "first": float(known[:tenth].mean()) if len(known) else None,
            "last": float(known[-tenth:].mean()) if len(known) else None,
        })  # pyformat: disable
    ids, t = tables.client_ids, tables.task
    mine = sa.select(ids.c.entity_id).where(
        ids.c.project_id == request.project, ids.c.kind == "task"
    )
    query = sa.select(
        t.c.id, t.c.task_id, t.c.description, t.c.app_name
    ).where(t.c.id.in_(mine)).order_by(t.c.id)  # pyformat: disable
    after = asks.after
    if after is not None:
      query = query.where(t.c.id > after)
    for word in search.split():
      like = f"%{page_request.escaped(word)}%"
      query = query.where(
          sa.or_(
              t.c.task_id.ilike(like, escape="\\"),
              t.c.description.ilike(like, escape="\\"),
          )
      )
    with database.reading(self._engine) as connection:
      rows = [
          dict(r._mapping)  # pylint: disable=protected-access
          for r in connection.execute(query.limit(_TASKS + 1))
      ]
      more = rows[_TASKS - 1]["id"] if len(rows) > _TASKS else None
      for row in rows[:_TASKS]:
        tries = self._tries(
            connection, training, row["id"], most=_TRIES_LISTED
        )
        row["tries"] = tries
        row["cell"] = cell(
            sum(x["won"] for x in tries if x["valid"]),
            sum(x["valid"] for x in tries),
        )
    return page_request.Page("tasks.html", {
        "run": run, "tab": "tasks", "families": families, "q": search,
        "rows": rows[:_TASKS], "more": more, "most": _TRIES_LISTED,
    })  # pyformat: disable

  def _tries(
      self, connection: sa.Connection, training: int, task: int,
      before: int | None = None, most: int = _TRIES,
  ) -> list[Row]:  # pyformat: disable
    """A run's last attempts at a task, the oldest of them first."""
    rows = connection.execute(
        _tries_query(before is not None),
        {
            "training": training, "task": task, "before": before,
            "most": most, "of_all": _OTHER_RUNS * most,
        },
    )  # pyformat: disable
    found = []
    for row in rows:
      one = dict(row._mapping)  # pylint: disable=protected-access
      one["valid"] = one["status"] == "completed"
      one["won"] = bool(one["task_success"])
      found.append(one)
    return found[::-1]

  def task(self, request: page_request.PageRequest) -> page_request.Page:
    training, task = request.id(), request.id("task")
    run = self._head(request.project, training)
    found = self._queries.one(request.project, "task", task)
    with database.reading(self._engine) as connection:
      after = request.read(TaskQuery).after
      tries = self._tries(connection, training, task, after)
    return page_request.Page("task.html", {
        "run": run, "tab": "tasks", "task": found, "tries": tries[::-1],
        "more": tries[0]["id"] if len(tries) == _TRIES else None,
        "cell": cell(
            sum(x["won"] for x in tries if x["valid"]),
            sum(x["valid"] for x in tries),
        ),
    })  # pyformat: disable


@functools.cache
def _tries_query(before: bool) -> sa.Select:
  """A run's last attempts at a task, the last one first.

  Built once: that takes ten times as long as the answer.

  Args:
    before: whether those from :before on are left out.
  """
  r, s, e, b = tables.rollout, tables.step, tables.eval_, tables.baseline
  recent = sa.select(
      r.c.id, r.c.source_type, r.c.step_id, r.c.eval_id, r.c.baseline_id,
      r.c.reward, r.c.task_success, r.c.status, r.c.num_turns,
      r.c.status_message, r.c.start_time,
  ).where(r.c.task_id == sa.bindparam("task"))  # pyformat: disable
  if before:
    recent = recent.where(r.c.id < sa.bindparam("before"))
  recent = (
      recent.order_by(r.c.id.desc()).limit(sa.bindparam("of_all")).subquery()
  )
  return (
      sa.select(recent, s.c.step.label("step"), e.c.step.label("eval_step"))
      .outerjoin(s, s.c.id == recent.c.step_id)
      .outerjoin(e, e.c.id == recent.c.eval_id)
      .outerjoin(b, b.c.id == recent.c.baseline_id)
      .where(
          sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
          == sa.bindparam("training")
      )
      .order_by(recent.c.id.desc())
      .limit(sa.bindparam("most"))
  )


def paired(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
  """Attempts at the same task and mode, the n-th with the n-th."""
  waiting: dict[Any, list[Row]] = {}
  for one in first:
    waiting.setdefault(_attempt_key(one), []).append(one)
  for rows in waiting.values():
    rows.reverse()
  found = []
  for other in second:
    rows = waiting.get(_attempt_key(other))
    if rows:
      found.append({"a": rows.pop(), "b": other})
  return found


def _attempt_key(one: Mapping[str, Any]) -> tuple[int, bool]:
  return one["task_id"], one["temperature"] == 0


def sign_test(gained: int, lost: int) -> float | None:
  """p-value of a split at least this uneven if flips go either way alike.

  The exact two-sided sign test, which is McNemar's for pairs; None without a
  flip.
  """
  n = gained + lost
  if not n:
    return None
  fewer = min(gained, lost)
  if n > 1000:  # The normal approximation with continuity correction.
    z = max(0.0, abs(gained - lost) - 1) / math.sqrt(n)
    return math.erfc(z / math.sqrt(2))
  tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
  return min(1.0, 2 * tail)
