"""Turns Ctrl-C, SIGTERM and SIGUSR1 into a request to stop.

The second of a kind, Ctrl-C or SIGTERM, ends at once.

Does not: catch anything in another thread than the main one, where signals
cannot be handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import sys
import threading
from typing import Iterator

from tunix.rl.multi_turn.net import http

_LOG = logging.getLogger(__name__)
_HOST = "GCE_METADATA_HOST"
_DEFAULT_HOST = "metadata.google.internal"
_PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
_PATH = "computeMetadata/v1/instance"
_STOPPING = {
  "preempted": "TRUE",
  "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
}
POLL_S = 5.0
_ANSWER_S = 3.0
_GIVE_UP = 12  # Polls without an answer, a minute of them.


def metadata_host(mode: str) -> str:
  """host[:port] of the metadata server; "" where there is none.

  Args:
    mode: Value of `run.preemption`.
  """
  if mode == "off":
    return ""
  if host := os.environ.get(_HOST, ""):
    return host
  try:
    product = _PRODUCT.read_text(encoding="utf-8", errors="replace")
  except OSError:
    product = ""
  return _DEFAULT_HOST if mode == "gce" or "Google" in product else ""


class PreemptionWatch:
  """A thread; see the module docstring."""

  def __init__(
    self, mode: str, stop: threading.Event, *, poll_s: float = POLL_S
  ):
    """Args:

    mode: Value of `run.preemption`.
    stop: set at a notice.
    poll_s: seconds between two looks.
    """
    self._host = metadata_host(mode)
    self._stop = stop
    self._poll_s = poll_s
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    if self._host:
      self._thread = threading.Thread(
        target=lambda: asyncio.run(self._watch()),
        name="tunix-preemption",
        daemon=True,
      )
      self._thread.start()

  def close(self) -> None:
    self._closed.set()

  async def _watch(self) -> None:
    client = http.Http(headers={"Metadata-Flavor": "Google"})
    unanswered = 0
    try:
      while not (self._closed.is_set() or self._stop.is_set()):
        try:
          notice = await self._notice(client)
          unanswered = 0
        except http.CallError as error:
          notice, unanswered = "", unanswered + 1
          if unanswered == _GIVE_UP:
            _LOG.warning(
              "run.preemption: %s; notices of preemption are not seen. Set"
              " run.preemption=off where there is no metadata server",
              error,
            )
            return
        if notice:
          print(
            f"\nthis machine will be taken away ({notice}): stopping after"
            " this step and saving",
            file=sys.stderr,
            flush=True,
          )
          self._stop.set()
          return
        await asyncio.sleep(self._poll_s)
    finally:
      await client.aclose()

  async def _notice(self, client: http.Http) -> str:
    """The notice, as `name=value`; "" without one."""
    for name, value in _STOPPING.items():
      url = f"http://{self._host}/{_PATH}/{name}"
      answer = await client.call("GET", url, _ANSWER_S, limit=1 << 10)
      if answer.decode(errors="replace").strip().upper() == value:
        return f"{name}={value}"
    return ""


@contextlib.contextmanager
def asked(stop: threading.Event, announcement: str) -> Iterator[None]:
  """Sets `stop` at the first signal within the context.

  SIGUSR1 is a notice that SIGTERM follows (SLURM's, before it ends a job); the
  two are one request.

  Args:
    stop: Event that the stages poll.
    announcement: printed then.

  Raises:
    KeyboardInterrupt: at the second of a kind.
  """

  signals = set()

  def interrupt(signum, frame):
    del frame
    if signum in signals and signum != signal.SIGUSR1:
      signal.signal(signum, signal.SIG_DFL)
      raise KeyboardInterrupt
    print(
      f"\n{signal.Signals(signum).name}: {announcement}; press Ctrl-C again"
      " to quit at once",
      file=sys.stderr,
    )
    signals.add(signum)
    stop.set()

  before = {s: signal.signal(s, interrupt) for s in _signals()}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _signals() -> tuple[signal.Signals, ...]:
  if threading.current_thread() is not threading.main_thread():
    return ()
  return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
