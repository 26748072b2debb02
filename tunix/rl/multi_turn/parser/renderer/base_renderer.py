"""Base of the renderers: encodes text, decodes samples, builds token prompts.

Promises: text given to `encode` never becomes one of the tokens that structure
a prompt.

Does not know any template.
"""

from __future__ import annotations

import copy
import functools
import json
from typing import (
  Any,
  Callable,
  Collection,
  Iterable,
  Mapping,
  Protocol,
  Self,
  Sequence,
  TypeAlias,
)

import numpy as np
import tokenizers
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

ROLES = ("system", "user", "assistant", "tool")
_CACHED_CHARACTERS = 16384
# Matched although special tokens are not, so that the text behind it is
# encoded as text in the middle of a prompt.
_ANCHOR = "\ue0ffanchor\ue0ff"


class FastTokenizer(Protocol):
  """A transformers tokenizer around a `tokenizers.Tokenizer`."""

  backend_tokenizer: tokenizers.Tokenizer


Tokenizer: TypeAlias = "tokenizers.Tokenizer | FastTokenizer"


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
  """Returns the tokenizer within a transformers one; another one itself."""
  return getattr(tokenizer, "backend_tokenizer", tokenizer)


class TokenRenderer:
  """Base of the renderers of one tokenizer; thread-safe.

  Attributes:
    image_token_id: Id of the placeholder; None for a policy without images.
    end_of_turn_id: Id that ends an assistant's turn.
    stop_token_ids: Ids that sampling should stop on.
    longest_token: Bytes of the longest token; n tokens never stand for more
      than n times as many characters.
    rewrites: Cases in which the template writes an earlier turn differently
      once another message follows; there `bridge` keeps the sampled tokens.
    answer_prefix: Text before an answer without reasoning, where the prompt has
      opened the reasoning.
    format_name: Name of the format in reports.
  """

  image_token_id: int | None = None
  end_of_turn_id: int
  stop_token_ids: tuple[int, ...] = ()
  rewrites: tuple[str, ...] = ()
  answer_prefix = ""
  format_name = ""

  def __init__(
    self,
    tokenizer: Tokenizer,
    num_image_tokens: Callable[[int, int], int],
    cached_texts: int,
    structure: Collection[str] = (),
  ):
    """Args:

    tokenizer: a `tokenizers.Tokenizer`, or a transformers tokenizer around
      one.
    num_image_tokens: (width, height) in pixels to number of placeholders.
    cached_texts: encoded texts kept, least recently used go first.
    structure: added tokens that text must not become, beside the special
      ones.
    """
    backend = backend_of(tokenizer)
    # A copy of our own: special tokens spelled in text stay text in it.
    self._encoder = _copied(backend, structure)
    self._num_image_tokens = num_image_tokens
    self.longest_token = max(map(len, backend.get_vocab()), default=1)
    self._inner = self._anchored()
    self._cached = functools.lru_cache(maxsize=cached_texts)(self._encode_text)

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
    sizes = [self._size(picture) for picture in pictures]
    needed = [count for count, _ in sizes]
    if len(at) != sum(needed):
      raise ValueError(
        f"the tokens hold {len(at)} image placeholders, their"
        f" {len(pictures)} images need {sum(needed)}; expand each image's to"
        " one a vision token"
      )
    starts = np.cumsum([0, *needed])
    spans = tuple(
      trajectory.ImageSpan(
        image,
        int(at[start]),
        int(at[start + count - 1] - at[start]) + 1 if row else count,
        row,
      )
      for image, start, (count, row) in zip(pictures, starts, sizes)
    )
    return policy_client.TokenPrompt(tokens_T, spans)

  def _size(self, image: trajectory.ImageRef) -> tuple[int, int]:
    """Returns (placeholders of an image, those of a row or 0 for one run).

    Raises:
      ValueError: the policy's images are tiles, which a frame must write.
    """
    count = self._num_image_tokens(image.width, image.height)
    if isinstance(count, tuple):
      raise ValueError(
        "this policy's images are tiles with text between them, which only"
        " its own chat template and tokens write; choose template"
      )
    return count, 0

  def counting(self, num_image_tokens: Callable[[int, int], int]) -> Self:
    """Returns this renderer with another size of images."""
    renderer = copy.copy(self)
    renderer._num_image_tokens = num_image_tokens  # pylint: disable=protected-access
    return renderer

  def changed_by(self, options: Mapping[str, Any]) -> list[str]:
    """Returns the chat template's variables that would change a prompt."""
    del options
    return []

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of a completion: a final end of turn is left out, everything else
    is shown, tool-call markup and stray special tokens included."""
    tokens: list[int] = np.asarray(ids, np.int32).tolist()
    if tokens and tokens[-1] in self.stop_token_ids:
      tokens.pop()
    return self._encoder.decode(tokens, skip_special_tokens=False)

  def encode(self, text: str) -> np.ndarray:
    """Returns int32[T] of plain text; special tokens spelled in it stay
    text."""
    return np.array(self._encode(text), np.int32)

  def _id(self, token: str) -> int:
    token_id = self._encoder.token_to_id(token)
    if token_id is None:
      raise ValueError(f"the tokenizer has no token {token!r}")
    return token_id

  def _encode(self, text: str, inner: bool = False) -> tuple[int, ...]:
    """Ids of a text; `inner` where other tokens come before it."""
    # The cache is bounded by texts, so it must not hold long ones.
    short = len(text) <= _CACHED_CHARACTERS
    return (self._cached if short else self._encode_text)(text, inner)

  def _encode_text(self, text: str, inner: bool) -> tuple[int, ...]:
    if inner and self._inner is not None:
      ids = self._inner.encode(_ANCHOR + text, add_special_tokens=False).ids
      return tuple(ids[1:])
    return tuple(self._encoder.encode(text, add_special_tokens=False).ids)

  def _anchored(self) -> tokenizers.Tokenizer | None:
    """Encodes text behind an anchor; None where its place makes no difference.

    SentencePiece's tokenizers begin a text, but not one behind a special
    token, with a space.
    """
    encode = self._encoder.encode
    if all(
      encode(text, add_special_tokens=False).tokens[:1] == [text]
      for text in ("a", "1", "<")
    ):
      return None  # No space came before it.
    encoder = _copied(self._encoder)
    encoder.add_tokens(
      [tokenizers.AddedToken(_ANCHOR, special=False, normalized=False)]
    )
    same = (
      encoder.encode(_ANCHOR + text, add_special_tokens=False).ids[1:]
      == encode(text, add_special_tokens=False).ids
      for text in ("a b", " a", "\na")
    )
    return None if all(same) else encoder


def _copied(
  backend: tokenizers.Tokenizer, special: Collection[str] = ()
) -> tokenizers.Tokenizer:
  """Returns a copy that leaves special tokens in text, and `special` with
  them."""
  state = backend.to_str()
  added = backend.get_added_tokens_decoder().values()
  if any(t.content in special and not t.special for t in added):
    parsed = json.loads(state)
    for token in parsed["added_tokens"]:
      token["special"] = token["special"] or token["content"] in special
    state = json.dumps(parsed)
  copied = tokenizers.Tokenizer.from_str(state)
  copied.encode_special_tokens = True
  return copied


def check_role(message: trajectory.Message, index: int) -> str:
  """Returns the role of a message.

  Raises:
    ValueError: one that no template has.
  """
  role = message.get("role")
  if role not in ROLES:
    raise ValueError(f"message {index} has role {role!r}; use one of {ROLES}")
  return str(role)


def parts_of(
  message: trajectory.Message, index: int
) -> Iterable[str | trajectory.ImageRef]:
  """Yields the texts and images of a message's content, in order.

  Raises:
    ValueError: content that is neither text nor parts.
  """
  content = message.get("content")
  if content is None:
    return
  if isinstance(content, str):
    yield content
    return
  if not isinstance(content, (list, tuple)):
    raise ValueError(
      f"message {index}: content must be a string or a list of parts, got"
      f" {type(content).__name__}"
    )
  for part in content:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
      text: Any = part.get("text")
      if not isinstance(text, str):
        raise ValueError(
          f"message {index}: a text part needs a string in 'text', got"
          f" {type(text).__name__}"
        )
      yield text
    elif kind == "image":
      image = part.get("image")
      if not isinstance(image, trajectory.ImageRef):
        raise ValueError(
          f"message {index}: an image part needs an ImageRef in 'image',"
          f" got {type(image).__name__}; put pixels into an ImageStore"
        )
      yield image
    else:
      raise ValueError(
        f"message {index}: a part must have type 'text' or 'image', got"
        f" {kind!r}"
      )


def call_of(call: trajectory.ToolCall, index: int) -> tuple[str, Any]:
  """Returns (name, arguments) of a tool call, an OpenAI dict or a ToolCall.

  Raises:
    ValueError: one of them is missing.
  """
  name: Any = None
  arguments: Any = None
  if isinstance(call, trajectory.ToolCall):
    name, arguments = call.name, call.arguments
  elif isinstance(call, Mapping):
    function = call.get("function") or call
    name, arguments = function.get("name"), function.get("arguments")
  if not isinstance(name, str) or arguments is None:
    raise ValueError(
      f"message {index}: a tool call needs a name and arguments, got {call!r}"
    )
  return name, arguments
