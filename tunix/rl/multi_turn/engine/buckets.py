"""Chooses the shapes of the engine's calls, and lists the programs they need.

Promises: every call has one of the listed shapes, so that a program is compiled
once for each; a window is a whole number of pages.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Collection, Iterator, NamedTuple, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import programs
from tunix.rl.multi_turn.policy import base

_LARGE = 32_000_000  # Parameters with which few rows fill a CPU's cores.
_COPIES = 16  # Pages of a copy call.
_PLAIN_TEXT = 32  # Tokens of text that come with a screenshot.
_MOST_DEFAULT = 256  # Tokens a row of a prefill call, unless images need more.


def smallest(buckets: Sequence[int], need: int) -> int:
  """Returns the smallest ascending bucket that holds `need`, or the last."""
  for size in buckets:
    if size >= need:
      return size
  return buckets[-1]


class Call(NamedTuple):
  """A call that some items share.

  Attributes:
    items: indices of the items.
    rows: int32, the row of each.
    size: rows of the call.
  """

  items: list[int]
  rows: np.ndarray
  size: int


def deal(
  shard_of: Sequence[int], sizes: Sequence[int], shards: int
) -> Iterator[Call]:
  """Calls for all items, whose rows lie in the blocks of their shards.

  Args:
    shard_of: the shard of each item.
    sizes: rows that a call may have, ascending multiples of `shards`.
    shards: equal blocks that a call's rows are split into.
  """
  dealt: list[list[int]] = [[] for _ in range(shards)]
  for item, shard in enumerate(shard_of):
    dealt[shard].append(item)
  most = sizes[-1] // shards
  for start in range(0, max(map(len, dealt)), most):
    parts = [items[start : start + most] for items in dealt]
    size = smallest(sizes, shards * max(map(len, parts))) // shards
    rows = [
      s * size + i for s, part in enumerate(parts) for i in range(len(part))
    ]
    yield Call(
      [item for part in parts for item in part],
      np.array(rows, np.int32),
      size * shards,
    )


def announced(variant: programs.Variant, features: Collection[str]) -> bool:
  """Returns whether an engine with these features can need the variant."""
  needs = zip(config_lib.FEATURES, variant.features)
  return all(name in features for name, needed in needs if needed)


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The shapes of an engine's calls; all tuples ascend.

  Rows and images are multiples of the shards of the cache.

  Attributes:
    decode_rows: rows of a decode call; more rows go into further calls.
    prefill_rows: rows of a prefill call; more rows go into further calls.
    tokens: tokens a row of a prefill call; longer suffixes are chunked.
    windows: cache positions a call reads; the last holds a whole context.
    images: images of an encode call.
    patches: patches of an image; larger images are refused. () for a text
      policy.
    steps: tokens a decode call without drafts samples at most (K).
    drafts: tokens that a step of a decode call drafts for each row; 0: none.
    always_drafts: Calls that can have drafts always do.
    page_size: tokens of a page of the KV cache.
    copies: pages of a copy call; () where none is made.
    fixed_rows: use only the largest rows and images. Windows and chunks follow
      from a request and what its cache holds; with this all shapes it meets
      do, so that what else is in a call changes no bit of it.
  """

  decode_rows: tuple[int, ...]
  prefill_rows: tuple[int, ...]
  tokens: tuple[int, ...]
  windows: tuple[int, ...]
  images: tuple[int, ...]
  patches: tuple[int, ...]
  steps: int
  page_size: int
  fixed_rows: bool = False
  copies: tuple[int, ...] = ()
  drafts: int = 0
  always_drafts: bool = False

  def __post_init__(self):
    fixed = ("decode_rows", "prefill_rows", "images")
    for name in (*fixed, "tokens", "windows", "patches"):
      value = tuple(sorted(set(getattr(self, name))))
      if self.fixed_rows and name in fixed:
        value = value[-1:]
      object.__setattr__(self, name, value)

  @property
  def drafted(self) -> int:
    """Tokens that a decode call with drafts samples at most; 0 without."""
    if not self.drafts:
      return 0
    # As if half of the drafts were right; at least half of the steps.
    width = 1 + self.drafts
    return max(-(-2 * self.steps // width), -(-self.steps // 2)) * width

  @property
  def most(self) -> int:
    """Tokens that a decode call samples at most."""
    return max(self.steps, self.drafted)

  def variants(self, features: Sequence[str] = ()) -> list[programs.Variant]:
    """Lists all programs, the ones that every run needs first.

    Args:
      features: Names from `config.FEATURES`.
    """
    shapes = []
    kinds = [range(1 + (name in features)) for name in config_lib.FEATURES]
    decodes = [tuple(map(bool, kind)) for kind in itertools.product(*kinds)]
    if self.drafts and self.always_drafts:
      decodes = decodes[1:]  # Calls without a feature have drafts.
    for window in reversed(self.windows):
      for rows in reversed(self.decode_rows):
        for kind in decodes:
          masked = kind[config_lib.FEATURES.index("grammar")]
          steps = 1 if masked else self.steps
          shapes.append(
            programs.Variant("decode", rows, steps, window, 0, *kind)
          )
        if self.drafts:
          shapes.append(
            programs.Variant("decode", rows, self.drafted, window, self.drafts)
          )
      for rows in reversed(self.prefill_rows):
        for tokens in reversed(self.tokens):
          if tokens <= window:
            shapes.append(programs.Variant("prefill", rows, tokens, window))
    for rows in self.copies:
      shapes.append(programs.Variant("copy", rows, self.page_size))
    for patches in self.patches:
      for images in self.images:
        shapes.append(programs.Variant("encode", images, patches))
    return shapes


def choose(
  processor: base.Processor,
  config: config_lib.EngineConfig,
  image_sizes: Sequence[tuple[int, int]],
  shards: int = 1,
  platform: str = "",
  parameters: int = 0,
) -> Buckets:
  """Chooses an engine's shapes, by its config and else by the device.

  Args:
    processor: the policy's host side.
    config: the engine's settings.
    image_sizes: (width, height) in pixels of the screenshots to come.
    shards: Parts of rows and images, whose numbers are rounded up to a multiple
      of it.
    platform: Platform of the device; "" = JAX's default.
    parameters: Number of the policy's parameters.

  Raises:
    ValueError: a bucket of patches is not a whole number of vision tokens, or
      none of tokens holds an image that must be computed at once.
  """
  split = lambda rows: -(-rows // shards) * shards
  context, slots = config.context_length, split(config.slots)
  per_token = processor.patches_per_token
  image_tokens = [processor.num_image_tokens(*size) for size in image_sizes]
  patches = config.patch_buckets or tuple(
    n * per_token for n in image_tokens or [context]
  )
  if not per_token:
    patches = ()  # A text policy: nothing is ever encoded.
  for count in patches:
    if count % per_token:
      raise ValueError(
        f"patch_buckets holds {count}, no multiple of the {per_token} patches"
        " of a vision token"
      )
  on_cpu = (platform or jax.default_backend()) == "cpu"
  decode_rows = config.decode_rows or (16 if on_cpu else slots,)
  few = 8 if parameters < _LARGE else 2
  prefill_rows = config.prefill_rows or (few if on_cpu else slots,)
  image = base.optional(processor, "whole_image_tokens")
  if image and max(config.prefill_buckets, default=image) < image:
    raise ValueError(
      f"prefill_buckets={config.prefill_buckets}: the {image} tokens of an"
      " image see each other and are computed at once; give one of at least"
      f" {image}"
    )
  # A call has the text around an image that it may not part.
  most = max(_MOST_DEFAULT, -(-(image + _PLAIN_TEXT) // 32) * 32 * bool(image))
  tokens = config.prefill_buckets or (64, most)
  if on_cpu and not config.prefill_buckets:
    # A call reads its rows' whole windows: one call a turn, which is a
    # screenshot and some text, is fastest.
    turn = max(image_tokens, default=64) + _PLAIN_TEXT
    tokens = (32, min(-(-turn // 32) * 32, most))
  windows = config.window_buckets
  if not windows:
    parts = min(6 if on_cpu else 2, context // 256)
    windows = tuple(context * i // parts for i in range(1, parts))
  page_size = config.page_size or min(min(tokens), context)
  pages_of = lambda positions: -(-positions // page_size)
  return Buckets(
    decode_rows=tuple(min(split(r), slots) for r in decode_rows),
    prefill_rows=tuple(min(split(r), slots) for r in prefill_rows),
    tokens=tuple(min(t, context) for t in tokens),
    windows=tuple(
      min(pages_of(w), pages_of(context)) * page_size
      for w in (*windows, context)
    ),
    images=tuple(map(split, config.image_buckets)),
    patches=patches,
    steps=config.decode_steps_per_call,
    page_size=page_size,
    fixed_rows=config.is_lockstep,
    copies=(min(split(_COPIES), slots),) if config.shares_prefixes else (),
    drafts=config.draft_tokens if config.uses_drafts else 0,
    always_drafts=config.drafts == "true",
  )
