"""Prepares inputs of policies that read text only.

Promises: an image anywhere is refused by an error that names the policy.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base


@dataclasses.dataclass(frozen=True)
class TextProcessor:
  """`base.Processor` of a policy that reads text only.

  Attributes:
    policy: named by the error that refuses an image.
  """

  policy: str = "this policy"

  patch_bytes: int = dataclasses.field(default=0, init=False)
  patches_per_token: int = dataclasses.field(default=0, init=False)
  position_axes: int = dataclasses.field(default=0, init=False)

  def num_image_tokens(self, width: int, height: int) -> int:
    """Refuses the image: raises a ValueError."""
    self._refuse(width, height)

  def patchify(self, pixels: np.ndarray) -> base.PatchedImage:
    """Refuses the image: raises a ValueError."""
    height, width = pixels.shape[:2]
    self._refuse(width, height)

  def positions(
    self,
    tokens: np.ndarray,
    images: Sequence[trajectory.ImageSpan] = (),
    start: int = 0,
  ) -> np.ndarray:
    """Returns int32[T - start, 3]: start, start + 1, … on all three axes.

    Raises:
      ValueError: there are images.
    """
    for span in images:
      self._refuse(span.image.width, span.image.height)
    index = np.arange(start, len(tokens), dtype=np.int32)
    return np.repeat(index[:, None], 3, axis=1)

  def _refuse(self, width: int, height: int) -> NoReturn:
    raise ValueError(
      f"{self.policy} reads text only, and an image of {width}x{height} was"
      " given; use a vision-language policy (policy=qwen3_vl_tiny, tiny_vl,"
      " or a Qwen-VL checkpoint), a gym of web pages with"
      " gym.observation=axtree, or an environment without screenshots"
    )
