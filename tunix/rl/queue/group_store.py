"""Where accepted groups stay, so that a crash loses none and repeats none.

`MemoryGroupStore` promises nothing beyond the process. `SqliteGroupStore` is
one file in WAL mode with full synchronisation: a group is on the disk when
`append` returns, even through a power loss. Thread-safe; one process at a
time. Images stay in their own store, by reference.
"""

from __future__ import annotations

import json
import pathlib
import sqlite3
import threading
from typing import Iterable, Protocol

from tunix.rl.multi_turn import trajectory

TrajectoryGroup = trajectory.TrajectoryGroup

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  idx INTEGER PRIMARY KEY,
  group_id TEXT NOT NULL,
  done INTEGER NOT NULL DEFAULT 0,
  payload TEXT
)
"""


class GroupStore(Protocol):
  """Where accepted groups survive a crash. Thread-safe."""

  def append(self, index: int, group: TrajectoryGroup) -> None:
    """Makes an accepted group durable before it returns."""
    ...

  def remove(self, indices: Iterable[int]) -> None:
    """Marks groups as done (trained or dropped): never to be loaded again."""
    ...

  def load(self) -> list[tuple[int, TrajectoryGroup]]:
    """Groups accepted and not removed, by index."""
    ...

  def known(self) -> set[int]:
    """Indices of every group ever accepted, removed ones included."""
    ...

  def close(self) -> None:
    ...


class MemoryGroupStore:
  """Keeps nothing beyond the process: the default."""

  def __init__(self):
    self._known: set[int] = set()

  def append(self, index: int, group: TrajectoryGroup) -> None:
    del group
    self._known.add(index)

  def remove(self, indices: Iterable[int]) -> None:
    pass

  def load(self) -> list[tuple[int, TrajectoryGroup]]:
    return []

  def known(self) -> set[int]:
    return set(self._known)

  def close(self) -> None:
    pass


class SqliteGroupStore:
  """A `GroupStore` in one file; see the module docstring."""

  def __init__(self, path: str | pathlib.Path, timeout: float = 30.0):
    """Args:

      path: database file, made with its folder when missing.
      timeout: seconds to wait for another connection's lock.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._db = sqlite3.connect(
        path, timeout=timeout, check_same_thread=False, isolation_level=None
    )
    self._db.execute("PRAGMA journal_mode=WAL")
    self._db.execute("PRAGMA synchronous=FULL")
    self._db.execute(_SCHEMA)

  def append(self, index: int, group: TrajectoryGroup) -> None:
    """Stores a group.

    Raises:
      ValueError: a group of this index was accepted before.
    """
    payload = json.dumps(group.to_json(), separators=(",", ":"))
    with self._lock:
      try:
        self._db.execute(
            "INSERT INTO groups (idx, group_id, payload) VALUES (?, ?, ?)",
            (index, group.group_id, payload),
        )
      except sqlite3.IntegrityError as e:
        raise ValueError(
            f"group {index} was accepted before; it would be trained twice"
        ) from e

  def remove(self, indices: Iterable[int]) -> None:
    """Frees the groups' contents and remembers that they are done."""
    with self._lock:
      self._db.execute("BEGIN IMMEDIATE")
      try:
        self._db.executemany(
            "UPDATE groups SET done = 1, payload = NULL WHERE idx = ?",
            [(int(i),) for i in indices],
        )
        self._db.execute("COMMIT")
      except BaseException:
        self._db.execute("ROLLBACK")
        raise

  def load(self) -> list[tuple[int, TrajectoryGroup]]:
    """Accepted groups that are not done, by index."""
    with self._lock:
      rows = self._db.execute(
          "SELECT idx, payload FROM groups WHERE done = 0 ORDER BY idx"
      ).fetchall()
    return [
        (index, TrajectoryGroup.from_json(json.loads(payload)))
        for index, payload in rows
    ]

  def known(self) -> set[int]:
    """Indices of all groups ever accepted."""
    with self._lock:
      return {row[0] for row in self._db.execute("SELECT idx FROM groups")}

  def close(self) -> None:
    with self._lock:
      self._db.close()
