"""The server's OpenAPI document, for clients' generators and for fuzzers.

Written by hand, as the protocol is: a test holds the server to it.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire


def _schema(name: str) -> dict[str, str]:
  return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: Any, required: bool = False) -> dict[str, Any]:
  return {
      "required": required,
      "content": {"application/json": {"schema": schema}},
  }


def _object(
    properties: dict[str, Any], required: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
  out: dict[str, Any] = {"type": "object", "properties": properties, **more}
  if required:
    out["required"] = list(required)
  return out


_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_NUMBER = {"type": "number"}
_MANY = _object({})
_PIXELS = {"type": "number", "minimum": -1e6, "maximum": 1e6}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}


def _answers(ok: Any, *codes: int, media: str = "application/json") -> Any:
  out: dict[str, Any] = {
      "200": {
          "description": "OK",
          "content": {media: {"schema": ok}},
      }
  }
  for code in sorted({401, 403, *codes}):
    out[str(code)] = {
        "description": _WHY[code],
        "content": {"application/json": {"schema": _schema("Error")}},
    }
  return out


_WHY = {
    400: "The body is no JSON.",
    401: "The token is missing or wrong.",
    403: "The request is a web page's.",
    404: "There is no such gym, task or execution.",
    408: "The body is too slow.",
    409: "Out of order, or a key that was used for something else.",
    410: "The execution is over; `code` and `detail` say why.",
    413: "The body is too long.",
    422: "A value that cannot be; `detail` names the field.",
    429: "No room; ask again after Retry-After seconds.",
    502: "The gym failed.",
    503: "The server is ending.",
    504: "The gym missed its deadline.",
}
_BAD = (400, 404, 408, 413, 422)


def _parameter(name: str, where: str, schema: Any) -> dict[str, Any]:
  return {
      "name": name, "in": where, "required": where == "path", "schema": schema,
  }  # pyformat: disable


def document(gym_ids: Sequence[str], token: bool) -> dict[str, Any]:
  """OpenAPI 3.1 of a server with these gyms."""
  gym = _parameter("gym_id", "path", {**_TEXT, "enum": list(gym_ids)})
  task = _parameter("identifier", "path", {**_TEXT, "minLength": 1})
  execution = _parameter("execution_id", "path", {**_TEXT, "minLength": 1})
  shape = _parameter(
      "shape", "query", {**_TEXT, "enum": ["summary", "meta", "flat"]}
  )

  def operation(name: str, parameters: Any, answers: Any, body: Any = None):
    out = {
        "operationId": name, "parameters": parameters, "responses": answers,
    }  # pyformat: disable
    if body is not None:
      out["requestBody"] = body
    if name == "health":
      out["security"] = []
    return out

  one = "/api/v1/{gym_id}/executions/{execution_id}"
  listed = [
      gym, shape,
      _parameter("split", "query", {**_TEXT, "enum": ["train", "eval"]}),
      _parameter("family", "query", _TEXT),
      _parameter("full", "query", _FLAG),
      _parameter("bare", "query", _FLAG),
  ]  # pyformat: disable
  both = [gym, execution]
  paths = {
      "/health": {"get": operation("health", [], _answers(_MANY))},
      "/metrics": {
          "get": operation("metrics", [], _answers(_TEXT, media="text/plain"))
      },
      "/api/v1/gyms": {"get": operation("gyms", [], _answers(_MANY))},
      "/api/v1/{gym_id}/tasks": {
          "get": operation(
              "tasks", listed,
              _answers({"anyOf": [
                  _object({"tasks": {"type": "array"}}, ["tasks"]),
                  {"type": "array"},
              ]}, 404, 422),
          )
      },
      "/api/v1/{gym_id}/tasks/{identifier}": {
          "get": operation(
              "task", [gym, task, shape], _answers(_MANY, 404, 422)
          ),
          "post": operation(
              "create",
              [
                  gym, task,
                  _parameter("Idempotency-Key", "header",
                             {**_TEXT, "maxLength": 256,
                              "pattern": "^[A-Za-z0-9._:-]+$"}),
              ],
              _answers(
                  _schema("Created"), *_BAD, 409, 410, 429, 502, 503, 504
              ),
              _body(_schema("Create")),
          ),
      },
      "/api/v1/{gym_id}/executions": {
          "get": operation("executions", [gym], _answers(_MANY, 404))
      },
      one: {"get": operation(
          "execution", both, _answers(_schema("Execution"), 404)
      )},
      one + "/step": {"post": operation(
          "step", both,
          _answers(_schema("Stepped"), *_BAD, 409, 410, 502, 504),
          _body(_schema("Step"), True),
      )},
      one + "/screenshot": {"get": operation(
          "screenshot",
          [*both, _parameter("format", "query",
                             {**_TEXT, "enum": ["png", "json"]})],
          {
              **_answers(_MANY, 404, 409, 410, 422),
              "200": {"description": "OK", "content": {
                  "image/png": {"schema": {**_TEXT, "format": "binary"}},
                  "application/json": {"schema": _MANY},
              }},
          },
      )},
      one + "/heartbeat": {"post": operation(
          "heartbeat", both, _answers(_schema("Execution"), 404, 409, 410)
      )},
      one + "/evaluate": {"post": operation(
          "evaluate", both,
          _answers(_schema("Evaluated"), *_BAD, 409, 410, 502, 504),
          _body(_schema("Evaluate")),
      )},
      one + "/terminate": {"post": operation(
          "terminate", both, _answers(_schema("Execution"), 404)
      )},
  }  # pyformat: disable
  # What a client gets to know by a create is what its next calls are about.
  links = {
      name: {
          "operationId": name,
          "parameters": {
              "path.gym_id": "$response.body#/gym_id",
              "path.execution_id": "$response.body#/execution_id",
          },
      }
      for name in ("step", "screenshot", "evaluate", "heartbeat", "terminate")
  }
  create = paths["/api/v1/{gym_id}/tasks/{identifier}"]["post"]
  create["responses"]["200"]["links"] = links
  out: dict[str, Any] = {
      "openapi": "3.1.0",
      "info": {"title": "Gym server", "version": "1"},
      "paths": paths,
      "components": {"schemas": _schemas()},
  }
  if token:
    out["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"}
    }
    out["security"] = [{"token": []}]
  return out


_FIELDS: dict[str, Any] = {
    "x": _PIXELS, "y": _PIXELS, "x2": _PIXELS, "y2": _PIXELS,
    "dx": _PIXELS, "dy": _PIXELS,
    "button": {
        **_TEXT, "enum": ["left", "right", "middle", "back", "forward"],
    },
    "count": {"type": "integer", "minimum": 1, "maximum": 3},
    "text": {**_TEXT, "maxLength": wire.MAX_TEXT},
    "keys": {
        "type": "array", "minItems": 1, "maxItems": wire.MAX_KEYS,
        "items": {**_TEXT, "maxLength": 64},
    },
    "duration": {"type": "number", "minimum": 0, "maximum": 3600},
    "success": _FLAG,
}  # pyformat: disable


def _own(kind: wire.Kind) -> dict[str, Any]:
  """An action of our own vocabulary."""
  required, optional = gui_action.fields_of(kind)
  return _object(
      {
          "kind": {"const": kind.value},
          **{n: s for n, s in _FIELDS.items() if n in required | optional},
      },
      ["kind", *sorted(required)],
      additionalProperties=False,
  )


def openenv_schemas() -> dict[str, Any]:
  """JSON Schemas of an OpenEnv environment's action, observation and state."""
  observation = _schemas()["Observation"]
  fields = {k: v for k, v in observation["properties"].items() if k != "done"}
  # Beside the observation OpenEnv sends done and reward.
  fields |= {"metadata": _MANY, "done": _FLAG, "reward": _NUMBER}
  shown = _object(fields, ["screenshot", "instruction", "text"])
  actions = [_own(kind) for kind in wire.Kind]
  for action in actions:
    action["properties"]["metadata"] = _MANY
  return {
      "action": {**_object({"kind": _TEXT}, ["kind"]), "anyOf": actions},
      "observation": shown,
      "reset_observation": shown,
      "state": _object({
          "episode_id": {"type": ["string", "null"]},
          "step_count": {"type": "integer", "minimum": 0},
          "task_id": _TEXT, "family": _TEXT, "seed": {"type": "integer"},
          "done": _FLAG, "status": _TEXT, "lease_left_s": _NUMBER,
          "evaluation": {"type": ["object", "null"]},
      }, ["episode_id", "step_count"]),
  }  # pyformat: disable


