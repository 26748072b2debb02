"""An agent whose episodes a run service plays.

`RunAgent` starts a run and follows its events: the policy's replies and the
service's actions become the steps of a `Trajectory`, in the same form as those
of an agent that plays here.

Promises: whatever the service does, waiting for it ends with the run's
deadline; `close` ends the run at the service, and is idempotent.

Does not act on an environment, or hold tokens; see `run_episodes`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any, Mapping

from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.core import trajectory as trajectory_lib

from agent_services.runs import client as client_lib
from agent_services.runs import conversion


class RunFailed(RuntimeError):
  """The service ended the run without an outcome of the policy."""


@dataclasses.dataclass(frozen=True)
class RunEnd:
  """Outcome of a run.

  Attributes:
    status: "completed" or "failed".
    reason: Reason in the service's words.
    answer: Answer of the policy, "" for none.
    evaluation: {score, success}, where the service judged it.
    message: Text of the model server's refusal that ended it, "" for none.
  """

  status: str
  reason: str
  answer: str = ""
  evaluation: Mapping[str, Any] | None = None
  message: str = ""


class RunAgent(base_agent.BaseAgent):
  """Follows one run at a time; see the module docstring.

  Attributes:
    events: Events of the run so far.
  """

  def __init__(self) -> None:
    self.events: list[dict[str, Any]] = []
    self._trajectory = trajectory_lib.Trajectory()
    self._client: client_lib.RunServiceClient | None = None
    self._run_id = ""
    self._pump: asyncio.Task[None] | None = None
    self._news = asyncio.Event()
    self._ended: RunEnd | None = None
    self._failure: BaseException | None = None

  # --- the run ----------------------------------------------------------------

  async def start(
    self,
    client: client_lib.RunServiceClient,
    body: Mapping[str, Any],
    seconds: float,
  ) -> str:
    """Starts the run; returns its id.

    Args:
      client: Client of the service.
      body: Body of `POST /runs`.
      seconds: Deadline of the whole run, and of a full service's refusals.

    Raises:
      RunServiceError: refused, or no answer.
      RuntimeError: a run has been started already.
    """
    if self._run_id:
      raise RuntimeError("this agent follows a run already; make another one")
    self._client = client
    self._run_id = await client.start(body, seconds)
    self._pump = asyncio.ensure_future(self._follow(client, seconds))
    return self._run_id

  async def output(self, index: int) -> dict[str, Any] | None:
    """Returns the run's model output of that index; None if it ended before.

    Raises:
      RunServiceError: the service is gone, or answers garbage.
      RunFailed: the run failed.
    """
    return await self._nth("model_output", index)

  async def actions(self, index: int) -> list[dict[str, Any]]:
    """Actions after model output `index`, once the next call begins.

    Raises:
      RunServiceError, RunFailed: see `output`.
    """
    await self._nth("model_call", index + 1)
    executed: list[dict[str, Any]] = []
    outputs = -1
    for event in self.events:
      outputs += event.get("type") == "model_output"
      if outputs > index:
        break
      if outputs == index and event.get("type") == "action_executed":
        action = event.get("action")
        executed.append(dict(action) if isinstance(action, Mapping) else {})
    return executed

  async def finished(self) -> RunEnd:
    """Waits for the run's end.

    Raises:
      RunServiceError, RunFailed: see `output`.
    """
    while self._ended is None and self._failure is None:
      if self._pump is None:
        raise RuntimeError("no run is followed; call start first")
      self._news.clear()
      await self._news.wait()
    if self._failure is not None:
      raise self._failure
    assert self._ended is not None
    if self._ended.status != "completed":
      raise RunFailed(
        f"run {self._run_id} {self._ended.status}: {self._ended.reason}"
      )
    return self._ended

  @property
  def ended(self) -> RunEnd | None:
    """Outcome of the run; None while it runs."""
    return self._ended

  async def close(self) -> None:
    """Stops following, and ends the run if it still runs. Idempotent."""
    pump, self._pump = self._pump, None
    if pump is not None:
      pump.cancel()
      await asyncio.wait({pump})
    if self._client is not None and self._run_id and self._ended is None:
      client, self._client = self._client, None
      await client.cancel(self._run_id)

  async def _follow(
    self, client: client_lib.RunServiceClient, seconds: float
  ) -> None:
    try:
      async for event in client.follow(self._run_id, seconds):
        self.events.append(event)
        self._news.set()
      status, reason = await client.status(self._run_id)
      self._ended = _end(self.events, status, reason)
    except asyncio.CancelledError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      # Raised where the episode waits for the run.
      self._failure = error
    finally:
      self._news.set()

  async def _nth(self, kind: str, index: int) -> dict[str, Any] | None:
    while True:
      self._news.clear()
      events = [e for e in self.events if e.get("type") == kind]
      if len(events) > index:
        return events[index]
      if self._failure is not None:
        raise self._failure
      if self._ended is not None:
        if self._ended.status != "completed":
          raise RunFailed(
            f"run {self._run_id} {self._ended.status}: {self._ended.reason}"
          )
        return None
      if self._pump is None:
        raise RuntimeError("no run is followed; call start first")
      await self._news.wait()

  # --- BaseAgent --------------------------------------------------------------

  @property
  def chat_completions(self) -> list[trajectory_lib.Message]:
    """Messages of the next step's model call, screenshots by address."""
    calls = (e for e in self.events if e.get("type") == "model_call")
    turn = len(self._trajectory.steps)
    event = next(itertools.islice(calls, turn, None), None)
    return [_readable(m) for m in conversion.messages_of(event or {})]

  @property
  def trajectory(self) -> trajectory_lib.Trajectory:
    return self._trajectory

  def update_from_env(
    self,
    observation: object,
    reward: float,
    done: bool,
    info: Mapping[str, Any] | None = None,
  ) -> None:
    info = info or {}
    if self._trajectory.task is None:
      self._trajectory.task = info.get("task", observation)
    step = self.current_step
    if step is not None:
      step.observation = observation
      step.reward = float(reward)
      step.done = bool(done)
      step.info.update(info)

  def update_from_model(self, response: str) -> trajectory_lib.Action:
    action = trajectory_lib.Action(response)
    self._trajectory.steps.append(
      trajectory_lib.Step(
        chat_completions=self.chat_completions,
        action=action,
        model_response=response,
      )
    )
    return action

  def reset(self) -> None:
    self._trajectory = trajectory_lib.Trajectory()


