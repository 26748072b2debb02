"""Starts, evaluates and ends executions for agents that act by themselves.

`start_genv_execution` takes a task in whatever form a program has it: an
environment with a `task`, a task, a dataset's row, or just an id.

Does not act; the step-level API is used by `genv.GenvGym`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Mapping

from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.task_sources import cua_task

from cua_gyms.genv import genv_client

_BOX_KEYS = (
  "box_id",
  "gbox_id",
  "boxId",
  "container_id",
  "env_id",
  "environment_id",
)
_BOX_OBJECTS = {
  "device": ("device_serial", "box_id", "id"),
  "environment": ("id", "box_id"),
  "box": ("id",),
}


@dataclasses.dataclass(frozen=True)
class GenvExecutionContext:
  """An execution and how it was made.

  Attributes:
    gym_base_url, gym_id, execution_id: Address of the execution.
    task_identifier, task_number: Names of its task.
    env_build: `{status, total_time, stages, prehook_executed,
      prehook_output}`, the server's or the client's own measure.
    box_id: Id of the machine behind it, "" when the server does not send it.
    reply: the server's whole answer.
  """

  gym_base_url: str
  gym_id: str
  execution_id: str
  task_identifier: str
  env_build: Mapping[str, Any]
  task_number: str = ""
  box_id: str = ""
  reply: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def agent_env(self) -> dict[str, str]:
    """Variables for the agent service that acts on it."""
    return {
      "type": "genv",
      "gymBaseUrl": self.gym_base_url,
      "gymId": self.gym_id,
      "executionId": self.execution_id,
    }


def identifier_of(task: object) -> str:
  """Returns the identifier by which a gym server finds any form of task.

  Args:
    task: an environment with a `task`, a `CUATask`, a `gyms.base.Task`, a
      mapping (a row) or an id.

  Raises:
    ValueError: `task` has no identifier.
  """
  if isinstance(task, (str, int)) and not isinstance(task, bool):
    return str(task)
  if isinstance(task, Mapping):
    row = cua_task.CUATask.from_row(task)
    return row.identifier
  inner = getattr(task, "task", None)
  if inner is not None and not isinstance(task, type):
    return identifier_of(inner)
  genv = (getattr(task, "params", None) or {}).get("genv")
  if isinstance(genv, Mapping) and genv.get("identifier"):
    return str(genv["identifier"])
  for name in ("identifier", "genv_identifier", "task_id", "id"):
    value = getattr(task, name, None)
    if isinstance(value, str) and value:
      return value
  raise ValueError(
    f"{type(task).__name__} names no task; give an id, a row with 'task_id',"
    " a task, or an environment with a 'task'"
  )


async def start_genv_execution(
  task: object,
  client: genv_client.GenvClient,
  *,
  options: Mapping[str, Any] | None = None,
  resolve: bool = True,
) -> GenvExecutionContext:
  """Creates an execution of `task`.

  Args:
    task: see `identifier_of`.
    client: Client of the server.
    options: Options that the server takes.
    resolve: find the task in the server's list first, by id, name, number or
      numeric prefix; False leaves that to the server.

  Raises:
    GenvUnknownTaskError: no task, or more than one, is called that.
    GenvError: the execution could not be created.
    ValueError: `task` has no identifier.
  """
  began = time.monotonic()
  identifier, number = identifier_of(task), ""
  if resolve:
    row = await client.resolve(identifier)
    identifier, number = row.identifier, row.number
  reply = await client.create(identifier, options)
  seconds = time.monotonic() - began
  build = reply.get("env_build")
  if not isinstance(build, Mapping):
    build = {
      "status": "completed",
      "total_time": seconds,
      "stages": [
        {
          "name": "create_execution",
          "status": "completed",
          "duration": seconds,
          "details": {},
        }
      ],
      "prehook_executed": False,
      "prehook_output": "",
    }
  return GenvExecutionContext(
    client.base_url,
    client.gym_id,
    reply["execution_id"],
    identifier,
    build,
    number,
    box_id_of(reply),
    reply,
  )


async def evaluate_execution(
  context: GenvExecutionContext,
  client: genv_client.GenvClient,
  result: Mapping[str, Any] | None = None,
  **submission: Any,
) -> tuple[float, bool, dict[str, Any]]:
  """(reward, success, the server's answer).

  Args:
    context: The execution.
    client: Client of its server.
    result: Result of a run; its `answer` is submitted as answer_text.
    **submission: answer_text, execution_data, context_text, facts.

  Raises:
    GenvError: there is no verdict.
  """
  if result is not None:
    data = dict(result)
    answer = data.get("answer_text")
    answer = data.get("answer") if answer is None else answer
    if answer is not None:
      data["answer_text"] = str(answer)
      submission.setdefault("answer_text", str(answer))
    submission.setdefault("execution_data", data)
  reply = await client.evaluate(context.execution_id, **submission)
  try:
    reward, success = wire.reward_of(reply)
  except wire.WireError as error:
    raise genv_client.GenvError(f"{client.base_url}: {error}") from None
  return reward, success, reply


async def terminate_execution(
  context: GenvExecutionContext, client: genv_client.GenvClient
) -> bool:
  """Ends an execution; True when it is over now. Never raises `GenvError`."""
  return await client.terminate(context.execution_id)


def box_id_of(reply: Mapping[str, Any]) -> str:
  """Returns the machine's id, under any of its field names; "" without one."""
  for key in _BOX_KEYS:
    if isinstance(reply.get(key), str) and reply[key]:
      return reply[key]
  for key, names in _BOX_OBJECTS.items():
    inner = reply.get(key)
    if isinstance(inner, Mapping):
      for name in names:
        if isinstance(inner.get(name), str) and inner[name]:
          return inner[name]
  return ""
