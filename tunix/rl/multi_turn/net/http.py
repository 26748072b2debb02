"""Makes HTTP calls to untrusted servers, bounded in time and size.

Promises, whatever a server answers: a call ends within its deadline, all
attempts included, however slowly the answer drips; a request is sent once
unless its `RetryPolicy` repeats it, and never to where a redirect points; an
answer is not kept beyond `limit` bytes, and is not unpacked (a compressed one
was not asked for, and may be a bomb); every failure raises the client's kind of
`CallError`, in which credentials of the request's headers that the server
echoes are masked. JSON is sent as ASCII, so that any text a policy types can be
sent.

Does not: decide which calls may be repeated; the caller's policy does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import random
import re
import socket
import ssl
from typing import Any, Awaitable, Callable, Mapping, TypeVar
import urllib.parse

import httpx
import tenacity

from ..core import json_text
from . import concurrency

T = TypeVar("T")
MAX_BODY = 256 << 20
"""Bytes of an answer; the largest are screenshots as lists of numbers."""
_SECRET_HEADER = re.compile(r"auth|key|token|secret|cookie", re.I)
_SHORTEST_SECRET = 4  # Shorter ones are words of any text.
_MAX_FAILURE = 64 << 10  # Of an answer that is only to be quoted.
# Above these many bytes an answer is read in a thread.
_INLINE_BYTES = 1 << 15
_INLINE_JSON_BYTES = 1 << 18
_CONNECT_S = 10.0
"""Seconds that a cancelled call may still take to connect."""
_cancelled: set[asyncio.Task[Any]] = set()
"""Calls that end in the background; the event loop holds no task."""


@dataclasses.dataclass(frozen=True)
class HttpAnswer:
  """A server's answer.

  Attributes:
    status: HTTP's.
    headers: names in any case.
    content: the body, or the beginning of a failure's. What the request's
      headers held as credentials is masked in a failure's.
    secrets: Those credentials.
  """

  status: int
  headers: Mapping[str, str]
  content: bytes
  secrets: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)

  def excerpt(self, length: int) -> str:
    """The beginning of the body, credentials of the request masked."""
    return repr(_masked(self.content, self.secrets)[:length])

  @property
  def ok(self) -> bool:
    """Whether the request succeeded; a redirect did not."""
    return 200 <= self.status < 300

  def quoted(self, length: int = 500) -> str:
    """The failure, for people."""
    if 300 <= self.status < 400:
      where = self.headers.get("location", "")[:200]
      return f"{self.status} a redirect to {where!r}, which is not followed"
    return f"{self.status} {self.content.decode('utf-8', 'replace')[:length]}"


class CallError(RuntimeError):
  """A call has no answer, or none that can be used.

  Attributes:
    status: HTTP status, 0 without an answer.
    answer: the server's, None without one.
    late: whether the deadline ended the call.
    retry_after_s: pause that the server asks for, None without one.
  """

  answer: HttpAnswer | None = None
  late = False
  retry_after_s: float | None = None

  def __init__(self, message: str, status: int = 0):
    super().__init__(message)
    self.status = status

  @property
  def summary(self) -> str:
    """The error's type and status, without a word of the server's.

    For other people than those who chose the server: it may have echoed the
    key of the request.
    """
    kind = type(self).__name__
    if self.late:
      return f"{kind}: no answer within the deadline"
    if self.answer is None:
      cause = self.__cause__
      why = f" ({type(cause).__name__})" if cause is not None else ""
      return f"{kind}: no answer that can be used{why}"
    if 200 <= self.status < 300:
      return f"{kind}: the answer, of status {self.status}, cannot be used"
    return f"{kind}: the answer has status {self.status}"

  @property
  def full(self) -> bool:
    """Whether the server has no room now (429)."""
    return self.status == 429

  @classmethod
  def of(cls, error: CallError) -> CallError:
    """Converts `error` to this class; subclasses may pick a subclass."""
    call_error = cls(str(error), error.status)
    call_error.answer, call_error.late = error.answer, error.late
    call_error.retry_after_s = error.retry_after_s
    return call_error


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
  """Decides whether, when and how often a failed call is made again.

  A server that is full is asked on until the deadline: that passes when others
  let go, and is no failed try.

  Attributes:
    tries: attempts that may fail, the first included.
    wait: tenacity's strategy for the pause before the next attempt; a pause
      that the server asks for goes before.
    retry: tenacity's strategy for the failures that may pass.
    jitter: largest share added to a pause that the server asks for.
  """

  tries: int = 1
  wait: tenacity.wait.wait_base = tenacity.wait_none()
  retry: tenacity.retry_base = tenacity.retry_never
  jitter: float = 0.0

  async def run(
    self,
    attempt: Callable[[], Awaitable[T]],
    *,
    due: float = math.inf,
    before_sleep: Callable[[tenacity.RetryCallState], None] | None = None,
  ) -> T:
    """Awaits `attempt()`, retrying until it succeeds or may not be retried.

    Args:
      attempt: makes the call once.
      due: `loop.time()` until which a full server is asked again, however
        often; other failures count against `tries`.
      before_sleep: called before each pause.

    Raises:
      CallError, Exception: the last attempt's.
    """
    failures = 0

    def wait(state: tenacity.RetryCallState) -> float:
      error = _error_of(state)
      pause = error.retry_after_s if error is not None else None
      if pause is None:
        return self.wait(state)
      return pause * (1 + self.jitter * random.random())

    def stop(state: tenacity.RetryCallState) -> bool:
      nonlocal failures
      error = _error_of(state)
      if error is not None and error.full:
        now = asyncio.get_running_loop().time()
        return now + state.upcoming_sleep > due
      failures += 1
      return failures >= self.tries

    retrying = tenacity.AsyncRetrying(
      stop=stop,
      wait=wait,
      retry=tenacity.retry_any(_IS_FULL, self.retry),
      before_sleep=before_sleep,
      sleep=asyncio.sleep,
      reraise=True,
    )
    return await retrying(attempt)


def _error_of(state: tenacity.RetryCallState) -> CallError | None:
  error = state.outcome.exception() if state.outcome is not None else None
  return error if isinstance(error, CallError) else None


_IS_FULL = tenacity.retry_if_exception(
  lambda error: isinstance(error, CallError) and error.full
)


def address(url: object, name: str, example: str) -> str:
  """`url` without the slashes at its end.

  Raises:
    ValueError: no http(s) address that paths can be added to.
  """
  text = str(url)
  try:
    parts = urllib.parse.urlsplit(text)
    right = parts.scheme in ("http", "https") and bool(parts.hostname)
    right = right and parts.port != 0 and text.isprintable()
  except ValueError:  # A port beyond 65535, or half an IPv6 address.
    right = False
  if not right:
    raise ValueError(f"{name}={text!r} must be an address such as {example}")
  if parts.username is not None or parts.query or parts.fragment:
    raise ValueError(
      f"{name} must have no user, query or fragment, only what {example} has"
    )
  return text.rstrip("/")


def seconds_of(text: str | None) -> float | None:
  """A Retry-After, 60 s at most; None where it is none, or a date."""
  try:
    return min(max(0.0, float(text or "")), 60.0)
  except ValueError:
    return None


async def read(
  fn: Callable[[], T],
  size: int,
  seconds: float | None,
  what: str,
  inline_bytes: int = _INLINE_BYTES,
) -> T:
  """`fn()`, which reads `size` bytes; in a thread when these are many."""
  if size <= inline_bytes:
    return fn()
  return await concurrency.acall(fn, seconds=seconds, what=f"reading {what}")


async def send(
  client: httpx.AsyncClient, request: httpx.Request
) -> httpx.Response:
  """Sends a request; returns the answer before its body is read.

  httpcore never closes a connection whose request is cancelled when it is
  connected and not used yet. A call that is cancelled before that ends in the
  background, without sending anything.
  """
  begun = cancelled = False

  async def trace(event: str, info: object) -> None:
    nonlocal begun
    del info
    if event.endswith(".send_request_headers.started"):
      begun = True
      if cancelled:
        raise asyncio.CancelledError

  request.extensions = {**request.extensions, "trace": trace}
  task = asyncio.ensure_future(client.send(request, stream=True))
  try:
    return await asyncio.shield(task)
  except asyncio.CancelledError:
    cancelled = True
    _cancelled.add(task)
    task.add_done_callback(_end)
    if begun:
      task.cancel()
    else:
      asyncio.get_running_loop().call_later(_CONNECT_S, task.cancel)
    raise


def _end(task: asyncio.Task[httpx.Response]) -> None:
  """Closes what a cancelled call has opened."""
  _cancelled.discard(task)
  if not task.cancelled() and task.exception() is None:
    closing = asyncio.ensure_future(task.result().aclose())
    _cancelled.add(closing)
    closing.add_done_callback(_cancelled.discard)


class Http:
  """Keeps its connections between calls; belongs to one event loop."""

  def __init__(
    self,
    error: type[CallError] = CallError,
    *,
    headers: Mapping[str, str] | None = None,
    connect_s: float | None = None,
    proxies: bool = False,
    connections: int = 100,
    silence_s: float | None = None,
  ):
    """Args:

    error: raised for every failure, see `CallError.of`.
    headers: Headers of every call.
    connect_s: deadline of a connection, None for the call's own.
    proxies: Whether the service is on the web: a proxy that the environment
      names is used, and certificates of the web are.
    connections: open at a time; further calls wait.
    silence_s: Seconds after which a connection is given up whose other end
      acknowledges nothing; None for the system's, which may be hours. Not with
      `proxies`.
    """
    self._error = error
    self._headers = dict(headers or {})
    self._connect_s = connect_s
    self._proxies = proxies
    self._connections = connections
    self._silence_s = silence_s
    self._client: httpx.AsyncClient | None = None

  async def call(
    self, method: str, url: str, seconds: float | None, **request: Any
  ) -> bytes:
    """The body of a successful answer.

    Args:
      method, url: of the request.
      seconds: deadline of all of it, None when the caller has one.
      **request: `params` of the query; `body`, sent as JSON; `data` and
        `files` of a form; `headers`; `limit`, bytes of the answer; `retry`, a
        RetryPolicy (default: made once).

    Raises:
      CallError: An error of the client's class.
    """
    answer = await self._within(seconds, method, url, _keep, **request)
    return answer.content

  async def json(
    self, method: str, url: str, seconds: float | None, **request: Any
  ) -> Any:
    """The JSON of a successful answer; see `call`."""

    async def parse(answer: HttpAnswer) -> Any:
      raw = answer.content
      try:
        return await read(
          lambda: json_text.parse(raw),
          len(raw),
          seconds,
          "an answer",
          _INLINE_JSON_BYTES,
        )
      except ValueError as error:
        kind = answer.headers.get("content-type")
        wrong = CallError(
          f"{method} {url} answered with {kind}, not JSON"
          f" ({str(error).partition(':')[0][:80]}): {answer.excerpt(80)}",
          answer.status,
        )
        wrong.answer = answer
        raise wrong from None

    return await self._within(seconds, method, url, parse, **request)

  async def ask(
    self, method: str, url: str, seconds: float | None, **request: Any
  ) -> dict[str, Any]:
    """The JSON object of a successful answer; see `call`."""
    data = await self.json(method, url, seconds, **request)
    if not isinstance(data, dict):
      raise self._error(
        f"{method} {url} answered with no object of JSON, but a"
        f" {type(data).__name__}"
      )
    return data

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    client, self._client = self._client, None
    if client is not None:
      await client.aclose()

  async def _within(
    self,
    seconds: float | None,
    method: str,
    url: str,
    parse: Callable[[HttpAnswer], Awaitable[T]],
    *,
    retry: RetryPolicy | None = None,
    **request: Any,
  ) -> T:
    """Makes the call under its deadline, as often as `retry` makes it."""

    async def attempt() -> T:
      try:
        return await parse(await self._exchange(method, url, **request))
      except CallError as error:
        raise self._error.of(error) from error.__cause__

    try:
      async with asyncio.timeout(seconds) as scope:
        if retry is None:
          return await attempt()
        return await retry.run(attempt, due=scope.when() or math.inf)
    except TimeoutError:
      if not scope.expired():
        raise
      late = CallError(f"{method} {url} did not answer within {seconds:g} s")
      late.late = True
      raise self._error.of(late) from None

  async def _exchange(
    self,
    method: str,
    url: str,
    *,
    params: Mapping[str, Any] | None = None,
    body: object = None,
    data: Mapping[str, str] | None = None,
    files: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    limit: int = MAX_BODY,
  ) -> HttpAnswer:
    what = f"{method} {url}"
    sent = {**self._headers, **(headers or {}), "accept-encoding": "identity"}
    content = None
    if body is not None:
      try:
        content = json.dumps(body, allow_nan=False).encode("ascii")
      except ValueError as error:
        raise CallError(f"{what}: cannot be sent: {error}") from None
      sent["content-type"] = "application/json"
    if self._client is None:
      self._client = self._open(url)
    try:
      reply = await send(self._client, self._client.build_request(
          method, url, params=params, content=content, data=data,
          files=files, headers=sent,
      ))  # fmt: skip
      try:
        answer = await _received(reply, what, limit, _secrets(sent))
      finally:
        await reply.aclose()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
      raise CallError(
        f"{what} failed: {type(error).__name__}: {error}"
      ) from error
    if not answer.ok:
      failure = CallError(f"{what}: {answer.quoted()}", answer.status)
      failure.answer = answer
      failure.retry_after_s = seconds_of(answer.headers.get("retry-after"))
      raise failure
    return answer

  def _open(self, url: str) -> httpx.AsyncClient:
    # A pool of one's own: finding a connection in one that hundreds of
    # episodes share takes longer than the call.
    limits = httpx.Limits(
      max_connections=self._connections,
      max_keepalive_connections=max(20, self._connections // 10),
    )
    verify = url.startswith("https:") and _certificates(self._proxies)
    transport = None
    if self._silence_s is not None:
      transport = httpx.AsyncHTTPTransport(
        verify=verify,
        limits=limits,
        socket_options=_silence_options(self._silence_s),
      )
    return httpx.AsyncClient(
      # Deadlines are the calls', but a connection may have its own.
      timeout=httpx.Timeout(None, connect=self._connect_s),
      limits=limits,
      verify=verify,
      transport=transport,
      # Machines are near: a proxy of the environment is for others.
      trust_env=self._proxies,
      follow_redirects=False,
    )


def _silence_options(seconds: float) -> list[tuple[int, int, int]]:
  """Socket options that end a connection to a peer that is out of reach.

  Sent data that is not acknowledged ends it (TCP_USER_TIMEOUT, RFC 5482), and
  three probes where nothing is sent. A system without one of them goes without.
  """
  probe_s = max(1, round(seconds / 4))
  values = {
    "TCP_USER_TIMEOUT": round(1000 * seconds),
    "TCP_KEEPIDLE": probe_s,
    "TCP_KEEPINTVL": probe_s,
    "TCP_KEEPCNT": 3,
  }
  options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
  for name, value in values.items():
    if hasattr(socket, name):
      options.append((socket.IPPROTO_TCP, int(getattr(socket, name)), value))
  return options


async def _keep(answer: HttpAnswer) -> HttpAnswer:
  return answer


def _secrets(headers: Mapping[str, str]) -> tuple[bytes, ...]:
  """The credentials that a request's headers hold."""
  secrets = []
  for name, value in headers.items():
    if _SECRET_HEADER.search(name):
      scheme, _, secret = value.partition(" ")
      secrets.append((secret or scheme).encode("utf-8", "replace"))
  return tuple(one for one in secrets if len(one) >= _SHORTEST_SECRET)


