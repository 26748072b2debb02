"""Computes attention a tile at a time, one head's scores of a row.

For a CPU, where scores that fit its cache are several times faster than those
that go through memory: a loop over rows and heads, whose body is plain products
of matrices. Forward and backward pass hold one tile of scores each; beside the
output a number a query is kept, as in Dao et al. 2022, "FlashAttention".

Promises: the numbers of attention under the explicit mask, up to rounding.

Does not: split a tile's queries or keys; the caller chooses their numbers.

Axis names: B = rows, Q = queries, C = keys, N = query heads, K = KV heads, H =
head width, X = B * N.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEAST = 256
"""Queries below which a turn of the loop costs more than it computes."""

MOST = 1024
"""Queries of a tile at most, so that memory grows with the keys alone."""

_NEG = -1e30


class Ids(NamedTuple):
  """Which query sees which key.

  Attributes:
    queries: int32[B, Q]; a query sees keys of its own id,
    keys: int32[B, C].
    prefix: int32[B, Q], and keys of this id; None = of no other.
  """

  queries: jax.Array
  keys: jax.Array
  prefix: jax.Array | None = None


def attend(
    q_BQNH: jax.Array,
    k_BCKH: jax.Array,
    v_BCKH: jax.Array,
    ids: Ids,
    causal: int | None = None,
) -> jax.Array:
  """Grouped-query attention, [B, Q, N, H].

  Args:
    q_BQNH: queries; each sees one key at least.
    k_BCKH: keys.
    v_BCKH: values.
    ids: see there.
    causal: place of the first query among the keys: later keys are not seen.
      None = all keys.
  """
  b, t, n, h = q_BQNH.shape
  group = n // k_BCKH.shape[2]

  def by_head(x: jax.Array, copies: int) -> jax.Array:
    x = x.swapaxes(1, 2)
    x = jnp.repeat(x, copies, axis=1) if copies > 1 else x
    return x.reshape(b * n, *x.shape[2:])

  out = _attend(
      causal,
      by_head((q_BQNH * h**-0.5).astype(q_BQNH.dtype), 1),
      by_head(k_BCKH, group),
      by_head(v_BCKH, group),
      jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), ids),
  )
  return out.reshape(b, n, t, h).swapaxes(1, 2)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _hidden(ids: Ids, causal: int | None) -> jax.Array:
  """bool[C, Q]: the keys that a query does not see."""
  seen = ids.keys[:, None] == ids.queries[None]
  if ids.prefix is not None:
    seen |= ids.keys[:, None] == ids.prefix[None]
  if causal is not None:
    seen &= np.arange(seen.shape[0])[:, None] <= causal + np.arange(
        seen.shape[1]
    )
  return ~seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(causal, q_XQH, k_XCH, v_XCH, ids) -> jax.Array:
  return _forward(causal, q_XQH, k_XCH, v_XCH, ids)[0]


def _forward(causal, q_XQH, k_XCH, v_XCH, ids) -> tuple[jax.Array, Any]:
  def one(given):
    q, k, v, ids = given
    scores = jnp.where(_hidden(ids, causal).T, _NEG, _product(q, k.T))
    peak = scores.max(-1)
    weights = jnp.exp(scores - peak[:, None])
    total = weights.sum(-1)
    mixed = _product(weights.astype(v.dtype), v) / total[:, None]
    return mixed.astype(q.dtype), peak + jnp.log(total)

  mixed, total = jax.lax.map(one, (q_XQH, k_XCH, v_XCH, ids))
  return mixed, (q_XQH, k_XCH, v_XCH, ids, mixed, total)


def _backward(causal, kept, slopes_XQH) -> tuple[Any, ...]:
  def one(given):
    q, k, v, ids, mixed, total, slope = given
    offset = jnp.sum(mixed.astype(jnp.float32) * slope, -1)
    # Keys outside queries: two of three products with them need no transpose.
    weights = jnp.where(
        _hidden(ids, causal), 0.0, jnp.exp(_product(k, q.T) - total)
    )
    to_v = _product(weights.astype(v.dtype), slope)
    scores = weights * (_product(v, slope.T) - offset)
    scores = scores.astype(q.dtype)
    to_k = _product(scores, q)
    to_q = _product(k.T, scores).T
    return to_q.astype(q.dtype), to_k.astype(k.dtype), to_v.astype(v.dtype)

  return *jax.lax.map(one, (*kept, slopes_XQH)), None


_attend.defvjp(_forward, _backward)
