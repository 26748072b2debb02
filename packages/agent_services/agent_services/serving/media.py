"""Loads the images of requests' URLs into an `ImageStore`.

A `data:` URL is decoded; an `https:` URL is fetched if its host is on the list,
and fetching is off while the list is empty. Both are untrusted input.

Promises: sizes are checked before the work they cost: bytes before base64 is
decoded or a body read to its end, pixels before they are decoded. Nothing is
decoded on the event loop. One data URL is decoded once, also by concurrent
calls, while the store has its image. Every hop of a fetch goes to a listed
host at a public address (or at any, for one of `private_hosts`): its name is
resolved once, all addresses are checked, the connection uses one of them, and
the certificate is verified for the name. A deadline ends a fetch, whatever the
other side does. An error shows the head of a URL only, without password and
query.

Does not: read content types; play animations (refused); apply EXIF rotation;
cache fetched images, as a URL's content may change; bound the number of
concurrent loads, which is the server's task; know a network's own NAT64
prefix. A loader belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import ipaddress
import math
import re
import socket
import ssl
from typing import Any, Awaitable, Callable, Iterable, Iterator, Sequence

import httpx
import pybase64
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency

from agent_services.serving import pictures

_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|webp|gif);base64,", re.I)
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*(:[1-9][0-9]{{0,4}})?")
_CHUNK = 1 << 18  # Characters: no call holds the GIL for long.
_REMEMBERED = 4096  # Data URLs, some 300 bytes each.
_PORTS = {"http": 80, "https": 443}
# Global by the book, but relays, documentation, or IPv4 in disguise (6to4,
# Teredo). IPv6 outside 2000::/3 has further disguises (mapped, NAT64).
_NOT_PUBLIC = tuple(
  ipaddress.ip_network(n)
  for n in ("192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")
)


class MediaError(ValueError):
  """An image that cannot be loaded.

  `code` is invalid_image_url, image_host_not_allowed, image_too_large,
  invalid_image or image_fetch_failed; `retryable`: the same URL may work later.
  """

  def __init__(self, code: str, message: str, retryable: bool = False):
    super().__init__(message)
    self.code = code
    self.retryable = retryable


@dataclasses.dataclass(frozen=True)
class MediaLimits:
  """Bounds of the images that requests make this process fetch and decode.

  Attributes:
    allowed_hosts: "host" (at its scheme's own port) or "host:port", compared
      exactly: a subdomain is another host. Empty: nothing is fetched.
    max_bytes: Largest size of an encoded image.
    max_pixels: Largest product of width and height.
    timeout_s: Seconds from resolving the name to the last byte, all redirects
      included.
    max_redirects: Number of redirects that are followed; each is checked like
      the first URL.
    allow_http: Whether http: URLs of the allowed hosts are fetched, too.
    private_hosts: Hosts of `allowed_hosts` that may be at a private address,
      such as a storage of one's own or this package's run service.
  """

  allowed_hosts: tuple[str, ...] = ()
  max_bytes: int = 20 << 20
  max_pixels: int = 16_777_216
  timeout_s: float = 10.0
  max_redirects: int = 3
  allow_http: bool = False
  private_hosts: tuple[str, ...] = ()

  def __post_init__(self):
    if isinstance(self.allowed_hosts, str):
      raise ValueError(
        f"allowed_hosts must be a tuple, got {self.allowed_hosts!r}; write"
        f" ({self.allowed_hosts!r},)"
      )
    hosts = tuple(host.lower() for host in self.allowed_hosts)
    object.__setattr__(self, "allowed_hosts", hosts)
    for host in hosts:
      if not _HOST.fullmatch(host) or int(host.partition(":")[2] or 1) > 65535:
        raise ValueError(
          f"allowed_hosts: {host!r} is not an exact host name; write"
          " 'host.example' or 'host.example:8443', without scheme, path or"
          " wildcard, and a name outside ASCII in its xn-- form"
        )
    private = tuple(host.lower() for host in self.private_hosts)
    object.__setattr__(self, "private_hosts", private)
    if stray := sorted(set(private) - set(hosts)):
      raise ValueError(
        f"private_hosts: {stray[0]!r} is not in allowed_hosts; list it there,"
        " too"
      )
    for name, low, high, kind in (
      ("max_bytes", 1, math.inf, ">= 1"),
      ("max_pixels", 1, 89_478_485, "in 1…89478485, Pillow's own limit"),
      ("timeout_s", 1e-9, 1e9, "finite and > 0"),
      ("max_redirects", 0, math.inf, ">= 0"),
    ):
      if not low <= getattr(self, name) <= high:
        raise ValueError(f"{name} must be {kind}, got {getattr(self, name)}")


def _is_public(address: str) -> bool:
  """Whether an IP address is public, and embeds no other address."""
  ip = ipaddress.ip_address(address)
  if not ip.is_global or ip.is_multicast or ip.is_reserved:
    return False
  if ip.version == 6 and ip not in ipaddress.ip_network("2000::/3"):
    return False
  return not any(ip in network for network in _NOT_PUBLIC)


def _shown(url: str) -> str:
  """Returns the head of a URL for messages, without password, query and
  signature."""
  text = re.sub(r"//[^/?#]*@", "//…@", url[:4096])
  text = re.split("[?#]", text, maxsplit=1)[0]
  return repr(text if text == url and len(text) <= 60 else text[:59] + "…")


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
  """Adds the head of the URL to the message of a `MediaError`."""
  try:
    yield
  except MediaError as e:
    message = f"image {_shown(url)}: {e}"
    raise MediaError(e.code, message, e.retryable) from e.__cause__


def _port(target: httpx.URL) -> int:
  return _PORTS[target.scheme] if target.port is None else target.port


def _digest(url: str) -> bytes:
  digest = hashlib.sha256()
  for i in range(0, len(url), _CHUNK):
    digest.update(url[i : i + _CHUNK].encode("utf-8", "surrogatepass"))
  return digest.digest()


class MediaLoader:
  """Loads images by URL into a store, which it does not own.

  The arguments with an underscore are for tests, whose servers have neither
  public addresses nor public certificates.

  Raises:
    ImportError: hosts are allowed and httpx is not installed.
  """

  def __init__(
    self,
    store: images.ImageStore,
    limits: MediaLimits = MediaLimits(),
    *,
    _resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None,
    _is_allowed_address: Callable[[str], bool] = _is_public,
    _ssl_context: ssl.SSLContext | None = None,
  ):
    if limits.allowed_hosts and _ssl_context is None:
      _ssl_context = httpx.create_ssl_context(trust_env=False)
    self._store = store
    self._limits = limits
    self._resolve = _resolve or self._getaddrinfo
    self._is_allowed_address = _is_allowed_address
    self._ssl_context = _ssl_context
    self._threads = concurrent.futures.ThreadPoolExecutor(2, "tunix-media")
    # Resolving may hang; threads of this pool can be abandoned.
    self._resolvers = concurrency.CallRunner(
      concurrency.WorkerPool(8, 8, name="tunix-media-resolve"), grace=0.0
    )
    self._known: collections.OrderedDict[bytes, trajectory.ImageRef] = (
      collections.OrderedDict()
    )
    self._decoding: dict[bytes, asyncio.Future[trajectory.ImageRef]] = {}

  async def load(self, url: str) -> trajectory.ImageRef:
    """Returns the image of a data: or https: URL, as opaque RGB, in the store.

    Raises:
      MediaError: why not, and what to do.
    """
    if not isinstance(url, str):
      kind = type(url).__name__
      raise MediaError("invalid_image_url", f"image URL: a string, not {kind}")
    with _naming(url):
      if url[:5].lower() == "data:":
        return await self._load_data(url)
      data = await self._fetch(url)
      return await self._wait(self._submit(self._decode, data))

  async def fetch(self, url: str) -> bytes:
    """Returns the bytes of an https: URL, as they came; not decoded.

    Raises:
      MediaError: why not, and what to do.
    """
    with _naming(url):
      return await self._fetch(url)

  async def load_all(
    self, urls: Iterable[str]
  ) -> list[trajectory.ImageRef | MediaError | None]:
    """Returns the image of each URL, or its error.

    data: URLs are decoded concurrently; then the others are fetched one by one
    until one fails. The result of an untried URL is None.
    """
    urls = list(urls)
    results: list[Any] = [None] * len(urls)

    async def load(i: int) -> bool:
      try:
        results[i] = await self.load(urls[i])
        return True
      except MediaError as e:
        results[i] = e
        return False

    data = [i for i, u in enumerate(urls) if u[:5].lower() == "data:"]
    good = all(await asyncio.gather(*map(load, data)))
    for i in sorted({*range(len(urls))}.difference(data)):
      good = good and await load(i)
    return results

  def has(self, refs: Iterable[trajectory.ImageRef]) -> bool:
    """Whether the store still holds all of the images."""
    return all(ref in self._store for ref in refs)

  async def aclose(self) -> None:
    """Ends the threads; a load in flight fails or completes. Idempotent."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._resolvers.close(0.0)

  async def _load_data(self, url: str) -> trajectory.ImageRef:
    match = _DATA_URL.match(url)
    if match is None:
      raise MediaError(
        "invalid_image_url",
        "a data URL begins with data:image/png;base64, (or jpeg, webp, gif)",
      )
    start = match.end()
    padding = url.count("=", max(start, len(url) - 2))
    self._check_bytes((len(url) - start) // 4 * 3 - padding)
    key = await self._wait(self._submit(_digest, url))
    ref = self._known.get(key)
    if ref is not None and ref in self._store:
      self._known.move_to_end(key)
      return ref
    pending = self._decoding.get(key)
    if pending is None:
      pending = self._submit(self._decode_base64, url, start)
      self._decoding[key] = pending
      pending.add_done_callback(functools.partial(self._decoded, key))
    return await self._wait(pending)

  def _decoded(self, key: bytes, pending: asyncio.Future) -> None:
    del self._decoding[key]
    # `exception` also marks it as retrieved for asyncio.
    if not pending.cancelled() and pending.exception() is None:
      self._known[key] = pending.result()
      self._known.move_to_end(key)
      if len(self._known) > _REMEMBERED:
        self._known.popitem(last=False)

  def _submit(self, fn: Callable[..., Any], *args) -> asyncio.Future:
    try:
      loop = asyncio.get_running_loop()
      return loop.run_in_executor(self._threads, fn, *args)
    except RuntimeError:
      raise MediaError("image_fetch_failed", "loader is closed", True) from None

  async def _wait(self, pending: asyncio.Future) -> Any:
    """Awaits `pending`, which survives this caller's cancellation."""
    try:
      return await asyncio.shield(pending)
    except asyncio.CancelledError:
      if not pending.cancelled():
        raise
      # By `aclose`: not this task's cancellation.
      raise MediaError("image_fetch_failed", "loader is closed", True) from None

  def _check_bytes(self, count: int) -> None:
    if count > self._limits.max_bytes:
      raise MediaError(
        "image_too_large",
        f"{count} bytes or more, max_bytes is {self._limits.max_bytes}; send"
        " a smaller image",
      )

  def _decode_base64(self, url: str, start: int) -> trajectory.ImageRef:
    try:
      # Inside, padding would pass.
      if (len(url) - start) % 4 or url.find("=", start, len(url) - 2) >= 0:
        raise ValueError("wrong length or padding")
      data = pybase64.b64decode(url[start:], validate=True)
    except ValueError as e:
      raise MediaError(
        "invalid_image_url",
        f"not strict base64 ({e}); encode it in the standard alphabet, with"
        " padding, without line breaks",
      ) from None
    return self._decode(data)

  def _decode(self, data: bytes) -> trajectory.ImageRef:
    try:
      pixels = pictures.decode(data, self._limits.max_pixels)
    except pictures.PictureError as e:
      raise MediaError(e.code, str(e)) from e.__cause__
    return self._store.put(pixels)

  async def _fetch(self, url: str) -> bytes:
    seconds = self._limits.timeout_s
    try:
      return await concurrency.with_deadline(self._follow(url), seconds)
    except concurrency.DeadlineExceeded:
      raise MediaError(
        "image_fetch_failed",
        f"not fetched within timeout_s={seconds:g}; send a data: URL",
        retryable=True,
      ) from None

  async def _follow(self, url: str) -> bytes:
    for _ in range(self._limits.max_redirects + 1):
      answer = await self._get(self._check(url))
      if isinstance(answer, bytes):
        return answer
      url = answer
    raise MediaError(
      "image_fetch_failed",
      f"more redirects than max_redirects={self._limits.max_redirects}; send"
      " the last URL",
    )

  def _check(self, url: str) -> httpx.URL:
    """Checks one hop's URL, in the form in which it will be sent."""
    hosts, scheme = self._limits.allowed_hosts, url.partition(":")[0].lower()
    if scheme != "https" and not (scheme == "http" and self._limits.allow_http):
      raise MediaError(
        "invalid_image_url",
        f"scheme {scheme[:20]!r} is not fetched; send a data:image/…;base64,"
        " or an https: URL",
      )
    if not hosts:
      raise MediaError(
        "image_host_not_allowed",
        "fetching is off, as allowed_hosts is empty; send a data: URL",
      )
    try:
      target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as e:  # The latter: lone surrogates.
      raise MediaError("invalid_image_url", f"not a URL: {e}") from None
    if target.userinfo:
      raise MediaError(
        "invalid_image_url", "a user name before '@' is not sent; omit it"
      )
    host, port = target.raw_host.decode(), _port(target)  # Lower case, IDNA.
    if f"{host}:{port}" in hosts or (host in hosts and port == _PORTS[scheme]):
      return target
    raise MediaError(
      "image_host_not_allowed",
      f"'{host[:80]}:{port}' is not in allowed_hosts; send a data: URL, or"
      " list exactly this host",
    )

  async def _getaddrinfo(self, host: str, port: int) -> list[str]:
    infos = await self._resolvers.call(
      lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(info[4][0] for info in infos))

  async def _addresses(self, host: str, port: int) -> list[str]:
    try:
      addresses = list(await self._resolve(host, port))
    except (OSError, RuntimeError, UnicodeError) as e:
      raise MediaError(
        "image_fetch_failed", f"{host!r} is not resolved: {e}", True
      ) from e
    private = self._limits.private_hosts
    if host in private or f"{host}:{port}" in private:
      return addresses
    for address in addresses:
      if not self._is_allowed_address(address):
        raise MediaError(
          "image_host_not_allowed",
          f"{host!r} is at {address}, no public address; send a data: URL",
        )
    return addresses

  async def _get(self, target: httpx.URL) -> bytes | str:
    """Returns the body, or the URL it is redirected to."""
    host = target.raw_host.decode()
    addresses = await self._addresses(host, _port(target))
    share = self._limits.timeout_s / max(1, len(addresses))
    headers = {
      "Host": target.netloc.decode(),
      "User-Agent": "tunix-multi-turn",
      "Accept-Encoding": "identity",
    }
    extensions = {"sni_hostname": host, "timeout": {"connect": share}}
    failure: Exception = OSError("no address")
    for address in addresses:
      # A bare transport: no cookies, proxies, .netrc, or redirects. One each:
      # its pool knows connections by address, and would send this over one
      # whose certificate was verified for another name.
      async with httpx.AsyncHTTPTransport(
        verify=self._ssl_context or True, trust_env=False
      ) as transport:
        try:
          response = await transport.handle_async_request(
            httpx.Request(
              "GET",
              target.copy_with(host=address),
              headers=headers,
              extensions=extensions,
            )
          )
          async with contextlib.aclosing(response):
            return await self._read(response, target)
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
          failure = e
        except httpx.HTTPError as e:
          failure = e
          break
    raise MediaError(
      "image_fetch_failed",
      f"{host!r} gives no image: {failure or type(failure).__name__}",
      retryable="CERTIFICATE_VERIFY_FAILED" not in str(failure),
    ) from failure

  async def _read(self, response: httpx.Response, target: httpx.URL):
    status, location = response.status_code, response.headers.get("location")
    if status in (301, 302, 303, 307, 308) and location:
      try:
        return str(target.join(location))
      except (httpx.InvalidURL, ValueError) as e:
        raise MediaError("invalid_image_url", f"redirected: {e}") from None
    if status != 200:
      raise MediaError(
        "image_fetch_failed",
        f"its server answered {status}, not 200; check the URL",
        retryable=status >= 500 or status in (408, 425, 429),
      )
    length = response.headers.get("content-length", "")
    self._check_bytes(int(length) if length.isdigit() else 0)
    body = bytearray()
    async for chunk in response.aiter_raw():
      body += chunk
      self._check_bytes(len(body))
    return bytes(body)
