"""Delivers spools to the server, in rounds.

A round sends the oldest entries, and the screenshots that came with them first:
a reader of an entry looks at its screenshots.

Promises: an entry stays in its spool until the server has taken it. An entry
that the server refuses is put aside with the reason and delays nothing.
Screenshots that the server refuses, while it takes entries, delay no entries.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, Callable, Mapping, Sequence

import orjson

from training_monitor.client import spool_reader as reader_lib
from training_monitor.client import transport as transport_lib

_BATCH_BYTES = 1 << 20
_PAGE = 100  # Screenshots that are asked for at once.
_MOST_BACKOFF_S = 15.0
_MOST_ASKED_S = 60.0
_REFUSED_BACKOFF_S = 30.0
HURRIED_S = 1.0
"""Between attempts while a drain waits."""
_TRAINING = b'"training":{'

Error = transport_lib.TransportError


class Delivery:
  """See the module docstring. For one thread."""

  def __init__(
      self,
      transport: transport_lib.Transport,
      counters: collections.Counter[str],
      *,
      abandon: threading.Event,
      hurry: threading.Event,
      health: Callable[[], Mapping[str, int]],
      on_reply: Callable[[Mapping[str, Any]], None],
      complain: Callable[[str, str], None],
  ):
    """Args:

      transport: Connection to the server.
      counters: sent and dead_letters are counted there.
      abandon: set when nothing more is to be sent.
      hurry: set while a drain waits for the delivery.
      health: counters of the client, sent with each batch.
      on_reply: receives the reply to each batch.
      complain: logs a problem, once for each key.
    """
    self._transport = transport
    self._counters = counters
    self._abandon = abandon
    self._hurry = hurry
    self._health = health
    self._on_reply = on_reply
    self._complain = complain
    self._image_failures = 0
    self._images_failed = 0.0
    self._images_due = 0.0

  def some(self, spool: reader_lib.SpoolReader) -> int:
    """Sends one round of a spool.

    Returns:
      How many entries and screenshots the server has taken.

    Raises:
      TransportError: the server does not take entries, or does not answer.
      OSError: the disk's.
    """
    entries = spool.entries(_BATCH_BYTES)
    entries = entries[: min(batch_length(entries), _together(entries))]
    if not entries:
      return self._bring(spool, spool.left(_PAGE))
    shas = spool.wanted([sha for entry in entries for sha in entry.images])
    older = spool.left(_PAGE)
    well = self._try_to_take(spool, shas)
    self._deliver(spool, entries)
    delivered = [entry for entry in entries if entry.seq <= spool.acked]
    if not well:
      spool.leave(shas)
      return len(delivered)
    # Until now they kept a prune from deleting them as unreferenced.
    spool.forget_images([sha for entry in delivered for sha in entry.images])
    # Screenshots whose entries went without them.
    return len(delivered) + len(shas) + self._bring(spool, older)

  def beat(self, training: str | int) -> None:
    """Sends a training's heartbeat; raises TransportError."""
    body = {"training_id": training}
    try:
      self._transport.post("/api/ingest/batch", orjson.dumps(body))
    except Error as error:
      if error.status not in (400, 404):  # The server does not know it yet.
        raise

  # --- entries ----------------------------------------------------------------

  def _deliver(
      self, spool: reader_lib.SpoolReader, entries: Sequence[reader_lib.Entry]
  ) -> None:
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
      self._complain("dead", why)
      return
    last = entries[-1].seq
    applied = reply.get("applied_to")
    if not isinstance(applied, int) or applied < last:
      raise _no_monitor()
    spool.remove_through(last)
    self._counters["sent"] += len(entries)
    self._on_reply(reply)

  def _post(
      self, spool: reader_lib.SpoolReader, entries: Sequence[reader_lib.Entry]
  ) -> dict[str, Any]:
    delivery = {
        "spool": spool.header.id, "first": entries[0].seq,
        "last": entries[-1].seq, "health": self._health(),
    }  # pyformat: disable
    # Joined as bytes: parsing them would make many objects for the garbage
    # collector.
    body = b'{"parts":[%b],"delivery":%b}' % (
        b",".join(entry.body for entry in entries), orjson.dumps(delivery)
    )
    return self._transport.post("/api/ingest/batch", body)

  # --- screenshots ------------------------------------------------------------

  def _bring(
      self, spool: reader_lib.SpoolReader, shas: Sequence[str]
  ) -> int:
    """Sends these and removes them from the spool; returns how many."""
    if not shas or not self._try_to_take(spool, shas):
      return 0
    spool.forget_images(shas)
    return len(shas)

  def _try_to_take(
      self, spool: reader_lib.SpoolReader, shas: Sequence[str]
  ) -> bool:
    """Returns whether the server now has, or has refused, every screenshot.

    Raises:
      TransportError: there is no answer.
    """
    if not shas:
      return True
    due = self._images_due
    if self._hurry.is_set():
      due = min(due, self._images_failed + HURRIED_S)
    if time.monotonic() < due:
      return False
    try:
      for start in range(0, len(shas), _PAGE):
        self._take(spool, shas[start : start + _PAGE])
    except Error as error:
      self._image_failures += 1
      self._images_failed = time.monotonic()
      # Later than the entries' next attempt: images alone may take too long.
      delay = 2 * backoff(error, self._image_failures)
      self._images_due = self._images_failed + delay
      if not error.status:
        raise
      self._complain(
          f"images{error.status}",
          f"the monitor takes no screenshots, the spool keeps them: {error}",
      )
      return False
    self._image_failures, self._images_due = 0, 0.0
    return True

  def _take(self, spool: reader_lib.SpoolReader, shas: Sequence[str]) -> None:
    reply = self._transport.post(
        "/api/v1/screenshots/missing", orjson.dumps({"sha256": shas})
    )
    missing = set(_member(reply, "missing", list))
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
    if images:
      self._upload(images)

  def _upload(self, images: Mapping[str, bytes]) -> None:
    if self._abandon.is_set():
      raise Error("the client is closing")
    listed = [{"sha256": k, "bytes": len(v)} for k, v in images.items()]
    body = b"\n".join((
        orjson.dumps({"images": listed}), b"".join(images.values())
    ))
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
      self._complain("image", f"the monitor refuses a screenshot: {why}")


