"""Writes docs/http_api.md: every route of the HTTP services.

    python scripts/http_reference.py > docs/http_api.md

Promises: the routes are those of the applications themselves, built here;
parameters and bodies are those of their OpenAPI documents where they have one.
A service without a document is described below; a route that is not described,
or is no longer served, is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import textwrap
from typing import Any, Iterable, Iterator, Mapping, Sequence

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

Call = tuple[str, str]  # Method and path.
Rows = Mapping[Call, Sequence[str]]

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
OPENENV = "/openenv/{gym_id}"
OPENENV_CALLS = {
  ("GET", "/health"): "Whether the gym is served.",
  ("GET", "/metadata"): "The environment's name and description.",
  ("GET", "/schema"): "JSON schemas of actions, observations and state.",
  ("GET", "/state"): "The state before a reset.",
  ("GET", "/list_environments"): "The one environment here.",
  ("POST", "/reset"): "The first observation of an execution that ends here.",
  ("POST", "/step"): "409: steps belong to a session, at `/ws`.",
  ("GET", "/{env_name}/splits"): "Splits of the tasks.",
  ("POST", "/{env_name}/tasks"): "Tasks of a split.",
  ("POST", "/{env_name}/num_tasks"): "How many a split has.",
  ("POST", "/{env_name}/task"): "One task, by its index.",
  ("POST", "/{env_name}/task_range"): "Tasks of a range of indices.",
  ("WS", "/ws"): "A session: `reset`, `step`, `state`, `close`.",
}
RUN_CALLS: Rows = {
    ("POST", "/runs"): ("Starts a run.", "body: {fields}", "`runId`"),
    ("GET", "/runs/{run}"): (
        "The state of a run.", "", "`runId`, `status`, `reason`",
    ),
    ("GET", "/runs/{run}/events"): (
        "Its events in order.",
        "`?from` inclusive, `?to` exclusive: ISO 8601 or milliseconds",
        "`events`",
    ),
    ("GET", "/runs/{run}/trajectory"): (
        "What was done, by steps.", "", "`trajectory`",
    ),
    ("GET", "/runs/{run}/tokens"): (
        "Token ids and log-probs of every model call.", "", "`tokens`",
    ),
    ("GET", "/runs/{run}/steps"): ("The steps, from 0.", "", "`steps`"),
    ("GET", "/runs/{run}/steps/{index}"): ("One step.", "", "`step`"),
    ("POST", "/runs/{run}/cancel"): (
        "Ends a run.", "", "`runId`, `status`, `reason`",
    ),
    ("GET", "/images/{name}"): (
        "A screenshot.", "the signature of its address", "a picture",
    ),
    ("GET", "/health"): (
        "The service answers.", "", "`status`, `playing`",
    ),
}  # fmt: skip
_READ = "`success`, `message`, `data`: `data`, `meta_info`, `lease`, `groups`"
BUFFER_CALLS: Rows = {
    ("POST", "/start_rollout"): (
        "Starts a generator; the buffer begins empty.",
        "`task_type`, `num_repeat_per_sample`; optional: {defaults}; other"
        " keys are the generator's",
        "`message`",
    ),
    ("POST", "/stop_rollout"): ("Ends it.", "", "`message`"),
    ("POST", "/buffer/write"): (
        "Stores an item, or a list of them; 200 means on the disk.",
        "`uid`, `instance_id`, `reward`, `messages`, `extra_info`; header"
        " `Prefer: return=minimal`",
        "`success`, `message`, `data`, `new`",
    ),
    ("POST", "/get_rollout_data"): (
        "Reads whole groups, `batch_size` items or more; none while fewer are"
        " ready.",
        "`batch_size` (all), `lease_s`, `lease` (an id for it)", _READ,
    ),
    ("POST", "/buffer/read"): (
        "The same; waits, and takes fewer.",
        "`batch_size`, `lease_s`, `lease`, `timeout` (10 s), `wait`", _READ,
    ),
    ("POST", "/buffer/ack"): (
        "A lease's items were taken over.", "`lease`", "`success`, `message`",
    ),
    ("POST", "/buffer/release"): (
        "A lease's items are to be read again.", "`lease`",
        "`success`, `message`",
    ),
    ("POST", "/buffer/known"): (
        "Which of these were written.", "`uids`", "`known`",
    ),
    ("GET", "/buffer/peek"): (
        "Items that wait; nothing is taken.", "`?batch_size` (1)",
        "`success`, `message`, `data`",
    ),
    ("GET", "/buffer/stats"): (
        "Counts, settings, the generator's state.", "",
        "`success`, `message`, `data`",
    ),
    ("GET", "/buffers"): ("Names of the buffers.", "", "`buffers`"),
    ("GET", "/"): ("The service answers.", "", "`message`"),
    ("GET", "/health"): ("The same.", "", "`status`, `waiting`"),
    ("GET", "/metrics"): ("In Prometheus' text format.", "", "text"),
}  # fmt: skip
SAMPLED = "an answer as {} has it, or its stream"
SERVING_ANSWERS = {
  "chat/completions": SAMPLED.format("OpenAI"),
  "completions": SAMPLED.format("OpenAI"),
  "responses": SAMPLED.format("OpenAI"),
  "messages": SAMPLED.format("Anthropic"),
  "rl/start_session": "`session_id`, `api_key`, `base_url`, `sampling`,"
  " `other_sampling`",
  "rl/set_reward": "`message`",
  "rl/end_session": "`message`",
  "export_trajectories": "`interactions`, by id",
  "grant_capacity": "`capacity`",
}


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
      f" {sorted(described - served_here)} in scripts/http_reference.py"
    )


# --- documents as text --------------------------------------------------------


def wrapped(text: str, indent: str = "") -> str:
  return textwrap.fill(
    text,
    80,
    subsequent_indent=indent,
    break_long_words=False,
    break_on_hyphens=False,
  )


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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
  yield "| " + " | ".join(heads) + " |"
  yield "|" + "---|" * len(heads)
  for row in rows:
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def call(method: str, path: str) -> str:
  return f"`{method} {path}`"


def of_document(
  document: Mapping[str, Any],
) -> Iterator[tuple[Call, Mapping[str, Any]]]:
  for path, methods in document["paths"].items():
    for method, operation in methods.items():
      yield (method.upper(), path), operation


# --- the services -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Section:
  """A service's part of the page."""

  title: str
  text: str
  lines: tuple[str, ...]


