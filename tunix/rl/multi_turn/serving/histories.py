"""Keeps the histories of a session's requests as a tree of messages by value.

Promises: a history is found by reading each of its messages once, however the
client spells an answer: the message that was sent and the sampled text both
lead to it.

Does not render, or hold tokens.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.serving import interactions

InteractionError = interactions.InteractionError
Interaction = interactions.Interaction
Key = interactions.Key
Message = interactions.Message

_ANY = object()


class Node:
  """A history, with the edges by which requests continued it.

  An answer has a node of its own, which only equal answers share. The message
  that was sent and the sampled text both lead to it, so that a continuation
  follows the sampled tokens, however the client spells the answer.
  """

  __slots__ = ("key", "interaction", "_children", "_edges")

  def __init__(self, key: Key | None):
    self.key = key
    self.interaction: Interaction | None = None  # The newest answer's.
    self._children: dict[tuple[Key, Key | None], Node] = {}
    self._edges: dict[tuple[tuple, Any], list[Node]] = {}

  def child(self, key: Key, raw: Key | None = None) -> Node:
    """After a message, or after an answer whose sampled text is `raw`."""
    if (key, raw) not in self._children:
      made = self._children[key, raw] = Node(key)
      for value, ids in {key[0]: key, (raw or key)[0]: raw or key}.values():
        self._edges.setdefault((value, ids), []).append(made)
        self._edges.setdefault((value, _ANY), []).append(made)
    return self._children[key, raw]

  def follow(self, key: Key) -> list[Node]:
    """The nodes that a message may lead to."""
    value, ids = key
    if ids is None:
      return self._edges.get((value, _ANY), [])
    exact = self._edges.get((value, ids), [])
    return exact + self._edges.get((value, None), [])


def read_all(
    messages: Sequence[Message], tools: Sequence[Any] | None, apart: str = ""
) -> tuple[list[tuple[Message, Key]], tuple[Key, ...]]:
  """Snapshots of the messages with their keys; the keys with the tools'.

  `apart` is of the rendering: histories with another one are others.
  """
  if not messages:
    raise ValueError("messages must not be empty")
  found = [read(m, f"messages[{i}]") for i, m in enumerate(messages)]
  told_of = json.dumps(list(tools or ()), sort_keys=True) + apart
  return found, ((("tools", told_of), None), *(key for _, key in found))


def read(message: Message, where: str) -> tuple[Message, Key]:
  """A snapshot, calls in OpenAI's form, and the key."""
  try:
    copy = {**message}
    content = copy.get("content") or ""
    if not isinstance(content, str):
      copy["content"] = [{**part} for part in content]
      content = tuple(
          part["text"] if part["type"] == "text" else (part["image"],)
          for part in content
      )
      if len(content) == 1 and isinstance(content[0], str):
        content = content[0]
    calls = [_call(call) for call in copy.get("tool_calls") or ()]
    if calls:
      copy["tool_calls"] = calls
    value = tuple(_asked(**call["function"]) for call in calls)
    ids = tuple(call["id"] for call in calls) or (copy.get("tool_call_id"),)
    key = (copy["role"], content, value), ids if all(ids) else None
    hash(key)
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
    raise InteractionError(
        "bad_message",
        f"{where} is not one of text, ImageRefs and tool calls: {e!r}",
    ) from e
  return copy, key


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
  function = call.get("function") or call
  arguments = function["arguments"]
  if not isinstance(arguments, str):  # As renderers write them.
    arguments = json.dumps(arguments, ensure_ascii=False)
  function = {"name": function["name"], "arguments": arguments}
  return {"id": call.get("id"), "type": "function", "function": function}


def _asked(name: str, arguments: str) -> tuple[str, str, str]:
  try:
    return name, "json", json.dumps(json_text.parse(arguments), sort_keys=True)
  except ValueError:  # Not JSON; equal only as text.
    return name, "text", arguments
