"""HTTP calls to servers that others run: in time, once, and bounded.

Promises, whatever a server answers: a call ends within its deadline, however
slowly the answer drips; a request is sent once, never again by itself and never
to where a redirect points; an answer is not kept beyond `limit` bytes, and is
not unpacked (a compressed one was not asked for, and may be a bomb); what goes
wrong raises one kind of error. JSON is sent as ASCII, so that any text a policy
types can be sent.

Does not try again: a caller knows what may be done twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import ssl
from typing import Any, Callable, Mapping, TypeVar
import urllib.parse

from tunix.rl.multi_turn.core import concurrency

T = TypeVar("T")
MAX_BODY = 256 << 20
"""Bytes of an answer; the largest are screenshots as lists of numbers."""
_MAX_FAILURE = 64 << 10  # Of an answer that is only to be quoted.
# Above this many bytes an answer is read in a thread.
_INLINE_BYTES = 1 << 15


class CallError(RuntimeError):
  """There is no answer, or none that can be used.

  Attributes:
    late: whether its deadline ended the call.
  """

  def __init__(self, message: str, late: bool = False):
    super().__init__(message)
    self.late = late


@dataclasses.dataclass(frozen=True)
class Answer:
  """Attributes:

  status: HTTP's.
  headers: names in any case.
  content: the body, or the beginning of a failure's.
  """

  status: int
  headers: Mapping[str, str]
  content: bytes

  @property
  def ok(self) -> bool:
    """Whether it did what it was asked to; a redirect did not."""
    return 200 <= self.status < 300

  def quoted(self, length: int = 300) -> str:
    """Why it failed, for people."""
    if 300 <= self.status < 400:
      where = self.headers.get("location", "")[:200]
      return f"{self.status} a redirect to {where!r}, which is not followed"
    return f"{self.status} {self.content.decode('utf-8', 'replace')[:length]}"


def address(url: Any, name: str, example: str) -> str:
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


def json_of(raw: str | bytes) -> Any:
  """Raises:

  ValueError: no JSON, or none that can be read.
  """
  try:
    return json.loads(raw)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


async def read(
    fn: Callable[[], T], size: int, seconds: float, what: str
) -> T:
  """`fn()`, which reads `size` bytes; in a thread when these are many."""
  if size <= _INLINE_BYTES:
    return fn()
  return await concurrency.acall(fn, seconds=seconds, what=f"reading {what}")


class Http:
  """Keeps its connections between calls; belongs to one event loop."""

  def __init__(
      self,
      *,
      headers: Mapping[str, str] | None = None,
      connect_s: float | None = None,
      proxies: bool = False,
  ):
    """Args:

      headers: of every call.
      connect_s: deadline of a connection, None for the call's own.
      proxies: of a service somewhere in the web: a proxy that the environment
        names is used, and certificates of the web are.

    Raises:
      ImportError: httpx is not installed.
    """
    self._httpx = _httpx()
    self._headers = dict(headers or {})
    self._connect_s = connect_s
    self._proxies = proxies
    self._client: Any = None

  async def call(
      self,
      method: str,
      url: str,
      seconds: float | None,
      *,
      params: Mapping[str, Any] | None = None,
      body: Any = None,
      data: Mapping[str, str] | None = None,
      files: Mapping[str, Any] | None = None,
      headers: Mapping[str, str] | None = None,
      limit: int = MAX_BODY,
  ) -> Answer:
    """Makes a call, once.

    Args:
      method, url: what is called.
      seconds: deadline of all of it, None when the caller has one.
      params: of the query.
      body: sent as JSON, None for none.
      data, files: of a form.
      headers: of this call.
      limit: bytes of the answer's body.

    Raises:
      CallError: no answer, or one that is too large or compressed.
    """
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
      async with asyncio.timeout(seconds):
        async with self._client.stream(
            method, url, params=params, content=content, data=data,
            files=files, headers=sent,
        ) as reply:  # pyformat: disable
          return await _received(reply, what, limit)
    except TimeoutError:
      raise CallError(
          f"{what} did not answer within {seconds:g} s", late=True
      ) from None
    except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
      raise CallError(
          f"{what} failed: {type(error).__name__}: {error}"
      ) from error

  def _open(self, url: str) -> Any:
    # A pool of one's own: finding a connection in one that hundreds of
    # episodes share takes longer than the call.
    return self._httpx.AsyncClient(
        # Deadlines are the calls', but a connection may have its own.
        timeout=self._httpx.Timeout(None, connect=self._connect_s),
        verify=url.startswith("https:") and _certificates(self._proxies),
        # Machines are near: a proxy of the environment is for others.
        trust_env=self._proxies,
        follow_redirects=False,
    )

  async def aclose(self) -> None:
    """Idempotent."""
    client, self._client = self._client, None
    if client is not None:
      await client.aclose()


async def _received(reply: Any, what: str, limit: int) -> Answer:
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
      break  # Enough to say why.
    if size > limit:
      raise CallError(f"{what} answered with more than {limit} bytes")
    parts.append(part)
  return Answer(reply.status_code, reply.headers, b"".join(parts))


def _httpx() -> Any:
  try:
    import httpx  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
        "environments behind servers need httpx; pip install"
        " 'tunix-multi-turn[client]'"
    ) from error
  return httpx


@functools.lru_cache(maxsize=2)
def _certificates(of_the_web: bool) -> ssl.SSLContext:
  """Read once: it takes longer than an episode on the desktop.

  Args:
    of_the_web: those that httpx brings or $SSL_CERT_FILE names, which is what
      services of others need; else this system's.
  """
  if of_the_web:
    return _httpx().create_ssl_context()
  return ssl.create_default_context()
