"""Keeps files by content, and signs URLs that read them for a while.

A `ContentStore` holds bytes under their SHA-256; `SignedUrls` makes addresses
of them that expire, so that a model's server can fetch a screenshot without a
token. `externalize` replaces the data URLs in JSON values by such addresses.

Promises: memory is bounded, the least recently used content goes first; a URL
reads the one content that it was made for, until it expires; a signature is
compared in constant time.

Does not decode images, or serve HTTP.
"""

from __future__ import annotations

import base64
import binascii
import collections
import hashlib
import hmac
import re
import secrets
import threading
import time
from typing import Any, Callable, Mapping
import urllib.parse

_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]{1,40});base64,", re.I)
_NAME = re.compile(r"[0-9a-f]{64}")


class ContentStore:
  """Bounded store of files by content. Thread-safe."""

  def __init__(self, capacity_bytes: int = 256 << 20):
    if capacity_bytes < 1:
      raise ValueError(f"capacity_bytes must be >= 1, got {capacity_bytes}")
    self._capacity = capacity_bytes
    self._size = 0
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, tuple[bytes, str]] = (
      collections.OrderedDict()
    )

  def put(self, content: bytes, media_type: str) -> str:
    """Stores the bytes; returns their SHA-256 in hex.

    Raises:
      ValueError: they exceed the store's whole capacity.
    """
    if len(content) > self._capacity:
      raise ValueError(
        f"{len(content)} bytes exceed capacity_bytes={self._capacity}; raise"
        " it, or send a smaller image"
      )
    name = hashlib.sha256(content).hexdigest()
    with self._lock:
      if name in self._files:
        self._files.move_to_end(name)
        return name
      self._files[name] = (bytes(content), media_type)
      self._size += len(content)
      while self._size > self._capacity:
        _, (old, _) = self._files.popitem(last=False)
        self._size -= len(old)
    return name

  def get(self, name: str) -> tuple[bytes, str] | None:
    """(bytes, media type); None when it was never there or is evicted."""
    with self._lock:
      path = self._files.get(name)
      if path is not None:
        self._files.move_to_end(name)
      return path


class SignedUrls:
  """Signs and checks URLs `{base}/images/{sha256}?expires=…&signature=…`."""

  def __init__(
    self,
    base_url: str = "",
    *,
    lifetime_s: float = 3600.0,
    key: bytes | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """Args:

    base_url: Address of the server that serves them; may be set later.
    lifetime_s: seconds that an address is valid.
    key: secret of the signatures; a fresh one by default.
    clock: seconds since the epoch.
    """
    if not lifetime_s > 0:
      raise ValueError(f"lifetime_s must be > 0 seconds, got {lifetime_s}")
    self.base_url = base_url.rstrip("/")
    self._lifetime = lifetime_s
    self._key = key or secrets.token_bytes(32)
    self._clock = clock

  def url(self, name: str) -> str:
    """The address of a content, valid from now on for `lifetime_s`."""
    expires = int(self._clock() + self._lifetime)
    query = urllib.parse.urlencode(
      {"expires": expires, "signature": self._sign(name, expires)}
    )
    return f"{self.base_url}/images/{name}?{query}"

  def problem(self, name: str, query: Mapping[str, str]) -> str:
    """Why an address is refused; "" for a valid one."""
    expires = query.get("expires", "")
    if not _NAME.fullmatch(name) or not re.fullmatch(r"\d{1,12}", expires):
      return "the address is not one of this server's"
    signature = query.get("signature", "").encode("utf-8", "replace")
    if not hmac.compare_digest(
      signature, self._sign(name, int(expires)).encode()
    ):
      return "the address has a wrong signature; use it exactly as it was given"
    if int(expires) < self._clock():
      return "the address has expired; ask for the events again"
    return ""

  def _sign(self, name: str, expires: int) -> str:
    text = f"{name}.{expires}".encode()
    return hmac.new(self._key, text, hashlib.sha256).hexdigest()


def read_data_url(url: str) -> tuple[bytes, str] | None:
  """(bytes, media type) of an image's data URL; None for another URL.

  Raises:
    ValueError: the URL is no strict base64.
  """
  match = _DATA_URL.match(url)
  if match is None:
    return None
  try:
    content = base64.b64decode(url[match.end() :], validate=True)
  except binascii.Error as error:
    raise ValueError(f"a data URL is not strict base64: {error}") from None
  return content, match[1].lower()


def externalize(value: object, store: ContentStore, urls: SignedUrls) -> Any:
  """JSON values with each image's data URL replaced by a signed address.

  The value itself is not changed; parts without images are shared with it.
  """
  if isinstance(value, str):
    if value[:11].lower() != "data:image/":
      return value
    content = read_data_url(value)
    return value if content is None else urls.url(store.put(*content))
  if isinstance(value, Mapping):
    return {k: externalize(v, store, urls) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [externalize(v, store, urls) for v in value]
  return value
