"""Reads conversations that solved tasks of environments without a screen.

A file has one a line: an object with `messages` in OpenAI's form and the fields
of the task (`answer`, `ground_truth`, …). The first user message is the
question, unless the row has one. What the assistant wrote and called are the
turns; messages of other roles are left out, since the run's own system prompt
and its tools say their part anew.

Promises: a line that is no such conversation raises with its number.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.gyms import base

Turn = Mapping[str, Any]
"""An assistant message: `content`, `tool_calls`, or both."""


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A task, and the assistant messages that solved it."""

  task: base.Task
  turns: tuple[Turn, ...]


def read(path: str | os.PathLike[str]) -> list[Conversation]:
  """Returns every conversation of a file, in its order.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is empty, or a line, whose number the message has, is
      not a conversation.
  """
  conversations = []
  text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
  for number, line in enumerate(text.splitlines(), 1):
    if line.strip():
      conversations.append(_conversation(line, number))
  if not conversations:
    raise ValueError("it holds no conversation; give one a line, as JSON")
  return conversations


def _conversation(line: str, number: int) -> Conversation:
  where = f"line {number}"
  try:
    row = json_text.parse(line)
  except ValueError as error:
    raise ValueError(f"{where} is not JSON: {error}") from None
  messages = row.get("messages") if isinstance(row, dict) else None
  if not isinstance(messages, list) or not all(
    isinstance(m, dict) for m in messages
  ):
    raise ValueError(
      f"{where} has no `messages`, a list of OpenAI's chat messages"
    )
  turns = tuple(m for m in messages if m.get("role") == "assistant")
  if not turns:
    raise ValueError(f"{where} has no message of role assistant")
  for turn in turns:
    try:
      text_and_calls(turn)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from None
  from_user = (m for m in messages if m.get("role") == "user")
  first_user_message: Mapping[str, Any] = next(from_user, {})
  question = row.get("question") or first_user_message.get("content")
  if not isinstance(question, str) or not question:
    raise ValueError(
      f"{where} has no question; give a user message with text first"
    )
  fields = {k: v for k, v in row.items() if k != "messages"}
  task = base.Task(
    task_id=f"recording-{number}",
    family=str(row.get("family") or "recorded"),
    instruction=question,
    params={**fields, "question": question},
  )
  return Conversation(task, turns)


def text_and_calls(turn: Turn) -> tuple[str, list[trajectory.ToolCall]]:
  """Returns a turn's text ("" for none) and its tool calls.

  Raises:
    ValueError: neither, or calls that are not of OpenAI's form.
  """
  text = turn.get("content") or ""
  if not isinstance(text, str):
    raise ValueError("an assistant's `content` must be text")
  calls = [_call(c) for c in _calls_of(turn)]
  if not text and not calls:
    raise ValueError("an assistant message has neither content nor tool_calls")
  return text, calls


def _calls_of(turn: Turn) -> Sequence[Any]:
  calls = turn.get("tool_calls") or ()
  if not isinstance(calls, (list, tuple)):
    raise ValueError("`tool_calls` must be a list")
  return calls


def _call(call: Any) -> trajectory.ToolCall:
  function: Any = call.get("function") if isinstance(call, Mapping) else None
  name = function.get("name") if isinstance(function, Mapping) else None
  if not isinstance(name, str) or not name:
    raise ValueError(
      f"a tool call needs `function` with a `name`, got {call!r:.80}"
    )
  arguments = function.get("arguments") or {}
  if isinstance(arguments, str):  # As servers answer them.
    try:
      arguments = json_text.parse(arguments)
    except ValueError as error:
      raise ValueError(f"arguments of {name!r}: {error}") from None
  if not isinstance(arguments, dict):
    raise ValueError(f"arguments of {name!r} must be an object")
  return trajectory.ToolCall(name, arguments)
