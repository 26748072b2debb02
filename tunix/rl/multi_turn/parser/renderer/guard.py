"""Keeps the text of messages apart from a template's own tokens.

A template writes text and tokens into one string. Before it does, characters
with which text could form one of the tokens are covered by marks; after the
string is cut at the tokens, the marks become the characters again.

Promises: no concatenation of covered texts with one another and with a
template's literals holds one of the tokens, unless a literal holds all of it.
Uncovering gives the text back exactly. Template logic about reasoning and
tool-call tags (`'</think>' in content`) sees them uncovered.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Collection, Iterable, Mapping

MARKUP = re.compile(
  r"</?(?:think|thinking|tool_call|tool_response|tools|arg_key|arg_value)>"
)
"""Tags that a policy writes as text; tokens of some tokenizers."""


class Guard:
  """Covers and uncovers; stateless after construction, thread-safe."""

  def __init__(
    self,
    tokens: Collection[str],
    literals: Iterable[str] = (),
    spoken: Collection[str] = (),
  ):
    """Args:

    tokens: Tokens that text must not become.
    literals: Texts that the template writes between messages' texts.
    spoken: Those of `tokens` that an assistant's text may hold.
    """
    nonce = secrets.token_hex(4)
    self._mark = f"\ue000{nonce}%x\ue001"
    self._marks = re.compile(f"\ue000{nonce}([0-9a-f]+)\ue001")
    self._any = self._pattern(tokens, ())
    self._assistant = self._pattern(tokens, spoken)
    self._heads = _heads(tokens, literals)

  def _pattern(
    self, tokens: Collection[str], spoken: Collection[str]
  ) -> re.Pattern[str]:
    """Returns a pattern of the places where a token begins, or might begin
    together with the text that follows."""
    starts = sorted({re.escape(token[:2]) for token in tokens})
    firsts = "".join(sorted({re.escape(token[0]) for token in tokens}))
    let = "|".join([MARKUP.pattern, *(re.escape(token) for token in spoken)])
    # One character may be the first of a token where nothing else, or a tag
    # at which templates cut, comes after it.
    last = rf"[{firsts}](?=\s*(?:\Z|</?think))"
    return re.compile(rf"(?!{let})(?:{'|'.join([*starts, last])})")

  def cover(self, text: str, assistant: bool = False) -> str:
    """Returns the text with marks in place of the characters that begin tokens.

    Args:
      text: Text of a message or a schema.
      assistant: Whether the text is a policy's own, which may hold the `spoken`
        tokens.
    """
    pattern = self._assistant if assistant else self._any
    covered = pattern.sub(
      lambda match: self._mark % ord(match[0][0]) + match[0][1:], text
    )
    begin = covered.lstrip()
    if begin and self._heads:
      if any(begin.startswith(h) or h.startswith(begin) for h in self._heads):
        space = covered[: len(covered) - len(begin)]
        covered = space + self._mark % ord(begin[0]) + begin[1:]
    return covered

  def cover_all(self, value: object) -> Any:
    """Returns a JSON value with each of its strings covered, keys included."""
    if isinstance(value, str):
      return self.cover(value)
    if isinstance(value, Mapping):
      return {
        self.cover_all(key): self.cover_all(inner)
        for key, inner in value.items()
      }
    if isinstance(value, (list, tuple)):
      return [self.cover_all(inner) for inner in value]
    return value

  def uncover(self, text: str) -> str:
    if "\ue000" not in text:
      return text
    return self._marks.sub(lambda match: chr(int(match[1], 16)), text)


def _heads(tokens: Collection[str], literals: Iterable[str]) -> tuple[str, ...]:
  """Returns the ends of tokens whose beginning a literal ends with."""
  ends = {literal[-64:] for literal in literals}
  return tuple(
    sorted(
      {
        token[cut:]
        for token in tokens
        for cut in range(1, len(token))
        if any(end.endswith(token[:cut]) for end in ends)
      }
    )
  )
