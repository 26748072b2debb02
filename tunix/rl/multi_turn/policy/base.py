"""Defines the protocols of a policy, its processor and their batches.

`PolicyInputs` is the one batch format: training packs several sequences into
a row, the rollout engine pads one to a row. All data that depends on image
sizes (patch coordinates, which vision token feeds which placeholder) is
computed on the host, so that a compilation depends on shapes only.

Axis names: B = rows, T = tokens of a row, S = patch buffers (one a data
shard; B % S == 0 and row b reads buffer b // (B // S)), P = patches of a
buffer, F = bytes of a patch, V = vision tokens of a buffer, A = numbers of a
patch's place, D = model width, L = layers, C = cache length, K = KV
heads, H = head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Protocol, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import trajectory

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PolicyInputs:
  """A batch of token rows with the pixels they refer to.

  Attributes:
    tokens: int32[B, T].
    positions: int32[B, T, 3], rotary positions (time, height, width); equal
      on all axes for policies with one-axis positions.
    segment_ids: int32[B, T], 1, 2, … for the sequences packed in a row, 0 for
      padding. A token attends to earlier tokens of its own segment only.
    vision_index: int32[B, T], index into the row's buffer of vision tokens,
      -1 for a text token.
    patches: uint8[S, P, F].
    patch_segments: int32[S, P], 1, 2, … for the images of a buffer, 0 for
      padding; vision attention stays within an image.
    patch_positions: int32[S, P, A], (row, column) as the policy's processor
      counts them: patches of the grid, or fractions of the image's sides; and
      further numbers of a patch's place that the policy reads.
    seen_until: int32[B, T] or None. A segment may hold a tree of sequences that
      begin alike, depth first: token k of the row is seen by the tokens of
      places k to seen_until[k] - 1, its own and those of its descendants. Read
      by policies with `supports_tree = True`, for others it is None.
    image_patches: no image has more patches than this, so that attention
      within an image need not compare those further apart; part of the
      batch's type, hence of a compilation. 0 = a whole buffer may be one
      image. Read by policies with `reads_image_patches = True`.
    aligned_images: no image crosses a multiple of `image_patches` in its
      buffer, so that attention within an image need not look beyond; part of
      the batch's type as well.
  """

  tokens: Array
  positions: Array
  segment_ids: Array
  vision_index: Array
  patches: Array
  patch_segments: Array
  patch_positions: Array
  seen_until: Array | None = None
  image_patches: int = dataclasses.field(default=0, metadata={"static": True})
  aligned_images: bool = dataclasses.field(
    default=False, metadata={"static": True}
  )


@dataclasses.dataclass(frozen=True, eq=False)
class PatchedImage:
  """One image, ready for the vision tower.

  Attributes:
    patches: uint8[P, F].
    positions: int32[P, A], (row, column, …), for `patch_positions`.
    num_tokens: vision tokens it becomes, in placeholder order; vision token i
      of an image whose patches start at p sits at p // (P / num_tokens) + i.
  """

  patches: np.ndarray
  positions: np.ndarray
  num_tokens: int


class Processor(Protocol):
  """Host side of a policy: sizes, patches, positions. Numpy only.

  A text policy's `patches_per_token` is 0: there are no patch buffers, nothing
  is encoded, and `num_image_tokens` and `patchify` raise a ValueError that
  names the policy.

  `whole_image_tokens` (0 unless given) is the number of an image's tokens where
  they see each other in the decoder: then one call of `extend` has all tokens
  of an image that are not cached yet, and no prompt ends in an image.

  `image_layout` is optional: it takes the place of `num_image_tokens` where a
  renderer must know more of an image's placeholders than their number.
  """

  patch_bytes: int  # F
  patches_per_token: int  # P / V
  position_axes: int  # A

  def num_image_tokens(self, width: int, height: int) -> int:
    """Placeholder tokens of a screenshot of this size, in pixels."""
    ...

  def patchify(self, pixels: np.ndarray) -> PatchedImage:
    """Cuts uint8[H, W, 3] pixels into patches."""
    ...

  def positions(
    self,
    tokens: np.ndarray,
    images: Sequence[trajectory.ImageSpan],
    start: int = 0,
  ) -> np.ndarray:
    """Returns int32[T, 3], rotary positions of tokens[start:] of a sequence."""
    ...


def layout_of(processor: Processor) -> Callable[[int, int], Any]:
  """Returns what a renderer takes as `num_image_tokens`."""
  return optional(processor, "image_layout") or processor.num_image_tokens


class ModelConfig(Protocol):
  """The configuration of a policy's model, as learner and engine read it.

  `pad_token_id`, which fills rows (0 unless given), is optional.
  """

  vocab_size: int
  banned_token_ids: tuple[int, ...]  # Never sampled, of probability 0.


class Policy(Protocol):
  """A flax nnx module.

  `supports_tree` and `reads_image_patches` (False unless given) are
  optional: whether it reads that field of `PolicyInputs`. So are
  `wants_aligned_images`, whether it is quicker on this backend with
  `PolicyInputs.aligned_images`, and `vision_modules`, the names of the
  submodules that see nothing but pixels.
  """

  config: ModelConfig

  def __call__(self, inputs: PolicyInputs) -> jax.Array:
    """Hidden states [B, T, D] after the final norm, without a cache."""
    ...

  def encode_images(
    self, patches: Array, patch_segments: Array, patch_positions: Array
  ) -> jax.Array:
    """Vision tokens [S, V, …] from [S, P, F], [S, P], [S, P, A].

    Segments are int32 numbers of images, 0 for padding; or bool, where each
    buffer holds one image, True on its patches.
    The policy decides the axes after V: D, or several of them. A text policy
    gives an array without elements.
    """
    ...

  def init_cache(self, batch: int, length: int) -> Any:
    """Makes an empty KV cache, a pytree: `batch` slots of `length` tokens.

    An array whose shape does not depend on the length is a state after the
    cached tokens: `extend` begins without it where `starts` is 0, and leaves
    it unchanged where `lengths` is 0.
    """
    ...

  def extend(
    self,
    tokens: Array,
    positions: Array,
    starts: Array,
    lengths: Array,
    cache: object,
    vision_index: Array | None = None,
    vision: Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """Appends tokens to cached sequences: prefill and decode alike.

    Args:
      tokens: int32[B, T] new tokens, left-aligned.
      positions: int32[B, T, 3].
      starts: int32[B] tokens of each slot already cached; token t of row b is
        written at cache index starts[b] + t.
      lengths: int32[B] how many of the T new tokens of each row are real;
        others write nothing that is ever attended to.
      cache: The result of `init_cache` or `extend` with the same B.
      vision_index: int32[B, T] into `vision`, -1 for text; None = text only.
        Row b looks into buffer b * S // B.
      vision: [S, V, …] from `encode_images`.

    Returns:
      Hidden states [B, T, D] and the cache. T = 1 is the decode step.
    """
    ...

  # On a mesh with axes data, fsdp, sequence, block s of a call's rows and
  # buffer s of `vision` belong to shard s of the cache. `cache_axes`, if the
  # policy has it, names the mesh axes of the dimensions of the cache's arrays;
  # else they are split by rows alone.
  # A policy may have three more: `reads_pages`, whether the engine should use
  # pages on this backend, `init_pages(pages, page_size)`, and
  # `extend_pages(…, cache, table, …)`, which is `extend` with a cache in pages
  # and, after it, int32[B, M] the pages of each row.

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns float32[..., vocabulary] of hidden states [..., D]."""
    ...


_DEFAULTS: dict[str, Any] = {
  "whole_image_tokens": 0, "pad_token_id": 0, "max_image_patches": 0,
  "vision_modules": (), "cache_axes": (), "page_axes": (),
  "family": "", "remat": "", "param_dtype": "float32",
  "compute_dtype": "float32",
}  # fmt: skip
"""Values of attributes that a policy, its configuration or its processor need
not have; of the others None."""


def optional(part: object, name: str) -> Any:
  """Returns an attribute of a policy's part, its default where it has none."""
  return getattr(part, name, _DEFAULTS.get(name))
