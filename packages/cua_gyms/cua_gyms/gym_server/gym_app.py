"""Serves gyms over HTTP: routes, authorization, errors, metrics.

    GET  /api/v1/gyms                                   the gyms
    GET  /api/v1/{gym}/tasks                            a list of tasks
    GET  /api/v1/{gym}/tasks/{identifier}               a full task
    POST /api/v1/{gym}/tasks/{identifier}               create an execution
    GET  /api/v1/{gym}/executions                       those that run
    GET  /api/v1/{gym}/executions/{id}                  its state
    POST /api/v1/{gym}/executions/{id}/step             act
    GET  /api/v1/{gym}/executions/{id}/screenshot       see
    POST /api/v1/{gym}/executions/{id}/heartbeat        renew the lease
    POST /api/v1/{gym}/executions/{id}/evaluate         evaluate
    POST /api/v1/{gym}/executions/{id}/terminate        end
    GET  /health, /metrics, /openapi.json
    …    /openenv/{gym}/…                               see `openenv`

`openapi.OPERATIONS` lists the routes, `schemas` declares their bodies;
docs/gym_server.md describes them for people.

Promises: every failure is `{"detail": …, "code": …}`, whatever failed; a
request body is bounded; every create gets an answer.

Does not run executions (`executions` does).
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import time
from typing import Any, Awaitable, Callable, Mapping, Sequence

import prometheus_client
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_answers

from cua_gyms import applications
from cua_gyms.gym_server import catalog as catalog_lib
from cua_gyms.gym_server import executions as executions_lib
from cua_gyms.gym_server import openapi
from cua_gyms.gym_server import openenv
from cua_gyms.gym_server import reading
from cua_gyms.gym_server import schemas
from cua_gyms.gym_server import store as store_lib
from cua_gyms.gym_server import validators

_LOG = logging.getLogger(__name__)
_PUBLIC = (
  "/openenv/{gym_id}/health",
  *(op.path for op in openapi.OPERATIONS if op.public),
)

_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Upper bounds of the histograms, in seconds."""

Request = applications.Request
Response = applications.Response
Handler = applications.Handler
Json = json_answers.Json
MakeGym = Callable[[Mapping[str, Any]], Any]
"""{"name": …, and settings} -> a gym, or an awaitable of one."""


