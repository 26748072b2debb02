"""Renders messages to tokens by a checkpoint's own chat template.

The bridge is not written down anywhere: it is what the template puts behind an
assistant's message, found by rendering a short conversation with a stand-in for
the sampled text.

Promises:
- `render` gives the ids of the template's text, tools included, image
  placeholders expanded to one per vision token.
- prompt + sampled + `bridge` is what `render` gives for the longer history
  wherever the sampled text is canonical and the template leaves earlier turns
  as they were. Where it rewrites them (`rewrites`: mostly, it drops the
  reasoning before the last user message), the sampled tokens stay unchanged.
- Text of a message never becomes one of the tokens that structure the prompt.
- What the template would leave out (an image, a system message that is not the
  first) is refused. A template behind whose answers no fixed text can be put is
  refused when the renderer is made.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import base_renderer
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import frames
from tunix.rl.multi_turn.parser.renderer import guard as guard_lib
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

Message = Mapping[str, Any]
# A token that is not special structures a prompt if it looks as if it did.
_TAG = re.compile(r"""<[^\s<>"\\]+>|\[[^\s\[\]"\\]+\]""")

PLACEHOLDERS = (
  "<|image_pad|>",
  "<|image|>",
  "<|media_pad|>",
  "<|media_placeholder|>",
)
"""Tokens that stand for one vision token each."""

# Letters and digits only, so that no template trims, cuts or escapes them.
_SAID, _ASKED, _THOUGHT = "Zq1answerZq", "Zq2questionZq", "Zq3thoughtZq"
_CALL_ID = "a1b2c3d4e"  # Of the length that Mistral's templates demand.
_NAME = "probe_function"
_CALL: dict[str, Any] = {
  "id": _CALL_ID,
  "type": "function",
  "function": {"name": _NAME, "arguments": {"text": "Zq4argumentZq"}},
}
_TOOL = {
  "type": "function",
  "function": {
    "name": _NAME,
    "description": "Zq5",
    "parameters": {
      "type": "object",
      "properties": {"text": {"type": "string"}},
      "required": ["text"],
    },
  },
}


def _user(text: str = _ASKED) -> dict[str, Any]:
  return {"role": "user", "content": text}


def _assistant(text: str = _SAID, **more: Any) -> dict[str, Any]:
  return {"role": "assistant", "content": text, **more}


_RESULT = {"role": "tool", "content": "Zq6resultZq", "tool_call_id": _CALL_ID}


class TemplateRenderer(base_renderer.TokenRenderer):
  """Renderer of one tokenizer and template; thread-safe. It has the base
  class's attributes."""

  format_name = "chat template"

  def __init__(
    self,
    tokenizer: base_renderer.Tokenizer,
    num_image_tokens: Callable[[int, int], Any],
    template: chat_template.ChatTemplate,
    cached_texts: int = 4096,
  ):
    """Args:

      tokenizer: a `tokenizers.Tokenizer`, or a transformers tokenizer around
        one.
      num_image_tokens: (width, height) in pixels to number of placeholders,
        the policy's `Processor.num_image_tokens`; to what a frame of images
        takes in its place, see `frames`.
      template: Template of the checkpoint.
      cached_texts: encoded texts kept, least recently used go first.

    Raises:
      ValueError: naming what the template lacks.
    """
    self.template = template
    backend = base_renderer.backend_of(tokenizer)
    added = {
      token.content: token
      for token in backend.get_added_tokens_decoder().values()
    }
    self._frame: frames.Frame | None = None
    self._as_parts = not self._keeps([_user()], _ASKED)
    called = self._conversation([_user(), _assistant("", tool_calls=[_CALL])])
    # Some of DeepSeek's templates write arguments that are JSON's text.
    self._arguments_as_text = not self._keeps(called, "Zq4argumentZq")
    listed = [{"role": "user", "content": [{"type": "text", "text": _ASKED}]}]
    self._takes_parts = self._keeps(listed, _ASKED)
    structure, spoken = self._tokens_of(added)
    super().__init__(tokenizer, num_image_tokens, cached_texts, structure)
    self._guard = guard_lib.Guard(structure, template.literals(), spoken)
    self._cut = re.compile(
      "|".join(
        re.escape(token)
        for token in sorted(structure, key=lambda t: (-len(t), t))
      )
    )
    self._ids = {token: self._id(token) for token in structure}
    self._strips = {
      token: (added[token].lstrip, added[token].rstrip) for token in structure
    }
    late = self._try(
      _user(), _assistant(), {"role": "system", "content": "Zq7"}, _user()
    )
    self._late_system = "Zq7" in late
    # DeepSeek's templates put every system message first.
    self._system_behind = "Zq7" in late.rpartition(_SAID)[2]
    self.image_token = self._image_token(structure)
    if self.image_token is not None:
      self.image_token_id = self._ids[self.image_token]
    self._find_end()
    self.rewrites = tuple(self._rewritten())
    self.answer_prefix = self._closing()

  # --- rendering -------------------------------------------------------------

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
      tools: OpenAI schemas, put where the template puts them.

    Raises:
      ValueError: unknown role, content that is neither text nor parts, or
        messages that the template refuses or would leave out in part.
    """
    images: list[trajectory.ImageRef] = []
    plain = self._plain(messages, images, first=True)
    text = self._text(plain, add_generation_prompt, tools)
    return self._prompt(self._pieces(text), images, inner=False)

  def bridge(
    self,
    new_messages: Sequence[trajectory.Message],
    *,
    last_sampled_is_eot: bool,
  ) -> policy_client.TokenPrompt:
    """Returns the tokens to append after a sampled completion.

    Args:
      new_messages: Messages since the completion, of users and tools.
      last_sampled_is_eot: the completion ends with one of `stop_token_ids`,
        which stands in place of the token that the template puts there.
        Otherwise (length limit) the bridge closes the turn.

    Returns:
      Tokens up to the next generation prompt; span offsets count from the
      bridge's own start.

    Raises:
      ValueError: See `render`.
    """
    images: list[trajectory.ImageRef] = []
    plain = self._plain(new_messages, images, first=False)
    pieces = self._after(self._exchange(), plain)
    if last_sampled_is_eot and pieces[0] in self.stop_token_ids:
      pieces = pieces[1:]
    return self._prompt(pieces, images, inner=True)

  def shows_tools_of(self, parser: parser_base.ToolParser) -> bool:
    """Whether `tools` of `render` ask for the calls that a parser reads, and
    writes alike or with the same closing tag."""
    if parser.compact or not parser.writes:
      # It has a prompt of its own.
      return False
    question = self._conversation([_user()])
    try:
      answer = self._conversation([_assistant("", tool_calls=[_CALL])])
      shown = self.template.text(question, [_TOOL])
      before, called = (
        self.template.text(messages, [_TOOL], add_generation_prompt=False)
        for messages in (question, [*question, *answer])
      )
    except ValueError:
      return False
    if _NAME not in shown:
      return False
    if called.startswith(before):
      called = called[len(before) :]
    for token in self._ids:
      if self._ids[token] in self.stop_token_ids:
        called = called.split(token)[0]
    calls = parser.parse(called)
    arguments = _CALL["function"]["arguments"]
    if [(call.name, call.arguments) for call in calls] != [(_NAME, arguments)]:
      return False
    if parser.call_end and parser.call_end in called:
      return True
    # Spaces aside, and ids that some templates write behind the arguments.
    written = parser.format([trajectory.ToolCall(_NAME, arguments)])
    begin = "".join(written.partition(arguments["text"])[0].split())
    return begin in "".join(called.split())

  def changed_by(self, options: Mapping[str, Any]) -> list[str]:
    if not options:
      return []
    messages = self._conversation([_user(), _assistant(), _user()])
    own = self.template.text(messages)
    return [
      name
      for name, value in options.items()
      if self.template.text(messages, options={name: value}) != own
    ]

  def _text(
    self,
    plain: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> str:
    covered = [self._guard.cover_all(dict(tool)) for tool in tools or ()]
    return self.template.text(plain, covered, add_generation_prompt)

  def _plain(
    self,
    messages: Sequence[trajectory.Message],
    images: list[trajectory.ImageRef],
    first: bool,
  ) -> list[dict[str, Any]]:
    """Returns the messages as the template takes them, text covered.

    Args:
      messages: any.
      images: theirs are appended to it.
      first: they begin a conversation.
    """
    plain_messages = []
    for index, message in enumerate(messages):
      role = base_renderer.check_role(message, index)
      takes_system = self._late_system if first else self._system_behind
      if role == "system" and not takes_system and (index or not first):
        raise ValueError(
          f"message {index} is a system message, which this policy's chat"
          " template has at the beginning only; send it as a user message"
        )
      plain: dict[str, Any] = {
        "role": role,
        "content": self._content(message, index, images),
      }
      cover = self._guard.cover
      for key in ("name", "tool_call_id"):
        if message.get(key):
          plain[key] = cover(str(message[key]))
      if role == "assistant" and message.get("reasoning_content"):
        plain["reasoning_content"] = cover(
          str(message["reasoning_content"]), assistant=True
        )
      if calls := message.get("tool_calls"):
        plain["tool_calls"] = [self._call(call, index) for call in calls]
      plain_messages.append(plain)
    return plain_messages

  def _content(
    self,
    message: trajectory.Message,
    index: int,
    images: list[trajectory.ImageRef],
  ) -> str | list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in base_renderer.parts_of(message, index):
      if isinstance(part, str):
        text = self._guard.cover(part, message["role"] == "assistant")
        parts.append({"type": "text", "text": text})
      elif self.image_token is None:
        raise ValueError(
          f"message {index}: an image, and this policy's chat template has"
          " no placeholder for one; send text"
        )
      else:
        images.append(part)
        parts.append({"type": "image"})
    # A result's parts are outputs of several calls to GLM's templates.
    listed = isinstance(message.get("content"), (list, tuple)) and (
      message["role"] != "tool"
    )
    text_only = all(part["type"] == "text" for part in parts)
    if text_only and not self._as_parts and not (listed and self._takes_parts):
      return "".join(part["text"] for part in parts)
    return parts

  def _call(self, call: Any, index: int) -> dict[str, Any]:
    name, arguments = base_renderer.call_of(call, index)
    if self._arguments_as_text:
      if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
      return self._plain_call(call, name, self._guard.cover(arguments))
    if isinstance(arguments, str):
      try:
        arguments = json_text.parse(arguments or "{}")
      except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
      raise ValueError(
        f"message {index}: the arguments of the call of {name!r} are no JSON"
        " object, as which chat templates write them"
      )
    return self._plain_call(call, name, self._guard.cover_all(arguments))

  def _plain_call(
    self, call: trajectory.ToolCall, name: str, arguments: object
  ) -> dict[str, Any]:
    plain: dict[str, Any] = {
      "type": "function",
      "function": {"name": self._guard.cover(name), "arguments": arguments},
    }
    if isinstance(call, Mapping) and call.get("id"):
      plain["id"] = self._guard.cover(str(call["id"]))
    return plain

  # --- text to tokens --------------------------------------------------------

  def _pieces(self, text: str) -> list[str | int]:
    """Returns a rendered text as runs of text, uncovered, and ids of tokens."""
    pieces: list[str | int] = []
    if self._frame is not None:
      text = self._frame.write(text)
    at, strip = 0, False
    for match in (*self._cut.finditer(text), None):
      run = text[at : match.start() if match else len(text)]
      strips_before, strips_after = (
        self._strips[match[0]] if match else (False, False)
      )
      if strip:
        run = run.lstrip()
      if strips_before:
        run = run.rstrip()
      if run:
        pieces.append(self._guard.uncover(run))
      if match:
        pieces.append(self._ids[match[0]])
        at, strip = match.end(), strips_after
    return pieces

  def _prompt(
    self,
    pieces: Sequence[str | int],
    images: Sequence[trajectory.ImageRef],
    inner: bool,
  ) -> policy_client.TokenPrompt:
    tokens: list[int] = []
    spans: list[trajectory.ImageSpan] = []
    if self.image_token_id is not None:
      shown = pieces.count(self.image_token_id)
      if shown != len(images):
        raise ValueError(
          f"the chat template shows {shown} of the {len(images)} images;"
          " send images in user messages, where templates have them"
        )
    for number, piece in enumerate(pieces):
      if isinstance(piece, str):
        tokens.extend(self._encode(piece, inner or number > 0))
      elif piece == self.image_token_id:
        image = images[len(spans)]
        before, length, after = self._runs(image)
        tokens.extend(self._framing(before[0]))
        placeholders = [piece] * length
        for text in before[1:]:
          placeholders += [*self._framing(text), *[piece] * length]
        row = self._size(image)[1]
        spans.append(
          trajectory.ImageSpan(image, len(tokens), len(placeholders), row)
        )
        tokens.extend(placeholders)
        tokens.extend(self._framing(after))
      else:
        tokens.append(piece)
    return policy_client.TokenPrompt(np.array(tokens, np.int32), tuple(spans))

  def _size(self, image: trajectory.ImageRef) -> tuple[int, int]:
    if self._frame is None or not self._frame.in_runs:
      return super()._size(image)
    before, length, _ = self._runs(image)
    return len(before) * length, length

  def _runs(self, image: trajectory.ImageRef) -> frames.Runs:
    if self._frame is None or not self._frame.in_runs:
      return frames.Runs([""], super()._size(image)[0])
    return self._frame.runs(self._num_image_tokens(image.width, image.height))

  def _framing(self, text: str) -> Iterator[int]:
    """Yields the ids of a frame's text, which stands between tokens."""
    for piece in self._pieces(text):
      if isinstance(piece, str):
        yield from self._encode(piece, inner=True)
      else:
        yield piece

  # --- what the template does ------------------------------------------------

  def _conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Probe messages in the shape of content that the template takes."""
    if not self._as_parts:
      return [dict(message) for message in messages]
    return [
      {**m, "content": [{"type": "text", "text": m["content"]}]}
      for m in messages
    ]

  def _keeps(self, messages: Sequence[Message], text: str) -> bool:
    try:
      return text in self.template.text(messages)
    except ValueError:
      return False

  def _try(self, *messages: Message, **options: Any) -> str:
    """Text of a probe conversation; "" where the template refuses it."""
    try:
      return self.template.text(self._conversation(messages), **options)
    except ValueError:
      return ""

  def _exchange(self, sampled: str = _SAID) -> list[dict[str, Any]]:
    return self._conversation([_user(), _assistant(sampled)])

  def _tokens_of(self, added: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Returns (tokens that text must not become, those of them in tool
    calls)."""
    options = [False, True]
    plain = [
      self._try(*messages, add_generation_prompt=prompt)
      for messages in ([_user()], [_user(), _assistant(), _user()])
      for prompt in options
    ]
    if not any(plain):
      raise ValueError(
        "the chat template refuses a conversation of a user and an assistant"
      )
    called = _assistant("", tool_calls=[_CALL])
    result = self._try(_user(), called, _RESULT) or self._try(
      _user(), _assistant(), _RESULT
    )
    call = self._try(_user(), called, add_generation_prompt=False)
    inside = lambda texts: {
      token
      for token in added
      if any(token in text for text in texts)
      and _TAG.fullmatch(token)
      and not guard_lib.MARKUP.fullmatch(token)
    }
    spoken = inside([call]) - inside(plain)
    structure = (inside([*plain, result]) | spoken) | {
      token
      for token, kind in added.items()
      if kind.special and not guard_lib.MARKUP.fullmatch(token)
    }
    if not structure:
      raise ValueError("the tokenizer has no token of the chat template")
    return structure, spoken

  def _image_token(self, structure: set[str]) -> str | None:
    shown = {"role": "user", "content": [{"type": "image"}]}
    try:
      text = self.template.text([shown])
    except ValueError:
      return None
    for token in PLACEHOLDERS:
      if token in structure and text.count(token) == 1:
        return token
    self._frame = frames.find(text, structure)
    return self._frame.placeholder if self._frame else None

  def _after(
    self, before: Sequence[Message], new: Sequence[Message], words: str = _SAID
  ) -> list[str | int]:
    """Returns the pieces that the template puts behind the last words of
    `before`."""
    text = self._text([*before, *new])
    at = text.rfind(words)
    if at < 0:
      raise ValueError("the chat template leaves out an assistant's message")
    return self._pieces(text[at + len(words) :])

  def _find_end(self) -> None:
    """Finds the tokens that end a turn; refuses a template without bridge."""
    ask = self._conversation([_user()])
    short, long = [
      self._after(before, ask)
      for before in (
        self._exchange(),
        [*self._exchange("Zq8earlierZq"), *self._exchange()],
      )
    ]
    if short != long:
      at = next(
        (i for i, (a, b) in enumerate(zip(short, long)) if a != b),
        min(len(short), len(long)),
      )
      raise ValueError(
        "the chat template puts different tokens behind the first and behind"
        f" a later answer (piece {at}: {short[at : at + 1]} and"
        f" {long[at : at + 1]}), so that a conversation cannot be continued"
      )
    if not short or isinstance(short[0], str):
      raise ValueError(
        "the chat template ends an assistant's message without a token, so"
        " that sampling has no end; it writes"
        f" {short[0] if short else 'nothing'!r} there"
      )
    ends = short[:1]
    try:
      ends += self._after(self._exchange(), [_RESULT])[:1]
    except ValueError:
      pass  # It knows no tool messages.
    self.end_of_turn_id = short[0]
    self.stop_token_ids = tuple(
      dict.fromkeys(end for end in ends if isinstance(end, int))
    )

  def _closing(self) -> str:
    """Ends the reasoning that a prompt has opened; "" where none is open."""
    prompt = self._try(_user())
    last = self._try(_user(), _assistant(), add_generation_prompt=False)
    between = last[len(prompt) :].partition(_SAID)[0]
    opened = prompt.rstrip().endswith("<think>")
    return between if opened and last.startswith(prompt) else ""

  def _rewritten(self) -> list[str]:
    """Returns the kinds of conversation in which earlier turns are written
    anew."""
    thought = f"{_THOUGHT}\n</think>\n\n{_SAID}"
    prompt = self._try(_user())
    opened = prompt.endswith("<think>\n")
    answers = {"reasoning": thought if opened else f"<think>\n{thought}"}
    if not opened:
      answers["answers"] = _SAID
    rewrites = []
    for kind, answer in answers.items():
      for name, new in (("user", _user()), ("tool", _RESULT)):
        bridge = self._try(_user(), _assistant(), new).rpartition(_SAID)[2]
        if not bridge:
          continue  # It has no such message.
        # As it stands, or as the template itself writes it.
        last = self._try(
          _user(), _assistant(answer), add_generation_prompt=False
        )
        written = last[len(prompt) : last.rfind(_SAID) + len(_SAID)]
        if not any(
          self._try(_user(), _assistant(sampled), new)
          == prompt + sampled + bridge
          for sampled in (answer, written)
          if kind == "answers" or _THOUGHT in sampled
        ):
          rewrites.append(f"{kind} before a {name} message")
    system = {"role": "system", "content": "Zq9"}
    for name, before, options in (
      ("the system prompt", [system, _user()], {}),
      ("tools", [_user()], {"tools": [_TOOL]}),
    ):
      beginning = self._try(*before, add_generation_prompt=False, **options)
      conversation = self._try(
        *before, _assistant(), _user("Zq0nextZq"), **options
      )
      if not conversation.startswith(beginning):
        rewrites.append(f"{name} before a user message")
    return rewrites
