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
from typing import Any, Callable, Mapping

import orjson

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import event_codec
from training_monitor.client import event_types
from training_monitor.client import ingest_rows
from training_monitor.client import live_turns
from training_monitor.client import run_rows
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_writer
from training_monitor.core import events
from training_monitor.core import images as images_lib
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.core import trajectory as trajectory_lib

_LOG = logging.getLogger(__name__)
_MAX_KNOWN_IMAGES = 100_000
_GRACE_S = 10.0
_REPORT_S = 5.0
_MAX_BACKOFF_S = 60.0
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
    self._uploaders: Mapping[str, int] = {}
    """Counters of the uploader, as of its last answer."""
    self._complaints = complaints_lib.Complaints()
    self._changed = threading.Condition()
    self._requests: dict[int, dict[str, Any]] = {}
    self._answers: dict[int, bool] = {}
    self._last_request = 0
    self._reported: tuple[float, dict[str, int]] = (0.0, {})
    self._closing = threading.Event()
    self._finished = threading.Event()
    self._delivered = False
    self._spool = spool_lib.Spool(
        pathlib.Path(run.spool_dir) / f"{run.name}{spool_lib.SUFFIX}",
        run.target or run.url.rstrip("/"),
        run=run.facts(),
        images=images is not None,
        max_bytes=config.spool_bytes,
    )
    self._begin = {
        "spool": str(self._spool.path), "url": run.url, "token": run.token,
        "config": dataclasses.asdict(config),
    }  # pyformat: disable
    try:
      self._uploader = self._start()
    except (OSError, ValueError):
      spool_lib.remove(self._spool.path)
      self._spool.close()
      raise
    self._writer = spool_writer.SpoolWriter(
        self._spool, self._record, max_pending=config.max_pending,
        counters=self._counters, complaints=self._complaints,
        on_tick=self._report,
    )  # pyformat: disable
    self._supervisor = threading.Thread(
        target=self._supervise, name="monitor-uploader", daemon=True
    )
    self._supervisor.start()

  @property
  def pid(self) -> int:
    """Process id of the uploader."""
    return self._uploader.pid

  @property
  def dropped(self) -> int:
    """Events that there was no room for."""
    return self._counters["dropped_memory"] + self._counters["dropped_disk"]

  @property
  def counters(self) -> collections.Counter[str]:
    """Counters of both processes; the uploader's as of its last answer."""
    return self._counters + collections.Counter(self._uploaders)

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
    return self._writer.flush(timeout_s) and self._request(
        "drain", deadline - time.monotonic()
    )

  def close(self) -> bool:
    """Delivers for `close_timeout_s`; the spool keeps the rest. Idempotent.

    Returns:
      Whether everything was delivered.
    """
    if self._closing.is_set():
      return self._delivered
    self._closing.set()
    allowed = self._config.close_timeout_s + _GRACE_S
    deadline = time.monotonic() + allowed
    flushed = self._writer.close(allowed / 2)
    delivered = self._request("close", deadline - time.monotonic())
    self._delivered = flushed and delivered
    self._finished.set()
    self._uploader.end(max(1.0, deadline - time.monotonic()))
    self._supervisor.join(_GRACE_S)
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

  def _start(self) -> _UploaderProcess:
    """Raises ValueError or OSError."""
    return _UploaderProcess(
        self._begin, self._config, self._spool.lock.fileno(), self._receive
    )

  def _supervise(self) -> None:
    """Replaces an uploader that ends before it is asked to."""
    failures = 0
    while True:
      self._uploader.ended.wait()
      if self._finished.is_set():
        self._uploader.release()
        return
      if not failures:
        _LOG.warning(
            "the monitor's uploader has ended; it is restarted, and training"
            " continues"
        )
        self._uploader.release()
      failures += 1
      self._finished.wait(min(_MAX_BACKOFF_S, 0.25 * 2 ** min(failures, 10)))
      if self._finished.is_set():
        return
      try:
        self._uploader = self._start()
      except (OSError, ValueError) as error:
        self._complaints.complain(
            "uploader", f"the monitor's uploader does not start: {error}"
        )
        continue
      if self._finished.is_set():
        self._uploader.end(0.0)
      failures = 0
      self._complaints.over("uploader")
      self._spool.measure()
      self._reported = (0.0, {})
      with self._changed:
        for request in self._requests.values():
          self._uploader.tell(request)

  def _request(self, what: str, wait_s: float) -> bool:
    """Asks the uploader to deliver the present records; returns its answer."""
    wait_s = max(0.0, wait_s)
    with self._changed:
      self._last_request += 1
      number = self._last_request
      request = self._requests[number] = {
          what: number, "through": self._spool.seq,
          "timeout_s": min(wait_s, self._config.close_timeout_s)
          if what == "close"
          else wait_s,
      }  # pyformat: disable
      self._uploader.tell(request)
      self._changed.wait_for(lambda: number in self._answers, wait_s)
      del self._requests[number]
      return self._answers.pop(number, False)

  def _receive(self, message: Mapping[str, Any]) -> None:
    """Handles a message of the uploader, on the listening thread."""
    if "lost" in message:
      # They are kept again with the next episode that shows them.
      self._known_images.difference_update(message["lost"])
    elif "freed" in message:
      self._spool.free(message["freed"])
    elif "answer" in message:
      if message["closed"]:
        self._finished.set()
      with self._changed:
        self._uploaders = message["counters"]
        self._answers[message["answer"]] = bool(message["done"])
        self._changed.notify_all()

  def _report(self, pending: int) -> None:
    """Reports this process's counters to the uploader."""
    at, previous = self._reported
    counters = dict(self._counters)
    now = time.monotonic()
    if counters == previous and now - at < _REPORT_S:
      return
    self._reported = now, counters
    self._uploader.tell({"counters": {
        **counters, "pending": pending,
        "spool_bytes": self._spool.bytes,
    }})  # pyformat: disable


