"""Implements the decoder of Qwen2(-VL) to Qwen3.5 and of GLM-4.1V and 4.5V.

Reads like the forward pass: attention, a layer, the stack. The families differ
in where q, k and v get a bias (Qwen2, Qwen2.5) or a norm (Qwen3), in how the
three rotary axes share a head's frequencies, in layers of linear attention
(Qwen3.5), in mixtures of experts, and in norms behind attention and MLP
(GLM-4.1V); the configuration decides.

Layers lie in a list (unrolled), or stacked along a leading axis of each
parameter and run by one scan, which compiles in a fraction of the time.

Axis names: see `base`; and L = layers.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import experts
from tunix.rl.multi_turn.policy.layers import linear_attention
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

Rotation = tuple[jax.Array, jax.Array]
Mix = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(q [B, T, N, H], k, v [B, T, K, H]) -> (attended [B, T, N, H], cache)."""
Recur = Callable[
  [linear_attention.GatedDeltaNet, jax.Array], tuple[jax.Array, Any]
]
"""(linear attention, x [B, T, D]) -> (mixed [B, T, D], cache)."""


def _norm(
  config: qwen_text_config.AnyConfig, width: int, init: layers.Init
) -> layers.RMSNorm:
  offset = 1.0 if config.traits.offset_norms else 0.0
  return layers.RMSNorm(width, init, config.text.rms_norm_eps, offset)


class Attention(nnx.Module):
  """Grouped-query attention; `mix` decides which tokens attend to which."""

  def __init__(self, config: qwen_text_config.AnyConfig, init: layers.Init):
    text = config.text
    self.head_dim = text.head_dim
    self.gated = config.traits.linear
    self.rotary_pairs = config.traits.rotary_pairs
    # Kernels divide scores by the root of the heads' width.
    scalar = text.query_pre_attn_scalar or text.head_dim
    self.query_scale = (text.head_dim / scalar) ** 0.5
    width = text.hidden_size
    q_width = text.num_attention_heads * text.head_dim
    kv_width = text.num_key_value_heads * text.head_dim
    bias = config.traits.qkv_bias
    into, back = ("fsdp", "tensor"), ("tensor", "fsdp")
    self.q_proj = layers.Linear(
      width, q_width * (1 + self.gated), init, into, bias
    )
    self.k_proj = layers.Linear(width, kv_width, init, into, bias)
    self.v_proj = layers.Linear(width, kv_width, init, into, bias)
    self.o_proj = layers.Linear(q_width, width, init, back, False)
    normed = config.traits.qk_norm
    self.q_norm = _norm(config, text.head_dim, init) if normed else None
    self.k_norm = _norm(config, text.head_dim, init) if normed else None

  def __call__(
    self, x_BTD: jax.Array, rotation: Rotation, mix: Mix
  ) -> tuple[jax.Array, Any]:
    b, t, _ = x_BTD.shape
    q = self.q_proj(x_BTD).reshape(b, t, -1, self.head_dim * (1 + self.gated))
    q, gate = q[..., : self.head_dim], q[..., self.head_dim :]
    k = self.k_proj(x_BTD).reshape(b, t, -1, self.head_dim)
    v = self.v_proj(x_BTD).reshape(b, t, -1, self.head_dim)
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    q = layers.rotate(q, *rotation, self.rotary_pairs)
    k = layers.rotate(k, *rotation, self.rotary_pairs)
    if self.query_scale != 1.0:
      q = q * jnp.asarray(self.query_scale, q.dtype)
    mixed, cache = mix(q, k, v)
    if self.gated:
      mixed = mixed * jax.nn.sigmoid(gate)
    return self.o_proj(mixed.reshape(b, t, -1)), cache


# --- layers ----------------------------------------------------------------


class DecoderLayer(nnx.Module):
  def __init__(
    self,
    config: qwen_text_config.AnyConfig,
    init: layers.Init,
    kind: tuple[bool, bool],
    mesh: jax.sharding.Mesh | None,
  ):
    text, (linear, sparse) = config.text, kind
    self.input_layernorm = _norm(config, text.hidden_size, init)
    if linear:
      self.linear_attn = linear_attention.GatedDeltaNet(text, init, mesh)
    else:
      self.self_attn = Attention(config, init)
    self.is_linear = linear
    self.post_attention_layernorm = _norm(config, text.hidden_size, init)
    sandwich = config.traits.sandwich
    width = text.hidden_size
    self.post_self_attn_layernorm = (
      _norm(config, width, init) if sandwich else None
    )
    self.post_mlp_layernorm = _norm(config, width, init) if sandwich else None
    if sparse:
      self.mlp: Any = experts.SparseMLP(
        text, init, mesh, config.traits.sigmoid_router
      )
    elif config.traits.fused_mlp:
      self.mlp = layers.FusedMLP(width, text.intermediate_size, init)
    else:
      self.mlp = layers.GatedMLP(text.hidden_size, text.intermediate_size, init)

  def __call__(
    self, x_BTD: jax.Array, rotation: Rotation, mix: Mix, recur: Recur
  ) -> tuple[jax.Array, Any]:
    x = self.input_layernorm(x_BTD)
    if self.is_linear:
      mixed, cache = recur(self.linear_attn, x)
    else:
      mixed, cache = self.self_attn(x, rotation, mix)
    if self.post_self_attn_layernorm is not None:
      mixed = self.post_self_attn_layernorm(mixed)
    x = x_BTD + mixed
    out = self.mlp(self.post_attention_layernorm(x))
    if self.post_mlp_layernorm is not None:
      out = self.post_mlp_layernorm(out)
    return x + out, cache


