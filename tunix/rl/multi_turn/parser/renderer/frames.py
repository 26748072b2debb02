"""Frames that processors of some families write around image placeholders.

Their chat templates show one token for an image, and the processor puts the
whole of it in that one's place before it tokenises. Sources are transformers'
processors: Gemma3Processor (`full_image_sequence`), PixtralProcessor, whose
placeholders are rows with a token between each two, and Idefics3Processor,
whose tiles have their row and column written before them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, NamedTuple, Sequence


class Runs(NamedTuple):
  """Placeholders of one image.

  Attributes:
    before: the text before each run of placeholders; "" where a template or a
      frame has written it already.
    length: Placeholders of a run.
    after: the text after the last run.
  """

  before: Sequence[str]
  length: int
  after: str = ""


@dataclasses.dataclass(frozen=True)
class Frame:
  """One family's.

  Attributes:
    shown: the token in the template's text.
    placeholder: the token that stands for a vision token.
    before, after: the text around the placeholders; `before` may hold `shown`.
    between: the token that ends each row of placeholders but the last; "": they
      are one run.
  """

  shown: str
  placeholder: str
  before: str
  after: str
  between: str = ""

  def write(self, text: str) -> str:
    """Returns the text of a template with one placeholder, framed, for each
    image."""
    framed = self.before + self.placeholder + self.after
    return text.replace(self.shown, framed)

  @property
  def in_runs(self) -> bool:
    """Whether an image's placeholders are runs with other tokens between."""
    return bool(self.between)

  @property
  def tokens(self) -> set[str]:
    """Tokens that a tokenizer must have."""
    return {self.shown, self.placeholder, self.between} - {""}

  def runs(self, placeholders: Any) -> Runs:
    """Returns the runs of an image, if it is of several.

    Args:
      placeholders: (rows, placeholders of a row).

    Raises:
      ValueError: `placeholders` is a number.
    """
    if isinstance(placeholders, int):
      raise ValueError(
        f"the chat template's images are rows of {self.placeholder!r} with"
        f" {self.between!r} between them, and this policy takes one run of"
        " placeholders; send text"
      )
    rows, row = placeholders
    return Runs(["", *[self.between] * (rows - 1)], row)


class _Tiles(Frame):
  """Idefics3's: tiles row by row, then the whole image."""

  _EDGE = "<fake_token_around_image>"

  @property
  def in_runs(self) -> bool:
    return True

  @property
  def tokens(self) -> set[str]:
    return {self.placeholder, self._EDGE}

  def runs(self, placeholders: Any) -> Runs:
    """Returns the runs of an image.

    Args:
      placeholders: (rows of tiles, columns of tiles, placeholders of a tile); 0
        rows where the whole image is the only tile.

    Raises:
      ValueError: `placeholders` is a number.
    """
    if isinstance(placeholders, int):
      raise ValueError(
        f"the chat template's images are tiles between {self._EDGE!r}, and"
        " this policy takes one run of placeholders; send text"
      )
    rows, columns, count = placeholders
    before = [
      "\n" * (row > 0 and column == 0)
      + f"{self._EDGE}<row_{row + 1}_col_{column + 1}>"
      for row in range(rows)
      for column in range(columns)
    ]
    before.append("\n\n" * (rows > 0) + f"{self._EDGE}<global-img>")
    return Runs(before, count, self._EDGE)


FRAMES = (
  Frame(
    "<start_of_image>",
    "<image_soft_token>",
    "\n\n<start_of_image>",
    "<end_of_image>\n\n",
  ),
  Frame("[IMG]", "[IMG]", "", "[IMG_END]", "[IMG_BREAK]"),
  _Tiles("<image>", "<image>", "", ""),
)


def find(text: str, tokens: Collection[str]) -> Frame | None:
  """Returns the frame of a template that shows one image in `text`.

  Args:
    text: Rendered text of a message with one image.
    tokens: Tokens of the tokenizer that structure a prompt.
  """
  for frame in FRAMES:
    if text.count(frame.shown) == 1 and frame.tokens <= set(tokens):
      return frame
  return None
