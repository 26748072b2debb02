"""Decides when the engine's next round starts, and with which requests.

A round that starts at once leaves the first request alone in its batch; one
that waits for long holds up the requests that have come. In lockstep a batch
waits for all open sessions.

Promises: a lockstep batch follows from its requests, their order, and the
sessions that earlier batches have left open; when requests and releases arrive
changes nothing.

Synchronous and single-threaded: the engine's.
"""

from __future__ import annotations

import time

from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import scheduler as scheduler_lib

_MOST_WAITS = 10  # Of `admission_wait_s`, from a round's oldest request on.


class RoundTimer:
  """Times the rounds of a scheduler.

  Attributes:
    last_arrival: `time.monotonic()` of the newest request.
    paused: no round starts.
  """

  def __init__(
      self,
      scheduler: scheduler_lib.Scheduler,
      config: config_lib.EngineConfig,
  ):
    self.last_arrival = 0.0
    self.paused = False
    self._scheduler = scheduler
    self._config = config
    self._lockstep = config.is_lockstep

  def wait_time(self) -> float | None:
    """Seconds until the next round may start; None: not before news."""
    slots = self._scheduler.slots
    if self.paused:
      return None
    if self._scheduler.busy:
      return 0.0
    if not slots.waiting:
      return None
    now = time.monotonic()
    if not self._lockstep:
      # Where a session is new, more of them may be about to open.
      enough = slots.size
      if all(slots.sessions[r.session].length for r in slots.waiting):
        enough = min(enough, len(slots.sessions))
      if len(slots.waiting) >= enough:
        return 0.0
      # While they keep coming: those of one round often answer together.
      wait = self._config.admission_wait_s
      latest = slots.waiting[0].submitted + _MOST_WAITS * wait
      return min(latest, self.last_arrival + wait) - now
    if self._batch_waits():
      return 0.0
    if all(s.request is not None for s in slots.sessions.values()):
      return 0.0
    return self.last_arrival + self._config.max_wait_s - now

  def start_lockstep_batch(self) -> None:
    """Makes the waiting requests the next batch, in session order."""
    scheduler = self._scheduler
    slots = scheduler.slots
    if scheduler.busy or self._batch_waits():
      return
    if any(s.request is None for s in slots.sessions.values()):
      scheduler.counters.lockstep_timeouts += 1
    batch = sorted(
        slots.waiting, key=lambda r: slots.sessions[r.session].order
    )
    slots.start_batch(batch)

  def _batch_waits(self) -> bool:
    """Returns whether requests of the present batch still wait."""
    slots = self._scheduler.slots
    return any(r in slots.waiting for r in slots.batch or ())
