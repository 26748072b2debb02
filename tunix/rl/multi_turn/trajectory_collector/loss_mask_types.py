"""The conversation formats of Qwen and of DeepSeek's distillations into it.

Promises: `qwen` and `distill_qwen` write a conversation as the checkpoint's
chat template does, `qwen3` a conversation with one reply. They differ from the
template in this alone: every trained reply keeps its own reasoning, which the
templates of `qwen3` and `distill_qwen` drop from earlier turns; a call's
textual arguments stay unchanged; text and control tokens are encoded
apart, see `loss_mask`.

Sources: the templates published with Qwen2.5-Instruct, Qwen3 and
DeepSeek-R1-Distill-Qwen.
"""

from __future__ import annotations

import re
from typing import Any, Iterator, Sequence

from tunix.rl.multi_turn.parser.tool_parser.formats import qwen as qwen_parser
from tunix.rl.multi_turn.trajectory_collector import loss_mask

Piece = loss_mask.Piece
_SYSTEM = re.compile(
  r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n(?=<\|im_start\|>user)", re.DOTALL
)
_START = Piece("<|im_start|>", control=True)
_END = Piece("<|im_end|>", control=True)


class QwenLossMask(loss_mask.MultiTurnLossMaskGenerator):
  """`qwen`: ChatML as Qwen2.5 writes it.

  A conversation without a system message gets the one that the tokenizer's own
  chat template gives it: Qwen2.5's, none for this package's policies; Qwen2.5's
  as well where the tokenizer has no template.
  """

  control_tokens = ("<|im_start|>", "<|im_end|>")
  untemplated_system = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
  )
  """Of a conversation without one, where the tokenizer has no template."""
  trains_newline = False
  """Whether the newline after a reply's end token is trained on."""

  def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen"):
    super().__init__(tokenizer, tokenizer_type)
    self.default_system = _default_system(tokenizer, self.untemplated_system)
    self._parts_tools = _parts_tools(tokenizer)

  def pieces(
    self, messages: Sequence[loss_mask.Message], tools: Sequence[Any] | None
  ) -> Iterator[Piece]:
    first = messages[0] if messages else {}
    has_system = first.get("role") == "system"
    system = loss_mask.text_of(first, 0) if has_system else self.default_system
    if tools:
      shown = qwen_parser.QwenToolParser().get_tool_prompt(tools)
      parted = system or (has_system and self._parts_tools)
      system = f"{system}\n\n{shown}" if parted else shown
    if messages and (system or has_system):
      yield from _turn("system", system)
    for index in range(int(has_system), len(messages)):
      yield from self._message(messages, index)

  def _message(
    self, messages: Sequence[loss_mask.Message], index: int
  ) -> Iterator[Piece]:
    message = messages[index]
    role = message["role"]
    if role == "assistant":
      trained = loss_mask.is_trained(message, index)
      yield _START
      yield Piece("assistant\n")
      yield Piece(self.reply(message, index), trained=trained)
      yield Piece(_END.text, control=True, trained=trained)
      yield Piece("\n", trained=trained and self.trains_newline)
    elif role == "tool":
      # Consecutive results share one turn of the user.
      if index == 0 or messages[index - 1]["role"] != "tool":
        yield _START
        yield Piece("user")
      text = loss_mask.text_of(message, index)
      yield Piece(f"\n<tool_response>\n{text}\n</tool_response>")
      if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
        yield _END
        yield Piece("\n")
    else:
      yield from _turn(role, loss_mask.text_of(message, index))

  def reply(self, message: loss_mask.Message, index: int) -> str:
    """The text of a reply, its calls included.

    Raises:
      ValueError: the format has no place for a part of it.
    """
    if loss_mask.reasoning_of(message, index):
      raise ValueError(
        f"message {index} has reasoning_content, for which the loss mask type"
        " qwen has no place; use qwen3, or write it into content"
      )
    return _with_calls(loss_mask.text_of(message, index), message, index)


class Qwen3LossMask(QwenLossMask):
  """`qwen3`: every reply as Qwen3's template writes the last one.

  It begins with its reasoning, from `reasoning_content` or from the content's
  own `<think>` block; the block is empty where there is none.
  """

  untemplated_system = ""

  def reply(self, message: loss_mask.Message, index: int) -> str:
    text = loss_mask.text_of(message, index)
    reasoning = loss_mask.reasoning_of(message, index)
    if message.get("reasoning_content") is None and "</think>" in text:
      reasoning = text.split("</think>")[0].split("<think>")[-1]
      text = text.split("</think>")[-1]
    text = _with_calls(text.lstrip("\n"), message, index)
    thought = reasoning.strip("\n")
    return f"<think>\n{thought}\n</think>\n\n{text}"


class QwenNewlineLossMask(QwenLossMask):
  """`qwen_newline`: trains the newline after each reply's end token too.

  A policy stops at the end token and never samples that newline; trainers that
  mask whole messages of the template include it.
  """

  trains_newline = True


class Qwen3NewlineLossMask(Qwen3LossMask):
  """`qwen3_newline`: as `qwen_newline`, of `qwen3`."""

  trains_newline = True


