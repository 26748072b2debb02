"""Records a run's events in a log file that the uploader process reads.

    on_event ─► memory ─► a thread: bytes ─► spool ─► `uploader` ─► server

The trainer's process only writes each event down, with the pixels that it
shows for the first time.

Promises: `on_event` only appends to a list and never waits. An event that the
spool has taken survives the trainer and the uploader, however they end. Events
that memory or the spool has no room for are dropped and counted. An uploader
that dies is replaced, and goes on where it was; one that hangs delays nothing,
`close` included.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any, Mapping

import orjson

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import event_codec
from training_monitor.client import event_types
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_writer
from training_monitor.client.rows import ingest_rows
from training_monitor.client.rows import live_turns
from training_monitor.client.rows import run_rows
from training_monitor.core import events
from training_monitor.core import images as images_lib
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.core import trajectory as trajectory_lib

_LOG = logging.getLogger(__name__)
_MAX_KNOWN_IMAGES = 100_000
_GRACE_S = 10.0
_REPORT_S = 5.0
_MAX_BACKOFF_S = 60.0
NICENESS = 10
"""CPU priority of the uploader process."""
COMMAND = "uploader"
"""Argument of `python -m training_monitor` that starts the uploader."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec(run_rows.RunFacts):
  """The run that is recorded, and where it is sent to.

  Attributes:
    url: Address of the server.
    spool_dir: folder of the spools.
    name: Name of this trainer's spool, unique in the folder.
    token: Token of the project, "" for none.
    target: identifies the server across addresses; "" takes the URL.
  """

  url: str
  spool_dir: str
  name: str
  token: str = ""
  target: str = ""

  def facts(self) -> dict[str, Any]:
    """Returns the part that the spool keeps: no token, and no address."""
    return {
      f.name: getattr(self, f.name)
      for f in dataclasses.fields(run_rows.RunFacts)
    }


