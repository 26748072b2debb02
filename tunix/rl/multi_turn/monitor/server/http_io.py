"""Reads request bodies and path parameters, and writes answers.

Promises: a malformed value is refused with the fix; the database is not asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette import requests as starlette_requests
from starlette import responses
from tunix.rl.multi_turn.monitor.server import errors
from tunix.rl.multi_turn.monitor.server import query as query_lib

_MAX_PATH = 4000

PRIVATE = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Default headers of every answer: nothing in it runs, no page of another site
shows it, no cache keeps it."""

Request = starlette_requests.Request
Response = responses.Response


class ShortPaths:
  """Refuses long paths, as the router would read numbers of any length."""

  def __init__(self, app: Any):
    self._app = app

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http" and len(scope["path"]) > _MAX_PATH:
      error = errors.ApiError(
          414, f"the path has more than {_MAX_PATH} characters"
      )
      await refusal(error)(scope, receive, send)
    else:
      await self._app(scope, receive, send)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
  """Reads the request's body.

  Args:
    request: whose.
    limit: bytes, at most.
    timeout_s: deadline of its arrival.

  Raises:
    ApiError: 408, 413, 415.
  """
  try:
    async with asyncio.timeout(timeout_s):
      return await _read_body(request, limit)
  except TimeoutError:
    raise errors.ApiError(
        408,
        f"the body did not arrive within {timeout_s:g} s; send it again",
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
  """The answer for an error."""
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
  if value > query_lib.MAX_ID:
    raise errors.ApiError(404, f"there is no {name} {str(value)[:30]}")
  return value


def name_of(request: Request) -> str:
  """A rollout's id or name, of the path."""
  name = request.path_params["name"]
  if "\0" in name:
    raise errors.ApiError(404, "there is no rollout of this name")
  return name
