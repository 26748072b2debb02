"""Finds the rollouts that succeeded in few turns for their task.

Few are at most `_FEW` of the mean of the other successes at the task. With n
successes of `total` turns, x turns are at most half of the others' mean where
x (2 n - 1) <= total.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import sqlalchemy as sa

from training_monitor.schema import tables

_R = tables.rollout
# Not the bare columns: their own indices have nearly all rollouts.
_TASK = _R.c.task_id + 0
WON: sa.ColumnElement[bool] = sa.and_(
  sa.func.coalesce(_R.c.status, "") == "completed",
  _R.c.task_success == 1,
  _R.c.num_turns > 0,
)
"""Of a rollout: whether it succeeded."""
_FEW = 0.5
_TURNS = (
  sa.func.count(),
  sa.func.sum(_R.c.num_turns),
  sa.func.min(_R.c.num_turns),
)


def in_runs(
  connection: sa.Connection, own: Mapping[str, sa.Select]
) -> sa.ColumnElement[bool]:
  """Returns the condition of few turns for rollouts of some runs.

  Args:
    connection: Connection to the database.
    own: kind of source -> query of the ids of the runs' sources.
  """
  rows: list[Sequence[Any]] = []
  for source, query in own.items():
    source_id, ids = _R.c[f"{source}_id"], query.subquery()
    rows += connection.execute(
      sa.select(_TASK, *_TURNS)
      .select_from(ids.join(_R, source_id == ids.c.id))
      .where(source_id.is_not(None), WON)
      .group_by(_TASK)
    )
  return sa.or_(
    sa.false(),
    *(
      sa.and_(
        _R.c.num_turns <= most,
        _TASK.in_(
          # One text: a statement takes a limited number of values.
          sa.bindparam(None, tasks, expanding=True, literal_execute=True)
        ),
      )
      for most, tasks in _at_most(rows).items()
    ),
  )


def _at_most(rows: Iterable[Sequence[Any]]) -> dict[int, list[int]]:
  """Maps a number of turns to the tasks at which it is few.

  Args:
    rows: (task, successes, turns in all, fewest turns), a task in some of them.
  """
  tasks: dict[int, tuple[int, int, int]] = {}
  for task, count, total, least in rows:
    one = tasks.get(task, (0, 0, least))
    tasks[task] = (one[0] + count, one[1] + int(total), min(one[2], least))
  by_limit: dict[int, list[int]] = {}
  for task, (count, total, least) in tasks.items():
    most = total // round((count - 1) / _FEW + 1)
    if count > 1 and least <= most:
      by_limit.setdefault(most, []).append(task)
  return by_limit