def _schemas() -> dict[str, Any]:
  genv = _object(
      {
          "name": {
              **_TEXT, "enum": ["tap", "swipe", "type", "key", "long_press"],
          },
          "args": _object({
              "x_norm": _SHARE, "y_norm": _SHARE,
              "x2_norm": _SHARE, "y2_norm": _SHARE,
              "duration_ms": {"type": "number", "minimum": 0},
              "text": _TEXT,
              "key": {**_TEXT, "enum": ["home", "back", "menu", "enter"]},
          }),
      },
      ["name", "args"],
  )  # pyformat: disable
  execution = {
      "execution_id": _TEXT, "gym_id": _TEXT, "task_id": _TEXT,
      "status": {
          **_TEXT,
          "enum": ["creating", "running", "terminated", "failed", "expired"],
      },
      "steps": {"type": "integer"}, "done": _FLAG, "age_s": _NUMBER,
      "lease_s": _NUMBER, "lease_left_s": _NUMBER,
      "reason": _TEXT, "code": _TEXT,
  }  # pyformat: disable
  known = ["execution_id", "gym_id", "task_id", "status", "steps", "done"]
  observation = _object(
      {
          "instruction": _TEXT, "text": _TEXT, "done": _FLAG, "info": _MANY,
          "screenshot": _object(
              {
                  "format": {**_TEXT, "enum": ["png"]},
                  "width": {"type": "integer"}, "height": {"type": "integer"},
                  "data": _TEXT,
              },
              ["format", "width", "height", "data"],
          ),
      },
      ["instruction", "text", "done"],
  )  # pyformat: disable
  validator = _object(
      {
          "id": _TEXT, "type": _TEXT, "pass": _FLAG, "score": _NUMBER,
          "weight": _NUMBER,
      },
      ["id", "pass", "score", "weight"],
  )  # pyformat: disable
  return {
      "Error": _object({"detail": _TEXT, "code": _TEXT}, ["detail", "code"]),
      "Create": _object({
          "options": _object({
              "observe": _FLAG,
              "screenshot": _FLAG,
              "lease_s": {"type": "number", "exclusiveMinimum": 0},
              "gym": _MANY,
          }),
          "idempotency_key": {**_TEXT, "maxLength": 256},
      }),
      "Created": _object(
          {
              **execution, "box_id": _TEXT, "task": _MANY, "screen": _MANY,
              "env_build": _MANY, "observation": _schema("Observation"),
              "replayed": _FLAG,
          },
          [*known, "box_id", "task", "env_build"],
      ),
      "Execution": _object(execution, known),
      "Action": {"anyOf": [*map(_own, wire.Kind), genv]},
      "Step": _object(
          {
              "action": _schema("Action"),
              "step": {"type": "integer", "minimum": 1},
              "screenshot": _FLAG,
          },
          ["action"],
      ),
      "Observation": observation,
      "Stepped": _object(
          {
              "step": {"type": "integer"},
              "observation": _schema("Observation"),
          },
          ["step", "observation"],
      ),
      "Evaluate": _object({
          "execution_data": _MANY,
          "answer_text": {**_TEXT, "maxLength": wire.MAX_TEXT},
          "context_text": _TEXT,
          "facts": _MANY,
      }),
      "Evaluated": _object(
          {
              "success": _FLAG,
              "result": _object(
                  {
                      "score": _NUMBER, "success": _FLAG, "details": _MANY,
                      "validators": {"type": "array", "items": validator},
                  },
                  ["score", "success", "validators"],
              ),
          },
          ["success", "result"],
      ),
  }  # pyformat: disable
