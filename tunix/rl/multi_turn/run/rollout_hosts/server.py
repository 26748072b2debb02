"""Serves a run's leases and weights to its rollout hosts over HTTP.

    GET  /run                    the run's settings
    POST /lease                  the next group to collect, waits for one
    POST /leases/{number}        its collected group
    POST /beat                   a host lives; answers what it must know
    GET  /weights/{serial}       safetensors of the newest weights, or a range

Where several processes learn, each lends its own groups, all give one version
of the weights the same serial number, and process 0 alone serves the file.

Promises: every route needs the token; a body is bounded; a bad request is one
line and harms no lease.

Does not: run anything itself.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import json
import pathlib
import secrets
import time
from typing import Any, Awaitable, Callable, Iterator, TYPE_CHECKING
import zlib

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import request_bodies
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import messages

if TYPE_CHECKING:
  from starlette import requests

_WAIT_S = 5.0  # For a lease, before a host asks again.
_LOOK_S = 0.5  # Whether it is still there, and the run.
_BEAT_S = 0.5
_CHUNK_BYTES = 1 << 20  # Of weights; 64 KiB take seven times the CPU.
_CALLS = 400  # Beats a second of all hosts, and asks for leases, at most.
_SMALL = 1 << 20


@contextlib.contextmanager
def opening(
  config: config_lib.TrainConfig, via: str, fix: str
) -> Iterator[None]:
  """Words the errors of opening a run's server.

  Args:
    config: Settings of the run.
    via: The setting that needs the server.
    fix: What to do where a package is not installed.

  Raises:
    ConfigError: a package is not installed, or the address is taken.
  """
  try:
    yield
  except ImportError as error:
    raise config_lib.ConfigError([f"{via}: {error}; {fix}"]) from None
  except ValueError as error:
    where = config.rollout
    raise config_lib.ConfigError(
      [f"rollout.host={where.host}, rollout.port={where.port}: {error}"]
    ) from None


class LeaseRoutes:
  """The routes, of a server of their own or beside others.

  Attributes:
    token: Token that clients present.
    app: the ASGI application.
    serial: Serial number of the newest weights; it grows over restarts, too.
    version: Version of the newest weights.
    ended: whether players are to learn that the run has.
  """

  def __init__(
    self,
    book: leases_lib.LeaseBook,
    images: images_lib.ImageStore,
    settings: dict[str, Any],
    *,
    token: str = "",
    needs_weights: bool = True,
    relent: Callable[[leases_lib.Lease], Awaitable[None]] | None = None,
  ):
    """Args:

      book: Leases of the groups.
      images: receives the groups' screenshots.
      settings: The run's settings, JSON.
      token: "" makes one.
      needs_weights: nothing is lent before weights are published.
      relent: awaited before a lease is lent that was lent before.

    Raises:
      ImportError: a package of the extra `serve` is not installed.
    """
    from starlette import applications  # pylint: disable=g-import-not-at-top
    from starlette import responses  # pylint: disable=g-import-not-at-top
    from starlette import routing  # pylint: disable=g-import-not-at-top

    self.token = token or secrets.token_urlsafe(32)
    # Above all of a learner that this one follows, whose hosts may come.
    self.serial = time.time_ns() // 1000
    self.version = 0
    self.ended = False
    self._weights: pathlib.Path | None = None
    self._ready = not needs_weights
    self._relent = relent
    self._book = book
    self._images = images
    self._settings = settings
    self._responses = responses
    self._loop: asyncio.AbstractEventLoop | None = None
    self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
    book.on_waiting(self._call)
    self.app = applications.Starlette(
      routes=[
        routing.Route(path, self._guarded(handler), methods=[method])
        for method, path, handler in (
          ("GET", "/run", self._run),
          ("POST", "/lease", self._lease),
          ("POST", "/leases/{number:int}", self._collected),
          ("POST", "/beat", self._beat),
          ("GET", "/weights/{serial:int}", self._send_weights),
        )
      ]
    )

  def publish(self, version: int, weights: pathlib.Path | None) -> None:
    """Makes a file of weights the newest; None where another serves it."""
    self._weights, self.version = weights, version
    self.serial += 1
    self._ready = True
    self._call(all_of_them=True)

  def end(self) -> None:
    """Tells players that the run has ended; waits for them a little."""
    self.ended = True
    self._call(all_of_them=True)
    due = time.monotonic() + self._pause(2.0)
    while self._book.hosts() and time.monotonic() < due:
      time.sleep(0.1)

  # --- routes ----------------------------------------------------------------

  def _guarded(self, handler: Callable[..., Any]) -> Any:
    async def answer(request: requests.Request) -> Any:
      header = request.headers.get("authorization", "")
      if not hmac.compare_digest(
        header.encode(), f"Bearer {self.token}".encode()
      ):
        return self._refused(401, "give the token of the run's rollout.json")
      return await handler(request)

    def failed(error: Exception) -> Any:
      if isinstance(error, request_bodies.BodyRefused):
        return self._refused(error.status, str(error))
      if isinstance(
        error, (ValueError, KeyError, TypeError, AttributeError, zlib.error)
      ):
        text = f"{type(error).__name__}: {error}"
        return self._refused(400, f"the request is malformed ({text[:200]})")
      raise error

    return http_server.guarded(answer, failed, lambda *_: None)

  def _refused(self, status: int, text: str) -> Any:
    return self._responses.JSONResponse({"detail": text}, status)

  def _json(self, data: object) -> Any:
    return self._responses.JSONResponse(data)

  async def _body(self, request: requests.Request, most: int) -> dict[str, Any]:
    raw = await request_bodies.read(request, most)
    body = await asyncio.to_thread(json.loads, raw)
    if not isinstance(body, dict) or not isinstance(body["host"], str):
      raise ValueError("an object with the name of the host is needed")
    return body

  async def _run(self, request: requests.Request) -> Any:
    del request
    return self._json(self._settings)

  async def _lease(self, request: requests.Request) -> Any:
    body = await self._body(request, _SMALL)
    host = body["host"]
    wait = min(max(0.0, float(body.get("wait_s", _WAIT_S))), _WAIT_S)
    self._loop = asyncio.get_running_loop()
    due = time.monotonic() + self._pause(wait)
    while not self.ended:
      if await request.is_disconnected():
        self._wake()  # It was perhaps this one that was called.
        break
      if self._ready and (lease := self._book.take(host)) is not None:
        if lease.lent > 1 and self._relent is not None:
          await self._relent(lease)
        return self._json({"number": lease.number, "order": lease.order})
      if time.monotonic() > due:
        break
      called = self._loop.create_future()
      self._waiters.append(called)
      await asyncio.wait([called], timeout=self._pause(_LOOK_S))
      if not called.done():
        called.cancel()
    return self._json({})

  def _call(self, all_of_them: bool = False) -> None:
    """Wakes the host that has waited longest, or all. From any thread."""
    loop = self._loop
    if loop is not None and not loop.is_closed():
      loop.call_soon_threadsafe(self._wake, all_of_them)

  def _wake(self, all_of_them: bool = False) -> None:
    while self._waiters:
      waiter = self._waiters.popleft()
      if not waiter.done():
        waiter.set_result(None)
        if not all_of_them:
          return

  def _pause(self, least: float) -> float:
    """Seconds between two calls of a host: more where there are many."""
    pause_s = self._book.host_count / _CALLS
    return max(least, min(pause_s, self._book.silence_s / 5))

  async def _collected(self, request: requests.Request) -> Any:
    body = await self._body(request, messages.MAX_GROUP)
    faults = [tuple(map(str, fault)) for fault in body["faults"]]
    group = await asyncio.to_thread(
      messages.read_group, body["collected"], self._images
    )
    number = request.path_params["number"]
    accepted = self._book.finish(number, body["host"], (group, faults))
    return self._json({"taken": accepted})

  async def _beat(self, request: requests.Request) -> Any:
    body = await self._body(request, _SMALL)
    stats = {str(k): float(v) for k, v in body["stats"].items()}
    numbers = [int(n) for n in body["leases"]]
    if body.get("leaving"):
      self._book.lose(body["host"])
      return self._json({})
    return self._json(
      {
        "serial": self.serial if self._weights else 0,
        "bytes": self._weights.stat().st_size if self._weights else 0,
        "version": self.version,
        "withdrawn": self._book.beat(body["host"], numbers, stats),
        "ended": self.ended,
        "pause_s": self._pause(_BEAT_S),
      }
    )

  async def _send_weights(self, request: requests.Request) -> Any:
    file = self._weights
    if file is None or request.path_params["serial"] != self.serial:
      return self._refused(404, f"the newest weights are {self.serial}")
    answer = self._responses.FileResponse(file)
    answer.chunk_size = _CHUNK_BYTES
    return answer


class RolloutServer(LeaseRoutes):
  """The routes on a server of their own, in a thread.

  Attributes:
    url: Address of the server.
  """

  def __init__(self, *args: Any, host: str, port: int, **options: Any):
    """Args:

      *args, **options: of `LeaseRoutes`.
      host, port: that it binds; port 0 is any free one.

    Raises:
      ImportError: a package of the extra `serve` is not installed.
      ValueError: the address is taken.
    """
    super().__init__(*args, **options)
    self._server = http_server.LoopbackServer(self.app, host=host, port=port)
    self.url = self._server.url

  def start(self) -> None:
    self._server.start()

  def close(self, notify: bool = True) -> None:
    """Shuts the server down.

    Args:
      notify: Whether to tell the hosts first that the run has ended.
    """
    if notify:
      self.end()
    self._server.close()
