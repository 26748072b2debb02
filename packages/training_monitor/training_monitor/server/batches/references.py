"""Resolves items and references to entities of the database.

A client uses ids of its own, a project sees its own entities only, and a result
is cached as long as it cannot become wrong.
"""

from __future__ import annotations

import collections
from typing import Any, Callable, Iterable, Mapping, TypeVar

from training_monitor.schema import triggers
from training_monitor.server import errors
from training_monitor.server import sql as sql_lib
from training_monitor.server.batches import items as items_lib

Item = items_lib.Item
Kind = items_lib.ItemKind
K = TypeVar("K")
Ids = dict[tuple[int, str, str], int]
"""(project, kind, client id) -> id."""


class CommittedIds:
  """Ids that a writer's transactions share: committed, and never changing."""

  def __init__(self, most: int = 200_000):
    self._most = most
    self.ids: dict[tuple[int, str, str], int] = {}
    self.owners: dict[tuple[str, int], int] = {}
    """(kind, id) -> training, of entities with children."""
    self._generation: str | None = None

  def check_generation(self, sql: sql_lib.Sql) -> None:
    """Forgets everything when another program has deleted rows."""
    rows = sql.rows(
      "SELECT value FROM monitor_meta WHERE key = ?", (triggers.GENERATION,)
    )
    generation = rows[0][0] if rows else None
    if generation != self._generation:
      self._generation = generation
      self.ids.clear()
      self.owners.clear()

  def learn(
    self,
    ids: Mapping[tuple[int, str, str], int],
    owners: Mapping[tuple[str, int], int],
  ) -> None:
    self._keep(self.ids, ids)
    self._keep(self.owners, owners)

  def _keep(self, cache: dict[K, int], new: Mapping[K, int]) -> None:
    cache.update(new)
    if len(cache) > self._most:
      for key in list(cache)[: len(cache) - self._most // 2]:
        del cache[key]


class References:
  """Resolves the references of one batch.

  Attributes:
    ids: client ids of its new entities; valid once it is committed.
    mine: (kind, id) that are the project's.
  """

  def __init__(self, sql: sql_lib.Sql, project: int, *earlier: Ids):
    """Args:

    sql: Cursor of the open transaction.
    project: Project of the batch.
    *earlier: Ids of earlier transactions.
    """
    self._sql = sql
    self._project = project
    self.ids: Ids = {}
    self.mine: set[tuple[str, int]] = set()
    self._before = earlier
    self._found: dict[str, dict[str, int]] = collections.defaultdict(dict)
    self._absent: dict[str, set[str]] = collections.defaultdict(set)
    """Names that the database did not have, of those looked up together."""

  def found(self, kind: str) -> Mapping[str, int]:
    """Returns the looked up and learned ids by client id."""
    return self._found[kind]

  def learn(self, kind: str, name: str, id_: int) -> None:
    self._found[kind][name] = id_
    self.ids[self._project, kind, name] = id_

  def look_up_all(self, batch: Mapping[str, Iterable[Item]]) -> None:
    """Looks up every name that items have or refer to, in one query.

    Args:
      batch: Kind -> its items.
    """
    names_by_kind: dict[str, set[str]] = collections.defaultdict(set)
    for name, items in batch.items():
      kinds, own = items_lib.BY_NAME[name].parents, names_by_kind[name]
      for item in items:
        if item.client_id is not None:
          own.add(item.client_id)
        for column, value in item.parents.items():
          if value.__class__ is str:
            names_by_kind[kinds[column]].add(value)
    pairs = []
    for kind, names in names_by_kind.items():
      unknown = self._unknown(kind, names)
      self._absent[kind] |= unknown
      pairs += [(kind, name) for name in unknown]
    if not pairs:
      return
    rows = self._sql.rows_of(
      "SELECT kind, client_id, entity_id FROM {pairs} JOIN monitor_client_id"
      " ON project_id = ? AND kind = {first} AND client_id = {second}",
      pairs,
      (self._project,),
    )
    matches: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for kind, name, id_ in rows:
      matches[kind][name] = id_
    for kind, ids in matches.items():
      self._learn_stored(kind, ids)

  def look_up(self, kind: str, names: Iterable[str]) -> Mapping[str, int]:
    """Finds the ids of client ids that the database knows; see `found`."""
    ids = self._found[kind]
    unknown = self._unknown(kind, names) - self._absent[kind]
    if not unknown:
      return ids
    rows = self._sql.among(
      "SELECT client_id, entity_id FROM monitor_client_id WHERE project_id ="
      " ? AND kind = ? AND client_id {among}",
      (self._project, kind),
      unknown,
    )
    self._learn_stored(kind, dict(rows))
    return ids

  def _learn_stored(self, kind: str, ids: Mapping[str, int]) -> None:
    """Learns the client ids whose rows exist.

    A row that was deleted leaves its name until the next prune: an index of
    names by their rows would cost every batch.
    """
    tables = [kind]
    if kind == "environment":
      tables.append("monitor_pending_environment")
    stored = {
      row[0]
      for table in tables
      for row in self._sql.among(
        f'SELECT id FROM "{table}" WHERE id {{among}}', (), ids.values()
      )
    }
    for name, id_ in ids.items():
      if id_ in stored:
        self.learn(kind, name, id_)

  def _unknown(self, kind: str, names: Iterable[str]) -> set[str]:
    """Returns the names whose ids must be looked up."""
    ids = self._found[kind]
    unknown = set(names).difference(ids)
    for earlier in self._before:
      for name in list(unknown):
        id_ = earlier.get((self._project, kind, name))
        if id_ is not None:
          ids[name] = id_
          unknown.discard(name)
    return unknown

  def resolve_parents(
    self,
    kind: Kind,
    items: list[Item],
    refuse: Callable[[Item, errors.ApiError], None],
  ) -> list[Item]:
    """Adds the ids of the parents of each item to its values.

    Args:
      kind: Kind of the items.
      items: Items of a batch.
      refuse: Receives an item with a parent that is not known or not the
        project's, and that error.

    Returns:
      The items whose parents are known.
    """
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for item in items:
      for column, value in item.parents.items():
        if isinstance(value, int):
          numbers[kind.parents[column]].add(value)
    for parent, id_set in numbers.items():
      self.check_numbers(parent, sorted(id_set))
    ids: dict[str, Mapping[Any, int]] = {
      column: self._found[parent] for column, parent in kind.parents.items()
    }
    resolved = []
    for item in items:
      try:
        for column, value in item.parents.items():
          item.values[column] = ids[column].get(value) or self.resolve_one(
            kind.parents[column], value, f"{item.path}.{column}"
          )
      except errors.ApiError as error:
        refuse(item, error)
      else:
        resolved.append(item)
    return resolved

  def resolve_one(self, kind: str, value: int | str, path: str) -> int:
    """Returns the id of a reference; `path` is its place in the body."""
    if isinstance(value, str):
      id_ = self.look_up(kind, [value]).get(value)
      if id_ is None and value.isascii() and value.isdigit():
        value = int(value)  # An id that a client's JSON made text.
      else:
        if id_ is None:
          raise errors.invalid(
            [
              errors.fault(
                path,
                value,
                f"no {kind} has this client id; send it before, or in the same"
                " batch",
              )
            ]
          )
        return id_
    self.check_numbers(kind, [value])
    if (kind, value) not in self.mine:
      raise errors.invalid(
        [errors.fault(path, value, f"this project has no {kind} of this id")]
      )
    return value

  def check_numbers(self, kind: str, ids: list[int]) -> None:
    """Adds the ids that belong to the project to `mine`."""
    missing = [i for i in ids if (kind, i) not in self.mine]
    query = _OF_PROJECT.get(kind)
    if missing and query:
      self.mine.update(
        (kind, row[0])
        for row in self._sql.among(query, (self._project,), missing)
      )


_TRAINING_OF_ROLLOUT = (
  "LEFT JOIN step s ON s.id = r.step_id LEFT JOIN eval e ON e.id = r.eval_id"
  " LEFT JOIN baseline b ON b.id = r.baseline_id JOIN"
  " monitor_training_project p ON p.training_id = COALESCE(s.training_id,"
  " e.training_id, b.training_id)"
)
_OF_PROJECT = {
  "training": (
    "SELECT training_id FROM monitor_training_project WHERE project_id = ?"
    " AND training_id {among}"
  ),
  **{
    kind: (
      f'SELECT x.id FROM "{kind}" x JOIN monitor_training_project p ON'
      " p.training_id = x.training_id WHERE p.project_id = ? AND x.id"
      " {among}"
    )
    for kind in ("baseline", "eval", "step")
  },
  # Runs of all projects share tasks.
  "task": "SELECT id FROM task WHERE ? > 0 AND id {among}",
  "validator": "SELECT id FROM validator WHERE ? > 0 AND id {among}",
  "monitor_group": (
    f"SELECT r.id FROM monitor_group r {_TRAINING_OF_ROLLOUT} WHERE"
    " p.project_id = ? AND r.id {among}"
  ),
  "rollout": (
    f"SELECT r.id FROM rollout r {_TRAINING_OF_ROLLOUT} WHERE p.project_id"
    " = ? AND r.id {among}"
  ),
  **{
    kind: (
      f"SELECT x.id FROM {kind} x JOIN rollout r ON r.id = x.rollout_id"
      f" {_TRAINING_OF_ROLLOUT} WHERE p.project_id = ? AND x.id {{among}}"
    )
    for kind in ("environment", "turn", "validation")
  },
}
"""Kind -> which of some ids are a project's."""
