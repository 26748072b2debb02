"""Authorises requests: projects, and the tokens that open them.

A token belongs to one project and has the scopes `ingest` (to send), `read`
(to look), or both. The database holds its hash, never the token. A server
without tokens listens to its own machine only, and answers no page of another
site that a browser there has open.

A browser cannot send a header with a picture or a stream of events: after the
login page its token comes as a cookie, which opens reading, and, where the
token may send too, the forms of this server's own pages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import threading
import time
from typing import Mapping
from urllib import parse

import sqlalchemy as sa
from starlette import concurrency

from training_monitor.net import http_server
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors

SCOPES = ("ingest", "read")
COOKIE = "tunix_monitor_token"
DEFAULT_PROJECT = "default"
_REMEMBERED_S = 10.0
_ASKED_S = 1.0
"""Age of the knowledge that an open server's database has no token."""
_MOST_REMEMBERED = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,99}")


@dataclasses.dataclass(frozen=True)
class Principal:
  """The project and scopes of a request."""

  project: int
  scopes: frozenset[str]


def project_id(connection: sa.Connection, name: str) -> int:
  """Returns the id of a project; makes a new project.

  Raises:
    ValueError: The name is not a valid project name.
  """
  if not _NAME.fullmatch(name):
    raise ValueError(
      f"project={name!r}: use letters, digits, '.', '_', '-' and spaces, at"
      " most 100"
    )
  project = tables.project
  id_ = connection.execute(
    sa.select(project.c.id).where(project.c.name == name)
  ).scalar()
  if id_ is not None:
    return id_
  return connection.execute(
    sa.insert(project).values(name=name).returning(project.c.id)
  ).scalar_one()


def make_token(
  engine: sa.Engine, project: str, scopes: tuple[str, ...], note: str = ""
) -> str:
  """Makes a token; only its hash is stored.

  Raises:
    ValueError: an unknown scope or a wrong project name.
  """
  unknown = sorted(set(scopes) - set(SCOPES))
  if unknown or not scopes:
    raise ValueError(
      f"scopes={','.join(scopes)}: give some of {', '.join(SCOPES)}"
    )
  token = "tm_" + secrets.token_urlsafe(32)
  with database.writing(engine) as connection:
    connection.execute(
      sa.insert(tables.access_token).values(
        project_id=project_id(connection, project),
        note=note,
        token_hash=_hash(token),
        scopes=",".join(sorted(scopes)),
      )
    )
  return token


def has_tokens(engine: sa.Engine) -> bool:
  with database.reading(engine) as connection:
    return bool(
      connection.execute(
        sa.select(sa.func.count()).select_from(tables.access_token)
      ).scalar()
    )


