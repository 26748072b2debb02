"""Renders the tasks of a run: which it attempted, and which can be learned.

Promises: lists the tasks that the run has an attempt at, and no others; the
attempts of training, of the first measurement and of the last one are never
added up. One pass over the indices of `tables.LISTED` finds them.

Does not: judge a task by attempts of other runs.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Mapping, Sequence

import sqlalchemy as sa

from training_monitor.core import reward_equality
from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import measurements
from training_monitor.dashboard import page_request
from training_monitor.dashboard.views import rollout_page
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import query as query_lib

_TASKS = 25
_TRIES = 60
_TRIES_LISTED = 16
_CHECKPOINTS = 6
_STRIP_TURNS = 8
SOLVED = ("never", "sometimes", "always")
SPLITS = ("training", "held-out")
SORTS = ("learnable", "success", "change", "attempts", "name")

Row = dict[str, Any]


class TasksQuery(query_lib.PageQuery):
  """Tasks of a run.

  Attributes:
    q: words of the task.
    solved: how often of late; see `solved`.
    split: whether the run trains on the task.
    page: Number of the page, from 0.
  """

  q: query_lib.Search = ""
  solved: Annotated[str, query_lib.one_of(SOLVED)] | None = None
  split: Annotated[str, query_lib.one_of(SPLITS)] | None = None
  sort: Annotated[str, query_lib.one_of(SORTS)] = "learnable"
  order: query_lib.Order = "down"
  page: query_lib.Id = 0


class TaskQuery(query_lib.PageQuery):
  """Attempts at a task, before number `after`."""

  after: query_lib.Id | None = None


class TaskPages(page_request.RunTab):
  """See the module docstring."""

  def tasks(self, request: page_request.PageRequest) -> page_request.Page:
    """Renders families over the steps, and tasks with their last attempts."""
    training = request.id()
    run = self._head(request.project, training)
    asks = request.read(TasksQuery)
    with database.reading(self._engine) as connection:
      every = _attempted(connection, training)
      measured = _measured(connection, training, every)
      named = _named(connection, every, asks.q)
      rows = [
        {**row, **named[id_]} for id_, row in every.items() if id_ in named
      ]
      counts = {
        word: sum(row["solved"] == word for row in rows) for word in SOLVED
      }
      splits = {
        word: sum(row["split"] == word for row in rows) for word in SPLITS
      }
      rows = [
        row
        for row in rows
        if asks.solved in (None, row["solved"])
        and asks.split in (None, row["split"])
      ]
      _order(rows, asks.sort, asks.order == "up")
      pages = -(-len(rows) // _TASKS)
      shown = rows[asks.page * _TASKS : (asks.page + 1) * _TASKS]
      for row in shown:
        row["tries"] = _tries(
          connection,
          training,
          row["id"],
          row["first"],
          row["last"],
          most=_TRIES_LISTED,
        )
        row["groups"] = _mixed(row["tries"])
    return page_request.Page("tasks.html", {
        "run": run, "tab": "tasks",
        "families": _families(self._curves.of(training)),
        "q": asks.q, "rows": shown, "count": len(rows), "all": len(every),
        "solved": asks.solved, "counts": counts, "split": asks.split,
        "splits": splits, "sort": asks.sort, "up": asks.order == "up",
        "sorts": SORTS, "page": asks.page, "pages": pages,
        "more": asks.page + 1 < pages, "measured": measured,
    })  # fmt: skip

  def task(self, request: page_request.PageRequest) -> page_request.Page:
    """Renders the attempts at one task over the run's checkpoints."""
    training, task = request.id(), request.id("task")
    run = self._head(request.project, training)
    task_row = self._queries.one(request.project, "task", task)
    after = request.read(TaskQuery).after
    with database.reading(self._engine) as connection:
      every = _attempted(connection, training, task)
      measured = _measured(connection, training, every)
      row = every.get(task)
      tries: list[Row] = []
      if row is not None:
        last = row["last"] if after is None else min(row["last"], after - 1)
        tries = _tries(
          connection, training, task, row["first"], last, most=_TRIES
        )
      strips = []
      if row is not None and after is None:
        strips = _checkpoints(connection, training, task)
      screens = measurements.last_screenshots(
        connection, [x["id"] for x in tries]
      )
    for one in tries:
      one["screenshot"] = screens.get(one["id"])
    return page_request.Page("task.html", {
        "run": run, "tab": "tasks", "task": task_row, "tries": tries[::-1],
        "more": tries[0]["id"] if len(tries) == _TRIES else None,
        "row": row, "measured": measured, "strips": strips,
    })  # fmt: skip


