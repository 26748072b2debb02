"""Finds the rows of a run, and deletes them.

A run is a row of `training` and every row that refers to it, directly or not.
Tasks and their validators are shared by runs and belong to none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import Iterator, Sequence
import uuid

import sqlalchemy as sa

from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import triggers
from training_monitor.schema import vocabulary
from training_monitor.server.batches import items

EPISODE_PARTS = ("validation", "obs", "action", "turn", "environment")
"""Tables of an episode, children before parents."""
ACTIVE = frozenset({"pending", "initializing", "running"})
_CHUNK = 200


class MaintenanceError(Exception):
  """An operation is refused; the text has the reason and the fix."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
  """A run, as the commands choose and name it.

  Attributes:
    id: Id of its training.
    name: Name of the run.
    project: name of its project.
    status: Status of the training.
    last_sign: Time of its last message, UTC.
    pinned: it is its project's baseline.
  """

  id: int
  name: str
  project: str
  status: str
  last_sign: datetime.datetime
  pinned: bool = False


def find(
  connection: sa.Connection, project: str = "", names: Sequence[str] = ()
) -> list[StoredRun]:
  """Returns runs, oldest first.

  Args:
    connection: Connection to the database.
    project: only of this one; "" for all.
    names: Names or ids of the runs; none for all.

  Raises:
    MaintenanceError: there is no such project or run.
  """
  t, owner, p = tables.training, tables.training_project, tables.project
  pin = tables.pinned_baseline
  query = (
    sa.select(
      t.c.id,
      t.c.run_name,
      p.c.name.label("project"),
      t.c.status,
      sa.func.coalesce(
        t.c.last_heartbeat, t.c.end_time, t.c.updated_at, t.c.created_at
      ).label("last_sign"),
      pin.c.training_id.is_not(None).label("pinned"),
    )
    .join(owner, owner.c.training_id == t.c.id)
    .join(p, p.c.id == owner.c.project_id)
    .outerjoin(pin, pin.c.training_id == t.c.id)
    .order_by(t.c.id)
  )
  if project:
    projects = list(connection.scalars(sa.select(p.c.name).order_by(p.c.id)))
    if project not in projects:
      raise MaintenanceError(
        f"--project={project}: there is none of this name; there are"
        f" {', '.join(projects) or 'none yet'}"
      )
    query = query.where(p.c.name == project)
  runs = [
    StoredRun(
      row.id,
      row.run_name,
      row.project,
      row.status,
      row.last_sign,
      bool(row.pinned),
    )
    for row in connection.execute(query)
  ]
  if not names:
    return runs
  requested = set(names)
  # A name that looks like an id is the name first.
  by_name = {run.name: run for run in runs}
  by_id = {str(run.id): run for run in runs}
  chosen = {by_name.get(n) or by_id.get(n) for n in requested}
  missing = sorted(n for n in requested if n not in by_name and n not in by_id)
  if missing:
    shown = ", ".join(r.name for r in runs[:10]) or "none"
    raise MaintenanceError(
      f"--run={missing[0]}: there is no run of this name or id"
      f"{f' in project {project}' if project else ''}; there are {shown}"
      f"{', …' if len(runs) > 10 else ''}"
    )
  return [run for run in runs if run in chosen]


def ids(kind: str, training: int) -> sa.Select:
  """Returns a SELECT of the ids of a run's entities of a kind."""
  t = tables.metadata.tables[kind]
  if kind == "training":
    return sa.select(t.c.id).where(t.c.id == training)
  if kind in vocabulary.SOURCE_TYPES:
    return sa.select(t.c.id).where(t.c.training_id == training)
  if kind in ("rollout", "monitor_group"):
    parts = [
      sa.select(t.c.id).where(
        *([t.c.source_type == source] if kind == "rollout" else []),
        t.c[f"{source}_id"].in_(ids(source, training)),
      )
      for source in vocabulary.SOURCE_TYPES
    ]
    return sa.select(sa.union_all(*parts).subquery().c.id)
  parent = "turn" if kind in ("action", "obs") else "rollout"
  return sa.select(t.c.id).where(t.c[f"{parent}_id"].in_(ids(parent, training)))


