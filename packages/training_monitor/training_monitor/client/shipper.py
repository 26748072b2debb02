"""Ships spools to the server, on a thread: a program's own, then orphans.

A round sends the oldest entries of a spool, and the screenshots that came with
them first: a reader of an entry looks at its screenshots.

Promises: everything in the spools reaches the server at least once and is
applied there once, in order, however often it is sent. An entry stays in its
spool until the server has taken it; one that the server refuses is put aside
with the reason and delays nothing. Screenshots that the server refuses, while
it takes entries, delay no entries. A server that is slow, dead or wrong is
logged once and affects nothing else.
"""

from __future__ import annotations

import collections
import functools
import logging
import pathlib
import random
import threading
import time
from typing import Any, Callable, Mapping, Sequence

import orjson

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_reader
from training_monitor.client import transport as transport_lib
from training_monitor.core import monitor_settings as settings_lib

_LOG = logging.getLogger(__name__)
Error = transport_lib.TransportError
# Each delivery is an fsync here and one on the server: entries within this time
# go together.
_PACE_S = 0.25
_PLENTY = 100  # Entries that do not wait for it.
_IDLE_S = 0.1
_JOIN_S = 5.0
_BATCH_BYTES = 1 << 20
_PAGE = 100  # Screenshots in one question to the server.
_MOST_BACKOFF_S = 15.0
_MOST_RETRY_AFTER_S = 60.0
_REFUSED_BACKOFF_S = 30.0
_HURRIED_S = 1.0
"""Between attempts while a drain waits."""
_TRAINING = b'"training":{'


