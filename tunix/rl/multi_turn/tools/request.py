"""Keeps one request with stateful tools, from first prompt to last release.

States: PENDING (nothing done) -> RUNNING (the model's turn) <-> TOOL_CALLING
(the tools' turn) -> COMPLETED or FAILED. `TRANSITIONS` lists every move; others
are refused.

Promises:
- Every tool of the request is created before the first generation, and
  released exactly once for each creation, whatever happens in between; also
  when the creation was cut short and may or may not have made its instance.
- The calls of a turn run at once; their results stand in the order of the
  calls.
- A failing tool is a message for the model; a failing creation is raised.
- Releases have a deadline, and a cancellation waits for them.

Does not: ask the model; `environments.tool_request_env` plays a request as an
episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import logging
from typing import Any, Awaitable, Mapping, Sequence
import uuid

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.tools import stateful

_LOG = logging.getLogger(__name__)


class RequestState(str, enum.Enum):
  PENDING = "pending"
  RUNNING = "running"
  TOOL_CALLING = "tool_calling"
  COMPLETED = "completed"
  FAILED = "failed"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
  RequestState.PENDING: frozenset((RequestState.RUNNING, RequestState.FAILED)),
  RequestState.RUNNING: frozenset(
    (RequestState.TOOL_CALLING, RequestState.COMPLETED, RequestState.FAILED)
  ),
  RequestState.TOOL_CALLING: frozenset(
    (RequestState.RUNNING, RequestState.COMPLETED, RequestState.FAILED)
  ),
  RequestState.COMPLETED: frozenset(),
  RequestState.FAILED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
  """A move that the table does not allow."""


class FinishReason(str, enum.Enum):
  """Reasons for a stop. TOOL_CALL continues, the others end the request."""

  STOP = "stop"
  LENGTH = "length"
  TOOL_CALL = "tool_calls"


@dataclasses.dataclass
class ToolRequest:
  """One request. The mutable owner of its state.

  Attributes:
    messages: OpenAI format, grows.
    tools_kwargs: tool name -> `{"create_kwargs": {…}, …}`.
    data_source: data set of the row.
    index: Index of the row.
    state: see the module docstring; change it with `move`.
    finish_reason: Finish reason of the last generation.
    rewards: tool name -> `calc_reward`, filled at the end.
    call_rewards: reward of each execution, in order.
    error: kind and text of the failure, None without one.
  """

  messages: list[trajectory.Message]
  tools_kwargs: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(
    default_factory=dict
  )
  data_source: str | None = None
  index: int | None = None
  request_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
  state: RequestState = RequestState.PENDING
  finish_reason: FinishReason | None = None
  rewards: dict[str, float] = dataclasses.field(default_factory=dict)
  call_rewards: list[float] = dataclasses.field(default_factory=list)
  error: str | None = None

  @classmethod
  def from_row(
    cls,
    row: Mapping[str, Any],
    tools: Mapping[str, stateful.BaseTool] | Sequence[str] = (),
  ) -> ToolRequest:
    """Builds a request from a data set's row.

    Reads `prompt` (messages or a str) and, from `extra_info`, `tools_kwargs`,
    `need_tools_kwargs` and `index`; `data_source` may stand in either place.

    Args:
      row: see above.
      tools: those that the request may use.

    Raises:
      ValueError: no prompt, or tools_kwargs for a tool that is not there.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
      prompt = [{"role": "user", "content": prompt}]
    if not prompt:
      raise ValueError("a row needs 'prompt': a str or a list of messages")
    extra = row.get("extra_info") or {}
    kwargs = extra.get("tools_kwargs") or {}
    index = extra.get("index", row.get("index"))
    source = extra.get("data_source") or row.get("data_source")
    if extra.get("need_tools_kwargs") and not kwargs:
      _LOG.warning(
        "row %s of %s needs tools_kwargs and has none", index, source
      )
    for name in kwargs:
      if name not in tools:
        raise ValueError(
          f"row {index}: "
          + registry.unknown_name("tool in tools_kwargs", name, tools)
        )
    return cls(
      messages=list(prompt),
      tools_kwargs={
        name: stateful.check_tool_kwargs(name, value)
        for name, value in kwargs.items()
      },
      data_source=source,
      index=index,
    )

  def move(self, state: RequestState) -> None:
    """Changes the state.

    Raises:
      IllegalTransitionError: the table does not allow it.
    """
    if state not in TRANSITIONS[self.state]:
      raise IllegalTransitionError(
        f"request {self.request_id} cannot go from {self.state.value} to"
        f" {state.value}"
      )
    self.state = state

  def kwargs(self, tool: str, kind: str) -> dict[str, Any]:
    """Returns the keyword arguments of one tool method."""
    return self.tools_kwargs.get(tool, {}).get(kind, {})

  def finalize(
    self, rewards: Mapping[str, float], reason: FinishReason | None
  ) -> None:
    """Ends the request: FAILED when it has an error, else COMPLETED."""
    self.rewards = dict(rewards)
    self.finish_reason = reason
    self.move(RequestState.FAILED if self.error else RequestState.COMPLETED)


