"""Computes attention of new tokens to a KV cache, of rows or of pages.

Rows: keys and values of a sequence side by side, plain XLA, any backend.
Pages: of all layers in one array, read where they lie by the ragged paged
attention kernel that ships with JAX, on TPU.

Promises: the same numbers either way, up to rounding; new keys and values are
written at `starts`, and tokens that are not real write nothing. On a mesh a
cache is split by rows and by heads, and no part of it ever leaves its device:
block s of a call's rows belongs to shard s.

Axis names: B = rows, T = new tokens of a row, C = places of a row's cache,
N = query heads, K = KV heads, H = head width, L = layers, P = pages of a
layer, S = tokens of a page, M = pages of a row.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy.layers import kernels

ROWS = ("data", "fsdp", "sequence")
"""Mesh axes over which the rows of a cache are split."""


def row_shards(mesh: jax.sharding.Mesh | None) -> int:
  """Blocks that a call's rows and a cache's pages are split into."""
  return math.prod(mesh.shape[name] for name in ROWS) if mesh else 1


def split_rows(mesh: jax.sharding.Mesh, rows: int) -> tuple[str, ...]:
  """Returns as many of the axes `ROWS` as divide this number of rows."""
  names: tuple[str, ...] = ROWS
  while names and rows % math.prod(mesh.shape[name] for name in names):
    names = names[:-1]
  return names


def split_heads(mesh: jax.sharding.Mesh, kv_heads: int) -> str | None:
  """Returns the mesh's axis that a cache's heads are split over."""
  return "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None


def _local(function: Any, mesh: jax.sharding.Mesh, places: Any, out: Any):
  return jax.shard_map(
    function, mesh=mesh, in_specs=places, out_specs=out, check_vma=False
  )


def init_rows(
  batch: int, length: int, kv_heads: int, head_dim: int, dtype
) -> tuple[jax.Array, jax.Array]:
  """Keys [B, K, H, C] and values [B, K, C, H] of one layer.

  On a CPU bfloat16 ones are uint16 of the same bits: XLA writes a few bfloat16
  numbers by way of float32, all of the array there and back.
  """
  if compiling.backend() == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
    dtype = jnp.uint16
  return (
    jnp.zeros((batch, kv_heads, head_dim, length), dtype),
    jnp.zeros((batch, kv_heads, length, head_dim), dtype),
  )


def attend_rows(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  starts_B: jax.Array | np.ndarray,
  lengths_B: jax.Array | np.ndarray,
  mesh: jax.sharding.Mesh | None = None,
  sight: kernels.Sight | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Writes new keys and values, and attends to all up to the own token.

  Args:
    q_BTNH: queries.
    k_BTKH: keys of the new tokens.
    v_BTKH: values of the new tokens.
    cache: keys [B, K, H, C] and values [B, K, C, H], as of `init_rows`.
    starts_B: int32, tokens of each row that are cached already.
    lengths_B: int32, how many of the T are real.
    mesh: Mesh that splits rows and heads, as far as it divides them.
    sight: Interval that a token sees in place of all tokens up to its own. Its
      places are those of the new tokens, all of which are in the call that need
      each other.

  Returns:
    [B, T, N, H], and the new cache.
  """
  if mesh is not None:
    P = jax.sharding.PartitionSpec
    rows = split_rows(mesh, q_BTNH.shape[0])
    heads = split_heads(mesh, k_BTKH.shape[2])
    new, kept_at = P(rows, None, heads), P(rows, heads)
    places: Any = (new, new, new, (kept_at, kept_at), P(rows), P(rows))
    arrays: Any = (q_BTNH, k_BTKH, v_BTKH, cache, starts_B, lengths_B)
    function: Any = attend_rows
    if sight is not None:
      places, arrays = (*places, P(rows)), (*arrays, sight.last_BT)
      reach = sight.window, sight.lookahead
      function = lambda *args: attend_rows(
        *(*args[:-1], None, kernels.Sight(args[-1], *reach))
      )
    return _local(function, mesh, places, (new, (kept_at, kept_at)))(*arrays)
  # 1. Write first, so that a new token sees itself and the new ones before it.
  k_BKHC, v_BKCH = cache
  b, t = q_BTNH.shape[:2]
  length = v_BKCH.shape[2]
  index_BT = starts_B[:, None] + jnp.arange(t)
  #    Tokens that are not real go to an index outside, which drops them.
  write_BT = jnp.where(jnp.arange(t) < lengths_B[:, None], index_BT, length)
  rows_B1 = jnp.arange(b)[:, None]
  as_bits = k_BKHC.dtype == jnp.uint16
  if as_bits:
    k_BTKH, v_BTKH = (_bits(x, jnp.uint16) for x in (k_BTKH, v_BTKH))
  k_BKHC = k_BKHC.at[rows_B1, :, :, write_BT].set(k_BTKH, mode="drop")
  v_BKCH = v_BKCH.at[rows_B1, :, write_BT].set(v_BTKH, mode="drop")
  cache = k_BKHC, v_BKCH
  if as_bits:
    k_BKHC, v_BKCH = (_bits(x, jnp.bfloat16) for x in cache)
  # 2. Attend under a mask of places: those behind the own token may hold keys
  #    of a longer sequence that had the row before.
  place = jnp.arange(length)
  if sight is None:
    mask_BTC = place <= index_BT[..., None]
  else:
    mask_BTC = place <= (starts_B[:, None] + sight.last_BT)[..., None]
    if sight.window:
      mask_BTC &= place > index_BT[..., None] - sight.window
  return kernels.attend_cached(q_BTNH, k_BKHC, v_BKCH, mask_BTC), cache