class Shipper:
  """See the module docstring. Close it."""

  def __init__(
    self,
    transport: transport_lib.Transport,
    path: pathlib.Path,
    header: spool_lib.Header,
    config: settings_lib.MonitorConfig,
    *,
    ended: Callable[[], bool],
    counters: collections.Counter[str],
    complaints: complaints_lib.Complaints,
    health: Callable[[], Mapping[str, int]],
    on_reply: Callable[[Mapping[str, Any]], None] = lambda reply: None,
    on_round: Callable[[int, bool], None] = lambda acked, empty: None,
    on_images_lost: Callable[[list[str]], None] = lambda shas: None,
  ):
    """Args:

      transport: Connection to the server; the shipper closes it.
      path: Folder of the program's spool, whose lock the caller has; orphans
        lie beside it.
      header: Header of that spool.
      config: `heartbeat_s`.
      ended: whether nothing more goes into the spool.
      counters: dead_letters, failed, damaged, images_missing, spool_failures,
        sent and retries are counted there.
      complaints: logs problems.
      health: counters of the client, sent with each batch.
      on_reply: receives the reply to each batch.
      on_round: receives, after each round, the number of the last record that
        the server has, and whether nothing that was read waits.
      on_images_lost: receives hashes of screenshots that are not there.

    Raises:
      OSError, ValueError: the spool cannot be read.
    """
    self._transport = transport
    self._heartbeat_s = config.heartbeat_s
    self._counters = counters
    self._complaints = complaints
    self._health = health
    self._on_reply = on_reply
    self._on_round = on_round
    self._closing = threading.Event()
    self._work = threading.Event()
    self._rounds = threading.Condition()
    self._hurried_until = 0.0
    self._settled = (0, False)
    """Arguments of `on_round` after the last round."""
    self._beaten = time.monotonic()
    self._image_failures = 0
    self._images_failed = 0.0
    self._images_due = 0.0
    self._read = functools.partial(
      spool_reader.SpoolReader, counters=counters, complain=complaints.complain
    )
    self.spool = self._read(
      path, header, ended=ended, on_images_lost=on_images_lost
    )
    """Reader of the program's spool."""
    self.training: str | int | None = self.spool.training
    """Training that heartbeats are sent for."""
    self._orphans: dict[spool_reader.SpoolReader, spool_lib.Lock] | None = None
    self._thread = threading.Thread(
      target=self._run, name="monitor-send", daemon=True
    )
    self._thread.start()

  def wake(self) -> None:
    """Wakes the thread: the spool has something new."""
    self._work.set()

  def hurry(self, seconds: float) -> None:
    """Shortens the waits between attempts, for the next `seconds`."""
    self._hurried_until = time.monotonic() + seconds
    self._work.set()

  def drain(self, through: int, timeout_s: float = 10.0) -> bool:
    """Waits until the server has records and their screenshots.

    Args:
      through: Number of the last of the records.
      timeout_s: Seconds to wait.

    Returns:
      False when time ran out.
    """
    deadline = time.monotonic() + timeout_s
    self.hurry(timeout_s)
    with self._rounds:
      while not self._settled[1] or self._settled[0] < through:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not self._thread.is_alive():
          return False
        self._work.set()
        self._rounds.wait(min(remaining_s, 0.5))
    self._hurried_until = 0.0
    return True

  def close(self) -> None:
    """Stops the thread; deletes an empty spool. Idempotent."""
    self._closing.set()
    self._work.set()
    self._transport.close()
    self._thread.join(_JOIN_S)
    if self._thread.is_alive():
      return
    for orphan, lock in (self._orphans or {}).items():
      orphan.close()
      lock.release()
    try:
      self.spool.close()
    except OSError as error:
      _LOG.warning("the spool %s: %s", self.spool.path, error)

  # --- the thread -------------------------------------------------------------

  def _run(self) -> None:
    failures = 0
    while not self._closing.is_set():
      try:
        worked = self._round()
      except Exception as error:  # pylint: disable=broad-except
        if not self._closing.is_set():
          failures += 1
          self._failed(error, failures)
        continue
      failures = 0
      self._complaints.over("sending")
      with self._rounds:
        self._settled = self.spool.acked, self.spool.empty
        self._rounds.notify_all()
      self._on_round(*self._settled)
      if not worked:
        if self.spool.images_left:
          self.spool.shrink(self._work.is_set)
        self._work.wait(_IDLE_S)
        self._work.clear()
      elif worked < _PLENTY:
        self._pause(_PACE_S, hurried_s=0.0)

  def _failed(self, error: Exception, failures: int) -> None:
    """Logs the failure of a round, and waits before the next attempt."""
    if not isinstance(error, Error):
      self._counters["spool_failures"] += isinstance(error, OSError)
      self._complaints.complain(
        "sending", f"sending to the monitor failed: {error!r}"
      )
      self._pause(1.0)
      return
    self._counters["retries"] += 1
    self._complaints.complain(
      f"send{error.status}",
      f"the monitor does not answer, training continues: {error}",
    )
    # Many trainers must not retry at the same moment.
    until = time.monotonic() + backoff(error, failures) * random.uniform(0.5, 1)
    # Screenshots become smaller meanwhile, so that more of them have room.
    self.spool.shrink(lambda: self._hurried or time.monotonic() > until)
    self._pause(until - time.monotonic())

  @property
  def _hurried(self) -> bool:
    now = time.monotonic()
    return self._closing.is_set() or now < self._hurried_until

  def _pause(self, seconds: float, hurried_s: float = _HURRIED_S) -> None:
    """Waits `seconds`; `hurried_s` at most while a drain waits."""
    began = time.monotonic()
    while True:
      self._work.clear()
      wait_s = min(seconds, hurried_s) if self._hurried else seconds
      remaining_s = began + wait_s - time.monotonic()
      if remaining_s <= 0 or self._closing.is_set():
        return
      self._work.wait(remaining_s)

  def _round(self) -> int:
    """Ships a round of each spool; returns how much was sent."""
    sent = self._counters["sent"]
    worked = self._ship(self.spool)
    if not worked and self._orphans is None:
      self._orphans = self._claimed()
    worked += self._ship_orphans()
    now = time.monotonic()
    if self._counters["sent"] > sent:
      self._beaten = now
    elif now - self._beaten > self._heartbeat_s and self.training is not None:
      self._beaten = now
      self._beat(self.training)
    return worked

  def _beat(self, training: str | int) -> None:
    body = {"training_id": training}
    try:
      self._transport.post("/api/ingest/batch", orjson.dumps(body))
    except Error as error:
      if error.status not in (400, 404):  # The server does not know it yet.
        raise

  # --- orphans ----------------------------------------------------------------

  def _claimed(self) -> dict[spool_reader.SpoolReader, spool_lib.Lock]:
    path, target = self.spool.path, self.spool.header.target
    locks = {}
    for orphan, header, lock in spool_lib.claim_orphans(
      path.parent, target, path
    ):
      try:
        locks[self._read(orphan, header, ended=lambda: True)] = lock
      except Exception as error:  # pylint: disable=broad-except
        spool_lib.put_aside(orphan, error)
        lock.release()
    return locks

  def _ship_orphans(self) -> int:
    """Ships a round of each orphan; lets go of empty and unreadable ones."""
    worked = 0
    orphans = self._orphans or {}
    for orphan, lock in list(orphans.items()):
      try:
        shipped = self._ship(orphan)
        worked += shipped
        if shipped or not orphan.empty:
          continue
        orphan.close()
      except OSError as error:
        spool_lib.put_aside(orphan.path, error)
      lock.release()
      del orphans[orphan]
    return worked

  # --- a round of a spool -----------------------------------------------------

  def _ship(self, spool: spool_reader.SpoolReader) -> int:
    """Sends the oldest entries of a spool, or screenshots left behind.

    Returns:
      How many entries and screenshots the server has taken.

    Raises:
      TransportError: the server does not take entries, or does not answer.
      OSError: the disk's.
    """
    entries = spool.entries(_BATCH_BYTES)
    entries = entries[: batch_length(entries)]
    shown = spool.unsettled([sha for e in entries for sha in e.images])
    settled = self._try_to_bring(spool, shown)
    if entries:
      self._deliver(spool, entries)
    if settled is None:
      spool.images_left = True
      return sum(entry.seq <= spool.acked for entry in entries)
    # Until now the files kept a prune from deleting them as unreferenced.
    delivered = {s for e in entries if e.seq <= spool.acked for s in e.images}
    spool.settle_images(delivered - set(shown).difference(settled))
    older = spool.left_images(_PAGE) if self._images_welcome() else []
    settled = self._try_to_bring(spool, older) or []
    spool.settle_images(settled)
    return len(entries) + len(settled)

  def _deliver(
    self, spool: spool_reader.SpoolReader, entries: Sequence[spool_reader.Entry]
  ) -> None:
    last = entries[-1].seq
    try:
      reply = self._post(spool, entries)
    except Error as error:
      applied = error.body.get("applied_to")
      if error.status == 409 and isinstance(applied, int):
        spool.remove_through(applied)
        return
      if error.status not in (400, 404, 409, 413, 422):
        raise
      if len(entries) > 1:  # One of them is wrong; the others are not.
        for entry in entries:
          self._deliver(spool, [entry])
        return
      why = f"the monitor refuses an entry: {error}"
      spool.bury(entries[0], why)
      self._counters["dead_letters"] += 1
      self._complaints.complain("dead", why)
      return
    if _member(reply, "applied_to", int) < last:
      raise _no_monitor()
    spool.remove_through(last)
    self._counters["sent"] += len(entries)
    self._complaints.over("send")
    self._on_reply(reply)

  def _post(
    self, spool: spool_reader.SpoolReader, entries: Sequence[spool_reader.Entry]
  ) -> dict[str, Any]:
    delivery = {
      "spool": spool.header.id,
      "first": entries[0].seq,
      "last": entries[-1].seq,
      "health": self._health(),
    }
    # Joined as bytes: parsing them would make many objects for the garbage
    # collector.
    body = b'{"parts":[%b],"delivery":%b}' % (
      b",".join(entry.body for entry in entries),
      orjson.dumps(delivery),
    )
    return self._transport.post("/api/ingest/batch", body)

  # --- screenshots ------------------------------------------------------------

  def _try_to_bring(
    self, spool: spool_reader.SpoolReader, shas: Sequence[str]
  ) -> list[str] | None:
    """Uploads screenshots.

    Returns:
      Those that the server has or refuses; the others are lost. None if it
      takes none now.

    Raises:
      TransportError: there is no answer.
    """
    if not shas:
      return []
    if not self._images_welcome():
      return None
    settled: list[str] = []
    try:
      for start in range(0, len(shas), _PAGE):
        settled += self._bring(spool, shas[start : start + _PAGE])
    except Error as error:
      self._image_failures += 1
      self._images_failed = time.monotonic()
      # Later than the entries' next attempt: images alone may take too long.
      delay = 2 * backoff(error, self._image_failures)
      self._images_due = self._images_failed + delay
      if not error.status:
        raise
      self._complaints.complain(
        f"images{error.status}",
        f"the monitor takes no screenshots, the spool keeps them: {error}",
      )
      return None
    self._image_failures, self._images_due = 0, 0.0
    return settled

  def _images_welcome(self) -> bool:
    """Returns whether the time for the next attempt has come."""
    due = self._images_due
    if self._hurried:
      due = min(due, self._images_failed + _HURRIED_S)
    return time.monotonic() >= due

  def _bring(
    self, spool: spool_reader.SpoolReader, shas: Sequence[str]
  ) -> list[str]:
    reply = self._transport.post(
      "/api/v1/screenshots/missing", orjson.dumps({"sha256": shas})
    )
    missing = set(_member(reply, "missing", list))
    settled = [sha for sha in shas if sha not in missing]
    images: dict[str, bytes] = {}
    size = 0
    for sha in filter(missing.__contains__, shas):
      image = spool.image(sha)
      if image is None:
        continue
      if images and size + len(image) > _BATCH_BYTES:
        self._upload(images)
        images, size = {}, 0
      images[sha] = image
      size += len(image)
      settled.append(sha)
    if images:
      self._upload(images)
    return settled

  def _upload(self, images: Mapping[str, bytes]) -> None:
    listed = [{"sha256": k, "bytes": len(v)} for k, v in images.items()]
    body = b"\n".join(
      (orjson.dumps({"images": listed}), b"".join(images.values()))
    )
    try:
      reply = self._transport.post(
        "/api/v1/screenshots", body, "application/octet-stream"
      )
      refused = _member(reply, "refused", dict)
    except Error as error:
      if error.status not in (400, 413):
        raise
      if len(images) > 1:  # One of them is too large; the others are not.
        for sha, image in images.items():
          self._upload({sha: image})
        return
      refused = {sha: str(error) for sha in images}
    for why in refused.values():
      self._counters["dead_letters"] += 1
      self._complaints.complain(
        "image", f"the monitor refuses a screenshot: {why}"
      )


