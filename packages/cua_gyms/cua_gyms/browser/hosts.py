"""Checks where an episode may start, and which hosts its pages may reach.

Addresses are taken apart strictly: what Python and a browser might read
differently (user names, backslashes, control characters, dot segments) is
refused, never interpreted.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import Iterable
import urllib.parse

_PORTS = {"http": 80, "https": 443}
_WEB_PORTS = frozenset(_PORTS.values())
# RFC 3986's characters; "\" and non-ASCII must be escaped.
_URL = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%{}|^]+")
_DOTS = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)


class UrlRefused(ValueError):
  """An address that no episode may start at."""


@dataclasses.dataclass(frozen=True)
class Origin:
  """A scheme, host and port, and the path that follows them."""

  scheme: str
  host: str
  port: int
  path: str


def split(url: str) -> Origin:
  """Returns the parts of an address that decide where a request goes.

  Raises:
    UrlRefused: not http or https, or not plain enough to be sure.
  """

  def refuse(why: str) -> UrlRefused:
    return UrlRefused(f"url={url!r} {why}")

  if not isinstance(url, str) or not _URL.fullmatch(url):
    raise refuse(
      "must be an address of printable ASCII without spaces and backslashes"
    )
  try:
    parts = urllib.parse.urlsplit(url)
    port = parts.port
  except ValueError as error:
    raise refuse(f"is not an address: {error}") from None
  if parts.scheme not in _PORTS:
    raise refuse("must begin with http:// or https://")
  if "@" in parts.netloc or not parts.hostname:
    raise refuse("must have a host and no user name")
  path = parts.path or "/"
  if _DOTS.search(path):
    raise refuse("must have no '.' or '..' in its path")
  host = normal(parts.hostname)
  return Origin(parts.scheme, host, port or _PORTS[parts.scheme], path)


def normal(host: str) -> str:
  """One spelling of a host: lower case, no final dot, IPv6 without zeros."""
  host = host.lower().rstrip(".")
  try:
    return ipaddress.ip_address(host.strip("[]")).compressed
  except ValueError:
    return host


class Hosts:
  """The hosts that requests may go to: `shop.test`, `*.shop.test`, `h:8080`.

  A pattern without a port means the ports 80 and 443. `*.shop.test` is every
  host below shop.test, and not shop.test itself.
  """

  def __init__(self, patterns: Iterable[str] = ()):
    """Raises ValueError that names an invalid pattern."""
    self._exact: set[tuple[str, int]] = set()
    self._below: set[tuple[str, int]] = set()
    for pattern in patterns:
      self._add(pattern)

  def _add(self, pattern: str) -> None:
    wrong = ValueError(
      f"hosts: {pattern!r} must be a host, host:port or *.host:port"
    )
    if not isinstance(pattern, str):
      raise wrong
    below = pattern.startswith("*.")
    text = pattern[2:] if below else pattern
    try:
      ipaddress.IPv6Address(text)
      text = f"[{text}]"
    except ValueError:
      pass
    try:
      parts = urllib.parse.urlsplit(f"//{text}")
      host, port = parts.hostname, parts.port
    except ValueError:
      raise wrong from None
    if not host or parts.path or "@" in text or not _URL.fullmatch(text):
      raise wrong
    if "*" in host:
      raise wrong
    for one in (port,) if port else _WEB_PORTS:
      (self._below if below else self._exact).add((normal(host), one))

  def including(self, url: str) -> Hosts:
    """Returns a copy that also allows the host of `url`.

    Without a port, or with 80 or 443, it allows both, as sites redirect from
    one to the other; any other port is allowed alone.
    """
    origin = split(url)
    both = Hosts()
    both._exact |= self._exact
    both._below |= self._below
    default = origin.port in _WEB_PORTS
    for port in _WEB_PORTS if default else (origin.port,):
      both._exact.add((origin.host, port))
    return both

  def allow(self, host: str, port: int) -> bool:
    """Whether a request may go to a host and port."""
    host = normal(host)
    if (host, port) in self._exact:
      return True
    labels = host.split(".")
    return any(
      (".".join(labels[i:]), port) in self._below for i in range(1, len(labels))
    )

  def allow_url(self, url: str) -> bool:
    """Whether an address leads to an allowed host, by http or https."""
    try:
      parts = urllib.parse.urlsplit(url)
      port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
      return False
    if parts.scheme not in _PORTS or not parts.hostname or port is None:
      return False
    return self.allow(parts.hostname, port)


def may_start(url: str, allowed: Iterable[str]) -> bool:
  """Whether an address lies below one of the allowed ones.

  Scheme, host and port must be the same; the path must be the same or go on
  after a "/".

  Raises:
    UrlRefused: `url` or an allowed one is not a plain address.
  """
  target = split(url)
  for one in allowed:
    base = split(one)
    same = (base.scheme, base.host, base.port) == (
      target.scheme,
      target.host,
      target.port,
    )
    below = base.path.rstrip("/") + "/"
    if same and (target.path == base.path or target.path.startswith(below)):
      return True
  return False
