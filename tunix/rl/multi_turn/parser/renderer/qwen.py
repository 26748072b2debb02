"""Renders messages to tokens in ChatML, as Qwen's tokenizers have it.

The format of the policies that come with this project, and of a policy without
a chat template. A published checkpoint with a template that differs is rendered
by that template (`template.TemplateRenderer`).

Promises:
- `render` gives the ids of the chat template's text, tools included, image
  placeholders expanded to one per vision token.
- `bridge` gives the ids between a sampled completion and the next one, so
  that prompt + sampled + bridge is what `render` gives for the longer history
  whenever the sampled text is canonical.
- Text of a message never becomes a special token: a page that shows
  "<|im_end|>" cannot end a turn, one that shows "<|image_pad|>" cannot claim
  pixels.

Does not import JAX or transformers, hold pixels, or parse tool calls.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import base_renderer
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen as qwen_parser

CHAT_TOKENS = (
  "<|im_start|>",
  "<|im_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|image_pad|>",
)
"""Tokens that a tokenizer needs for this renderer."""

_TOOLS = qwen_parser.QwenToolParser()
_PROBE = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


class QwenRenderer(base_renderer.TokenRenderer):
  """Renderer of one tokenizer; thread-safe. Attributes: the base class's."""

  format_name = "ChatML"

  def __init__(
    self,
    tokenizer: base_renderer.Tokenizer,
    num_image_tokens: Callable[[int, int], int],
    cached_texts: int = 4096,
  ):
    """Args:

    tokenizer: a `tokenizers.Tokenizer` with Qwen's special tokens, or a
      transformers tokenizer around one.
    num_image_tokens: (width, height) in pixels to number of placeholders,
      the policy's `Processor.num_image_tokens`.
    cached_texts: encoded texts kept, least recently used go first.
    """
    super().__init__(tokenizer, num_image_tokens, cached_texts)
    self._start = self._id("<|im_start|>")
    self.end_of_turn_id = self._id("<|im_end|>")
    self._vision_start = self._id("<|vision_start|>")
    self._vision_end = self._id("<|vision_end|>")
    self.image_token_id = self._id("<|image_pad|>")
    self.stop_token_ids = (self.end_of_turn_id,)

  def render(
    self,
    messages: Sequence[trajectory.Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> policy_client.TokenPrompt:
    """Returns the tokens of a whole history.

    Args:
      messages: OpenAI-format messages; see `trajectory.Message`. Assistant
        messages may carry `tool_calls`.
      add_generation_prompt: end with the header of an assistant message.
      tools: OpenAI schemas, shown at the end of the system message.

    Raises:
      ValueError: unknown role, or content that is neither text nor parts.
    """
    out = _Builder(self)
    if tools:
      first = messages[0] if messages else {}
      out.token(self._start)
      out.text("system\n")
      if first.get("role") == "system":
        messages = messages[1:]
        if self._content(out, first, 0):
          out.text("\n\n")
      out.text(_TOOLS.get_tool_prompt(tools))
      self._close(out)
    self._write(out, messages)
    if add_generation_prompt:
      out.token(self._start)
      out.text("assistant\n")
    return out.finish()

  def bridge(
    self,
    new_messages: Sequence[trajectory.Message],
    *,
    last_sampled_is_eot: bool,
  ) -> policy_client.TokenPrompt:
    """Returns the tokens to append after a sampled completion.

    Args:
      new_messages: Messages since the completion, of users and tools.
      last_sampled_is_eot: the completion ends with `<|im_end|>`. Otherwise
        (length limit) the bridge closes the turn.

    Returns:
      Tokens up to the next generation prompt; span offsets count from the
      bridge's own start.
    """
    out = _Builder(self)
    if not last_sampled_is_eot:
      out.token(self.end_of_turn_id)
    out.text("\n")
    self._write(out, new_messages)
    out.token(self._start)
    out.text("assistant\n")
    return out.finish()

  def shows_tools_of(self, parser: parser_base.ToolParser) -> bool:
    """Whether `tools` of `render` ask for the calls that a parser reads, in
    the words of that parser."""
    try:
      shown = parser.get_tool_prompt(_PROBE)
    except ValueError:  # It has actions of its own only.
      return False
    return shown == _TOOLS.get_tool_prompt(_PROBE)

  def _write(
    self, out: _Builder, messages: Sequence[trajectory.Message]
  ) -> None:
    in_tools = False
    for index, message in enumerate(messages):
      role = base_renderer.check_role(message, index)
      # Consecutive tool messages share one user turn.
      if in_tools and role != "tool":
        self._close(out)
      if role == "tool":
        if not in_tools:
          out.token(self._start)
          out.text("user")
        out.text("\n<tool_response>\n")
        self._content(out, message, index)
        out.text("\n</tool_response>")
      else:
        out.token(self._start)
        out.text(f"{role}\n")
        has_content = self._content(out, message, index)
        calls = message.get("tool_calls") or ()
        for number, call in enumerate(calls):
          if has_content or number:
            out.text("\n")
          out.text(_tool_call_text(call, index))
        self._close(out)
      in_tools = role == "tool"
    if in_tools:
      self._close(out)

  def _close(self, out: _Builder) -> None:
    out.token(self.end_of_turn_id)
    out.text("\n")

  def _content(
    self, out: _Builder, message: trajectory.Message, index: int
  ) -> bool:
    """Writes a message's content; False when there was none."""
    wrote = False
    for part in base_renderer.parts_of(message, index):
      if isinstance(part, str):
        out.text(part)
        wrote = wrote or bool(part)
      else:
        out.token(self._vision_start)
        out.image(part, self._size(part)[0])
        out.token(self._vision_end)
        wrote = True
    return wrote


class _Builder:
  """Tokens under construction.

  Text is encoded in runs from special token to special token, because the
  template is tokenised as one string: the newline of a header may merge with
  one that the content begins with.
  """

  def __init__(self, renderer: QwenRenderer):
    self._renderer = renderer
    self._pending: list[str] = []
    self._tokens: list[int] = []
    self._images: list[trajectory.ImageSpan] = []

  def text(self, text: str) -> None:
    self._pending.append(text)

  def token(self, token_id: int) -> None:
    self._flush()
    self._tokens.append(token_id)

  def image(self, image: trajectory.ImageRef, count: int) -> None:
    self._flush()
    self._images.append(trajectory.ImageSpan(image, len(self._tokens), count))
    self._tokens.extend([self._renderer.image_token_id] * count)  # type: ignore[list-item]

  def finish(self) -> policy_client.TokenPrompt:
    self._flush()
    return policy_client.TokenPrompt(
      np.array(self._tokens, np.int32), tuple(self._images)
    )

  def _flush(self) -> None:
    if self._pending:
      run = "".join(self._pending)
      self._pending.clear()
      self._tokens.extend(self._renderer._encode(run, True))  # pylint: disable=protected-access


def _tool_call_text(call: trajectory.ToolCall, index: int) -> str:
  """Returns a call as Qwen writes it."""
  name, arguments = base_renderer.call_of(call, index)
  if not isinstance(arguments, str):
    arguments = json.dumps(arguments, ensure_ascii=False)
  body = f'{{"name": "{name}", "arguments": {arguments}}}'
  return f"<tool_call>\n{body}\n</tool_call>"