def backoff(error: Error, failures: int) -> float:
  """Returns seconds until the next attempt, after `failures` in a row."""
  delay = min(_MOST_BACKOFF_S, 0.2 * 2 ** min(failures, 10))
  if error.status in (401, 403):
    delay = _REFUSED_BACKOFF_S
  if error.retry_after_s is not None:
    requested_s = min(error.retry_after_s, _MOST_ASKED_S)
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


def _together(entries: Sequence[reader_lib.Entry]) -> int:
  """Returns how many leading entries, at least 1, fit a page of images."""
  count = 0
  for number, entry in enumerate(entries):
    count += len(entry.images)
    if number and count > _PAGE:
      return number
  return len(entries)


def batch_length(entries: Sequence[reader_lib.Entry]) -> int:
  """Returns the number of leading entries that fit in one batch.

  A batch ends before a second status of the training: the server sees one
  status a batch.
  """
  first_values: dict[str, Any] = {}
  for count, entry in enumerate(entries):
    if _TRAINING not in entry.body:
      continue
    training = (object_of(entry.body) or {}).get("training") or {}
    for key in ("client_id", "status"):
      value = training.get(key)
      if key in training and first_values.setdefault(key, value) != value:
        return count
  return len(entries)


def object_of(body: bytes) -> dict[str, Any] | None:
  """Returns an entry's JSON object; None if the body is no object."""
  try:
    value = orjson.loads(body)
  except orjson.JSONDecodeError:
    return None
  return value if isinstance(value, dict) else None