def _masked(content: bytes, secrets: tuple[bytes, ...]) -> bytes:
  for secret in secrets:
    content = content.replace(secret, b"***")
  return content


async def _received(
  reply: httpx.Response, what: str, limit: int, secrets: tuple[bytes, ...]
) -> HttpAnswer:
  failed = not 200 <= reply.status_code < 300
  kind = reply.headers.get("content-encoding", "identity").strip().lower()
  if kind not in ("", "identity") and not failed:
    raise CallError(
      f"{what} answered with content-encoding {kind[:40]!r}, which it was"
      " not asked for"
    )
  parts, size = [], 0
  async for part in reply.aiter_raw():
    size += len(part)
    if failed and size > _MAX_FAILURE:
      break  # Enough to quote.
    if size > limit:
      raise CallError(f"{what} answered with more than {limit} bytes")
    parts.append(part)
  content = b"".join(parts)
  if failed:
    content = _masked(content, secrets)
  return HttpAnswer(reply.status_code, reply.headers, content, secrets)


@functools.lru_cache(maxsize=2)
def _certificates(of_the_web: bool) -> ssl.SSLContext:
  """Read once: it takes longer than an episode on the desktop.

  Args:
    of_the_web: those that httpx brings or $SSL_CERT_FILE names, which is what
      third-party services need; else this system's.
  """
  if of_the_web:
    return httpx.create_ssl_context()
  return ssl.create_default_context()
