"""Declares TinyVL's sizes and token ids. Does not import JAX itself."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tokenizers
from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.parser.renderer import base_renderer


@dataclasses.dataclass(frozen=True)
class TinyVLConfig:
  """Sizes and token ids.

  Attributes:
    vocab_size: entries of the tokenizer.
    number_start: id of number token "0"; "0".."999" are consecutive.
    image_token_id: placeholder of a vision token.
    pad_token_id: fills rows; never attended to.
    banned_token_ids: ids that must never be sampled; samplers and log-probs
      both exclude them.
    width: D.
    layers, vision_layers: decoder and vision blocks.
    heads, kv_heads, head_dim: of the decoder.
    vision_heads: Heads of the vision blocks, width / vision_heads wide.
    vision_window: reach of vision attention, in tokens to each side.
    mlp, vision_mlp: hidden widths.
    stem: channels of the three convolutions.
    rope_theta: base of the rotary frequencies.
    max_cells: cells of the largest screenshot.
    compute_dtype: dtype of activations and matmuls; parameters, norms,
      softmax and logits are float32.
  """

  vocab_size: int
  number_start: int
  image_token_id: int
  pad_token_id: int
  banned_token_ids: tuple[int, ...]
  width: int = 160
  layers: int = 4
  vision_layers: int = 1
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 40
  vision_heads: int = 4
  vision_window: int = 160
  mlp: int = 320
  vision_mlp: int = 320
  stem: tuple[int, int, int] = (24, 48, 96)
  rope_theta: float = 10_000.0
  max_cells: int = 1600
  compute_dtype: str = "float32"

  def __post_init__(self):
    wrong = [
      text
      for _, text in arguments.takes(TinyVLConfig).wrong(
        dataclasses.asdict(self), "TinyVL"
      )
    ]
    if wrong:
      raise ValueError(wrong[0])
    for name in ("banned_token_ids", "stem"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for name in _COUNTS:
      value = getattr(self, name)
      values = value if isinstance(value, tuple) else (value,)
      if min(values) < 1:
        raise ValueError(f"{name}={value} must be >= 1")
      most = _MOST_LAYERS if "layers" in name else _MOST
      if max(values) > most:
        raise ValueError(f"{name}={value} must be <= {most}")
    if self.rope_theta <= 1:
      raise ValueError(f"rope_theta={self.rope_theta} must be > 1")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even, got {self.head_dim}")
    if self.width % self.vision_heads:
      raise ValueError(
        f"width={self.width} must be a multiple of"
        f" vision_heads={self.vision_heads}"
      )
    if not 0 <= self.number_start <= self.vocab_size - 1000:
      raise ValueError(
        f"number_start={self.number_start} leaves no room for 1000 number"
        f" tokens in a vocabulary of {self.vocab_size}"
      )
    for name in ("image_token_id", "pad_token_id"):
      if not 0 <= getattr(self, name) < self.vocab_size:
        raise ValueError(
          f"{name}={getattr(self, name)} is outside the vocabulary of"
          f" {self.vocab_size}"
        )
    if self.image_token_id not in self.banned_token_ids:
      raise ValueError(
        f"image_token_id={self.image_token_id} must be in banned_token_ids"
      )
    if self.compute_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        "compute_dtype must be 'float32' or 'bfloat16', got"
        f" {self.compute_dtype!r}"
      )


_COUNTS = (
    "vocab_size", "width", "layers", "vision_layers", "heads", "kv_heads",
    "head_dim", "vision_heads", "vision_window", "mlp", "vision_mlp", "stem",
    "max_cells",
)  # fmt: skip

_MOST = 300_000
_MOST_LAYERS = 1000  # Each is an object, and compiled by itself.

SIZES: dict[str, dict[str, Any]] = {
  "tiny": {},
  "nano": dict(
    width=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vision_heads=2,
    mlp=64,
    vision_mlp=64,
    stem=(8, 8, 16),
  ),
}
"""Named sizes: "tiny" is shipped, "nano" is for tests."""


def config_for(
  tokenizer: base_renderer.Tokenizer, size: str = "tiny", **changes
) -> TinyVLConfig:
  """Returns the config of a named size for a tokenizer.

  Args:
    tokenizer: a `tokenizers.Tokenizer`, or a transformers one around it.
    size: a key of SIZES.
    **changes: fields that differ from it.

  Raises:
    ValueError: unknown size, or a tokenizer without consecutive number tokens.
  """
  if size not in SIZES:
    raise ValueError(f"size must be one of {sorted(SIZES)}, got {size!r}")
  backend = base_renderer.backend_of(tokenizer)
  find = functools.partial(_token_id, backend)
  start = find("0")
  for n in range(1000):
    if find(str(n)) != start + n:
      raise ValueError(
        f"token {n} has id {find(str(n))}, expected {start + n}: number"
        " tokens must be consecutive"
      )
  banned = [
    find(t)
    for t in (
      "<|image_pad|>",
      "<|video_pad|>",
      "<|vision_pad|>",
      "<|vision_start|>",
      "<|vision_end|>",
      "<|im_start|>",
      "<|endoftext|>",
    )
  ]
  fields = dict(
    vocab_size=backend.get_vocab_size(),
    number_start=start,
    image_token_id=find("<|image_pad|>"),
    pad_token_id=find("<|endoftext|>"),
    banned_token_ids=tuple(sorted(banned)),
  )
  for _, text in arguments.takes(TinyVLConfig).wrong(changes, "TinyVL"):
    raise ValueError(text)
  return TinyVLConfig(**(fields | SIZES[size] | changes))


def _token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
  number = tokenizer.token_to_id(token)
  if number is None:
    raise ValueError(f"the tokenizer has no token {token!r}")
  return number
