"""Every request schema of the six services bounds what it takes.

Numbers, strings, lists and mappings of a request become memory, time or
processes of the service, so each has a bound in its schema.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Iterator, Mapping

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import requests as buffer_requests
from agent_services.rollout_buffer import service as buffer_service
from agent_services.run_service import schemas as run_schemas
from agent_services.serving import app as serving_app
from agent_services.serving import image_proxy
from agent_services.serving import media
from agent_services.serving import openapi as serving_openapi
from agent_services.serving import requests as serving_requests
from cua_gyms.gym_server import openapi as gym_openapi
from cua_gyms.gym_server import schemas as gym_schemas
import pydantic
import pytest
from training_monitor import app as monitor_app
from training_monitor.schema import database
from training_monitor.server import access
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms


def unbounded(
  schema: Any, defs: Mapping[str, Any], path: str, trail: tuple[str, ...] = ()
) -> Iterator[str]:
  """Yields the path of each part of a JSON schema that has no bound."""
  if schema is True or not isinstance(schema, dict):
    if schema is True:
      yield f"{path}: any value"
    return
  if "$ref" in schema:
    name = schema["$ref"].rpartition("/")[2]
    if name not in trail:
      yield from unbounded(defs[name], defs, path, (*trail, name))
    return
  if "const" in schema or "enum" in schema or "x-maxBytes" in schema:
    return
  by_body = schema.get("x-boundedBy") == "body"
  branches = [b for key in ("anyOf", "oneOf") for b in schema.get(key, ())]
  for branch in branches:
    yield from unbounded(branch, defs, path, trail)
  for part in schema.get("allOf", ()):
    yield from unbounded(part, defs, path, trail)
  kinds = schema.get("type")
  if kinds is None:
    if not branches and "allOf" not in schema and not by_body:
      yield f"{path}: any value"
    return
  for kind in kinds if isinstance(kinds, list) else [kinds]:
    yield from _unbounded_kind(kind, schema, defs, path, trail)


def _unbounded_kind(kind, schema, defs, path, trail) -> Iterator[str]:
  if kind in ("integer", "number"):
    low = {"minimum", "exclusiveMinimum"} & schema.keys()
    high = {"maximum", "exclusiveMaximum"} & schema.keys()
    if not low or not high:
      yield f"{path}: {kind}"
  elif kind == "string":
    if not {"maxLength", "pattern", "x-boundedBy"} & schema.keys():
      yield f"{path}: string"
  elif kind == "array":
    if not {"maxItems", "x-boundedBy"} & schema.keys():
      yield f"{path}: array"
    for item in schema.get("prefixItems", ()):
      yield from unbounded(item, defs, path + "[]", trail)
    yield from unbounded(schema.get("items", True), defs, path + "[]", trail)
  elif kind == "object":
    for name, inner in schema.get("properties", {}).items():
      yield from unbounded(inner, defs, f"{path}.{name}", trail)
    more = schema.get("additionalProperties", "properties" not in schema)
    stated = {"x-maxValues", "x-boundedBy"} & schema.keys()
    if more is True and not stated:
      yield f"{path}: mapping of any values"
    elif isinstance(more, dict):
      if "maxProperties" not in schema:
        yield f"{path}: mapping"
      yield from unbounded(more, defs, path + ".*", trail)


# --- the services -------------------------------------------------------------


def _of_document(document: Mapping[str, Any]) -> Iterator[str]:
  """`unbounded` of every parameter and body of an OpenAPI document."""
  defs = document["components"]["schemas"]
  for path, methods in document["paths"].items():
    for method, operation in methods.items():
      where = f"{method} {path}"
      for one in operation.get("parameters", ()):
        yield from unbounded(one["schema"], defs, f"{where} ?{one['name']}")
      body = operation.get("requestBody", {})
      for content in body.get("content", {}).values():
        schema = content["schema"]
        yield from unbounded(schema, defs, where)
        if "x-boundedBy" in _keys(schema, defs) and "x-maxBytes" not in body:
          yield f"{where}: no size of the body"


def _keys(schema: Any, defs: Mapping[str, Any], trail: tuple = ()) -> set[str]:
  """Returns the keywords of a schema and of the schemas that it names."""
  if isinstance(schema, list):
    return set().union(*(_keys(one, defs, trail) for one in schema))
  if not isinstance(schema, dict):
    return set()
  name = str(schema.get("$ref", "")).rpartition("/")[2]
  inner = set()
  if name and name not in trail:
    inner = _keys(defs[name], defs, (*trail, name))
  return set(schema) | inner | _keys([*schema.values()], defs, trail)


def _of_model(model: type[pydantic.BaseModel]) -> list[str]:
  schema = model.model_json_schema()
  return [*unbounded(schema, schema.get("$defs", {}), model.__name__)]


def test_the_walk_finds_what_has_no_bound():
  class Inner(pydantic.BaseModel):
    text: str
    numbers: list[Annotated[int, pydantic.Field(ge=0)]] | None = None

  class Body(pydantic.BaseModel):
    inner: dict[str, Inner]
    anything: Any = None
    flag: bool = False
    short: Annotated[str, pydantic.Field(max_length=3)] = ""

  assert sorted(_of_model(Body)) == [
    "Body.anything: any value",
    "Body.inner.*.numbers: array",
    "Body.inner.*.numbers[]: integer",
    "Body.inner.*.text: string",
    "Body.inner: mapping",
  ]


def test_the_run_service_bounds_every_field():
  assert not _of_model(run_schemas.CreateBody)


@pytest.mark.parametrize(
  "model",
  [
    gym_schemas.Message,
    gym_schemas.Reset,
    gym_schemas.StepMetadata,
    gym_schemas.SplitBody,
    gym_schemas.IndexBody,
    gym_schemas.RangeBody,
  ],
)
def test_the_gym_server_bounds_every_field_of_openenv(model):
  assert not _of_model(model)


def test_the_gym_server_bounds_every_field():
  assert not [*_of_document(gym_openapi.document(("desktop",), True))]


def test_the_policy_server_bounds_every_field():
  limits = serving_requests.RequestLimits(n=5, prompt_tokens=77)
  document = serving_openapi.document(serving_app.ENDPOINTS, limits)
  assert not [*_of_document(document)]
  body = document["components"]["schemas"]["ChatBody"]["properties"]
  assert body["n"]["maximum"] == 5
  assert any(b.get("maxItems") == 77 for b in body["prompt_token_ids"]["anyOf"])


def test_the_rollout_buffer_bounds_every_field(tmp_path):
  schemas = buffer_requests.schemas()
  assert not [
    problem
    for path, schema in schemas.items()
    for problem in unbounded(schema, {}, path)
  ]
  # No call that takes a body, or a query, is left out.
  service = buffer_service.Service(tmp_path)
  with contextlib.closing(service):
    routes = {r.path for r in buffer_app.App(service).asgi.routes}
  calls = {p for p in routes if "rollout" in p or "/buffer/" in p}
  assert {p for p in calls if not p.startswith("/b/")} == schemas.keys()


def test_the_monitor_bounds_every_field(tmp_path):
  engine = database.connect(str(tmp_path / "monitor.db"))
  database.upgrade(engine)
  app = monitor_app.MonitorApp(
    engine, tmp_path, access.Access(engine, "", open_to_all=True)
  )
  assert not [*_of_document(app.document)]
  app.writer.close()
  engine.dispose()


def test_the_image_proxy_has_one_route_without_a_schema_of_its_own():
  """Its upstream's schema bounds what passes; `max_images` and the size of a
  body are the proxy's own bounds."""
  proxy = image_proxy.ImageProxy("http://127.0.0.1:1", media.MediaLimits())
  assert [r.path for r in proxy.asgi.routes] == ["/{path:path}"]


def test_numbers_among_a_gym_s_options_have_bounds():
  for name in gyms.names():
    gym = gyms.get(name)
    try:
      options = gym.options
    except ImportError:
      continue
    assert not [option for option in options if gym.unbounded(option)], name


@pytest.mark.parametrize(
  "options, fault",
  [
    ({"width": 9000}, "options.width=9000 must be in [1, 8192]"),
    ({"width": 8192, "height": 8192}, "a screen has at most 32000000"),
    ({"difficulty": 3}, "options.difficulty=3 must be in [0, 2]"),
    ({"time_decay": 1e300}, "must be in [0, 1]"),
    ({"workers": 2}, "options.workers=2 is a number without bounds"),
    ({"timeouts": {"step_s": 1e9}}, "options.timeouts.step_s="),
  ],
)
def test_a_client_s_options_of_a_gym_are_bounded(options, fault):
  assert fault in next(gyms.get("desktop").out_of_bounds(options, "options."))
