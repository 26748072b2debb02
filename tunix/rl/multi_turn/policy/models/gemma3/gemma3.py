"""Implements Gemma 3 as a policy, with images or as text alone.

Its decoder differs from Qwen's in norms around attention and MLP, in layers
that see a window of earlier tokens with rotary positions of their own base, and
in images whose tokens see each other: a vision token sees up to the last one of
its image. So a token of a row sees an interval of it, whose ends `last_seen`
and the layer's window give.

Source: Gemma 3 technical report, and `transformers`' `gemma3`, to which the
numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.models.qwen import qwen_decoder
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl


class DecoderLayer(nnx.Module):
  """Attention and MLP, each with a norm before and behind it."""

  def __init__(
    self,
    config: qwen_text_config.AnyConfig,
    init: layers.Init,
    kind: tuple[bool, bool],
    mesh: jax.sharding.Mesh | None,
  ):
    del kind, mesh  # Every layer has attention and a dense MLP.
    text = config.text
    norm = lambda: layers.RMSNorm(
      text.hidden_size, init, text.rms_norm_eps, 1.0
    )
    self.input_layernorm = norm()
    self.self_attn = qwen_decoder.Attention(config, init)
    self.post_attention_layernorm = norm()
    self.pre_feedforward_layernorm = norm()
    self.mlp = layers.GatedMLP(
      text.hidden_size, text.intermediate_size, init, act=layers.gelu_tanh
    )
    self.post_feedforward_layernorm = norm()

  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: qwen_decoder.Rotation,
    mix: qwen_decoder.Mix,
    recur: qwen_decoder.Recur,
  ) -> tuple[jax.Array, Any]:
    del recur
    mixed, cache = self.self_attn(self.input_layernorm(x_BTD), rotation, mix)
    x = x_BTD + self.post_attention_layernorm(mixed)
    out = self.mlp(self.pre_feedforward_layernorm(x))
    return x + self.post_feedforward_layernorm(out), cache


class Decoder(qwen_decoder.Decoder):
  """Embedding, layers of two kinds, final norm."""

  layer_class = DecoderLayer

  def rotations(
    self, positions_BT3: jax.Array
  ) -> Callable[[Any], qwen_decoder.Rotation]:
    text = self.config.text
    full = self.rotation(positions_BT3)
    axes = layers.mrope_axes(text.mrope_section, False)
    local = layers.mrope(
      positions_BT3,
      axes,
      layers.rope_frequencies(2 * len(axes), text.local_rope_theta),
    )
    return lambda layer: local if text.window(layer) else full


class Gemma3Text(qwen_text.QwenText):
  """The decoder alone."""

  decoder_class = Decoder

  def _look_up(self, tokens_BT: base.Array) -> jax.Array:
    x = super()._look_up(tokens_BT)
    # Rounded as transformers rounds it.
    return x * jnp.asarray(self.config.text.hidden_size**0.5, x.dtype)

  def _last_seen(
    self,
    vision_index_BT: base.Array | None,
    segments_BT: jax.Array,
    until_BT: base.Array | None = None,
  ) -> jax.Array | None:
    place = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(place, segments_BT.shape)


class Gemma3(Gemma3Text, qwen_vl.QwenVL):
  """See the module docstring."""

  @property
  def _see_ahead(self) -> int:
    return self.config.whole_image_tokens

  def _last_seen(
    self,
    vision_index_BT: base.Array | None,
    segments_BT: jax.Array,
    until_BT: base.Array | None = None,
  ) -> jax.Array | None:
    if vision_index_BT is None:
      return super()._last_seen(vision_index_BT, segments_BT)
    return last_seen(jnp.asarray(vision_index_BT) >= 0, segments_BT, until_BT)


def last_seen(
  is_image_BT: jax.Array,
  segments_BT: jax.Array,
  until_BT: base.Array | None = None,
) -> jax.Array:
  """Returns int32[B, T]: the last place that a token sees.

  That of a vision token is the last of the run it stands in, within its
  segment; that of any other one is its own.

  Args:
    is_image_BT: bool, vision tokens.
    segments_BT: int32; 0 = padding, which sees nothing later.
    until_BT: int32, see `PolicyInputs.seen_until`; None = no row is a tree.
  """
  t = segments_BT.shape[1]
  place = jnp.arange(t, dtype=jnp.int32)
  is_image_BT &= segments_BT > 0
  after = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
  goes_on = after(is_image_BT) & (after(segments_BT) == segments_BT)
  if until_BT is not None:  # A branch that ends here goes on nowhere.
    goes_on &= jnp.asarray(until_BT) > place + 1
  ends = jnp.where(is_image_BT & ~goes_on, place, t)
  ends = jax.lax.cummin(ends, axis=1, reverse=True)
  return jnp.where(is_image_BT, ends, place)
