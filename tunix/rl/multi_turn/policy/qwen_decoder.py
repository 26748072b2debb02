"""Implements the decoder of Qwen2(-VL) to Qwen3.5 and of GLM-4.1V.

Reads like the forward pass: attention, the mixture of experts, a layer, the
stack. The families differ in where q, k and v get a bias (Qwen2, Qwen2.5) or a
norm (Qwen3), in how the three rotary axes share a head's frequencies, in
layers of linear attention (Qwen3.5), in mixtures of experts, and in norms
behind attention and MLP (GLM-4.1V); the configuration decides.

Layers lie in a list (unrolled), or stacked along a leading axis of each
parameter and run by one scan, which compiles in a fraction of the time.

Axis names: see `base`; and L = layers, E = experts, I = hidden units, X =
(token, expert) pairs.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import linear_attention
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import qwen_text_config
from tunix.rl.multi_turn.policy import sharding

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
  offset = 1.0 if config.traits.linear else 0.0
  return layers.RMSNorm(width, init, config.text.rms_norm_eps, offset)


class Attention(nnx.Module):
  """Grouped-query attention; `mix` decides which tokens attend to which."""

  def __init__(self, config: qwen_text_config.AnyConfig, init: layers.Init):
    text = config.text
    self.head_dim = text.head_dim
    self.gated = config.traits.linear
    self.rotary_pairs = config.traits.rotary_pairs
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
    if self.q_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    q = layers.rotate(q, *rotation, self.rotary_pairs)
    k = layers.rotate(k, *rotation, self.rotary_pairs)
    mixed, cache = mix(q, k, v)
    if self.gated:
      mixed = mixed * jax.nn.sigmoid(gate)
    return self.o_proj(mixed.reshape(b, t, -1)), cache


# --- mixture of experts ----------------------------------------------------


class Router(nnx.Module):
  """Chooses experts and their weights, which add up to 1."""

  def __init__(self, text: qwen_config.TextConfig, init: layers.Init):
    self.weight = init.normal(
        (text.hidden_size, text.num_experts), ("fsdp", None), transposed=True
    )
    self.top_k = text.num_experts_per_tok

  def __call__(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = kernels.dot(x_TD, self.weight[...])
    chances = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(chances, self.top_k)
    weights /= weights.sum(-1, keepdims=True)
    return weights.astype(x_TD.dtype), experts


class Experts(nnx.Module):
  """All experts of a layer; each [in, out], as in the checkpoint."""

  def __init__(self, text: qwen_config.TextConfig, init: layers.Init):
    count, width = text.num_experts, text.hidden_size
    hidden = text.moe_intermediate_size
    # Gate and up lie side by side on the last axis: split over "tensor" they
    # would come apart, so the axis of experts is split instead.
    self.gate_up_proj = init.normal(
        (count, width, 2 * hidden), ("tensor", "fsdp", None)
    )
    self.down_proj = init.normal(
        (count, hidden, width), ("tensor", None, "fsdp")
    )
    self.gate_up_proj_scale = nnx.data(None)
    self.down_proj_scale = nnx.data(None)

  def matrices(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Gate and up [E, D, 2 I], down [E, I, D]; of an int8 copy restored."""
    return tuple(
        weight[...].astype(dtype)
        if scale is None
        else (weight[...] * scale[...]).astype(dtype)
        for weight, scale in (
            (self.gate_up_proj, self.gate_up_proj_scale),
            (self.down_proj, self.down_proj_scale),
        )
    )


class Gate(nnx.Module):
  """sigmoid(x @ weight), a number for each token [B, T, 1]."""

  def __init__(self, width: int, init: layers.Init):
    self.weight = init.normal((width, 1), ("fsdp", None), transposed=True)

  def __call__(self, x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(kernels.dot(x, self.weight[...]))


class SparseMLP(nnx.Module):
  """Each token goes through its top-k experts, and a shared one if any.

  Pairs of token and expert are sorted by expert, so that the experts' products
  are one grouped matrix product each, and no token is ever dropped. With a
  mesh, every device computes its own rows' pairs with its own experts, and the
  results are summed over `tensor`.
  """

  def __init__(
      self,
      text: qwen_config.TextConfig,
      init: layers.Init,
      mesh: jax.sharding.Mesh | None,
  ):
    self.gate = Router(text, init)
    self.experts = Experts(text, init)
    self.mesh = mesh
    shared = text.shared_expert_intermediate_size
    if shared:
      self.shared_expert = layers.GatedMLP(text.hidden_size, shared, init)
      self.shared_expert_gate = Gate(text.hidden_size, init)
    else:
      self.shared_expert = self.shared_expert_gate = None

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    chosen = self._chosen(x_BTD)
    if self.shared_expert is None:
      return chosen
    share = self.shared_expert_gate(x_BTD)
    return chosen + share * self.shared_expert(x_BTD)

  def _chosen(self, x_BTD: jax.Array) -> jax.Array:
    """What the chosen experts give."""
    b, t, d = x_BTD.shape
    weights, experts = self.gate(x_BTD.reshape(-1, d))
    k = weights.shape[-1]
    up, down = self.experts.matrices(x_BTD.dtype)
    args = (x_BTD, weights.reshape(b, t, k), experts.reshape(b, t, k), up, down)
    mesh, count = self.mesh, up.shape[0]
    if mesh is None or not (
        b % sharding.batch_shards(mesh) == 0
        and t % mesh.shape["sequence"] == 0
        and count % mesh.shape["tensor"] == 0
    ):
      return _through_experts(*args, first=0)
    P = jax.sharding.PartitionSpec
    share = count // mesh.shape["tensor"]

    def local(*args):
      first = jax.lax.axis_index("tensor") * share
      return jax.lax.psum(_through_experts(*args, first=first), "tensor")

    batch, split = P(*sharding.TOKENS), P("tensor")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(batch, batch, batch, split, split),
        out_specs=batch,
        check_vma=False,
    )(*args)


