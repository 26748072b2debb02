"""Makes the server's OpenAPI document from the models of its bodies.

Does not describe answers beyond their media type: they are OpenAI's, with the
fields that docs/serving.md adds.
"""

from __future__ import annotations

import re
from typing import Any, Iterable

import pydantic
from pydantic import json_schema
from tunix.rl.multi_turn.net import bounds

from agent_services.serving import bodies
from agent_services.serving import requests
from agent_services.serving.endpoints import counting
from agent_services.serving.endpoints import session_routes
from agent_services.serving.endpoints import streams

_SCHEMAS = "#/components/schemas/"
_ERROR = {
  "type": "object",
  "required": ["error"],
  "properties": {
    "error": {
      "type": "object",
      "required": ["message", "type", "param", "code"],
      "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
      },
    }
  },
}


def document(
  endpoints: Iterable[streams.Endpoint],
  limits: requests.RequestLimits = requests.RequestLimits(),
) -> dict[str, Any]:
  """Returns the OpenAPI 3.1 document.

  Args:
    endpoints: Those that sample.
    limits: Bounds of one request, which the schemas state.
  """
  posts: dict[str, tuple[type[pydantic.BaseModel] | None, str]] = {}
  for api in endpoints:
    posts[f"/v1/{api.path}"] = api.body, "Samples an answer."
    posts[f"/sessions/{{session}}/v1/{api.path}"] = (
      api.body,
      "Samples the next turn of a session.",
    )
  for count in counting.ENDPOINTS:
    for root in ("/v1", "/sessions/{session}/v1"):
      summary = "Renders a prompt, and samples nothing."
      posts[f"{root}/{count.path}"] = count.body, summary
  rewards = "/sessions/{session}/rl/set_reward"
  posts |= {
    "/rl/start_session": (session_routes.StartBody, "Starts a session."),
    rewards: (session_routes.RewardBody, "Sets the reward of an answer."),
    "/sessions/{session}/rl/end_session": (None, "Ends a session."),
    "/grant_capacity": (None, "Number of sessions that may still start."),
    "/export_trajectories": (
      session_routes.ExportBody,
      "Exports a session as training sequences.",
    ),
  }
  gets = {
    "/v1/models": "Lists the one model.",
    "/v1/models/{model}": "Describes the model.",
    "/v1/responses/{response}": "A response that is still kept.",
    "/health": "Whether the engine can still sample.",
    "/metrics": "Metrics in Prometheus' text format.",
    "/openapi.json": "This document.",
  }
  models = dict.fromkeys(model for model, _ in posts.values() if model)
  refs, schemas = json_schema.models_json_schema(
    [(model, "validation") for model in models],
    ref_template=_SCHEMAS + "{model}",
  )
  paths: dict[str, Any] = {}
  for path, (model, summary) in posts.items():
    paths[path] = {"post": _operation(path, summary)}
    if model is not None:
      content = {"application/json": {"schema": refs[model, "validation"]}}
      paths[path]["post"]["requestBody"] = {
        "content": content,
        "required": True,
        "x-maxBytes": limits.body_bytes,
      }
  for path, summary in gets.items():
    paths[path] = {"get": _operation(path, summary)}
  return {
    "openapi": "3.1.0",
    "info": {
      "title": "tunix.rl.multi_turn.serving",
      "version": "1",
      "description": (
        "`x-boundedBy: body` marks what only the body's `x-maxBytes`"
        f" bounds. A prompt has at most {limits.images} images."
      ),
    },
    "paths": paths,
    "components": {
      "schemas": _limited(schemas["$defs"], limits) | {"Error": _ERROR}
    },
  }


def _limited(schema: object, limits: requests.RequestLimits) -> Any:
  """Returns the schema with the values of the limits that its parts name."""
  if isinstance(schema, list):
    return [_limited(one, limits) for one in schema]
  if not isinstance(schema, dict):
    return schema
  stated = {k: _limited(v, limits) for k, v in schema.items()}
  if bodies.LIMIT in stated:
    most = getattr(limits, stated.pop(bodies.LIMIT))
    if most is None:
      return stated | bodies.BY_BODY
    stated["maxItems" if stated["type"] == "array" else "maximum"] = most
  return stated


def _operation(path: str, summary: str) -> dict[str, Any]:
  kind = "text/plain" if path == "/metrics" else "application/json"
  kinds = [kind]
  if summary.startswith("Samples"):
    kinds.append("text/event-stream")  # Where the body asks for a stream.
  error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
  operation: dict[str, Any] = {
    "summary": summary,
    "responses": {
      "200": {"description": "Done.", "content": {k: {} for k in kinds}},
      "4XX": {
        "description": "Refused; `param` is the field.",
        "content": error,
      },
      "5XX": {"description": "The server failed.", "content": error},
    },
  }
  if names := re.findall(r"{(\w+)}", path):
    operation["parameters"] = [
      {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "maxLength": bounds.MAX_PATH},
      }
      for name in names
    ]
  return operation
