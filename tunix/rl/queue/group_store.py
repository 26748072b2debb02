"""Stores accepted groups, so that a crash loses none and repeats none.

`MemoryGroupStore` promises nothing beyond the process. `SqliteGroupStore` is
one file in WAL mode with full synchronisation: a group and the images of its
training sequences are on the disk when `append` returns, even through a power
loss, and leave it together with the last group that needs them. Thread-safe;
one process at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
import sqlite3
import threading
from typing import Iterable, Protocol, Sequence

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory

_LOG = logging.getLogger(__name__)

TrajectoryGroup = trajectory.TrajectoryGroup

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  idx INTEGER PRIMARY KEY,
  group_id TEXT NOT NULL,
  done INTEGER NOT NULL DEFAULT 0,
  payload TEXT
);
CREATE TABLE IF NOT EXISTS images (
  sha256 TEXT PRIMARY KEY,
  pixels BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (
  idx INTEGER NOT NULL,
  sha256 TEXT NOT NULL,
  PRIMARY KEY (idx, sha256)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_sha256 ON uses (sha256);
"""
"""`payload` is a digest and a group's JSON; `pixels` is the zlib-compressed RGB
bytes; `uses` is of groups not done."""

_FREE = """
DELETE FROM images WHERE sha256 IN (SELECT sha256 FROM uses WHERE idx = ?1)
AND NOT EXISTS (
  SELECT 1 FROM uses WHERE uses.sha256 = images.sha256 AND uses.idx != ?1
)
"""


class GroupStore(Protocol):
  """Stores accepted groups beyond a crash. Thread-safe.

  Attributes:
    lost: groups that `load` could not read.
  """

  lost: int

  def append(self, index: int, group: TrajectoryGroup) -> None:
    """Makes an accepted group durable before it returns."""
    ...

  def remove(self, indices: Iterable[int]) -> None:
    """Marks groups as done (trained or dropped): never to be loaded again."""
    ...

  def load(self) -> list[tuple[int, TrajectoryGroup]]:
    """(index, group) of groups accepted and not removed, by index.

    A group that cannot be read is deleted and counted in `lost`, so that its
    task can run again under the same index.
    """
    ...

  def known(self) -> set[int]:
    """Indices of every group ever accepted, removed ones included and lost
    ones not."""
    ...

  def close(self) -> None: ...


class MemoryGroupStore:
  """Keeps nothing beyond the process."""

  lost = 0

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

  def __init__(
    self,
    path: str | pathlib.Path,
    timeout: float = 30.0,
    *,
    images: images_lib.ImageStore | None = None,
  ):
    """Args:

    path: database file, made with its folder when missing.
    timeout: seconds to wait for another connection's lock.
    images: has the images of the groups' training sequences, and receives
      those of loaded ones; None leaves them to the caller.
    """
    self.lost = 0
    self._images = images
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._db = sqlite3.connect(
      path, timeout=timeout, check_same_thread=False, isolation_level=None
    )
    self._db.execute("PRAGMA journal_mode=WAL")
    self._db.execute("PRAGMA synchronous=FULL")
    self._db.executescript(_SCHEMA)
    self._stored = {
      row[0] for row in self._db.execute("SELECT sha256 FROM images")
    }

  def append(self, index: int, group: TrajectoryGroup) -> None:
    """Stores a group and its images.

    Raises:
      ValueError: a group of this index was accepted before.
      KeyError: the image store no longer has an image.
    """
    refs = {}
    if self._images is not None:
      refs = {ref.sha256: ref for ref in _images_of(group)}
    payload = _sealed(json.dumps(group.to_json(), separators=(",", ":")))
    packed = {
      sha: self._packed(ref)
      for sha, ref in refs.items()
      if sha not in self._stored
    }
    with self._lock:
      for sha in refs.keys() - self._stored - packed.keys():
        packed[sha] = self._packed(refs[sha])  # Let go of meanwhile.
      self._db.execute("BEGIN IMMEDIATE")
      try:
        self._db.execute(
          "INSERT INTO groups (idx, group_id, payload) VALUES (?, ?, ?)",
          (index, group.group_id, payload),
        )
        self._db.executemany(
          "INSERT OR IGNORE INTO images (sha256, pixels) VALUES (?, ?)",
          packed.items(),
        )
        self._db.executemany(
          "INSERT INTO uses (idx, sha256) VALUES (?, ?)",
          [(index, sha) for sha in refs],
        )
        self._db.execute("COMMIT")
      except BaseException as e:
        self._rollback()
        if isinstance(e, sqlite3.IntegrityError):
          raise ValueError(
            f"group {index} was accepted before; it would be trained twice"
          ) from e
        raise
      self._stored.update(packed)

  def _packed(self, ref: trajectory.ImageRef) -> bytes:
    assert self._images is not None
    return self._images.pack(ref)

  def _rollback(self) -> None:
    if self._db.in_transaction:  # Some errors have ended it already.
      self._db.execute("ROLLBACK")

  def remove(self, indices: Iterable[int]) -> None:
    """Frees the groups' contents and remembers that they are done."""
    rows = [(int(i),) for i in indices]
    with self._lock:
      self._db.execute("BEGIN IMMEDIATE")
      try:
        self._db.executemany(
          "UPDATE groups SET done = 1, payload = NULL WHERE idx = ?", rows
        )
        self._free(rows)
        self._db.execute("COMMIT")
      except BaseException:
        self._rollback()
        raise
      self._count_stored()

  def _free(self, rows: list[tuple[int]]) -> None:
    """Deletes images that only these groups need. Under the lock."""
    for row in rows:
      self._db.execute(_FREE, row)
      self._db.execute("DELETE FROM uses WHERE idx = ?", row)

  def _count_stored(self) -> None:
    if self._stored:
      self._stored = {
        row[0] for row in self._db.execute("SELECT sha256 FROM images")
      }

  def load(self) -> list[tuple[int, TrajectoryGroup]]:
    """Accepted groups that are not done, by index; see `GroupStore`."""
    with self._lock:
      rows = self._db.execute(
        "SELECT idx, group_id, payload FROM groups WHERE done = 0 ORDER BY idx"
      ).fetchall()
    groups = []
    for index, name, payload in rows:
      try:
        group = TrajectoryGroup.from_json(json.loads(_opened(payload)))
        self._restore_images(group)
      except Exception as e:  # pylint: disable=broad-except
        _LOG.warning(
          "group %s (index %d) cannot be read and is lost: %s: %s",
          name,
          index,
          type(e).__name__,
          e,
        )
        self.lost += 1
        with self._lock:
          self._free([(index,)])
          self._db.execute("DELETE FROM groups WHERE idx = ?", (index,))
          self._count_stored()
      else:
        groups.append((index, group))
    return groups

  def _restore_images(self, group: TrajectoryGroup) -> None:
    if self._images is None:
      return
    for ref in set(_images_of(group)):
      if ref in self._images:
        continue
      with self._lock:
        row = self._db.execute(
          "SELECT pixels FROM images WHERE sha256 = ?", (ref.sha256,)
        ).fetchone()
      if row is None:
        raise KeyError(f"its image {ref.sha256[:12]}… is gone")
      self._images.put_packed(ref, row[0])

  def known(self) -> set[int]:
    """Indices of all groups ever accepted, but for lost ones."""
    with self._lock:
      return {row[0] for row in self._db.execute("SELECT idx FROM groups")}

  def close(self) -> None:
    with self._lock:
      self._db.close()


