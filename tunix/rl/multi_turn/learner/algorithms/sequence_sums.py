"""Sums over the tokens of each sequence of a buffer, for whole-sequence ratios.

Promises: sums have gradients; equal inputs give equal bits (scans, no scatter).

Does not: see a sequence beyond its buffer; the packer keeps all sampled tokens
of a sequence side by side in one buffer.

Axis names: M = sampled tokens of a buffer; padding among them has number -1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Numbers = jax.Array | np.ndarray


def total(values: jax.Array, sequences: Numbers) -> jax.Array:
  """Returns float32[M], at each token the sum over its whole sequence.

  Args:
    values: float32[M].
    sequences: int32[M], equal for the tokens of a sequence, which are
      neighbours; -1 for padding, whose values are not read.
  """
  # Running sums from both ends of a sequence add up to its sum, and hold the
  # token itself twice. Two scans need no table of sequences.
  numbers = jnp.asarray(sequences)
  values = jnp.where(numbers >= 0, values, 0.0)
  changes = numbers[1:] != numbers[:-1]
  edge = jnp.ones((1,), bool)
  before = _running(values, jnp.concatenate([edge, changes]))
  after = _running(values[::-1], jnp.concatenate([changes, edge])[::-1])[::-1]
  return before + after - values


def mean(values: jax.Array, sequences: Numbers) -> jax.Array:
  """Returns float32[M]: as `total`, the mean; 0 for padding."""
  count = total(jnp.ones_like(values), sequences)
  return total(values, sequences) / jnp.maximum(count, 1.0)


def least(values: jax.Array, sequences: Numbers) -> jax.Array:
  """Returns float32[M]: as `total`, the minimum; no gradient."""
  values = jax.lax.stop_gradient(values)
  numbers = jnp.asarray(sequences)
  changes = numbers[1:] != numbers[:-1]
  edge = jnp.ones((1,), bool)

  def lower(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.minimum(a, b)

  before = _running(values, jnp.concatenate([edge, changes]), lower)
  after = _running(values[::-1], jnp.concatenate([changes, edge])[::-1], lower)[
    ::-1
  ]
  return jnp.minimum(before, after)


def _running(values, starts, combine=jnp.add) -> jax.Array:
  """Returns the running sum of `values`, begun anew at `starts`."""

  def join(a, b):
    return jnp.where(b[1], b[0], combine(a[0], b[0])), a[1] | b[1]

  return jax.lax.associative_scan(join, (values, starts))[0]
