"""Compiles grammars of JSON, regular expressions and tool calls.

llguidance (the extra `grammar`) does the work; `engine.constrained_decoding`
holds completions to the result.

Promises: a completion held to a grammar is a text of it, unless sampling ends
before; the policy may sample a stop token only where the text may end, and must
where nothing can follow. Where the completion has a length, the last tokens of
it are the shortest end of the text that `Matcher` finds. An impossible grammar
is refused when it is made.

Does not accept a schema's keywords that llguidance does not enforce; it refuses
them by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import threading
import typing
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen

if typing.TYPE_CHECKING:
  from llguidance._lib import JsonCompileOptions

_KEPT = 64  # Grammars, compiled.
_END = 64  # Tokens within which a text is brought to its end.
_SPARE = 6  # That the next token may lengthen the end by.
# Texts that end JSON soonest, by preference: outside of a string, and in one.
_OUTSIDE = ("}", "]", ":", ",", "0", '"', "n", "[", "{")
_INSIDE = ('"', "n", "0")
_TEXT = "~"  # Is written in strings only.
# JSON as `json.dumps` writes it, or without blanks: a policy that may write
# blanks at will may never end.
_JSON: JsonCompileOptions = {
  "whitespace_flexible": False,
  "item_separator": ", ?",
  "key_separator": ": ?",
}


class GrammarError(ValueError):
  """The grammar is impossible; the message gives the reason."""


class Grammars:
  """Makes grammars for one vocabulary. Thread-safe."""

  def __init__(
    self,
    token_bytes: Callable[[int], bytes],
    encode: Callable[[str], typing.Iterable[int]],
    vocabulary: int,
    special: Collection[int],
    stop_token_ids: Sequence[int],
  ):
    """Args:

      token_bytes: Returns the bytes of an id; b"" for ids without text.
      encode: Returns the ids of a text.
      vocabulary: Number of the policy's ids.
      special: Ids that are no text.
      stop_token_ids: Ids that end a text.

    Raises:
      ImportError: llguidance is not installed.
    """
    try:
      import llguidance  # pylint: disable=g-import-not-at-top
      import llguidance.numpy  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise ImportError(
        "grammars need llguidance; pip install 'tunix-multi-turn[grammar]'"
      ) from error
    self._lib = llguidance
    self._fill = llguidance.numpy.fill_next_token_bitmask
    self._words = -(-vocabulary // 32)
    names = [token_bytes(i) for i in range(vocabulary)]
    texts = {text.encode(): text for text in (*_OUTSIDE, *_INSIDE, _TEXT)}
    self._ids = {texts[n]: i for i, n in enumerate(names) if n in texts}
    self._stops = tuple(stop_token_ids)
    # A token without text could be sampled for ever.
    empty = {i for i, name in enumerate(names) if not name}
    vocabulary_of = _Tokens(
      [name or b"<%d>" % i for i, name in enumerate(names)],
      sorted({*special, *stop_token_ids, *empty}),
      stop_token_ids[0],
      encode,
    )
    self._tokens = llguidance.LLTokenizer(
      llguidance.TokenizerWrapper(vocabulary_of), eos_token=list(stop_token_ids)
    )
    self._lock = threading.Lock()
    self._compiled = functools.lru_cache(_KEPT)(self._compile)

  def json(self, schema: object = None) -> str:
    """Returns a grammar of the JSON that a schema describes; None: any object.

    Raises:
      GrammarError: the schema is nested too deep, or has no grammar.
    """
    if schema is None:
      schema = {"type": "object"}
    with _refusing():
      return self._lib.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=_JSON
      )

  def regex(self, pattern: str) -> str:
    """Returns a grammar of the texts that a pattern matches.

    Raises:
      GrammarError: the pattern has no grammar.
    """
    with _refusing():
      return self._lib.LLMatcher.grammar_from_regex(pattern)

  def calls(
    self,
    parser: parser_base.ToolParser,
    tools: Sequence[Mapping[str, Any]],
    *,
    many: bool = False,
    free: bool = False,
    otherwise: Mapping[str, Any] | None = None,
  ) -> str:
    """Returns a grammar of calls to these tools.

    Args:
      parser: Parser that reads the calls.
      tools: OpenAI schemas of the tools.
      many: Whether more calls may follow the first.
      free: Whether any text is accepted, with calls in it or none.
      otherwise: JSON schema of a text without calls. With this or with `free`,
        arguments are held to the schemas of `strict` tools only.

    Raises:
      GrammarError: this parser's calls have no grammar, or a schema is nested
        too deep.
    """
    if not isinstance(parser, qwen.QwenToolParser) or parser.style != "json":
      raise GrammarError(
        f"calls of {type(parser).__name__} have no grammar; use the tool"
        " parser qwen"
      )
    heads, shapes = [], []
    for tool in tools:
      function = tool["function"]
      arguments = {"type": "object"}
      if function.get("strict") or not (free or otherwise is not None):
        arguments |= function.get("parameters") or {}
      name = re.escape(json.dumps(function["name"])).replace("/", r"\/")
      heads.append(rf'\{{"name": ?{name}, ?"arguments": ?')
      # A document of its own: a `$ref` begins at the root.
      shapes.append({"x-guidance": _JSON, **arguments})
    opening = '"<tool_call>\\n"'
    start = 'start: call ("\\n" call)*' if many else "start: call"
    if otherwise is not None:
      start += f" | c{len(shapes)}"
      shapes.append({"x-guidance": _JSON, **otherwise})
    if free:
      # Lazy, so that a call is recognised at its head and not at its end.
      start = (
        'start: call* TEXT\nTEXT: /(.|\\n)*/\nopening[lazy]: TEXT "<tool_call>"'
      )
      opening = 'opening "\\n"'
    bodies = " | ".join(f'H{i} c{i} "}}"' for i in range(len(heads)))
    with _refusing():
      return self._lib.LLMatcher.grammar_from_lark(
        "\n".join(
          [
            start,
            f'call: {opening} body "\\n</tool_call>"',
            f"body: {bodies}",
            *(f"H{i}: /{head}/" for i, head in enumerate(heads)),
            *(f"c{i}: %json {json.dumps(s)}" for i, s in enumerate(shapes)),
          ]
        )
      )

  def start(self, source: str, length: int | None = None) -> Matcher:
    """Returns a grammar's state for one completion.

    Compiles a source on its first use, which takes up to a second for a large
    schema.

    Args:
      source: Grammar, of one of the methods above.
      length: Tokens of the completion, at most; None: any number.

    Raises:
      GrammarError: the grammar is impossible.
    """
    with self._lock, _refusing():
      matcher = self._compiled(source).deep_copy()
    end = None if length is None else _End(length, self._ids, self._stops)
    return Matcher(matcher, self._fill, self._words, end)

  def _compile(self, source: str) -> Any:
    wrong = self._lib.LLMatcher.validate_grammar(source, self._tokens)
    if wrong:
      raise GrammarError(" ".join(wrong.split()))
    matcher = self._lib.LLMatcher(self._tokens, source, log_level=0)
    # Some grammars without any text fail at the first token only.
    Matcher(matcher.deep_copy(), self._fill, self._words).allowed()
    return matcher


@dataclasses.dataclass
class _End:
  """The end of a completion of bounded length.

  Attributes:
    remaining: Tokens that may still be sampled, the stop token among them.
    ids: Ids of the texts that end JSON.
    stops: Ids that end the completion.
    forced: Tokens that end the text; None as long as the policy chooses.
    look: The end is looked for once no more tokens than this are left.
  """

  remaining: int
  ids: Mapping[str, int]
  stops: Sequence[int]
  forced: list[int] | None = None
  look: int = _END


class Matcher:
  """A `constrained_decoding.Grammar`.

  With an `_End`, the policy chooses tokens until the ones that are left only
  just suffice to end the text; these are then the only ones allowed. A text
  whose end is not found, or longer than `_END`, is cut.
  """

  def __init__(
    self,
    matcher: Any,
    fill: Callable[..., None],
    words: int,
    end: _End | None = None,
  ):
    self._matcher = matcher
    self._fill = fill
    self._mask = np.zeros((1, words), np.int32)
    self._end = end

  def allowed(self) -> np.ndarray:
    """uint32[ceil(V / 32)]."""
    if self._end is not None:
      self._look(self._end)
      if self._end.forced is not None:
        mask = np.zeros(self._mask.shape[1], np.uint32)
        for token in self._end.forced[:1] or self._end.stops:
          mask[token // 32] |= np.uint32(1 << token % 32)
        return mask
    return self._allowed(self._matcher)

  def advance(self, token: int) -> None:
    self._matcher.consume_token(token)
    if self._end is not None:
      self._end.remaining -= 1
      if self._end.forced:
        del self._end.forced[0]
    self._check()

  def _allowed(self, matcher: object) -> np.ndarray:
    self._fill(matcher, self._mask, 0)
    self._check()
    return self._mask[0].view(np.uint32).copy()

  def _look(self, end: _End) -> None:
    """Forces the end of the text once no token is to spare."""
    if end.forced is not None or end.remaining > end.look or self.may_end:
      return
    tokens = self._shortest(end)
    if tokens is None:
      end.look = end.remaining // 2
      return
    spare = end.remaining - len(tokens) - 1 - _SPARE
    if spare <= 0:
      end.forced = tokens
    else:  # A few tokens do not lengthen the end by more than are to spare.
      end.look = end.remaining - 1 - spare // 4

  def _shortest(self, end: _End) -> list[int] | None:
    """Returns tokens after which the text may end, fewer than are left.

    They are the first found by preference, not always the fewest.
    """
    matcher = self._matcher.deep_copy()
    tokens: list[int] = []
    fits = lambda text: (
      (token := end.ids.get(text)) is not None
      and (matcher.validate_tokens([token]) == 1)
    )
    while len(tokens) < end.remaining and not matcher.is_error():
      if matcher.is_accepting():
        return tokens
      new = matcher.compute_ff_tokens()
      if not new:
        texts = _INSIDE if fits(_TEXT) else _OUTSIDE
        text = next(filter(fits, texts), None)
        if text is not None:
          new = [end.ids[text]]
        else:  # Within a word of a few, whatever begins it.
          words = self._allowed(matcher)
          bits = np.unpackbits(words.view(np.uint8), bitorder="little")
          new = [int(bits.argmax())]
      matcher.consume_tokens(new)
      tokens += new
    return None

  @property
  def may_end(self) -> bool:
    """Whether the text so far is a whole text of the grammar."""
    return self._matcher.is_accepting()

  def _check(self) -> None:
    if self._matcher.is_error():
      error = self._matcher.get_error().splitlines()[0]
      if error == "NoExtensionBias":
        error = (
          "nothing can be a text of it; does a $ref lead to itself, with"
          " nothing between?"
        )
      raise GrammarError(error)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
  """Turns llguidance's errors into `GrammarError`."""
  try:
    yield
  except GrammarError:
    raise
  except (ValueError, RecursionError) as error:
    raise GrammarError(" ".join(str(error).split())) from None


class _Tokens:
  """A vocabulary with the attributes that llguidance reads."""

  bos_token_id = None

  def __init__(
    self,
    tokens: list[bytes],
    special_token_ids: list[int],
    eos_token_id: int,
    encode: Callable[[str], typing.Iterable[int]],
  ):
    self.tokens = tokens
    self.special_token_ids = special_token_ids
    self.eos_token_id = eos_token_id
    self._encode = encode

  def __call__(self, text: str | bytes) -> list[int]:
    if isinstance(text, bytes):  # llguidance tries bytes first.
      raise TypeError("a str is needed")
    return [int(i) for i in self._encode(text)]
