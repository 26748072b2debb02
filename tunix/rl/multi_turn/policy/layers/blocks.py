"""Computes attention of packed rows, block by block.

A block of queries goes over the blocks of keys that it sees any of, with the
running maximum and sum of Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; the backward pass computes scores again (Dao et al.
2022, "FlashAttention"). Time grows with the pairs of blocks that share a
segment, in a tree with those of a prefix and its descendants; memory with the
tokens. Loops, not unrolled: a program is as large for a long row as for a short
one. For a CPU, where scores that fit a core's cache are several times faster
than those that go through memory. Blocks are as large as a cache allows where
all of a row is seen, smaller where a part of it is; and large enough for all
cores to work on one, as loops run turn by turn.

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
from tunix.rl.multi_turn.net import worker_pool

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
    reachable: bool[I, I], whether a block of queries sees any of a block of
      keys.
    until: int32[I, Q], the place after the last token that sees a token; None =
      the end of its segment.
    last: int32[I, Q], the last place that a token sees; None = its own.
    depth: int32[I, Q], a token's number in its sequence, by which a window
      counts; None = no window.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  ids: jax.Array
  reachable: jax.Array
  until: jax.Array | None = None
  last: jax.Array | None = None
  depth: jax.Array | None = None


class _Rule(NamedTuple):
  """Rule by which a token sees the tokens of its segment.

  Attributes:
    causal: Whether a token sees nothing behind `_Inputs.last`.
    window: Number of places, up to its own, that a token sees; 0 = all.
  """

  causal: bool
  window: int = 0


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segments_BT: jax.Array,
  until_BT: jax.Array | None = None,
  *,
  causal: bool,
  last_BT: jax.Array | None = None,
  window: int = 0,
  depth_BT: jax.Array | None = None,
) -> jax.Array:
  """Computes attention to the own segment: [B, T, N, H].

  1. A row is padded to whole blocks, and its heads are grouped by KV head, so
     that one product scores all query heads of a group.
  2. `_reachable` marks pairs of blocks of which one may see the other; only
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
    until_BT: int32, with `causal` the place after the last token that sees a
      token, in place of its segment; None = the end of its segment.
    causal: whether a token sees none that come later.
    last_BT: int32, with `causal` the last place that a token sees all the same;
      None = its own.
    window: Places up to its own that a token sees, where `causal` and `last_BT`
      are given; 0 = all.
    depth_BT: int32, the number of a token in its sequence, by which a window
      counts; None = its place.
  """
  b, t, n, h = q_BTNH.shape
  kv = k_BTKH.shape[2]
  group = n // kv
  count = -(-t // _most(causal))
  size = -(-t // (8 * count)) * 8
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
  own = pad(segments_BT, -2).reshape(b, count, size)
  rule = _Rule(causal, window)
  own_place = np.arange(t, count * size, dtype=np.int32)

  def places(x: jax.Array | None, behind: int = 0) -> jax.Array | None:
    if x is None:
      return None
    filled = np.broadcast_to(own_place + behind, (b, fill))
    return jnp.concatenate([x, filled], axis=1).reshape(b, count, size)

  if window and depth_BT is None:
    depth_BT = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
  bounds = (
    places(until_BT, 1),
    places(last_BT),
    places(depth_BT if window else None),
  )
  reachable = _reachable(own, rule, *bounds)
  of_heads = functools.partial(jnp.repeat, repeats=kv, axis=0)
  inputs = _Inputs(
    q.reshape(b * kv, count, group * size, h),
    keys(k_BTKH),
    keys(v_BTKH),
    *map(of_heads, (own, reachable)),
    *(None if x is None else of_heads(x) for x in bounds),
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
  rule: _Rule,
  until_BIQ: jax.Array | None,
  last_BIQ: jax.Array | None,
  depth_BIQ: jax.Array | None,
) -> jax.Array:
  """Returns bool[B, I, I], the pairs of blocks of which one may see the other:
  their ranges of segments meet, or a key is seen as far as the queries begin.
  """
  _, count, size = own_BIQ.shape
  first = np.arange(count) * size
  low, high = own_BIQ.min(-1), own_BIQ.max(-1)
  if until_BIQ is None:
    reachable = low[:, None] <= high[..., None]
    reachable &= low[..., None] <= high[:, None]
  else:
    reachable = until_BIQ.max(-1)[:, None] > first[:, None]
  if last_BIQ is None:
    return jnp.tril(reachable) if rule.causal else reachable
  reachable &= first <= last_BIQ.max(-1)[..., None]
  if depth_BIQ is not None:
    farthest = depth_BIQ.min(-1)[..., None] - rule.window
    reachable &= depth_BIQ.max(-1)[:, None] > farthest
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
  place = np.arange(inputs.ids.shape[-1])
  if inputs.until is None:
    visible = inputs.ids[i][:, None] == inputs.ids[j]
  else:
    visible = inputs.until[j] > (i * len(place) + place)[:, None]
  if inputs.last is not None:
    visible &= j * len(place) + place <= inputs.last[i][:, None]
    if inputs.depth is not None:
      visible &= inputs.depth[j] > inputs.depth[i][:, None] - rule.window
  elif rule.causal:
    visible &= (j < i) | (place[:, None] >= place)
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


def _forward_one(rule: _Rule, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
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
        inputs.reachable[i, j], lambda carry: turn(j, carry), lambda x: x, carry
      )

    nothing = (
      jnp.full(rows, _NEG, jnp.float32),
      _zeros(rows),
      _zeros((rows, h)),
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
