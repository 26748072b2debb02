"""Compares two evaluations task by task, of one run or of two.

Promises: sampled and greedy attempts are never added up; a task counts once,
with its success rate; the difference and its interval are of the pairs
(`core.statistics.comparison`), and tasks that one side lacks are counted and
left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Mapping, Sequence

import sqlalchemy as sa

from training_monitor.core.statistics import comparison
from training_monitor.dashboard import measurements
from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors
from training_monitor.server import query as query_lib

_MOST = 500
SHORT = 20
"""Tasks that a page of other things shows."""
Row = dict[str, Any]


class TasksQuery(query_lib.PageQuery):
  """Two measurements.

  Attributes:
    a, b: keys, `<kind>-<id>`, of measurements of the project.
    mode: Mode of the attempts; None for sampled ones, where both have such.
    all: tasks with the same rate, too.
  """

  a: str = ""
  b: str = ""
  mode: Annotated[str, query_lib.one_of(measurements.MODES)] | None = None
  all: query_lib.Flag = False


class TaskComparisonPage:
  """See the module docstring."""

  def __init__(self, engine: sa.Engine):
    self._engine = engine

  def page(self, request: page_request.PageRequest) -> page_request.Page:
    asks = request.read(TasksQuery)
    with database.reading(self._engine) as connection:
      sides = {
        name: _side(connection, request.project, name, getattr(asks, name))
        for name in ("a", "b")
      }
      outcome = compare(
        connection, sides["a"]["one"], sides["b"]["one"], asks.mode
      )
    rows = outcome["rows"] if outcome else []
    if not asks.all:
      rows = [row for row in rows if row["by"]]
    return page_request.Page("compare_tasks.html", {
        **sides, "found": outcome, "rows": rows[:_MOST], "all": asks.all,
        "more": max(0, len(rows) - _MOST), "modes": measurements.MODES,
    })  # fmt: skip


def between_runs(
  connection: sa.Connection, first: int, second: int
) -> Row | None:
  """Compares the last measurements of two runs that have attempts.

  Returns:
    As `compare`, and `a` and `b`, the measurements; None without any, or
    without a common task.
  """
  last: list[Row] = []
  for training in (first, second):
    every = measurements.checkpoints(connection, training)
    if not (ended := [one for one in every if one["done"]]):
      return None
    last.append(ended[-1])
  outcome = compare(connection, last[0], last[1], None)
  return outcome and {**outcome, "a": last[0], "b": last[1]}


def compare(
  connection: sa.Connection, first: Row, second: Row, mode: str | None
) -> Row | None:
  """Returns the paired comparison; None without a common task.

  Args:
    connection: Connection to the database.
    first, second: of `measurements.checkpoints`.
    mode: Mode of the attempts; None for the first of `MODES` that both have.

  Returns:
    {"mode", "modes", "summary" (of `statistics.comparison`, second - first),
    "rows": [{"task_id", "name", "description", "family", "a", "b" ({"wins",
    "tries", "rate", "id" of an attempt}), "by"}], the largest change first}.
  """
  sides = [_tasks(connection, one) for one in (first, second)]
  both = [m for m in measurements.MODES if sides[0].get(m) and sides[1].get(m)]
  common = {m: sides[0][m].keys() & sides[1][m].keys() for m in both}
  both = [m for m in both if common[m]]
  if not both or (mode is not None and mode not in both):
    return None
  mode = mode or both[0]
  first_outcomes, second_outcomes = sides[0][mode], sides[1][mode]
  summary = comparison.compare(
    _outcomes(mode, second_outcomes), _outcomes(mode, first_outcomes)
  )
  rows = []
  for task in common[mode]:
    a, b = first_outcomes[task], second_outcomes[task]
    by = b["rate"] - a["rate"]
    pair = ("lost", "won") if by > 0 else ("won", "lost")
    rows.append({
        "task_id": task, "name": a["name"], "description": a["description"],
        "family": a["family"], "a": a, "b": b, "by": by,
        "pair": (a[pair[0]] or a["any"], b[pair[1]] or b["any"]),
    })  # fmt: skip
  rows.sort(key=lambda row: (-abs(row["by"]), row["name"]))
  return {"mode": mode, "modes": both, "summary": summary[mode], "rows": rows}


def _tasks(connection: sa.Connection, one: Row) -> dict[str, dict[int, Row]]:
  """Maps mode and task to the completed attempts of a measurement."""
  r, t = tables.rollout, tables.task
  greedy = sa.case((r.c.temperature == 0, 1), else_=0)
  won = sa.case((r.c.task_success == 1, r.c.id))
  lost = sa.case((sa.func.coalesce(r.c.task_success, 0) == 0, r.c.id))
  by_mode: dict[str, dict[int, Row]] = {}
  for row in connection.execute(
    sa.select(
      r.c.task_id,
      greedy.label("greedy"),
      t.c.task_id.label("name"),
      t.c.description,
      sa.func.coalesce(t.c.app_name, t.c.task_id).label("family"),
      sa.func.sum(sa.func.coalesce(r.c.task_success, 0)).label("wins"),
      sa.func.count().label("tries"),
      sa.func.min(r.c.id).label("any"),
      sa.func.min(won).label("won"),
      sa.func.min(lost).label("lost"),
    )
    .join(t, t.c.id == r.c.task_id)
    .where(
      r.c.source_type == one["kind"],
      r.c[f"{one['kind']}_id"] == one["id"],
      # Not the bare column: its index has nearly all rollouts.
      sa.func.coalesce(r.c.status, "") == "completed",
    )
    .group_by(r.c.task_id, greedy, t.c.task_id, t.c.description, t.c.app_name)
  ):
    task = {**row._mapping, "wins": int(row.wins)}  # pylint: disable=protected-access
    task["rate"] = task["wins"] / task["tries"]
    by_mode.setdefault(measurements.MODES[row.greedy], {})[row.task_id] = task
  return by_mode


def _outcomes(mode: str, tasks: Mapping[int, Row]) -> Sequence[Row]:
  return [
    {
      "mode": mode,
      "index": 0,
      "task_id": str(id_),
      "family": task["family"],
      "success": n < task["wins"],
      "valid": True,
    }
    for id_, task in tasks.items()
    for n in range(task["tries"])
  ]


def _side(connection: sa.Connection, project: int, name: str, key: str) -> Row:
  """Returns {"one": a measurement, "every": those of its run, "run"}.

  Raises:
    ApiError: 400, that is no measurement of the project.
  """
  kind, _, number = key.partition("-")
  owner, run = tables.training_project, tables.training
  if kind in ("eval", "baseline") and query_lib.is_id(number):
    t = tables.metadata.tables[kind]
    row = connection.execute(
      sa.select(run.c.id, run.c.run_name)
      .join(t, t.c.training_id == run.c.id)
      .join(owner, owner.c.training_id == run.c.id)
      .where(t.c.id == int(number), owner.c.project_id == project)
    ).one_or_none()
    if row is not None:
      every = measurements.checkpoints(connection, row.id)
      one = next((one for one in every if one["key"] == key), None)
      if one is not None:
        return {
          "one": one,
          "every": every,
          "run": {"id": row.id, "run_name": row.run_name},
        }
  raise errors.wrong(
    [
      errors.fault(
        name, key, "give an evaluation or baseline of this project, as eval-7"
      )
    ]
  )
