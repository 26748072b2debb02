"""What clients said where the database has another word, or no column."""

from __future__ import annotations

from typing import Iterable

import orjson
from tunix.rl.multi_turn.monitor.server import items
from tunix.rl.multi_turn.monitor.server import sql as sql_lib


def note_status(
    sql: sql_lib.Sql, kind: str, id_: int, item: items.Item, old: str | None
) -> None:
  """What the client called the status that the history just got."""
  said = item.raw.get("status")
  if said is None or item.values.get("status") in (None, old):
    return
  sql.run(
      "UPDATE status_history SET metadata_json = ? WHERE id = (SELECT max(id)"
      " FROM status_history WHERE entity_type = ? AND entity_id = ?)",
      (orjson.dumps({"raw_status": said}).decode(), kind, id_),
  )


def keep(
    sql: sql_lib.Sql, kind: str, found: Iterable[tuple[int, items.Item]]
) -> None:
  """Keeps the raw values of entities of a kind."""
  sql.many(
      sql_lib.upsert(
          "monitor_raw_value", ("kind", "entity_id", "field"), ("value",)
      ),
      [
          (kind, id_, field, value)
          for id_, item in found
          for field, value in item.raw.items()
      ],
  )