def _checkpoints(
  connection: sa.Connection, training: int, task: int
) -> list[Row]:
  """Returns the first attempt at a task at some checkpoints.

  Of the measurements where there are two, else of the steps; the first and the
  last one are among them.
  """
  checkpoints: list[Row] = []
  for source in ("baseline", "eval", "step"):
    if source == "step" and len(checkpoints) > 1:
      break
    checkpoints += [
      {"kind": source, "source": row.source, "step": row.step, "id": row.id}
      for row in connection.execute(
        _firsts(source), {"training": training, "task": task}
      )
    ]
  if not checkpoints:  # Every attempt broke off, or goes on.
    return []
  last = len(checkpoints) - 1
  places = {round(last * n / (_CHECKPOINTS - 1)) for n in range(_CHECKPOINTS)}
  checkpoints = [checkpoints[place] for place in sorted(places)]
  b = tables.baseline
  names = {
    row.id: row.status_message
    for row in connection.execute(
      sa.select(b.c.id, b.c.status_message).where(b.c.training_id == training)
    )
  }
  for one in checkpoints:
    one["name"] = names.get(one["source"]) if one["kind"] == "baseline" else ""
  r = tables.rollout
  rows = {
    row.id: dict(row._mapping)  # pylint: disable=protected-access
    for row in connection.execute(
      sa.select(
        r.c.id,
        r.c.status,
        r.c.status_message,
        r.c.task_success,
        r.c.reward,
        r.c.num_turns,
      ).where(r.c.id.in_([one["id"] for one in checkpoints]))
    )
  }
  for one in checkpoints:
    one |= rows[one["id"]]
    one["turns"] = rollout_page.strip(connection, one["id"], _STRIP_TURNS)
  return checkpoints


@functools.cache
def _firsts(source: str) -> sa.Select:
  """Returns the first decided attempt at a task at each of a run's sources."""
  s, r = tables.metadata.tables[source], tables.rollout
  step = s.c.step if "step" in s.c else sa.literal(0)
  own = (
    sa.select(s.c.id, step.label("step"))
    .where(s.c.training_id == sa.bindparam("training"))
    .subquery()
  )
  source_id = r.c[f"{source}_id"]
  return (
    sa.select(
      own.c.id.label("source"), own.c.step, sa.func.min(r.c.id).label("id")
    )
    .select_from(own.join(r, source_id == own.c.id))
    .where(
      source_id.is_not(None),
      r.c.task_id + 0 == sa.bindparam("task"),
      sa.func.coalesce(r.c.status, "") == "completed",
    )
    .group_by(own.c.id, own.c.step)
    .order_by(own.c.step, own.c.id)
  )


def solved(wins: int, tries: int) -> str | None:
  """One of `SOLVED`; None without an attempt that the policy decided."""
  if not tries:
    return None
  return "never" if not wins else "always" if wins == tries else "sometimes"


