"""Serves each gym as an OpenEnv environment, at /openenv/{gym_id}.

    WS   /ws                                     a session: reset, step, state
    POST /reset                                  a first observation
    GET  /health, /metadata, /schema, /state, /list_environments
    GET  /{gym_id}/splits                        the task API:
    POST /{gym_id}/tasks, /num_tasks, /task, /task_range

A client takes `http://host:port/openenv/{gym_id}` as its base URL. The messages
are those of the package `openenv` 0.3 to 0.10, which the server does not need;
`schemas` declares them and docs/outside_gyms.md describes them.

Promises: a session's episodes are executions of the server's store, under the
same capacity, deadlines and token as those of genv's protocol; a session that
ended, or whose client has gone, leaves no execution behind; every message gets
one answer, in order, an error with OpenEnv's code and the server's own
(`cause`).

Does not serve MCP tools or harness sessions: actions are GUI actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from importlib import metadata
import json
import logging
import secrets
from typing import Any, Awaitable, Callable, Mapping, TypeVar
import uuid

from starlette import requests as starlette_requests
from starlette import routing
from starlette import websockets as starlette_websockets
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.net import json_answers
from tunix.rl.multi_turn.net import json_models

from cua_gyms import applications
from cua_gyms.gym_server import catalog as catalog_lib
from cua_gyms.gym_server import executions as executions_lib
from cua_gyms.gym_server import reading
from cua_gyms.gym_server import schemas
from cua_gyms.gym_server import store as store_lib
from cua_gyms.gym_server import validators

_LOG = logging.getLogger(__name__)
Kind = gui_action.GuiActionKind
Request = starlette_requests.Request
Json = json_answers.Json
_PREFIX = "/openenv/{gym_id}"
Body = TypeVar("Body", bound=schemas.SplitBody)
_INBOX = 8  # Messages read ahead of the running one.
# Sending raises these when the client has gone, or the socket is closed.
_GONE = (starlette_websockets.WebSocketDisconnect, RuntimeError)
_CODES = {
  "invalid_json": "INVALID_JSON",
  "invalid_request": "VALIDATION_ERROR",
  "unknown_task": "VALIDATION_ERROR",
  "unknown_type": "UNKNOWN_TYPE",
  "no_capacity": "CAPACITY_REACHED",
  "not_started": "SESSION_ERROR",
  "lease_expired": "SESSION_ERROR",
  "too_old": "SESSION_ERROR",
  "terminated": "SESSION_ERROR",
  "worker_died": "SESSION_ERROR",
  "server_ended": "SESSION_ERROR",
  "ending": "SESSION_ERROR",
}
"""The server's codes -> OpenEnv's; others are EXECUTION_ERROR."""


@dataclasses.dataclass(frozen=True)
class Host:
  """Callbacks of the gym server that the OpenEnv routes use.

  Attributes:
    catalog: gym_id -> its catalogue of tasks.
    entry: (catalogue, identifier) -> the task of that name.
    begin: (catalogue, task, create options, key) -> (execution, whether the
      key named an existing one).
    authorize: raises a ServiceError for headers without the server's token.
    store: the executions.
  """

  catalog: Callable[[str], catalog_lib.Catalog]
  entry: Callable[[catalog_lib.Catalog, str], catalog_lib.Entry]
  begin: Callable[..., Awaitable[tuple[executions_lib.Execution, bool]]]
  authorize: Callable[[Mapping[str, str]], None]
  store: store_lib.ExecutionStore


class OpenEnv:
  """The OpenEnv routes of a server.

  Attributes:
    sessions: how many are open.
  """

  def __init__(self, host: Host):
    self._host = host
    self.sessions = 0

  def http_routes(self) -> list[tuple[str, Any, list[str]]]:
    """(path, handler, methods); the server guards them."""
    get, post = ["GET"], ["POST"]
    task_api = _PREFIX + "/{env_name}"
    return [
      (_PREFIX + "/health", self._health, get),
      (_PREFIX + "/metadata", self._metadata, get),
      (_PREFIX + "/schema", self._schema, get),
      (_PREFIX + "/state", self._no_state, get),
      (_PREFIX + "/list_environments", self._environments, get),
      (_PREFIX + "/reset", self._reset_once, post),
      (_PREFIX + "/step", self._step_once, post),
      (task_api + "/splits", self._splits, get),
      (task_api + "/tasks", self._tasks, post),
      (task_api + "/num_tasks", self._num_tasks, post),
      (task_api + "/task", self._task, post),
      (task_api + "/task_range", self._task_range, post),
    ]

  def socket_route(self) -> routing.WebSocketRoute:
    return routing.WebSocketRoute(_PREFIX + "/ws", self._session)

  # --- about the environment --------------------------------------------------

  def _catalog(self, request: Request) -> catalog_lib.Catalog:
    catalog = self._host.catalog(request.path_params["gym_id"])
    name = request.path_params.get("env_name", catalog.spec.gym_id)
    if name.lower() != catalog.spec.gym_id.lower():
      raise applications.ServiceError(
        404,
        f"{request.url.path}: the environment here is called"
        f" {catalog.spec.gym_id!r}, not {name!r}",
        code="unknown_gym",
      )
    return catalog

  async def _health(self, request: Request) -> Any:
    self._catalog(request)
    return Json({"status": "healthy"})

  async def _metadata(self, request: Request) -> Any:
    spec = self._catalog(request).spec
    return Json(
      {
        "name": spec.gym_id,
        "description": (
          f"The gym {spec.gym}: screenshots in, GUI actions out, a score by"
          " state at the end."
        ),
        "version": metadata.version("tunix-multi-turn"),
      }
    )

  async def _schema(self, request: Request) -> Any:
    self._catalog(request)
    return Json(schemas.openenv_schemas())

  async def _environments(self, request: Request) -> Any:
    return Json([self._catalog(request).spec.gym_id])

  async def _no_state(self, request: Request) -> Any:
    """Returns the state before a reset, as OpenEnv's own servers answer."""
    self._catalog(request)
    return Json(_state(None))

  async def _reset_once(self, request: Request) -> Any:
    """A first observation of an environment that ends with the answer."""
    catalog = self._catalog(request)
    session = _Connection(self._host, catalog)
    try:
      return Json(await session.reset(await reading.read_object(request)))
    finally:
      await session.end()

  async def _step_once(self, request: Request) -> Any:
    self._catalog(request)
    raise applications.ServiceError(
      409,
      f"{request.url.path}: an HTTP request has an environment of its own,"
      " which was never reset; step in a session, at /ws",
      code="not_started",
    )

  # --- the task API -----------------------------------------------------------

  async def _splits(self, request: Request) -> Any:
    self._catalog(request)
    # OpenEnv's types of splits are train, validation and test.
    return Json(
      [{"name": "train", "type": "train"}, {"name": "eval", "type": "test"}]
    )

  async def _entries(
    self, request: Request, model: type[Body]
  ) -> tuple[catalog_lib.Catalog, list[catalog_lib.Entry], Body]:
    catalog = self._catalog(request)
    body = await reading.read(request, model)
    return catalog, _of_split(catalog, body.split), body

  async def _tasks(self, request: Request) -> Any:
    catalog, entries, _ = await self._entries(request, schemas.SplitBody)
    return Json(
      {
        "tasks": [_row(catalog, e, i) for i, e in enumerate(entries)],
        "env_name": catalog.spec.gym_id,
      }
    )

  async def _num_tasks(self, request: Request) -> Any:
    _, entries, _ = await self._entries(request, schemas.SplitBody)
    return Json({"num_tasks": len(entries)})

  async def _task(self, request: Request) -> Any:
    catalog, entries, body = await self._entries(request, schemas.IndexBody)
    entry = _at(entries, body.index)
    return Json({"task": _row(catalog, entry, body.index)})

  async def _task_range(self, request: Request) -> Any:
    catalog, entries, body = await self._entries(request, schemas.RangeBody)
    indices = range(len(entries))[slice(body.start, body.stop)]
    return Json({"tasks": [_row(catalog, entries[i], i) for i in indices]})

  # --- sessions ---------------------------------------------------------------

  async def _session(self, socket: starlette_websockets.WebSocket) -> None:
    try:
      self._host.authorize(socket.headers)
      catalog = self._host.catalog(socket.path_params["gym_id"])
    except applications.ServiceError as error:
      await socket.send_denial_response(
        Json(error.body(), error.status, headers=error.headers())
      )
      return
    await socket.accept()
    limit = self._host.store.limits.capacity
    if self.sessions >= limit:
      await self._refuse(socket, limit)
      return
    self.sessions += 1
    session = _Connection(self._host, catalog)
    inbox: asyncio.Queue[str] = asyncio.Queue(_INBOX)
    reader = asyncio.ensure_future(_read(socket, inbox))
    worker = asyncio.ensure_future(session.work(inbox, socket.send_text))
    try:
      # A client that goes away does not wait for its step.
      await asyncio.wait({reader, worker}, return_when=asyncio.FIRST_COMPLETED)
    finally:
      reader.cancel()
      worker.cancel()
      ended = await asyncio.gather(reader, worker, return_exceptions=True)
      self.sessions -= 1
      await asyncio.shield(session.end())
    for failure in ended:
      if isinstance(failure, Exception) and not isinstance(failure, _GONE):
        _LOG.error("an OpenEnv session failed", exc_info=failure)
    with contextlib.suppress(*_GONE):
      await socket.close()

  async def _refuse(
    self, socket: starlette_websockets.WebSocket, limit: int
  ) -> None:
    error = applications.ServiceError(
      429,
      f"all {limit} sessions are taken; close one, or try again later",
      code="no_capacity",
      retry_s=self._host.store.limits.retry_after,
    )
    with contextlib.suppress(*_GONE):
      await socket.send_text(_dumps(_error(error, self._host.store)))
      await socket.close(1013)  # Try again later.


