"""Turns conversations from elsewhere into tokens and loss masks.

    generator = loss_mask.MultiTurnLossMaskGenerator(tokenizer, "qwen")
    masked = loss_mask.masked_tokens(generator, messages, tools)
    masked.token_ids, masked.loss_mask, masked.response_length

Messages are OpenAI's, of text. The replies of the assistant are trained on,
each with the token that ends its turn; `step_loss_mask` or `loss_mask` 0 in an
assistant's message leaves that reply out. `LOSS_MASK_TYPES` declares the
formats: `qwen`, `qwen3`, `distill_qwen`, registered ones, and any class by its
path "package.module:Class". `qwen_newline` and `qwen3_newline` also train the
newline that their template writes after the end token.

Promises: the trained tokens of a reply decode to its text and the end token; a
header never shares a token with the reply after it, so that the reply begins
where the policy would begin to sample; no text becomes a token that structures
the conversation. A conversation in which nothing is trained has response length
0 and an empty `response_mask`.

Does not: hold images, or log-probs. Text from elsewhere was not sampled from
the policy; token-exact records of what was are `core.token_sequence`'s.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import tokenizers
from tunix.rl.multi_turn.core import registry

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")
FLAGS = ("step_loss_mask", "loss_mask")


class MaskedTokens(NamedTuple):
  """A conversation to train on.

  Attributes:
    token_ids: Tokens of the whole conversation.
    loss_mask: 1 for each trained token, else 0.
  """

  token_ids: list[int]
  loss_mask: list[int]

  @property
  def response_length(self) -> int:
    """Tokens from the first trained one to the end; 0 where there is none."""
    return response_length(self.loss_mask)

  @property
  def response_mask(self) -> list[int]:
    """Part of `loss_mask` from the first trained token on."""
    return self.loss_mask[len(self.loss_mask) - self.response_length :]


def response_length(loss_mask: Sequence[int]) -> int:
  """Tokens from the first trained one to the end; 0 where there is none."""
  first = next((i for i, m in enumerate(loss_mask) if m), len(loss_mask))
  return len(loss_mask) - first


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of a rendered conversation.

  Attributes:
    text: Text of the token; spelling of a control token.
    control: a token that structures the conversation; text cannot spell it.
    trained: the assistant's own.
  """

  text: str
  control: bool = False
  trained: bool = False


