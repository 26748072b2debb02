"""Implements TinyVL, a vision-language policy of two million parameters.

Reads top to bottom like the forward pass: geometry, stem and merger, vision
blocks, embedding of tokens, decoder, logits. Two ideas make a model of this
size learn to point in minutes:

- A convolutional stem sees glyph strokes before cells become tokens.
- Number tokens 0..999 and screen positions share one geometry. A smooth basis
  f: [0, 1] -> R^F describes a position on an axis; a cell at (x, y) carries
  W_x f(x) + W_y f(y), number token n carries W_n f(n), and the logit of n is
  a product of f(n) and the hidden state's part along W_x or W_y. To point is
  to copy the position of the cell that is looked at.

Promises: a token attends to earlier tokens of its own segment only, a vision
token to its own image only; `extend` equals the full forward pass.

Vision attention spans `vision_window` tokens to both sides in raster order:
all of a screenshot up to that many cells, a band of it beyond, so that the
cost is linear in the buffer.

Axis names: see `base`; and N = query heads, G = query heads a KV head,
E = features of the axis basis.
"""

from __future__ import annotations

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl_config
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

TinyVLConfig = tiny_vl_config.TinyVLConfig
SIZES = tiny_vl_config.SIZES
config_for = tiny_vl_config.config_for

Cache = tuple[tuple[jax.Array, jax.Array], ...]


# --- geometry ---------------------------------------------------------------

_COARSE, _FINE = 16, 48
AXIS_FEATURES = _COARSE + _FINE


def axis_features(u: jax.Array) -> jax.Array:
  """Smooth basis of positions on an axis: [...] in [0, 1] to [..., E].

  Gaussian bumps at two scales; each scale has norm 1/sqrt(2), so that the
  product of two positions' features is 1 where they coincide. Positions
  outside [0, 1] count as the nearest inside.
  """
  u = jnp.clip(u, 0.0, 1.0)
  parts = []
  for count in (_COARSE, _FINE):
    centres = jnp.linspace(0.0, 1.0, count)
    bumps = jnp.exp(-0.5 * ((u[..., None] - centres) * count) ** 2)
    norm = jnp.linalg.norm(bumps, axis=-1, keepdims=True)
    parts.append(bumps / (math.sqrt(2.0) * norm))
  return jnp.concatenate(parts, axis=-1)


def number_features() -> jax.Array:
  """Returns float32[1000, E], features of number n at (n + 0.5) / 1000."""
  return axis_features((jnp.arange(1000, dtype=jnp.float32) + 0.5) / 1000)


# --- small parts ------------------------------------------------------------


def _param(
  rngs: random_keys.Source,
  shape: tuple[int, ...],
  std: float,
  axes: tuple[str | None, ...],
) -> nnx.Param:
  """Draws a normal parameter; `axes` names each dimension's mesh axis."""
  value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
  return nnx.Param(value, axes=axes)


def _ones(*shape: int) -> nnx.Param:
  return nnx.Param(jnp.ones(shape, jnp.float32), axes=(None,) * len(shape))


def _zeros(*shape: int) -> nnx.Param:
  return nnx.Param(jnp.zeros(shape, jnp.float32), axes=(None,) * len(shape))


def _dot(x: jax.Array, kernel: nnx.Param) -> jax.Array:
  return kernels.dot(x, kernel[...])


def _rms_norm(x: jax.Array, scale: nnx.Param) -> jax.Array:
  wide = x.astype(jnp.float32)
  wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
  return (wide * scale[...]).astype(x.dtype)


def _rope(
  x_BTNH: jax.Array, positions_BT: jax.Array, theta: float
) -> jax.Array:
  """Rotates the two halves of each head by position."""
  half = x_BTNH.shape[-1] // 2
  frequencies = theta ** (-np.arange(half, dtype=np.float32) / half)
  angle = positions_BT[..., None, None].astype(jnp.float32) * frequencies
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x_BTNH[..., :half], x_BTNH[..., half:]
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)


# --- stem and merger ----------------------------------------------------------