class _Connection:
  """One client's episodes, one at a time."""

  def __init__(self, host: Host, catalog: catalog_lib.Catalog):
    self._host = host
    self._catalog = catalog
    self._execution: executions_lib.Execution | None = None
    self._key = ""
    self._episode_id = ""
    self._answer = ""
    self._result: schemas.Result | None = None

  async def work(
    self, inbox: asyncio.Queue[str], send: Callable[[str], Awaitable[None]]
  ) -> None:
    """Answers messages until a "close"."""
    while True:
      text = await inbox.get()
      try:
        answer = await self._answer_to(text)
      except applications.ServiceError as error:
        answer = _error(error, self._host.store)
      except Exception as error:  # pylint: disable=broad-except
        _LOG.error("an OpenEnv message failed", exc_info=error)
        answer = _error(
          applications.ServiceError(
            500,
            f"the server failed: {type(error).__name__}: {error}",
            code="internal_error",
          ),
          self._host.store,
        )
      if answer is None:
        return
      await send(_dumps(answer))

  async def _answer_to(self, text: str) -> dict[str, Any] | None:
    data = reading.object_of(text, "the message")
    message = reading.validated(schemas.Message, data, "message")
    if message.type == "reset":
      return {"type": "observation", "data": await self.reset(message.data)}
    if message.type == "step":
      return {"type": "observation", "data": await self.step(message.data)}
    if message.type == "state":
      return {"type": "state", "data": self.state()}
    if message.type == "close":
      return None
    raise applications.ServiceError(
      422,
      f"message.type={json_models.short(message.type)} must be one of reset,"
      " step, state, close",
      code="unknown_type",
    )

  async def reset(self, data: Mapping[str, Any]) -> schemas.EpisodeStep:
    """Ends the running episode and begins another."""
    body = reading.validated(schemas.Reset, data, "reset")
    entry = self._entry(body)
    await self.end()
    # Until the execution has started, only the key leads to it.
    self._key = f"openenv-{uuid.uuid4().hex}"
    self._answer, self._result = "", None
    self._execution, _ = await self._host.begin(
      self._catalog,
      entry,
      schemas.CreateOptions(gym=body.gym, lease_s=body.lease_s),
      self._key,
    )
    self._episode_id = body.episode_id or self._execution.id
    return await self._observation(None)

  def _entry(self, body: schemas.Reset) -> catalog_lib.Entry:
    """Returns the task that a reset asks for."""
    if body.task is not None:
      return self._host.entry(self._catalog, body.task)
    if body.index is not None:
      return _at(_of_split(self._catalog, body.split), body.index)
    families = self._catalog.families
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    family = body.family
    if family is None:
      family = families[seed % len(families)]
    elif family not in families:
      raise applications.invalid(
        f"reset.family={json_models.short(family)} must be one of"
        f" {', '.join(families)}"
      )
    split = body.split or "train"
    name = f"{family}@{split}:{seed}:{self._catalog.spec.seed}"
    return self._host.entry(self._catalog, name)

  async def step(self, data: Mapping[str, Any]) -> schemas.EpisodeStep:
    """Carries out the action that the data's fields describe."""
    execution = self._running()
    if self._result is not None:
      raise applications.ServiceError(
        409, "the episode is over; reset begins another", code="task_ended"
      )
    execution.check()
    width, height = execution.shown.size
    try:
      action = wire.action_from_json(
        {k: v for k, v in data.items() if k != "metadata"}, width, height
      )
    except wire.WireError as error:
      raise applications.invalid(str(error)) from None
    if action.kind is Kind.TERMINATE and _truncated(data):
      # The trainer stops, not the policy: the gym does not see the action.
      return await self._over()
    if action.kind is Kind.ANSWER:
      self._answer = action.text or ""
    observation = await execution.step(action, None)
    if observation.done or action.kind in (Kind.ANSWER, Kind.TERMINATE):
      return await self._over()
    return await self._observation(0.0)

  async def _over(self) -> schemas.EpisodeStep:
    result = await self._running().judge(
      validators.Submission(answer_text=self._answer)
    )
    self._result = result
    return await self._observation(result["score"])

  async def _observation(self, reward: float | None) -> schemas.EpisodeStep:
    execution = self._running()
    picture = await execution.picture()
    shown = wire.observation_to_json(execution.shown, picture=None)
    ended = shown["done"] or self._result is not None
    about: schemas.EpisodeMetadata = {
      "episode_id": self._episode_id,
      "task_id": execution.task.task_id,
    }
    if self._result is not None:
      about["evaluation"] = self._result
    return {
      "observation": {
        "instruction": shown["instruction"],
        "text": shown["text"],
        "info": shown["info"],
        "screenshot": picture,
        "metadata": about,
      },
      "reward": reward,
      "done": ended,
      "metadata": about,
    }

  def state(self) -> schemas.EpisodeState:
    """Returns the episode's state; of no episode before the first reset."""
    execution = self._execution
    if execution is None:
      return _state(None)
    return {
      **_state(self._episode_id, execution.steps),
      "task_id": execution.task.task_id,
      "family": execution.task.family,
      "seed": execution.task.seed,
      "done": self._result is not None or bool(execution.shown.done),
      "status": execution.state,
      "lease_left_s": round(execution.lease_left_s, 3),
      "evaluation": self._result,
    }

  def _running(self) -> executions_lib.Execution:
    if self._execution is None:
      raise applications.ServiceError(
        409, "no episode is running; reset begins one", code="not_started"
      )
    return self._execution

  async def end(self) -> None:
    """Ends the execution, even one that is still starting; idempotent."""
    key, self._key, self._execution = self._key, "", None
    if not key:
      return
    with contextlib.suppress(applications.ServiceError):  # Failed or forgotten.
      gym_id = self._catalog.spec.gym_id
      store = self._host.store
      await store.terminate(store.get(gym_id, f"key:{key}"))


