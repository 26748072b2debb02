"""Writes the rows beside a batch's entities: raw values, pending environments,
figures of evaluations.

Works inside a transaction that it neither begins nor ends.
"""

from __future__ import annotations

from typing import Any, Iterable

import orjson

from training_monitor.schema import progress
from training_monitor.server import sql as sql_lib
from training_monitor.server.batches import items


def note_raw_status(
  sql: sql_lib.Sql, kind: str, id_: int, item: items.Item, old: str | None
) -> None:
  """Adds the client's own status to the row that the history just got."""
  raw = item.raw.get("status")
  if raw is None or item.values.get("status") in (None, old):
    return
  sql.run(
    "UPDATE status_history SET metadata_json = ? WHERE id = (SELECT max(id)"
    " FROM status_history WHERE entity_type = ? AND entity_id = ?)",
    (orjson.dumps({"raw_status": raw}).decode(), kind, id_),
  )


def keep_raw_values(
  sql: sql_lib.Sql, kind: str, items_by_id: Iterable[tuple[int, items.Item]]
) -> None:
  """Keeps clients' original values that were normalised or have no column."""
  sql.many(
    sql_lib.upsert(
      "monitor_raw_value", ("kind", "entity_id", "field"), ("value",)
    ),
    [
      (kind, id_, field, value)
      for id_, item in items_by_id
      for field, value in item.raw.items()
    ],
  )


class PendingEnvironments:
  """Environments that arrive before their rollout, of one project.

  Some recorders make the environment first, and name it in the rollout. A row
  of `environment` needs its rollout, so it waits under its later id.
  """

  def __init__(self, sql: sql_lib.Sql, project: int, now: str):
    self._sql = sql
    self._project = project
    self._now = now

  def keep(self, id_: int, values: dict[str, Any]) -> None:
    """Keeps an environment's values and reserves its id."""
    self._sql.reserve("environment", id_)
    self._sql.run(
      sql_lib.upsert(
        "monitor_pending_environment",
        ("id",),
        ("project_id", "fields_json", "created_at"),
      ),
      (id_, self._project, orjson.dumps(values).decode(), self._now),
    )

  def get(self, id_: int) -> dict[str, Any] | None:
    """Returns values of a pending environment; None when it is not pending."""
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
    """Returns raw values of an environment."""
    return dict(
      self._sql.rows(
        "SELECT field, value FROM monitor_raw_value WHERE kind ="
        " 'environment' AND entity_id = ?",
        (id_,),
      )
    )


def update_figures(sql: sql_lib.Sql, kind: str, id_: int, now: str) -> None:
  """Brings an evaluation's or baseline's figures in line with its rollouts.

  Rates and means are over completed rollouts, as the policy did not decide a
  failed one, and over those of one mode: sampled attempts, or greedy ones where
  there are no others. Both at the same tasks are no independent trials. Every
  rollout that has ended counts as done.
  """
  rows = sql.rows(
    "SELECT CASE WHEN temperature = 0 THEN 1 ELSE 0 END AS greedy,"
    " COUNT(CASE WHEN status IN ('completed', 'failed', 'cancelled')"
    " THEN 1 END), COUNT(CASE WHEN status = 'completed' THEN 1 END),"
    " COUNT(CASE WHEN status = 'completed' AND task_success = 1 THEN 1 END),"
    " AVG(CASE WHEN status = 'completed' THEN reward END), AVG(CASE WHEN"
    " status = 'completed' THEN num_turns END) FROM rollout WHERE"
    f" source_type = '{kind}' AND {kind}_id = ? GROUP BY 1 ORDER BY 1",
    (id_,),
  )
  ended = sum(row[1] for row in rows)
  valid, successes, reward, turns = rows[0][2:] if rows else (0, 0, None, None)
  ((status, total, percent),) = sql.rows(
    f'SELECT status, total_tasks, progress_percent FROM "{kind}" WHERE id = ?',
    (id_,),
  )
  if total:
    percent = progress.share(status, ended, total)
  sql.run(
    f'UPDATE "{kind}" SET success_rate = ?, avg_reward = ?, avg_turns = ?,'
    " successful_tasks = ?, completed_tasks = ?, progress_percent = ?,"
    " updated_at = ? WHERE id = ?",
    (
      successes / valid if valid else None,
      reward,
      None if turns is None else float(turns),
      successes,
      ended,
      percent,
      now,
      id_,
    ),
  )
