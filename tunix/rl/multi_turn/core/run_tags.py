"""Checks tags of runs."""

from __future__ import annotations

import unicodedata

LONGEST = 50
"""Characters of a tag."""
MOST = 50
"""Tags of a run."""


def clean(tag: object) -> str:
  """Returns a tag in NFC, so that two that look alike are equal.

  Raises:
    ValueError: it is not a valid tag; the text has the fix.
  """
  if not isinstance(tag, str):
    raise ValueError(f"give text, not a {type(tag).__name__}")
  text = unicodedata.normalize("NFC", tag).strip()
  if not 0 < len(text) <= LONGEST:
    raise ValueError(f"a tag has 1 to {LONGEST} characters, not {len(text)}")
  if not text.isprintable():
    raise ValueError(
      "a tag has letters, digits, marks and spaces, and no character that"
      " is not seen"
    )
  return text


def clean_all(tags: object) -> tuple[str, ...]:
  """Several of them, each once, in their order.

  Raises:
    ValueError: no list, more than `MOST`, or one of them is invalid.
  """
  if not isinstance(tags, (list, tuple)):
    raise ValueError("give a list of texts")
  if len(tags) > MOST:
    raise ValueError(f"a run has at most {MOST} tags, not {len(tags)}")
  return tuple(dict.fromkeys(clean(tag) for tag in tags))
