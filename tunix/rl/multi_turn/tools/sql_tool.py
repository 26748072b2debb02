"""The tool `sql`: reads a small SQLite database, one an episode.

`create(script=…)` fills a database in memory with the script's tables; calls
read it. Tables and columns are found as SQLite has them, `SELECT name FROM
sqlite_master` and `SELECT name FROM pragma_table_info('table')`.

Promises: a call changes nothing, opens no file, and ends after a bounded number
of steps with a bounded text. Instances share nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any, Mapping

from tunix.rl.multi_turn.tools import stateful

SQL_SCHEMA: dict[str, Any] = {
  "type": "function",
  "function": {
    "name": "sql",
    "description": "Reads the SQLite database; returns rows, a line each.",
    "parameters": {
      "type": "object",
      "properties": {
        "query": {"type": "string", "description": "A SELECT statement."}
      },
      "required": ["query"],
    },
  },
}
_ROWS = 20
_COLUMNS = 32
_STEPS = 1_000_000  # Of SQLite's machine; some 50 ms.
_BYTES = 10_000  # Of a value.
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


class SqlTool(stateful.InstanceTool):
  """See the module docstring."""

  def __init__(
    self,
    config: Mapping[str, Any] | None = None,
    tool_schema: Mapping[str, Any] | None = None,
  ):
    super().__init__(config, tool_schema or SQL_SCHEMA)

  async def create(
    self, instance_id: str | None = None, script: str = "", **kwargs: Any
  ) -> str:
    """Makes a database; `script`: its CREATE and INSERT statements."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # No other file.
    await asyncio.to_thread(database.executescript, script)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _COLUMNS)
    # SQLite 3.40 declares this table at its first use, by an action that the
    # authorizer takes for an UPDATE of the schema.
    database.execute("SELECT * FROM pragma_table_info('')").close()
    database.set_authorizer(_authorize)
    return await super().create(instance_id, database=database, **kwargs)

  async def execute(
    self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
  ) -> tuple[str, float, dict[str, Any]]:
    """Runs `parameters["query"]`.

    Raises:
      ValueError: no text, or SQLite's own error.
      UnknownInstanceError: no such instance.
    """
    query = parameters.get("query")
    if not isinstance(query, str):
      raise ValueError(f"sql takes its query as a str, got {query!r:.80}")
    database = self.state(instance_id)["database"]
    # Called once: it interrupts.
    database.set_progress_handler(lambda: 1, _STEPS)
    read = lambda: database.execute(query).fetchmany(_ROWS + 1)
    try:
      rows = await asyncio.to_thread(read)
    except (sqlite3.Error, sqlite3.Warning) as error:
      raise ValueError(f"{error}"[:200]) from None
    lines = [", ".join(map(str, row)) for row in rows[:_ROWS]]
    lines += ["(more rows)"] * (len(rows) > _ROWS)
    return "\n".join(lines) or "no rows", 0.0, {"rows": len(rows)}

  async def release(self, instance_id: str, **kwargs: Any) -> None:
    instance = self._instances.pop(instance_id, None)
    if instance is not None:
      instance["database"].close()


def _authorize(action: int, first: str | None, *_: Any) -> int:
  """SQLite's question whether a statement may do something."""
  reads = action in _READS or (
    action == sqlite3.SQLITE_PRAGMA and first == "table_info"
  )
  return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY
