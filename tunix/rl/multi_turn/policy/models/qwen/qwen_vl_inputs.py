"""Prepares inputs of Qwen-VL and GLM-V policies: sizes, patches, positions.

Promises: an image's size, its patches and their order, and the rotary
positions are those of transformers' `Qwen2VLImageProcessorPil` and
`Glm4vImageProcessorPil` and of `get_rope_index`, bit for bit, except that
pixels stay uint8 and a patch is one frame. The reference repeats a still for
its temporal kernel of 2; a model here adds the kernel's two halves up instead,
and normalises on the device.

Does not: take video, decode files, or normalise. numpy and Pillow only.

Axis names: P = patches of an image, F = bytes of a patch, T = tokens of a
sequence.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, ClassVar, Mapping, Sequence

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base

# In the shape of a checkpoint's preprocessor_config.json, so that they can
# stand in for one: `from_preprocessor_config(QWEN3_VL, max_pixels=…)`.
QWEN2_5_VL: Mapping[str, Any] = types.MappingProxyType(
  {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 3584 * 3584,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
  }
)
"""Settings in Qwen2.5-VL's checkpoints."""

QWEN3_VL: Mapping[str, Any] = types.MappingProxyType(
  {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 256 * 256,
    "max_pixels": 4096 * 4096,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
  }
)
"""Settings in Qwen3-VL's checkpoints."""


GLM_4_1V: Mapping[str, Any] = types.MappingProxyType(
  {
    **QWEN2_5_VL,
    # Half of what the file has, which counts a still as two frames.
    "min_pixels": 112 * 112 // 2,
    "max_pixels": 28 * 28 * 6144,
  }
)
"""Settings in GLM-4.1V's and GLM-4.5V's checkpoints."""


MAX_ASPECT_RATIO = 200


def smart_resize(
  height: int,
  width: int,
  factor: int,
  min_pixels: int,
  max_pixels: int,
  lift_sides: bool = False,
) -> tuple[int, int]:
  """Returns the size an image is resized to before it is cut into patches.

  Sides become multiples of `factor`, the area lies between the limits, and the
  aspect ratio stays near the original. Sides are rounded half to even, as
  Python rounds: 720 / 32 = 22.5 becomes 22, so 720 rows become 704.

  The result exceeds max_pixels, as the source's does, where a side would
  otherwise fall below `factor`, and where min_pixels is so near max_pixels
  that rounding up passes it.

  Source: `smart_resize` of Qwen's qwen-vl-utils and of transformers'
  models/qwen2_vl/image_processing_qwen2_vl.py and, with `lift_sides`,
  models/glm4v/image_processing_glm4v.py (5.12.1), whose limits are those of a
  still taken twice.

  Args:
    height: pixels, > 0.
    width: pixels, > 0.
    factor: pixels of a vision token's side, patch_size * merge_size.
    min_pixels: least area, > 0.
    max_pixels: largest area, >= min_pixels.
    lift_sides: enlarge an image with a side below `factor` to it first.

  Returns:
    (height, width), multiples of `factor`, > 0.

  Raises:
    ValueError: the size is not positive, or one side is more than
      MAX_ASPECT_RATIO times the other.
  """
  if height <= 0 or width <= 0:
    raise ValueError(f"image size must be > 0, got {width}x{height}")
  if lift_sides and min(height, width) < factor:
    lift = max(factor / height, factor / width)
    height, width = int(height * lift), int(width * lift)
  if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
    raise ValueError(
      f"a {width}x{height} image has an aspect ratio of"
      f" {max(height, width) / min(height, width):.1f}, Qwen-VL takes at most"
      f" {MAX_ASPECT_RATIO}; crop it or make the gym's screen less narrow"
    )
  rows = round(height / factor) * factor
  cols = round(width / factor) * factor
  # The order of the operations is the source's: another one rounds otherwise.
  if rows * cols > max_pixels:
    scale = math.sqrt((height * width) / max_pixels)
    rows = max(factor, math.floor(height / scale / factor) * factor)
    cols = max(factor, math.floor(width / scale / factor) * factor)
  elif rows * cols < min_pixels:
    scale = math.sqrt(min_pixels / (height * width))
    rows = math.ceil(height * scale / factor) * factor
    cols = math.ceil(width * scale / factor) * factor
  return rows, cols