class Stem(nnx.Module):
  """uint8 cells with halo to one vector each: three convolutions and an MLP.

  Written as reshapes and matmuls: XLA's convolution gradients are slow on
  CPU, and no stride here overlaps except in the second convolution.
  """

  def __init__(self, config: TinyVLConfig, rngs: random_keys.Source):
    c1, c2, c3 = config.stem
    width = config.width
    self.dtype = jnp.dtype(config.compute_dtype)
    # 24x24x3 -> 6x6xC1, kernel 4, stride 4.
    self.conv1 = _param(rngs, (48, c1), 48**-0.5, (None, None))
    self.bias1 = _zeros(c1)
    # 6x6xC1 -> 4x4xC2, kernel 3: the halo is used up here.
    self.conv2 = _param(rngs, (9 * c1, c2), (2 / (9 * c1)) ** 0.5, (None, None))
    self.bias2 = _zeros(c2)
    # 4x4xC2 -> 2x2xC3, kernel 2, stride 2.
    self.conv3 = _param(rngs, (4 * c2, c3), (2 / (4 * c2)) ** 0.5, (None, None))
    self.bias3 = _zeros(c3)
    # The merger: 2x2 of them are one vision token.
    self.norm = _ones(c3)
    self.up = _param(
      rngs, (4 * c3, 2 * width), (4 * c3) ** -0.5, ("fsdp", "tensor")
    )
    self.down = _param(
      rngs, (2 * width, width), (2 * width) ** -0.5, ("tensor", "fsdp")
    )

  def __call__(self, patches_SPF: jax.Array) -> jax.Array:
    s, p, _ = patches_SPF.shape
    x = (patches_SPF.astype(jnp.float32) / 127.5 - 1.0).astype(self.dtype)
    x = x.reshape(s, p, 6, 4, 6, 4, 3).transpose(0, 1, 2, 4, 3, 5, 6)
    x = x.reshape(s, p, 6, 6, 48)
    x = jax.nn.gelu(_dot(x, self.conv1) + self.bias1[...].astype(x.dtype))
    x = jnp.concatenate(
      [x[:, :, i : i + 4, j : j + 4] for i in range(3) for j in range(3)],
      axis=-1,
    )
    x = jax.nn.gelu(_dot(x, self.conv2) + self.bias2[...].astype(x.dtype))
    x = x.reshape(s, p, 2, 2, 2, 2, -1).transpose(0, 1, 2, 4, 3, 5, 6)
    x = x.reshape(s, p, 2, 2, -1)
    x = _dot(x, self.conv3) + self.bias3[...].astype(x.dtype)
    x = _rms_norm(x, self.norm).reshape(s, p, -1)
    return _dot(jax.nn.gelu(_dot(x, self.up)), self.down)


# --- vision blocks ------------------------------------------------------------