class Decoder(nnx.Module):
  """Embedding, layers, final norm.

  Attributes:
    layers: a list, or one `DecoderLayer` with stacked parameters.
    layer_class: Class of the layers.
  """

  layer_class: Any = DecoderLayer

  def __init__(
    self,
    config: qwen_text_config.AnyConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None,
  ):
    text = config.text
    self.config = config
    self.mesh = mesh
    # Over both model axes: a lookup in the local part and a sum over devices
    # move activations, where gathering the table would move all of it.
    self.embed_tokens = layers.Embedding(
      text.vocab_size, text.hidden_size, init, (("fsdp", "tensor"), None)
    )
    kinds = [
      (text.is_linear(i), text.is_sparse(i))
      for i in range(text.num_hidden_layers)
    ]
    self.stacked = (
      config.scan_layers and len(set(kinds)) == 1 and not text.sliding_window
    )
    if self.stacked:
      stack = layers.Init(
        init.rngs, init.dtype, init.std, (text.num_hidden_layers,)
      )
      self.layers = self.layer_class(config, stack, kinds[0], mesh)
    else:
      self.layers = nnx.List(
        [self.layer_class(config, init, kind, mesh) for kind in kinds]
      )
    self.norm = _norm(config, text.hidden_size, init)

  def rotation(self, positions_BT3: jax.Array) -> Rotation:
    text = self.config.text
    axes = layers.mrope_axes(text.mrope_section, self.config.traits.interleaved)
    frequencies = layers.rope_frequencies(2 * len(axes), text.rope_theta)
    scaling = text.rope_scaling
    if scaling is None:
      return layers.mrope(positions_BT3, axes, frequencies)
    cos, sin = layers.mrope(
      positions_BT3, axes, scaling.scaled(frequencies, text.rope_theta)
    )
    return cos * scaling.attention_factor, sin * scaling.attention_factor

  def rotations(self, positions_BT3: Any) -> Callable[[Any], Rotation]:
    """Returns the rotary positions of each layer, by its number."""
    rotation = self.rotation(positions_BT3)
    return lambda layer: rotation

  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT3: Any,
    mix: Callable[..., tuple[jax.Array, Any]],
    recur: Callable[..., tuple[jax.Array, Any]],
    cache: object = None,
    early: tuple[jax.Array, ...] = (),
  ) -> tuple[jax.Array, Any]:
    """Runs all layers.

    Args:
      x_BTD: embedded tokens.
      positions_BT3: rotary positions.
      mix: (q, k, v, cache, layer) -> (attended, new cache); the layer is an
        int, or an int32 scalar where layers are stacked.
      recur: (linear attention, x, cache, layer) -> (mixed, new cache).
      cache: goes through all layers, None without a cache.
      early: [B, T, D] each, added after the first layers (deepstack).

    Returns:
      Hidden states after the final norm, and the new cache.
    """
    rotations = self.rotations(positions_BT3)
    # Only training rematerialises, and it runs without a cache.
    wrap = layers.remat(self.config.remat) if cache is None else (lambda f: f)

    def run(layer, x, extra, cache, i):
      x, cache = layer(
        x,
        rotations(i),
        lambda q, k, v: mix(q, k, v, cache, i),
        lambda net, x: recur(net, x, cache, i),
      )
      x = x if extra is None else x + extra
      return sharding.constrain(x, self.mesh, *sharding.TOKENS), cache

    x = x_BTD
    if not self.stacked:
      kinds: dict[int, Any] = {}
      for i, layer in enumerate(self.layers):
        extra = early[i] if i < len(early) else None
        one = functools.partial(run, i=i)
        if cache is None:
          # Then its number says no more than its kind: layers of one kind
          # share a function, which is traced once.
          one = kinds.setdefault(self.config.text.window(i), wrap(one))
        x, cache = one(layer, x, extra, cache)
      return self.norm(x), cache
    # The first layers get something added, and a scan wants all steps alike:
    # two scans. Unrolled, the first ones' activations would be computed again
    # for the backward pass all at a time.
    run = wrap(run)
    graph, state = nnx.split(self.layers)
    n = len(early)

    def step(carry, one):
      x, cache = carry
      layer_state, extra, i = one
      return run(nnx.merge(graph, layer_state), x, extra, cache, i), None

    order = jnp.arange(self.config.text.num_hidden_layers)
    for some, extra in (
      (slice(0, n), jnp.stack(early) if n else None),
      (slice(n, None), None),
    ):
      if some.start == some.stop:
        continue
      part = jax.tree.map(lambda p, at=some: p[at], state)
      (x, cache), _ = jax.lax.scan(step, (x, cache), (part, extra, order[some]))
    return self.norm(x), cache
