"""Queries the database, each query from one consistent view.

A project sees its own runs only. Rows are JSON objects with the columns' names:
times as ISO 8601 in UTC, JSON columns as JSON. Lists come in pages; a page's
`next` points to the following one, whatever was added meanwhile (keyset
pagination: no page is slower than the first).
"""

from __future__ import annotations

import datetime
from typing import Any, Sequence

import orjson
import sqlalchemy as sa

from training_monitor.schema import database
from training_monitor.schema import later_views
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server.batches import fields

JSON_COLUMNS = frozenset({
    "config_json", "tags", "prerequisites", "rollout_progress",
    "training_progress", "metrics_json", "errors", "summary_json", "tool_args",
    "tokens", "logprobs", "model_input_json", "details_json", "metadata_json",
    "health_json", "trajectory_data_json", "args", "action_json",
    "model_specific_input_json",
})  # fmt: skip
_HEAVY = {
  "training": {"config_json"},
  "step": {"metrics_json"},
  "rollout": {"summary_json"},
}
"""Columns that lists leave out."""
Row = dict[str, Any]


class Queries:
  """Read-only queries on the database, for the API and the dashboard."""

  def __init__(self, engine: sa.Engine):
    self._engine = engine

  # --- lists ----------------------------------------------------------------

  def trainings(self, project: int, selection: query_lib.TrainingsQuery) -> Row:
    """Returns a page of trainings, newest first."""
    t, owner = tables.training, tables.training_project
    query = _select(t).join(owner, owner.c.training_id == t.c.id)
    query = query.where(owner.c.project_id == project, *tagged(selection.tag))
    if selection.status is not None:
      query = query.where(t.c.status == selection.status)
    page = self._page(query, t.c.id, True, selection)
    with database.reading(self._engine) as connection:
      add_tags_and_pin(connection, project, page["items"])
    return page

  def tags(self, project: int) -> Row:
    """Returns the tags of the project's runs, with how many have them."""
    g, owner = tables.training_tag, tables.training_project
    count = sa.func.count().label("runs")
    with database.reading(self._engine) as connection:
      rows = connection.execute(
        sa.select(g.c.tag, count)
        .join(owner, owner.c.training_id == g.c.training_id)
        .where(owner.c.project_id == project)
        .group_by(g.c.tag)
        .order_by(g.c.tag)
      )
      return {"items": [_json(row) for row in rows]}

  def pinned(self, project: int) -> Row | None:
    """Returns {id, run_name} of the project's pinned baseline."""
    t, pin = tables.training, tables.pinned_baseline
    with database.reading(self._engine) as connection:
      row = connection.execute(
        sa.select(t.c.id, t.c.run_name)
        .join(pin, pin.c.training_id == t.c.id)
        .where(pin.c.project_id == project)
      ).one_or_none()
    return None if row is None else _json(row)

  def of_training(
    self, project: int, kind: str, training: int, page: query_lib.ListQuery
  ) -> Row:
    """Returns a run's steps or evaluations by step, or its baselines by id."""
    t = tables.metadata.tables[kind]
    with database.reading(self._engine) as connection:
      self._require(connection, project, "training", training)
    key = t.c.id if kind == "baseline" else t.c.step
    query = _select(t).where(t.c.training_id == training)
    return self._page(query, key, False, page)

  def rollouts(self, project: int, selection: query_lib.RolloutsQuery) -> Row:
    """Returns a page of rollouts, newest first."""
    r = tables.rollout
    query = _select(r, _HEAVY["rollout"]).where(self._is_mine(project))
    if selection.training_id is not None:
      # By the training's steps, not by reading every rollout.
      own = _rollouts_of(selection.training_id)
      query = query.join(own, own.c.id == r.c.id)
    for kind in vocabulary.SOURCE_TYPES:
      if (id_ := getattr(selection, f"{kind}_id")) is not None:
        # Both columns, so that the index serves.
        query = query.where(r.c.source_type == kind, r.c[f"{kind}_id"] == id_)
    for name in ("task_id", "batch", "group", "status"):
      if (value := getattr(selection, name)) is not None:
        query = query.where(r.c[name] == value)
    if selection.label is not None:
      query = query.where(r.c.id.in_(labelled(selection.label)))
    if selection.success is not None:
      query = query.where(r.c.task_success == int(selection.success))
    return self._page(query, r.c.id, True, selection)

  def tasks(self, project: int, page: query_lib.ListQuery) -> Row:
    """Returns tasks that the project's clients have sent."""
    t, ids = tables.task, tables.client_ids
    own_tasks = sa.select(ids.c.entity_id).where(
      ids.c.project_id == project, ids.c.kind == "task"
    )
    query = _select(t).where(t.c.id.in_(own_tasks))
    return self._page(query, t.c.id, False, page)

  def history(
    self, project: int, kind: str, id_: int, page: query_lib.ListQuery
  ) -> Row:
    """Returns every status that an entity had, in order."""
    h = tables.status_history
    with database.reading(self._engine) as connection:
      self._require(connection, project, kind, id_)
    query = _select(h).where(h.c.entity_type == kind, h.c.entity_id == id_)
    return self._page(query, h.c.id, False, page)

  def clients(self, project: int) -> Row:
    """Returns the clients' state: spools, drops, dead letters."""
    d = tables.delivery
    with database.reading(self._engine) as connection:
      rows = connection.execute(
        _select(d)
        .where(d.c.project_id == project)
        .order_by(d.c.updated_at.desc())
        .limit(query_lib.MAX_LIMIT)
      )
      return {"items": [_json(row) for row in rows]}

  # --- one of them -----------------------------------------------------------

  def one(self, project: int, kind: str, id_: int) -> Row:
    """Returns an entity, with its raw values beside its columns.

    Raises:
      ApiError: 404.
    """
    with database.reading(self._engine) as connection:
      self._require(connection, project, kind, id_)
      entity = self._entity(connection, kind, id_)
      if kind == "training":
        add_tags_and_pin(connection, project, [entity])
      return entity

  def rollout(self, project: int, name: str) -> Row:
    """Returns a rollout with its environment, validations and turns.

    Args:
      project: Project that the rollout belongs to.
      name: the server's id or the rollout's own.

    Raises:
      ApiError: 404.
    """
    with database.reading(self._engine) as connection:
      id_ = self._rollout_id(connection, project, name)
      entity = self._entity(connection, "rollout", id_)
      entity["training_id"] = _training_of(connection, entity)
      entity["task"] = self._entity(connection, "task", entity["task_id"])
      for key, table in (
        ("environments", tables.environment),
        ("validations", tables.validation),
        ("turns", tables.turn),
      ):
        order = table.c.turn if key == "turns" else table.c.id
        rows = connection.execute(
          _select(table).where(table.c.rollout_id == id_).order_by(order)
        )
        entity[key] = [_json(row) for row in rows]
      environments = entity.pop("environments")
      entity["environment"] = environments[0] if environments else None
      self._add_raw(connection, "validation", entity["validations"])
      _add_later(connection, "validation", entity["validations"])
      entity["annotations"] = annotations_of(connection, id_)
      return entity

  def turns(self, project: int, name: str) -> Row:
    """Returns every turn of a rollout with its actions and observations."""
    with database.reading(self._engine) as connection:
      id_ = self._rollout_id(connection, project, name)
      t = tables.turn
      rows = connection.execute(
        _select(t).where(t.c.rollout_id == id_).order_by(t.c.turn)
      )
      rows_of_turns = [_json(row) for row in rows]
      self._fill_turns(connection, rows_of_turns)
      return {"items": rows_of_turns}

  def turn(self, project: int, rollout: str, turn: int) -> Row:
    """Returns one turn of a rollout, by id.

    Raises:
      ApiError: 404.
    """
    t = tables.turn
    with database.reading(self._engine) as connection:
      id_ = self._rollout_id(connection, project, rollout)
      row = connection.execute(
        _select(t).where(t.c.rollout_id == id_, t.c.id == turn)
      ).one_or_none()
      if row is None:
        raise _absent("turn", turn)
      turns = [_json(row)]
      self._fill_turns(connection, turns)
      return turns[0]

  def observation(self, project: int, rollout: str, id_: int) -> Row:
    """Returns an observation of a rollout.

    Raises:
      ApiError: 404.
    """
    o, t = tables.obs, tables.turn
    with database.reading(self._engine) as connection:
      owner = self._rollout_id(connection, project, rollout)
      row = connection.execute(
        _select(o)
        .join(t, t.c.id == o.c.turn_id)
        .where(t.c.rollout_id == owner, o.c.id == id_)
      ).one_or_none()
      if row is None:
        raise _absent("observation", id_)
      return _json(row)

  def timeline(self, project: int, training: int) -> list[Row]:
    """Returns a training's baselines, evaluations and steps, by time."""
    entries = []
    with database.reading(self._engine) as connection:
      self._require(connection, project, "training", training)
      for kind in ("baseline", "eval", "step"):
        t = tables.metadata.tables[kind]
        rows = connection.execute(
          _select(t, {"metrics_json"}).where(t.c.training_id == training)
        )
        entries += [{"kind": kind, **_json(row)} for row in rows]
    entries.sort(key=lambda e: (e["start_time"] or e["created_at"], e["id"]))
    return entries

  def entity_timeline(self, project: int, kind: str, id_: int) -> Row:
    """Returns a step, evaluation or baseline with its rollouts by group."""
    r = tables.rollout
    with database.reading(self._engine) as connection:
      self._require(connection, project, kind, id_)
      rows = connection.execute(
        _select(r, _HEAVY["rollout"])
        .where(r.c.source_type == kind, r.c[f"{kind}_id"] == id_)
        .order_by(r.c.group, r.c.env_index, r.c.id)
        .limit(10_000)
      )
      return {
        kind: self._entity(connection, kind, id_),
        "rollouts": [_json(row) for row in rows],
      }

  def screenshot(self, sha: str) -> Row | None:
    s = tables.screenshot
    with database.reading(self._engine) as connection:
      row = connection.execute(
        sa.select(s).where(s.c.sha256 == sha)
      ).one_or_none()
    return None if row is None else _json(row)

  def known_screenshots(self, shas: Sequence[str]) -> dict[str, sa.Row]:
    """Maps the stored ones of the given hashes to their rows."""
    s = tables.screenshot
    query = sa.select(s.c.sha256, s.c.media_type, s.c.created_at).where(
      s.c.sha256.in_(shas)
    )
    with database.reading(self._engine) as connection:
      return {row.sha256: row for row in connection.execute(query)}

  def ready(self) -> None:
    """Reads once; raises the database's error when it cannot be read."""
    with database.reading(self._engine) as connection:
      connection.execute(sa.select(sa.func.count()).select_from(tables.meta))

  # --- helpers --------------------------------------------------------------

  def _page(
    self,
    query: sa.Select,
    key: sa.Column,
    newest_first: bool,
    page: query_lib.ListQuery,
  ) -> Row:
    limit, after = page.limit, page.after
    if after is not None:
      query = query.where(key < after if newest_first else key > after)
    query = query.order_by(key.desc() if newest_first else key)
    with database.reading(self._engine) as connection:
      rows = [_json(r) for r in connection.execute(query.limit(limit + 1))]
    answer: Row = {"items": rows[:limit], "next": None}
    if len(rows) > limit:
      answer["next"] = query_lib.cursor_of(rows[limit - 1][key.name])
    return answer

  def _entity(self, connection: sa.Connection, kind: str, id_: int) -> Row:
    t = tables.metadata.tables[kind]
    entity = _json(connection.execute(_select(t).where(t.c.id == id_)).one())
    self._add_raw(connection, kind, [entity])
    _add_later(connection, kind, [entity])
    return entity

  def _add_raw(
    self, connection: sa.Connection, kind: str, rows: list[Row]
  ) -> None:
    """Adds `raw`: original values that the columns do not hold."""
    raw = tables.raw_value
    by_id = {row["id"]: row for row in rows}
    values = connection.execute(
      sa.select(raw).where(raw.c.kind == kind, raw.c.entity_id.in_(list(by_id)))
    )
    for row in values:
      by_id[row.entity_id].setdefault("raw", {})[row.field] = row.value

  def _fill_turns(self, connection: sa.Connection, turns: list[Row]) -> None:
    self._add_raw(connection, "turn", turns)
    _add_later(connection, "turn", turns)
    by_id = {turn["id"]: turn for turn in turns}
    for key, table in (
      ("actions", tables.action),
      ("observations", tables.obs),
    ):
      rows = connection.execute(
        _select(table)
        .where(table.c.turn_id.in_(list(by_id)))
        .order_by(table.c.id)
      )
      parts = [_json(row) for row in rows]
      self._add_raw(connection, table.name, parts)
      _add_later(connection, table.name, parts)
      for turn in turns:
        turn[key] = []
      for row in parts:
        by_id[row["turn_id"]][key].append(row)

  def _rollout_id(
    self, connection: sa.Connection, project: int, name: str
  ) -> int:
    r = tables.rollout
    match = r.c.rollout_id == name
    if name.isascii() and name.isdigit() and len(name) < 19:
      match = sa.or_(match, r.c.id == int(name))
    rollout_id = connection.execute(
      sa.select(r.c.id)
      .where(match, self._is_mine(project))
      # A name that looks like an id is the name first.
      .order_by(sa.case((r.c.rollout_id == name, 0), else_=1))
      .limit(1)
    ).scalar()
    if rollout_id is None:
      raise _absent("rollout", name)
    return rollout_id

  def _is_mine(self, project: int) -> sa.ColumnElement[bool]:
    owner = tables.training_project
    return _in_training(
      sa.select(owner.c.training_id).where(owner.c.project_id == project)
    )

  def _require(
    self, connection: sa.Connection, project: int, kind: str, id_: int
  ) -> None:
    """Raises ApiError 404 unless the project has this entity."""
    owner = tables.training_project
    t = tables.metadata.tables[kind]
    query = sa.select(t.c.id).where(t.c.id == id_)
    if kind == "rollout":
      query = query.where(self._is_mine(project))
    elif kind == "monitor_group":
      own_runs = sa.select(owner.c.training_id).where(
        owner.c.project_id == project
      )
      query = query.where(_in_training(own_runs, t))
    elif kind == "environment":
      r = tables.rollout
      query = query.join(r, r.c.id == t.c.rollout_id).where(
        self._is_mine(project)
      )
    elif kind == "task":
      ids = tables.client_ids
      query = query.where(
        t.c.id.in_(
          sa.select(ids.c.entity_id).where(
            ids.c.project_id == project, ids.c.kind == "task"
          )
        )
      )
    else:
      own = t.c.id if kind == "training" else t.c.training_id
      query = query.join(owner, owner.c.training_id == own).where(
        owner.c.project_id == project
      )
    if connection.execute(query).first() is None:
      raise _absent(kind, id_)