class VisionBlock(nnx.Module):
  """Pre-norm attention within an image, both directions, and an MLP."""

  def __init__(self, config: TinyVLConfig, rngs: random_keys.Source):
    width, hidden = config.width, config.vision_mlp
    self.heads = config.vision_heads
    self.window = config.vision_window
    residual = (2 * config.vision_layers) ** -0.5
    self.norm1 = _ones(width)
    self.qkv = _param(rngs, (width, 3 * width), width**-0.5, ("fsdp", "tensor"))
    self.out = _param(
      rngs, (width, width), residual * width**-0.5, ("tensor", "fsdp")
    )
    self.norm2 = _ones(width)
    self.up = _param(rngs, (width, hidden), width**-0.5, ("fsdp", "tensor"))
    self.down = _param(
      rngs, (hidden, width), residual * hidden**-0.5, ("tensor", "fsdp")
    )

  def __call__(self, x_SPD: jax.Array, segments_SP: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    qkv = _dot(_rms_norm(x_SPD, self.norm1), self.qkv)
    qkv = qkv.reshape(s, p, 3, self.heads, -1)
    mixed = kernels.image_attention(
      qkv[:, :, 0],
      qkv[:, :, 1],
      qkv[:, :, 2],
      segments_SP,
      self.window,
      cut=True,
    )
    x = x_SPD + _dot(mixed.reshape(s, p, -1), self.out)
    hidden = jax.nn.gelu(_dot(_rms_norm(x, self.norm2), self.up))
    return x + _dot(hidden, self.down)


# --- decoder ------------------------------------------------------------------


class DecoderBlock(nnx.Module):
  """Grouped-query attention with RoPE and QK-norm, then SwiGLU."""

  def __init__(self, config: TinyVLConfig, rngs: random_keys.Source):
    self.config = config
    width, head = config.width, config.head_dim
    q_width, kv_width = config.heads * head, config.kv_heads * head
    residual = (2 * config.layers) ** -0.5
    self.norm1 = _ones(width)
    self.q = _param(rngs, (width, q_width), width**-0.5, ("fsdp", "tensor"))
    self.k = _param(rngs, (width, kv_width), width**-0.5, ("fsdp", "tensor"))
    self.v = _param(rngs, (width, kv_width), width**-0.5, ("fsdp", "tensor"))
    self.q_norm = _ones(head)
    self.k_norm = _ones(head)
    self.out = _param(
      rngs, (q_width, width), residual * q_width**-0.5, ("tensor", "fsdp")
    )
    self.norm2 = _ones(width)
    self.gate = _param(
      rngs, (width, config.mlp), width**-0.5, ("fsdp", "tensor")
    )
    self.up = _param(rngs, (width, config.mlp), width**-0.5, ("fsdp", "tensor"))
    self.down = _param(
      rngs, (config.mlp, width), residual * config.mlp**-0.5, ("tensor", "fsdp")
    )

  def project(
    self, x_BTD: jax.Array, positions_BT: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H]."""
    c = self.config
    b, t, _ = x_BTD.shape
    x = _rms_norm(x_BTD, self.norm1)
    q = _dot(x, self.q).reshape(b, t, c.heads, c.head_dim)
    k = _dot(x, self.k).reshape(b, t, c.kv_heads, c.head_dim)
    v = _dot(x, self.v).reshape(b, t, c.kv_heads, c.head_dim)
    q = _rope(_rms_norm(q, self.q_norm), positions_BT, c.rope_theta)
    k = _rope(_rms_norm(k, self.k_norm), positions_BT, c.rope_theta)
    return q, k, v

  def finish(self, x_BTD: jax.Array, mixed_BTNH: jax.Array) -> jax.Array:
    b, t, _ = x_BTD.shape
    x = x_BTD + _dot(mixed_BTNH.reshape(b, t, -1), self.out)
    y = _rms_norm(x, self.norm2)
    hidden = jax.nn.silu(_dot(y, self.gate)) * _dot(y, self.up)
    return x + _dot(hidden, self.down)


# --- the policy ---------------------------------------------------------------


class TinyVL(nnx.Module):
  """See the module docstring; implements `base.Policy`."""

  supports_tree = True
  vision_modules = ("stem", "vision_blocks", "vision_norm")

  def __init__(self, config: TinyVLConfig, rngs: random_keys.Source):
    self.config = config
    d, e = config.width, AXIS_FEATURES
    self.stem = Stem(config, rngs)
    # Positions: f(u) has norm 1, so each axis adds variance 1 / D.
    self.axis_x = _param(rngs, (e, d), d**-0.5, (None, "fsdp"))
    self.axis_y = _param(rngs, (e, d), d**-0.5, (None, "fsdp"))
    self.axis_number = _param(rngs, (e, d), d**-0.5, (None, "fsdp"))
    self.vision_blocks = nnx.List(
      [VisionBlock(config, rngs) for _ in range(config.vision_layers)]
    )
    self.vision_norm = _ones(d)
    self.embedding = _param(
      rngs, (config.vocab_size, d), d**-0.5, ("tensor", "fsdp")
    )
    self.blocks = nnx.List(
      [DecoderBlock(config, rngs) for _ in range(config.layers)]
    )
    self.norm = _ones(d)
    # How much a hidden state asks for an x, for a y.
    self.axis_gate = _param(rngs, (d, 2), d**-0.5, (None, None))

  def __call__(self, inputs: base.PolicyInputs) -> jax.Array:
    vision = self.encode_images(
      inputs.patches, inputs.patch_segments, inputs.patch_positions
    )
    x = self._embed(inputs.tokens, inputs.vision_index, vision)
    segments = jnp.asarray(inputs.segment_ids)
    for block in self.blocks:
      q, k, v = block.project(x, jnp.asarray(inputs.positions)[..., 0])
      mixed = kernels.causal_attention(q, k, v, segments, inputs.seen_until)
      x = block.finish(x, mixed)
    return _rms_norm(x, self.norm)

  def encode_images(
    self,
    patches: base.Array,
    patch_segments: base.Array,
    patch_positions: base.Array,
  ) -> jax.Array:
    if patches.shape[1] == 0:
      raise ValueError("a patch buffer needs at least one (padding) patch")
    x = self.stem(jnp.asarray(patches))
    unit = 1.0 / vision_inputs.POSITION_UNIT
    f = axis_features(jnp.asarray(patch_positions, jnp.float32) * unit)
    f = f.astype(x.dtype)
    place = _dot(f[..., 0, :], self.axis_y) + _dot(f[..., 1, :], self.axis_x)
    x = x + place * math.sqrt(self.config.width)
    for block in self.vision_blocks:
      x = block(x, jnp.asarray(patch_segments))
    return x

  def init_cache(self, batch: int, length: int) -> Cache:
    c = self.config
    dtype = jnp.dtype(c.compute_dtype)
    return tuple(
      cached_attention.init_rows(batch, length, c.kv_heads, c.head_dim, dtype)
      for _ in range(c.layers)
    )

  def extend(
    self,
    tokens: base.Array,
    positions: base.Array,
    starts: base.Array,
    lengths: base.Array,
    cache: Cache,
    vision_index: base.Array | None = None,
    vision: base.Array | None = None,
  ) -> tuple[jax.Array, Cache]:
    x = self._embed(tokens, vision_index, vision)
    new_cache = []
    for block, entry in zip(self.blocks, cache, strict=True):
      q, k, v = block.project(x, jnp.asarray(positions)[..., 0])
      mixed, entry = cached_attention.attend_rows(
        q, k, v, entry, starts, lengths
      )
      new_cache.append(entry)
      x = block.finish(x, mixed)
    return _rms_norm(x, self.norm), tuple(new_cache)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns float32[..., vocabulary].

    Row n of the numbers is free row + W_n f(n), as on the input side, and
    <f(n), h W_x> and <f(n), h W_y> are added as far as h asks for an axis.
    """
    c = self.config
    logits = hidden @ self.embedding[...].T.astype(hidden.dtype)
    gate = jax.nn.sigmoid(_dot(hidden, self.axis_gate))
    place = (
      hidden @ self.axis_number[...].T.astype(hidden.dtype)
      + gate[..., :1] * (hidden @ self.axis_x[...].T.astype(hidden.dtype))
      + gate[..., 1:] * (hidden @ self.axis_y[...].T.astype(hidden.dtype))
    )
    numbers = place @ number_features().T.astype(hidden.dtype)
    after = c.vocab_size - c.number_start - 1000
    pads = [(0, 0)] * (hidden.ndim - 1) + [(c.number_start, after)]
    return logits.astype(jnp.float32) + jnp.pad(
      numbers.astype(jnp.float32), pads
    )

  def _embed(
    self,
    tokens_BT: base.Array,
    vision_index_BT: base.Array | None,
    vision_SVD: base.Array | None,
  ) -> jax.Array:
    """Returns [B, T, D] from token rows, vision tokens at their indices."""
    c = self.config
    dtype = jnp.dtype(c.compute_dtype)
    tokens_BT = jnp.asarray(tokens_BT)
    x = self.embedding[...][tokens_BT].astype(dtype)
    n = tokens_BT - c.number_start
    is_number = (n >= 0) & (n < 1000)
    place = axis_features((n.astype(jnp.float32) + 0.5) / 1000)
    place = jnp.where(is_number[..., None], place, 0.0).astype(dtype)
    x = (x + _dot(place, self.axis_number)) * math.sqrt(c.width)
    if vision_index_BT is None or vision_SVD is None:
      return x
    b, t = tokens_BT.shape
    s = vision_SVD.shape[0]
    index = jnp.asarray(vision_index_BT).reshape(s, b // s * t)
    vision_BTD = jax.vmap(lambda v, i: v[i])(vision_SVD, jnp.maximum(index, 0))
    vision_BTD = _rms_norm(vision_BTD, self.vision_norm).astype(dtype)
    return jnp.where(
      vision_index_BT[..., None] >= 0, vision_BTD.reshape(b, t, -1), x
    )