_BEGIN = Piece("<｜begin▁of▁sentence｜>", control=True)
_FINISH = "<｜end▁of▁sentence｜>"
_USER = Piece("<｜User｜>", control=True)
_ASSISTANT = Piece("<｜Assistant｜>", control=True)
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_RESULTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
_RESULT = ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")


class DistillQwenLossMask(loss_mask.MultiTurnLossMaskGenerator):
  """`distill_qwen`: DeepSeek-R1-Distill-Qwen's format.

  Its server opens a reply with `<think>` by itself: a reply that closes the
  block without opening it gets that prefix, not trained on. Its template has no
  place for tools' schemas; calls and their results it has.
  """

  control_tokens = (
      _BEGIN.text, _FINISH, _USER.text, _ASSISTANT.text,
      *_CALLS, *_CALL, *_RESULTS, *_RESULT,
  )  # fmt: skip

  def pieces(
    self, messages: Sequence[loss_mask.Message], tools: Sequence[Any] | None
  ) -> Iterator[Piece]:
    if tools:
      raise ValueError(
        f"tools: {len(tools)} given, but the loss mask type distill_qwen has"
        " no place for them; write them into the system message"
      )
    if messages:
      yield _BEGIN
    systems = [i for i, m in enumerate(messages) if m["role"] == "system"]
    if len(systems) > 1:
      raise ValueError(
        f"message {systems[1]} is a second system message, but distill_qwen"
        " has one place for it; join them"
      )
    for index in systems:
      yield Piece(loss_mask.text_of(messages[index], index))
    for index, message in enumerate(messages):
      role = message["role"]
      before = messages[index - 1]["role"] if index else ""
      after = messages[index + 1]["role"] if index + 1 < len(messages) else ""
      if role == "user":
        yield _USER
        yield Piece(loss_mask.text_of(message, index))
      elif role == "tool":
        text = loss_mask.text_of(message, index)
        if before != "tool":
          yield Piece(_RESULTS[0], control=True)
        else:
          yield Piece("\n")
        yield Piece(_RESULT[0], control=True)
        yield Piece(text)
        yield Piece(_RESULT[1], control=True)
        if after != "tool":
          yield Piece(_RESULTS[1], control=True)
      elif role == "assistant":
        yield from self._reply(message, index, before)

  def _reply(
    self, message: loss_mask.Message, index: int, before: str
  ) -> Iterator[Piece]:
    trained = loss_mask.is_trained(message, index)
    text = loss_mask.text_of(message, index)
    if reasoning := loss_mask.reasoning_of(message, index).strip("\n"):
      text = f"{reasoning}\n</think>\n\n{text}"
    if before != "tool":  # Results of tools stand in the place of the header.
      yield _ASSISTANT
    if "</think>" in text and not text.startswith("<think>"):
      yield Piece("<think>\n")
    yield Piece(text, trained=trained)
    calls = list(loss_mask.calls_of(message, index))
    for number, (name, arguments) in enumerate(calls):
      parts: list[tuple[str, bool]] = [
        ("\n", False) if number else (_CALLS[0], True),
        (_CALL[0], True),
        ("function", False),
        (_CALL[1], True),
        (f"{name}\n```json\n{arguments}\n```", False),
        (_CALL[2], True),
      ]
      if number + 1 == len(calls):
        parts.append((_CALLS[1], True))
      for part, control in parts:
        yield Piece(part, control=control, trained=trained)
    yield Piece(_FINISH, control=True, trained=trained)


def _turn(role: str, text: str) -> Iterator[Piece]:
  yield _START
  yield Piece(f"{role}\n{text}")
  yield _END
  yield Piece("\n")


def _with_calls(text: str, message: loss_mask.Message, index: int) -> str:
  """The text, then each call in its own block, one a line."""
  for name, arguments in loss_mask.calls_of(message, index):
    text += (
      ("\n" if text else "")
      + f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n'
      + "</tool_call>"
    )
  return text


def _has_template(tokenizer: Any) -> bool:
  return getattr(tokenizer, "chat_template", None) is not None


def _parts_tools(tokenizer: Any) -> bool:
  """Whether the tokenizer's template parts tools from an empty system message
  by an empty line: Qwen's do, those of this package's policies do not."""
  if not _has_template(tokenizer):
    return True
  tool = {"name": "a", "description": "", "parameters": {}}
  shown = tokenizer.apply_chat_template(
    [{"role": "system", "content": ""}, {"role": "user", "content": "-"}],
    tools=[{"type": "function", "function": tool}],
    tokenize=False,
  )
  return not shown.startswith("<|im_start|>system\n#")


def _default_system(tokenizer: Any, untemplated: str) -> str:
  """The system message that the tokenizer's template gives a conversation."""
  if not _has_template(tokenizer):
    return untemplated
  shown = tokenizer.apply_chat_template(
    [{"role": "user", "content": "-"}], tokenize=False
  )
  match = _SYSTEM.match(shown)
  return match[1] if match else ""
