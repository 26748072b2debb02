"""Calls gym servers by genv's HTTP protocol; repeats no effect.

Promises: every call ends within its deadline, all tries included; a create is
sent with a key, so that trying again makes no second execution; a step is sent
with its number, so that trying again makes no second step; every failure is a
`GenvError` subclass for its kind.

`GenvClient` belongs to one event loop, and keeps its connections between calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any, Mapping
import urllib.parse
import uuid

import tenacity
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.net import http

_LOG = logging.getLogger(__name__)
DEFAULT_BASE_URL = "http://127.0.0.1:5010"


class GenvError(http.CallError):
  """A call to a gym server failed.

  Attributes:
    code: the server's own word for the failure, "" without one.
    detail: the server's text, without the request it refers to.
  """

  detail = ""

  def __init__(self, message: str, status: int = 0, code: str = ""):
    super().__init__(message, status)
    self.code = code

  @classmethod
  def of(cls, error: http.CallError) -> GenvError:
    genv_error = _kind_of(error)
    genv_error.answer, genv_error.late = error.answer, error.late
    if isinstance(genv_error, GenvCapacityError):
      pause = error.retry_after_s
      genv_error.retry_after_s = 1.0 if pause is None else max(0.05, pause)
    return genv_error


class GenvUnavailableError(GenvError):
  """The server cannot be reached, or does not answer in time."""


class GenvCapacityError(GenvError):
  """The server had no room until the deadline.

  Attributes:
    retry_after_s: Seconds until there may be room, as the server says.
  """


class GenvExecutionLostError(GenvError):
  """The execution has ended, or its gym has failed; see `code`."""


class GenvUnknownTaskError(GenvError, cua_task.UnknownTaskError):
  """The server has no task of that name."""

  __str__ = RuntimeError.__str__


class GenvRequestError(GenvError):
  """The server refused a request."""


@dataclasses.dataclass(frozen=True)
class Timeouts:
  """Deadlines in seconds, each over all tries of a call.

  Attributes:
    tasks: Deadline of reading the list or one task.
    create, step, evaluate, terminate: Deadline of that call.
    connect: Deadline of a connection.
  """

  tasks: float = 60.0
  create: float = 600.0
  step: float = 600.0
  evaluate: float = 600.0
  terminate: float = 10.0
  connect: float = 60.0

  def __post_init__(self):
    options_lib.check_seconds(self)


def _retry(
  tries: int, pause_s: float = 0.0, after_500: bool = False
) -> http.RetryPolicy:
  """Repeats calls that no server answered, `after_500` failed ones too."""
  return http.RetryPolicy(
    tries,
    tenacity.wait_incrementing(pause_s, pause_s),
    tenacity.retry_if_exception(
      lambda error: (
        isinstance(error, GenvUnavailableError)
        or after_500
        and isinstance(error, GenvError)
        and error.status >= 500
      )
    ),
    jitter=0.5,
  )


RETRIES: Mapping[str, http.RetryPolicy] = {
  "tasks": _retry(3, 2.0, after_500=True),
  "create": _retry(3, 10.0, after_500=True),
  "step": _retry(3, 0.5),
  "evaluate": _retry(1),
  "terminate": _retry(2, 0.5),
}


class GenvClient:
  """A client of one gym server; `aclose` when done."""

  def __init__(
    self,
    base_url: str = DEFAULT_BASE_URL,
    gym_id: str = "desktop",
    *,
    token: str = "",
    timeouts: Timeouts = Timeouts(),
    retries: Mapping[str, http.RetryPolicy] = RETRIES,
  ):
    """Args:

      base_url: Address of the server, without /api/v1.
      gym_id: Name of one of its gyms.
      token: Token that the server asks for, "" for none.
      timeouts: Deadlines of the calls.
      retries: Retry policy by kind of call, see `RETRIES`.

    Raises:
      ValueError: no http address, or an empty gym_id.
    """
    self.base_url = http.address(base_url, "base_url", DEFAULT_BASE_URL)
    if not gym_id or "/" in gym_id:
      raise ValueError(f"gym_id={gym_id!r} must be the name of a gym")
    self.gym_id = gym_id
    self.timeouts = timeouts
    self._retries = {**RETRIES, **retries}
    self._http = http.Http(
      GenvError,
      headers={"authorization": f"Bearer {token}"} if token else {},
      connect_s=timeouts.connect,
    )

  # --- tasks ------------------------------------------------------------------

  async def list_tasks(self, full: bool = False) -> list[cua_task.CUATask]:
    """Returns the server's tasks, whatever their shape.

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
    """Returns the full task of that id, as the server resolves it."""
    data = await self._ask("tasks", "GET", f"tasks/{_quoted(identifier)}")
    if summary is not None and isinstance(data, Mapping):
      # Keep fields that only the list reports.
      data = {**summary.genv_task_data, **data}
    try:
      return self._read(data, f"task {identifier!r} of {self.base_url}")
    except ValueError as error:
      raise GenvError(str(error)) from None

  async def resolve(self, identifier: str) -> cua_task.CUATask:
    """Finds a task by exact id, name, number or numeric prefix.

    Raises:
      GenvUnknownTaskError: no task, or several tasks, have that name.
    """
    try:
      return cua_task.resolve(identifier, await self.list_tasks())
    except cua_task.UnknownTaskError as error:
      raise GenvUnknownTaskError(f"{self.base_url}: {error}", 404) from None

  async def gyms(self) -> list[dict[str, Any]]:
    """Lists the server's gyms; [] from a server without that route."""
    try:
      data = await self._ask("tasks", "GET", "/api/v1/gyms")
    except GenvRequestError:
      return []  # The documented protocol has no such address.
    rows = data.get("gyms") if isinstance(data, Mapping) else None
    return [g for g in rows or () if isinstance(g, dict)]

  def _read(self, row: object, where: str) -> cua_task.CUATask:
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
      identifier: Id, name or number of the task.
      options: Options that the server takes.
      key: Idempotency key of this execution, a new one when None.

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
    execution_id = reply.get("execution_id")
    if not isinstance(execution_id, str) or not execution_id:
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
      "step",
      "GET",
      f"executions/{_quoted(execution_id)}/screenshot?format=json",
    )

  async def evaluate(
    self,
    execution_id: str,
    *,
    answer_text: str | None = None,
    execution_data: Mapping[str, Any] | None = None,
    context_text: str | None = None,
    facts: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Returns the server's verdict; sends only the arguments given."""
    arguments = {
      "answer_text": answer_text,
      "execution_data": execution_data,
      "context_text": context_text,
      "facts": facts,
    }
    return await self._object(
      "evaluate",
      "POST",
      f"executions/{_quoted(execution_id)}/evaluate",
      {k: v for k, v in arguments.items() if v is not None},
    )

  async def terminate(self, execution_id: str) -> bool:
    """Ends the execution; True when it is over now. Never raises GenvError.

    If the server cannot be reached, it closes the execution after its lease.
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
    body: object = None,
    headers: Mapping[str, str] | None = None,
  ) -> Any:
    """Calls, with retries; returns the reply's JSON."""
    if not path.startswith("/"):
      path = f"/api/v1/{urllib.parse.quote(self.gym_id, safe='')}/{path}"
    seconds = getattr(self.timeouts, kind)
    try:
      return await self._http.json(
        method,
        self.base_url + path,
        seconds,
        body=body,
        headers=headers,
        retry=self._retries[kind],
      )
    except GenvError as error:
      if not error.late:
        raise
      raise GenvUnavailableError(
        f"{error}; is the server at {self.base_url} up, and is"
        f" timeouts.{kind} long enough?"
      ) from None


def _kind_of(error: http.CallError) -> GenvError:
  """Maps no answer, or one of 3xx to 5xx, to its error class."""
  answer = error.answer
  if answer is None:
    return GenvUnavailableError(str(error))
  status = answer.status
  if answer.ok:
    return GenvError(f"{error}; is that a gym server?", status)
  try:
    data = json_text.parse(answer.content)
  except ValueError:
    data = {}
  data = data if isinstance(data, Mapping) else {}
  detail = data.get("detail")
  code = str(data.get("code") or "")
  what = str(error).partition(": ")[0]
  quoted = f"{status} {str(detail)[:2000]}" if detail else answer.quoted(200)
  text = f"{what}: {quoted}"
  if status == 429:
    return GenvCapacityError(text, status, code)
  if code == "unknown_task":
    return GenvUnknownTaskError(text, status, code)
  over = status in (410, 502, 504) and "/executions/" in what
  if over or code == "unknown_execution":
    return GenvExecutionLostError(text, status, code)
  if status in (503, 504, 408) or status == 502 and not code:
    return GenvUnavailableError(text, status, code)
  if status < 500:
    refused = GenvRequestError(text, status, code)
    refused.detail = quoted if detail is None else str(detail)[:2000]
    return refused
  return GenvError(text, status, code)


def _quoted(text: str) -> str:
  return urllib.parse.quote(str(text), safe="")
