"""Applies batches to the database.

Promises: an item that the database knows (by its client id, or by the key that
its table has: a run's name, a step's number, …) changes that row, any other
makes one, so that a batch applied twice has the effect of one. An item that
cannot be stored (it lacks what a new one needs, or refers to nothing) is left
out with what refers to it, and named in the reply; a batch that numbers itself
by `delivery`, or of which nothing can be stored, is refused whole. A status
that may not follow the present one is left out and named; an end stays an end.

Works inside a transaction that it neither begins nor ends.
"""

from __future__ import annotations

import collections
from typing import Any, Iterable, Mapping

from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server import sql as sql_lib
from training_monitor.server.batches import items as items_lib
from training_monitor.server.batches import placement
from training_monitor.server.batches import references
from training_monitor.server.batches import side_rows
from training_monitor.server.batches import status_rules

Item = items_lib.Item
Kind = items_lib.ItemKind
_CHANGES_KEPT = 500_000
_WATCHED = frozenset(
  {"training", "baseline", "eval", "step", "rollout", "environment"}
)
_MEASURED = frozenset(
  {"status", "reward", "task_success", "num_turns", "eval_id", "baseline_id"}
)
_NATURAL = {
  "training": ("run_name",),
  "task": ("task_id",),
  "eval": ("training_id", "step"),
  "step": ("training_id", "step"),
  "rollout": ("rollout_id",),
  "turn": ("rollout_id", "turn"),
  "environment": ("rollout_id",),
}
_TABLE_SQL = {k.name: f'"{k.name}"' for k in items_lib.KINDS}


class Transaction:
  """Batches that are committed together."""

  def __init__(
    self, sql: sql_lib.Sql, shared: references.CommittedIds, now: str
  ):
    """Args:

    sql: Cursor of the open transaction.
    shared: committed ids, from earlier transactions.
    now: the time, in the database's form.
    """
    self.sql = sql
    self.shared = shared
    self.now = now
    self.ids: references.Ids = {}
    self.owners: dict[tuple[str, int], int] = {}
    self.last_id: dict[str, int] = {}
    self._measured: set[tuple[str, int]] = set()
    self._alive: set[int] = set()
    self._changes: dict[tuple[int, str, int], None] = {}

  def apply(self, batch: items_lib.IngestBatch, project: int) -> dict[str, Any]:
    """Applies one batch and returns the reply; does not change the batch.

    Raises:
      ApiError: the batch is refused; the caller undoes what it has written.
    """
    work = _Work(self, project)
    reply = work.apply(batch)
    self.ids.update(work.ids)
    self.owners.update(work.owners)
    self._measured |= work.measured
    self._alive |= work.trainings
    self._changes.update(dict.fromkeys(work.changes))
    return reply

  def finish(self, prune: bool = False) -> None:
    """Finishes all batches together, before the commit.

    Args:
      prune: forget the oldest changes, too.
    """
    if prune:
      self.sql.run(
        "DELETE FROM monitor_change WHERE id <= (SELECT max(id) FROM"
        f" monitor_change) - {_CHANGES_KEPT:d}"
      )
    for kind, id_ in sorted(self._measured):
      side_rows.update_figures(self.sql, kind, id_, self.now)
      if (owner := self._owner(kind, id_)) is not None:
        self._changes[owner, kind, id_] = None
    self.sql.many(
      "UPDATE training SET last_heartbeat = ?, updated_at = ? WHERE id = ?",
      [(self.now, self.now, id_) for id_ in sorted(self._alive)],
    )
    self.sql.many(
      "INSERT INTO monitor_change (training_id, kind, entity_id, changed_at)"
      " VALUES (?, ?, ?, ?)",
      [(*change, self.now) for change in self._changes],
    )

  def changed(self, training: int, kind: str, id_: int) -> None:
    """Records a change of a training for its listeners."""
    self._changes[training, kind, id_] = None

  def tag(self, tags: list[tuple[int, str]]) -> None:
    """Adds (training, tag) pairs; existing ones stay."""
    self.sql.many(
      "INSERT INTO monitor_training_tag (training_id, tag, created_at)"
      " VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
      [(*one, self.now) for one in tags],
    )

  def committed(self) -> None:
    """Shares the batch's new ids; call it after the commit only."""
    self.shared.learn(self.ids, self.owners)

  def _owner(self, kind: str, id_: int) -> int | None:
    return self.owners.get((kind, id_)) or self.shared.owners.get((kind, id_))


