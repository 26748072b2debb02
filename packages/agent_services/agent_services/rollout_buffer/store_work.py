"""The transactions by which items leave a buffer, for `Store.call`."""

from __future__ import annotations

import sqlite3
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from agent_services.rollout_buffer import store

Work = Callable[[sqlite3.Connection], Any]
_MOST_LEASES = 10_000
"""Acknowledged leases that are remembered, for repeated acknowledgements."""


class Contents(NamedTuple):
  """Items and leases of a buffer.

  Attributes:
    records: items that are not done, or not yet counted, in their order.
    cleared: the newest item that no read counts any more.
    seconds: Time of each lease.
  """

  records: Sequence[store.Record] = ()
  cleared: int = 0
  seconds: Mapping[str, float] = {}


def _each(
  db: sqlite3.Connection, query: str, seqs: Iterable[int], *values: Any
) -> None:
  db.executemany(query, ((*values, seq) for seq in seqs))


def _done(db: sqlite3.Connection, seqs: Sequence[int]) -> None:
  _each(
    db,
    "UPDATE items SET state = ?, lease = NULL, grp = NULL WHERE seq = ?",
    seqs,
    store.DONE,
  )
  _each(db, "DELETE FROM payloads WHERE seq = ?", seqs)


def take(
  buffer: int,
  lent: Sequence[tuple[int, Sequence[int]]],
  dropped: Sequence[int],
  *,
  lease: tuple[str, float],
  cleared: int,
  remembered: int,
) -> Work:
  """A read.

  Args:
    buffer: its id.
    lent: (number, items) of each group.
    dropped: See `drop`.
    lease: (id, seconds); 0 seconds where it ends with the read's answer.
    cleared: statistics begin behind this item; 0 leaves them.
    remembered: uids of done items that are kept.
  """

  def work(db: sqlite3.Connection) -> None:
    seqs = [seq for _, members in lent for seq in members]
    db.execute(
      "INSERT INTO leases (id, buffer, seconds) VALUES (?, ?, ?)",
      (lease[0], buffer, lease[1]),
    )
    for number, members in lent:
      _each(
        db,
        "UPDATE items SET state = ?, lease = ?, grp = ? WHERE seq = ?",
        members,
        store.LENT,
        lease[0],
        number,
      )
    drop(buffer, dropped)(db)
    db.execute(
      "UPDATE buffers SET read = read + ?, reads = reads + 1 WHERE id = ?",
      (len(seqs), buffer),
    )
    forget(buffer, cleared, remembered)(db)

  return work


def forget(buffer: int, cleared: int, remembered: int) -> Work:
  """Ends what no read counts any more.

  Args:
    buffer: its id.
    cleared: statistics begin behind this item; 0 leaves them.
    remembered: uids of done items that are kept.
  """

  def work(db: sqlite3.Connection) -> None:
    if cleared:
      db.execute(
        "UPDATE buffers SET cleared = MAX(cleared, ?) WHERE id = ?",
        (cleared, buffer),
      )
      dropped_seqs = db.execute(
        "SELECT seq FROM items WHERE buffer = ? AND state = 2 AND seq <= ?",
        (buffer, cleared),
      ).fetchall()
      _done(db, [seq for (seq,) in dropped_seqs])
    db.execute(
      "DELETE FROM items WHERE +buffer = ?1 AND state = ?2 AND seq <= (SELECT"
      " MAX(seq) FROM items) - ?3 AND seq <= (SELECT cleared FROM buffers"
      " WHERE id = ?1)",
      (buffer, store.DONE, remembered),
    )

  return work


def drop(buffer: int, seqs: Sequence[int]) -> Work:
  """Drops items, which the next read reports.

  Args:
    buffer: its id.
    seqs: the items, whose contents go.
  """

  def work(db: sqlite3.Connection) -> None:
    _each(db, "UPDATE items SET state = ? WHERE seq = ?", seqs, store.DROPPED)
    _each(db, "DELETE FROM payloads WHERE seq = ?", seqs)
    db.execute(
      "UPDATE buffers SET dropped = dropped + ? WHERE id = ?",
      (len(seqs), buffer),
    )

  return work


