"""Seals the text of a run's config.yaml, so that damage to it is noticed.

The last line is a comment with the SHA-256 of all lines before it. A file that
was cut, emptied or edited no longer fits its seal; YAML readers ignore it.

Does not: protect against someone who seals a changed file again.
"""

from __future__ import annotations

import hashlib

_MARK = "# sha256 of the lines above: "


def digest(text: str) -> str:
  """SHA-256 of a text, in hexadecimal."""
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def seal(text: str) -> str:
  """The text with its seal as the last line."""
  return f"{text}{_MARK}{digest(text)}\n"


def is_sealed(text: str) -> bool:
  """Whether the text is as `seal` returned it."""
  body, mark, seal_text = text.rpartition(_MARK)
  return bool(mark) and seal_text == digest(body) + "\n"