class _UploaderProcess:
  """One uploader process."""

  def __init__(
      self,
      begin: Mapping[str, Any],
      config: settings_lib.MonitorConfig,
      lock: int,
      on_message: Callable[[Mapping[str, Any]], None],
  ):
    """Starts it and waits for its first line.

    Args:
      begin: its first line.
      config: its niceness, and how long it may take to start.
      lock: file descriptor of the spool's lock, which it holds, too.
      on_message: receives its messages, but those about its start and its log.

    Raises:
      ValueError: it refuses; its reason.
      OSError: it does not start, or does not answer.
    """
    self._process = subprocess.Popen(
        [sys.executable, "-P", "-m", "training_monitor", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(lock,),
        # Ctrl-C is for the run. A session of its own would make its niceness
        # meaningless, see `run.monitor`.
        process_group=0,
    )
    stdin, stdout = self._process.stdin, self._process.stdout
    assert stdin is not None and stdout is not None
    self._stdin, self._stdout = stdin, stdout
    self.pid = self._process.pid
    self.ended = threading.Event()
    """Set once it has ended, and all of its messages are received."""
    self._on_message = on_message
    self._lock = threading.Lock()
    self._started = threading.Event()
    self._first: Mapping[str, Any] = {}
    if hasattr(os, "setpriority"):
      try:
        os.setpriority(os.PRIO_PROCESS, self.pid, config.uploader_niceness)
      except OSError:
        pass
    os.set_blocking(self._stdin.fileno(), False)
    threading.Thread(
        target=self._listen, name="monitor-uploader-output", daemon=True
    ).start()
    self.tell(begin)
    self._started.wait(config.start_timeout_s)
    if not self._first or "error" in self._first:
      self.end(_GRACE_S if self._first else 0.0)
      self.release()
      if not self._first:
        raise OSError("the monitor's uploader did not start")
      raise ValueError(self._first["error"])

  def tell(self, message: Mapping[str, Any]) -> None:
    """Sends it a line, without waiting; one that has ended gets none."""
    with self._lock:
      try:
        os.write(
            self._stdin.fileno(), orjson.dumps(message) + b"\n"
        )
      except (OSError, ValueError):
        pass

  def _listen(self) -> None:
    for line in self._stdout:
      try:
        message = orjson.loads(line)
        if "log" in message:
          _LOG.log(message["level"], "%s", message["log"])
        elif self._started.is_set():
          self._on_message(message)
        else:
          self._first = message
          self._started.set()
      except (ValueError, TypeError, KeyError):
        _LOG.warning("%s", line.decode("utf-8", "replace").rstrip())
    self._started.set()
    self._process.wait()
    self.ended.set()

  def end(self, timeout_s: float) -> None:
    """Waits for the process to end, and kills it when time runs out."""
    if not self.ended.wait(timeout_s):
      self._process.kill()
      self.ended.wait(_GRACE_S)

  def release(self) -> None:
    """Closes its pipes, once it has ended."""
    with self._lock:
      for pipe in (self._stdin, self._stdout):
        try:
          pipe.close()
        except OSError:
          pass