class EventLog:
  """An `events.Observer`; see the module docstring. Close it."""

  def __init__(
    self,
    run: RunSpec,
    config: settings_lib.MonitorConfig = settings_lib.MonitorConfig(),
    *,
    images: images_lib.ImageStore | None = None,
  ):
    """Starts the uploader, and waits until it is ready.

    Args:
      run: the run and its server.
      config: limits and deadlines. `url`, `embedded` and `images` are not
        read: `run` and `images` decide them.
      images: pixels of the screenshots; None sends no pixels.

    Raises:
      ValueError: the uploader refuses to start; its reason.
      OSError: the spool cannot be made, or the uploader not started.
    """
    self._config = config
    self._images = images
    self._known_images: set[str] = set()
    """Screenshots that the spool or the server has."""
    self._counters: collections.Counter[str] = collections.Counter()
    self._complaints = complaints_lib.Complaints()
    self._changed = threading.Condition()
    self._uploaded: Mapping[str, Any] = {}
    """The uploader's last report."""
    self._order: dict[str, Any] | None = None
    """Message of a drain or of the end, for the next uploader, too."""
    self._reported: tuple[float, dict[str, int]] = (0.0, {})
    self._started = threading.Event()
    self._problem: Exception | None = None
    """Reason for which the last uploader is not ready."""
    self._refusal: Exception | None = None
    """Reason for which the first uploader does not start."""
    self._closed = False
    self._finished = threading.Event()
    """Set when no uploader is to run any more."""
    self._delivered = False
    self._process: subprocess.Popen[bytes] | None = None
    self.pid = 0
    """Process id of the uploader that was ready last."""
    self._sending = threading.Lock()
    self._spool = spool_lib.Spool(
      pathlib.Path(run.spool_dir) / f"{run.name}{spool_lib.SUFFIX}",
      run.target or run.url.rstrip("/"),
      run=run.facts(),
      images=images is not None,
      max_bytes=config.spool_bytes,
    )
    self._begin = {
      "spool": str(self._spool.path),
      "url": run.url,
      "token": run.token,
      "config": dataclasses.asdict(config),
    }
    self._supervisor = threading.Thread(
      target=self._supervise, name="monitor-uploader", daemon=True
    )
    self._supervisor.start()
    if not self._started.wait(settings_lib.START_S) or self._refusal:
      self._end(0.0)
      spool_lib.remove(self._spool.path)
      self._spool.close()
      raise self._refusal or OSError("the monitor's uploader did not start")
    self._writer = spool_writer.SpoolWriter(
      self._spool,
      self._record,
      max_pending=config.max_pending,
      counters=self._counters,
      complaints=self._complaints,
      on_tick=self._report,
    )

  @property
  def dropped(self) -> int:
    """Events that there was no room for."""
    return self._counters["dropped_memory"] + self._counters["dropped_disk"]

  @property
  def counters(self) -> collections.Counter[str]:
    """Counters of both processes; the uploader's as of its last report."""
    return self._counters + collections.Counter(
      self._uploaded.get("counters", {})
    )

  def readings(self) -> dict[str, int]:
    """Returns the numbers of waiting and of dropped events."""
    return {"waiting": self._writer.pending, "dropped": self.dropped}

  def on_event(self, event: events.Event) -> None:
    if event_types.carried(type(event)) in event_codec.RECORDED:
      # A long turn may be watched: the first one of each tick is written early.
      soon = event_types.is_a(event, events.TurnFinished) and (
        live_turns.is_watched(event)
      )
      self._writer.put(event, soon=soon)

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    if not self._writer.flush(timeout_s):
      return False
    self._direct({"hurry": timeout_s})
    with self._changed:
      delivered = self._changed.wait_for(
        self._is_delivered, max(0.0, deadline - time.monotonic())
      )
    self._direct({"hurry": 0.0})
    return delivered

  def _is_delivered(self) -> bool:
    return (
      self._uploaded.get("empty", False)
      and self._uploaded["acked"] >= self._spool.seq
    )

  def close(self) -> bool:
    """Delivers for `close_timeout_s`; the spool keeps the rest. Idempotent.

    Returns:
      Whether everything was delivered.
    """
    if self._closed:
      return self._delivered
    self._closed = True
    allowed_s = self._config.close_timeout_s + _GRACE_S
    deadline = time.monotonic() + allowed_s
    flushed = self._writer.close(allowed_s / 2)
    self._direct({"close": self._config.close_timeout_s})
    self._end(max(1.0, deadline - time.monotonic()))
    self._delivered = flushed and self._is_delivered()
    self._spool.close()
    self._complaints.report_losses(self.counters)
    if self._writer.pending:
      _LOG.warning(
        "the monitor did not receive %d events", self._writer.pending
      )
    return self._delivered

  # --- events as records ------------------------------------------------------

  def _record(self, event: events.Event) -> tuple[int, bytes]:
    if event_types.is_a(event, events.EpisodeFinished):
      self._keep(ingest_rows.images_of(event.trajectory))
    elif event_types.is_a(event, events.TurnFinished):
      self._keep(live_turns.images_of(live_turns.shown(event)))
    return spool_lib.EVENT, event_codec.dump(event)

  def _keep(self, images: Mapping[str, trajectory_lib.ImageRef]) -> None:
    """Keeps screenshots that the uploader may not have. Raises OSError."""
    if self._images is None:
      return
    for sha, ref in images.items():
      if sha in self._known_images:
        continue
      try:
        pixels = self._images.get(ref)
      except (KeyError, OSError, ValueError):
        continue  # The uploader counts it, as it does not find it either.
      try:
        self._spool.keep_image(sha, pixels)
      except spool_lib.SpoolFull as error:
        self._counters["dropped_images"] += 1
        self._complaints.complain("full", f"the monitor's spool: {error}")
        continue
      if len(self._known_images) >= _MAX_KNOWN_IMAGES:
        self._known_images.clear()  # The server knows which it has.
      self._known_images.add(sha)

  # --- the uploader -----------------------------------------------------------

  def _supervise(self) -> None:
    """Runs an uploader, and replaces one that ends before its time."""
    failures = 0
    while not self._finished.is_set():
      self._problem = OSError("the monitor's uploader did not start")
      try:
        status = self._run_uploader()
      except OSError as error:
        self._problem, status = error, 1
      if not self._started.is_set():
        self._refusal = self._problem
        self._started.set()
        return
      if self._finished.is_set() or self._closed and not status:
        return
      if self._problem is None:
        failures = 0
        _LOG.warning(
          "the monitor's uploader has ended; it is restarted, and training"
          " continues"
        )
      else:
        self._complaints.complain(
          "uploader", f"the monitor's uploader does not start: {self._problem}"
        )
      failures += 1
      self._finished.wait(min(_MAX_BACKOFF_S, 0.25 * 2 ** min(failures, 10)))

  def _run_uploader(self) -> int:
    """Returns the exit status of an uploader. Raises OSError."""
    with subprocess.Popen(
      [sys.executable, "-P", "-m", "training_monitor", COMMAND],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      pass_fds=(self._spool.lock.fileno(),),
      # Ctrl-C is for the run. A session of its own would make its niceness
      # meaningless, see `run.monitor`.
      process_group=0,
    ) as process:
      if hasattr(os, "setpriority"):
        try:
          os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        except OSError:
          pass
      assert process.stdin is not None and process.stdout is not None
      os.set_blocking(process.stdin.fileno(), False)
      with self._sending:
        self._process = process
        self._write(self._begin)
        if self._order is not None:
          self._write(self._order)
      if self._finished.is_set():
        process.kill()
      self._reported = (0.0, {})
      for line in process.stdout:
        try:
          self._receive(orjson.loads(line))
        except (ValueError, TypeError, KeyError):
          _LOG.warning("%s", line.decode("utf-8", "replace").rstrip())
      with self._sending:
        self._process = None
    return process.returncode

  def _tell(self, message: Mapping[str, Any]) -> None:
    """Sends the uploader a line, without waiting; without one, nothing."""
    with self._sending:
      self._write(message)

  def _write(self, message: Mapping[str, Any]) -> None:
    if self._process is not None and self._process.stdin is not None:
      try:
        os.write(self._process.stdin.fileno(), orjson.dumps(message) + b"\n")
      except OSError:
        pass  # It has ended, or hangs.

  def _direct(self, order: dict[str, Any]) -> None:
    """Sends an order to this uploader, or to the next one if it ends."""
    self._order = order
    self._tell(order)

  def _receive(self, message: Mapping[str, Any]) -> None:
    if "log" in message:
      _LOG.log(message["level"], "%s", message["log"])
    elif "lost" in message:
      # They are kept again with the next episode that shows them.
      self._known_images.difference_update(message["lost"])
    elif "acked" in message:
      with self._changed:
        self._uploaded = message
        self._changed.notify_all()
    elif "error" in message:
      self._problem = ValueError(message["error"])
    elif "ready" in message and self._process is not None:
      self.pid = self._process.pid
      self._problem = None
      self._complaints.over("uploader")
      self._started.set()

  def _end(self, timeout_s: float) -> None:
    """Waits for the uploader to end, and kills it when time runs out."""
    self._supervisor.join(timeout_s)
    self._finished.set()
    with self._sending:
      if self._process is not None:
        self._process.kill()
    self._supervisor.join(_GRACE_S)

  def _report(self, pending: int) -> None:
    """Reports this process's counters to the uploader."""
    at, previous = self._reported
    counters = dict(self._counters)
    now = time.monotonic()
    if counters == previous and now - at < _REPORT_S:
      return
    self._reported = now, counters
    self._tell({"counters": {
        **counters, "pending": pending, "spool_bytes": self._spool.bytes,
    }})  # fmt: skip