class App(applications.Application):
  """The gym server.

  Attributes:
    asgi: the ASGI application.
    store: the executions.
    openenv: the sessions of OpenEnv's clients.
  """

  def __init__(
    self,
    specs: Sequence[catalog_lib.ServedGym],
    *,
    limits: executions_lib.ExecutionLimits = executions_lib.ExecutionLimits(),
    token: str = "",
    make_gym: MakeGym = gyms.from_config,
    close: Callable[[], Awaitable[None]] | None = None,
  ):
    """Args:

      specs: the gyms to serve.
      limits: Limits of executions.
      token: the bearer token of clients; "" asks for none.
      make_gym: builds a gym.
      close: called once the server has ended its executions.

    Raises:
      ValueError: no gym, two of one name, an unknown gym or family.
    """
    if not specs:
      raise ValueError("a gym server needs at least one gym; name one")
    self._catalogs: dict[str, catalog_lib.Catalog] = {}
    for spec in specs:
      if spec.gym_id in self._catalogs:
        raise ValueError(
          f"two gyms are called {spec.gym_id!r}; give each its own gym_id"
        )
      self._catalogs[spec.gym_id] = catalog_lib.Catalog(spec)
    self._token = token
    self._make_gym = make_gym
    self._close_more = close
    self._make_metrics()
    self.store = store_lib.ExecutionStore(limits, on_end=self._on_end)
    handlers: dict[str, Handler] = {
      "health": self._health,
      "metrics": self._show_metrics,
      "gyms": self._gyms,
      "tasks": self._tasks,
      "task": self._task,
      "create": self._create,
      "executions": self._executions,
      "execution": self._execution,
      "step": self._step,
      "screenshot": self._screenshot,
      "heartbeat": self._heartbeat,
      "evaluate": self._evaluate,
      "terminate": self._terminate,
    }
    routes = [
      (op.path, handlers[op.name], [op.method]) for op in openapi.OPERATIONS
    ]
    routes.append(("/openapi.json", self._openapi, applications.GET))
    self.openenv = openenv.OpenEnv(
      openenv.Host(
        self._catalog, self._entry, self._begin, self._check_token, self.store
      )
    )
    self._sweep_s = min(5.0, max(0.05, limits.lease / 10))
    self._serve(
      routes + self.openenv.http_routes(), self.openenv.socket_route()
    )

  # --- around every request ---------------------------------------------------

  async def _close(self) -> None:
    await self.store.close()
    if self._close_more is not None:
      await self._close_more()

  async def _sweep(self) -> None:
    try:
      for execution in self.store.reap():
        _LOG.info("execution %s: %s", execution.id, execution.reason)
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("reaping failed")

  def _done(
    self, route: str, request: Request, response: Response, seconds: float
  ) -> None:
    del request
    self._metrics.count(route, response, seconds)

  def _authorize(self, request: Request, route: str) -> None:
    self._check_token(request.headers, route in _PUBLIC)

  def _check_token(
    self, headers: Mapping[str, str], public: bool = False
  ) -> None:
    # Without one, also of the pages that this machine shows to the policy.
    applications.authorize(
      headers, http_server.bearer_of(headers), self._token, public=public
    )

  def _why_not_served(self, request: Request) -> str:
    if request.url.path == openapi.GYMS:
      return (
        "no client can create a gym: the server's command names its gyms when"
        f" it starts, and GET {openapi.GYMS} lists them; leave createGym out"
      )
    return super()._why_not_served(request)

  # --- tasks ------------------------------------------------------------------

  def _catalog(self, gym_id: str) -> catalog_lib.Catalog:
    catalog = self._catalogs.get(gym_id)
    if catalog is None:
      raise applications.ServiceError(
        404,
        f"no gym is called {gym_id!r}; there is {', '.join(self._catalogs)}",
        code="unknown_gym",
      )
    return catalog

  def _entry(
    self, catalog: catalog_lib.Catalog, identifier: str
  ) -> catalog_lib.Entry:
    try:
      return catalog.find(identifier)
    except cua_task.UnknownTaskError as error:
      raise applications.ServiceError(
        404, str(error), code="unknown_task"
      ) from None
    except ValueError as error:
      raise applications.invalid(f"task {identifier!r}: {error}") from None

  async def _gyms(self, request: Request) -> Response:
    del request
    return Json({"gyms": [c.describe() for c in self._catalogs.values()]})

  async def _tasks(self, request: Request) -> Response:
    catalog = self._catalog(request.path_params["gym_id"])
    query = reading.query(request, schemas.TasksQuery)
    tasks = catalog.list(
      query.shape or catalog.spec.shape,
      split=query.split,
      family=query.family,
      full=query.full,
    )
    return Json(tasks if query.bare else {"tasks": tasks})

  async def _task(self, request: Request) -> Response:
    catalog = self._catalog(request.path_params["gym_id"])
    entry = self._entry(catalog, request.path_params["identifier"])
    query = reading.query(request, schemas.ShapeQuery)
    shape = query.shape or catalog.spec.shape
    return Json(entry.to_json(shape, True, catalog.env()))

  # --- executions -------------------------------------------------------------

  async def _create(self, request: Request) -> Response:
    began = time.monotonic()
    catalog = self._catalog(request.path_params["gym_id"])
    entry = self._entry(catalog, request.path_params["identifier"])
    data = await reading.read_object(request)
    if key := request.headers.get("idempotency-key"):
      data["idempotency_key"] = key
    body = reading.validated(schemas.Create, data)
    options = body.options
    execution, replayed = await self._begin(
      catalog, entry, options, body.idempotency_key or ""
    )
    width, height = execution.shown.size
    reply: schemas.Created = {
      **execution.describe(),
      "box_id": execution.id,
      "task": entry.to_json("summary", True, catalog.env()),
      "screen": {"width": width, "height": height},
      "replayed": replayed,
      "env_build": {
        "status": "completed",
        "total_time": round(time.monotonic() - began, 6),
        "stages": [
          {
            "name": "create_execution",
            "status": "completed",
            "duration": round(execution.started_s, 6),
            "details": {"gym": catalog.spec.gym},
          }
        ],
        "prehook_executed": False,
        "prehook_output": "",
      },
    }
    if options.observe:
      reply["observation"] = await _observation(execution, options.screenshot)
    return Json(reply)

  async def _begin(
    self,
    catalog: catalog_lib.Catalog,
    entry: catalog_lib.Entry,
    options: schemas.CreateOptions,
    key: str,
  ) -> tuple[executions_lib.Execution, bool]:
    """(an execution of the task, whether the key had it already)."""
    lease = options.lease_s
    if lease is not None:
      lease = min(lease, self.store.limits.max_lease)
    settings = self._settings(catalog.spec, entry.task, options.gym)
    request = json.dumps(options.model_dump(), sort_keys=True)
    try:
      execution, replayed = await self.store.create(
        catalog.spec.gym_id,
        entry.task,
        {"identifier": entry.name, "number": entry.number},
        lambda: self._make_gym(settings),
        lease=lease,
        key=key,
        request=(entry.task.task_id, request),
        pixels=math.prod(_screen(gyms.get(catalog.spec.gym), settings)),
      )
    except applications.ServiceError as error:
      if error.code == "no_capacity":
        self._refused.inc()
      raise
    if not replayed:
      self._created.inc()
      self._starts.observe(execution.started_s)
    return execution, replayed

  def _settings(
    self,
    spec: catalog_lib.ServedGym,
    task: base.Task,
    chosen: Mapping[str, Any],
  ) -> dict[str, Any]:
    """Settings of an execution's gym; a client chose some of them."""
    refused = sorted(set(chosen) - set(spec.client_settings))
    if refused:
      allowed = ", ".join(spec.client_settings) or "none"
      raise applications.invalid(
        f"options.gym.{refused[0]} is not a client's to set; the server"
        f" allows {allowed}"
      )
    gym = gyms.get(spec.gym, "operator")
    if problems := list(gym.out_of_bounds(chosen, "options.gym.")):
      raise applications.invalid(problems[0])
    options = {**gym.options_of(task.family), **spec.settings, **chosen}
    width, height = _screen(gym, options)
    if problem := bounds.screen_problem(width, height, "options.gym."):
      raise applications.invalid(problem)
    return {"name": spec.gym, **options}

  def _found(self, request: Request) -> executions_lib.Execution:
    gym_id = self._catalog(request.path_params["gym_id"]).spec.gym_id
    return self.store.get(gym_id, request.path_params["execution_id"])

  async def _executions(self, request: Request) -> Response:
    gym_id = self._catalog(request.path_params["gym_id"]).spec.gym_id
    return Json(
      {
        "executions": [
          e.describe() for e in self.store.live() if e.gym_id == gym_id
        ]
      }
    )

  async def _execution(self, request: Request) -> Response:
    return Json(self._found(request).describe())

  async def _step(self, request: Request) -> Response:
    execution = self._found(request)
    data = await reading.read_object(request)
    execution.check()
    body = reading.validated(schemas.Step, data)
    width, height = execution.shown.size
    try:
      action = wire.action_from_json(body.action, width, height)
    except wire.WireError as error:
      raise applications.invalid(str(error)) from None
    began = time.monotonic()
    await execution.step(action, body.step)
    self._steps.observe(time.monotonic() - began)
    reply: schemas.Stepped = {
      "step": execution.steps,
      "observation": await _observation(execution, body.screenshot),
    }
    return Json(reply)

  async def _screenshot(self, request: Request) -> Response:
    execution = self._found(request)
    execution.check()
    execution.touch()
    query = reading.query(request, schemas.ScreenshotQuery)
    picture = await execution.picture()
    if query.format == "json":
      reply: schemas.Shown = {"step": execution.steps, "screenshot": picture}
      return Json(reply)
    return Response(wire.screenshot_file(picture), media_type="image/png")

  async def _heartbeat(self, request: Request) -> Response:
    execution = self._found(request)
    execution.check()
    execution.touch()
    return Json(execution.describe())

  async def _evaluate(self, request: Request) -> Response:
    execution = self._found(request)
    body = await reading.read(request, schemas.Evaluate)
    result = await execution.judge(
      validators.Submission(
        body.answer_text, body.context_text, body.facts, body.execution_data
      )
    )
    reply: schemas.Evaluated = {
      "success": result["success"],
      "score": result["score"],
      "reward": result["score"],
      "result": result,
    }
    return Json(reply)

  async def _terminate(self, request: Request) -> Response:
    execution = self._found(request)
    await self.store.terminate(execution)
    reply: schemas.Terminated = {"success": True, **execution.describe()}
    return Json(reply)

  # --- about the server -------------------------------------------------------

  def _make_metrics(self) -> None:
    self._metrics = applications.Metrics("gym", _BUCKETS)
    registry = self._metrics.registry
    counter = functools.partial(prometheus_client.Counter, registry=registry)
    histogram = functools.partial(
      prometheus_client.Histogram, registry=registry, buckets=_BUCKETS
    )
    self._created = counter("gym_executions_created", "Gyms started.")
    self._refused = counter("gym_creates_refused", "Creates without room.")
    self._ended = counter(
      "gym_executions_ended", "Ended executions, by reason.", ("code",)
    )
    self._starts = histogram("gym_start_seconds", "Starts of gyms.")
    self._steps = histogram("gym_step_seconds", "Steps, with waiting.")

  def _on_end(self, execution: executions_lib.Execution) -> None:
    self._ended.labels(execution.code).inc()

  async def _show_metrics(self, request: Request) -> Response:
    del request
    gauges = {
      "gym_executions_open": self.store.open,
      "gym_executions_capacity": self.store.limits.capacity,
      "gym_openenv_sessions": self.openenv.sessions,
    }
    return self._metrics.page(
      f"# TYPE {name} gauge\n{name} {value}\n" for name, value in gauges.items()
    )

  async def _health(self, request: Request) -> Response:
    del request
    reply: schemas.Health = {
      "status": "ok",
      "executions": self.store.open,
      "capacity": self.store.limits.capacity,
    }
    return Json(reply)

  async def _openapi(self, request: Request) -> Response:
    del request
    return Json(
      await asyncio.to_thread(
        openapi.document, tuple(self._catalogs), bool(self._token)
      )
    )


def _screen(gym: gyms.GymSpec, settings: Mapping[str, Any]) -> tuple[int, int]:
  """(width, height) of a gym's screen; (1024, 1024) without a setting."""
  size = []
  for name in ("width", "height"):
    option = gym.options.get(name)
    side = settings.get(name, option.default if option else None)
    size.append(side if type(side) is int else 1024)
  return size[0], size[1]


async def _observation(
  execution: executions_lib.Execution, screenshot: bool
) -> wire.Observation:
  """Returns the newest observation, with its screenshot or without."""
  picture = await execution.picture() if screenshot else None
  return wire.observation_to_json(execution.shown, picture=picture)
