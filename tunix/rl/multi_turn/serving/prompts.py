"""Messages on their way to the renderer: what tools add, how long they are."""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import requests


def with_tools(
    messages: Sequence[requests.Message],
    tools: Sequence[Any],
    parser: parser_base.ToolParser,
) -> list[requests.Message]:
  """The messages with the tools shown where Qwen's template shows them."""
  messages = list(messages)
  if not tools:
    return messages
  try:
    shown = parser.get_tool_prompt(tools)
  except ValueError as error:
    raise errors.invalid(
        "tools", f"tools cannot be shown to this policy: {error}"
    ) from None
  if messages[0]["role"] != "system":
    return [{"role": "system", "content": shown}, *messages]
  content = messages[0].get("content") or ""
  if isinstance(content, list):
    content = "".join(part["text"] for part in content)
  text = f"{content}\n\n{shown}" if content else shown
  return [{"role": "system", "content": text}, *messages[1:]]


_CALL = 32  # Fewer characters than what any call is written in.


def characters(messages: Sequence[requests.Message]) -> int:
  """Of the messages' text, calls included."""
  total = 0
  for message in messages:
    content = message.get("content") or ""
    if isinstance(content, str):
      total += len(content)
    else:
      total += sum(len(part.get("text", "")) for part in content)
    for call in message.get("tool_calls") or ():
      function = call["function"]
      total += _CALL + len(function["name"]) + len(function["arguments"])
  return total
