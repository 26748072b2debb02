"""Writes on one thread; batches that wait together are committed together.

Promises: `submit` answers after the commit, when the database has it on the
disk, and never for an uncommitted batch. A wrong batch fails alone. A batch
that cannot be written (a full disk, a lost connection) is answered with 503 and
leaves nothing; the client sends it again. Words of new turns are indexed when
nothing waits, and once a second otherwise; one that cannot be indexed delays no
batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import logging
import queue
import threading
import time
from typing import Any, Callable

import sqlalchemy as sa

from training_monitor.schema import database
from training_monitor.schema import text_index
from training_monitor.server import errors
from training_monitor.server import sql as sql_lib
from training_monitor.server.batches import apply
from training_monitor.server.batches import items
from training_monitor.server.batches import references

_LOG = logging.getLogger(__name__)
_MOST_BATCHES = 256
_MOST_BYTES = 16 << 20
_PRUNE_EVERY = 1000
_COMMIT_S = 60.0
_INDEX_S = 1.0
_IDLE_S = 0.2
_INDEX_TURNS = 2000
_INDEX_AGAIN_S = 30.0  # After it could not be written.
_STOP = object()

Work = Callable[[apply.Transaction], Any]


class _OneFails(Exception):
  """One of a transaction's batches cannot be applied."""


