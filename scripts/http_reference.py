"""Writes the tables of docs/http_api.md: every route of the HTTP services.

    python scripts/http_reference.py

Promises: the page lists the routes of the applications themselves, built here;
a route that it lacks, or that is no longer served, is an error. Tables of
services with an OpenAPI document are made of it; the rest of the page is kept.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import tempfile
from typing import Any, Iterable, Iterator, Mapping, NamedTuple

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import requests as buffer_requests
from agent_services.rollout_buffer import service as buffer_service
from agent_services.run_service import app as run_app
from agent_services.run_service import schemas as run_schemas
from agent_services.serving import app as serving_app
from agent_services.serving import openapi as serving_openapi
from agent_services.serving import server as serving_server
from agent_services.serving.endpoints import counting as serving_counting
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import gym_app
from cua_gyms.gym_server import openapi as gym_openapi
from starlette import applications
from training_monitor import app as monitor_app
from training_monitor.schema import database
from training_monitor.server import access
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "http_api.md"
Call = tuple[str, str]  # Method and path.

GYM_CALLS = {
  "health": "The server answers; its gyms and counts.",
  "metrics": "Metrics in Prometheus' text format.",
  "gyms": "The gyms that are served.",
  "tasks": "A gym's tasks.",
  "task": "One task.",
  "create": "Starts an execution of a task.",
  "executions": "Executions that are open.",
  "execution": "One execution's state.",
  "step": "Does one action.",
  "screenshot": "The screen as it is.",
  "heartbeat": "Keeps an execution open.",
  "evaluate": "The verdict; the execution stays open.",
  "terminate": "Ends an execution; a second call changes nothing.",
}


class Service(NamedTuple):
  """A service, which has the section `title` of the page.

  Attributes:
    title: Title of the section.
    calls: Routes that the section lists.
    rows: Rows of the section's first table; none where it is kept.
    names: Fields that the section names.
  """

  title: str
  calls: set[Call]
  rows: Iterable[Iterable[str]] = ()
  names: Iterable[str] = ()


def served(asgi: applications.Starlette) -> set[Call]:
  """The routes of an application."""
  calls: set[Call] = set()
  for route in asgi.routes:
    path = re.sub(r":\w+}", "}", route.path)  # type: ignore[attr-defined]
    methods = getattr(route, "methods", None) or {"WS"}
    calls |= {(method, path) for method in methods - {"HEAD"}}
  return calls


def agree(name: str, served_here: set[Call], described: Iterable[Call]) -> None:
  """Raises ValueError where the two differ."""
  described = set(described)
  if served_here != described:
    raise ValueError(
      f"{name}: describe {sorted(served_here - described)}, take out"
      f" {sorted(described - served_here)} in docs/http_api.md"
    )


def rows_of(
  document: Mapping[str, Any],
  purposes: Mapping[str, str] | None = None,
  scopes: bool = False,
) -> Iterator[list[str]]:
  """The head, and a row for each operation of an OpenAPI document.

  Args:
    document: the document.
    purposes: Purpose by `operationId`; None takes the summaries.
    scopes: adds a column with the scope of the token.
  """
  yield ["call", "purpose", *["scope"] * scopes, "takes"]
  schemas = document["components"]["schemas"]
  for path, methods in document["paths"].items():
    for method, operation in methods.items():
      if purposes is None:
        purpose = operation["summary"]
      else:
        purpose = purposes[operation["operationId"]]
      tokens = operation.get("security", [{"token": ["–"]}])
      scope = [one["token"][0] for one in tokens[:1] if scopes]
      call = f"`{method.upper()} {path}`"
      yield [call, purpose, *scope, takes(operation, schemas)]


def takes(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
  """Parameters and fields of the body of an OpenAPI operation."""
  marks = {"query": "`?{}`", "header": "header `{}`"}
  parts = [
    marks[one["in"]].format(one["name"])
    for one in operation.get("parameters", ())
    if one["in"] in marks
  ]
  body = operation.get("requestBody", {}).get("content", {})
  for media, content in body.items():
    schema = content["schema"]
    schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    fields = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
    parts.append(f"body: {fields or f'`{media}`'}")
  return ", ".join(parts)


# --- the services -------------------------------------------------------------


def policy_server() -> Service:
  """The OpenAI-compatible server, around a policy that samples nothing."""
  policy = checkpoint.create_policy("nano", 0, screen=(32, 32))
  model, processor, _ = policy
  store = images.ImageStore()
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(slots=2, context_length=256),
    image_sizes=((32, 32),),
    banned_token_ids=model.config.banned_token_ids,
  )
  app = serving_server.make_app("nano", engine, policy, store)
  engine.close()
  endpoints = (*serving_app.ENDPOINTS, *serving_counting.ENDPOINTS)
  names = "|".join(api.path for api in endpoints)
  session = r"^/sessions/\{session\}"
  # Other forms of an address, which the section mentions in words.
  forms = (
    (r"^/\{session\}/", "/sessions/{session}/"),
    (rf"^/({names})$", r"/v1/\1"),
    (rf"{session}/({names})$", r"/sessions/{session}/v1/\1"),
    (rf"{session}/(?:v1/)?((?:models|responses/).*)$", r"/v1/\1"),
    (r"^/rl/(set_reward|end_session)$", r"/sessions/{session}/rl/\1"),
  )
  calls = set()
  for method, path in served(app.asgi):
    for pattern, form in forms:
      path = re.sub(pattern, form, path)
    calls.add((method, path))
  document = serving_openapi.document(serving_app.ENDPOINTS)
  return Service("Policy server", calls, rows_of(document))


def gym_server() -> Service:
  app = gym_app.App((catalog.ServedGym(gym_id="desktop", gym="desktop"),))
  document = gym_openapi.document(("desktop",), True)
  calls = served(app.asgi) - {("GET", "/openapi.json")}
  return Service("Gym server", calls, rows_of(document, GYM_CALLS))


def run_service() -> Service:
  fields = run_schemas.CreateBody.model_json_schema()["properties"]
  return Service("Run service", served(run_app.App().asgi), names=fields)


def rollout_buffer(folder: pathlib.Path) -> Service:
  prefix = "/b/{buffer}"
  with contextlib.closing(buffer_service.Service(folder)) as service:
    routes = served(buffer_app.App(service).asgi)
  own = {one for one in routes if not one[1].startswith(prefix)}
  agree(
    "rollout buffer",
    {(m, p.removeprefix(prefix)) for m, p in routes - own},
    {one for one in own if "rollout" in one[1] or "/buffer/" in one[1]},
  )
  return Service("Rollout buffer", own, names=buffer_requests.DEFAULTS)


def monitor(folder: pathlib.Path) -> Service:
  engine = database.connect(str(folder / "monitor.db"))
  database.upgrade(engine)
  app = monitor_app.MonitorApp(
    engine, folder / "files", access.Access(engine, "", open_to_all=True)
  )
  calls = {
    (method, path)
    for method, path in served(app.asgi)
    if path.startswith("/api/") or path == "/health"
  }
  app.writer.close()
  engine.dispose()
  rows = rows_of(app.document, scopes=True)
  return Service("Training Monitor", calls, rows)


def page() -> str:
  """The page with new tables.

  Raises:
    ValueError: it lists other calls than those served, or lacks a field.
  """
  head, *sections = re.split("(?m)^(?=## )", PAGE.read_text(encoding="utf-8"))
  by_title = {text[3 : text.index("\n")]: text for text in sections}
  with tempfile.TemporaryDirectory() as directory:
    folder = pathlib.Path(directory)
    services = (
      policy_server(),
      gym_server(),
      run_service(),
      rollout_buffer(folder / "buffer"),
      monitor(folder),
    )
  for service in services:
    text = by_title[service.title]
    lines = [
      "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n"
      for row in service.rows
    ]
    if lines:
      lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|\n")
      before, _, after = re.split(r"(?m)((?:^\|.*\n)+)", text, maxsplit=1)
      text = before + "".join(lines) + after
    agree(
      service.title, service.calls, re.findall(r"(?m)^\| `(\w+) (\S+)`", text)
    )
    if lacks := [name for name in service.names if f"`{name}`" not in text]:
      raise ValueError(f"{service.title}: describe {lacks} in docs/http_api.md")
    by_title[service.title] = text
  return head + "".join(by_title.values())


if __name__ == "__main__":
  PAGE.write_text(page(), encoding="utf-8")
