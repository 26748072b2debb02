"""Turns a cloud's notice that a machine will be taken away into a stop.

Google Compute Engine, whose TPU VMs too, announces both kinds in the machine's
metadata: `instance/preempted` becomes TRUE some 30 s before a spot machine is
stopped, and `instance/maintenance-event` TERMINATE_ON_HOST_MAINTENANCE up to an
hour before a host is serviced. A live migration needs no stop.

SLURM announces by a signal (`--signal=USR1@300`), and Kubernetes by SIGTERM:
`train` handles those.

Promises: a notice stops the run as Ctrl-C does, after the present step and with
a checkpoint, on every host of the run (`peer_watch`). A metadata server that
does not answer costs nothing but a warning.

Does not: run where there is no such server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import sys
import threading

from tunix.rl.multi_turn.core import http

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
