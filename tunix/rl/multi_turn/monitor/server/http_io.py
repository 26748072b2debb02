"""Reading requests and writing answers.

Promises: what a request says is read or refused with what to give instead;
nothing here asks the database.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette import requests as starlette_requests
from starlette import responses
from tunix.rl.multi_turn.core import run_tags as tags_lib
from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import errors
from tunix.rl.multi_turn.monitor.server import queries as queries_lib

_MAX_ID = (1 << 63) - 1
_MOST_PATH = 4000

PRIVATE = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer that does not say otherwise: nothing in it runs, no
page of another site shows it, nobody keeps it."""

Request = starlette_requests.Request
Response = responses.Response


class ShortPaths:
  """Answers paths that nothing has; the router reads numbers of any length."""

  def __init__(self, app: Any):
    self._app = app

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http" and len(scope["path"]) > _MOST_PATH:
      error = errors.ApiError(
          414, f"the path has more than {_MOST_PATH} characters"
      )
      await refusal(error)(scope, receive, send)
    else:
      await self._app(scope, receive, send)


async def read_body(request: Request, limit: int, most_s: float) -> bytes:
  """The request's body.

  Args:
    request: whose.
    limit: most bytes.
    most_s: seconds until it is here.

  Raises:
    ApiError: 408, 413, 415.
  """
  try:
    async with asyncio.timeout(most_s):
      return await _read_body(request, limit)
  except TimeoutError:
    raise errors.ApiError(
        408,
        f"the body did not arrive within {most_s:g} s; send it again",
    ) from None


async def _read_body(request: Request, limit: int) -> bytes:
  encoding = request.headers.get("content-encoding", "identity")
  if encoding != "identity":
    raise errors.ApiError(
        415, f"Content-Encoding: {encoding[:50]}: send the body as it is"
    )
  too_large = errors.ApiError(
      413, f"the body is larger than {limit} bytes; send smaller ones"
  )
  length = request.headers.get("content-length", "")
  if length.isascii() and length.isdigit() and (
      len(length) > 18 or int(length) > limit
  ):
    raise too_large
  parts, size = [], 0
  async for part in request.stream():
    size += len(part)
    if size > limit:
      raise too_large
    parts.append(part)
  return b"".join(parts)


def json_answer(data: Any) -> Response:
  """200, with JSON."""
  return Response(orjson.dumps(data), media_type="application/json")


def refusal(error: errors.ApiError) -> Response:
  """What an error is answered with."""
  return Response(
      orjson.dumps(error.body()),
      status_code=error.status,
      media_type="application/json",
      headers=PRIVATE | error.headers(),
  )


def id_of(request: Request, name: str = "id") -> int:
  """An id of the path.

  Raises:
    ApiError: 404, it is larger than any.
  """
  value = request.path_params[name]
  if value > _MAX_ID:
    raise errors.ApiError(404, f"there is no {name} {str(value)[:30]}")
  return value


def name_of(request: Request) -> str:
  """A rollout's id or name, of the path."""
  name = request.path_params["name"]
  if "\0" in name:
    raise errors.ApiError(404, "there is no rollout of this name")
  return name


def is_id(text: str) -> bool:
  """Whether this is the number of something."""
  # Python refuses to read numbers of thousands of digits.
  return (
      text.isascii() and text.isdigit() and len(text) < 20
      and int(text) <= _MAX_ID
  )  # pyformat: disable


def number(request: Request, name: str) -> int | None:
  """A number of the URL's query; None without.

  Raises:
    ApiError: 400.
  """
  value = request.query_params.get(name)
  if value is None:
    return None
  if is_id(value):
    return int(value)
  raise errors.ApiError(400, f"{name}={value[:30]!r}: give a number")


def page(request: Request) -> tuple[int, str | None]:
  """(most items, where they begin) of a list's page."""
  limit = number(request, "limit")
  if limit is None:
    limit = 50
  if not 1 <= limit <= queries_lib.MAX_LIMIT:
    raise errors.ApiError(
        400, f"limit={limit}: give 1 to {queries_lib.MAX_LIMIT}"
    )
  return limit, request.query_params.get("after")


def tags(request: Request) -> tuple[str, ...]:
  """Every `tag` of the URL's query.

  Raises:
    ApiError: 400.
  """
  try:
    return tags_lib.clean_all(request.query_params.getlist("tag"))
  except ValueError as error:
    raise errors.ApiError(400, f"tag: {error}") from None


def status(request: Request, kind: str) -> str | None:
  """`status` of the URL's query, a word of this kind's."""
  found = request.query_params.get("status")
  if found is not None and found not in vocabulary.STATUSES[kind]:
    words = ", ".join(vocabulary.STATUSES[kind])
    raise errors.ApiError(400, f"status={found[:30]!r}: give one of {words}")
  return found


def filters(request: Request, ids: tuple[str, ...]) -> dict[str, Any]:
  """What a list of rollouts is narrowed by."""
  found: dict[str, Any] = {name: number(request, name) for name in ids}
  found["status"] = status(request, "rollout")
  found["success"] = number(request, "success")
  if found["success"] not in (None, 0, 1):
    raise errors.ApiError(400, "success: give 0 or 1")
  return found