class RequestTools:
  """The instances of a request's tools, from their creation to the release."""

  def __init__(
    self,
    request: ToolRequest,
    tools: Mapping[str, stateful.BaseTool],
    timeout: float | None,
  ):
    """Args:

    request: its keyword arguments go to the tools; it receives messages and
      rewards.
    tools: name -> stateful tool.
    timeout: seconds for each tool method; None for no limit.
    """
    self._request = request
    self._tools = tools
    self._timeout = timeout
    self._instances: dict[str, str] = {}

  async def create(self) -> None:
    """Makes the instances; their ids are noted before they exist."""
    for name, tool in self._tools.items():
      kwargs, self._instances[name] = stateful.with_instance_id(
        self._request.kwargs(name, "create_kwargs")
      )
      try:
        self._instances[name] = await self._guarded(
          tool.create(**kwargs), f"{name}.create"
        )
      except concurrency.DeadlineExceeded:
        raise
      except Exception:
        del self._instances[name]  # An error of its own: it made nothing.
        raise

  async def execute(
    self, calls: Sequence[trajectory.ToolCall]
  ) -> dict[str, str]:
    """Runs the calls of a turn at once; their texts by call id, in order.

    A failing call is a text for the model. The request receives the messages
    and the rewards of the calls that succeeded.
    """
    results = await asyncio.gather(*(self._execute(call) for call in calls))
    for call, (text, reward) in zip(calls, results):
      if reward is not None:
        self._request.call_rewards.append(reward)
      self._request.messages.append(
        {"role": "tool", "tool_call_id": call.call_id, "content": text}
      )
    return {call.call_id: text for call, (text, _) in zip(calls, results)}

  async def calc_rewards(self) -> dict[str, float]:
    """Returns the instances' rewards; the first error is kept, none is
    raised."""
    request, rewards = self._request, {}
    for name, instance_id in self._instances.items():
      kwargs = request.kwargs(name, "calc_reward_kwargs")
      try:
        rewards[name] = float(
          await self._guarded(
            self._tools[name].calc_reward(instance_id, **kwargs),
            f"{name}.calc_reward",
          )
        )
      except Exception as error:  # pylint: disable=broad-except
        request.error = request.error or f"{type(error).__name__}: {error}"
    return rewards

  async def release(self) -> None:
    """Releases every instance, each under its own deadline; idempotent."""
    instances, self._instances = self._instances, {}
    await stateful.release_all(
      [
        (
          name,
          functools.partial(
            self._tools[name].release,
            instance_id,
            **self._request.kwargs(name, "release_kwargs"),
          ),
        )
        for name, instance_id in instances.items()
      ],
      self._timeout,
    )

  async def _execute(
    self, call: trajectory.ToolCall
  ) -> tuple[str, float | None]:
    """Returns (text for the model, reward) of one call; reward None when it
    failed."""
    if call.name not in self._tools:
      text = registry.unknown_name("tool", call.name, self._tools)
      return f"Error: {text}", None
    try:
      text, reward, _ = await self._guarded(
        self._tools[call.name].execute(
          self._instances[call.name],
          dict(call.arguments),
          **self._request.kwargs(call.name, "execute_kwargs"),
        ),
        f"{call.name}.execute",
      )
      return str(text), float(reward)
    except Exception as error:  # pylint: disable=broad-except
      return f"Error: {type(error).__name__}: {error}", None

  async def _guarded(self, awaitable: Awaitable[Any], what: str) -> Any:
    return await concurrency.with_deadline(awaitable, self._timeout, what)
