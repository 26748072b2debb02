"""Implements Qwen2.5's and Qwen3's text models as policies.

`QwenText` implements `base.Policy` on `qwen_decoder`: cache, pages, logits.
`qwen_vl.QwenVL` adds a vision tower to it. A text policy has no images: it
makes no vision tokens and reads none.

Promises: a token attends to earlier tokens of its own segment only; `extend`
equals the full forward pass; with a mesh neither the embedding nor the logits
are ever gathered whole on a device.

Axis names: see `base`.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.layers import linear_attention
from tunix.rl.multi_turn.policy.models.qwen import qwen_decoder
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

_VOCABULARY = sharding.MODEL_AXES

Cache = tuple[tuple[jax.Array, jax.Array], ...] | tuple[jax.Array, jax.Array]
"""A cache of each layer as of `init_rows`, or one of all, [L, …]; of a layer
of linear attention, its `linear_attention.State`."""


class QwenText(nnx.Module):
  """See the module docstring.

  Attributes:
    config: sizes.
    mesh: Mesh that the weights lie on, or None.
    lm_head: output matrix; None where it is the embedding.
  """

  decoder_class = qwen_decoder.Decoder

  @property
  def _see_ahead(self) -> int:
    return 1  # `kernels.Sight.lookahead`: a token sees up to its own place.

  @property
  def supports_tree(self) -> bool:
    """Whether a row may be a tree: not where a layer's state goes on from one
    token to the next."""
    return not self.config.traits.linear

  def __init__(
    self,
    config: qwen_text_config.AnyConfig,
    rngs: random_keys.Source,
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Args:

      config: sizes.
      rngs: Random keys of fresh weights.
      mesh: Mesh of `sharding.make_mesh`, if the weights lie on one.

    Raises:
      ValueError: heads that cannot be divided among the mesh.
    """
    self.config = config
    self.mesh = mesh
    check_heads(mesh, "attention", config.text.num_attention_heads)
    init = layers.Init(rngs, config.param_dtype)
    self._make_parts(init)
    self.lm_head = output_matrix(config, init)

  def _make_parts(self, init: layers.Init) -> None:
    """Makes the modules before the output matrix, whose keys are the last."""
    self.model = self.decoder_class(self.config, init, self.mesh)

  @property
  def decoder(self) -> qwen_decoder.Decoder:
    """The decoder, whose attribute is named as in the checkpoint."""
    return self.model

  def __call__(self, inputs: base.PolicyInputs) -> jax.Array:
    vision = None
    if inputs.patches.shape[1]:
      vision = self.encode_images(
        inputs.patches,
        inputs.patch_segments,
        inputs.patch_positions,
        inputs.image_patches,
        inputs.aligned_images,
      )
    x, early = self._embed(inputs.tokens, inputs.vision_index, vision)
    segments = jnp.asarray(inputs.segment_ids)
    until = inputs.seen_until
    last = self._last_seen(inputs.vision_index, segments, until)
    # Where layers have windows, positions count the tokens of a sequence.
    depth = None
    if until is not None:
      depth = jnp.asarray(inputs.positions)[..., 0]

    def mix(q, k, v, nothing, layer):
      mixed = kernels.causal_attention(
        q, k, v, segments, until, self.mesh, self._sight(last, layer, depth)
      )
      return mixed, nothing

    def recur(net, x, nothing, layer):
      del layer
      return net(x, segments), nothing

    hidden, _ = self.decoder(x, inputs.positions, mix, recur, early=early)
    return hidden

  def encode_images(
    self,
    patches: base.Array,
    patch_segments: base.Array,
    patch_positions: base.Array,
    image_patches: int = 0,
    aligned_images: bool = False,
  ) -> jax.Array:
    """Returns [S, 0, 0]: no vision tokens."""
    del patch_segments, patch_positions, image_patches, aligned_images
    return jnp.zeros((patches.shape[0], 0, 0), self.config.compute_dtype)

  def init_cache(self, batch: int, length: int) -> Cache:
    text, dtype = self.config.text, jnp.dtype(self.config.compute_dtype)
    heads, wide = text.num_key_value_heads, text.head_dim
    layers_ = tuple(
      linear_attention.init_state(text, batch, dtype)
      if text.is_linear(i)
      else cached_attention.init_rows(batch, length, heads, wide, dtype)
      for i in range(text.num_hidden_layers)
    )
    if self.decoder.stacked:
      return jax.tree.map(lambda *x: jnp.stack(x), *layers_)
    return layers_

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
    real = jnp.arange(jnp.shape(tokens)[1]) < jnp.asarray(lengths)[:, None]
    last = self._last_seen(vision_index, real.astype(jnp.int32))

    def mix(q, k, v, cache, layer):
      entry = _of_layer(cache, layer)
      mixed, entry = cached_attention.attend_rows(
        q, k, v, entry, starts, lengths, self.mesh, self._sight(last, layer)
      )
      return mixed, _with_layer(cache, layer, entry)

    def recur(net, x, cache, layer):
      out, entry = net.extend(x, starts, lengths, _of_layer(cache, layer))
      return out, _with_layer(cache, layer, entry)

    x, early = self._embed(tokens, vision_index, vision)
    return self.decoder(x, positions, mix, recur, cache, early)

  @property
  def reads_pages(self) -> bool:
    """Whether the engine should use `extend_pages` on this backend."""
    text = self.config.text
    traits = self.config.traits
    rows = traits.linear or traits.windows or traits.mutual_images
    return not rows and cached_attention.pages_apply(
      text.head_dim,
      text.num_key_value_heads,
      jnp.dtype(self.config.compute_dtype),
    )

  def init_pages(self, pages: int, page_size: int) -> jax.Array:
    text = self.config.text
    cache = cached_attention.init_pages(
      text.num_hidden_layers,
      pages,
      page_size,
      text.num_key_value_heads,
      text.head_dim,
      jnp.dtype(self.config.compute_dtype),
    )
    return sharding.constrain(cache, self.mesh, *self.page_axes)

  def extend_pages(
    self,
    tokens: base.Array,
    positions: base.Array,
    starts: base.Array,
    lengths: base.Array,
    cache: jax.Array,
    table: base.Array,
    vision_index: base.Array | None = None,
    vision: base.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    pages = cache.shape[0] // self.config.text.num_hidden_layers
    pages //= cached_attention.row_shards(self.mesh)

    def mix(q, k, v, cache, layer):
      return cached_attention.attend_pages(
        q, k, v, cache, table + layer * pages, starts, lengths, self.mesh
      )

    x, early = self._embed(tokens, vision_index, vision)
    hidden, cache = self.decoder(x, positions, mix, _no_recur, cache, early)
    return hidden, sharding.constrain(cache, self.mesh, *self.page_axes)

  @property
  def page_axes(self) -> tuple[Any, ...]:
    """Mesh axes of the dimensions of `init_pages`' array."""
    if self.mesh is None:
      return ()
    heads = self.config.text.num_key_value_heads
    split = cached_attention.split_heads(self.mesh, heads)
    return cached_attention.ROWS, None, split, None

  @property
  def cache_axes(self) -> tuple[Any, ...]:
    """Mesh axes of the dimensions of each of `init_cache`'s arrays; () where
    recurrent states have others than keys and values."""
    if self.mesh is None or self.config.traits.linear:
      return ()
    heads = self.config.text.num_key_value_heads
    split = cached_attention.split_heads(self.mesh, heads)
    stacked = (None,) * self.decoder.stacked
    return *stacked, cached_attention.ROWS, split, None, None

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns float32[..., vocabulary]; split along the vocabulary on a mesh.

    Where the mesh does not divide the vocabulary, each device gathers the
    matrix, and computes its own rows.
    """
    head = self.lm_head
    table = (self.decoder.embed_tokens if head is None else head).weight
    if hidden.ndim != 3:
      return kernels.dot_wide(hidden, table[...])
    if self.mesh is not None and (
      sharding.split(self.mesh, table.shape[0], _VOCABULARY) == 1
    ):
      rows = sharding.constrain(table[...], self.mesh)
      hidden = sharding.constrain(hidden, self.mesh, sharding.BATCH_AXES)
      logits = kernels.dot_wide(hidden, rows)
      return sharding.constrain(logits, self.mesh, sharding.BATCH_AXES)
    hidden = sharding.constrain(hidden, self.mesh, "data")
    # Constrained once more for its gradient: that of a tied table would lie
    # as the embedding's lookup wants it, for which logits would be gathered.
    rows = sharding.constrain(table[...], self.mesh, _VOCABULARY)
    logits = kernels.dot_wide(hidden, rows)
    return sharding.constrain(logits, self.mesh, "data", None, _VOCABULARY)

  def _embed(
    self,
    tokens_BT: base.Array,
    vision_index_BT: base.Array | None,
    vision_SVXD: base.Array | None,
  ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns [B, T, D], and the additions after each of the first layers."""
    del vision_index_BT, vision_SVXD
    return self._look_up(tokens_BT), ()

  def _last_seen(
    self,
    vision_index_BT: base.Array | None,
    segments_BT: jax.Array,
    until_BT: base.Array | None = None,
  ) -> jax.Array | None:
    """Returns the last place of a row that each token sees; None = its own."""
    del vision_index_BT, segments_BT, until_BT
    return None

  def _sight(
    self,
    last_BT: jax.Array | None,
    layer: Any,
    depth_BT: jax.Array | None = None,
  ) -> kernels.Sight | None:
    """Returns what a layer's tokens see; None = all earlier ones."""
    if last_BT is None:
      return None
    return kernels.Sight(
      last_BT, self.config.text.window(layer), self._see_ahead, depth_BT
    )

  def _look_up(self, tokens_BT: base.Array) -> jax.Array:
    """Returns the embeddings [B, T, D] of tokens."""
    dtype = jnp.dtype(self.config.compute_dtype)
    tokens_BT = jnp.asarray(tokens_BT)
    # Each device looks up its columns for all rows of its data shard, then
    # columns are exchanged for rows. Looking up in a part of the vocabulary
    # would leave every device with a sum over all rows, for which the compiler
    # rightly prefers to gather the table.
    table = self.decoder.embed_tokens.weight[...]
    columns = ("fsdp", "tensor", "sequence")
    table = sharding.constrain(table, self.mesh, None, columns)
    x = table[sharding.constrain(tokens_BT, self.mesh, "data")].astype(dtype)
    # An axis at a time, the innermost first: exchanges, where all at once
    # would be done by gathering everything.
    for axes in (
      ("data", None, columns),
      ("data", "sequence", ("fsdp", "tensor")),
      ("data", "sequence", "fsdp"),
      sharding.TOKENS,
    ):
      x = sharding.constrain(x, self.mesh, *axes)
    return x


def output_matrix(
  config: qwen_text_config.AnyConfig, init: layers.Init
) -> layers.Embedding | None:
  """Makes the output matrix [vocabulary, width]; None if it is tied."""
  if config.tie_word_embeddings:
    return None
  text = config.text
  return layers.Embedding(
    text.vocab_size, text.hidden_size, init, (_VOCABULARY, None)
  )


def _no_recur(net, x, cache, layer):
  raise TypeError("linear attention has no cache in pages; see reads_pages")


def _of_layer(cache: Cache, layer: int | jax.Array):
  """Keys and values of a layer: one of several, or a slice of all."""
  if isinstance(layer, int):
    return cache[layer]
  at = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
  return jax.tree.map(at, cache)


def _with_layer(cache: Cache, layer: int | jax.Array, entry) -> Cache:
  if isinstance(layer, int):
    return (*cache[:layer], entry, *cache[layer + 1 :])
  put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, layer, 0)
  return jax.tree.map(put, cache, entry)


def check_heads(
  mesh: jax.sharding.Mesh | None, kind: str, heads: int, tensor: bool = True
) -> None:
  """Refuses heads that attention cannot exchange for a row's tokens.

  Args:
    mesh: Mesh of the weights; None has nothing to divide among.
    kind: Kind of attention, for the error.
    heads: their number.
    tensor: whether the mesh's axis tensor splits them as well.

  Raises:
    ValueError: they do not divide.
  """
  if mesh is None or mesh.shape["sequence"] == 1:
    return
  sequence = mesh.shape["sequence"]
  split = sequence * (mesh.shape["tensor"] if tensor else 1)
  if heads % split:
    raise ValueError(
      f"{heads} {kind} heads cannot be divided among mesh.sequence="
      f"{sequence} times mesh.tensor={split // sequence}; choose sizes"
      f" whose product divides {heads}"
    )
