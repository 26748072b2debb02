"""Streams changes as server-sent events, from where a listener stopped.

An event's id is the change's number in the database, so a browser that
reconnects (`Last-Event-ID`), even to a restarted server, misses nothing. A
listener whose last change is too old gets one event `reset`: load again. One
whose server is about to end gets one event `over`, and a moment to load the
last figures.
"""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator

import orjson
import sqlalchemy as sa
from starlette import concurrency

from training_monitor.net import http_server
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors

_KEEP_ALIVE_S = 15.0
_PAGE = 500
_FOREIGN_WRITER_S = 2.0


class Live:
  """Wakes listeners after commits, and sends them the changes."""

  def __init__(self, engine: sa.Engine, max_listeners: int = 200):
    self._engine = engine
    self._most = max_listeners
    self._listeners = 0
    self._loop: asyncio.AbstractEventLoop | None = None
    self._news = asyncio.Event()
    self.closing = False
    self._ending = False

  def start(self) -> None:
    """Binds to the running loop; call it on the loop that serves."""
    self._loop = asyncio.get_running_loop()
    self._news = asyncio.Event()

  def stop(self) -> None:
    """Ends every stream."""
    self.closing = True
    self._wake()

  def announce_end(self) -> None:
    """Sends every listener the event `over`. Thread-safe."""
    self._ending = True
    self.notify()

  @property
  def listeners(self) -> int:
    """Streams that are open."""
    return self._listeners

  def notify(self) -> None:
    """Wakes the streams after a commit. Thread-safe."""
    if self._loop is not None and not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._wake)

  def _wake(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def stream(
    self, project: int, training: int | None, after: int | None
  ) -> AsyncIterator[bytes]:
    """Yields the text of a stream.

    Args:
      project: Project of the changes.
      training: only of this one; None for all.
      after: number of the last change received; None begins now.

    Raises:
      ApiError: 503, there are too many listeners.
    """
    if self._listeners >= self._most:
      raise errors.ApiError(
        503, f"{self._most} listeners are here already", retry_after_s=10
      )
    oldest, newest = await concurrency.run_in_threadpool(self._range)
    return self._events(project, training, after, oldest, newest)

  async def _events(
    self,
    project: int,
    training: int | None,
    after: int | None,
    oldest: int,
    newest: int,
  ) -> AsyncIterator[bytes]:
    if self._listeners >= self._most:
      return  # Others came while this one asked; it comes again.
    self._listeners += 1
    try:
      yield b"retry: 2000\n\n"
      last = newest if after is None else after
      if after is not None and (after < oldest - 1 or after > newest):
        last = newest
        yield _event("reset", last, {"reason": "too old"})
      idle = 0.0
      announced = False
      while not self.closing:
        news = self._news
        rows = await concurrency.run_in_threadpool(
          self._after, project, training, last
        )
        for row in rows:
          last = row.id
          yield _event(
            "change",
            last,
            {
              "training_id": row.training_id,
              "kind": row.kind,
              "id": row.entity_id,
            },
          )
        if rows:
          idle = 0.0
          if len(rows) == _PAGE:
            continue
        if self._ending and not announced:
          announced = True
          yield _event("over", last, {})
        try:
          # Another process may write to the same database.
          await asyncio.wait_for(news.wait(), _FOREIGN_WRITER_S)
        except asyncio.TimeoutError:
          idle += _FOREIGN_WRITER_S
        if idle >= _KEEP_ALIVE_S:
          idle = 0.0
          yield b": here\n\n"
    finally:
      self._listeners -= 1

  def _range(self) -> tuple[int, int]:
    change = tables.change
    with database.reading(self._engine) as connection:
      oldest, newest = connection.execute(
        sa.select(sa.func.min(change.c.id), sa.func.max(change.c.id))
      ).one()
    return oldest or 0, newest or 0

  def _after(self, project: int, training: int | None, last: int) -> list[Any]:
    change, owner = tables.change, tables.training_project
    query = (
      sa.select(change)
      .join(owner, owner.c.training_id == change.c.training_id)
      .where(change.c.id > last, owner.c.project_id == project)
      .order_by(change.c.id)
      .limit(_PAGE)
    )
    if training is not None:
      query = query.where(change.c.training_id == training)
    with database.reading(self._engine) as connection:
      return list(connection.execute(query))


def _event(name: str, id_: int, data: dict[str, Any]) -> bytes:
  return b"id: %d\nevent: %s\ndata: %s\n\n" % (
    id_,
    name.encode(),
    http_server.event_data(orjson.dumps(data)),
  )