class Writer:
  """See the module docstring. Close it."""

  def __init__(
    self,
    engine: sa.Engine,
    *,
    max_waiting_bytes: int = 64 << 20,
    on_commit: Callable[[], None] = lambda: None,
  ):
    """Args:

    engine: Engine of the upgraded database.
    max_waiting_bytes: Size of waiting batches; more are answered with 503.
    on_commit: called by the writing thread after each commit.
    """
    self._engine = engine
    self._max_waiting = max_waiting_bytes
    self._on_commit = on_commit
    self._shared = references.CommittedIds()
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._waiting = 0
    self._closed = False
    self.batches = 0
    """Batches committed."""
    self.commits = 0
    self.failures = 0
    """Transactions that could not be committed."""
    self.last_error = ""
    # None: nothing to index. At first, what an earlier server left.
    self._index_at: float | None = time.monotonic()
    self._index_from = 0.0
    self._index_error = ""
    self._thread = threading.Thread(
      target=self._run, name="monitor-writer", daemon=True
    )
    self._thread.start()

  @property
  def alive(self) -> bool:
    return self._thread.is_alive()

  @property
  def waiting_bytes(self) -> int:
    return self._waiting

  def submit(
    self, batch: items.IngestBatch, project: int
  ) -> concurrent.futures.Future[dict[str, Any]]:
    """Returns the reply to a batch, once it is durable.

    The future raises `ApiError`.
    """
    return self.run(lambda t: t.apply(batch, project), batch.size)

  def run(self, work: Work, size: int = 1000) -> concurrent.futures.Future[Any]:
    """Returns the result of `work`, once its writes are durable.

    Args:
      work: called by the writing thread, in a transaction with others, and
        again in another one if one of them fails.
      size: bytes that wait with it.

    Returns:
      A future, which raises `ApiError`.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    with self._lock:
      if self._closed or not self._thread.is_alive():
        future.set_exception(
          errors.ApiError(503, "the server is stopping", retry_after_s=5)
        )
        return future
      if self._waiting and self._waiting + size > self._max_waiting:
        future.set_exception(
          errors.ApiError(
            503,
            f"{self._waiting} bytes wait to be written; send the batch"
            " again later",
            retry_after_s=1,
          )
        )
        return future
      self._waiting += size
      self._queue.put((work, size, future))
    return future

  def close(self, timeout_s: float = 30.0) -> bool:
    """Writes pending work and ends; False when time ran out. Idempotent."""
    with self._lock:
      if not self._closed:
        self._closed = True
        self._queue.put(_STOP)
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  # --- the writing thread -----------------------------------------------------

  def _run(self) -> None:
    stopping = False
    while not stopping:
      work = self._take()
      if work and work[-1] is _STOP:
        stopping = True
        work.pop()
      if work:
        try:
          self._write(work)
        except BaseException as error:  # pylint: disable=broad-except
          _LOG.exception("the writer failed")
          self._fail(work, error)
        with self._lock:
          self._waiting -= sum(size for _, size, _ in work)
        if self._index_at is None:
          self._index_at = time.monotonic() + _INDEX_S
      if (
        self._index_at is not None
        and not stopping
        and time.monotonic() >= (self._index_at if work else self._index_from)
      ):
        self._index()

  def _take(self) -> list[Any]:
    """Returns waiting work, `_STOP` last; none if there is time to index."""
    timeout_s = None
    if self._index_at is not None:
      timeout_s = min(_IDLE_S, max(0.0, self._index_at - time.monotonic()))
    try:
      work = [self._queue.get(timeout=timeout_s)]
    except queue.Empty:
      return []
    size = 0
    while work[-1] is not _STOP and len(work) < _MOST_BATCHES:
      size += work[-1][1]
      if size > _MOST_BYTES:
        break
      try:
        work.append(self._queue.get_nowait())
      except queue.Empty:
        break
    return work

  def _index(self) -> None:
    """Indexes some pending turns, and sets when to go on."""
    try:
      with database.writing(self._engine) as connection:
        more = text_index.catch_up(connection, _INDEX_TURNS)
    except Exception as error:  # pylint: disable=broad-except
      reason = f"{type(error).__name__}: {error}"
      if reason != self._index_error:
        _LOG.error("the words of turns cannot be indexed: %s", reason)
      self._index_error = reason
      self._index_at = self._index_from = time.monotonic() + _INDEX_AGAIN_S
      return
    self._index_error = ""
    self._index_at = time.monotonic() if more else None

  def _write(self, work: list[Any]) -> None:
    running = [
      (call, future)
      for call, _, future in work
      if future.set_running_or_notify_cancel()
    ]
    calls = [call for call, _ in running]
    try:
      try:
        transaction, answers = self._transact(calls, apart=False)
      except _OneFails:
        transaction, answers = self._transact(calls, apart=True)
    except Exception as error:  # pylint: disable=broad-except
      # Work that is not answered yet was not committed either.
      driver = database.driver_of(self._engine)
      if not isinstance(error, (sa.exc.DBAPIError, OSError, driver.Error)):
        _LOG.exception("a batch was not applied")
      self._fail(work, error)
      return
    transaction.committed()
    self.commits += 1
    self.batches += len(work)
    for (_, future), answer in zip(running, answers):
      if isinstance(answer, BaseException):
        future.set_exception(answer)
      else:
        future.set_result(answer)
    self._on_commit()

  def _transact(
    self, calls: list[Work], *, apart: bool
  ) -> tuple[apply.Transaction, list[Any]]:
    """Returns (the transaction, each call's answer or error), committed.

    Args:
      calls: Calls to apply.
      apart: undo one that fails, with a savepoint of each. A savepoint keeps
        every page that changes behind it, which costs a third of the writing.

    Raises:
      _OneFails: not `apart`, and one has failed; nothing was committed.
    """
    with database.writing(self._engine) as connection:
      database.hold_writers(connection)
      sql = sql_lib.Sql(connection)
      self._shared.check_generation(sql)
      transaction = apply.Transaction(sql, self._shared, now())
      answers = []
      for call in calls:
        if apart:
          sql.savepoint()
        answer = self._answer(call, transaction)
        failed = isinstance(answer, BaseException)
        if failed and not apart:
          raise _OneFails
        if failed:
          sql.undo()
        elif apart:
          sql.release()
        answers.append(answer)
      transaction.finish(prune=self.commits % _PRUNE_EVERY == 0)
      sql.close()
    return transaction, answers

  def _answer(self, call: Work, transaction: apply.Transaction) -> Any:
    """Returns the call's answer, or the error that its caller gets."""
    driver = database.driver_of(self._engine)
    try:
      return call(transaction)
    except errors.ApiError as error:
      return error
    except driver.IntegrityError as error:
      return _refused(error)
    except (driver.OperationalError, OSError):
      raise  # No batch is at fault.
    except Exception as error:  # pylint: disable=broad-except
      # Sent again, the batch would fail again and block the ones behind it.
      _LOG.exception("a batch cannot be applied")
      return _impossible(error)

  def _fail(self, work: list[Any], error: BaseException) -> None:
    self.failures += 1
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if reason != self.last_error:
      _LOG.error("the database cannot be written: %s", reason)
    self.last_error = reason
    for _, _, future in work:
      if not future.done():
        future.set_exception(
          errors.ApiError(
            503,
            f"the database cannot be written now ({reason}); nothing of"
            " the batch was stored",
            retry_after_s=2,
          )
        )
    time.sleep(0.05)  # Pauses before the next attempt.


async def durable(future: concurrent.futures.Future[Any]) -> Any:
  """Awaits a writer's answer, which comes once it is on the disk.

  Raises:
    ApiError: 503, it takes too long; or the error of the work.
  """
  try:
    return await asyncio.wait_for(asyncio.wrap_future(future), _COMMIT_S)
  except asyncio.TimeoutError:
    raise errors.ApiError(
      503,
      f"the database took longer than {_COMMIT_S:g} s; send it again",
      retry_after_s=5,
    ) from None


def _refused(error: Exception) -> errors.ApiError:
  """Returns the error for a rule that only the database could check."""
  return errors.ApiError(
    409, f"the database refuses the batch: {str(error).splitlines()[0]}"
  )


def _impossible(error: Exception) -> errors.ApiError:
  """Returns the error for an unforeseen failure of a batch."""
  return errors.ApiError(
    422,
    f"the server cannot apply the batch ({type(error).__name__}:"
    f" {str(error)[:200]}); nothing of it was stored; read the server's log",
  )


def now() -> str:
  """Returns the time in UTC, in the database's form."""
  return (
    datetime.datetime.now(datetime.timezone.utc)
    .replace(tzinfo=None)
    .isoformat(" ", "microseconds")
  )