class MultiTurnLossMaskGenerator:
  """The masks of one format; also the base of formats, and of a user's own.

  `MultiTurnLossMaskGenerator(tokenizer, "qwen")` writes that type. A subclass
  overrides `get_loss_mask`, and leaves the types that it does not know to
  `super().get_loss_mask`; or it is a format and overrides `pieces` and names
  `control_tokens`. Thread-safe where the subclass is.

  Attributes:
    control_tokens: spellings of the tokens that structure a conversation.
    tokenizer: The constructor's.
    tokenizer_type: name of the type.
  """

  control_tokens: tuple[str, ...] = ()

  def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen"):
    """Args:

      tokenizer: The policy's: transformers' (a fast one), or a
        `tokenizers.Tokenizer`.
      tokenizer_type: A name of `LOSS_MASK_TYPES`, or one that the subclass
        knows.

    Raises:
      ValueError: it has no fast backend, or lacks a control token.
    """
    self.tokenizer = tokenizer
    self.tokenizer_type = tokenizer_type
    self._format: MultiTurnLossMaskGenerator | None = None
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
      raise ValueError(
        f"tokenizer: {type(tokenizer).__name__} has no fast backend; load it"
        " with transformers.AutoTokenizer, or pass a tokenizers.Tokenizer"
      )
    # A copy, in which the control tokens are special and special tokens
    # spelled in text stay text.
    declared = json.loads(backend.to_str())
    for added in declared.get("added_tokens") or ():
      if added["content"] in self.control_tokens:
        added["special"] = True
    self._encoder = tokenizers.Tokenizer.from_str(json.dumps(declared))
    self._encoder.encode_special_tokens = True
    ids = {t: self._encoder.token_to_id(t) for t in self.control_tokens}
    missing = [token for token, number in ids.items() if number is None]
    if missing:
      raise ValueError(
        f"tokenizer: it has no token {', '.join(missing)}, which"
        f" {type(self).__name__} needs; choose the loss mask type of the"
        f" policy's own family ({', '.join(LOSS_MASK_TYPES)})"
      )
    self._control_ids = ids

  def pieces(
    self, messages: Sequence[Message], tools: Sequence[Any] | None
  ) -> Iterable[Piece]:
    """The conversation as text, in order.

    Args:
      messages: checked: a list of mappings, each with a known role.
      tools: OpenAI tool schemas; None for none.

    Raises:
      ValueError: naming the message, the value and the fix.
    """
    raise NotImplementedError(f"{type(self).__name__} must override pieces")

  def get_loss_mask(
    self, messages: Sequence[Message], tools: Sequence[Any] | None = None
  ) -> tuple[list[int], list[int]]:
    """(token ids, loss mask) of equal length; see `MaskedTokens`.

    Args:
      messages: OpenAI's; content is text, a list of text parts, or None.
      tools: OpenAI tool schemas, shown as the format shows them.

    Raises:
      ValueError: naming the message, the value and the fix.
    """
    if type(self).pieces is MultiTurnLossMaskGenerator.pieces:
      return self._of_type().get_loss_mask(messages, tools)
    ids: list[int] = []
    mask: list[int] = []
    text, trained = "", False
    for piece in self.pieces(checked(messages), tools):
      if text and (piece.control or piece.trained != trained):
        self._add(ids, mask, self._encode(text), trained)
        text = ""
      if piece.control:
        self._add(ids, mask, [self._control_ids[piece.text]], piece.trained)
      else:
        text, trained = text + piece.text, piece.trained
    self._add(ids, mask, self._encode(text), trained)
    return MaskedTokens(ids, mask)

  def get_response_lengths(
    self, loss_masks: Iterable[Sequence[int]]
  ) -> list[int]:
    """`response_length` of each mask."""
    return [response_length(mask) for mask in loss_masks]

  def _of_type(self) -> MultiTurnLossMaskGenerator:
    """The format that `tokenizer_type` names.

    Raises:
      ValueError: an unknown type, or one that this class was registered for
        and does not write.
    """
    if self._format is None:
      kind: Any = LOSS_MASK_TYPES.get(self.tokenizer_type, "operator")
      if isinstance(self, kind):
        raise ValueError(
          f"{type(self).__name__} has no masks of the loss mask type"
          f" {self.tokenizer_type!r}; override get_loss_mask or pieces"
        )
      self._format = kind(self.tokenizer, self.tokenizer_type)
    return self._format

  def _encode(self, text: str) -> list[int]:
    return self._encoder.encode(text, add_special_tokens=False).ids

  def _add(
    self, ids: list[int], mask: list[int], new: list[int], trained: bool
  ) -> None:
    ids.extend(new)
    mask.extend([int(trained)] * len(new))


LOSS_MASK_TYPES: registry.Registry[type[MultiTurnLossMaskGenerator]] = (
  registry.Registry("loss mask type")
)
_TYPES = "tunix.rl.multi_turn.trajectory_collector.loss_mask_types"
for _name, _class in {
  "qwen": "QwenLossMask",
  "qwen3": "Qwen3LossMask",
  "distill_qwen": "DistillQwenLossMask",
  "qwen_newline": "QwenNewlineLossMask",
  "qwen3_newline": "Qwen3NewlineLossMask",
}.items():
  LOSS_MASK_TYPES.register(_name, f"{_TYPES}:{_class}")


def make(loss_mask_type: str, tokenizer: Any) -> MultiTurnLossMaskGenerator:
  """The generator of a type, for one tokenizer.

  Args:
    loss_mask_type: a name of `LOSS_MASK_TYPES`, or "package.module:Class".
    tokenizer: see `MultiTurnLossMaskGenerator`.

  Raises:
    ValueError: an unknown type (the message lists the known ones), or a
      tokenizer without the type's tokens.
    ImportError: nothing at that path.
  """
  make_generator: Any = LOSS_MASK_TYPES.get(loss_mask_type, "operator")
  generator = make_generator(tokenizer, loss_mask_type)
  if not callable(getattr(generator, "get_loss_mask", None)):
    raise ValueError(
      f"loss mask type {loss_mask_type!r} makes a"
      f" {type(generator).__name__}, which has no get_loss_mask(messages,"
      " tools); subclass loss_mask.MultiTurnLossMaskGenerator"
    )
  return generator