def _end(events: list[dict[str, Any]], status: str, reason: str) -> RunEnd:
  answer, message, evaluation = "", "", None
  for event in events:
    if event.get("type") == "run_end":
      reason = str(event.get("reason") or reason)
      message = str(event.get("message") or "")
      answer = str(event.get("answer") or answer)
      verdict = event.get("evaluation")
      evaluation = verdict if isinstance(verdict, Mapping) else None
    action = event.get("action")
    if isinstance(action, Mapping) and action.get("name") in (
      "finished",
      "answer",
    ):
      args = action.get("args")
      if isinstance(args, Mapping) and args.get("content"):
        answer = str(args["content"])
  return RunEnd(status, reason, answer, evaluation, message)


def _readable(message: Mapping[str, Any]) -> trajectory_lib.Message:
  """Returns the message without data URLs: a trajectory holds no pixels."""
  content = message.get("content")
  if isinstance(content, list):
    content = [_readable_part(part) for part in content]
  return {**message, "content": content}


def _readable_part(part: object) -> Any:
  if not isinstance(part, Mapping) or part.get("type") != "image_url":
    return part
  url = part.get("image_url")
  url = str(url.get("url") if isinstance(url, Mapping) else url)
  short = url if url[:5] != "data:" else url[:32] + "…"
  return {"type": "text", "text": f"[screenshot {short}]"}
