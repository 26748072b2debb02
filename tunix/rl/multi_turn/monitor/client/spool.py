"""Spools undelivered entries and screenshots in a file that outlives a process.

One SQLite file a process, in WAL mode with full synchronisation, claimed by a
lock that ends with the process: `claim_orphans` finds those whose owner died.

Promises: entries are on the disk when `append` returns; entries come out in
the order in which they went in, and `images` lists the images that came with
them; beyond `max_bytes` nothing more goes in.
Thread-safe, as SQLite is: each thread opens a connection of its own.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import pathlib
import sqlite3
import threading
import time
from typing import Iterator, Mapping, NamedTuple, Sequence
import uuid

_LOG = logging.getLogger(__name__)
SUFFIX = ".spool"
DAMAGED = ".damaged"
"""Suffix that a spool gets when it cannot be read."""
_IMAGES_OF_ENTRY = 20
"""Bits of an image's number below that of the first entry that it came with."""
_MOST = (1 << 63) - 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS image (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, sha256 TEXT NOT NULL UNIQUE,
  body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS dead (
  seq INTEGER PRIMARY KEY, body BLOB NOT NULL, reason TEXT NOT NULL,
  time REAL NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class SpoolFull(Exception):
  """The spool has no room for an entry."""


@dataclasses.dataclass(frozen=True)
class SpoolEntry:
  """A part of a batch, as the JSON that was accepted."""

  seq: int
  body: bytes


class SpooledImage(NamedTuple):
  """An image that waits."""

  seq: int
  sha: str

  @property
  def entry(self) -> int:
    """Number of the first entry that it came with."""
    return self.seq >> _IMAGES_OF_ENTRY


class Spool:
  """See the module docstring."""

  def __init__(
      self,
      path: str | pathlib.Path,
      target: str,
      *,
      max_bytes: int = 2 << 30,
  ):
    """Opens a spool, or makes it.

    Args:
      path: the file.
      target: the server that it is for.
      max_bytes: of entries and images together.

    Raises:
      BlockingIOError: another process has it.
      OSError, sqlite3.Error: the file cannot be one.
    """
    self.path = pathlib.Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._max = max_bytes
    self._local = threading.local()
    self._connections: list[sqlite3.Connection] = []
    self._lock = threading.Lock()
    self._claim = os.open(
        self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600
    )
    try:
      try:
        fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise BlockingIOError(
            error.errno, "another process has this spool", str(self.path)
        ) from None
      db = self._db
      db.executescript(_SCHEMA)
      with self._writing():
        for key, value in (("id", uuid.uuid4().hex), ("target", target)):
          db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
      found = dict(db.execute("SELECT key, value FROM meta"))
      self.id, self.target = found["id"], found["target"]
      self.bytes = db.execute(
          "SELECT (SELECT total(length(body)) FROM entry) + (SELECT"
          " total(length(body)) FROM image) + (SELECT total(length(body)) FROM"
          " dead)"
      ).fetchone()[0]
    except BaseException:
      self.close()
      raise

  @property
  def _db(self) -> sqlite3.Connection:
    found = getattr(self._local, "connection", None)
    if found is None:
      found = sqlite3.connect(
          self.path, timeout=30, isolation_level=None, check_same_thread=False
      )
      found.execute("PRAGMA journal_mode=WAL")
      found.execute("PRAGMA synchronous=FULL")
      found.execute("PRAGMA journal_size_limit=67108864")
      self._local.connection = found
      with self._lock:
        self._connections.append(found)
    return found

  def _writing(self) -> _Transaction:
    return _Transaction(self._db)

  def append(
      self, bodies: Sequence[bytes], images: Mapping[str, bytes]
  ) -> None:
    """Keeps entries and images, all or none of them.

    Args:
      bodies: entries, in order.
      images: hash -> file; those that are there already count once.

    Raises:
      SpoolFull: they would not fit.
      sqlite3.Error: the disk's.
    """
    size = sum(map(len, bodies)) + sum(map(len, images.values()))
    if self.bytes + size > self._max:
      raise SpoolFull(f"{self.bytes} of {self._max} bytes are taken")
    with self._writing() as db:
      (entry,) = db.execute(
          "SELECT 1 + coalesce((SELECT seq FROM sqlite_sequence WHERE name ="
          " 'entry'), 0)"
      ).fetchone()
      db.executemany(
          "INSERT INTO entry (body) VALUES (?)", [(b,) for b in bodies]
      )
      (image,) = db.execute(
          "SELECT max(?, 1 + coalesce(max(seq), 0)) FROM image",
          (entry << _IMAGES_OF_ENTRY,),
      ).fetchone()
      db.executemany(
          "INSERT OR IGNORE INTO image (seq, sha256, body) VALUES (?, ?, ?)",
          [(image + n, *item) for n, item in enumerate(images.items())],
      )
    with self._lock:
      self.bytes += size

  @property
  def room(self) -> float:
    """Share of the space that is free."""
    return max(0.0, 1.0 - self.bytes / self._max)

  def entries(self, max_bytes: int, max_count: int = 500) -> list[SpoolEntry]:
    """The oldest entries, at least one if there is any."""
    found: list[SpoolEntry] = []
    size = 0
    rows = self._db.execute(
        "SELECT seq, body FROM entry ORDER BY seq LIMIT ?", (max_count,)
    )
    for seq, body in rows:
      size += len(body)
      if found and size > max_bytes:
        break
      found.append(SpoolEntry(seq, body))
    rows.close()
    return found

  def remove_through(self, seq: int) -> None:
    """Forgets the entries up to this one: they are delivered."""
    with self._writing() as db:
      freed = db.execute(
          "SELECT total(length(body)) FROM entry WHERE seq <= ?", (seq,)
      ).fetchone()[0]
      db.execute("DELETE FROM entry WHERE seq <= ?", (seq,))
    with self._lock:
      self.bytes -= freed

  def bury(self, entry: SpoolEntry, reason: str) -> None:
    """Takes an entry that the server will never accept out of the way."""
    with self._writing() as db:
      db.execute(
          "INSERT OR REPLACE INTO dead VALUES (?, ?, ?, ?)",
          (entry.seq, entry.body, reason, time.time()),
      )
      db.execute("DELETE FROM entry WHERE seq = ?", (entry.seq,))

  def dead(self) -> list[tuple[int, bytes, str]]:
    """(number, body, reason) of entries that were put aside."""
    return self._db.execute(
        "SELECT seq, body, reason FROM dead ORDER BY seq"
    ).fetchall()

  def images(
      self,
      first: int = 0,
      through: int | None = None,
      *,
      after: int = -1,
      most: int = 100,
  ) -> list[SpooledImage]:
    """The oldest images that came with some entries.

    Args:
      first: of these entries.
      through: the last of them; None for all.
      after: only images with numbers above this one.
      most: how many.
    """
    low = max(first << _IMAGES_OF_ENTRY, after + 1)
    high = _MOST if through is None else (through + 1) << _IMAGES_OF_ENTRY
    rows = self._db.execute(
        "SELECT seq, sha256 FROM image WHERE seq >= ? AND seq < ?"
        " ORDER BY seq LIMIT ?",
        (low, high, most),
    )
    return [SpooledImage(*row) for row in rows.fetchall()]

  def image(self, sha: str) -> bytes:
    return self._db.execute(
        "SELECT body FROM image WHERE sha256 = ?", (sha,)
    ).fetchone()[0]

  def remove_images(self, shas: Sequence[str]) -> None:
    if not shas:
      return
    with self._writing() as db:
      freed = 0
      for sha in shas:
        freed += db.execute(
            "SELECT total(length(body)) FROM image WHERE sha256 = ?", (sha,)
        ).fetchone()[0]
        db.execute("DELETE FROM image WHERE sha256 = ?", (sha,))
    with self._lock:
      self.bytes -= freed

  def counts(self) -> dict[str, int]:
    """Entries, images and dead letters that are here."""
    return {
        name: self._db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
        for name in ("entry", "image", "dead")
    }

  def close(self, *, remove_if_empty: bool = True) -> None:
    """Lets the file go. One in which nothing waits is deleted. Idempotent."""
    if self._claim < 0:
      return
    empty = False
    if remove_if_empty and hasattr(self, "target"):
      try:
        empty = not any(self.counts().values())
      except sqlite3.Error:
        pass
    with self._lock:
      for connection in self._connections:
        try:
          connection.close()
        except sqlite3.Error as error:  # It cannot finish its work.
          _LOG.warning("the spool %s: %s", self.path, error)
      self._connections.clear()
    if empty:
      for suffix in (SUFFIX, f"{SUFFIX}-wal", f"{SUFFIX}-shm", ".lock"):
        self.path.with_suffix(suffix).unlink(missing_ok=True)
    os.close(self._claim)
    self._claim = -1


class _Transaction:
  """A transaction that has its lock from the beginning."""

  def __init__(self, db: sqlite3.Connection):
    self._db = db

  def __enter__(self) -> sqlite3.Connection:
    self._db.execute("BEGIN IMMEDIATE")
    return self._db

  def __exit__(self, kind, error, trace) -> None:
    if kind is None:
      try:
        self._db.execute("COMMIT")
        return
      except sqlite3.Error:
        self._roll_back()
        raise
    self._roll_back()

  def _roll_back(self) -> None:
    try:
      self._db.execute("ROLLBACK")
    except sqlite3.Error:  # A full disk has done it already.
      pass


def claim_orphans(
    folder: str | pathlib.Path, target: str, own: pathlib.Path
) -> Iterator[Spool]:
  """Spools for this server that other processes left behind, opened."""
  for path in sorted(pathlib.Path(folder).glob(f"*{SUFFIX}")):
    if path == own:
      continue
    try:
      spool = Spool(path, target)
      entries = spool.counts()
    except BlockingIOError:
      continue  # Its owner lives.
    except (OSError, sqlite3.Error) as error:
      _LOG.warning("the spool %s cannot be read: %s", path, error)
      put_aside(path, error)
      continue
    if spool.target != target:
      spool.close(remove_if_empty=False)
    elif entries["entry"] or entries["image"]:
      yield spool
    else:
      spool.close()


def put_aside(path: pathlib.Path, error: Exception) -> None:
  """Gives a damaged file another name: it would be met at every start."""
  code = getattr(error, "sqlite_errorcode", 0) & 0xFF
  if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
    return  # A disk that fails may be well again.
  try:
    for suffix in ("", "-wal", "-shm"):
      part = path.with_name(path.name + suffix)
      if part.exists():
        part.rename(path.with_name(f"{path.name}{DAMAGED}{suffix}"))
  except OSError as failure:
    _LOG.warning("%s cannot be put aside: %s", path, failure)