def delete(engine: sa.Engine, training: int) -> int:
  """Deletes a run, some of its episodes at a time; returns the rows deleted.

  A server that runs beside it gets its turn in between. An interrupted deletion
  leaves whole rows, which the next one deletes.
  """
  count = 0
  while True:
    with writing(engine) as connection:
      part = list(connection.scalars(ids("rollout", training).limit(_CHUNK)))
      if not part:
        return count + _delete_empty(connection, training)
      count += _delete_parts(connection, part)
      count += _delete(connection, "rollout", part)


def _delete_empty(connection: sa.Connection, training: int) -> int:
  """Deletes a run without rollouts; returns the number of rows."""
  count = 0
  for kind in ("monitor_group", *reversed(vocabulary.SOURCE_TYPES)):
    count += _delete(
      connection, kind, list(connection.scalars(ids(kind, training)))
    )
  for table in (
    tables.change,
    tables.training_tag,
    tables.pinned_baseline,
    tables.training_project,
  ):
    connection.execute(sa.delete(table).where(table.c.training_id == training))
  return count + _delete(connection, "training", [training])


def _delete_parts(connection: sa.Connection, rollouts: Sequence[int]) -> int:
  """Deletes the parts of the given rollouts; returns the number of rows."""
  count = 0
  turn = tables.turn
  turns = sa.select(turn.c.id).where(turn.c.rollout_id.in_(rollouts))
  for kind in EPISODE_PARTS:
    t = tables.metadata.tables[kind]
    own = (
      t.c.turn_id.in_(turns)
      if kind in ("action", "obs")
      else (t.c.rollout_id.in_(rollouts))
    )
    count += _delete(
      connection, kind, list(connection.scalars(sa.select(t.c.id).where(own)))
    )
  return count


def _delete(connection: sa.Connection, kind: str, rows: Sequence[int]) -> int:
  """Deletes rows of a table; triggers delete what is beside them.

  Returns:
    Number of rows.
  """
  t = tables.metadata.tables[kind]
  for start in range(0, len(rows), 500):
    part = rows[start : start + 500]
    if kind in ("rollout", "turn"):
      n = tables.annotation
      connection.execute(sa.delete(n).where(n.c[f"{kind}_id"].in_(part)))
    connection.execute(sa.delete(t).where(t.c.id.in_(part)))
  return len(rows)


def forget_names(connection: sa.Connection) -> int:
  """Forgets the client ids of deleted entities.

  One pass over all names: there is no index by what they mean, which every
  batch would have to keep.
  """
  c = tables.client_ids
  count = 0
  for kind in items.BY_NAME:
    t = tables.metadata.tables[kind]
    deleted = ~sa.exists().where(t.c.id == c.c.entity_id)
    if kind == "environment":
      waiting = tables.pending_environment
      deleted &= ~sa.exists().where(waiting.c.id == c.c.entity_id)
    count += connection.execute(
      sa.delete(c).where(c.c.kind == kind, deleted)
    ).rowcount
  return count


# --- transactions -------------------------------------------------------------


@contextlib.contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
  """Opens `database.reading` without a time limit."""
  with database.reading(engine) as connection:
    _take_your_time(connection)
    yield connection


@contextlib.contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
  """Opens a transaction that excludes servers and tells them of a change.

  Servers remember which entities there are; a new generation makes them
  forget.
  """
  with database.writing(engine) as connection:
    _take_your_time(connection)
    database.hold_writers(connection)
    yield connection
    meta = tables.meta
    connection.execute(sa.delete(meta).where(meta.c.key == triggers.GENERATION))
    connection.execute(
      sa.insert(meta).values(key=triggers.GENERATION, value=uuid.uuid4().hex)
    )


def _take_your_time(connection: sa.Connection) -> None:
  if connection.dialect.name == "postgresql":
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