def acknowledge(
  buffer: int, lease: str, seqs: Sequence[int], repeatable: bool
) -> Work:
  """Ends a lease for good.

  Args:
    buffer: its id.
    lease: its id.
    seqs: the lease's items.
    repeatable: remembers the id, as a client may acknowledge it again; the
      newest ones are kept.
  """

  def work(db: sqlite3.Connection) -> None:
    _done(db, seqs)
    if not repeatable:
      db.execute("DELETE FROM leases WHERE id = ?", (lease,))
      return
    (newest,) = db.execute(
      "SELECT MAX(acknowledged) FROM leases WHERE buffer = ?", (buffer,)
    ).fetchone()
    db.execute(
      "UPDATE leases SET acknowledged = ? WHERE id = ?", (newest + 1, lease)
    )
    db.execute(
      "DELETE FROM leases WHERE buffer = ? AND acknowledged BETWEEN 1 AND ?",
      (buffer, newest + 1 - _MOST_LEASES),
    )

  return work


def give_back(lease: str, seqs: Sequence[int]) -> Work:
  """Ends a lease whose items are to be read again.

  Returns whether the items wait now; those of an acknowledged lease never do.
  """

  def work(db: sqlite3.Connection) -> bool:
    _each(
      db,
      "UPDATE items SET state = ?, lease = NULL, grp = NULL WHERE state = ?"
      " AND lease = ? AND seq = ?",
      seqs,
      store.WAITS,
      store.LENT,
      lease,
    )
    db.execute("DELETE FROM leases WHERE id = ? AND acknowledged = 0", (lease,))
    row = db.execute(
      "SELECT 1 FROM items WHERE seq = ? AND state = ?", (seqs[0], store.WAITS)
    ).fetchone()
    return row is not None

  return work


def reset(buffer: int) -> Work:
  """Forgets a buffer's items and leases."""

  def work(db: sqlite3.Connection) -> None:
    db.execute(
      "DELETE FROM payloads WHERE seq IN (SELECT seq FROM items WHERE"
      " buffer = ?)",
      (buffer,),
    )
    for table in ("items", "leases"):
      db.execute(f"DELETE FROM {table} WHERE buffer = ?", (buffer,))
    db.execute(
      "UPDATE buffers SET cleared = 0, written = 0, read = 0, dropped = 0,"
      " reads = 0 WHERE id = ?",
      (buffer,),
    )

  return work


def contents(buffer: int) -> Work:
  """Returns `Contents` of a buffer."""

  def work(db: sqlite3.Connection) -> Contents:
    records = db.execute(
      "SELECT seq, instance_id, reward, size, state, lease, grp FROM items"
      " WHERE buffer = ?1 AND (state < 3 OR seq > (SELECT cleared FROM"
      " buffers WHERE id = ?1)) ORDER BY seq",
      (buffer,),
    ).fetchall()
    (cleared,) = db.execute(
      "SELECT cleared FROM buffers WHERE id = ?", (buffer,)
    ).fetchone()
    seconds = db.execute(
      "SELECT id, seconds FROM leases WHERE buffer = ? AND acknowledged = 0",
      (buffer,),
    ).fetchall()
    return Contents(
      [store.Record(*row) for row in records], cleared, dict(seconds)
    )

  return work


def make_buffer(name: str) -> Work:
  """Makes a buffer; returns its id."""

  def work(db: sqlite3.Connection) -> int:
    db.execute("INSERT OR IGNORE INTO buffers (name) VALUES (?)", (name,))
    (number,) = db.execute(
      "SELECT id FROM buffers WHERE name = ?", (name,)
    ).fetchone()
    return number

  return work


def set_rollout(buffer: int, rollout: str | None) -> Work:
  """Keeps a buffer's rollout, as JSON."""

  def work(db: sqlite3.Connection) -> None:
    db.execute("UPDATE buffers SET rollout = ? WHERE id = ?", (rollout, buffer))

  return work
