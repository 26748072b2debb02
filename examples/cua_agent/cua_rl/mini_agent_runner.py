"""Plays one run of an agent service, and sums it up."""

from __future__ import annotations

from typing import Any, Mapping

from agent_services.runs import client as client_lib
from agent_services.runs import run_agent


async def run_mini_agent_rollout(
  client: client_lib.RunServiceClient,
  body: Mapping[str, Any],
  *,
  max_task_time_seconds: float = 1800.0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """({task_success, task_completed, num_turns, max_turns, errors,
  result_message, answer}, the run's events).

  `task_success` is the service's own claim; the gym server judges.

  Args:
    client: Client of the service.
    body: Body of `POST /runs`.
    max_task_time_seconds: Deadline of the whole run.
  """
  agent = run_agent.RunAgent()
  errors: list[str] = []
  end = None
  try:
    await agent.start(client, body, max_task_time_seconds)
    end = await agent.finished()
  except (client_lib.RunServiceError, run_agent.RunFailed) as error:
    errors.append(str(error))
  finally:
    await agent.close()
  turns = sum(e.get("type") == "model_output" for e in agent.events)
  result = {
    "task_success": end is not None and end.reason == "finished",
    "task_completed": end is not None,
    "num_turns": turns,
    "max_turns": body.get("maxSteps"),
    "errors": errors,
    "result_message": end.reason if end is not None else errors[0],
    "answer": end.answer if end is not None else "",
  }
  return result, agent.events
