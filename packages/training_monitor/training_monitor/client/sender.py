"""Sends a program's items, parts of batches, by a spool of its own.

    put ─► bounded memory ─► spool (a thread) ─► server (another thread)

Promises: those of `spool_writer` and `shipper`; an item that the spool has
taken (`flush`) survives the process, and the next program with a spool in that
folder, for that server, sends it.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import time
from typing import Any, Callable, Mapping

import msgpack

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import plain_json
from training_monitor.client import shipper as shipper_lib
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_writer
from training_monitor.client import transport as transport_lib
from training_monitor.client.rows import run_rows
from training_monitor.core import monitor_settings as settings_lib

_LOG = logging.getLogger(__name__)


class Sender:
  """See the module docstring. Close it."""

  def __init__(
    self,
    base_url: str,
    token: str,
    folder: str | pathlib.Path,
    config: settings_lib.MonitorConfig,
    *,
    name: str,
    target: str = "",
    on_reply: Callable[[Mapping[str, Any]], None] = lambda reply: None,
  ):
    """Args:

      base_url: Address of the server.
      token: Token of the project.
      folder: Folder of spools; spools that ended processes left there are
        delivered, too.
      config: `timeout_s`, `max_pending`, `heartbeat_s`, and `spool_mb`, of
        which screenshots fill three quarters.
      name: Name of this process's spool, unique in the folder.
      target: identifies the server in its spools; "" takes the URL.
      on_reply: receives the reply to each batch, on the sending thread.

    Raises:
      ValueError: `base_url` is not a URL.
      OSError: the spool cannot be opened.
    """
    transport = transport_lib.Transport(base_url, token, config.timeout_s)
    self.counters: collections.Counter[str] = collections.Counter()
    """dropped_memory, dropped_disk, dropped_images, dead_letters, failed,
    damaged, images_missing, spool_failures, sent, retries."""
    self._complaints = complaints_lib.Complaints()
    self.spool = spool_lib.Spool(
      pathlib.Path(folder) / f"{name}{spool_lib.SUFFIX}",
      target or base_url.rstrip("/"),
      max_bytes=config.spool_bytes,
    )
    self._ended = False
    self._undelivered = 0
    self._ships = False
    self._writer = spool_writer.SpoolWriter(
      self.spool,
      self._record,
      max_pending=config.max_pending,
      counters=self.counters,
      complaints=self._complaints,
      on_tick=self._wake,
    )
    self.shipper = shipper_lib.Shipper(
        transport, self.spool.path, self.spool.header, config,
        ended=lambda: self._ended, counters=self.counters,
        complaints=self._complaints, health=self.health, on_reply=on_reply,
    )  # fmt: skip
    self._ships = True

  def _wake(self, pending: int) -> None:
    """Wakes the shipper after a round of the writer, which starts first."""
    del pending
    if self._ships:
      self.shipper.wake()

  def put(
    self, part: run_rows.Part, images: Mapping[str, bytes] | None = None
  ) -> bool:
    """Takes a part of a batch, and files of screenshots by their hashes.

    Neither must change afterwards. Returns False when it was dropped.
    """
    return self._writer.put((part, images or {}))

  def _record(
    self, item: tuple[run_rows.Part, Mapping[str, bytes]]
  ) -> tuple[int, bytes]:
    part, images = item
    body = plain_json.dumps(part)
    for sha, file in images.items():
      try:
        self.spool.keep_image(sha, file)
      except spool_lib.SpoolFull as error:
        self.counters["dropped_images"] += 1
        self._complaints.complain("image", f"a screenshot is lost: {error}")
    return spool_lib.PART, msgpack.packb([list(images), body])

  def flush(self, timeout_s: float = 10.0) -> bool:
    """Waits until all items are on the disk; False on timeout."""
    return self._writer.flush(timeout_s)

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    return self.flush(timeout_s) and self.shipper.drain(
      self.spool.seq, deadline - time.monotonic()
    )

  def close(self, timeout_s: float = 10.0) -> bool:
    """Delivers as much as the time allows, and ends. Idempotent.

    Returns:
      Whether everything was delivered; else it waits for the next start.
    """
    if self._ended:
      return not self._undelivered
    deadline = time.monotonic() + timeout_s
    delivered = self._writer.close(timeout_s)
    self._ended = True
    delivered &= self.shipper.drain(
      self.spool.seq, max(0.0, deadline - time.monotonic())
    )
    waits = self.counts()
    waiting = max(1, waits["entry"] + waits["image"])
    self._undelivered = 0 if delivered else waiting
    self.counters["undelivered"] = self._undelivered
    self.shipper.close()
    self.spool.close()
    self._complaints.report_losses(self.counters)
    if not delivered:
      _LOG.warning(
        "%d parts wait in the spool %s for the monitor; the next run from"
        " there delivers them",
        self._undelivered,
        self.spool.path,
      )
    return delivered

  def counts(self) -> dict[str, int]:
    """Records and screenshots that wait, and records that were refused."""
    return {
      "entry": self.spool.seq - self.shipper.spool.acked,
      "image": len(spool_lib.images(self.spool.path)),
      "dead": len(spool_lib.dead(self.spool.path)),
    }

  def health(self) -> dict[str, int]:
    """Counters and fill of memory and spool, sent with each batch."""
    return {
      **self.counters,
      "pending": self._writer.pending,
      "spool_bytes": int(self.spool.bytes),
    }
