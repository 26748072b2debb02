"""Chooses the episodes that a run's first page shows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from training_monitor.dashboard import group_overlays
from training_monitor.dashboard import measurements
from training_monitor.dashboard.views import step_page
from training_monitor.schema import database
from training_monitor.schema import tables

_LATEST = 12
_GROUPS_SHOWN = 4
_MOST_MEMBERS = 600

Row = dict[str, Any]


def latest(engine: sa.Engine, training: int) -> list[Row]:
  """Rollouts of the last steps: those that ended with a screen first."""
  s, r, t = tables.step, tables.rollout, tables.task
  with database.reading(engine) as connection:
    steps = list(
      connection.scalars(
        sa.select(s.c.id)
        .where(s.c.training_id == training)
        .order_by(s.c.step.desc())
        .limit(3)
      )
    )
    ended = sa.case(
      (r.c.status == "completed", 2), (r.c.status == "failed", 1), else_=0
    )
    rows = connection.execute(
        sa.select(
            r.c.id, r.c.status, r.c.task_success, r.c.reward, r.c.num_turns,
            r.c.current_turn, r.c.max_turns, r.c.status_message,
            r.c.start_time, t.c.description, t.c.app_name, s.c.step,
        )
        .join(t, t.c.id == r.c.task_id)
        .join(s, s.c.id == r.c.step_id)
        .where(r.c.source_type == "step", r.c.step_id.in_(steps))
        .order_by(ended.desc(), r.c.id.desc())
        .limit(3 * _LATEST)
    )  # fmt: skip
    rollouts = [dict(row._mapping) for row in rows]  # pylint: disable=protected-access
    ids = [row["id"] for row in rollouts]
    last = measurements.last_screenshots(connection, ids)
  for row in rollouts:
    row["screenshot"] = last.get(row["id"])
  rollouts.sort(key=lambda row: row["screenshot"] is None)  # Stable.
  return rollouts[:_LATEST]


def newest_groups(engine: sa.Engine, training: int) -> list[Row]:
  """Returns the newest groups with a gradient, and their first actions."""
  s, r = tables.step, tables.rollout
  with database.reading(engine) as connection:
    steps = list(
      connection.execute(
        sa.select(s.c.id, s.c.step)
        .where(s.c.training_id == training)
        .order_by(s.c.step.desc())
        .limit(4)
      )
    )
    groups: list[Row] = []
    for id_, number in steps:
      members = step_page.members_of(
        connection,
        sa.and_(r.c.source_type == "step", r.c.step_id == id_),
        _MOST_MEMBERS,
      )
      groups += [
        {**group, "step": number}
        for group in reversed(step_page.grouped(members))
        if group["has_gradient"]
      ]
      if len(groups) >= _GROUPS_SHOWN:
        break
    groups = groups[:_GROUPS_SHOWN]
    group_overlays.add(connection, groups)
  return [group for group in groups if group["overlay"]]
