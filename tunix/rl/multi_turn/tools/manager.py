"""Runs the tool calls of a turn.

Promises: every call gives an output, in the order of the calls, under its own
id, within its deadline. An exception, an unknown tool and a hang are error
outputs that the policy reads; they never reach the caller.

Does not: retry, or stop a hung tool, whose thread keeps running.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.tools import tool_base

_LOG = logging.getLogger(__name__)


class ToolManager:
  """The tools of one environment.

  Attributes:
    tools: name -> tool.
    timeout: seconds a call may take, None for no limit.
  """

  def __init__(
    self,
    tool_map: Mapping[str, type[tool_base.BaseTool] | tool_base.BaseTool]
    | None = None,
    *,
    timeout: float | None = 30.0,
  ):
    """Args:

      tool_map: name -> tool class, built with that name and its docstring's
        first paragraph as description, or a ready tool.
      timeout: deadline of each call, in seconds.

    Raises:
      TypeError: an entry is neither.
      ValueError: a timeout that is not positive.
    """
    if timeout is not None and not timeout > 0:
      raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
    self.timeout = timeout
    self.tools: dict[str, tool_base.BaseTool] = {}
    for name, tool in (tool_map or {}).items():
      if isinstance(tool, type) and issubclass(tool, tool_base.BaseTool):
        tool = tool(name=name, description=_first_paragraph(tool))
      if not isinstance(tool, tool_base.BaseTool):
        raise TypeError(
          f"tool {name!r} must be a BaseTool or a subclass of it, got {tool!r}"
        )
      self.tools[name] = tool

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(self.tools)

  @property
  def json(self) -> list[dict[str, Any]]:
    """Schemas of all tools, in the order of the map and under its names.

    The policy is shown the names that it can call, not a ready tool's own.
    """
    return [
      tool_base.renamed(tool.json, name) for name, tool in self.tools.items()
    ]

  def run(self, tool_name: str, /, **kwargs: Any) -> tool_base.ToolOutput:
    """Runs one tool with `kwargs` and waits for it."""
    return concurrency.drive(self.run_async(tool_name, **kwargs))

  async def run_async(
    self, tool_name: str, /, **kwargs: Any
  ) -> tool_base.ToolOutput:
    """`run` for the event loop."""
    return await self._output(tool_base.ToolCall(tool_name, kwargs))

  def execute_calls(
    self, calls: object, parallel: bool = True
  ) -> dict[str, str]:
    """Runs calls; returns {call id: text of the output}, in their order.

    Args:
      calls: ToolCalls, or dicts as `tool_base.normalize_calls` reads them.
      parallel: run them at once rather than one after the other.
    """
    outputs = self.outputs(calls, parallel)
    return {call_id: str(output) for call_id, output in outputs.items()}

  async def execute_calls_async(
    self, calls: object, parallel: bool = True
  ) -> dict[str, str]:
    """`execute_calls` for the event loop."""
    outputs = await self.outputs_async(calls, parallel)
    return {call_id: str(output) for call_id, output in outputs.items()}

  def outputs(
    self, calls: object, parallel: bool = True
  ) -> dict[str, tool_base.ToolOutput]:
    """Runs calls as `execute_calls` does; returns whole outputs, not texts."""
    return concurrency.drive(self.outputs_async(calls, parallel))

  async def outputs_async(
    self, calls: object, parallel: bool = True
  ) -> dict[str, tool_base.ToolOutput]:
    """`outputs` for the event loop."""
    calls = tool_base.normalize_calls(calls)
    if parallel and len(calls) > 1:
      results: Sequence[tool_base.ToolOutput] = await asyncio.gather(
        *(self._output(call) for call in calls)
      )
    else:
      results = [await self._output(call) for call in calls]
    return {call.call_id: out for call, out in zip(calls, results)}

  def _refusal(self, call: tool_base.ToolCall) -> tool_base.ToolOutput | None:
    """Returns an error output when the call cannot be made at all."""
    tool = self.tools.get(call.name)
    if tool is None:
      return tool_base.ToolOutput(
        call.name,
        error=registry.unknown_name("tool", call.name, self.tools),
        metadata={"error_type": trajectory.TOOL_NAME},
      )
    function = tool.json.get("function", {})
    required = (function.get("parameters") or {}).get("required", ())
    missing = [name for name in required if name not in call.arguments]
    if missing:
      return tool_base.ToolOutput(
        call.name,
        error=f"missing argument {', '.join(missing)}",
        metadata={"error_type": trajectory.TOOL_ARGUMENTS},
      )
    return None

  async def _output(self, call: tool_base.ToolCall) -> tool_base.ToolOutput:
    try:
      with concurrency.contained(f"tool {call.name!r}"):
        refusal = self._refusal(call)
      if refusal is not None:
        return refusal
      tool = self.tools[call.name]
      forward = tool.async_forward if tool.is_async else tool.forward
      value = await concurrency.acall(
        functools.partial(forward, **call.arguments),
        seconds=self.timeout,
        what=f"tool {call.name!r}",
      )
      with concurrency.contained(f"tool {call.name!r}"):
        return tool_base.as_output(call.name, value)
    except Exception as error:  # pylint: disable=broad-except
      return _failure(call, error)


def _failure(
  call: tool_base.ToolCall, error: Exception
) -> tool_base.ToolOutput:
  if isinstance(error, concurrency.DeadlineExceeded):
    text = str(error)
  else:
    text = concurrency.describe(error)
  _LOG.debug("tool %s failed: %s", call.name, text)
  return tool_base.ToolOutput(
    call.name, error=text, metadata={"error_type": type(error).__name__}
  )


def _first_paragraph(tool: type[tool_base.BaseTool]) -> str:
  text = (tool.__doc__ or "").strip().split("\n\n")[0]
  return " ".join(text.split())