def pixel_budget(
  max_pixels: int, trajectory_pixels: int, images: int, factor: int = 32
) -> int:
  """`max_pixels` for each image of a trajectory that has a budget as a whole.

  Args:
    max_pixels: limit of a single image, in pixels.
    trajectory_pixels: limit of all images of a trajectory together, in pixels
      after resizing.
    images: screenshots a trajectory may hold.
    factor: pixels of a vision token's side; Qwen3-VL's unless given.

  Returns:
    Pixels an image may have, with the exceptions of `smart_resize`'s
    max_pixels.

  Raises:
    ValueError: `images` is not positive, or a vision token's factor**2 pixels
      do not fit.
  """
  if images <= 0:
    raise ValueError(f"images must be > 0, got {images}")
  budget = min(max_pixels, trajectory_pixels // images)
  if budget < factor**2:
    raise ValueError(
      f"max_pixels={max_pixels} and trajectory_pixels={trajectory_pixels}"
      f" leave each of {images} images {budget} pixels, one vision token"
      f" takes {factor**2}; raise them to at least {factor**2} and"
      f" {images * factor**2}, or keep fewer images"
    )
  return budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVLProcessor:
  """`base.Processor` of Qwen-VL and GLM-V policies; stateless, thread-safe.

  A patch's position is (row, column, rows, columns): where it stands in the
  image's grid of patches, and how large that grid is.

  Attributes:
    patch_size: pixels of a patch's side.
    merge_size: patches of a vision token's side.
    min_pixels: smaller images are enlarged to at least this area.
    max_pixels: larger images are shrunk to at most this area, see
      `smart_resize`.
    image_token_id: the placeholder's id; None leaves it unchecked.
    mean: Mean of each channel, a fraction of 255; None if unknown. Not applied
      here: the model subtracts it on the device.
    std: Standard deviation of each channel; the model divides by it.
    source: Origin of the settings, for people.
    flat_positions: whether a vision token counts as one position on all axes,
      like a word (OpenCUA).
    lift_sides: whether an image with a side below a vision token's is enlarged
      first (GLM-V), see `smart_resize`.
  """

  patch_size: int
  merge_size: int = 2
  min_pixels: int
  max_pixels: int
  image_token_id: int | None = None
  mean: tuple[float, float, float] | None = None
  std: tuple[float, float, float] | None = None
  source: str = dataclasses.field(default="", compare=False)
  flat_positions: bool = False
  lift_sides: bool = False

  position_axes: ClassVar[int] = 4
  resample: ClassVar[Image.Resampling] = Image.Resampling.BICUBIC

  def __post_init__(self):
    for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be an int > 0, got {value!r}")
    if self.max_pixels < max(self.min_pixels, self.factor**2):
      raise ValueError(
        f"max_pixels={self.max_pixels} is below min_pixels={self.min_pixels}"
        f" or one vision token's {self.factor**2} pixels; raise it or lower"
        " min_pixels"
      )
    for name in ("mean", "std"):
      value = getattr(self, name)
      if value is None:
        continue
      object.__setattr__(self, name, tuple(float(v) for v in value))
      if len(value) != 3 or (name == "std" and min(value) <= 0):
        raise ValueError(
          f"{name} must be three numbers{' > 0' * (name == 'std')}, got"
          f" {value!r}"
        )

  @classmethod
  def from_preprocessor_config(
    cls,
    config: Mapping[str, Any],
    *,
    image_token_id: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    source: str = "",
    flat_positions: bool = False,
    lift_sides: bool = False,
  ) -> QwenVLProcessor:
    """Returns the processor a checkpoint was trained with.

    Args:
      config: its preprocessor_config.json, or QWEN2_5_VL or QWEN3_VL. Both
        `min_pixels`/`max_pixels` and `size` with `shortest_edge` and
        `longest_edge` (areas, despite their names) are read; the former win,
        as in transformers.
      image_token_id: the placeholder's id, from the tokenizer.
      min_pixels: takes the place of the config's; None keeps it.
      max_pixels: takes the place of the config's; None keeps it.
      source: Origin of the config, for people.
      flat_positions: see the class.
      lift_sides: see the class.

    Raises:
      ValueError: a field is missing, or asks for a step that is not
        implemented.
    """
    for name, want in (
      ("do_resize", True),
      ("do_rescale", True),
      ("do_normalize", True),
      ("resample", int(Image.Resampling.BICUBIC)),
      ("rescale_factor", 1 / 255),
    ):
      got = config.get(name)
      if got is not None and got != want:
        raise ValueError(
          f"preprocessor_config: {name} must be {want!r}, the only way"
          f" Qwen-VL's inputs are made here, got {got!r}"
        )
    if _field(config, "temporal_patch_size") != 2:
      raise ValueError(
        "preprocessor_config: temporal_patch_size must be 2, the kernel"
        " that is folded for stills, got"
        f" {config['temporal_patch_size']!r}"
      )
    return cls(
      patch_size=_field(config, "patch_size"),
      merge_size=_field(config, "merge_size"),
      min_pixels=_limit(config, "min_pixels", "shortest_edge", min_pixels),
      max_pixels=_limit(config, "max_pixels", "longest_edge", max_pixels),
      image_token_id=image_token_id,
      mean=_field(config, "image_mean"),
      std=_field(config, "image_std"),
      source=source,
      flat_positions=flat_positions,
      lift_sides=lift_sides,
    )

  def describe(self) -> str:
    """Returns the settings and their source, in a line for people."""
    numbers = lambda values: " ".join(f"{v:.4g}" for v in values or ())
    return (
      f"patches of {self.patch_size}, {self.merge_size}x{self.merge_size} a"
      f" token, {self.min_pixels:,} to {self.max_pixels:,} pixels, mean"
      f" {numbers(self.mean)}, std {numbers(self.std)}"
      + f" ({self.source})"
      * bool(self.source)
    )

  @property
  def factor(self) -> int:
    """Pixels of a vision token's side."""
    return self.patch_size * self.merge_size

  @property
  def patch_bytes(self) -> int:
    return 3 * self.patch_size**2

  @property
  def patches_per_token(self) -> int:
    return self.merge_size**2

  def image_size(self, width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels that an image of this size is resized to.

    Raises:
      ValueError: see `smart_resize`.
    """
    rows, cols = smart_resize(
      height,
      width,
      self.factor,
      self.min_pixels,
      self.max_pixels,
      self.lift_sides,
    )
    return cols, rows

  def grid(self, width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of patches of an image of this size, in pixels.

    Raises:
      ValueError: see `smart_resize`.
    """
    width, height = self.image_size(width, height)
    return height // self.patch_size, width // self.patch_size

  def num_image_tokens(self, width: int, height: int) -> int:
    """Placeholder tokens of an image of this size, in pixels.

    Raises:
      ValueError: see `smart_resize`.
    """
    rows, cols = self.grid(width, height)
    return rows * cols // self.patches_per_token

  def resize(self, pixels: np.ndarray) -> np.ndarray:
    """Resizes uint8[H, W, 3] pixels to the size that the policy sees."""
    height, width, _ = pixels.shape
    size = self.image_size(width, height)
    if size == (width, height):
      return pixels
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize(size, self.resample))

  def patchify(self, pixels: np.ndarray) -> base.PatchedImage:
    """Resizes an image and cuts it into patches.

    Args:
      pixels: uint8[H, W, 3], RGB.

    Returns:
      Patches uint8[P, F] with F laid out as (channel, row, column), and
      positions int32[P, 4]. The patches of a vision token follow each other in
      raster order, and so do the vision tokens.

    Raises:
      ValueError: not uint8[H, W, 3], or a size `smart_resize` refuses.
    """
    pixels = np.asarray(pixels)
    check_pixels(pixels)
    pixels = self.resize(pixels)
    patch, merge = self.patch_size, self.merge_size
    down, across = (side // self.factor for side in pixels.shape[:2])
    cells = pixels.reshape(down, merge, patch, across, merge, patch, 3)
    patches = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, self.patch_bytes)
    rows, cols = down * merge, across * merge
    positions = np.empty((down, across, merge, merge, 4), np.int32)
    positions[..., 0] = np.arange(rows).reshape(down, 1, merge, 1)
    positions[..., 1] = np.arange(cols).reshape(1, across, 1, merge)
    positions[..., 2:] = rows, cols
    return base.PatchedImage(patches, positions.reshape(-1, 4), down * across)

  def positions(
    self,
    tokens: np.ndarray,
    images: Sequence[trajectory.ImageSpan],
    start: int = 0,
  ) -> np.ndarray:
    """M-RoPE positions (time, height, width) of tokens[start:].

    Text counts up on all axes alike. An image that begins at position p stands
    at time p, its rows at p, p + 1, … and its columns as well; the text after
    it continues at p + max(rows, columns), in vision tokens. With
    `flat_positions`, images count up like text.

    Args:
      tokens: int[T] of one sequence, from its beginning.
      images: spans of all images among them, in order.
      start: first token wanted, 0 to T. Images before it count all the same.

    Returns:
      int32[T - start, 3].

    Raises:
      ValueError: `start` is out of range, or a span overlaps an earlier one,
        leaves the tokens, is not as long as its image's size makes it, or holds
        tokens other than `image_token_id`.
    """
    tokens = np.asarray(tokens)
    if not 0 <= start <= len(tokens):
      raise ValueError(
        f"start must lie within 0 and the {len(tokens)} tokens, got {start}"
      )
    out = np.empty((len(tokens) - start, 3), np.int32)
    cursor = 0  # The first token after the last image,
    position = 0  # and its position.
    for span in images:
      rows, cols = self._check_span(tokens, span, cursor)
      if self.flat_positions:
        _count(out, cursor, span.end, position, start)
        position += span.end - cursor
        cursor = span.end
        continue
      _count(out, cursor, span.offset, position, start)
      position += span.offset - cursor
      first, last = max(span.offset, start), max(span.end, start)
      index = np.arange(first - span.offset, last - span.offset, dtype=np.int32)
      here = out[first - start : last - start]
      here[:, 0] = position
      np.floor_divide(index, cols, out=here[:, 1])
      np.remainder(index, cols, out=here[:, 2])
      here[:, 1:] += position
      position += max(rows, cols)
      cursor = span.end
    _count(out, cursor, len(tokens), position, start)
    return out

  def _check_span(
    self, tokens_T: np.ndarray, span: trajectory.ImageSpan, cursor: int
  ) -> tuple[int, int]:
    """Rows and columns of vision tokens of a span that may stand here."""
    image = span.image
    name = (
      f"image span [{span.offset}, {span.end}) of {image.width}x"
      f"{image.height} image {image.sha256[:12]}…"
    )
    if span.offset < cursor or span.end > len(tokens_T):
      raise ValueError(
        f"{name} begins before {cursor}, where the image before it ends, or"
        f" leaves the {len(tokens_T)} tokens; give the spans in order, and"
        " whole"
      )
    grid = self.grid(image.width, image.height)
    rows, cols = (side // self.merge_size for side in grid)
    if rows * cols != span.num_tokens:
      raise ValueError(
        f"{name} holds {span.num_tokens} tokens, an image of that size takes"
        f" {rows}x{cols} = {rows * cols}; render the prompt with this"
        " processor's num_image_tokens"
      )
    placeholder = self.image_token_id
    if placeholder is not None:
      run = tokens_T[span.offset : span.end]
      wrong = np.flatnonzero(run != placeholder)
      if len(wrong):
        raise ValueError(
          f"{name} holds token {int(run[wrong[0]])} at"
          f" {span.offset + int(wrong[0])}, not the placeholder"
          f" {placeholder};"
          " check the span's offset and image_token_id"
        )
    return rows, cols


def check_pixels(pixels: np.ndarray) -> None:
  """Raises a ValueError unless they are uint8[H, W, 3]."""
  if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
    raise ValueError(
      "pixels must be uint8[H, W, 3]: stills only, no video, no batch; got"
      f" {pixels.dtype}{list(pixels.shape)}"
    )


def _count(
  out: np.ndarray, begin: int, end: int, position: int, start: int
) -> None:
  """Positions of the text tokens[begin:end], of which out[0] is [start]."""
  first = max(begin, start)
  if first < end:
    count = np.arange(first - begin, end - begin, dtype=np.int32) + position
    out[first - start : end - start] = count[:, None]


def _field(config: Mapping[str, Any], name: str) -> Any:
  value = config.get(name)
  if value is None:
    raise ValueError(
      f"preprocessor_config: {name} is missing; is it a Qwen-VL checkpoint's?"
      " Its defaults are QWEN2_5_VL and QWEN3_VL of this module"
    )
  return value


def _limit(
  config: Mapping[str, Any], name: str, edge: str, override: int | None
) -> int:
  """Returns a limit of an image's area: `override`, else the file's."""
  size = config.get("size")
  size = size if isinstance(size, Mapping) else {}
  for value in (override, config.get(name), size.get(edge)):
    if value is not None:
      return value
  raise ValueError(
    f"preprocessor_config: neither {name} nor size.{edge} is there; give"
    f" {name} yourself"
  )
