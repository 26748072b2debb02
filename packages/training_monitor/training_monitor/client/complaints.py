"""Logs each problem once, until it is over, and all losses at the end."""

from __future__ import annotations

import logging
import threading
from typing import Mapping

_LOG = logging.getLogger(__name__)
_LOSSES = ("dropped", "dead", "failed", "damaged", "images_missing")


class Complaints:
  """Thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self._known: set[str] = set()

  def complain(self, what: str, message: str) -> None:
    """Logs a message, unless this problem was logged already."""
    with self._lock:
      if what in self._known:
        return
      self._known.add(what)
    _LOG.warning("%s", message)

  def over(self, prefix: str) -> None:
    """Forgets the problems whose names begin with `prefix`."""
    with self._lock:
      self._known = {k for k in self._known if not k.startswith(prefix)}

  def report_losses(self, counters: Mapping[str, int]) -> None:
    """Logs counters of what the monitor did not receive, if there is any."""
    lost = {k: v for k, v in counters.items() if v and k.startswith(_LOSSES)}
    if lost:
      _LOG.warning("the monitor did not receive everything: %s", lost)
