"""Lists the server's operations and writes its OpenAPI document from them.

An `Operation` names a route, its models (see `schemas`) and the statuses of
its failures: the application serves the list, `document` describes it.

Promises: the document is generated from the models; nothing is written twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Sequence

import pydantic
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import json_models

from cua_gyms.gym_server import schemas

_EXECUTION = "/api/v1/{gym_id}/executions/{execution_id}"
GYMS = "/api/v1/gyms"
_TASK = "/api/v1/{gym_id}/tasks/{identifier:path}"  # Ids have slashes.
_BODY = (400, 408, 413, 422)
_CALL = (404, 409, 410)
_PATH_TEXT = {"type": "string", "minLength": 1, "maxLength": bounds.MAX_PATH}
_STATUS = {
  400: "The body is not JSON.",
  401: "The token is missing or wrong.",
  403: "The request comes from a web page.",
  404: "No such gym, task or execution.",
  408: "The body is too slow.",
  409: "Out of order, or a key of another request.",
  410: "The execution is over; `code` and `detail` give the reason.",
  413: "The body is too long.",
  422: "An invalid value; `detail` names the field.",
  429: "No room; try again after Retry-After seconds.",
  502: "The gym failed.",
  503: "The server is stopping.",
  504: "The gym missed its deadline.",
}
_KEY = {
  "name": "Idempotency-Key",
  "in": "header",
  "required": False,
  "schema": {
    "type": "string",
    "maxLength": schemas.MAX_KEY,
    "pattern": "^[A-Za-z0-9._:-]+$",
  },
}


@dataclasses.dataclass(frozen=True)
class Operation:
  """One route.

  Attributes:
    name: Name of the operation and of its handler.
    method: HTTP method.
    path: Path in Starlette's notation.
    answer: model of a 200; None where `media` are not JSON.
    failures: statuses beside 401 and 403.
    query: model of the address's parameters.
    body: model of the request's body.
    body_required: whether an empty body is refused.
    media: types of a 200.
    headers: further parameters.
    public: served without a token.
  """

  name: str
  method: str
  path: str
  answer: Any = None
  failures: tuple[int, ...] = ()
  query: type[schemas.Query] | None = None
  body: type[json_models.Request] | None = None
  body_required: bool = False
  media: tuple[str, ...] = ("application/json",)
  headers: tuple[dict[str, Any], ...] = ()
  public: bool = False


OPERATIONS = (
    Operation("health", "GET", "/health", schemas.Health, public=True),
    Operation("metrics", "GET", "/metrics", media=("text/plain",)),
    Operation("gyms", "GET", GYMS, schemas.Gyms),
    Operation(
        "tasks", "GET", "/api/v1/{gym_id}/tasks",
        schemas.Tasks | list[schemas.Task], (404, 422),
        query=schemas.TasksQuery,
    ),
    Operation(
        "task", "GET", _TASK, schemas.Task, (404, 422),
        query=schemas.ShapeQuery,
    ),
    Operation(
        "create", "POST", _TASK, schemas.Created,
        (*_BODY, *_CALL, 429, 502, 503, 504), body=schemas.Create,
        headers=(_KEY,),
    ),
    Operation(
        "executions", "GET", "/api/v1/{gym_id}/executions",
        schemas.Executions, (404,),
    ),
    Operation("execution", "GET", _EXECUTION, schemas.Execution, (404,)),
    Operation(
        "step", "POST", _EXECUTION + "/step", schemas.Stepped,
        (*_BODY, *_CALL, 502, 504), body=schemas.Step, body_required=True,
    ),
    Operation(
        "screenshot", "GET", _EXECUTION + "/screenshot", schemas.Shown,
        (*_CALL, 422), query=schemas.ScreenshotQuery,
        media=("image/png", "application/json"),
    ),
    Operation(
        "heartbeat", "POST", _EXECUTION + "/heartbeat", schemas.Execution,
        _CALL,
    ),
    Operation(
        "evaluate", "POST", _EXECUTION + "/evaluate", schemas.Evaluated,
        (*_BODY, *_CALL, 502, 504), body=schemas.Evaluate,
    ),
    Operation(
        "terminate", "POST", _EXECUTION + "/terminate", schemas.Terminated,
        (404,),
    ),
)  # fmt: skip
_OF_EXECUTIONS = ("step", "screenshot", "evaluate", "heartbeat", "terminate")


@functools.lru_cache(maxsize=8)  # Pydantic takes a third of a second.
def document(gym_ids: tuple[str, ...], token: bool) -> dict[str, Any]:
  """OpenAPI 3.1 of a server with these gyms.

  Args:
    gym_ids: names in addresses.
    token: whether the server asks for one.
  """
  models, components = _models()
  paths: dict[str, dict[str, Any]] = {}
  for op in OPERATIONS:
    described = _describe(op, gym_ids, models)
    path = op.path.replace(":path", "")
    paths.setdefault(path, {})[op.method.lower()] = described
  out: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Gym server", "version": "1"},
    "paths": paths,
    "components": {"schemas": components},
  }
  if token:
    out["components"]["securitySchemes"] = {
      "token": {"type": "http", "scheme": "bearer"}
    }
    out["security"] = [{"token": []}]
  return out


def _models() -> tuple[dict[str, Any], dict[str, Any]]:
  """(schema by "<operation>.<body|answer>", components) of all operations."""
  inputs: list[tuple[str, Any, pydantic.TypeAdapter[Any]]] = []
  declared: dict[str, Any] = {"Error": schemas.Error}
  for op in OPERATIONS:
    declared |= {f"{op.name}.body": op.body, f"{op.name}.answer": op.answer}
  for key, model in declared.items():
    if model is not None:
      inputs.append((key, "validation", json_models.adapter(model)))
  schemas_by_key, definitions = pydantic.TypeAdapter.json_schemas(
    inputs, ref_template="#/components/schemas/{model}"
  )
  by_name = {key: schema for (key, _), schema in schemas_by_key.items()}
  return by_name, definitions["$defs"]


def _describe(
  op: Operation, gym_ids: Sequence[str], models: dict[str, Any]
) -> dict[str, Any]:
  parameters = [
    {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in (
      ("gym_id", {"type": "string", "enum": list(gym_ids)}),
      ("identifier", _PATH_TEXT),
      ("execution_id", _PATH_TEXT),
    )
    if f"{{{name}" in op.path
  ]
  if op.query is not None:
    fields = op.query.model_json_schema()["properties"]
    for name, schema in fields.items():
      # A parameter that is not given is null in the model only.
      schema = schema.get("anyOf", [schema])[0]
      parameters.append({"name": name, "in": "query", "schema": schema})
  answers: dict[str, Any] = {
    "200": {
      "description": "OK",
      "content": {
        media: {"schema": _content(op, media, models)} for media in op.media
      },
    }
  }
  for status in sorted({401, 403, *op.failures}):
    answers[str(status)] = {
      "description": _STATUS[status],
      "content": {"application/json": {"schema": models["Error"]}},
    }
  out: dict[str, Any] = {
    "operationId": op.name,
    "parameters": [*parameters, *op.headers],
    "responses": answers,
  }
  if op.body is not None:
    body = {"application/json": {"schema": models[f"{op.name}.body"]}}
    out["requestBody"] = {"required": op.body_required, "content": body}
  if op.public:
    out["security"] = []
  if op.name == "create":
    answers["200"]["links"] = _links()
  return out


def _content(op: Operation, media: str, models: dict[str, Any]) -> Any:
  if media == "application/json":
    return models[f"{op.name}.answer"]
  if media.startswith("image/"):
    return {"type": "string", "format": "binary"}
  return {"type": "string"}


def _links() -> dict[str, Any]:
  """Links a create's answer to the calls that follow it."""
  return {
    name: {
      "operationId": name,
      "parameters": {
        "path.gym_id": "$response.body#/gym_id",
        "path.execution_id": "$response.body#/execution_id",
      },
    }
    for name in _OF_EXECUTIONS
  }