def _through_experts(
    x_BTD: jax.Array,
    weights_BTK: jax.Array,
    experts_BTK: jax.Array,
    up_EDI: jax.Array,
    down_EID: jax.Array,
    first: int | jax.Array,
) -> jax.Array:
  """Sum over the experts first, first + 1, … of those a token has chosen."""
  b, t, d = x_BTD.shape
  k = weights_BTK.shape[-1]
  count = up_EDI.shape[0]
  chosen = experts_BTK.reshape(-1) - first
  mine = (chosen >= 0) & (chosen < count)
  chosen = jnp.where(mine, chosen, count)  # Sorts last, behind all groups.
  order = jnp.argsort(chosen, stable=True)
  sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
  x_XD = x_BTD.reshape(-1, d)[order // k]
  both = jax.lax.ragged_dot(x_XD, up_EDI, sizes)
  gate, up = jnp.split(both, 2, axis=-1)
  y_XD = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down_EID, sizes)
  weight = jnp.where(mine, weights_BTK.reshape(-1), 0)[order]
  # Rows behind the last group are not computed, so they may hold anything.
  y_XD = jnp.where(weight[:, None] != 0, y_XD * weight[:, None], 0)
  summed = jnp.zeros((b * t, d), jnp.float32).at[order // k].add(
      y_XD.astype(jnp.float32)
  )
  return summed.astype(x_BTD.dtype).reshape(b, t, d)


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
      self.mlp = SparseMLP(text, init, mesh)
    elif config.traits.fused_mlp:
      self.mlp = layers.FusedMLP(width, text.intermediate_size, init)
    else:
      self.mlp = layers.GatedMLP(
          text.hidden_size, text.intermediate_size, init
      )

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
  """

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
    self.stacked = config.scan_layers and len(set(kinds)) == 1
    if self.stacked:
      stack = layers.Init(
          init.rngs, init.dtype, init.std, (text.num_hidden_layers,)
      )
      self.layers = DecoderLayer(config, stack, kinds[0], mesh)
    else:
      self.layers = nnx.List(
          [DecoderLayer(config, init, kind, mesh) for kind in kinds]
      )
    self.norm = _norm(config, text.hidden_size, init)

  def rotation(self, positions_BT3: jax.Array) -> Rotation:
    text = self.config.text
    axes = layers.mrope_axes(
        text.mrope_section, self.config.traits.interleaved
    )
    frequencies = layers.rope_frequencies(2 * len(axes), text.rope_theta)
    scaling = text.rope_scaling
    if scaling is None:
      return layers.mrope(positions_BT3, axes, frequencies)
    cos, sin = layers.mrope(
        positions_BT3, axes, scaling.scaled(frequencies, text.rope_theta)
    )
    return cos * scaling.attention_factor, sin * scaling.attention_factor

  def __call__(
      self,
      x_BTD: jax.Array,
      positions_BT3: jax.Array,
      mix: Callable[..., tuple[jax.Array, Any]],
      recur: Callable[..., tuple[jax.Array, Any]],
      cache: Any = None,
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
    rotation = self.rotation(positions_BT3)
    # Only training rematerialises, and it runs without a cache.
    wrap = layers.remat(self.config.remat) if cache is None else (lambda f: f)

    def run(layer, x, extra, cache, i):
      x, cache = layer(
          x,
          rotation,
          lambda q, k, v: mix(q, k, v, cache, i),
          lambda net, x: recur(net, x, cache, i),
      )
      x = x if extra is None else x + extra
      return sharding.constrain(x, self.mesh, *sharding.TOKENS), cache

    run = wrap(run)
    x = x_BTD
    if not self.stacked:
      for i, layer in enumerate(self.layers):
        extra = early[i] if i < len(early) else None
        x, cache = run(layer, x, extra, cache, i)
      return self.norm(x), cache
    # The first layers get something added, and a scan wants all steps alike:
    # two scans. Unrolled, the first ones' activations would be computed again
    # for the backward pass all at a time.
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
      ours = jax.tree.map(lambda p, at=some: p[at], state)
      (x, cache), _ = jax.lax.scan(
          step, (x, cache), (ours, extra, order[some])
      )
    return self.norm(x), cache
