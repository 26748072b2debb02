"""Declares the settings of the Training Monitor: a run's section `monitor`.

The run, the event log, the uploader process, the spool and the embedded server
take `MonitorConfig` unchanged.

Does not: import SQLAlchemy or JAX; a trainer and its uploader import this.
"""

from __future__ import annotations

from typing import Iterator

from . import run_tags as tags_lib
from . import settings

_setting = settings.setting
TOKEN_VARIABLE = "TUNIX_MONITOR_TOKEN"
START_S = 60.0
"""Deadline for the uploader process, and for the embedded server, to start."""
SERVER_NICENESS = 19
"""CPU priority of the embedded server: it takes only idle CPU."""


@settings.settings
class MonitorConfig:
  """The Training Monitor: records a run in a database with a dashboard."""

  url: str = _setting(
    default="",
    doc="Server that the run is sent to, http(s)://host:port; its token is"
    " $TUNIX_MONITOR_TOKEN. Left out: $TUNIX_MONITOR_URL, unless"
    ' monitor.embedded. "" = none.',
  )
  embedded: bool = _setting(
    default=False,
    doc="Start the run's own server on this machine, which ends with the run,"
    " and print its URL.",
  )
  database: str = _setting(
    default="",
    doc='SQLite file of the embedded server. "" = monitor.db in run.dir.',
  )
  tags: tuple[str, ...] = _setting(
    default=(),
    doc="Tags that the run is found by. A start adds them to those that it"
    " has.",
  )
  images: bool = _setting(
    default=True, doc="Send the screenshots' pixels, too."
  )
  entropies: bool = _setting(
    default=True,
    doc="Record each sampled token's entropy; only the in-process engine can."
    " Compiled into its programs when a monitor is on.",
  )
  timeout_s: float = _setting(
    default=30.0, doc="Deadline of a request to the server.", unit="s", gt=0
  )
  close_timeout_s: float = _setting(
    default=15.0,
    doc="When the run ends, undelivered events are sent for this long, at"
    " most 5 s where it was killed; the rest waits for the next run in"
    " run.dir.",
    unit="s",
    ge=0,
  )
  heartbeat_s: float = _setting(
    default=15.0,
    doc="Without anything to send, the run reports that it is alive this"
    " often. The dashboard calls a run silent after a minute.",
    unit="s",
    gt=0,
    le=60,
  )
  spool_mb: float = _setting(
    default=2048.0,
    doc="Disk for the log of undelivered events and their screenshots; more"
    " is dropped and counted.",
    unit="MiB",
    gt=0,
  )
  max_pending: int = _setting(
    default=4096,
    doc="Events held in memory before they are in the log, a quarter of a"
    " second as a rule; more are dropped and counted.",
    unit="events",
    ge=1,
  )

  @property
  def on(self) -> bool:
    """Whether the run is recorded."""
    return bool(self.url or self.embedded)

  @property
  def spool_bytes(self) -> int:
    return int(self.spool_mb * (1 << 20))

  def problems(self) -> Iterator[str]:
    if self.url and self.embedded:
      yield (
        f"monitor.url={self.url} is one monitor and monitor.embedded=true"
        " another; give one of them"
      )
    if self.url and not self.url.startswith(("http://", "https://")):
      yield f"monitor.url={self.url!r}: give http://host:port or https://host"
    if self.database and not self.embedded:
      yield (
        f"monitor.database={self.database} is of the embedded server; set"
        " monitor.embedded=true, or leave it empty"
      )
    try:
      tags_lib.clean_all(self.tags)
    except ValueError as error:
      yield f"monitor.tags={list(self.tags)}: {error}"
