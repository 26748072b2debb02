"""Keeps a run's collectors alive: starts them, and again when they end.

Promises: a collector's groups are lent again once it is known to have
ended; one that ends is started again after a pause, which doubles while it
delivers nothing, and `restarts` times at most without a group; the others go
on. One that no node has room for is reported after `place_s`. When all are
given up, or none has found room in that time, and no other collector has
joined, every group fails with the reason, which ends the run.

Does not: know what a collector runs on (`Launcher` does).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Callable, Protocol

from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_LONGEST_PAUSE_S = 60.0


class FleetFailed(RuntimeError):
  """All collectors of a run are gone for good."""


class Launcher(Protocol):
  """Starts collectors; calls come from one thread."""

  def start(self, name: str) -> None:
    """Starts the collector of that name; does not wait for it."""
    ...

  def ended(self) -> dict[str, str]:
    """The collectors that have ended since the last call, by name: the reason,
    "" where there is none."""
    ...

  def waiting(self) -> set[str]:
    """The collectors that no node has had room for, at the last call of
    `ended`."""
    ...

  def room(self) -> str:
    """Describes what a collector claims and what the cluster has."""
    ...


@dataclasses.dataclass
class _Place:
  """One of the collectors that a run wants.

  Attributes:
    number: Number of the place.
    name: Name of its latest collector.
    runs: whether that has not ended.
    since: Time of that collector's start.
    waits: whether it was reported that no node has room for it.
    due: Time of the next start.
    failures: ends in a row without a group.
    reason: Reason of the latest end.
    given_up: no other is started.
  """

  number: int
  name: str = ""
  runs: bool = False
  since: float = 0.0
  waits: bool = False
  due: float = 0.0
  failures: int = 0
  reason: str = ""
  given_up: bool = False


class Supervisor:
  """See the module docstring.

  Attributes:
    starts: how many collectors were started.
  """

  def __init__(
      self,
      launcher: Launcher,
      book: leases_lib.LeaseBook,
      config: run_sections.FleetConfig,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._launcher = launcher
    self._book = book
    self._config = config
    self._clock = clock
    self._places = [_Place(number) for number in range(config.collectors)]
    self._stop = threading.Event()
    self._failed = False
    self._thread = threading.Thread(
        target=self._run, name="tunix-fleet", daemon=True
    )
    self.starts = 0

  @property
  def running(self) -> int:
    """Collectors that were started and have not ended."""
    return sum(place.runs for place in self._places)

  def start(self) -> None:
    self._thread.start()

  def close(self, timeout_s: float = 30.0) -> None:
    """Ends the thread; collectors end with their launcher. Idempotent."""
    self._stop.set()
    if self._thread.ident is not None:
      self._thread.join(timeout_s)

  def step(self) -> None:
    """Looks at each collector once."""
    ended = self._launcher.ended()
    for place in self._places:
      if place.runs:
        if place.name in ended:
          self._ended(place, ended[place.name])
      elif not place.given_up and self._clock() >= place.due:
        self.starts += 1
        place.name = f"collector-{place.number}-{self.starts}"
        self._launcher.start(place.name)
        place.runs, place.since, place.waits = True, self._clock(), False
    self._look_for_room()
    if all(place.given_up for place in self._places) and not self._failed:
      if not self._book.hosts():
        self._failed = True
        self._book.fail(FleetFailed(self._why()))

  def _look_for_room(self) -> None:
    """Reports collectors that wait for a node; ends the run if all do."""
    waiting = self._launcher.waiting()
    due = self._clock() - self._config.place_s
    new = False
    for place in self._places:
      late = place.runs and place.name in waiting and place.since < due
      new |= late and not place.waits
      place.waits = late
    if new:
      _LOG.warning("%s", self._no_room())
    if (
        any(place.waits for place in self._places)
        and all(place.waits or place.given_up for place in self._places)
        and not self._book.hosts()
        and not self._failed
    ):
      self._failed = True
      self._book.fail(FleetFailed(self._no_room()))

  def _no_room(self) -> str:
    count = sum(place.waits for place in self._places)
    return (
        f"{count} of {len(self._places)} collectors have waited for a node for"
        f" fleet.place_s={self._config.place_s:g} s: {self._launcher.room()};"
        " claim less (fleet.cpus, fleet.memory, fleet.resources), lower"
        " fleet.collectors, or add nodes"
    )

  def _ended(self, place: _Place, reason: str) -> None:
    place.runs, place.reason = False, reason or "it ended by itself"
    self._book.lose(place.name)
    delivered = self._book.finished[place.name] > 0
    place.failures = 0 if delivered else place.failures + 1
    if place.failures > self._config.restarts:
      place.given_up = True
      _LOG.warning("%s is given up: %s", place.name, place.reason)
      return
    pause = min(
        _LONGEST_PAUSE_S,
        self._config.backoff_s * 2 ** max(0, place.failures - 1),
    )
    place.due = self._clock() + pause
    _LOG.warning(
        "%s ended and is started again in %g s: %s",
        place.name, pause, place.reason,
    )  # pyformat: disable

  def _why(self) -> str:
    last = self._places[-1]
    return (
        f"all {len(self._places)} collectors were given up after"
        f" fleet.restarts={self._config.restarts} ends without a group; the"
        f" last one: {last.reason}"
    )

  def _run(self) -> None:
    try:
      while not self._stop.wait(_POLL_S):
        self.step()
    except Exception as error:  # pylint: disable=broad-except
      # The launcher's own failure: no process would collect any more.
      _LOG.exception("the fleet cannot be looked after any more")
      self._book.fail(FleetFailed(f"{type(error).__name__}: {error}"))
