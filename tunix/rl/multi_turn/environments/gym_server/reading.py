"""Reads requests into models; a refusal is an `ApiError` with its field.

Promises: a body is bounded in size and time; one that is not JSON is a 400, one
that violates its model a 422.
"""

from __future__ import annotations

import asyncio
from typing import Any, Mapping, TypeVar

from starlette import requests as starlette_requests
from tunix.rl.multi_turn.core import json_models
from tunix.rl.multi_turn.environments.gym_server import errors

T = TypeVar("T")

MAX_BODY = 4 << 20
"""Bytes of a request's body, or of a message."""
BODY_S = 60.0
"""Seconds for a request's body to arrive: a slow sender holds a connection."""


async def read_object(request: starlette_requests.Request) -> dict[str, Any]:
  """The body's object; an empty body is {}.

  Raises:
    ApiError: too long, too slow, no JSON, or no object.
  """
  parts, size = [], 0
  try:
    async with asyncio.timeout(BODY_S):
      async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
          raise errors.ApiError(
              413, f"the body exceeds {MAX_BODY} bytes", code="too_large"
          )
        parts.append(part)
  except TimeoutError:
    raise errors.ApiError(
        408, f"the body did not arrive within {BODY_S:g} s", code="too_slow"
    ) from None
  body = b"".join(parts)
  return object_of(body, "the body") if body.strip() else {}


def object_of(text: str | bytes, what: str) -> dict[str, Any]:
  """The object that JSON holds; null is {}.

  Raises:
    ApiError: no JSON, or no object.
  """
  try:
    data = json_models.parse(text)
  except ValueError as error:
    raise errors.ApiError(
        400, f"{what} is not JSON: {error}", code="invalid_json"
    ) from None
  if data is None:
    return {}
  if not isinstance(data, dict):
    raise errors.invalid(
        f"{what} must be an object, got a {type(data).__name__}"
    )
  return data


def validated(model: type[T], data: Mapping[str, Any], what: str = "") -> T:
  """`data` as the model; `what` names it where its fields do not.

  Raises:
    ApiError: 422, with the first wrong field.
  """
  try:
    return json_models.validate(model, data, what)
  except ValueError as error:
    raise errors.invalid(str(error)) from None


async def read(request: starlette_requests.Request, model: type[T]) -> T:
  """The body as the model."""
  return validated(model, await read_object(request))


def query(request: starlette_requests.Request, model: type[T]) -> T:
  """The parameters of the address as the model."""
  return validated(model, dict(request.query_params))
