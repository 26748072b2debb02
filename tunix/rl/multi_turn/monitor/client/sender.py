"""From what happens to the server: memory, spool, network, each at its pace.

    put ─► bounded memory ─► spool (a thread) ─► server (another thread)

Promises: `put` takes microseconds and never waits; what the spool has taken
(`flush`) survives the process; everything in the spool reaches the server at
least once and is applied there once, in order, however often it is sent. What
there is no room for, in memory or on the disk, is dropped and counted. An
entry that the server refuses for what it says is put aside with the reason
and holds up nothing. A server that is slow, dead or wrong is told to nobody
but the log, once.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import random
import sqlite3
import threading
import time
from typing import Any, Callable, Mapping, Sequence

import orjson
from tunix.rl.multi_turn.monitor.client import plain_json
from tunix.rl.multi_turn.monitor.client import spool as spool_lib
from tunix.rl.multi_turn.monitor.client import transport as transport_lib

_LOG = logging.getLogger(__name__)
# Each append is an fsync, and each delivery one of the server's: what comes
# within these is taken together.
_TICK_S = 0.25
_PACE_S = 0.25
_PLENTY = 100  # Entries that are not waited for.
_BREATH_S = 1e-5
_BREATH_EVERY_S = 1e-3
_IDLE_S = 0.1
_HEARTBEAT_S = 15.0
_BATCH_BYTES = 1 << 20
_MOST_BACKOFF_S = 15.0
_REFUSED_BACKOFF_S = 30.0
_IMAGES_SHARE = 0.25
_TRAINING = b'"training":{'

Part = Mapping[str, Any]
"""A part of a batch: `training` and arrays, as the protocol has them."""


class Made:
  """What a `put` callable may return: a part, and images that it shows."""

  __slots__ = ("part", "images")

  def __init__(self, part: Part, images: Mapping[str, bytes] | None = None):
    self.part = part
    self.images = images or {}


class Sender:
  """See the module docstring. Close it."""

  def __init__(
      self,
      base_url: str,
      token: str,
      folder: str | pathlib.Path,
      *,
      name: str,
      target: str = "",
      timeout_s: float = 120.0,
      max_pending: int = 4096,
      max_spool_bytes: int = 2 << 30,
      on_reply: Callable[[Mapping[str, Any]], None] = lambda reply: None,
  ):
    """Args:

      base_url: of the server.
      token: of the project.
      folder: of spools; those that others left there are delivered, too.
      name: of this process's spool, unique in the folder.
      target: what tells spools for one server from others; the URL if "".
      timeout_s: of a request.
      max_pending: of what waits in memory; more is dropped.
      max_spool_bytes: of what waits on the disk; more is dropped. Images stop
        at three quarters of it.
      on_reply: gets the reply to each batch, on the sending thread.

    Raises:
      ValueError: no URL.
      OSError, sqlite3.Error: there can be no spool.
    """
    self._transport = transport_lib.Transport(base_url, token, timeout_s)
    self._folder = pathlib.Path(folder)
    self._target = target or base_url.rstrip("/")
    self.spool = spool_lib.Spool(
        self._folder / f"{name}{spool_lib.SUFFIX}",
        self._target,
        max_bytes=max_spool_bytes,
    )
    self._max_pending = max_pending
    self._on_reply = on_reply
    self._pending: collections.deque[Any] = collections.deque()
    self.counters: collections.Counter[str] = collections.Counter()
    """dropped_memory, dropped_disk, dropped_images, dead_letters, failed,
    sent, retries."""
    self.training: str | int | None = None
    """Whose heart beats while nothing happens."""
    self._lock = threading.Lock()
    self._taken = 0
    self._kept = 0
    self._closing = threading.Event()
    self._abandon = threading.Event()
    self._work = threading.Event()
    self._keep_now = threading.Event()
    self._hurry = threading.Event()
    self._delivered = threading.Event()
    self._complaints: set[str] = set()
    self._keeping = threading.Thread(
        target=self._keep, name="monitor-spool", daemon=True
    )
    self._sending = threading.Thread(
        target=self._send, name="monitor-send", daemon=True
    )
    self._keeping.start()
    self._sending.start()

  def put(self, make: Callable[[], Made | Part | None] | Part) -> bool:
    """Takes a part of a batch, or what makes one on another thread.

    Returns:
      False when it was dropped.
    """
    pending = self._pending
    if self._closing.is_set() or len(pending) >= self._max_pending:
      with self._lock:
        self.counters["dropped_memory"] += 1
      return False
    with self._lock:
      pending.append(make)
      self._taken += 1
    if len(pending) > self._max_pending // 4:
      self._keep_now.set()
    return True

  def flush(self, timeout_s: float = 10.0) -> bool:
    """Waits until what was put is in the spool; False when time ran out."""
    wanted, deadline = self._taken, time.monotonic() + timeout_s
    while self._kept < wanted:
      if time.monotonic() > deadline or not self._keeping.is_alive():
        return self._kept >= wanted
      self._keep_now.set()
      time.sleep(0.005)
    return True

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    if not self.flush(timeout_s):
      return False
    self._hurry.set()
    try:
      return self._drain(deadline)
    finally:
      self._hurry.clear()

  def _drain(self, deadline: float) -> bool:
    while True:
      self._delivered.clear()
      self._work.set()
      try:
        counts = self.spool.counts()
      except sqlite3.Error:
        return False  # Said already, by who tried to read it.
      if not counts["entry"] and not counts["image"]:
        return True
      left = deadline - time.monotonic()
      if left <= 0 or not self._sending.is_alive():
        return False
      self._delivered.wait(min(left, 0.5))

  def close(self, timeout_s: float = 10.0) -> bool:
    """Delivers what it can in the time, and ends. Idempotent.

    Returns:
      Whether everything was delivered; else it waits for the next start.
    """
    if self._closing.is_set():
      return self.counters["undelivered"] == 0
    deadline = time.monotonic() + timeout_s
    kept = self.flush(timeout_s)
    self._closing.set()
    self._keep_now.set()
    self._keeping.join(max(0.1, deadline - time.monotonic()))
    done = kept and self.drain(max(0.0, deadline - time.monotonic()))
    self._abandon.set()
    self._hurry.set()
    self._work.set()
    self._transport.close()
    self._sending.join(5.0)
    try:
      left = self.spool.counts()
      self.counters["undelivered"] = left["entry"] + left["image"]
    except sqlite3.Error as error:
      _LOG.warning("the spool %s cannot be read: %s", self.spool.path, error)
      self.counters["undelivered"] += 1
      done = False
    lost = {
        k: v for k, v in self.counters.items()
        if v and k.startswith(("dropped", "dead", "failed"))
    }  # pyformat: disable
    if lost:
      _LOG.warning("the monitor was not told of everything: %s", lost)
    if not done:
      _LOG.warning(
          "%d parts wait in %s for the monitor; the next run from there"
          " delivers them",
          self.counters["undelivered"],
          self.spool.path,
      )
    if not self._keeping.is_alive() and not self._sending.is_alive():
      self.spool.close()
    return done

  def health(self) -> dict[str, int]:
    """Counters and fill, for whoever looks."""
    return {
        **self.counters,
        "pending": len(self._pending),
        "spool_bytes": int(self.spool.bytes),
    }

  # --- memory to spool ------------------------------------------------------

  def _keep(self) -> None:
    while True:
      closing = self._closing.is_set()
      if self._pending:
        try:
          self._keep_some()
        except Exception:  # pylint: disable=broad-except
          self._complain("spool", "the monitor's spool failed")
          time.sleep(0.5)
      elif closing:
        return
      if not closing:
        if len(self._pending) < _PLENTY:
          self._keep_now.wait(_TICK_S)
        self._keep_now.clear()
      elif self._abandon.is_set():
        return

  def _keep_some(self) -> None:
    bodies: list[bytes] = []
    images: dict[str, bytes] = {}
    size = taken = 0
    breath = time.perf_counter()
    while taken < len(self._pending) and size < _BATCH_BYTES:
      make = self._pending[taken]  # Stays until it is on the disk.
      taken += 1
      try:
        made = make() if callable(make) else make
        if made is None:
          continue
        if not isinstance(made, Made):
          made = Made(made)
        body = plain_json.dumps(made.part)
      except Exception as error:  # pylint: disable=broad-except
        self.counters["failed"] += 1
        self._complain("make", f"something cannot be told: {error!r}")
        # It would fail again, and has perhaps changed what makes it.
        self._pending[taken - 1] = _NOTHING
        continue
      # Made once: a second try must not make it again.
      self._pending[taken - 1] = _again(made)
      bodies.append(body)
      if time.perf_counter() - breath > _BREATH_EVERY_S:
        # Whoever waits for the interpreter gets it now, not after a switch
        # interval.
        time.sleep(_BREATH_S)
        breath = time.perf_counter()
      images.update(made.images)
      size += len(body) + sum(map(len, made.images.values()))
    if images and self.spool.room < _IMAGES_SHARE:
      self.counters["dropped_images"] += len(images)
      images = {}
    try:
      self.spool.append(bodies, images)
    except spool_lib.SpoolFull as error:
      self._complain("full", f"the monitor's spool is full: {error}")
      self.counters["dropped_images"] += len(images)
      if not images or not self._append_words(bodies):
        self.counters["dropped_disk"] += len(bodies)
    except sqlite3.Error as error:
      # What waits stays in memory, which is bounded.
      self.counters["spool_failures"] += 1
      self._complain("disk", f"{self.spool.path} cannot be written: {error}")
      time.sleep(0.5)
      return
    for _ in range(taken):
      self._pending.popleft()
    self._kept += taken
    self._work.set()

  def _append_words(self, bodies: list[bytes]) -> bool:
    """Keeps what there was no room for with its images."""
    try:
      self.spool.append(bodies, {})
    except (spool_lib.SpoolFull, sqlite3.Error):
      return False
    return True

  # --- spool to server ------------------------------------------------------

  def _send(self) -> None:
    failures = 0
    beat = time.monotonic()
    orphans: list[spool_lib.Spool] | None = None
    while not self._abandon.is_set():
      try:
        worked = self._send_some(self.spool)
        if not worked and orphans is None:
          orphans = list(
              spool_lib.claim_orphans(
                  self._folder, self._target, self.spool.path
              )
          )
        for orphan in list(orphans or ()):
          found = self._send_some(orphan)
          if found:
            worked += found
          else:
            orphan.close()
            orphans.remove(orphan)
        failures = 0
        now = time.monotonic()
        if worked:
          beat = now
        elif now - beat > _HEARTBEAT_S and self.training is not None:
          beat = now
          self._beat()
      except transport_lib.TransportError as error:
        failures += 1
        self.counters["retries"] += 1
        self._complain(
            f"send{error.status}",
            f"the monitor does not answer, training goes on: {error}",
        )
        self._pause(error, failures)
        continue
      except Exception:  # pylint: disable=broad-except
        if self._abandon.is_set():
          break
        self._complain("sending", "sending to the monitor failed")
        self._abandon.wait(1.0)
        continue
      if not worked:
        self._delivered.set()
        self._work.wait(_IDLE_S)
        self._work.clear()
      elif worked < _PLENTY:
        self._hurry.wait(_PACE_S)
    for orphan in orphans or ():
      orphan.close()

  def _pause(self, error: transport_lib.TransportError, failures: int) -> None:
    delay = min(_MOST_BACKOFF_S, 0.2 * 2 ** min(failures, 10))
    if error.status in (401, 403):
      delay = _REFUSED_BACKOFF_S
    if error.retry_after_s is not None:
      delay = max(error.retry_after_s, min(delay, 1.0))
    # Many trainers must not come back at the same moment.
    self._abandon.wait(delay * random.uniform(0.5, 1.0))

  def _send_some(self, spool: spool_lib.Spool) -> int:
    """Sends the oldest entries and images; returns how many there were."""
    entries = spool.entries(_BATCH_BYTES)
    failure: transport_lib.TransportError | None = None
    sent = 0
    try:  # First: whoever sees an entry looks at its screenshots.
      through = entries[-1].seq if entries else None
      while shas := spool.images(through):
        self._send_images(spool, shas)
        sent += len(shas)
        if self._abandon.is_set():
          break
    except transport_lib.TransportError as error:
      failure = error  # Words need not wait for a disk that takes no pictures.
    if entries:
      self._deliver(spool, entries)
    if failure is not None:
      raise failure
    return len(entries) + sent

  def _deliver(
      self, spool: spool_lib.Spool, entries: list[spool_lib.Entry]
  ) -> None:
    taken = together(entries)
    try:
      reply = self._post(spool, entries[:taken])
    except transport_lib.TransportError as error:
      applied = error.body.get("applied_to")
      if error.status == 409 and isinstance(applied, int):
        spool.remove_through(applied)
        return
      if error.status not in (400, 404, 409, 413, 422):
        raise
      if taken > 1:  # One of them is wrong; the others are not.
        for entry in entries[:taken]:
          self._deliver(spool, [entry])
        return
      why = f"the monitor refuses something: {error}"
      if object_of(entries[0].body) is None:
        why = f"the disk has garbled an entry of {spool.path}: no JSON object"
      spool.bury(entries[0], why)
      self.counters["dead_letters"] += 1
      self._complain("dead", why)
      return
    last = entries[taken - 1].seq
    applied = reply.get("applied_to")
    if not isinstance(applied, int) or applied < last:
      raise _no_monitor()
    spool.remove_through(last)
    self.counters["sent"] += taken
    self._complaints.difference_update(
        [c for c in self._complaints if c.startswith("send")]
    )
    self._on_reply(reply)

  def _post(
      self, spool: spool_lib.Spool, entries: Sequence[spool_lib.Entry]
  ) -> dict[str, Any]:
    delivery = {
        "spool": spool.id, "first": entries[0].seq, "last": entries[-1].seq,
        "health": self.health(),
    }  # pyformat: disable
    # As they lie there: to read them would make a great many objects, which
    # training's garbage collector would go through.
    body = b'{"parts":[%b],"delivery":%b}' % (
        b",".join(entry.body for entry in entries), orjson.dumps(delivery)
    )
    return self._transport.post("/api/ingest/batch", body)

  def _beat(self) -> None:
    body = {"training_id": self.training}
    try:
      self._transport.post("/api/ingest/batch", orjson.dumps(body))
    except transport_lib.TransportError as error:
      if error.status not in (400, 404):  # Not told of it yet.
        raise

  def _send_images(self, spool: spool_lib.Spool, shas: list[str]) -> None:
    reply = self._transport.post(
        "/api/v1/screenshots/missing", orjson.dumps({"sha256": shas})
    )
    missing = set(_said(reply, "missing", list))
    spool.remove_images([sha for sha in shas if sha not in missing])
    images: dict[str, bytes] = {}
    size = 0
    for sha in filter(missing.__contains__, shas):
      if self._abandon.is_set():
        break
      image = spool.image(sha)
      if images and size + len(image) > _BATCH_BYTES:
        self._deliver_images(spool, images)
        images, size = {}, 0
      images[sha] = image
      size += len(image)
    if images and not self._abandon.is_set():
      self._deliver_images(spool, images)

  def _deliver_images(
      self, spool: spool_lib.Spool, images: Mapping[str, bytes]
  ) -> None:
    told = [{"sha256": k, "bytes": len(v)} for k, v in images.items()]
    body = b"\n".join((
        orjson.dumps({"images": told}), b"".join(images.values())
    ))
    try:
      reply = self._transport.post(
          "/api/v1/screenshots", body, "application/octet-stream"
      )
      refused = _said(reply, "refused", dict)
    except transport_lib.TransportError as error:
      if error.status not in (400, 413):
        raise
      if len(images) > 1:  # One of them is too large; the others are not.
        for sha, image in images.items():
          self._deliver_images(spool, {sha: image})
        return
      refused = {sha: str(error) for sha in images}
    for why in refused.values():
      self.counters["dead_letters"] += 1
      self._complain("image", f"the monitor refuses a screenshot: {why}")
    spool.remove_images(list(images))  # At once: each would be an fsync.

  def _complain(self, what: str, message: str) -> None:
    """Says it once, until it has been well again."""
    if what not in self._complaints:
      self._complaints.add(what)
      _LOG.warning("%s", message, exc_info=what in ("spool", "sending"))


def _no_monitor() -> transport_lib.TransportError:
  """Something that answers 200 to anything must not swallow a run."""
  return transport_lib.TransportError(
      "what answers there is no Training Monitor, or an answer was cut off"
  )


def _said(reply: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
  found = reply.get(key)
  if not isinstance(found, kind):
    raise _no_monitor()
  return found


def _NOTHING() -> None:  # pylint: disable=invalid-name
  return None


def _again(made: Made) -> Callable[[], Made]:
  return lambda: made


def together(entries: Sequence[spool_lib.Entry]) -> int:
  """How many of the first of these entries can be one batch.

  A batch ends before a second status of the training, which the server would
  not see otherwise.
  """
  said: dict[str, Any] = {}
  for count, entry in enumerate(entries):
    if _TRAINING not in entry.body:
      continue
    training = (object_of(entry.body) or {}).get("training") or {}
    for key in ("client_id", "status"):
      if key in training and said.setdefault(key, training[key]) != training[
          key
      ]:
        return count
  return len(entries)


def object_of(body: bytes) -> dict[str, Any] | None:
  """An entry's JSON object; None if it is none."""
  try:
    found = orjson.loads(body)
  except orjson.JSONDecodeError:
    return None
  return found if isinstance(found, dict) else None
