"""Renders what happened to a run: its statuses, its error, its traceback.

Does not: hold the run's standard error; the run directory on its machine does.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables

_CHANGES = 100

Row = dict[str, Any]


class LogPages(page_request.RunTab):
  """See the module docstring."""

  def log(self, request: page_request.PageRequest) -> page_request.Page:
    run = self._head(request.project, request.id())
    h, raw = tables.status_history, tables.raw_value
    with database.reading(self._engine) as connection:
      changes = [
        dict(row._mapping)  # pylint: disable=protected-access
        for row in connection.execute(
          sa.select(
            h.c.changed_at, h.c.old_status, h.c.new_status, h.c.status_message
          )
          .where(h.c.entity_type == "training", h.c.entity_id == run["id"])
          .order_by(h.c.changed_at.desc(), h.c.id.desc())
          .limit(_CHANGES)
        )
      ]
      trace = connection.execute(
        sa.select(raw.c.value).where(
          raw.c.kind == "training",
          raw.c.entity_id == run["id"],
          raw.c.field == "traceback",
        )
      ).scalar()
    return page_request.Page(
      "log.html",
      {
        "run": run,
        "tab": "log",
        "changes": changes,
        # One of an earlier start says nothing about a run that goes on.
        "traceback": trace if run["state"] == "failed" else None,
      },
    )