def policy_server() -> Section:
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
  document = serving_openapi.document(serving_app.ENDPOINTS)
  described = dict(of_document(document))
  endpoints = (*serving_app.ENDPOINTS, *serving_counting.ENDPOINTS)
  names = "|".join(api.path for api in endpoints)

  def canonical(path: str) -> str:
    """The address of which this one is another form."""
    path = re.sub(r"^/\{session\}/", "/sessions/{session}/", path)
    path = re.sub(rf"^/({names})$", r"/v1/\1", path)
    path = re.sub(
      rf"^/sessions/\{{session\}}/({names})$",
      r"/sessions/{session}/v1/\1",
      path,
    )
    path = re.sub(
      r"^/sessions/\{session\}/(?:v1/)?((?:models|responses/).*)$",
      r"/v1/\1",
      path,
    )
    return re.sub(
      r"^/rl/(set_reward|end_session)$", r"/sessions/{session}/rl/\1", path
    )

  agree(
    "serving",
    {(method, canonical(path)) for method, path in served(app.asgi)},
    described,
  )
  rows = []
  for (method, path), operation in described.items():
    short = re.sub(r"^(/sessions/\{session\})?/(v1/)?", "", path)
    rows.append(
      (
        call(method, path),
        operation["summary"],
        takes(operation, document["components"]["schemas"]),
        SERVING_ANSWERS.get(short, ""),
      )
    )
  text = """\
`tunix-mt serve NAME`, port 8000; [the guide](serving.md). With `--token-file`
or `$TUNIX_ROLLOUT_TOKEN` every call but `/health` needs the token, or the key
of its session, as `Authorization: Bearer …` or `x-api-key`; without one the
server answers at loopback names only. The four calls that sample also exist
without `/v1`; `/sessions/{session}/…` is also `/{session}/…`, with a
session's key or id; with the key as the token, `/rl/set_reward` and
`/rl/end_session` need no session in the path. The read calls exist below a
session too.

A refusal is `{"type": "error", "error": {"message", "type", "param",
"code"}}`, with `retry-after` where the same request may succeed later.
`GET /openapi.json` has the type of every field."""
  heads = ("call", "purpose", "takes", "answers")
  return Section("Policy server", text, tuple(table(heads, rows)))


def gym_server() -> Section:
  app = gym_app.App((catalog.ServedGym(gym_id="desktop", gym="desktop"),))
  document = gym_openapi.document(("desktop",), True)
  described = dict(of_document(document))
  openenv = {(m, OPENENV + path): t for (m, path), t in OPENENV_CALLS.items()}
  document_call = ("GET", "/openapi.json")
  agree("gym server", served(app.asgi), {*described, *openenv, document_call})
  rows = [
    (
      call(*one),
      GYM_CALLS[operation["operationId"]],
      takes(operation, document["components"]["schemas"]),
    )
    for one, operation in described.items()
  ]
  text = """\
`tunix-gym-server desktop`, or `tunix-mt gym desktop`, port 5010; [the
guide](gym_server.md). With `--token-file` or `$TUNIX_GYM_TOKEN` every call but
`/health` needs `Authorization: Bearer …`; without one the server answers at
loopback names only. A request with `Origin`, of a web page, is refused.

A refusal is `{"detail", "code"}`; 429 has `Retry-After`. `GET /openapi.json`
has the type of every field and answer."""
  return Section("Gym server", text, (
      *table(("call", "purpose", "takes"), rows),
      "", "The same gyms by OpenEnv's protocol,"
      " [explained](outside_gyms.md):", "",
      *table(("call", "purpose"), (
          (call(*one), purpose) for one, purpose in openenv.items()
      )),
  ))  # fmt: skip