def _families(columns: curves_lib.Columns) -> list[Row]:
  """Returns each family's success in training, first and last tenth."""
  families = []
  for name in sorted(columns.values):
    if name.startswith("success_rate/"):
      values = columns.values[name]
      readings = values[values == values]
      tenth = max(1, len(readings) // 10)
      families.append(
        {
          "name": name.partition("/")[2],
          "spark": curves_lib.sample(values),
          "first": float(readings[:tenth].mean()) if len(readings) else None,
          "last": float(readings[-tenth:].mean()) if len(readings) else None,
        }
      )
  return families


def _attempted(
  connection: sa.Connection, training: int, task: int | None = None
) -> dict[int, Row]:
  """Returns tasks that a run has an attempt at, with their counts.

  Args:
    connection: Connection to the database.
    training: the run.
    task: only this one.

  Returns:
    Task -> {split, first, last: ids of its rollouts; cell, early, late: of
    training, of the first and second half of the steps; solved: by `late`}.
  """
  tasks: dict[int, Row] = {}
  for source in ("step", "baseline", "eval"):
    for row in connection.execute(
      _counted(source, task is not None), {"training": training, "task": task}
    ):
      one = tasks.setdefault(row.task_id, {
          "id": row.task_id, "first": row.first, "last": row.last,
          "split": "held-out", "cell": None, "early": None, "late": None,
          "attempts": 0, "solved": None, "initial": None, "final": None,
      })  # fmt: skip
      one["first"] = min(one["first"], row.first)
      one["last"] = max(one["last"], row.last)
      if source == "step":
        wins, tries = int(row.wins or 0), row.tries
        late = int(row.late_wins or 0), int(row.late_tries or 0)
        early = wins - late[0], tries - late[1]
        one |= {
          "split": "training",
          "attempts": tries,
          "cell": measurements.cell(wins, tries),
          "early": measurements.cell(*early),
          "late": measurements.cell(*late),
          "solved": solved(*(late if late[1] else early)),
        }
  for one in tasks.values():
    one["change"] = (
      one["late"]["rate"] - one["early"]["rate"]
      if one["late"] and one["early"]
      else None
    )
  return tasks


@functools.cache
def _counted(source: str, single: bool) -> sa.Select:
  """Returns attempts by task at a run's steps, evaluations or baselines.

  Steps from the middle on are the late ones. Built once: that takes as long
  as a small answer.
  """
  s, r = tables.metadata.tables[source], tables.rollout
  own = s.c.training_id == sa.bindparam("training")
  late: sa.ColumnElement[Any] = sa.literal(1)
  if source == "step":
    middle = sa.select(sa.func.max(s.c.step) / 2).where(own).scalar_subquery()
    late = sa.case((s.c.step > middle, 1), else_=0)
  ids = sa.select(s.c.id, late.label("late")).where(own).subquery()
  valid = r.c.status == "completed"
  won = sa.and_(valid, r.c.task_success == 1)
  source_id = r.c[f"{source}_id"]
  # Not the bare column: its own index would be taken, and every row read.
  task = r.c.task_id + 0
  count = lambda condition: sa.func.sum(sa.case((condition, 1), else_=0))
  query = (
    sa.select(
      task.label("task_id"),
      sa.func.min(r.c.id).label("first"),
      sa.func.max(r.c.id).label("last"),
      count(valid).label("tries"),
      count(won).label("wins"),
      count(sa.and_(valid, ids.c.late == 1)).label("late_tries"),
      count(sa.and_(won, ids.c.late == 1)).label("late_wins"),
    )
    .select_from(ids.join(r, source_id == ids.c.id))
    .where(source_id.is_not(None))
    .group_by(task)
  )
  return query.where(task == sa.bindparam("task")) if single else query


def _measured(
  connection: sa.Connection, training: int, every: Mapping[int, Row]
) -> Row:
  """Adds each task's success at the first and the last measurement.

  Returns:
    {initial, final: the measurements, or None; mode: of their attempts}.
  """
  rates = [
    one for one in measurements.checkpoints(connection, training) if one["done"]
  ]
  ends: Row = {
    "initial": rates[0] if len(rates) > 1 else None,
    "final": rates[-1] if rates else None,
    "mode": None,
  }
  r = tables.rollout
  for name in ("initial", "final"):
    one = ends[name]
    if one is None:
      continue
    greedy = sa.case((r.c.temperature == 0, 1), else_=0)
    rows = list(
      connection.execute(
        sa.select(
          r.c.task_id,
          greedy.label("greedy"),
          sa.func.sum(sa.func.coalesce(r.c.task_success, 0)).label("wins"),
          sa.func.count().label("tries"),
        )
        .where(
          r.c.source_type == one["kind"],
          r.c[f"{one['kind']}_id"] == one["id"],
          r.c.status == "completed",
          r.c.task_id.in_(list(every)) if len(every) == 1 else sa.true(),
        )
        .group_by(r.c.task_id, greedy)
      )
    )
    headline = 0 if any(not row.greedy for row in rows) else 1
    ends["mode"] = measurements.MODES[headline]
    for row in rows:
      if row.greedy == headline and row.task_id in every:
        task = every[row.task_id]
        task[name] = measurements.cell(int(row.wins), row.tries)
        if name == "final" and task["split"] == "held-out":
          task["solved"] = solved(int(row.wins), row.tries)
  return ends


def _named(
  connection: sa.Connection, every: Mapping[int, Row], search: str
) -> dict[int, Row]:
  """Returns the tasks whose id, text or app has every word of the search."""
  t = tables.task
  columns = (t.c.id, t.c.task_id, t.c.description, t.c.app_name)
  query = sa.select(*columns)
  for word in search.split():
    like = f"%{page_request.escaped(word)}%"
    query = query.where(
      sa.or_(*(c.ilike(like, escape="\\") for c in columns[1:]))
    )
  rows = {}
  ids = list(every)
  for start in range(0, len(ids), 900):  # Fewer than SQLite's parameters.
    for row in connection.execute(
      query.where(t.c.id.in_(ids[start : start + 900]))
    ):
      rows[row.id] = dict(row._mapping)  # pylint: disable=protected-access
  return rows


def _order(rows: list[Row], sort: str, up: bool) -> None:
  """Sorts in place; tasks without the value come last either way."""

  def rate(row: Row) -> float | None:
    one = row["late"] or row["early"] or row["final"]
    return one["rate"] if one else None

  def key(row: Row) -> Any:
    if sort == "learnable":  # The nearer to one half, the more to learn.
      value = rate(row)
      return None if value is None else -abs(value - 0.5)
    if sort == "success":
      return rate(row)
    return row["change" if sort == "change" else "attempts"]

  rows.sort(key=lambda row: row["task_id"], reverse=sort == "name" and up)
  if sort != "name":
    sign = 1 if up else -1
    rows.sort(key=lambda row: (key(row) is None, sign * (key(row) or 0.0)))


def _tries(
  connection: sa.Connection,
  training: int,
  task: int,
  first: int,
  last: int,
  most: int,
) -> list[Row]:
  """Returns a run's last attempts at a task, the oldest of them first.

  Args:
    connection: Connection to the database.
    training: the run.
    task: the task.
    first: rollouts before this one are other runs'.
    last: rollouts behind this one are left out.
    most: how many.
  """
  rows = connection.execute(
    _tries_query(),
    {
      "training": training,
      "task": task,
      "first": first,
      "last": last,
      "most": most,
    },
  )
  tries = []
  for row in rows:
    one = dict(row._mapping)  # pylint: disable=protected-access
    one["valid"] = one["status"] == "completed"
    one["won"] = bool(one["task_success"])
    tries.append(one)
  return tries[::-1]


@functools.cache
def _tries_query() -> sa.Select:
  """Returns a run's last attempts at a task, the last one first.

  Built once: that takes ten times as long as the answer.
  """
  r, s, e, b = tables.rollout, tables.step, tables.eval_, tables.baseline
  return (
      sa.select(
          r.c.id, r.c.source_type, r.c.step_id, r.c.eval_id, r.c.baseline_id,
          r.c.reward, r.c.task_success, r.c.status, r.c.num_turns, r.c.group,
          r.c.status_message, r.c.start_time, r.c.temperature,
          s.c.step, e.c.step.label("eval_step"),
          b.c.status_message.label("baseline_name"),
      )
      .outerjoin(s, s.c.id == r.c.step_id)
      .outerjoin(e, e.c.id == r.c.eval_id)
      .outerjoin(b, b.c.id == r.c.baseline_id)
      .where(
          r.c.task_id == sa.bindparam("task"),
          r.c.id.between(sa.bindparam("first"), sa.bindparam("last")),
          sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
          == sa.bindparam("training"),
      )
      .order_by(r.c.id.desc())
      .limit(sa.bindparam("most"))
  )  # fmt: skip


def _mixed(tries: Sequence[Row]) -> tuple[int, int]:
  """Counts the groups of a task's training attempts, without groups of one.

  Returns:
    (groups whose rewards differ, all groups).
  """
  groups: dict[Any, list[float]] = {}
  for one in tries:
    if (
      one["source_type"] == "step"
      and one["valid"]
      and (one["reward"] is not None)
    ):
      groups.setdefault((one["step_id"], one["group"]), []).append(
        one["reward"]
      )
  several = [rewards for rewards in groups.values() if len(rewards) > 1]
  differing = [r for r in several if not reward_equality.all_equal(r)]
  return len(differing), len(several)