async def _read(
  socket: starlette_websockets.WebSocket, inbox: asyncio.Queue[str]
) -> None:
  """Puts messages into the inbox until the client has gone."""
  while True:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
      return
    text = message.get("text")
    if text is None:  # OpenEnv's clients may send JSON as bytes as well.
      text = (message.get("bytes") or b"").decode("utf-8", "replace")
    await inbox.put(text)


def _error(
  error: applications.ServiceError, store: store_lib.ExecutionStore
) -> dict[str, Any]:
  data: dict[str, Any] = {
    "message": error.detail,
    "code": _CODES.get(error.code, "EXECUTION_ERROR"),
    "cause": error.code,
  }
  if error.retry_s is not None:
    data["retry_after_s"] = error.retry_s
  if error.code == "no_capacity":
    data["active_sessions"] = store.open
    data["max_sessions"] = store.limits.capacity
  return {"type": "error", "data": data}


def _dumps(data: object) -> str:
  return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _state(episode_id: str | None, steps: int = 0) -> schemas.EpisodeState:
  return {"episode_id": episode_id, "step_count": steps}


def _truncated(data: Mapping[str, Any]) -> bool:
  """Whether the trainer cuts the episode with this action."""
  metadata = data.get("metadata") or {}
  read = reading.validated(schemas.StepMetadata, metadata, "metadata")
  return read.truncated


def _of_split(
  catalog: catalog_lib.Catalog, split: str | None
) -> list[catalog_lib.Entry]:
  return [e for e in catalog.entries if e.split == split]


def _at(entries: list[catalog_lib.Entry], index: int) -> catalog_lib.Entry:
  if not entries:
    raise applications.invalid("the server lists no tasks of that split")
  if not 0 <= index < len(entries):
    raise applications.invalid(
      f"index must be in [0, {len(entries) - 1}], got"
      f" {json_models.short(index)}"
    )
  return entries[index]


def _row(
  catalog: catalog_lib.Catalog, entry: catalog_lib.Entry, index: int
) -> dict[str, Any]:
  return {"index": index, **entry.to_json("summary", True, catalog.env())}
