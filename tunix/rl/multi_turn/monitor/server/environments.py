"""Environments that are told before their rollout.

Some recorders make the environment first, and name it in the rollout. A row of
`environment` needs its rollout, so it waits under the id that it will have.
"""

from __future__ import annotations

from typing import Any

import orjson
from tunix.rl.multi_turn.monitor.server import sql as sql_lib


class WaitingEnvironments:
  """Those of one project, in one transaction."""

  def __init__(self, sql: sql_lib.Sql, project: int, now: str):
    self._sql = sql
    self._project = project
    self._now = now

  def keep(self, id_: int, values: dict[str, Any]) -> None:
    """Keeps what is known of an environment; the id is its own from now on."""
    self._sql.reserve("environment", id_)
    self._sql.run(
        sql_lib.upsert(
            "monitor_pending_environment", ("id",),
            ("project_id", "fields_json", "created_at"),
        ),
        (id_, self._project, orjson.dumps(values).decode(), self._now),
    )  # pyformat: disable

  def get(self, id_: int) -> dict[str, Any] | None:
    """What is known of it; None when it does not wait."""
    rows = self._sql.rows(
        "SELECT fields_json FROM monitor_pending_environment WHERE id = ? AND"
        " project_id = ?",
        (id_, self._project),
    )
    return orjson.loads(rows[0][0]) if rows else None

  def remove(self, id_: int) -> None:
    self._sql.run(
        "DELETE FROM monitor_pending_environment WHERE id = ?", (id_,)
    )

  def raw(self, id_: int) -> dict[str, str]:
    """What was said of it in other words."""
    return dict(
        self._sql.rows(
            "SELECT field, value FROM monitor_raw_value WHERE kind ="
            " 'environment' AND entity_id = ?",
            (id_,),
        )
    )
