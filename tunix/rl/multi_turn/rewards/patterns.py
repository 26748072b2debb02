"""Searches text of a policy by patterns of a user, within a time limit."""

from __future__ import annotations

import regex

SECONDS = 1.0
"""One search may take; a pattern can need exponential time."""


def check(pattern: str, name: str) -> None:
  """Raises ValueError when it is no regular expression, naming `name`."""
  try:
    regex.compile(pattern)
  except regex.error as error:
    raise ValueError(
      f"{name}={pattern!r} is not a regular expression: {error}"
    ) from None


def found(pattern: str, text: str, name: str) -> list[regex.Match[str]]:
  """Returns all matches, in order.

  Raises:
    ValueError: no regular expression, or it takes longer than `SECONDS`.
  """
  check(pattern, name)
  try:
    return list(regex.finditer(pattern, text, timeout=SECONDS))
  except TimeoutError:
    raise ValueError(
      f"{name}={pattern!r} took longer than {SECONDS:g} s on a text of"
      f" {len(text)} characters; write it without nested repetitions"
    ) from None
