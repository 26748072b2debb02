"""Prepares inputs of Gemma 3 policies: patches and positions.

Every image is resized to one square, whatever its sides, and becomes as many
tokens as any other. A token counts as one position, of a word or of an image.

Promises: the pixels are those of transformers' `Gemma3ImageProcessorPil`, bit
for bit, except that they stay uint8. The tokens of two images never follow each
other immediately: they would see each other.

Does not: pan and scan (crops of an image beside it), take video, or normalise.
Axis names: see `qwen_vl_inputs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Mapping, Sequence

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

_PIXELS = ("min_pixels", "max_pixels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Processor(qwen_vl_inputs.QwenVLProcessor):
  """`base.Processor` of Gemma 3 policies; stateless, thread-safe.

  Attributes:
    min_pixels, max_pixels: of the square, both.
  """

  flat_positions: bool = True

  resample: ClassVar[Image.Resampling] = Image.Resampling.BILINEAR

  def __post_init__(self):
    super().__post_init__()
    if self.side**2 != self.max_pixels or self.min_pixels != self.max_pixels:
      raise ValueError(
        f"min_pixels={self.min_pixels} and max_pixels={self.max_pixels} must"
        " both be the area of the square that images are resized to"
      )

  @property
  def whole_image_tokens(self) -> int:
    """See `base.Processor`."""
    return self.max_pixels // self.factor**2

  @property
  def side(self) -> int:
    """Pixels of an image's side."""
    return round(self.max_pixels**0.5)

  def describe(self) -> str:
    """Returns the settings and their source, in a line for people."""
    return (
      f"all of {self.side}x{self.side}, patches of {self.patch_size},"
      f" {self.merge_size}x{self.merge_size} a token"
      + f" ({self.source})"
      * bool(self.source)
    )

  def image_size(self, width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels that an image of this size is resized to.

    Raises:
      ValueError: a side is not positive.
    """
    if min(width, height) <= 0:
      raise ValueError(f"image size must be > 0, got {width}x{height}")
    return self.side, self.side

  def positions(
    self,
    tokens: np.ndarray,
    images: Sequence[trajectory.ImageSpan],
    start: int = 0,
  ) -> np.ndarray:
    """Returns the places in the sequence, see `QwenVLProcessor.positions`.

    Raises:
      ValueError: also where an image follows another one immediately.
    """
    positions_T3 = super().positions(tokens, images, start)
    for before, after in zip(images, images[1:]):
      if before.end == after.offset:
        raise ValueError(
          f"the image at {after.offset} follows another one immediately, and"
          " Gemma 3's vision tokens see all of the run they stand in; put"
          " <end_of_image> and <start_of_image> between them, as its"
          " processor does"
        )
    return positions_T3


def default_settings(
  config: qwen_shapes.QwenVLConfig,
) -> image_settings.ImageSettings:
  """Settings in place of missing files: those that config.json implies."""
  vision = config.vision
  side = round(vision.num_position_embeddings**0.5) * vision.patch_size
  values = {
    "image_size": side,
    "image_mean": vision.image_mean,
    "image_std": vision.image_std,
  }
  return image_settings.ImageSettings(
    values, "no processor file: config.json's image_size"
  )


def processor(
  settings: image_settings.ImageSettings,
  config: qwen_shapes.QwenVLConfig,
  pixels: Mapping[str, Any],
  budget: tuple[int, int] | None = None,
) -> Gemma3Processor:
  """Returns the host side of a config.

  Args:
    settings: Settings of `image_settings.read`.
    config: Configuration of the model.
    pixels: limits of an image's area that were asked for.
    budget: (pixels, images) of a trajectory.

  Raises:
    ValueError: the limits exclude the one size that images have.
  """
  vision = config.vision
  side = settings.values["image_size"]
  for name in _PIXELS:
    if pixels.get(name, side**2) != side**2:
      raise ValueError(
        f"{name}={pixels[name]}: Gemma 3 sees every image at {side}x{side} ="
        f" {side**2} pixels; leave it out"
      )
  if budget is not None and budget[0] < budget[1] * side**2:
    raise ValueError(
      f"trajectory_pixels={budget[0]} of {budget[1]} images: Gemma 3 sees"
      f" every image at {side}x{side} = {side**2} pixels; raise it to"
      f" {budget[1] * side**2}, keep fewer images, or leave it at 0"
    )
  return Gemma3Processor(
    patch_size=vision.patch_size,
    merge_size=vision.spatial_merge_size,
    min_pixels=side**2,
    max_pixels=side**2,
    image_token_id=config.image_token_id,
    mean=settings.values["image_mean"],
    std=settings.values["image_std"],
    source=settings.source,
  )
