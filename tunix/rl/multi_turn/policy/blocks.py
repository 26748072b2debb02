"""Computes attention of packed rows, block by block.

A block of queries goes over the blocks of keys that it sees any of, with the
running maximum and sum of Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; the backward pass computes scores again (Dao et al.
2022, "FlashAttention"). Time grows with the pairs of blocks that share a
segment, memory with the tokens. Loops, not unrolled: a program is as large for
a long row as for a short one. For a CPU, where scores that fit a core's cache
are several times faster than those that go through memory. Blocks are as large
as a cache allows where all of a row is seen, smaller where a part of it is; and
large enough for all cores to work on one, as loops run turn by turn.

Promises: the numbers of attention under the explicit mask, up to rounding.

Does not: place anything on a mesh; the caller gives a device's own rows.

Axis names: B = rows, T = tokens, N = query heads, K = KV heads, G = query heads
of a KV head, H = head width, I = blocks of a row, Q = tokens of a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import worker_pool

MOST_FULL = 576
"""Tokens of a block at most, where tokens see all of their segment."""

MOST_CAUSAL = 192
"""The same where they see none that come later, on one core."""

MOST_CAUSAL_SHARED = 288
"""The same on several cores: the products of smaller blocks keep one busy."""

LEAST = 256
"""Tokens of a row below which loops cost more than they save."""

_NEG = -1e30

_zeros = functools.partial(jnp.zeros, dtype=jnp.float32)


class _Inputs(NamedTuple):
  """Inputs of the attention of one KV head.

  Attributes:
    q: [I, G * Q, H], scaled.
    k: [I, Q, H].
    v: [I, Q, H].
    ids: int32[I, Q], a token's segment.
    prefix: int32[I, Q], the other segment that a token sees.
    reachable: bool[I, I], whether a block of queries sees any of a block of
      keys.
    last: int32[I, Q], the last place that a token sees; None = its own.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  ids: jax.Array
  prefix: jax.Array
  reachable: jax.Array
  last: jax.Array | None = None