_bits = jax.lax.bitcast_convert_type


def pages_apply(head_dim: int, kv_heads: int, dtype: jnp.dtype) -> bool:
  """Returns whether the kernel of the target backend takes such heads."""
  packed = 4 // jnp.dtype(dtype).itemsize
  tiles, remainder = divmod(2 * kv_heads, packed)
  fits = not remainder and (tiles in (1, 2, 4) or tiles % 8 == 0)
  return compiling.backend() == "tpu" and head_dim % 128 == 0 and fits


def init_pages(
  layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype
) -> jax.Array:
  """Returns [L * P, S, 2 K, H]: keys and values of a head are neighbours."""
  return jnp.zeros((layers * pages, page_size, 2 * kv_heads, head_dim), dtype)


def attend_pages(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  cache: jax.Array,
  table_BM: jax.Array,
  starts_B: jax.Array | np.ndarray,
  lengths_B: jax.Array | np.ndarray,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
  """As `attend_rows`, with a cache in pages.

  Args:
    q_BTNH: queries.
    k_BTKH: keys of the new tokens.
    v_BTKH: values of the new tokens.
    cache: The array of `init_pages`.
    table_BM: int32, each row's pages of this layer in the row's own shard,
      enough for all real tokens.
    starts_B: int32, tokens of each row that are cached already.
    lengths_B: int32, how many of the T are real.
    mesh: Mesh that splits rows and pages into `row_shards`, and heads where it
      divides them.

  Returns:
    [B, T, N, H] (undefined where tokens are not real), and the new cache.

  Raises:
    ValueError: the rows are no multiple of the shards.
  """
  if mesh is not None:
    rows, shards = q_BTNH.shape[0], row_shards(mesh)
    if rows % shards:
      raise ValueError(
        f"{rows} rows of a cache of {shards} shards; give a multiple"
      )
    P = jax.sharding.PartitionSpec
    new = P(ROWS, None, split_heads(mesh, k_BTKH.shape[2]), None)
    return _local(
      attend_pages,
      mesh,
      (new, new, new, new, P(ROWS), P(ROWS), P(ROWS)),
      (new, new),
    )(q_BTNH, k_BTKH, v_BTKH, cache, table_BM, starts_B, lengths_B)
  # 1. Find each new token's page in its row's table, and its place there. The
  #    last column stands in for places behind the table; a token that is not
  #    real goes to a page outside, which drops it.
  size, total = cache.shape[1], cache.shape[0]
  b, t, _, h = q_BTNH.shape
  index_BT = starts_B[:, None] + jnp.arange(t)
  block_BT = jnp.minimum(index_BT // size, table_BM.shape[1] - 1)
  page_BT = jnp.take_along_axis(table_BM, block_BT, axis=1)
  page_BT = jnp.where(jnp.arange(t) < lengths_B[:, None], page_BT, total)
  # 2. Write keys and values in one scatter: a head's two are neighbours.
  both = jnp.stack([k_BTKH, v_BTKH], axis=3).reshape(b, t, -1, h)
  cache = cache.at[page_BT, index_BT % size].set(both, mode="drop")
  # 3. Attend. The kernel wants one query at least of each row, and one key.
  queries_B = jnp.maximum(lengths_B, 1)
  keys_B = jnp.maximum(starts_B + lengths_B, 1)
  return _ragged(q_BTNH, cache, table_BM, queries_B, keys_B), cache


def _ragged(q_BTNH, cache, table_BM, queries_B, keys_B) -> jax.Array:
  """Runs the kernel on one device's heads; rows' queries lie end to end."""
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as rpa  # pylint: disable=g-import-not-at-top

  # 1. Lay the rows' real queries end to end, as the kernel reads them:
  #    place i belongs to the row whose queries end after i.
  b, t, n, h = q_BTNH.shape
  ends_B = jnp.cumsum(queries_B)
  flat = q_BTNH.reshape(b * t, n, h)
  if t > 1:
    place = jnp.arange(b * t)
    row = jnp.minimum(jnp.searchsorted(ends_B, place, side="right"), b - 1)
    first = (ends_B - queries_B)[row]
    flat = flat[jnp.minimum(row * t + place - first, b * t - 1)]
  # 2. Choose how many pages and queries a step of the kernel loads.
  blocks = {}
  if jax.default_backend() != "tpu":  # On TPU the kernel has tuned defaults.
    blocks = dict(
      num_kv_pages_per_block=min(8, table_BM.shape[1]),
      num_queries_per_block=min(32, b * t),
    )
  kernel = functools.partial(
    rpa.ragged_paged_attention, sm_scale=h**-0.5, **blocks
  )
  mixed = kernel(
    flat,
    cache,
    keys_B.astype(jnp.int32),
    table_BM,
    jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B.astype(jnp.int32)]),
    jnp.full(1, b, jnp.int32),
  )
  if t > 1:
    first = (ends_B - queries_B)[:, None] + jnp.arange(t)
    mixed = mixed[jnp.minimum(first, b * t - 1)]
  return mixed.reshape(b, t, n, h)
