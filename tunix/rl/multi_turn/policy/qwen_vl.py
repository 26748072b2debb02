"""Joins tower and decoder to the policies Qwen2.5-VL and Qwen3-VL.

Implements `base.Policy`. Vision tokens take the place of the embeddings of
their placeholders; those of deeper blocks (deepstack) are added after the
first decoder layers.

Promises: a token attends to earlier tokens of its own segment only, a vision
token to its own image only; `extend` equals the full forward pass; with a mesh
neither the embedding nor the logits are ever gathered whole on a device.

Axis names: see `base`.
"""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import cached_attention
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen2_5_vl
from tunix.rl.multi_turn.policy import qwen3_vl
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import qwen_decoder
from tunix.rl.multi_turn.policy import sharding

_VOCABULARY = sharding.MODEL_AXES

Cache = tuple[tuple[jax.Array, jax.Array], ...] | tuple[jax.Array, jax.Array]
"""A cache of each layer as of `init_rows`, or one of all, [L, …]."""


class QwenVL(nnx.Module):
  """See the module docstring."""

  @property
  def supports_prefix_ids(self) -> bool:
    """Whether prompts are shared: not on TPU, whose kernel gains more."""
    return kernels.backend() != "tpu"

  def __init__(
      self,
      config: qwen_config.QwenVLConfig,
      rngs: nnx.Rngs,
      mesh: jax.sharding.Mesh | None = None,
  ):
    """Args:

      config: sizes.
      rngs: of fresh weights.
      mesh: as of `sharding.make_mesh`, if the weights lie on one.

    Raises:
      ValueError: heads that cannot be divided among the mesh.
    """
    self.config = config
    self.mesh = mesh
    if mesh is not None:
      _check_heads(config, mesh)
    init = layers.Init(rngs, config.param_dtype)
    tower = qwen3_vl if config.is_qwen3 else qwen2_5_vl
    self.visual = tower.VisionTower(config, init, mesh)
    self.language_model = qwen_decoder.Decoder(config, init, mesh)
    text = config.text
    self.lm_head = None if config.tie_word_embeddings else (
        # Lies like the embedding: [vocabulary, width].
        layers.Embedding(
            text.vocab_size, text.hidden_size, init, (_VOCABULARY, None)
        )
    )  # pyformat: disable

  def __call__(self, inputs: base.PolicyInputs) -> jax.Array:
    vision = None
    if inputs.patches.shape[1]:
      vision = self.encode_images(
          inputs.patches, inputs.patch_segments, inputs.patch_positions
      )
    x, early = self._embed(inputs.tokens, inputs.vision_index, vision)
    segments = jnp.asarray(inputs.segment_ids)
    prefix = inputs.prefix_ids
    prefix = None if prefix is None else jnp.asarray(prefix)

    def mix(q, k, v, nothing, layer):
      del layer
      mixed = kernels.causal_attention(q, k, v, segments, prefix, self.mesh)
      return mixed, nothing

    hidden, _ = self.language_model(x, inputs.positions, mix, early=early)
    return hidden

  def encode_images(
      self,
      patches: base.Array,
      patch_segments: base.Array,
      patch_positions: base.Array,
  ) -> jax.Array:
    """[S, V, 1 + deepstack, D]."""
    patches, patch_segments, patch_positions = map(
        jnp.asarray, (patches, patch_segments, patch_positions)
    )
    patches = sharding.constrain(patches, self.mesh, *sharding.TOKENS)
    return self.visual(patches, patch_segments, patch_positions)

  def init_cache(self, batch: int, length: int) -> Cache:
    text = self.config.text
    layers_ = tuple(
        cached_attention.init_rows(
            batch,
            length,
            text.num_key_value_heads,
            text.head_dim,
            jnp.dtype(self.config.compute_dtype),
        )
        for _ in range(text.num_hidden_layers)
    )
    if self.language_model.stacked:
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
    def mix(q, k, v, cache, layer):
      kept = _of_layer(cache, layer)
      mixed, kept = cached_attention.attend_rows(
          q, k, v, kept, starts, lengths
      )
      return mixed, _with_layer(cache, layer, kept)

    x, early = self._embed(tokens, vision_index, vision)
    return self.language_model(x, positions, mix, cache, early)

  @property
  def reads_pages(self) -> bool:
    """Whether the engine should use `extend_pages` on this backend."""
    text = self.config.text
    return cached_attention.pages_apply(
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
    return sharding.constrain(cache, self.mesh, *self._page_axes)

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

    def mix(q, k, v, cache, layer):
      return cached_attention.attend_pages(
          q, k, v, cache, table + layer * pages, starts, lengths, self.mesh
      )

    x, early = self._embed(tokens, vision_index, vision)
    hidden, cache = self.language_model(x, positions, mix, cache, early)
    return hidden, sharding.constrain(cache, self.mesh, *self._page_axes)

  @property
  def _page_axes(self) -> tuple[str | None, ...]:
    if self.mesh is None:
      return ()
    heads = self.config.text.num_key_value_heads
    return None, None, cached_attention.split_axis(heads, self.mesh), None

  def logits(self, hidden: jax.Array) -> jax.Array:
    """float32[..., vocabulary]; split along the vocabulary on a mesh."""
    head = self.lm_head
    table = (self.language_model.embed_tokens if head is None else head).weight
    if hidden.ndim != 3:
      return kernels.dot_wide(hidden, table[...])
    hidden = sharding.constrain(hidden, self.mesh, "data")
    # Said once more for its gradient: that of a tied table would lie as the
    # embedding's lookup wants it, for which logits would be gathered.
    rows = sharding.constrain(table[...], self.mesh, _VOCABULARY)
    logits = kernels.dot_wide(hidden, rows)
    return sharding.constrain(logits, self.mesh, "data", None, _VOCABULARY)

  def _embed(
      self,
      tokens_BT: base.Array,
      vision_index_BT: base.Array | None,
      vision_SVXD: base.Array | None,
  ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """[B, T, D], and the additions after each of the first layers."""
    dtype = jnp.dtype(self.config.compute_dtype)
    tokens_BT = jnp.asarray(tokens_BT)
    # Each device looks up its columns for all rows of its data shard, then
    # columns are exchanged for rows. Looking up in a part of the vocabulary
    # would leave every device with a sum over all rows, for which the compiler
    # rightly prefers to gather the table.
    table = self.language_model.embed_tokens.weight[...]
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
    if vision_index_BT is None or vision_SVXD is None:
      return x, ()
    b, t = tokens_BT.shape
    s, _, parts, d = vision_SVXD.shape
    # Any token of a row may show any vision token of its buffer.
    vision_SVXD = sharding.constrain(
        vision_SVXD, self.mesh, sharding.BATCH_AXES
    )
    index = jnp.asarray(vision_index_BT)
    flat = jnp.maximum(index, 0).reshape(s, b // s * t)
    seen = jax.vmap(lambda v, i: v[i])(vision_SVXD, flat)
    seen = seen.reshape(b, t, parts, d).astype(dtype)
    seen = sharding.constrain(seen, self.mesh, *sharding.TOKENS)
    is_vision = (index >= 0)[..., None]
    x = jnp.where(is_vision, seen[:, :, 0], x)
    early = tuple(
        jnp.where(is_vision, seen[:, :, i], 0) for i in range(1, parts)
    )
    return x, early


def _of_layer(cache: Cache, layer: int | jax.Array):
  """Keys and values of a layer: one of several, or a slice of all."""
  if isinstance(layer, int):
    return cache[layer]
  at = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
  return jax.tree.map(at, cache)


def _with_layer(cache: Cache, layer: int | jax.Array, kept) -> Cache:
  if isinstance(layer, int):
    return (*cache[:layer], kept, *cache[layer + 1 :])
  put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, layer, 0)
  return jax.tree.map(put, cache, kept)


def _check_heads(
    config: qwen_config.QwenVLConfig, mesh: jax.sharding.Mesh
) -> None:
  """Attention exchanges a row's tokens for heads, so these must divide."""
  sequence, tensor = mesh.shape["sequence"], mesh.shape["tensor"]
  if sequence == 1:
    return
  vision_tensor = tensor if config.vision_tensor_parallel else 1
  for what, heads, split in (
      ("attention", config.text.num_attention_heads, sequence * tensor),
      ("vision", config.vision.num_heads, sequence * vision_tensor),
  ):
    if heads % split:
      raise ValueError(
          f"{heads} {what} heads cannot be divided among mesh.sequence="
          f"{sequence} times mesh.tensor={split // sequence}; choose sizes"
          f" whose product divides {heads}"
      )