def masked_tokens(
  generator: MultiTurnLossMaskGenerator,
  messages: Sequence[Message],
  tools: Sequence[Any] | None = None,
) -> MaskedTokens:
  """A generator's result, checked: a user's own may return anything.

  Raises:
    ValueError: not token ids and as many zeros and ones; or the generator's.
  """
  result = (
    generator.get_loss_mask(messages, tools)
    if tools
    else generator.get_loss_mask(messages)
  )
  who = f"{type(generator).__name__}.get_loss_mask"
  try:
    ids, mask = result
    ids, mask = [int(i) for i in ids], [int(m) for m in mask]
  except (TypeError, ValueError):
    raise ValueError(
      f"{who} must return (token ids, loss mask), got {str(result)[:80]!r}"
    ) from None
  if len(ids) != len(mask):
    raise ValueError(
      f"{who} returned {len(ids)} token ids and {len(mask)} mask values;"
      " return one value a token"
    )
  if not set(mask) <= {0, 1}:
    raise ValueError(f"{who}: mask values must be 0 or 1, got {set(mask)}")
  return MaskedTokens(ids, mask)


# --- parts of messages, for the formats ---------------------------------------


def checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
  """The messages, each a mapping of a known role.

  Raises:
    ValueError: naming the message, the value and the fix.
  """
  if isinstance(messages, (str, bytes, Mapping)) or not isinstance(
    messages, Sequence
  ):
    raise ValueError(
      "messages must be a list of messages, got"
      f" {type(messages).__name__}: {str(messages)[:80]!r}"
    )
  for index, message in enumerate(messages):
    if not isinstance(message, Mapping):
      raise ValueError(
        f"message {index} must be an object with role and content, got"
        f" {str(message)[:80]!r}"
      )
    role = message.get("role")
    if role not in ROLES:
      raise ValueError(
        f"message {index} has role {role!r}; use one of {', '.join(ROLES)}"
      )
    is_trained(message, index)
  return messages


def is_trained(message: Message, index: int) -> bool:
  """Whether the message is a reply to train on.

  Raises:
    ValueError: a flag other than 0 or 1, or two that contradict one another.
  """
  flags = {f: message[f] for f in FLAGS if message.get(f) is not None}
  for flag, value in flags.items():
    if not isinstance(value, (int, float)) or value not in (0, 1):
      raise ValueError(
        f"message {index}: {flag} must be 0 or 1, got {str(value)[:80]!r}"
      )
  if len({bool(value) for value in flags.values()}) > 1:
    raise ValueError(
      f"message {index}: {flags} contradict one another; give one of them"
    )
  return message["role"] == "assistant" and all(flags.values())


def text_of(message: Message, index: int) -> str:
  """A message's content as text; None is "".

  Raises:
    ValueError: other than text.
  """
  content = message.get("content")
  if content is None:
    return ""
  if isinstance(content, str):
    return content
  if not isinstance(content, (list, tuple)):
    raise ValueError(
      f"message {index}: content must be text or a list of parts, got"
      f" {type(content).__name__}"
    )
  texts = []
  for part in content:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part["text"], str):
      raise ValueError(
        f"message {index}: a part has type {kind!r}; loss masks are of text"
        " alone, episodes with screenshots come through the policy's server"
      )
    texts.append(part["text"])
  return "".join(texts)


def reasoning_of(message: Message, index: int) -> str:
  """`reasoning_content` of a message, "" for none.

  Raises:
    ValueError: other than text.
  """
  reasoning = message.get("reasoning_content")
  if reasoning is not None and not isinstance(reasoning, str):
    raise ValueError(
      f"message {index}: reasoning_content must be text, got"
      f" {type(reasoning).__name__}"
    )
  return reasoning or ""


def calls_of(message: Message, index: int) -> Iterator[tuple[str, str]]:
  """(name, arguments as JSON) of each of a message's tool calls.

  Raises:
    ValueError: a call without them.
  """
  calls = message.get("tool_calls") or ()
  if not isinstance(calls, (list, tuple)):
    raise ValueError(
      f"message {index}: tool_calls must be a list, got {type(calls).__name__}"
    )
  for call in calls:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or function.get("arguments") is None:
      raise ValueError(
        f"message {index}: a tool call needs a name and arguments, got"
        f" {str(call)[:80]!r}"
      )
    arguments = function["arguments"]
    if not isinstance(arguments, str):
      arguments = json.dumps(arguments, ensure_ascii=False)
    yield name, arguments
