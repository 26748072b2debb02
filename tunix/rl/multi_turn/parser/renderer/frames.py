"""Frames that processors of some families write around image placeholders.

Their chat templates show one token for an image, and the processor puts the
whole of it in that one's place before it tokenises. Sources are transformers'
processors: Gemma3Processor (`full_image_sequence`) and PixtralProcessor, whose
placeholders are rows with a token between each two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Collection


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

  def size(self, placeholders: Any) -> tuple[int, int]:
    """Returns the placeholders of an image, and of a row or 0 for one run.

    Args:
      placeholders: Result of a policy's `num_image_tokens`: a number, or (rows,
        placeholders of a row).

    Raises:
      ValueError: `placeholders` is a number, and the frame has rows.
    """
    if not self.between:
      return placeholders, 0
    if isinstance(placeholders, int):
      raise ValueError(
          f"the chat template's images are rows of {self.placeholder!r} with"
          f" {self.between!r} between them, and this policy takes one run of"
          " placeholders; send text"
      )
    return math.prod(placeholders), placeholders[1]


FRAMES = (
    Frame(
        "<start_of_image>",
        "<image_soft_token>",
        "\n\n<start_of_image>",
        "<end_of_image>\n\n",
    ),
    Frame("[IMG]", "[IMG]", "", "[IMG_END]", "[IMG_BREAK]"),
)


def find(text: str, tokens: Collection[str]) -> Frame | None:
  """Returns the frame of a template that shows one image in `text`.

  Args:
    text: Rendered text of a message with one image.
    tokens: Tokens of the tokenizer that structure a prompt.
  """
  for frame in FRAMES:
    needed = {frame.shown, frame.placeholder, frame.between} - {""}
    if text.count(frame.shown) == 1 and needed <= set(tokens):
      return frame
  return None
