"""Closes connections that cost the server too much.

Promises: a client that sends the head of a request too slowly, or does not read
its answer, is disconnected after a while, and so is one that connects when too
many are connected; its memory is then free.

Does not: limit a body's time (`ingest.IngestLimits`) or an idle connection's
(uvicorn).
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from typing import Any

from uvicorn.protocols.http import h11_impl

_KEPT_FILES = 128
"""Of the files that a process may open, for databases, images and threads."""


@dataclasses.dataclass(frozen=True)
class SocketLimits:
  """Limits of connections.

  Attributes:
    head_s: seconds until a request's head must be complete.
    stall_s: seconds in which a client must read some of the pending answer.
    most: connections at a time; 0: this process's limit of open files, less
      those that it needs itself.
  """

  head_s: float = 30.0
  stall_s: float = 60.0
  most: int = 0

  def count(self) -> int:
    if self.most:
      return self.most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
      return 10_000
    return min(10_000, max(16, soft - _KEPT_FILES))


def protocol(limits: SocketLimits = SocketLimits()) -> type[asyncio.Protocol]:
  """A protocol class for uvicorn's `http`: HTTP/1.1 with these limits.

  It is h11, which bounds the size of a head as well (16 KiB).
  """
  most = limits.count()

  class Guarded(h11_impl.H11Protocol):

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self._head: asyncio.TimerHandle | None = None
      self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
      super().connection_made(transport)
      if len(self.connections) > most:
        transport.abort()
      else:
        self._await_head()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      self._await_head()

    def on_response_complete(self) -> None:
      super().on_response_complete()
      self._await_head()

    def _await_head(self) -> None:
      """Times a head that has begun, or a connection that has said nothing.

      Between requests uvicorn's own timer runs.
      """
      answering = self.cycle is not None and not self.cycle.response_complete
      if answering or self.timeout_keep_alive_task is not None:
        self._head = _cancelled(self._head)
      elif self._head is None:
        self._head = self.loop.call_later(limits.head_s, self.transport.abort)

    def pause_writing(self) -> None:
      super().pause_writing()
      self._stall = _cancelled(self._stall)
      self._stall = self.loop.call_later(limits.stall_s, self._look)

    def _look(self, before: int | None = None) -> None:
      """Gives up a client that has taken nothing since the last look."""
      waiting = self.transport.get_write_buffer_size()
      if before is not None and waiting >= before:
        self.transport.abort()
      else:
        self._stall = self.loop.call_later(
            limits.stall_s, self._look, waiting
        )

    def resume_writing(self) -> None:
      self._stall = _cancelled(self._stall)
      super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
      self._head = _cancelled(self._head)
      self._stall = _cancelled(self._stall)
      self._unset_keepalive_if_required()
      super().connection_lost(exc)

  return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
  if timer is not None:
    timer.cancel()