class _Work:
  """The application of one batch."""

  def __init__(self, transaction: Transaction, project: int):
    self._tx = transaction
    self._sql = transaction.sql
    self._project = project
    self.owners: dict[tuple[str, int], int] = {}
    self.measured: set[tuple[str, int]] = set()
    self.trainings: set[int] = set()
    self.changes: list[tuple[int, str, int]] = []
    self._state: dict[tuple[str, int], status_rules.EntityState] = {}
    self._training: int | None = None
    self._ignored: list[dict[str, Any]] = []
    self._refused: list[dict[str, Any]] = []
    self._left_out: set[Item] = set()
    self._whole = False
    """Whether one item that cannot be stored refuses the batch."""
    self._who = references.References(
      self._sql, project, transaction.ids, transaction.shared.ids
    )
    self._waiting = side_rows.PendingEnvironments(
      self._sql, project, transaction.now
    )
    self._taken: list[int] = []
    self._names: list[tuple[int, str, str, int]] = []
    """Rows of client ids that are new."""
    self._new_rollouts: set[int] = set()
    """Of this batch: nothing in the database is theirs."""

  @property
  def ids(self) -> references.Ids:
    return self._who.ids

  def apply(self, batch: items_lib.IngestBatch) -> dict[str, Any]:
    delivery = batch.delivery
    self._whole = delivery is not None
    self._refused = list(batch.refused)
    if delivery is not None:
      applied = self._delivered(delivery)
      if applied >= delivery.last:
        return {"duplicate": True, "applied_to": applied}
      if applied >= delivery.first:
        raise errors.ApiError(
          409,
          f"entries up to {applied} of spool {delivery.spool} are applied"
          " already; send those after it",
          extra={"applied_to": applied},
        )
    if batch.training not in (None, ""):
      self._training = self._who.resolve_one(
        "training", batch.training, "training_id"
      )
    reply: dict[str, Any] = {}
    self._who.look_up_all(batch.items)
    for kind in items_lib.KINDS:
      items = [item.copy() for item in batch.items.get(kind.name, ())]
      if items:
        stored = self._apply_kind(kind, items)
        if kind.name != "training":
          reply[kind.plural] = [
            {"client_id": item.client_id, "id": id_} for id_, item in stored
          ]
        elif stored:
          self._training = reply["training_id"] = stored[0][0]
    paths = {item.path for item in self._left_out}
    left_out = [  # A field of an item that is left out has no entry of its own.
      *(
        one
        for one in batch.ignored
        if "times" in one or one["field"].rpartition(".")[0] not in paths
      ),
      *self._refused,
    ]
    if self._refused and not any(reply.values()):
      raise errors.invalid(left_out)
    self._sql.many(
      sql_lib.upsert(
        "monitor_client_id", ("project_id", "kind", "client_id"), ("entity_id",)
      ),
      self._names,
    )
    if self._training is not None:
      reply.setdefault("training_id", self._training)
      self.trainings.add(self._training)
    if ignored := [*self._ignored, *left_out]:
      reply["ignored"] = ignored
    if delivery is not None:
      reply["applied_to"] = delivery.last
      self._sql.run(
        sql_lib.upsert(
          "monitor_delivery",
          ("project_id", "spool"),
          ("last_seq", "health_json", "updated_at"),
        ),
        (
          self._project,
          delivery.spool,
          delivery.last,
          delivery.health,
          self._tx.now,
        ),
      )
    return reply

  def _delivered(self, delivery: items_lib.SpoolRange) -> int:
    rows = self._sql.rows(
      "SELECT last_seq FROM monitor_delivery WHERE project_id = ? AND spool"
      " = ?",
      (self._project, delivery.spool),
    )
    return rows[0][0] if rows else 0

  # --- a kind ----------------------------------------------------------------

  def _refuse(self, kind: Kind, item: Item, error: errors.ApiError) -> None:
    """Leaves an item out for what `error` says, or raises it."""
    if self._whole:
      raise error
    self._left_out.add(item)
    errors.add_refused(
      self._refused, kind.name, item.client_id, error.faults[0]
    )

  def _apply_kind(
    self, kind: Kind, items: list[Item]
  ) -> list[tuple[int, Item]]:
    """Returns (id, item) of the items that are stored."""
    refuse = lambda item, error: self._refuse(kind, item, error)
    items = self._who.resolve_parents(kind, items, refuse)
    if kind.name == "rollout":
      self._ignored += placement.by_groups(self._sql, self._who, items)
    known_ids = self._find(kind, items)
    if kind.parents.get("training_id") and self._training is not None:
      for item in items:
        if item.client_id not in known_ids:
          item.values.setdefault("training_id", self._training)
    inserts: list[tuple[int, Item]] = []
    updates: list[tuple[int, Item]] = []
    fresh: dict[tuple[Any, ...], int] = {}
    result: list[tuple[int, Item]] = []
    natural = kind.name in _NATURAL or kind.name == "monitor_group"
    for item in items:
      name = item.client_id
      waits = kind.name == "environment" and "rollout_id" not in item.values
      try:
        if natural or item.id is not None:
          id_ = self._existing(kind, item, fresh)
        else:
          id_ = None if name is None else known_ids.get(name)
        if id_ is None and not waits:
          self._complete(kind, item)
      except errors.ApiError as error:
        self._refuse(kind, item, error)
        continue
      waiting = None
      if id_ is not None and kind.name == "environment":
        if ("environment", id_) not in self._state:
          waiting = self._waiting.get(id_)
      if id_ is None:
        id_ = self._take(kind, len(items))
        if waits:
          self._waiting.keep(id_, item.values)
        else:
          inserts.append((id_, item))
        key = self._natural(kind, item) if natural else None
        if key is not None:
          fresh[key] = id_
      elif waiting is not None:
        self._more_of_waiting(id_, item, waiting, inserts)
      else:
        updates.append((id_, item))
      if name is not None and name not in known_ids:
        self._who.learn(kind.name, name, id_)
        self._names.append((self._project, kind.name, name, id_))
      result.append((id_, item))
    self._insert(kind, inserts)
    self._update(kind, updates)
    result = [pair for pair in result if pair[1] not in self._left_out]
    side_rows.keep_raw_values(self._sql, kind.name, result)
    if kind.name == "rollout":
      self._environments_of(result)
    elif kind.name == "training":
      self._tx.tag([(id_, tag) for id_, item in result for tag in item.tags])
    self._taken = []
    return result

  def _take(self, kind: Kind, most: int) -> int:
    """Returns an unused id; reserves up to `most` at a time."""
    if not self._taken:
      self._taken = list(
        reversed(self._sql.next_ids(kind.name, most, self._tx.last_id))
      )
    return self._taken.pop()

  def _natural(
    self, kind: Kind, item: Item
  ) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """Returns (columns, values) of an item's unique key beside the id."""
    if kind.name == "monitor_group":
      columns = placement.group_key(item)
    else:
      columns = _NATURAL.get(kind.name)
    if columns is None:
      return None
    key = tuple(map(item.values.get, columns))
    return None if None in key else (columns, key)

  def _find(self, kind: Kind, items: list[Item]) -> Mapping[str, int]:
    """Learns which items the database has already: client id -> id."""
    names = [i.client_id for i in items if i.client_id is not None]
    known_ids = self._who.look_up(kind.name, names)
    ids = {i.id for i in items if i.id is not None}
    if ids:
      self._who.check_numbers(kind.name, sorted(ids))
    if kind.name in status_rules.COLUMNS:
      ids.update(known_ids[name] for name in names if name in known_ids)
      self._load(kind.name, ids)
    return known_ids

  def _load(self, kind: str, ids: Iterable[int]) -> None:
    missing = [i for i in ids if (kind, i) not in self._state]
    if not missing:
      return
    columns = status_rules.COLUMNS[kind]
    rows = self._sql.among(
      f"SELECT id, status, {', '.join(columns)} FROM {_TABLE_SQL[kind]}"
      " WHERE id {among}",
      (),
      missing,
    )
    for id_, status, *values in rows:
      self._state[kind, id_] = status_rules.EntityState(
        status, dict(zip(columns, values))
      )

  def _existing(
    self, kind: Kind, item: Item, fresh: Mapping[tuple[Any, ...], int]
  ) -> int | None:
    """Returns the id of the row that an item is about; None for a new one."""
    if item.id is not None:
      if (kind.name, item.id) not in self._who.mine:
        raise errors.invalid(
          [
            errors.fault(
              f"{item.path}.id",
              item.id,
              f"this project has no {kind.name} of this id",
            )
          ]
        )
      return item.id
    if item.client_id is not None:
      id_ = self._who.found(kind.name).get(item.client_id)
      if id_ is not None:
        if kind.name == "training":
          self._keep_number(item, id_)
        return id_
    unique_key = self._natural(kind, item)
    if unique_key is None:
      return None
    if unique_key in fresh:
      return fresh[unique_key]
    if item.values.get("rollout_id") in self._new_rollouts:
      return None
    columns, key = unique_key
    where = " AND ".join(f"{c} = ?" for c in columns)
    rows = self._sql.rows(
      f"SELECT id FROM {_TABLE_SQL[kind.name]} WHERE {where}", key
    )
    if not rows:
      return None
    id_ = rows[0][0]
    if kind.name == "training":
      return self._training_of_name(item, id_)
    if kind.name == "rollout":
      self._who.check_numbers("rollout", [id_])
      if ("rollout", id_) not in self._who.mine:
        raise errors.invalid(
          [
            errors.fault(
              f"{item.path}.rollout_id",
              key[0],
              "another project has a rollout of this name; use one that is"
              " unique, such as a UUID",
            )
          ]
        )
    if kind.name in status_rules.COLUMNS:
      self._load(kind.name, [id_])
    return id_

  def _training_of_name(self, item: Item, id_: int) -> int | None:
    """Returns the id of the client's training with this name, or None.

    None: the name is another run's, and the item's has got a number behind it.
    """
    self._who.check_numbers("training", [id_])
    if item.client_id is None and ("training", id_) in self._who.mine:
      self._load("training", [id_])
      return id_
    name, number = item.values["run_name"], 2
    while self._sql.rows(
      "SELECT 1 FROM training WHERE run_name = ?", (f"{name}-{number}",)
    ):
      number += 1
    item.raw["run_name"] = name
    item.values["run_name"] = f"{name}-{number}"
    return None

  def _keep_number(self, item: Item, id_: int) -> None:
    """Keeps the number behind the name of a resumed run."""
    name = item.values.get("run_name")
    if name is not None and self._sql.rows(
      "SELECT 1 FROM training WHERE run_name = ? AND id <> ?", (name, id_)
    ):
      del item.values["run_name"]

  # --- environments before their rollouts ------------------------------------

  def _more_of_waiting(
    self,
    id_: int,
    item: Item,
    waiting: dict[str, Any],
    inserts: list[tuple[int, Item]],
  ) -> None:
    """Adds to a waiting environment; inserts it once its rollout is known."""
    item.values = {**waiting, **item.values}
    if "rollout_id" not in item.values:
      self._waiting.keep(id_, item.values)
      return
    kind = items_lib.BY_NAME["environment"]
    try:
      self._complete(kind, item)
    except errors.ApiError as error:
      self._refuse(kind, item, error)
      return
    item.raw = {**self._waiting.raw(id_), **item.raw}
    self._waiting.remove(id_)
    inserts.append((id_, item))

  def _environments_of(self, rollouts: Iterable[tuple[int, Item]]) -> None:
    """Makes the environments that waited for these rollouts."""
    inserts: list[tuple[int, Item]] = []
    for rollout, item in rollouts:
      if item.environment is None:
        continue
      id_: int | str | None = item.environment
      if isinstance(id_, str):
        id_ = self._who.look_up("environment", [id_]).get(id_)
      if id_ is None or ("environment", id_) in self._state:
        continue
      waiting = self._waiting.get(id_)
      if waiting is not None:
        more = Item(f"{item.path}.env_id")
        more.values = {"rollout_id": rollout}
        self._new_rollouts.discard(rollout)
        self._more_of_waiting(id_, more, waiting, inserts)
    self._insert(items_lib.BY_NAME["environment"], inserts)

  # --- rows -----------------------------------------------------------------

  def _complete(self, kind: Kind, item: Item) -> None:
    """Completes the values of a new entity.

    Raises:
      ApiError: 400, it lacks what nothing can stand in for.
    """
    values, placed = item.values, None
    if kind.name == "rollout":
      placed = placement.under_newest_step(self._sql, self._training, item)
    elif kind.name == "monitor_group":
      placement.check_new_group(item)
    status_rules.fill_defaults(kind.name, item, self._tx.now, self._project)
    if kind.name in ("baseline", "eval"):
      values.setdefault("model_path", self._model_of(values))
    for column in (*kind.required, *_NEEDS.get(kind.name, ())):
      if values.get(column) is None:
        raise errors.invalid(
          [
            errors.fault(
              f"{item.path}.{column}",
              None,
              f"a new {kind.name} needs it; no {kind.name} of client_id"
              f" {item.client_id!r} is known",
            )
          ]
        )
    if kind.name == "rollout":
      status_rules.check_source(item, status_rules.EntityState(None, {}))
    if placed is not None:
      self._ignored.append(placed)

  def _insert(self, kind: Kind, items: list[tuple[int, Item]]) -> None:
    if not items:
      return
    now, names = self._tx.now, sql_lib.columns(kind.name)
    stateful = kind.name in status_rules.COLUMNS
    rows = []
    for id_, item in items:
      values = item.values
      if stateful:
        row = status_rules.EntityState(None, {})
        self._advance(kind.name, item, row)
        values.setdefault("status", vocabulary.STATUSES[kind.name][0])
        row.status = values["status"]
        self._state[kind.name, id_] = row
        self._own(kind.name, id_, values)
      values["id"] = id_
      values["created_at"] = now
      values["updated_at"] = now
      rows.append(list(map(values.get, names)))
    self._sql.many(sql_lib.insert(kind.name), rows)
    if kind.name == "training":
      self._sql.many(
        "INSERT INTO monitor_training_project (training_id, project_id)"
        " VALUES (?, ?)",
        [(id_, self._project) for id_, _ in items],
      )
    elif kind.name == "rollout":
      self._new_rollouts.update(id_ for id_, _ in items)
    self._who.mine.update((kind.name, id_) for id_, _ in items)
    for id_, item in items:
      if "status" in item.raw:
        side_rows.note_raw_status(self._sql, kind.name, id_, item, None)

  def _update(self, kind: Kind, items: list[tuple[int, Item]]) -> None:
    stateful = kind.name in status_rules.COLUMNS
    dated = "updated_at" in sql_lib.columns(kind.name)
    grouped: dict[tuple[str, ...], list[list[Any]]] = collections.defaultdict(
      list
    )
    waiting: dict[int, tuple[str, ...]] = {}
    if stateful:
      self._load(kind.name, [id_ for id_, _ in items])
    noted = []
    for id_, item in items:
      values = item.values
      old = None
      if stateful:
        row = self._state[kind.name, id_]
        old = row.status
        if kind.name == "rollout":
          try:
            status_rules.check_source(item, row)
          except errors.ApiError as error:
            self._refuse(kind, item, error)
            continue
        refused = status_rules.refused_status(kind.name, item, row)
        if refused is not None:
          self._ignored.append(refused)
        self._advance(kind.name, item, row)
        row.status = values.get("status", row.status)
        self._own(kind.name, id_, values)
      if dated:
        values["updated_at"] = self._tx.now
      if not values:
        continue
      names = tuple(sorted(values))
      if waiting.setdefault(id_, names) != names:
        # Two changes of one row must stay in their order.
        self._flush(kind, grouped)
        waiting = {id_: names}
      grouped[names].append([*(values[n] for n in names), id_])
      if "status" in item.raw and old != values.get("status"):
        noted.append((id_, item, old))
    self._flush(kind, grouped)
    for id_, item, old in noted:
      side_rows.note_raw_status(self._sql, kind.name, id_, item, old)

  def _flush(
    self, kind: Kind, grouped: dict[tuple[str, ...], list[list[Any]]]
  ) -> None:
    for names, rows in grouped.items():
      self._sql.many(sql_lib.update(kind.name, names), rows)
    grouped.clear()

  def _model_of(self, values: Mapping[str, Any]) -> str:
    id_ = values.get("training_id")
    if id_ is None:
      return ""
    self._load("training", [id_])
    row = self._state.get(("training", id_))
    return (row.fields.get("model_name") or "") if row else ""

  # --- statuses and progress ------------------------------------------------

  def _advance(
    self, kind: str, item: Item, row: status_rules.EntityState
  ) -> None:
    if kind == "rollout":
      source = row.fields.get("source_type")
      if source not in (None, "step"):
        # One that goes elsewhere counts there and no longer here.
        self.measured.add((source, row.fields[f"{source}_id"]))
    status_rules.advance(kind, row, item.values)

  def _own(self, kind: str, id_: int, values: Mapping[str, Any]) -> None:
    """Notes whose training an entity is, and that it changed."""
    row = self._state[kind, id_]
    if kind == "training":
      owner: int | None = id_
    elif kind == "rollout":
      source = row.fields["source_type"]
      parent = row.fields[f"{source}_id"]
      owner = self._owner(source, parent)
      if source != "step" and _MEASURED & values.keys():
        self.measured.add((source, parent))
    elif kind == "environment":
      owner = None  # Its rollout comes with it.
    else:
      owner = row.fields.get("training_id")
      if owner is not None:
        self.owners[kind, id_] = owner
    if owner is not None and kind in _WATCHED:
      self.changes.append((owner, kind, id_))
      self.trainings.add(owner)

  def _owner(self, kind: str, id_: int) -> int | None:
    for owners in (self.owners, self._tx.owners, self._tx.shared.owners):
      if (owner := owners.get((kind, id_))) is not None:
        return owner
    rows = self._sql.rows(
      f"SELECT training_id FROM {_TABLE_SQL[kind]} WHERE id = ?", (id_,)
    )
    if not rows:
      return None
    self.owners[kind, id_] = rows[0][0]
    return rows[0][0]


_NEEDS = {
  "validator": ("task_id",),
  "baseline": ("training_id",),
  "eval": ("training_id",),
  "step": ("training_id",),
  "rollout": ("task_id",),
  "turn": ("rollout_id",),
  "action": ("turn_id",),
  "obs": ("turn_id",),
  "validation": ("rollout_id",),
}
"""Parents that a new entity must have."""
