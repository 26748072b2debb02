"""Defines tools: a name, a description, a schema and one call.

A tool implements `forward` (sync) or `async_forward` (async), or both; a
caller may use either. `stateful.BaseTool` is the other family, with an instance
a request.
"""

from __future__ import annotations

import abc
import json
from typing import Any, Mapping

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency

ToolCall = trajectory.ToolCall
ToolOutput = trajectory.ToolOutput


class BaseTool(abc.ABC):
  """A tool.

  Attributes:
    name: Name by which the policy calls it.
    description: shown to the policy.
  """

  def __init__(self, name: str, description: str):
    """Raises TypeError when neither forward nor async_forward is written."""
    if not isinstance(name, str) or not name:
      raise ValueError(f"a tool's name must be a non-empty str, got {name!r}")
    self.name = name
    self.description = description
    if not (self.is_sync or self.is_async):
      raise TypeError(
        f"{type(self).__name__} must implement forward or async_forward"
      )

  @property
  @abc.abstractmethod
  def json(self) -> dict[str, Any]:
    """The OpenAI schema: {"type": "function", "function": {…}}."""

  @property
  def is_sync(self) -> bool:
    """Whether the tool implements `forward` itself."""
    return type(self).forward is not BaseTool.forward

  @property
  def is_async(self) -> bool:
    """Whether the tool implements `async_forward` itself."""
    return type(self).async_forward is not BaseTool.async_forward

  def forward(self, *args: Any, **kwargs: Any) -> ToolOutput:
    """Runs the tool; an async-only tool gets an event loop of its own."""
    return concurrency.drive(self.async_forward(*args, **kwargs))

  async def async_forward(self, *args: Any, **kwargs: Any) -> ToolOutput:
    """Runs the tool; a sync-only tool runs in a thread."""
    # A lambda: the tool's arguments must not become arguments of `acall`.
    return await concurrency.acall(lambda: self.forward(*args, **kwargs))


def renamed(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Returns an OpenAI schema, or its `function` part alone, as the schema of
  `name`."""
  if "function" not in schema:
    schema = {"type": "function", "function": schema}
  return {**schema, "function": {**schema["function"], "name": name}}


def as_output(name: str, value: Any) -> ToolOutput:
  """Returns a tool's result as a ToolOutput that can be written as text."""
  if not isinstance(value, ToolOutput):
    if isinstance(value, (bool, int, float)):
      value = json.dumps(value)
    value = ToolOutput(name, value)
  try:
    str(value)
  except (TypeError, ValueError, RecursionError) as error:
    return ToolOutput(
      name,
      error=f"tool {name!r} returned what cannot be shown: {error}",
      metadata=value.metadata,
    )
  return value


def normalize_calls(action: object) -> list[ToolCall]:
  """Tool calls in any of the shapes that agents and clients use.

  Args:
    action: an Action, a ToolCall, a list, or a dict: `{"name", "arguments"}`
      or OpenAI's `{"id", "function": {"name", "arguments": str or dict}}`.

  Returns:
    Calls with ids that are unique among them: a repeated id gets a suffix.

  Raises:
    ValueError: anything else, naming it.
  """
  if isinstance(action, trajectory.Action):
    action = action.action
  elif hasattr(action, "action") and not isinstance(action, Mapping):
    action = action.action  # Another package's Action.
  if action is None:
    return []
  if isinstance(action, (ToolCall, Mapping)):
    action = [action]
  if not isinstance(action, (list, tuple)):
    raise ValueError(
      f"expected tool calls, got {type(action).__name__}: {action!r:.80}"
    )
  calls = []
  ids: set[str] = set()
  for item in action:
    call = item if isinstance(item, ToolCall) else _call_from_dict(item)
    call_id, n = call.call_id, 2
    while call_id in ids:
      call_id, n = f"{call.call_id}#{n}", n + 1
    ids.add(call_id)
    if call_id != call.call_id:
      call = ToolCall(call.name, call.arguments, call_id)
    calls.append(call)
  return calls


def _call_from_dict(item: object) -> ToolCall:
  if not isinstance(item, Mapping):
    raise ValueError(
      f"a tool call must be a ToolCall or a dict, got {type(item).__name__}"
    )
  function = item.get("function", item)
  if not isinstance(function, Mapping) or "name" not in function:
    raise ValueError(f"a tool call needs a name: {item!r:.80}")
  arguments = function.get("arguments") or {}
  if isinstance(arguments, str):
    try:
      arguments = json_text.parse(arguments)
    except ValueError as error:
      raise ValueError(
        f"arguments of {function['name']!r} are not JSON: {error}"
      ) from None
  if not isinstance(arguments, Mapping):
    raise ValueError(
      f"arguments of {function['name']!r} must be an object, got"
      f" {type(arguments).__name__}"
    )
  call_id = item.get("id") or item.get("call_id")
  if call_id:
    return ToolCall(function["name"], dict(arguments), str(call_id))
  return ToolCall(function["name"], dict(arguments))