def annotations_of(connection: sa.Connection, rollout: int) -> list[Row]:
  """Returns the labels and notes of a rollout and its turns."""
  n, t = tables.annotation, tables.turn
  rows = connection.execute(
    sa.select(n.c.id, t.c.turn, n.c.label, n.c.note, n.c.created_at)
    .outerjoin(t, t.c.id == n.c.turn_id)
    .where(n.c.rollout_id == rollout)
    .order_by(n.c.id)
  )
  return [_json(row) for row in rows]


def labelled(label: str) -> sa.Select:
  """Returns ids of the rollouts that have a label, or a turn with it."""
  n = tables.annotation
  return sa.select(n.c.rollout_id).where(n.c.label == label).distinct()


def tagged(tags: Sequence[str]) -> list[sa.ColumnElement[bool]]:
  """Returns conditions that hold for trainings with all of the tags."""
  t, g = tables.training, tables.training_tag
  return [
    t.c.id.in_(sa.select(g.c.training_id).where(g.c.tag == tag)) for tag in tags
  ]


def add_tags_and_pin(
  connection: sa.Connection, project: int, rows: Sequence[Row]
) -> None:
  """Adds `tags`, sorted, and `pinned` to trainings of a project."""
  g, pin = tables.training_tag, tables.pinned_baseline
  by_run: dict[int, list[str]] = {}
  for id_, tag in connection.execute(
    sa.select(g.c.training_id, g.c.tag)
    .where(g.c.training_id.in_([row["id"] for row in rows]))
    .order_by(g.c.tag)
  ):
    by_run.setdefault(id_, []).append(tag)
  pinned = connection.execute(
    sa.select(pin.c.training_id).where(pin.c.project_id == project)
  ).scalar()
  for row in rows:
    row["tags"] = by_run.get(row["id"], [])
    row["pinned"] = row["id"] == pinned


