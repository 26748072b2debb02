"""Makes the OpenAPI document from the routes, their query models, the tables
and the kinds of items.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import sqlalchemy as sa

from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import http_io
from training_monitor.server import queries
from training_monitor.server import query as query_lib
from training_monitor.server.batches import fields
from training_monitor.server.batches import items


@dataclasses.dataclass(frozen=True)
class Operation:
  """A route as the document describes it.

  Attributes:
    method, path: as Starlette writes them.
    name: Name of the operation, unique.
    summary: one sentence.
    scope: Scope of the token, "" for none.
    query: model of the URL's query; None takes no parameters.
    answer: a table, "page:<table>", "object", "image" or "events".
    body: "batch", "image", "images", "hashes" or "".
  """

  method: str
  path: str
  name: str
  summary: str
  scope: str = "read"
  query: type[query_lib.Query] | None = None
  answer: str = "object"
  body: str = ""


_BY_BODY = {"x-boundedBy": "body"}
_REFERENCE = {
  "type": ["integer", "string", "null"],
  "minimum": 0,
  "maximum": query_lib.MAX_ID,
  "maxLength": items.MAX_ID,
}
_COUNT = {"type": "integer", "minimum": 1, "maximum": query_lib.MAX_ID}
_REFUSALS = (
    "400", "401", "403", "404", "408", "409", "413", "414", "415", "422",
    "503",
)  # fmt: skip


def document(
  operations: list[Operation], body_bytes: Mapping[str, int]
) -> dict[str, Any]:
  """Returns the OpenAPI 3.1 document.

  Args:
    operations: The routes.
    body_bytes: Bytes of a body by its kind, see `Operation.body`; those of
      other kinds are under "".
  """
  paths: dict[str, Any] = {}
  for operation in operations:
    path = operation.path.replace(":int}", "}").replace(":path}", "}")
    paths.setdefault(path, {})[operation.method.lower()] = _operation(
      operation, body_bytes
    )
  return {
    "openapi": "3.1.0",
    "info": {
      "title": "Training Monitor",
      "version": "1",
      "description": (
        "Times are ISO 8601 in UTC. Lists come in pages: give a page's"
        " `next` as `after`. Errors are {detail, errors}. `x-boundedBy:"
        " body` marks what only the body's `x-maxBytes` bounds."
      ),
    },
    "paths": paths,
    "components": {
      "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
      "schemas": _schemas(),
    },
  }


def _operation(
  operation: Operation, body_bytes: Mapping[str, int]
) -> dict[str, Any]:
  parameters = []
  for part in operation.path.split("/"):
    if part.startswith("{"):
      name, _, kind = part.strip("{}").partition(":")
      kind = "integer" if kind == "int" else name
      parameters.append(
        {
          "name": name,
          "in": "path",
          "required": True,
          "schema": _path_parameter(kind),
        }
      )
  if operation.query is not None:
    for name, schema in operation.query.parameters().items():
      parameters.append({"name": name, "in": "query", "schema": schema})
  failed = {
    "description": "refused",
    "content": {
      "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
    },
  }
  answers = {"200": _answer(operation.answer)}
  for status in _REFUSALS:
    answers[status] = failed
  described: dict[str, Any] = {
    "operationId": operation.name,
    "summary": operation.summary,
    "responses": answers,
  }
  if parameters:
    described["parameters"] = parameters
  if operation.scope:
    # A role, as 3.1 has it for a scheme that is not OAuth's; none without
    # tokens.
    described["security"] = [{"token": [operation.scope]}, {}]
  if operation.body:
    described["requestBody"] = {
      "required": True,
      "content": _body(operation.body),
      "x-maxBytes": body_bytes.get(operation.body, body_bytes[""]),
    }
  return described


def _path_parameter(kind: str) -> dict[str, Any]:
  if kind == "integer":
    return {"type": "integer", "minimum": 0, "maximum": query_lib.MAX_ID}
  if kind == "sha256":
    return {"type": "string", "pattern": "^[0-9a-f]{64}$"}
  return {"type": "string", "maxLength": http_io.MAX_PATH}


def _answer(kind: str) -> dict[str, Any]:
  if kind == "image":
    content: Any = {"image/*": {}}
  elif kind == "events":
    content = {"text/event-stream": {"schema": {"type": "string"}}}
  else:
    page, _, table = kind.rpartition(":")
    schema: Any = {"type": "object"}
    if table != "object":
      schema = {"$ref": f"#/components/schemas/{table}"}
    if page:
      schema = {
        "type": "object",
        "required": ["items", "next"],
        "properties": {
          "items": {"type": "array", "items": schema},
          "next": {"type": ["string", "null"]},
        },
      }
    content = {"application/json": {"schema": schema}}
  return {"description": "the answer", "content": content}


def _body(kind: str) -> dict[str, Any]:
  if kind == "image":
    binary = {"schema": {"type": "string", "format": "binary", **_BY_BODY}}
    return {t: binary for t in ("image/png", "image/jpeg", "image/webp")}
  if kind == "images":
    return {
      "application/octet-stream": {
        "schema": {"type": "string", "format": "binary", **_BY_BODY}
      }
    }
  if kind == "hashes":
    schema: Any = {
      "type": "object",
      "required": ["sha256"],
      "properties": {
        "sha256": {
          "type": "array",
          "maxItems": 1000,
          "items": _path_parameter("sha256"),
        }
      },
    }
  else:
    schema = {"$ref": "#/components/schemas/Batch"}
  return {"application/json": {"schema": schema}}


def _schemas() -> dict[str, Any]:
  schemas: dict[str, Any] = {
    "Error": {
      "type": "object",
      "required": ["detail"],
      "properties": {
        "detail": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
      },
    },
    "Batch": _batch(),
  }
  shown = [*tables.TABLES, tables.delivery, tables.group]
  for table in shown:
    schemas[str(table.name)] = {
      "type": "object",
      "properties": {str(c.name): _column(table.name, c) for c in table.c},
    }
  schemas["training"]["properties"] |= {
    "tags": {"type": "array", "items": {"type": "string"}},
    "pinned": {"type": "boolean"},
  }
  return schemas


def _column(table: str, column: sa.Column) -> dict[str, Any]:
  if column.name in queries.JSON_COLUMNS:
    return {}
  kind = "string"
  if column.type is tables.INTEGER:
    kind = "integer"
  elif column.type is tables.REAL:
    kind = "number"
  types: Any = [kind, "null"] if column.nullable else kind
  schema: dict[str, Any] = {"type": types}
  if isinstance(column.type, sa.TIMESTAMP):
    schema["format"] = "date-time"
  words = vocabulary.CHOICES.get((table, column.name))
  if words:
    schema["enum"] = [*words, None] if column.nullable else list(words)
  return schema


def _batch() -> dict[str, Any]:
  properties: dict[str, Any] = {
    "training_id": _REFERENCE,
    "delivery": {
      "type": ["object", "null"],
      "properties": {
        "spool": {"type": "string", "minLength": 1, "maxLength": 100},
        "first": _COUNT,
        "last": _COUNT,
        "health": {"x-maxBytes": fields.MAX_TEXT},
      },
      "required": ["spool", "first", "last"],
    },
    # Bodies of their own, in order; instead of the rest.
    "parts": {
      "type": ["array", "null"],
      "items": {"type": "object", **_BY_BODY},
      **_BY_BODY,
    },
  }
  for kind in items.KINDS:
    item: dict[str, Any] = {
      "type": "object",
      "properties": {
        "client_id": {
          "type": ["string", "null"],
          "minLength": 1,
          "maxLength": items.MAX_ID,
        },
        **{parent: _REFERENCE for parent in kind.parents},
        **{
          field: fields.schema(reader)
          for field, (_, reader) in kind.readers.items()
        },
      },
      # Fields of no known name are kept as they came.
      "additionalProperties": True,
      **_BY_BODY,
    }
    if kind.name == "training":
      tags = query_lib.TagChange.model_json_schema()["properties"]["add"]
      item["properties"]["tags"] = {**tags, "type": ["array", "null"]}
      properties["training"] = item
    else:
      properties[kind.plural] = {
        "type": ["array", "null"],
        "items": item,
        "maxItems": items.MAX_ITEMS,
      }
  return {
    "type": "object",
    "properties": properties,
    "additionalProperties": False,
  }
