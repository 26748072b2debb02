"""Running the tool calls of a turn.

Promises: every call gives an output, in the order of the calls, under its own
id, within its deadline. An exception, an unknown tool and a hang are error
outputs that the policy reads; they never reach the caller.

Does not: retry, or undo what a hung tool goes on doing in its thread.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.tools import base

_LOG = logging.getLogger(__name__)


class ToolManager:
  """The tools of one environment.

  Attributes:
    tools: name -> tool.
    timeout: seconds a call may take, None for no limit.
  """

  def __init__(
      self,
      tool_map: Mapping[str, type[base.BaseTool] | base.BaseTool] | None = None,
      *,
      timeout: float | None = 30.0,
      pool: concurrency.WorkerPool | None = None,
  ):
    """Args:

      tool_map: name -> tool class, built with that name and its docstring's
        first paragraph as description, or a ready tool.
      timeout: deadline of each call, in seconds.
      pool: threads for sync tools; None for the process-wide ones.

    Raises:
      TypeError: an entry is neither.
      ValueError: a timeout that is not positive.
    """
    if timeout is not None and not timeout > 0:
      raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
    self.timeout = timeout
    self._pool = pool or concurrency.default_pool()
    self.tools: dict[str, base.BaseTool] = {}
    for name, tool in (tool_map or {}).items():
      if isinstance(tool, type) and issubclass(tool, base.BaseTool):
        tool = tool(name=name, description=_first_paragraph(tool))
      if not isinstance(tool, base.BaseTool):
        raise TypeError(
            f"tool {name!r} must be a BaseTool or a subclass of it, got"
            f" {tool!r}"
        )
      self.tools[name] = tool

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(self.tools)

  @property
  def json(self) -> list[dict[str, Any]]:
    """Schemas of all tools, in the order of the map and under its names.

    What the policy is shown is what it can call, whatever a ready tool calls
    itself.
    """
    return [base.renamed(tool.json, name) for name, tool in self.tools.items()]

  def run(self, tool_name: str, /, **kwargs: Any) -> base.ToolOutput:
    """Runs one tool with `kwargs` and waits for it."""
    return self.outputs([base.ToolCall(tool_name, kwargs)]).popitem()[1]

  async def run_async(
      self, tool_name: str, /, **kwargs: Any
  ) -> base.ToolOutput:
    """`run` for the event loop."""
    return await self._output_async(base.ToolCall(tool_name, kwargs))

  def execute_calls(self, calls: Any, parallel: bool = True) -> dict[str, str]:
    """{call id: text of the output}, in the order of the calls.

    Args:
      calls: ToolCalls, or dicts as `base.normalize_calls` reads them.
      parallel: run them at once rather than one after the other.
    """
    outputs = self.outputs(calls, parallel)
    return {call_id: str(output) for call_id, output in outputs.items()}

  async def execute_calls_async(
      self, calls: Any, parallel: bool = True
  ) -> dict[str, str]:
    """`execute_calls` for the event loop."""
    outputs = await self.outputs_async(calls, parallel)
    return {call_id: str(output) for call_id, output in outputs.items()}

  def outputs(
      self, calls: Any, parallel: bool = True
  ) -> dict[str, base.ToolOutput]:
    """`execute_calls` with the outputs themselves."""
    calls = base.normalize_calls(calls)
    if not parallel:
      return {call.call_id: self._output(call) for call in calls}
    jobs: list[concurrency.Job | base.ToolOutput] = []
    for call in calls:
      jobs.append(self._refusal(call) or self._submit(call))
    try:
      return {
          call.call_id: self._collect(call, job)
          for call, job in zip(calls, jobs)
      }
    finally:
      for job in jobs:
        if isinstance(job, concurrency.Job):
          self._pool.abandon(job)

  async def outputs_async(
      self, calls: Any, parallel: bool = True
  ) -> dict[str, base.ToolOutput]:
    """`outputs` for the event loop."""
    calls = base.normalize_calls(calls)
    if parallel and len(calls) > 1:
      results: Sequence[base.ToolOutput] = await asyncio.gather(
          *(self._output_async(call) for call in calls)
      )
    else:
      results = [await self._output_async(call) for call in calls]
    return {call.call_id: out for call, out in zip(calls, results)}

  def _refusal(self, call: base.ToolCall) -> base.ToolOutput | None:
    """An error output when the call cannot be made at all."""
    tool = self.tools.get(call.name)
    if tool is None:
      return base.ToolOutput(
          call.name, error=registry.unknown_name("tool", call.name, self.tools)
      )
    function = tool.json.get("function", {})
    required = (function.get("parameters") or {}).get("required", ())
    missing = [name for name in required if name not in call.arguments]
    if missing:
      return base.ToolOutput(
          call.name, error=f"missing argument {', '.join(missing)}"
      )
    return None

  def _submit(self, call: base.ToolCall) -> concurrency.Job | base.ToolOutput:
    tool = self.tools[call.name]

    def run() -> Any:
      if tool.is_sync:
        return tool.forward(**call.arguments)
      # A coroutine can be cancelled, so it must not cost its thread.
      return asyncio.run(self._guarded(tool, call))

    try:
      return self._pool.submit(run)
    except RuntimeError as error:
      return _failure(call, error)

  async def _guarded(self, tool: base.BaseTool, call: base.ToolCall) -> Any:
    return await concurrency.with_deadline(
        tool.async_forward(**call.arguments),
        self.timeout,
        f"tool {call.name!r}",
    )

  def _collect(
      self, call: base.ToolCall, job: concurrency.Job | base.ToolOutput
  ) -> base.ToolOutput:
    if isinstance(job, base.ToolOutput):
      return job
    try:
      value = self._pool.wait(job, self.timeout, f"tool {call.name!r}")
    except Exception as error:  # pylint: disable=broad-except
      return _failure(call, error)
    return base.as_output(call.name, value)

  def _output(self, call: base.ToolCall) -> base.ToolOutput:
    return self._collect(call, self._refusal(call) or self._submit(call))

  async def _output_async(self, call: base.ToolCall) -> base.ToolOutput:
    refusal = self._refusal(call)
    if refusal is not None:
      return refusal
    tool = self.tools[call.name]
    try:
      if tool.is_async:
        value = await self._guarded(tool, call)
      else:
        value = await self._pool.arun(
            lambda: tool.forward(**call.arguments),
            self.timeout,
            f"tool {call.name!r}",
        )
    except Exception as error:  # pylint: disable=broad-except
      return _failure(call, error)
    return base.as_output(call.name, value)


def _failure(call: base.ToolCall, error: Exception) -> base.ToolOutput:
  if isinstance(error, concurrency.DeadlineExceeded):
    text = str(error)
  else:
    text = f"{type(error).__name__}: {error}"
  _LOG.debug("tool %s failed: %s", call.name, text)
  return base.ToolOutput(
      call.name, error=text, metadata={"error_type": type(error).__name__}
  )


def _first_paragraph(tool: type[base.BaseTool]) -> str:
  text = (tool.__doc__ or "").strip().split("\n\n")[0]
  return " ".join(text.split())