def _rollouts_of(training: int) -> sa.Subquery:
  """Returns ids of a training's rollouts, by the indices of their sources."""
  r = tables.rollout
  parts = []
  for kind in vocabulary.SOURCE_TYPES:
    t = tables.metadata.tables[kind]
    own = sa.select(t.c.id).where(t.c.training_id == training)
    parts.append(
      sa.select(r.c.id).where(
        r.c.source_type == kind, r.c[f"{kind}_id"].in_(own)
      )
    )
  return sa.union_all(*parts).subquery("own")


def _in_training(
  which: sa.Select, r: sa.Table = tables.rollout
) -> sa.ColumnElement[bool]:
  """Returns the condition on rollouts or groups of selected trainings."""
  parts = []
  for kind in vocabulary.SOURCE_TYPES:
    t = tables.metadata.tables[kind]
    parts.append(
      sa.exists()
      .where(t.c.id == r.c[f"{kind}_id"], t.c.training_id.in_(which))
      .correlate(r)
    )
  return sa.or_(*parts)


def _add_later(
  connection: sa.Connection, kind: str, rows: Sequence[Row]
) -> None:
  """Adds the columns of the later schema of other monitors."""
  names = later_views.ADDED.get(kind)
  if not names or not rows:
    return
  view = sa.table(
    f"{later_views.PREFIX}{kind}", *map(sa.column, ("id", *names))
  )
  by_id = {row["id"]: row for row in rows}
  for row in connection.execute(
    sa.select(view).where(view.c.id.in_(list(by_id)))
  ):
    later = _json(row)
    by_id[later["id"]].update({name: later[name] for name in names})


