"""Reads labels and notes for the pages that show them."""

from __future__ import annotations

from typing import Any, Sequence

import sqlalchemy as sa

from training_monitor.schema import tables

_MOST = 200
Row = dict[str, Any]


def every_label(
  connection: sa.Connection, project: int, training: int | None
) -> list[str]:
  """Returns the labels of a run's rollouts and turns, or of a project's."""
  n, r, owner = tables.annotation, tables.rollout, tables.training_project
  s, e, b = tables.step, tables.eval_, tables.baseline
  run = sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
  query = (
    sa.select(n.c.label)
    .join(r, r.c.id == n.c.rollout_id)
    .outerjoin(s, s.c.id == r.c.step_id)
    .outerjoin(e, e.c.id == r.c.eval_id)
    .outerjoin(b, b.c.id == r.c.baseline_id)
    .join(owner, owner.c.training_id == run)
    .where(n.c.label.is_not(None), owner.c.project_id == project)
    .distinct()
    .order_by(n.c.label)
    .limit(_MOST)
  )
  if training is not None:
    query = query.where(owner.c.training_id == training)
  return list(connection.scalars(query))


def add(connection: sa.Connection, rows: Sequence[Row], key: str) -> None:
  """Adds `labels` and `notes` (a number) to rows of turns.

  Args:
    connection: Connection to the database.
    rows: turns.
    key: Key of a turn's id in a row.
  """
  n = tables.annotation
  by_turn: dict[int, list[Any]] = {}
  ids = [row[key] for row in rows]
  for start in range(0, len(ids), 500):
    for one in connection.execute(
      sa.select(n.c.turn_id, n.c.label)
      .where(n.c.turn_id.in_(ids[start : start + 500]))
      .order_by(n.c.id)
    ):
      by_turn.setdefault(one.turn_id, []).append(one.label)
  for row in rows:
    labels = by_turn.get(row[key], [])
    row["labels"] = [label for label in labels if label is not None]
    row["notes"] = len(labels) - len(row["labels"])