def run_service() -> Section:
  app = run_app.App()
  agree("run service", served(app.asgi), RUN_CALLS)
  schema = run_schemas.CreateBody.model_json_schema()
  text = """\
`tunix-run-service`, port 3000; [the guide](run_service.md). With `--token-file`
or `$TUNIX_RUN_SERVICE_TOKEN` every call needs `Authorization: Bearer …`, save
`/health` and the signed addresses of screenshots; without one the service
answers at loopback names only. A request with `Origin` is refused.

A refusal is `{"detail", "code"}`; 429 has `Retry-After`."""
  fields = ", ".join(f"`{name}`" for name in schema["properties"])
  return Section("Run service", text, tuple(
      table(("call", "purpose", "takes", "answers"), (
          (call(*one), *(cell.format(fields=fields) for cell in cells))
          for one, cells in RUN_CALLS.items()
      ))
  ))  # fmt: skip


def rollout_buffer(folder: pathlib.Path) -> Section:
  service = buffer_service.Service(folder)
  with contextlib.closing(service):
    app = buffer_app.App(service)
    routes = served(app.asgi)
    prefix = "/b/{buffer}"
    own = {one for one in routes if not one[1].startswith(prefix)}
    agree("rollout buffer", own, BUFFER_CALLS)
    agree(
      "rollout buffer",
      {(m, p.removeprefix(prefix)) for m, p in routes - own},
      {one for one in own if "rollout" in one[1] or "/buffer/" in one[1]},
    )
  defaults = ", ".join(
    f"`{name}` ({value})" for name, value in buffer_requests.DEFAULTS.items()
  )
  text = """\
`tunix-rollout-buffer`, or `tunix-mt buffer`, port 8889; [the
guide](rollout_buffer.md). With `--token-file` or `$TUNIX_BUFFER_TOKEN` every
call but `/` and `/health` needs `Authorization: Bearer …`; without one the
service answers at loopback names only. A request with `Origin` is refused.
Calls of a rollout or a buffer exist below `/b/{buffer}` too; else `buffer` in
the body or the query names the buffer.

A refusal is `{"detail", "code"}`; 429 and 503 have `Retry-After`. An item that
cannot be read is a 500 with the code `invalid_item`, as clients of the protocol
expect."""
  return Section("Rollout buffer", text, tuple(
      table(("call", "purpose", "takes", "answers"), (
          (call(*one), *(cell.format(defaults=defaults) for cell in cells))
          for one, cells in BUFFER_CALLS.items()
      ))
  ))  # fmt: skip


def monitor(folder: pathlib.Path) -> Section:
  engine = database.connect(str(folder / "monitor.db"))
  database.upgrade(engine)
  app = monitor_app.MonitorApp(
    engine, folder / "files", access.Access(engine, "", open_to_all=True)
  )
  document = app.document
  described = dict(of_document(document))
  programs = {
    (method, path)
    for method, path in served(app.asgi)
    if path.startswith("/api/") or path == "/health"
  }
  agree("monitor", programs, described)
  app.writer.close()
  engine.dispose()
  rows = [
    (
      call(*one),
      operation["summary"],
      operation.get("security", [{"token": ["–"]}])[0]["token"][0],
      takes(operation, document["components"]["schemas"]),
    )
    for one, operation in described.items()
  ]
  text = """\
`tunix-monitor serve`, or `tunix-mt monitor serve`, port 8765; [the
guide](monitor.md). With tokens a call needs `Authorization: Bearer …` of one
with the scope in the table; a monitor without tokens answers on its own machine
only. `/api/v1` is for programs; `/api/…` without a version is the form that
pages of other monitors read.

A refusal is `{"detail", "errors"}`, where `errors` names each wrong field. A
page is `items` and `next`, which is the `after` of the following one. `GET
/api/v1/openapi.json` has the type of every field and answer."""
  heads = ("call", "purpose", "scope", "takes")
  return Section("Training Monitor", text, tuple(table(heads, rows)))


def page() -> str:
  """The page's text."""
  with tempfile.TemporaryDirectory() as directory:
    folder = pathlib.Path(directory)
    sections = (
      policy_server(),
      gym_server(),
      run_service(),
      rollout_buffer(folder / "buffer"),
      monitor(folder),
    )
  parts = [
    """\
# HTTP APIs

Every call of the five services, from their own route tables. `make docs` writes
this page; a test compares it."""
  ]
  for one in sections:
    text = "\n\n".join(wrapped(part) for part in one.text.split("\n\n"))
    parts += [f"## {one.title}", text, "\n".join(one.lines)]
  return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
  print(page(), end="")
