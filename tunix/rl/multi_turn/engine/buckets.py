"""The shapes of the engine's calls: which there are, and what needs which."""

from __future__ import annotations

import dataclasses
from typing import Collection, Sequence

import jax
from tunix.rl.multi_turn.engine import programs
from tunix.rl.multi_turn.policy import base

FEATURES = ("details", "grammar")
"""What only some requests ask for, with programs of their own: log-probs of
more than the sampled tokens, and masks of tokens."""


def announced(
    variant: programs.Variant, features: Collection[str]
) -> bool:
  """Whether it is among the variants of these features."""
  return (not variant.details or "details" in features) and (
      not variant.masked or "grammar" in features
  )


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Every shape the engine may compile; all tuples ascend.

  Attributes:
    decode_rows: rows of a decode call; more rows go into further calls.
    prefill_rows: rows of a prefill call, likewise.
    tokens: tokens a row of a prefill call; longer suffixes are chunked.
    windows: cache positions a call may touch; the last is the context length.
    images: images of an encode call.
    patches: patches of an image; larger images are refused. () for a text
      policy.
    steps: tokens a decode call samples at most (K).
    fixed_rows: use only the largest rows and images. Windows and chunks follow
      from a request alone; with this all shapes it meets do, whoever shares
      its batch, and equal requests give results equal to the bit.
  """

  decode_rows: tuple[int, ...]
  prefill_rows: tuple[int, ...]
  tokens: tuple[int, ...]
  windows: tuple[int, ...]
  images: tuple[int, ...]
  patches: tuple[int, ...]
  steps: int
  fixed_rows: bool = False

  def __post_init__(self):
    fixed = ("decode_rows", "prefill_rows", "images")
    for name in (*fixed, "tokens", "windows", "patches"):
      value = tuple(sorted(set(getattr(self, name))))
      if name == "patches" and not value:
        continue  # A text policy: nothing is ever encoded.
      if not value or value[0] < 1:
        raise ValueError(f"{name} buckets must be positive, got {value}")
      if self.fixed_rows and name in fixed:
        value = value[-1:]
      object.__setattr__(self, name, value)
    if self.steps < 1:
      raise ValueError(f"decode_steps_per_call must be >= 1, got {self.steps}")

  def variants(
      self, features: Sequence[str] = ()
  ) -> list[programs.Variant]:
    """All of them, the ones every run needs first; and those of `FEATURES`."""
    found = []
    decodes = [(self.steps, False, False)]
    if "details" in features:
      decodes.append((self.steps, True, False))
    if "grammar" in features:
      decodes.append((1, False, True))
    if set(FEATURES) <= set(features):
      decodes.append((1, True, True))
    for window in reversed(self.windows):
      for rows in reversed(self.decode_rows):
        for steps, *asked in decodes:
          found.append(
              programs.Variant("decode", rows, steps, window, *asked)
          )
      for rows in reversed(self.prefill_rows):
        for tokens in reversed(self.tokens):
          if tokens <= window:
            found.append(programs.Variant("prefill", rows, tokens, window))
    for patches in self.patches:
      for images in self.images:
        found.append(programs.Variant("encode", images, patches))
    return found


def choose(
    processor: base.Processor,
    *,
    slots: int,
    context_length: int,
    page_size: int | None,
    decode_rows: Sequence[int] | None,
    prefill_rows: Sequence[int] | None,
    prefill_buckets: Sequence[int] | None,
    window_buckets: Sequence[int] | None,
    image_buckets: Sequence[int],
    patch_buckets: Sequence[int] | None,
    image_sizes: Sequence[tuple[int, int]],
    steps: int,
    fixed_rows: bool,
) -> tuple[Shapes, int]:
  """The shapes and the page size of an engine, see `RolloutEngine`.

  Raises:
    ValueError: a setting that cannot be.
  """
  per_token = processor.patches_per_token
  image_tokens = [processor.num_image_tokens(*size) for size in image_sizes]
  if patch_buckets is None:
    patch_buckets = {n * per_token for n in image_tokens} or {
        context_length * per_token
    }
  if not per_token:
    patch_buckets = ()
  for patches in patch_buckets:
    if patches % per_token:
      raise ValueError(
          f"patch_buckets holds {patches}, no multiple of the"
          f" {per_token} patches of a vision token"
      )
  on_cpu = jax.default_backend() == "cpu"
  if decode_rows is None:
    decode_rows = (16 if on_cpu else slots,)
  if prefill_rows is None:
    prefill_rows = (8 if on_cpu else slots,)
  if prefill_buckets is None:
    prefill_buckets = (64, 256)
    if on_cpu:
      # A call reads its rows' whole windows: the fewer to a turn, which is a
      # screenshot and some words, the better.
      turn = -(-(max(image_tokens, default=64) + 32) // 32) * 32
      prefill_buckets = (32, min(turn, 256))
  if window_buckets is None:
    parts = min(6 if on_cpu else 2, context_length // 256)
    window_buckets = [context_length * i // parts for i in range(1, parts)]
  if page_size is None:
    page_size = min(min(prefill_buckets), context_length)
  if page_size < 1:
    raise ValueError(f"page_size must be >= 1, got {page_size}")
  # A window is a whole number of pages.
  pages_of = lambda tokens: -(-tokens // page_size)
  shapes = Shapes(
      decode_rows=tuple(min(r, slots) for r in decode_rows),
      prefill_rows=tuple(min(r, slots) for r in prefill_rows),
      tokens=tuple(min(t, context_length) for t in prefill_buckets),
      windows=tuple(
          min(pages_of(w), pages_of(context_length)) * page_size
          for w in (*window_buckets, context_length)
      ),
      images=tuple(image_buckets),
      patches=tuple(patch_buckets),
      steps=steps,
      fixed_rows=fixed_rows,
  )
  return shapes, page_size
