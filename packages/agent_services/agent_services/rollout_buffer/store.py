"""Keeps items on the disk: one SQLite file, one writing thread.

Writes that wait together are committed together, so that an answer costs a
share of one flush. An item waits (`WAITS`), is lent to a reader (`LENT`), was
dropped by the rules (`DROPPED`), or is done (`DONE`), and then only its uid is
left. `leases.acknowledged` is 0 of a running lease, else a number that grows
with each acknowledgement of the buffer.

Promises: what was answered is on the disk, even through a power loss; an item
is stored once a uid; a transaction that fails leaves nothing and fails its own
work only. Thread-safe; one process at a time, which holds a lock.

Does not know groups (`buffers` does).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import logging
import pathlib
import queue
import sqlite3
import threading
from typing import Any, Callable, Iterable, Sequence

from agent_services.rollout_buffer import items

_LOG = logging.getLogger(__name__)
WAITS, LENT, DROPPED, DONE = 0, 1, 2, 3
_COMMIT_S = 120.0
_MOST_WRITES = 512
_MOST_BYTES = 32 << 20
_STOP = object()

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buffers (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  rollout TEXT,
  cleared INTEGER NOT NULL DEFAULT 0,
  written INTEGER NOT NULL DEFAULT 0,
  read INTEGER NOT NULL DEFAULT 0,
  dropped INTEGER NOT NULL DEFAULT 0,
  reads INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS items (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  buffer INTEGER NOT NULL,
  uid TEXT NOT NULL,
  instance_id TEXT NOT NULL,
  reward REAL NOT NULL,
  crc INTEGER NOT NULL,
  size INTEGER NOT NULL,
  state INTEGER NOT NULL DEFAULT 0,
  lease TEXT,
  grp INTEGER,
  UNIQUE (buffer, uid)
);
CREATE INDEX IF NOT EXISTS dropped ON items (buffer) WHERE state = 2;
CREATE TABLE IF NOT EXISTS payloads (seq INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS leases (
  id TEXT PRIMARY KEY,
  buffer INTEGER NOT NULL,
  seconds REAL NOT NULL,
  acknowledged INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""


class StoreError(RuntimeError):
  """The disk does not take a write, or does not return what it took."""


class StoreFull(RuntimeError):
  """Too many bytes wait for the disk."""


class UidConflict(ValueError):
  """Another item has the uid."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """Columns of an item, without its content."""

  seq: int
  instance_id: str
  reward: float
  size: int
  state: int
  lease: str | None
  grp: int | None


@dataclasses.dataclass(slots=True)
class _Work:
  """Work of the writing thread; `size` in bytes."""

  work: Callable[[sqlite3.Connection], Any]
  then: Callable[[Any], None]
  size: int = 0
  future: concurrent.futures.Future[Any] = dataclasses.field(
    default_factory=concurrent.futures.Future
  )


class Store:
  """See the module docstring. Close it.

  Attributes:
    commits, failures: transactions.
    last_error: Text of the newest failure.
  """

  def __init__(self, path: pathlib.Path, queue_bytes: int = 128 << 20):
    """Args:

      path: the database, made with its folder when missing.
      queue_bytes: Most bytes that wait for the disk.

    Raises:
      ValueError: another process has it, or it is no database of this service.
      OSError: it cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path = path
    self._lock_file = open(path.with_name(path.name + ".lock"), "ab")
    try:
      fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._lock_file.close()
      raise ValueError(
        f"{path} is held by another buffer service; stop that one, or give"
        " this one another --dir"
      ) from None
    try:
      self._db = self._connect()
      # Of overflow pages, large items need a quarter of the default's number.
      self._db.execute("PRAGMA page_size=16384")
      self._db.execute("PRAGMA journal_mode=WAL")
      self._db.execute("PRAGMA synchronous=FULL")
      self._db.execute("PRAGMA wal_autocheckpoint=4000")
      self._db.executescript(_SCHEMA)
    except sqlite3.DatabaseError as error:
      self._lock_file.close()
      raise ValueError(
        f"{path} is no database of a buffer service ({error}); give another"
        " --dir"
      ) from None
    self._reader = self._connect()
    self._reading = threading.Lock()
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._most_waiting = queue_bytes
    self._waiting = 0
    self._closed = False
    self.commits = self.failures = 0
    self.last_error = ""
    self._thread = threading.Thread(
      target=self._run, name="tunix-buffer-writer", daemon=True
    )
    self._thread.start()

  def _connect(self) -> sqlite3.Connection:
    return sqlite3.connect(
      self._path, timeout=30.0, check_same_thread=False, isolation_level=None
    )

  @property
  def waiting_bytes(self) -> int:
    return self._waiting

  # --- writing ----------------------------------------------------------------

  def put(
    self,
    buffer: int,
    written: Sequence[items.Item],
    stored: Callable[[list[tuple[int, items.Item]]], None],
  ) -> concurrent.futures.Future[list[int | None]]:
    """Stores items, all of them or none.

    Args:
      buffer: its id.
      written: items.
      stored: called by the writing thread, in the order of the items' numbers,
        with (number, item) of the new ones.

    Returns:
      The number of each item, None of one that was stored before. It raises
      `UidConflict` or `StoreError`.

    Raises:
      StoreFull: too many bytes wait.
    """

    def then(seqs: list[int | None]) -> None:
      pairs = zip(seqs, written)
      stored([(seq, item) for seq, item in pairs if seq is not None])

    size = sum(len(item.body) for item in written)
    return self._submit(_Work(lambda db: _put(db, buffer, written), then, size))

  def call(
    self,
    work: Callable[[sqlite3.Connection], Any],
    then: Callable[[Any], None] = lambda result: None,
  ) -> concurrent.futures.Future[Any]:
    """Does other work in a transaction.

    Args:
      work: called with the connection, by the writing thread.
      then: called with its result once that is durable, before anything that
        was submitted later is.

    Returns:
      The result once it is durable; raises what `work` raised, or `StoreError`.
      Work whose future is cancelled before it begins is not done.

    Raises:
      StoreError: the store is closed.
    """
    return self._submit(_Work(work, then))

  def do(
    self,
    work: Callable[[sqlite3.Connection], Any],
    then: Callable[[Any], None] = lambda result: None,
  ) -> Any:
    """The result of `call`, awaited in this thread.

    Raises:
      TimeoutError: the work was not begun in time, and never is; or takes as
        long again.
    """
    future = self.call(work, then)
    try:
      return future.result(_COMMIT_S)
    except TimeoutError:
      if future.cancel():
        raise
      return future.result(_COMMIT_S)

  def _submit(self, one: _Work) -> concurrent.futures.Future[Any]:
    with self._lock:
      if self._closed:
        raise StoreError("the service is stopping; write again later")
      waiting = self._waiting + one.size
      if one.size and self._waiting and waiting > self._most_waiting:
        raise StoreFull(
          f"{self._waiting} bytes wait for the disk; write again later"
        )
      self._waiting = waiting
      self._queue.put(one)
    return one.future

  def close(self, timeout_s: float = 60.0) -> bool:
    """Writes what waits and ends; False when time ran out. Idempotent."""
    with self._lock:
      if not self._closed:
        self._closed = True
        self._queue.put(_STOP)
    self._thread.join(timeout_s)
    ended = not self._thread.is_alive()
    if ended and not self._lock_file.closed:
      with self._reading:
        self._reader.close()
      self._db.close()
      self._lock_file.close()
    return ended

  def _run(self) -> None:
    stopping = False
    while not stopping:
      work = [self._queue.get()]
      size = 0
      while work[-1] is not _STOP and len(work) < _MOST_WRITES:
        size += work[-1].size
        if size > _MOST_BYTES:
          break
        try:
          work.append(self._queue.get_nowait())
        except queue.Empty:
          break
      if work[-1] is _STOP:
        stopping = True
        work.pop()
      if work:
        self._commit(work)
        with self._lock:
          self._waiting -= sum(one.size for one in work)

  def _commit(self, work: list[_Work]) -> None:
    work = [one for one in work if one.future.set_running_or_notify_cancel()]
    results: list[Any] = []
    try:
      self._db.execute("BEGIN IMMEDIATE")
      for one in work:
        results.append(self._apply(one))
      self._db.execute("COMMIT")
    except Exception as error:  # pylint: disable=broad-except
      if self._db.in_transaction:
        self._db.execute("ROLLBACK")
      self.failures += 1
      self.last_error = f"{type(error).__name__}: {error}"
      _LOG.error("the buffer's disk does not take a write: %s", self.last_error)
      failure = StoreError(
        f"the disk does not take it now ({self.last_error}); nothing of it"
        " was stored, write again later"
      )
      for one in work:
        one.future.set_exception(failure)
      return
    self.commits += 1
    for one, result in zip(work, results):
      if not isinstance(result, Exception):
        one.then(result)
    for one, result in zip(work, results):
      if isinstance(result, Exception):
        one.future.set_exception(result)
      else:
        one.future.set_result(result)

  def _apply(self, one: _Work) -> Any:
    """The result of a piece of work, or the error that is its own fault."""
    self._db.execute("SAVEPOINT one")
    try:
      result: Any = one.work(self._db)
    except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
      if not isinstance(error, sqlite3.IntegrityError):
        raise  # No work is at fault.
      result = error
    except Exception as error:  # pylint: disable=broad-except
      result = error
    if isinstance(result, Exception):
      self._db.execute("ROLLBACK TO one")
    self._db.execute("RELEASE one")
    return result

  # --- reading ----------------------------------------------------------------

  def rows(self, query: str, *values: Any) -> list[Any]:
    """The rows of a query on what is committed."""
    with self._reading:
      return self._reader.execute(query, values).fetchall()

  def bodies(
    self, seqs: Iterable[int], may_lack: bool = False
  ) -> list[bytes | None]:
    """Returns the content of each item, in order; None for missing content.

    Args:
      seqs: numbers.
      may_lack: None is also of items that are done with.
    """
    contents: list[bytes | None] = []
    with self._reading:
      for seq in seqs:
        row = self._reader.execute(
          "SELECT body, crc FROM payloads JOIN items USING (seq) WHERE seq = ?",
          (seq,),
        ).fetchone()
        if row is None and may_lack:
          contents.append(None)
        elif row is None or items.crc32(row[0]) != row[1]:
          _LOG.error("item %d of %s is not what was stored", seq, self._path)
          contents.append(None)
        else:
          contents.append(row[0])
    return contents


def _put(
  db: sqlite3.Connection, buffer: int, written: Sequence[items.Item]
) -> list[int | None]:
  seqs: list[int | None] = []
  for item in written:
    cursor = db.execute(
      "INSERT OR IGNORE INTO items (buffer, uid, instance_id, reward, crc,"
      " size) VALUES (?, ?, ?, ?, ?, ?)",
      (
        *(buffer, item.uid, item.instance_id),
        *(item.reward, item.crc, len(item.body)),
      ),
    )
    if cursor.rowcount:
      seq = cursor.lastrowid
      db.execute(
        "INSERT INTO payloads (seq, body) VALUES (?, ?)", (seq, item.body)
      )
      seqs.append(seq)
      continue
    (crc,) = db.execute(
      "SELECT crc FROM items WHERE buffer = ? AND uid = ?", (buffer, item.uid)
    ).fetchone()
    if crc != item.crc:
      raise UidConflict(
        f"uid={item.uid!r} was written before with another content; give"
        " each episode a uid of its own"
      )
    seqs.append(None)
  db.execute(
    "UPDATE buffers SET written = written + ? WHERE id = ?",
    (len(seqs) - seqs.count(None), buffer),
  )
  return seqs