class Access:
  """Finds the principal of a request."""

  def __init__(self, engine: sa.Engine, token: str = "", open_to_all=False):
    """Args:

    engine: Engine of the upgraded database.
    token: one more, of the default project, with all scopes.
    open_to_all: ask for no token as long as the database has none; only for
      a server that is not reachable from other machines.
    """
    self._engine = engine
    self._own = token.encode()
    self._open_to_all = open_to_all
    self._asked_at = float("-inf")
    self._lock = threading.Lock()
    with database.writing(engine) as connection:
      self._default = project_id(connection, DEFAULT_PROJECT)
    self._known: dict[str, tuple[float, Principal | None]] = {}

  @property
  def asks_for_tokens(self) -> bool:
    """As the last `check` found it."""
    return not self._open_to_all

  @property
  def _open(self) -> bool:
    """Whether no token is asked for; the first one that is made ends it."""
    if not self._open_to_all:
      return False
    with self._lock:
      if time.monotonic() - self._asked_at > _ASKED_S and self._open_to_all:
        self._open_to_all = not has_tokens(self._engine)
        self._asked_at = time.monotonic()
      return self._open_to_all

  def check(
    self, headers: Mapping[str, str], scope: str, *, form: bool = False
  ) -> Principal:
    """Returns the principal of a request.

    Args:
      headers: Headers of the request.
      scope: Scope that the request needs.
      form: it is a form of this server's own pages, which the cookie opens.

    Raises:
      ApiError: 401 without a valid token, 403 when it lacks the scope.
    """
    everything = Principal(self._default, frozenset(SCOPES))
    credentials = headers.get("authorization", "")
    if form:
      check_own_form(headers)
    else:
      _check_origin(headers)
    if not credentials and (form or scope == "read"):
      credentials = _cookie(headers)
    kind, _, token = credentials.partition(" ")
    if self._open:
      _check_host(headers)
      return everything
    if kind.lower() != "bearer" or not token.strip():
      raise errors.ApiError(
        401, "give a project's token, as Authorization: Bearer <token>"
      )
    token = token.strip()
    if self._is_own(token):
      return everything
    principal = self._find(_hash(token))
    if principal is None:
      raise errors.ApiError(
        401, "this token is not known; make one with: tunix-monitor token"
      )
    if scope not in principal.scopes:
      raise errors.ApiError(
        403,
        f"this token may {', '.join(sorted(principal.scopes))}, not {scope};"
        f" use one with the scope {scope}",
      )
    return principal

  async def checked(self, headers: Mapping[str, str], scope: str) -> Principal:
    """Returns `check`, in a thread where it asks the database."""
    # Reads the database only once in a while; it may be away.
    if self._remembers(headers):
      return self.check(headers, scope)
    return await concurrency.run_in_threadpool(self.check, headers, scope)

  def check_site(self, headers: Mapping[str, str]) -> None:
    """Refuses another site's request for what everyone may read.

    Raises:
      ApiError: 403.
    """
    _check_origin(headers)
    if not self.asks_for_tokens:
      _check_host(headers)

  def _remembers(self, headers: Mapping[str, str]) -> bool:
    """Returns whether `check` answers without asking the database."""
    credentials = headers.get("authorization", "") or _cookie(headers)
    token = credentials.partition(" ")[2].strip()
    if self._open_to_all:
      return time.monotonic() - self._asked_at < _ASKED_S - 0.1
    if not token or self._is_own(token):
      return True
    entry = self._known.get(_hash(token))
    return entry is not None and entry[0] > time.monotonic() + 0.1

  def _is_own(self, token: str) -> bool:
    return bool(self._own) and hmac.compare_digest(
      token.encode("utf-8", "replace"), self._own
    )

  def _find(self, digest: str) -> Principal | None:
    entry = self._known.get(digest)
    if entry is not None and entry[0] > time.monotonic():
      return entry[1]
    table = tables.access_token
    with database.reading(self._engine) as connection:
      row = connection.execute(
        sa.select(table.c.project_id, table.c.scopes).where(
          table.c.token_hash == digest
        )
      ).one_or_none()
    principal = (
      None
      if row is None
      else Principal(row.project_id, frozenset(row.scopes.split(",")))
    )
    if len(self._known) >= _MOST_REMEMBERED:
      self._known.clear()
    self._known[digest] = time.monotonic() + _REMEMBERED_S, principal
    return principal


def _cookie(headers: Mapping[str, str]) -> str:
  """Returns the login cookie as an Authorization header; "" without."""
  for part in headers.get("cookie", "").split(";"):
    name, _, value = part.strip().partition("=")
    if name == COOKIE and value:
      return f"Bearer {value}"
  return ""


def check_same_site(headers: Mapping[str, str]) -> None:
  """Refuses a form that a page of another site has sent.

  Raises:
    ApiError: 403.
  """
  origin = headers.get("origin")
  host = headers.get("host", "")
  if headers.get("sec-fetch-site", "same-origin") not in (
    "same-origin",
    "none",
  ) or (origin and _netloc(origin) != host):
    raise errors.ApiError(
      403, f"this form was sent by another site ({str(origin)[:100]})"
    )


def check_own_form(headers: Mapping[str, str]) -> None:
  """Refuses a form unless the browser names this server as its origin.

  The cookie is not sent from other sites (SameSite=Strict), but from other
  ports of the same machine, which are the same site and another origin.

  Raises:
    ApiError: 403.
  """
  check_same_site(headers)
  if not headers.get("origin") and not headers.get("sec-fetch-site"):
    raise errors.ApiError(
      403,
      "this form has no Origin header, which a browser sends;"
      " programs use /api/v1, see /api/v1/openapi.json",
    )


def _check_host(headers: Mapping[str, str]) -> None:
  """Refuses the requests of a page at a name that resolves to this machine."""
  host = headers.get("host", "")
  if not host or not http_server.names_loopback(host):
    raise errors.ApiError(
      403,
      f"Host: {host[:100]} is not this machine; a server without tokens"
      " answers to localhost only",
    )


def _check_origin(headers: Mapping[str, str]) -> None:
  """Refuses requests that another site's page makes a browser send."""
  origin = headers.get("origin")
  if origin and _netloc(origin) != headers.get("host", ""):
    raise errors.ApiError(
      403,
      f"Origin: {origin[:100]} is another site; its pages cannot read from"
      " this server",
    )


def _netloc(origin: str) -> str:
  try:
    return parse.urlsplit(origin).netloc
  except ValueError:  # Half an IPv6 address.
    return ""


def _hash(token: str) -> str:
  return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
