"""A client of genv's HTTP protocol: tries again, in time, and never twice.

Promises: every call ends within its deadline, all tries included; a create is
sent with a key, so that trying again makes no second execution; a step is sent
with its number, so that trying again makes no second step; every failure is a
`GenvError` of a kind that a program can tell.

`GenvClient` belongs to one event loop, and keeps its connections between calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from typing import Any, Mapping
import urllib.parse
import uuid

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments.task_sources import cua_task

_LOG = logging.getLogger(__name__)
DEFAULT_BASE_URL = "http://127.0.0.1:5010"


class GenvError(RuntimeError):
  """A gym server did not do what it was asked to.

  Attributes:
    status: HTTP status, 0 when there was no answer.
    code: the server's own word for it, "" without one.
    detail: what the server says, without what it was asked.
  """

  detail = ""

  def __init__(self, message: str, status: int = 0, code: str = ""):
    super().__init__(message)
    self.status = status
    self.code = code


class GenvUnavailableError(GenvError):
  """The server cannot be reached, or does not answer in time."""


class GenvCapacityError(GenvError):
  """The server had no room until the deadline.

  Attributes:
    retry_after_s: when it says that there may be.
  """

  retry_after_s = 1.0


class GenvExecutionLostError(GenvError):
  """The execution has ended, or its gym has failed; `code` says which."""


class GenvUnknownTaskError(GenvError, cua_task.UnknownTaskError):
  """The server has no task of that name."""

  __str__ = RuntimeError.__str__


class GenvRequestError(GenvError):
  """The server refused what it was asked."""


@dataclasses.dataclass(frozen=True)
class Retry:
  """`tries` in all; before the n-th repetition `pause_s` * n seconds pass."""

  tries: int = 1
  pause_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeouts:
  """Deadlines in seconds, each over all tries of a call.

  Attributes:
    tasks: of a list or a task; likewise the others.
    connect: of a connection.
  """

  tasks: float = 60.0
  create: float = 600.0
  step: float = 600.0
  evaluate: float = 600.0
  terminate: float = 10.0
  connect: float = 60.0

  def __post_init__(self):
    options_lib.check_seconds(self)


RETRIES: Mapping[str, Retry] = {
    "tasks": Retry(3, 2.0),
    "create": Retry(3, 10.0),
    "step": Retry(3, 0.5),
    "evaluate": Retry(1),
    "terminate": Retry(2, 0.5),
}


class GenvClient:
  """See the module docstring; `aclose` when done."""

  def __init__(
      self,
      base_url: str = DEFAULT_BASE_URL,
      gym_id: str = "desktop",
      *,
      token: str = "",
      timeouts: Timeouts = Timeouts(),
      retries: Mapping[str, Retry] = RETRIES,
  ):
    """Args:

      base_url: of the server, without /api/v1.
      gym_id: which of its gyms.
      token: that it asks for, "" for none.
      timeouts: deadlines.
      retries: by kind of call, those of `RETRIES`.

    Raises:
      ValueError: no http address, or an empty gym_id.
      ImportError: httpx is not installed.
    """
    self.base_url = http.address(base_url, "base_url", DEFAULT_BASE_URL)
    if not gym_id or "/" in gym_id:
      raise ValueError(f"gym_id={gym_id!r} must be the name of a gym")
    self.gym_id = gym_id
    self.timeouts = timeouts
    self._retries = {**RETRIES, **retries}
    self._http = http.Http(
        headers={"authorization": f"Bearer {token}"} if token else {},
        connect_s=timeouts.connect,
    )

  # --- tasks ------------------------------------------------------------------

  async def list_tasks(self, full: bool = False) -> list[cua_task.CUATask]:
    """The server's tasks, whatever their shape.

    Args:
      full: also fetch each task of which the list is only a summary.

    Raises:
      GenvError: no list can be had.
    """
    data = await self._ask("tasks", "GET", "tasks")
    try:
      tasks = [
          self._read(row, f"task {i} of {self.base_url}")
          for i, row in enumerate(cua_task.rows_of(data))
      ]
    except ValueError as error:
      raise GenvError(f"{self.base_url}: {error}") from None
    if full:
      some = asyncio.Semaphore(8)

      async def fill(task: cua_task.CUATask) -> cua_task.CUATask:
        if not task.is_summary:
          return task
        async with some:
          return await self.task(task.identifier, summary=task)

      tasks = list(await asyncio.gather(*map(fill, tasks)))
    return tasks

  async def task(
      self, identifier: str, summary: cua_task.CUATask | None = None
  ) -> cua_task.CUATask:
    """The full task of that id, as the server resolves it."""
    data = await self._ask("tasks", "GET", f"tasks/{_quoted(identifier)}")
    if summary is not None and isinstance(data, Mapping):
      # What only the list said is kept.
      data = {**summary.genv_task_data, **data}
    try:
      return self._read(data, f"task {identifier!r} of {self.base_url}")
    except ValueError as error:
      raise GenvError(str(error)) from None

  async def resolve(self, identifier: str) -> cua_task.CUATask:
    """The task that is called so: exact id, name, number, numeric prefix.

    Raises:
      GenvUnknownTaskError: none is, or several are.
    """
    try:
      return cua_task.resolve(identifier, await self.list_tasks())
    except cua_task.UnknownTaskError as error:
      raise GenvUnknownTaskError(f"{self.base_url}: {error}", 404) from None

  async def gyms(self) -> list[dict[str, Any]]:
    """What the server says of its gyms; [] when it does not say."""
    try:
      data = await self._ask("tasks", "GET", "/api/v1/gyms")
    except GenvRequestError:
      return []  # The documented protocol has no such address.
    found = data.get("gyms") if isinstance(data, Mapping) else None
    return [g for g in found or () if isinstance(g, dict)]

  def _read(self, row: Any, where: str) -> cua_task.CUATask:
    return cua_task.CUATask.from_row(
        row, where=where, gym_id=self.gym_id, gym_base_url=self.base_url
    )

  # --- executions -------------------------------------------------------------

  async def create(
      self,
      identifier: str,
      options: Mapping[str, Any] | None = None,
      key: str | None = None,
  ) -> dict[str, Any]:
    """Starts an execution; the reply has an `execution_id`.

    Args:
      identifier: of the task.
      options: of the server.
      key: of this execution, a new one when None.

    Raises:
      GenvUnknownTaskError, GenvCapacityError, GenvUnavailableError, GenvError.
    """
    reply = await self._object(
        "create",
        "POST",
        f"tasks/{_quoted(identifier)}",
        {"options": dict(options or {})},
        headers={"idempotency-key": key or uuid.uuid4().hex},
    )
    found = reply.get("execution_id")
    if not isinstance(found, str) or not found:
      raise GenvError(
          f"{self.base_url} created an execution of {identifier!r} without an"
          " execution_id"
      )
    return reply

  async def step(
      self, execution_id: str, action: gui_action.GuiAction, number: int
  ) -> dict[str, Any]:
    """Carries out step `number`, counted from 1."""
    return await self._object(
        "step",
        "POST",
        f"executions/{_quoted(execution_id)}/step",
        {"action": action.to_json(), "step": number},
    )

  async def screenshot(self, execution_id: str) -> dict[str, Any]:
    return await self._object(
        "step", "GET",
        f"executions/{_quoted(execution_id)}/screenshot?format=json",
    )  # pyformat: disable

  async def evaluate(
      self,
      execution_id: str,
      *,
      answer_text: str | None = None,
      execution_data: Mapping[str, Any] | None = None,
      context_text: str | None = None,
      facts: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """The server's verdict; only what is given is sent."""
    given = {
        "answer_text": answer_text,
        "execution_data": execution_data,
        "context_text": context_text,
        "facts": facts,
    }
    return await self._object(
        "evaluate",
        "POST",
        f"executions/{_quoted(execution_id)}/evaluate",
        {k: v for k, v in given.items() if v is not None},
    )

  async def terminate(self, execution_id: str) -> bool:
    """Ends the execution; True when it is over now. Never raises GenvError.

    One that cannot be told is closed by the server when its lease is over.
    """
    try:
      await self._ask(
          "terminate", "POST", f"executions/{_quoted(execution_id)}/terminate"
      )
    except GenvError as error:
      if error.status in (404, 410):
        return True
      _LOG.warning("execution %s was not terminated: %s", execution_id, error)
      return False
    return True

  async def aclose(self) -> None:
    """Idempotent."""
    await self._http.aclose()

  # --- one call ---------------------------------------------------------------

  async def _object(self, *args: Any, **more: Any) -> dict[str, Any]:
    reply = await self._ask(*args, **more)
    if not isinstance(reply, dict):
      raise GenvError(
          f"{args[1]} {self.base_url}/…/{args[2]} must answer with an object,"
          f" got {str(reply)[:80]!r}"
      )
    return reply

  async def _ask(
      self,
      kind: str,
      method: str,
      path: str,
      body: Any = None,
      headers: Mapping[str, str] | None = None,
  ) -> Any:
    """The reply's JSON, after as many tries as there may be."""
    if not path.startswith("/"):
      path = f"/api/v1/{urllib.parse.quote(self.gym_id, safe='')}/{path}"
    what = f"{method} {self.base_url}{path}"
    deadline = getattr(self.timeouts, kind)
    try:
      async with asyncio.timeout(deadline):
        return await self._try(kind, method, path, body, headers, what)
    except TimeoutError:
      raise GenvUnavailableError(
          f"{what} did not answer within {deadline:g} s; is the server at"
          f" {self.base_url} up, and is timeouts.{kind} long enough?"
      ) from None

  async def _try(
      self, kind: str, method: str, path: str, body: Any, headers: Any,
      what: str,
  ) -> Any:  # pyformat: disable
    retry = self._retries[kind]
    failures = 0
    deadline = asyncio.get_running_loop().time() + getattr(
        self.timeouts, kind
    )
    while True:
      try:
        return await self._once(method, path, body, headers, what)
      except GenvCapacityError as error:
        # Being full is no failure: it passes when others terminate.
        pause = error.retry_after_s * (1 + random.random() / 2)
        if asyncio.get_running_loop().time() + pause > deadline:
          raise
      except GenvError as error:
        failures += 1
        again = isinstance(error, GenvUnavailableError) or (
            kind in ("tasks", "create") and error.status >= 500
        )
        if not again or failures >= retry.tries:
          raise
        pause = retry.pause_s * failures
        _LOG.info("%s; trying again in %g s", error, pause)
      await asyncio.sleep(pause)

  async def _once(
      self, method: str, path: str, body: Any, headers: Any, what: str
  ) -> Any:
    try:
      reply = await self._http.call(
          method, self.base_url + path, None, body=body, headers=headers
      )
    except http.CallError as error:
      raise GenvUnavailableError(str(error)) from error
    if not reply.ok:
      raise _failure(reply, what)
    try:
      return http.json_of(reply.content)
    except ValueError as error:
      raise GenvError(
          f"{what} answered with {reply.headers.get('content-type')}, not"
          f" JSON ({str(error)[:80]}); is that a gym server?",
          reply.status,
      ) from None


