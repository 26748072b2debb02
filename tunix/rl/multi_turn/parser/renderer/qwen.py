"""Renders messages to tokens, as Qwen's ChatML template writes them.

Promises:
- `render` gives the ids of the chat template's text, image placeholders
  expanded to one per vision token.
- `bridge` gives the ids between a sampled completion and the next one, so
  that prompt + sampled + bridge is what `render` gives for the longer history
  whenever the sampled text is canonical.
- Text of a message never becomes a special token: a page that shows
  "<|im_end|>" cannot end a turn, one that shows "<|image_pad|>" cannot claim
  pixels.

Does not import JAX or transformers, hold pixels, or parse tool calls.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import tokenizers
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

_CACHED_CHARACTERS = 16384
ROLES = ("system", "user", "assistant", "tool")


class QwenRenderer:
  """Renders for one tokenizer; thread-safe.

  Attributes:
    image_token_id: the placeholder id.
    end_of_turn_id: id of `<|im_end|>`.
    stop_token_ids: what sampling should stop on.
  """

  def __init__(
      self,
      tokenizer: Any,
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
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    # A copy of our own: special tokens spelled in text stay text in it.
    self._encoder = tokenizers.Tokenizer.from_str(backend.to_str())
    self._encoder.encode_special_tokens = True
    self._num_image_tokens = num_image_tokens
    self._start = self._id("<|im_start|>")
    self.end_of_turn_id = self._id("<|im_end|>")
    self._vision_start = self._id("<|vision_start|>")
    self._vision_end = self._id("<|vision_end|>")
    self.image_token_id = self._id("<|image_pad|>")
    self.stop_token_ids = (self.end_of_turn_id,)
    self.longest_token = max(map(len, backend.get_vocab()))
    """Bytes: n tokens never stand for more than n times as many characters."""
    self._cached = functools.lru_cache(maxsize=cached_texts)(self._encode_text)

  def render(
      self,
      messages: Sequence[trajectory.Message],
      add_generation_prompt: bool = True,
  ) -> policy_client.TokenPrompt:
    """Tokens of a whole history.

    Args:
      messages: OpenAI-format messages; see `trajectory.Message`. Assistant
        messages may carry `tool_calls`.
      add_generation_prompt: end with the header of an assistant message.

    Raises:
      ValueError: unknown role, or content that is neither text nor parts.
    """
    out = _Builder(self)
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
    """Tokens to append after a sampled completion.

    Args:
      new_messages: what came since: user and tool messages.
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

  def prompt_of_tokens(
      self, ids: Sequence[int], pictures: Sequence[trajectory.ImageRef]
  ) -> policy_client.TokenPrompt:
    """Builds a prompt from token ids rendered elsewhere.

    Args:
      ids: the prompt, with one placeholder for each vision token.
      pictures: the prompt's images, in order.

    Raises:
      ValueError: the number of placeholders does not fit the images.
    """
    tokens_T = np.array(ids, np.int32)
    at = np.flatnonzero(tokens_T == self.image_token_id)
    needed = [self._num_image_tokens(p.width, p.height) for p in pictures]
    if len(at) != sum(needed):
      raise ValueError(
          f"the tokens hold {len(at)} image placeholders, their"
          f" {len(pictures)} images need {sum(needed)}; expand each image's to"
          " one a vision token"
      )
    starts = np.cumsum([0, *needed])
    spans = tuple(
        trajectory.ImageSpan(image, int(at[start]), count)
        for image, start, count in zip(pictures, starts, needed)
    )
    return policy_client.TokenPrompt(tokens_T, spans)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of a completion: the final `<|im_end|>` is left out, everything
    else is shown, tool-call markup and stray special tokens included."""
    ids = np.asarray(ids, np.int32).tolist()
    if ids and ids[-1] == self.end_of_turn_id:
      ids.pop()
    return self._encoder.decode(ids, skip_special_tokens=False)

  def encode(self, text: str) -> np.ndarray:
    """int32[T] of plain text; special tokens spelled in it stay text."""
    return np.array(self._encode(text), np.int32)

  def _id(self, token: str) -> int:
    found = self._encoder.token_to_id(token)
    if found is None:
      raise ValueError(f"the tokenizer has no token {token!r}")
    return found

  def _encode(self, text: str) -> tuple[int, ...]:
    # The cache is bounded by texts, so it must not hold long ones.
    short = len(text) <= _CACHED_CHARACTERS
    return self._cached(text) if short else self._encode_text(text)

  def _encode_text(self, text: str) -> tuple[int, ...]:
    return tuple(self._encoder.encode(text, add_special_tokens=False).ids)

  def _write(
      self, out: _Builder, messages: Sequence[trajectory.Message]
  ) -> None:
    in_tools = False
    for index, message in enumerate(messages):
      role = message.get("role")
      if role not in ROLES:
        raise ValueError(
            f"message {index} has role {role!r}; use one of {ROLES}"
        )
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
    content = message.get("content")
    if content is None:
      return False
    if isinstance(content, str):
      out.text(content)
      return bool(content)
    if not isinstance(content, (list, tuple)):
      raise ValueError(
          f"message {index}: content must be a string or a list of parts, got"
          f" {type(content).__name__}"
      )
    wrote = False
    for part in content:
      kind = part.get("type") if isinstance(part, Mapping) else None
      if kind == "text":
        out.text(part["text"])
        wrote = wrote or bool(part["text"])
      elif kind == "image":
        image = part.get("image")
        if not isinstance(image, trajectory.ImageRef):
          raise ValueError(
              f"message {index}: an image part needs an ImageRef in 'image',"
              f" got {type(image).__name__}; put pixels into an ImageStore"
          )
        count = self._num_image_tokens(image.width, image.height)
        out.token(self._vision_start)
        out.image(image, count)
        out.token(self._vision_end)
        wrote = True
      else:
        raise ValueError(
            f"message {index}: a part must have type 'text' or 'image', got"
            f" {kind!r}"
        )
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
    self._images.append(
        trajectory.ImageSpan(image, len(self._tokens), count)
    )
    self._tokens.extend([self._renderer.image_token_id] * count)

  def finish(self) -> policy_client.TokenPrompt:
    self._flush()
    return policy_client.TokenPrompt(
        np.array(self._tokens, np.int32), tuple(self._images)
    )

  def _flush(self) -> None:
    if self._pending:
      run = "".join(self._pending)
      self._pending.clear()
      self._tokens.extend(self._renderer._encode(run))  # pylint: disable=protected-access


def _tool_call_text(call: Any, index: int) -> str:
  """A call as Qwen writes it, from an OpenAI dict or a ToolCall."""
  if isinstance(call, trajectory.ToolCall):
    name, arguments = call.name, call.arguments
  elif isinstance(call, Mapping):
    function = call.get("function") or call
    name, arguments = function.get("name"), function.get("arguments")
  else:
    name, arguments = None, None
  if not isinstance(name, str) or arguments is None:
    raise ValueError(
        f"message {index}: a tool call needs a name and arguments, got {call!r}"
    )
  if not isinstance(arguments, str):
    arguments = json.dumps(arguments, ensure_ascii=False)
  body = f'{{"name": "{name}", "arguments": {arguments}}}'
  return f"<tool_call>\n{body}\n</tool_call>"