class _Rule(NamedTuple):
  """Rule by which a token sees parts of its segments.

  Attributes:
    causal: whether a token sees none that come later than its last.
    window: places up to its own that it sees; 0 = all.
  """

  causal: bool
  window: int = 0


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array,
    prefix_BT: jax.Array | None = None,
    *,
    causal: bool,
    last_BT: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
  """Computes attention to the own segment: [B, T, N, H].

  1. A row is padded to whole blocks, and its heads are grouped by KV head, so
     that one product scores all query heads of a group.
  2. `_reachable` marks pairs of blocks that have a segment in common; only
     these are computed.
  3. `_forward_one` goes over a query block's keys once, with a running maximum
     and sum: scores of a pair of blocks stay in a core's cache.
  4. `_backward_one` computes the scores again: keeping them would take memory
     quadratic in the row.

  Args:
    q_BTNH: Queries.
    k_BTKH: Keys.
    v_BTKH: Values.
    segments_BT: int32, at least -1, which segment of the row a token belongs
      to. Segments whose tokens lie together and whose ids rise are fast.
    prefix_BT: int32, one more segment that a token may see, -1 = none.
    causal: whether a token sees none that come later.
    last_BT: int32, with `causal` the last place that a token sees all the same;
      None = its own.
    window: Places up to its own that a token sees, where `causal` and `last_BT`
      are given; 0 = all.
  """
  b, t, n, h = q_BTNH.shape
  kv = k_BTKH.shape[2]
  group = n // kv
  count = -(-t // _most(causal))
  size = -(-t // (8 * count)) * 8
  if prefix_BT is None:
    prefix_BT = segments_BT
  fill = count * size - t

  def pad(x: jax.Array, value: int = 0) -> jax.Array:
    widths = [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=value)

  def keys(x: jax.Array) -> jax.Array:
    x = pad(x).reshape(b, count, size, kv, h).transpose(0, 3, 1, 2, 4)
    return x.reshape(b * kv, count, size, h)

  q = pad((q_BTNH * h**-0.5).astype(q_BTNH.dtype))
  q = q.reshape(b, count, size, kv, group, h).transpose(0, 3, 1, 4, 2, 5)
  # Filled places are a segment of their own, -2: they see themselves.
  own, other = (
      pad(x, -2).reshape(b, count, size) for x in (segments_BT, prefix_BT)
  )
  rule = _Rule(causal, window)
  last = None
  if last_BT is not None:
    # Filled places see up to their own.
    own_place = np.arange(t, count * size, dtype=np.int32)
    own_place = np.broadcast_to(own_place, (b, fill))
    last = jnp.concatenate([last_BT, own_place], axis=1)
    last = last.reshape(b, count, size)
  reachable = _reachable(own, other, rule, last)
  inputs = _Inputs(
      q.reshape(b * kv, count, group * size, h),
      keys(k_BTKH),
      keys(v_BTKH),
      *(jnp.repeat(x, kv, axis=0) for x in (own, other, reachable)),
      None if last is None else jnp.repeat(last, kv, axis=0),
  )
  mixed = _attend(rule, inputs.q, inputs.k, inputs.v, inputs[3:])
  mixed = mixed.reshape(b, kv, count, group, size, h)
  mixed = mixed.transpose(0, 2, 4, 1, 3, 5).reshape(b, count * size, n, h)
  return mixed[:, :t]


def _most(causal: bool) -> int:
  """Returns the most tokens of a block, by the cores of this process."""
  if not causal:
    return MOST_FULL
  several = worker_pool.usable_cores() > 1
  return MOST_CAUSAL_SHARED if several else MOST_CAUSAL


def _reachable(
    own_BIQ: jax.Array,
    other_BIQ: jax.Array,
    rule: _Rule,
    last_BIQ: jax.Array | None,
) -> jax.Array:
  """Returns bool[B, I, I], the pairs of blocks whose ranges of ids meet."""
  low, high = own_BIQ.min(-1)[:, None], own_BIQ.max(-1)[:, None]
  meet = lambda ids: (low <= ids.max(-1)[..., None]) & (
      ids.min(-1)[..., None] <= high
  )
  reachable = meet(own_BIQ) | meet(other_BIQ)
  if last_BIQ is None:
    return jnp.tril(reachable) if rule.causal else reachable
  _, count, size = own_BIQ.shape
  first = np.arange(count) * size
  reachable &= first <= last_BIQ.max(-1)[..., None]
  if rule.window:
    reachable &= first + size > first[:, None] - rule.window + 1
  return reachable


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _row_peaks(scores: jax.Array) -> jax.Array:
  """Returns the largest of each row of [rows, keys].

  A comparison and a choice are one instruction of a CPU; `jnp.max` spends four
  more on NaNs, which the exponential of a score keeps all the same.
  """
  larger = lambda a, b: jax.lax.select(a > b, a, b)
  return jax.lax.reduce(scores, np.float32(-np.inf), larger, (1,))


def _hidden(
    inputs: _Inputs, i: jax.Array, j: jax.Array, rule: _Rule
) -> jax.Array:
  """Returns bool[Q, Q], queries of block `i` that do not see keys of `j`."""
  ids = inputs.ids[j]
  visible = (inputs.ids[i][:, None] == ids) | (inputs.prefix[i][:, None] == ids)
  q = np.arange(len(ids))
  if inputs.last is not None:
    key = j * len(ids) + q
    visible &= key <= inputs.last[i][:, None]
    if rule.window:
      visible &= key > (i * len(ids) + q)[:, None] - rule.window
  elif rule.causal:
    visible &= (j < i) | (q[:, None] >= q)
  return ~visible


def _range(inputs: _Inputs, i: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the first and the end of the blocks of keys that block `i` sees."""
  keys = inputs.reachable[i]
  return jnp.argmax(keys), len(keys) - jnp.argmax(keys[::-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule, q, k, v, masks) -> jax.Array:
  return _forward(rule, q, k, v, masks)[0]


def _forward(rule, q, k, v, masks) -> tuple[jax.Array, Any]:
  one = functools.partial(_forward_one, rule)
  mixed, norms = jax.lax.map(one, _Inputs(q, k, v, *masks))
  return mixed, (q, k, v, masks, mixed, norms)


def _forward_one(
    rule: _Rule, inputs: _Inputs
) -> tuple[jax.Array, jax.Array]:
  """Returns the mix [I, G * Q, H], and peaks and inverse sums [I, 2, G * Q]."""
  count, rows, h = inputs.q.shape
  size = inputs.k.shape[1]

  def block(i):
    q = inputs.q[i]

    def turn(j, carry):
      # 1. Score the block's keys; those that a query does not see get the
      #    weight exp(-1e30) = 0.
      peak, total, mixed = carry
      scores = _product(q, inputs.k[j].T).reshape(-1, size, size)
      scores = jnp.where(_hidden(inputs, i, j, rule), _NEG, scores)
      scores = scores.reshape(rows, size)
      # 2. Raise the running maximum: no exponent is ever above 0.
      above = jnp.maximum(peak, _row_peaks(scores))
      weights = jnp.exp(scores - above[:, None])
      # 3. Scale down what earlier blocks added to the new maximum, then add.
      keep = jnp.exp(peak - above)
      mixed = mixed * keep[:, None]
      mixed += _product(weights.astype(inputs.v.dtype), inputs.v[j])
      return above, total * keep + weights.sum(-1), mixed

    def maybe(j, carry):
      return jax.lax.cond(
          inputs.reachable[i, j],
          lambda carry: turn(j, carry),
          lambda x: x,
          carry,
      )

    nothing = (
        jnp.full(rows, _NEG, jnp.float32), _zeros(rows), _zeros((rows, h))
    )
    peak, total, mixed = jax.lax.fori_loop(*_range(inputs, i), maybe, nothing)
    mixed = (mixed / total[:, None]).astype(q.dtype)
    # One number, peak + log(total), would cost the gradients a digit.
    return mixed, jnp.stack([peak, 1 / total])

  return jax.lax.map(block, jnp.arange(count))


def _backward(rule, residuals, slopes) -> tuple[Any, ...]:
  q, k, v, masks, mixed, norms = residuals
  inputs = _Inputs(q, k, v, *masks)
  offset = jnp.sum(mixed.astype(jnp.float32) * slopes, -1)
  one = functools.partial(_backward_one, rule)
  return *jax.lax.map(one, (inputs, norms, offset, slopes)), None


def _backward_one(rule, packed) -> tuple[jax.Array, jax.Array, jax.Array]:
  inputs, norms, offsets, slopes = packed
  count, rows, h = inputs.q.shape
  size = inputs.k.shape[1]

  def block(i, carry):
    to_q, to_k, to_v = carry
    q, offset, slope = inputs.q[i], offsets[i], slopes[i]
    peak, inverse = norms[i]

    def turn(j):
      # Keys outside queries: two of three products with them need no
      # transpose.
      hidden = jnp.tile(_hidden(inputs, i, j, rule), (rows // size, 1)).T
      k, v = inputs.k[j], inputs.v[j]
      weights = jnp.exp(_product(k, q.T) - peak) * inverse
      weights = jnp.where(hidden, 0.0, weights)
      to_v = _product(weights.astype(v.dtype), slope)
      scores = weights * (_product(v, slope.T) - offset)
      scores = scores.astype(q.dtype)
      return _product(k.T, scores), _product(scores, q), to_v

    def maybe(j, carry):
      # Sums lie outside the condition, which would copy them.
      to_q, to_k, to_v = carry
      none = _zeros((h, rows)), _zeros((size, h)), _zeros((size, h))
      own, k, v = jax.lax.cond(inputs.reachable[i, j], turn, lambda _: none, j)
      return to_q + own, to_k.at[j].add(k), to_v.at[j].add(v)

    own, to_k, to_v = jax.lax.fori_loop(
        *_range(inputs, i), maybe, (_zeros((h, rows)), to_k, to_v)
    )
    return to_q.at[i].set(own.T.astype(to_q.dtype)), to_k, to_v

  sums = _zeros(inputs.k.shape), _zeros(inputs.v.shape)
  start = (jnp.zeros(inputs.q.shape, inputs.q.dtype), *sums)
  to_q, to_k, to_v = jax.lax.fori_loop(0, count, block, start)
  return to_q, to_k.astype(inputs.k.dtype), to_v.astype(inputs.v.dtype)


_attend.defvjp(_forward, _backward)
