"""Reads request bodies and path parameters, and writes answers.

Promises: a malformed value is refused with the fix; the database is not asked.
"""

from __future__ import annotations

from typing import Any, Callable

import orjson
from starlette import concurrency
from starlette import requests as starlette_requests
from starlette import responses
from starlette import types

from training_monitor.core import json_text
from training_monitor.net import request_bodies
from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server.batches import fields

MAX_PATH = 4000

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

  def __init__(self, app: types.ASGIApp):
    self._app = app

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    if scope["type"] == "http" and len(scope["path"]) > MAX_PATH:
      error = errors.ApiError(
        414, f"the path has more than {MAX_PATH} characters"
      )
      await refusal(error)(scope, receive, send)
    else:
      await self._app(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes:
  """Reads the request's body.

  Args:
    request: The request.
    limit: bytes, at most.

  Raises:
    ApiError: 408, 413, 415, 429.
  """
  encoding = request.headers.get("content-encoding", "identity")
  if encoding != "identity":
    raise errors.ApiError(
      415, f"Content-Encoding: {encoding[:50]}: send the body as it is"
    )
  try:
    return await request_bodies.read(request, limit)
  except request_bodies.BodyRefused as error:
    raise errors.ApiError(
      error.status, error.message, retry_after_s=error.retry_after_s
    ) from None


def parse(body: bytes) -> Any:
  """Returns the value of a body of JSON, as Python's own writer has it.

  Bare NaN and infinities become their names, which `fields.real` takes as
  unknown; half of a surrogate pair becomes U+FFFD. Deep nesting is refused.

  Raises:
    ApiError: 400, it is no JSON, or nested too deeply.
  """
  try:
    value = orjson.loads(body)
  except orjson.JSONDecodeError as error:
    wrong = f"the body is not JSON: {error}"
    try:
      # A name in the place of a number; the readers of fields know it.
      return fields.python_json(body.decode())
    except (ValueError, OverflowError):
      raise errors.ApiError(400, wrong) from None
  try:
    return json_text.check_depth(value)
  except ValueError as error:
    raise errors.ApiError(400, f"the body: {error}; send it as text") from None


def json_answer(data: object) -> Response:
  """Returns a 200 with JSON."""
  return Response(orjson.dumps(data), media_type="application/json")


def refusal(error: errors.ApiError) -> Response:
  """Returns the answer for an error."""
  return Response(
    orjson.dumps(error.body()),
    status_code=error.status,
    media_type="application/json",
    headers=PRIVATE | error.headers(),
  )


def id_of(request: Request, name: str = "id") -> int:
  """Returns an id from the path.

  Raises:
    ApiError: 404, it is larger than any.
  """
  value = request.path_params[name]
  if value > query_lib.MAX_ID:
    raise errors.ApiError(
      404,
      f"there is no {name}={str(value)[:30]}; give a number in"
      f" [0, {query_lib.MAX_ID}]",
    )
  return value


def name_of(request: Request) -> str:
  """Returns a rollout's id or name from the path."""
  name = request.path_params["name"]
  if "\0" in name:
    raise errors.ApiError(404, "there is no rollout of this name")
  return name


async def in_thread(ask: Callable[..., Any], *arguments: Any) -> Any:
  """Calls `ask` in a thread; returns its result."""
  return await concurrency.run_in_threadpool(ask, *arguments)
