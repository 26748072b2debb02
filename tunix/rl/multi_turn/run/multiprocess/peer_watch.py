"""Watches for notes of the other processes, beside whatever this one does.

A stop that one process was asked for becomes a stop of all, also of processes
that wait for episodes. Where a process failed by itself, the others may hang
in a program of all devices, which no exception ends: they exit, with the
reason, instead of waiting for the heartbeat.

Promises: a stop arrives within seconds; a process that does not end by itself
within the grace after another one's failure is ended.

Does not: notice a process that was killed; JAX's heartbeat does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Callable

from tunix.rl.multi_turn.net import peers as peers_lib

_LOG = logging.getLogger(__name__)
POLL_S = 1.0
GRACE_S = 10.0
"""In which a process may end by itself after another one failed."""


class PeerWatch:
  """A thread; see the module docstring. Without other processes it does not
  start."""

  def __init__(
    self,
    processes: peers_lib.Peers,
    stop: threading.Event,
    *,
    poll_s: float = POLL_S,
    grace_s: float = GRACE_S,
    end: Callable[[int], object] = os._exit,
  ):
    """Args:

    processes: Processes of the run.
    stop: the run's; announced when it is set, and set when it is announced.
    poll_s: seconds between two looks.
    grace_s: see `GRACE_S`.
    end: ends this process with a status, from any thread.
    """
    self._processes = processes
    self._stop = stop
    self._poll_s = poll_s
    self._grace_s = grace_s
    self._end = end
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    if self._processes.count > 1:
      self._thread = threading.Thread(
        target=self._run, name="tunix-peers", daemon=True
      )
      self._thread.start()

  def close(self) -> None:
    """Ends the watch, but not the grace once a process has failed."""
    self._closed.set()

  def _run(self) -> None:
    while not self._closed.wait(self._poll_s):
      try:
        self._pass_stop()
        failed = self._processes.announced(peers_lib.FAILED)
      except Exception as error:  # pylint: disable=broad-except
        # JAX's client has one class for all errors; a lost service it
        # reports, and ends the process, by itself.
        _LOG.warning("notes of other processes cannot be read: %s", error)
        return
      if failed:
        for process, text in failed.items():
          print(
            f"error: process {process} failed: {text}; this process ends"
            " with it, resume from the newest checkpoint",
            file=sys.stderr,
            flush=True,
          )
        threading.Event().wait(self._grace_s)
        self._processes.announce(peers_lib.ENDED)
        self._end(1)
        return

  def _pass_stop(self) -> None:
    if self._stop.is_set():
      self._processes.announce(peers_lib.STOP)
    elif stops := self._processes.announced(peers_lib.STOP):
      print(
        f"\nprocess {min(stops)} was asked to stop: stopping after this step"
        " and saving",
        file=sys.stderr,
        flush=True,
      )
      self._stop.set()
