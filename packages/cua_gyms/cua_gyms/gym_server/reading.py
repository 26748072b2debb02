"""Reads requests into models; a refusal names the field.

Promises: a body is bounded in size; one that is not JSON is a 400, one
that violates its model a 422.
"""

from __future__ import annotations

from typing import Any, Mapping, TypeVar

from starlette import requests as starlette_requests
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.net import request_bodies

from cua_gyms import applications

T = TypeVar("T")

MAX_BODY = 4 << 20
"""Bytes of a request's body, or of a message."""


async def read_object(request: starlette_requests.Request) -> dict[str, Any]:
  """Returns the body's object; an empty body is {}.

  Raises:
    ServiceError: no JSON, or no object.
    BodyRefused: too long, too slow, or no memory for it.
  """
  body = await request_bodies.read(request, MAX_BODY)
  return object_of(body, "the body") if body.strip() else {}


def object_of(text: str | bytes, what: str) -> dict[str, Any]:
  """Returns the object that JSON holds; null is {}.

  Raises:
    ServiceError: no JSON, or no object.
  """
  try:
    data = json_models.parse(text)
  except ValueError as error:
    raise applications.ServiceError(
      400, f"{what} is not JSON: {error}", code="invalid_json"
    ) from None
  if data is None:
    return {}
  if not isinstance(data, dict):
    raise applications.invalid(
      f"{what} must be an object, got a {type(data).__name__}"
    )
  return data


def validated(model: type[T], data: Mapping[str, Any], what: str = "") -> T:
  """`data` as the model; `what` names it where its fields do not.

  Raises:
    ServiceError: 422, with the first wrong field.
  """
  try:
    return json_models.validate(model, data, what)
  except ValueError as error:
    raise applications.invalid(str(error)) from None


async def read(request: starlette_requests.Request, model: type[T]) -> T:
  """Returns the body as the model."""
  return validated(model, await read_object(request))


def query(request: starlette_requests.Request, model: type[T]) -> T:
  """Returns the parameters of the address as the model."""
  return validated(model, dict(request.query_params))
