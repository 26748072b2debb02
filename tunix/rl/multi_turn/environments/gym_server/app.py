"""The server's HTTP side: routes, authorization, errors, metrics.

    GET  /api/v1/gyms                                   what is served
    GET  /api/v1/{gym}/tasks                            a list of tasks
    GET  /api/v1/{gym}/tasks/{identifier}               a full task
    POST /api/v1/{gym}/tasks/{identifier}               create an execution
    GET  /api/v1/{gym}/executions                       those that run
    GET  /api/v1/{gym}/executions/{id}                  its state
    POST /api/v1/{gym}/executions/{id}/step             act
    GET  /api/v1/{gym}/executions/{id}/screenshot       see
    POST /api/v1/{gym}/executions/{id}/heartbeat        renew the lease
    POST /api/v1/{gym}/executions/{id}/evaluate         judge
    POST /api/v1/{gym}/executions/{id}/terminate        end
    GET  /health, /metrics, /openapi.json
    …    /openenv/{gym}/…                               see `openenv`

docs/gym_server.md describes each; `/openapi.json` does it for machines.

Promises: every failure is `{"detail": …, "code": …}`, whatever failed; a
request body is bounded; a create that is asked for is answered.

Does not decide what an execution does (see `executions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from typing import Any, AsyncIterator, Awaitable, Callable, Mapping, Sequence

import prometheus_client
from starlette import applications
from starlette import exceptions as starlette_exceptions
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from starlette import routing
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gym_server import catalog as catalog_lib
from tunix.rl.multi_turn.environments.gym_server import errors
from tunix.rl.multi_turn.environments.gym_server import (
    executions as executions_lib,
)
from tunix.rl.multi_turn.environments.gym_server import openapi
from tunix.rl.multi_turn.environments.gym_server import openenv
from tunix.rl.multi_turn.environments.gym_server import reading
from tunix.rl.multi_turn.environments.gym_server import store as store_lib
from tunix.rl.multi_turn.environments.gym_server import validators
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.task_sources import cua_task

_LOG = logging.getLogger(__name__)
_MAX_KEY = 256
_OPEN = ("/health", "/openenv/{gym_id}/health")

Request = starlette_requests.Request
Response = starlette_responses.Response
Json = starlette_responses.JSONResponse
Handler = Callable[[Request], Awaitable[Response]]
MakeGym = Callable[[Mapping[str, Any]], Any]
"""{"name": …, and settings} -> a gym, perhaps awaitable."""


class App:
  """The ASGI application; `asgi` is what a server runs.

  Attributes:
    store: the executions.
    openenv: the server's sessions of OpenEnv's clients.
  """

  def __init__(
      self,
      specs: Sequence[catalog_lib.GymSpec],
      *,
      limits: executions_lib.Limits = executions_lib.Limits(),
      token: str = "",
      make_gym: MakeGym = gyms.from_config,
      close: Callable[[], Awaitable[None]] | None = None,
  ):
    """Args:

      specs: the gyms that are served.
      limits: of executions.
      token: what clients must present; "" asks for none.
      make_gym: builds one.
      close: called when the server has ended its executions.

    Raises:
      ValueError: no gym, two of one name, an unknown gym or family.
    """
    if not specs:
      raise ValueError("a gym server needs at least one gym")
    self._catalogs: dict[str, catalog_lib.Catalog] = {}
    for spec in specs:
      if spec.gym_id in self._catalogs:
        raise ValueError(f"two gyms are called {spec.gym_id!r}")
      self._catalogs[spec.gym_id] = catalog_lib.Catalog(spec)
    self._token = token
    self._make_gym = make_gym
    self._close = close
    self._make_metrics()
    self.store = store_lib.ExecutionStore(limits, on_end=self._on_end)
    get, post = ["GET"], ["POST"]
    tasks = "/api/v1/{gym_id}/tasks"
    one = "/api/v1/{gym_id}/executions/{execution_id}"
    routes = [
        ("/health", self._health, get),
        ("/metrics", self._show_metrics, get),
        ("/openapi.json", self._openapi, get),
        ("/api/v1/gyms", self._gyms, get),
        (tasks, self._tasks, get),
        # Ids of tasks have slashes.
        (tasks + "/{identifier:path}", self._task, get),
        (tasks + "/{identifier:path}", self._create, post),
        ("/api/v1/{gym_id}/executions", self._executions, get),
        (one, self._execution, get),
        (one + "/step", self._step, post),
        (one + "/screenshot", self._screenshot, get),
        (one + "/heartbeat", self._heartbeat, post),
        (one + "/evaluate", self._evaluate, post),
        (one + "/terminate", self._terminate, post),
    ]
    self.openenv = openenv.OpenEnv(
        openenv.Host(
            self._catalog, self._entry, self._begin, self._authorize, self.store
        )
    )
    self.asgi = applications.Starlette(
        routes=[
            *(
                routing.Route(path, self._guarded(path, run), methods=methods)
                for path, run, methods in routes + self.openenv.http_routes()
            ),
            self.openenv.socket_route(),
        ],
        exception_handlers={
            starlette_exceptions.HTTPException: self._not_served,
        },
        lifespan=self._lifespan,
    )

  # --- around every request ---------------------------------------------------

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Any) -> AsyncIterator[None]:
    del app
    reaping = asyncio.create_task(self._reap())
    try:
      yield
    finally:
      reaping.cancel()
      await asyncio.gather(reaping, return_exceptions=True)
      await self.store.close()
      if self._close is not None:
        await self._close()

  async def _reap(self) -> None:
    while True:
      await asyncio.sleep(min(5.0, max(0.05, self.store.limits.lease / 10)))
      try:
        for execution in self.store.reap():
          _LOG.info("execution %s: %s", execution.id, execution.reason)
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("reaping failed")

  def _guarded(self, route: str, handler: Handler) -> Handler:
    """Authorizes, counts, and gives every failure its shape."""

    async def run(request: Request) -> Response:
      if route not in _OPEN:
        self._authorize(request.headers)
      return await handler(request)

    def failed(error: Exception) -> Response:
      if isinstance(error, starlette_requests.ClientDisconnect):
        error = errors.ApiError(499, "the client went away", code="gone")
      elif not isinstance(error, errors.ApiError):
        _LOG.error("%s failed", route, exc_info=error)
        error = errors.ApiError(
            500,
            f"the server failed: {type(error).__name__}: {error}",
            code="internal_error",
        )
      return _error(error)

    def done(request: Request, response: Response, seconds: float) -> None:
      self._requests.labels(
          request.method, route, response.status_code
      ).inc()
      self._seconds.labels(route).observe(seconds)

    return http_server.guarded(run, failed, done)

  def _authorize(self, headers: Mapping[str, str]) -> None:
    if "origin" in headers:
      # The server has no pages: a browser that calls it was made to by one of
      # another site, as on the machine that shows pages to the policy.
      raise errors.ApiError(
          403,
          f"a request of a web page (Origin: {headers['origin'][:80]}) is not"
          " answered; call from a program",
          code="cross_site",
      )
    if not self._token:
      host = headers.get("host", "")
      if not http_server.names_loopback(host):
        # A name of somebody's that leads here: a browser takes what answers
        # for a part of that site.
        raise errors.ApiError(
            403,
            f"without a token this server answers at its own machine's names"
            f" only, not {host[:80]!r}; call 127.0.0.1, or start it with a"
            " token",
            code="cross_site",
        )
      return
    kind, _, presented = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(
        presented.strip().encode("latin-1", "replace"), self._token.encode()
    ):
      raise errors.ApiError(
          401,
          "give the server's token as Authorization: Bearer …",
          code="unauthorized",
      )

  async def _not_served(self, request: Request, error: Any) -> Response:
    if error.status_code == 405:
      detail = f"{request.method} is not served at {request.url.path}"
    else:
      detail = f"nothing is served at {request.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return Json(
        {"detail": detail, "code": code},
        error.status_code,
        headers=error.headers,
    )

  # --- tasks ------------------------------------------------------------------

  def _catalog(self, gym_id: str) -> catalog_lib.Catalog:
    found = self._catalogs.get(gym_id)
    if found is None:
      raise errors.ApiError(
          404,
          f"no gym is called {gym_id!r}; there is"
          f" {', '.join(self._catalogs)}",
          code="unknown_gym",
      )
    return found

  def _entry(
      self, catalog: catalog_lib.Catalog, identifier: str
  ) -> catalog_lib.Entry:
    try:
      return catalog.find(identifier)
    except cua_task.UnknownTaskError as error:
      raise errors.ApiError(404, str(error), code="unknown_task") from None
    except ValueError as error:
      raise errors.invalid(f"task {identifier!r}: {error}") from None

  async def _gyms(self, request: Request) -> Response:
    del request
    return Json({"gyms": [c.describe() for c in self._catalogs.values()]})

  async def _tasks(self, request: Request) -> Response:
    catalog = self._catalog(request.path_params["gym_id"])
    asked = request.query_params
    try:
      tasks = catalog.list(
          asked.get("shape") or catalog.spec.shape,
          split=asked.get("split", ""),
          family=asked.get("family", ""),
          full=reading.flag(asked, "full"),
      )
    except ValueError as error:
      raise errors.invalid(str(error)) from None
    if reading.flag(asked, "bare"):
      return Json(tasks)
    return Json({"tasks": tasks})

  async def _task(self, request: Request) -> Response:
    catalog = self._catalog(request.path_params["gym_id"])
    entry = self._entry(catalog, request.path_params["identifier"])
    shape = request.query_params.get("shape") or catalog.spec.shape
    if shape not in catalog_lib.SHAPES:
      raise errors.invalid(
          f"shape={shape!r} must be one of {', '.join(catalog_lib.SHAPES)}"
      )
    return Json(entry.to_json(shape, True, catalog.env()))

  # --- executions -------------------------------------------------------------

  async def _create(self, request: Request) -> Response:
    began = time.monotonic()
    catalog = self._catalog(request.path_params["gym_id"])
    entry = self._entry(catalog, request.path_params["identifier"])
    body = await reading.read_object(request)
    options = reading.mapping(body, "options")
    key = request.headers.get("idempotency-key") or body.get("idempotency_key")
    if key is not None and (not isinstance(key, str) or len(key) > _MAX_KEY):
      raise errors.invalid(
          f"idempotency_key must be a string of up to {_MAX_KEY} characters"
      )
    execution, replayed = await self._begin(catalog, entry, options, key or "")
    height, width = execution.seen.screenshot.shape[:2]
    reply = {
        **execution.describe(),
        "box_id": execution.id,
        "task": entry.to_json("summary", True, catalog.env()),
        "screen": {"width": width, "height": height},
        "replayed": replayed,
        "env_build": {
            "status": "completed",
            "total_time": round(time.monotonic() - began, 6),
            "stages": [{
                "name": "create_execution",
                "status": "completed",
                "duration": round(execution.started_s, 6),
                "details": {"gym": catalog.spec.gym},
            }],
            "prehook_executed": False,
            "prehook_output": "",
        },
    }
    if reading.flag(options, "observe"):
      reply["observation"] = await self._seen(execution, options)
    return Json(reply)

  async def _begin(
      self,
      catalog: catalog_lib.Catalog,
      entry: catalog_lib.Entry,
      options: Mapping[str, Any],
      key: str,
  ) -> tuple[executions_lib.Execution, bool]:
    """(an execution of the task, whether the key had it already)."""
    lease = reading.seconds(options.get("lease_s"), "options.lease_s")
    if lease is not None:
      lease = min(lease, self.store.limits.max_lease)
    settings = self._settings(catalog.spec, entry.task, options)
    try:
      execution, replayed = await self.store.create(
          catalog.spec.gym_id,
          entry.task,
          {"identifier": entry.name, "number": entry.number},
          lambda: self._make_gym(settings),
          lease=lease,
          key=key,
          request=(entry.task.task_id, json.dumps(options, sort_keys=True)),
      )
    except errors.ApiError as error:
      if error.code == "no_capacity":
        self._refused.inc()
      raise
    if not replayed:
      self._created.inc()
      self._starts.observe(execution.started_s)
    return execution, replayed

  def _settings(
      self,
      spec: catalog_lib.GymSpec,
      task: base.Task,
      options: Mapping[str, Any],
  ) -> dict[str, Any]:
    """Settings of the gym of an execution."""
    asked = reading.mapping(options, "gym")
    refused = sorted(set(asked) - set(spec.client_settings))
    if refused:
      allowed = ", ".join(spec.client_settings) or "none"
      raise errors.invalid(
          f"options.gym.{refused[0]} is not a client's to set; the server"
          f" allows {allowed}"
      )
    for name, value in asked.items():
      if name in ("width", "height") and not (
          isinstance(value, int) and 16 <= value <= 4096
      ):
        raise errors.invalid(
            f"options.gym.{name}={value!r} must be a whole number in"
            " [16, 4096]"
        )
    own = gyms.get(spec.gym).options_of(task.family)
    return {"name": spec.gym, **own, **spec.settings, **asked}

  def _found(self, request: Request) -> executions_lib.Execution:
    gym_id = self._catalog(request.path_params["gym_id"]).spec.gym_id
    return self.store.get(gym_id, request.path_params["execution_id"])

  async def _executions(self, request: Request) -> Response:
    gym_id = self._catalog(request.path_params["gym_id"]).spec.gym_id
    return Json({
        "executions": [
            e.describe() for e in self.store.live() if e.gym_id == gym_id
        ]
    })

  async def _execution(self, request: Request) -> Response:
    return Json(self._found(request).describe())

  async def _step(self, request: Request) -> Response:
    execution = self._found(request)
    body = await reading.read_object(request)
    execution.check()
    height, width = execution.seen.screenshot.shape[:2]
    try:
      action = wire.action_from_json(body.get("action"), width, height)
    except wire.WireError as error:
      raise errors.invalid(str(error)) from None
    number = body.get("step")
    if number is not None and (
        isinstance(number, bool) or not isinstance(number, int) or number < 1
    ):
      raise errors.invalid(
          f"step must be a whole number >= 1 or left out, got {number!r}"
      )
    began = time.monotonic()
    await execution.step(action, number)
    self._steps.observe(time.monotonic() - began)
    return Json({
        "step": execution.steps,
        "observation": await self._seen(execution, body),
    })

  async def _seen(
      self, execution: executions_lib.Execution, asked: Mapping[str, Any]
  ) -> dict[str, Any]:
    """The newest observation; with its screenshot unless told otherwise."""
    seen = execution.seen
    picture = None
    if reading.flag(asked, "screenshot", True):
      picture = await execution.picture()
    return wire.observation_to_json(seen, picture=picture)

  async def _screenshot(self, request: Request) -> Response:
    execution = self._found(request)
    execution.check()
    execution.touch()
    picture = await execution.picture()
    wanted = request.query_params.get("format", "png")
    if wanted == "json":
      return Json({"step": execution.steps, "screenshot": picture})
    if wanted != "png":
      raise errors.invalid(f"format={wanted!r} must be png or json")
    return Response(
        wire.base64.b64decode(picture["data"]), media_type="image/png"
    )

  async def _heartbeat(self, request: Request) -> Response:
    execution = self._found(request)
    execution.check()
    execution.touch()
    return Json(execution.describe())

  async def _evaluate(self, request: Request) -> Response:
    execution = self._found(request)
    body = await reading.read_object(request)
    data = reading.mapping(body, "execution_data")
    answer = body.get("answer_text")
    for name in ("answer_text", "answer"):  # Clients write it both ways.
      answer = data.get(name) if answer is None else answer
    answer = "" if answer is None else answer
    context = body.get("context_text") or ""
    if not isinstance(answer, str) or not isinstance(context, str) or (
        len(answer) > wire.MAX_TEXT
    ):
      raise errors.invalid(
          "answer_text and context_text must be strings, the first of up to"
          f" {wire.MAX_TEXT} characters"
      )
    result = await execution.judge(
        validators.Submission(
            answer, context, reading.mapping(body, "facts"), data
        )
    )
    return Json({"success": result["success"], "result": result})

  async def _terminate(self, request: Request) -> Response:
    execution = self._found(request)
    await self.store.terminate(execution)
    return Json({"success": True, **execution.describe()})

  # --- about the server -------------------------------------------------------

  def _make_metrics(self) -> None:
    self._metrics = prometheus_client.CollectorRegistry()
    counter = lambda *a: prometheus_client.Counter(*a, registry=self._metrics)
    buckets = (.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 100, 300)
    histogram = lambda *a: prometheus_client.Histogram(
        *a, registry=self._metrics, buckets=buckets
    )
    self._requests = counter(
        "gym_requests", "Answered requests.", ("method", "route", "status")
    )
    self._seconds = histogram(
        "gym_request_seconds", "From request to answer.", ("route",)
    )
    self._created = counter("gym_executions_created", "Gyms started.")
    self._refused = counter("gym_creates_refused", "Creates without room.")
    self._ended = counter(
        "gym_executions_ended", "Executions that ended, by why.", ("code",)
    )
    self._starts = histogram("gym_start_seconds", "A gym's start.")
    self._steps = histogram("gym_step_seconds", "A step, waiting included.")

  def _on_end(self, execution: executions_lib.Execution) -> None:
    self._ended.labels(execution.code).inc()

  async def _show_metrics(self, request: Request) -> Response:
    del request
    gauges = {
        "gym_executions_open": self.store.open,
        "gym_executions_capacity": self.store.limits.capacity,
        "gym_openenv_sessions": self.openenv.sessions,
    }
    text = prometheus_client.generate_latest(self._metrics).decode()
    for name, value in gauges.items():
      text += f"# TYPE {name} gauge\n{name} {value}\n"
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

  async def _health(self, request: Request) -> Response:
    del request
    return Json({
        "status": "ok",
        "executions": self.store.open,
        "capacity": self.store.limits.capacity,
    })

  async def _openapi(self, request: Request) -> Response:
    del request
    return Json(openapi.document(list(self._catalogs), bool(self._token)))


def _error(error: errors.ApiError) -> Response:
  return Json(error.body(), error.status, headers=error.headers())