def backoff(error: Error, failures: int) -> float:
  """Returns seconds until the next attempt, after `failures` in a row."""
  delay = min(_MOST_BACKOFF_S, 0.2 * 2 ** min(failures, 10))
  if error.status in (401, 403):
    delay = _REFUSED_BACKOFF_S
  if error.retry_after_s is not None:
    requested_s = min(error.retry_after_s, _MOST_RETRY_AFTER_S)
    delay = max(requested_s, min(delay, 1.0))
  return delay


def _no_monitor() -> Error:
  """Returns the error for a 200 that no Training Monitor gave."""
  return Error(
    "the server there is no Training Monitor, or an answer was truncated"
  )


def _member(reply: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
  member = reply.get(key)
  if not isinstance(member, kind):
    raise _no_monitor()
  return member


def batch_length(entries: Sequence[spool_reader.Entry]) -> int:
  """Returns the number of leading entries that fit in one batch.

  Its screenshots fit a page, unless its only entry has more. It ends before a
  second status of the training: the server sees one status a batch.
  """
  first_values: dict[str, Any] = {}
  num_images = 0
  for count, entry in enumerate(entries):
    num_images += len(entry.images)
    if count and num_images > _PAGE:
      return count
    for key, value in _training_of(entry.body).items():
      if key not in ("client_id", "status"):
        continue
      if first_values.setdefault(key, value) != value:
        return count
  return len(entries)


def _training_of(body: bytes) -> Mapping[str, Any]:
  """Returns the columns of the training that an entry has, {} for none."""
  if _TRAINING not in body:
    return {}
  try:
    training = orjson.loads(body)["training"]
  except (ValueError, TypeError, KeyError):
    return {}
  return training if isinstance(training, dict) else {}