def _failure(reply: Any, what: str) -> GenvError:
  """The error that an answer of 4xx or 5xx stands for."""
  status = reply.status
  try:
    data = http.json_of(reply.content)
  except ValueError:
    data = {}
  data = data if isinstance(data, Mapping) else {}
  detail = data.get("detail")
  code = str(data.get("code") or "")
  said = f"{status} {str(detail)[:2000]}" if detail else reply.quoted(200)
  text = f"{what}: {said}"
  if status == 429:
    error = GenvCapacityError(text, status, code)
    error.retry_after_s = _seconds(reply.headers.get("retry-after"))
    return error
  if code == "unknown_task":
    return GenvUnknownTaskError(text, status, code)
  over = status in (410, 502, 504) and "/executions/" in what
  if over or code == "unknown_execution":
    return GenvExecutionLostError(text, status, code)
  if status in (503, 504, 408) or status == 502 and not code:
    return GenvUnavailableError(text, status, code)
  if status < 500:
    error = GenvRequestError(text, status, code)
    error.detail = said if detail is None else str(detail)[:2000]
    return error
  return GenvError(text, status, code)


def _seconds(value: str | None) -> float:
  try:
    return min(60.0, max(0.05, float(value)))
  except (TypeError, ValueError):
    return 1.0


def _quoted(text: str) -> str:
  return urllib.parse.quote(str(text), safe="")