def _sealed(text: str) -> str:
  """The text behind its digest: SQLite does not notice a flipped bit."""
  return f"{_digest(text)} {text}"


def _opened(payload: str) -> str:
  if payload.startswith("{"):  # Of a file written without digests.
    return payload
  digest, _, text = payload.partition(" ")
  if digest != _digest(text):
    raise ValueError("it is not what was stored")
  return text


def _digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _images_of(group: TrajectoryGroup) -> list[trajectory.ImageRef]:
  """Images of its training sequences, with repetitions."""
  return [
    span.image
    for member in group.played
    for sequence in member.sequences
    for span in sequence.images
  ]


_MOVE = """
INSERT INTO {table} SELECT {columns} FROM (
  SELECT (idx * {of} + {at}) AS number, * FROM old.{table}
) WHERE number % {count} = {index}
"""


def redeal(
  sources: Sequence[pathlib.Path],
  targets: Sequence[pathlib.Path],
  timeout: float = 30.0,
) -> None:
  """Copies the groups of n stores into m new ones.

  Group `index` of store i of n has the number `index * n + i` in the run, and
  goes, also if it is done, to store `number % m` as group `number // m`.

  Args:
    sources: files of stores; absent ones are empty.
    targets: files, replaced.
    timeout: seconds to wait for another connection's lock.

  Raises:
    sqlite3.Error, OSError: a file cannot be read or written.
  """
  for index, target in enumerate(targets):
    for suffix in ("", "-wal", "-shm"):
      target.with_name(target.name + suffix).unlink(missing_ok=True)
    SqliteGroupStore(target).close()
    db = sqlite3.connect(target, timeout=timeout, isolation_level=None)
    try:
      db.execute("PRAGMA synchronous=FULL")
      for at, source in enumerate(sources):
        if not source.exists():
          continue
        db.execute("ATTACH ? AS old", (str(source),))
        db.execute("BEGIN IMMEDIATE")
        place = dict(of=len(sources), at=at, count=len(targets), index=index)
        there = f"number / {len(targets)}"
        for table, columns in (
          ("groups", f"{there}, group_id, done, payload"),
          ("uses", f"{there}, sha256"),
        ):
          db.execute(_MOVE.format(table=table, columns=columns, **place))
        db.execute(
          "INSERT OR IGNORE INTO images SELECT * FROM old.images WHERE"
          " sha256 IN (SELECT sha256 FROM uses)"
        )
        db.execute("COMMIT")
        db.execute("DETACH old")
    finally:
      db.close()