def _training_of(connection: sa.Connection, rollout: Row) -> int:
  kind = rollout["source_type"]
  t = tables.metadata.tables[kind]
  return connection.execute(
    sa.select(t.c.training_id).where(t.c.id == rollout[f"{kind}_id"])
  ).scalar_one()


def _select(table: sa.Table, without: set[str] | None = None) -> sa.Select:
  if without is None:
    return sa.select(table)
  return sa.select(*(c for c in table.c if c.name not in without))


def _json(row: sa.Row) -> Row:
  content = {}
  for name, value in row._mapping.items():  # pylint: disable=protected-access
    if isinstance(value, datetime.datetime):
      value = value.isoformat(timespec="microseconds") + "Z"
    elif name in JSON_COLUMNS and isinstance(value, str):
      try:
        parsed = orjson.loads(value)
      except orjson.JSONDecodeError:
        pass  # Written by raw SQL; shown as text.
      else:
        # An answer has levels around it, and the encoder has few: text, too.
        value = value if fields.too_deep(value, parsed) else parsed
    content[str(name)] = value  # SQLAlchemy's names are a kind of str.
  return content


def _absent(kind: str, id_: object) -> errors.ApiError:
  return errors.ApiError(404, f"this project has no {kind} {str(id_)[:100]}")
