"""Scores sampled tokens without a [tokens, vocabulary] array.

Hidden states are gathered at the positions that predict a target, then the
vocabulary is read in chunks of targets under a scan whose body is recomputed
in the backward pass: at most one chunk of logits exists at a time, in either
direction.

The distribution is the sampler's: banned ids have probability 0, logits are
divided by the temperature, everything in float32. Truncation (top-k, top-p) is
reproduced where the sampler's support is given, and the distribution is then
that of the tokens in it; it is not computed again, for it depends on the
sampler's weights. Without one, log-probs of truncated samples are corrected by
importance weights or refused, see `algorithms.parts`.

Axis names: S = buffers (batch shards), M = targets of a buffer, C = targets of
a chunk, B = rows, T = tokens of a row, D = width, V = vocabulary, K = tokens of
a support.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.policy import base

# Finite, so that 0 x logit is 0 and not NaN in sums over the vocabulary.
_BANNED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
  """Scores of given tokens by the policy; each float32[S, M].

  Attributes:
    logprobs: nats, of the target.
    entropy: nats, of the distribution the target is drawn from.
    top: 1 where no token is more likely than the target. No gradient.
  """

  logprobs: jax.Array
  entropy: jax.Array
  top: jax.Array


def gather_hidden(hidden_BTD: jax.Array, index_SM: base.Array) -> jax.Array:
  """Returns [S, M, D] hidden states at the positions of `Batch.index`."""
  b, t, d = hidden_BTD.shape
  s = index_SM.shape[0]
  flat = hidden_BTD.reshape(s, b // s * t, d)
  return jax.vmap(lambda h, i: h[i])(flat, index_SM)


def score(
  logits: jax.Array,
  targets: base.Array,
  temperature: float,
  banned_V: np.ndarray | None,
  support: base.Array | None = None,
) -> TokenScores:
  """Scores of targets [...] under logits [..., V].

  With `support`, int32[..., K], the distribution is over those tokens alone
  where any is >= 0: "Keep Sampling Mask", DeepSeek-AI 2025, "DeepSeek-V3.2",
  section 3.1 (arXiv:2512.02556).
  """
  logits = logits.astype(jnp.float32)
  if banned_V is not None:
    logits = jnp.where(banned_V, _BANNED, logits)
  if temperature != 1.0:
    logits = logits / temperature
  peak = lax.stop_gradient(jnp.max(logits, axis=-1))
  shifted = logits - peak[..., None]
  exp = jnp.exp(shifted)
  total = jnp.sum(exp, axis=-1)
  log_total = jnp.log(total)
  # A comparison and a sum instead of a gather: with the vocabulary split over
  # devices each sums its part, and no logits are moved.
  hit = (
    lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    == (targets[..., None])
  )
  chosen = jnp.sum(jnp.where(hit, shifted, 0.0), axis=-1)
  mean = jnp.sum(exp * shifted, axis=-1) / total
  if support is not None:
    in_support = jnp.asarray(support) >= 0
    of_kept = jnp.take_along_axis(
      shifted, jnp.where(in_support, support, 0), axis=-1
    )
    truncated = jnp.any(in_support, axis=-1)
    # The likeliest of them is at 0 again: another's weights may rank a token
    # outside of the support far above it.
    highest = jnp.max(jnp.where(in_support, of_kept, _BANNED), axis=-1)
    peak = lax.stop_gradient(jnp.where(truncated, highest, 0.0))
    exp = jnp.where(
      in_support,
      jnp.exp(jnp.where(in_support, of_kept - peak[..., None], 0.0)),
      0.0,
    )
    part = jnp.where(truncated, jnp.sum(exp, axis=-1), 1.0)
    log_part = jnp.log(part) + peak
    weighted = jnp.where(in_support, exp * of_kept, 0.0)
    own_mean = jnp.sum(weighted, axis=-1) / part
    log_total = jnp.where(truncated, log_part, log_total)
    mean = jnp.where(truncated, own_mean, mean)
  return TokenScores(
    logprobs=chosen - log_total,
    entropy=log_total - mean,
    top=(lax.stop_gradient(chosen) >= 0.0).astype(jnp.float32),
  )


def token_scores(
  model: base.Policy,
  hidden_SMD: jax.Array,
  targets_SM: base.Array,
  *,
  temperature: float = 1.0,
  banned_V: np.ndarray | None = None,
  chunk: int = 1024,
  support_SMK: base.Array | None = None,
) -> TokenScores:
  """Scores of targets given the hidden states that predict them.

  Args:
    model: has `logits(hidden [..., D]) -> [..., V]`.
    hidden_SMD: Hidden states of the gathered positions.
    targets_SM: int32.
    temperature: > 0.
    banned_V: bool, True where a token is never drawn; None bans nothing.
    chunk: targets of a buffer whose logits exist at a time.
    support_SMK: int32, see `score`; None reproduces no truncation.
  """
  s, m, d = hidden_SMD.shape
  if m <= chunk:
    return score(
      model.logits(hidden_SMD), targets_SM, temperature, banned_V, support_SMK
    )
  steps = -(-m // chunk)
  chunk = -(-m // steps)
  fill = steps * chunk - m
  hidden = jnp.pad(hidden_SMD, ((0, 0), (0, fill), (0, 0)))
  targets = jnp.pad(targets_SM, ((0, 0), (0, fill)))
  hidden = hidden.reshape(s, steps, chunk, d).swapaxes(0, 1)
  targets = targets.reshape(s, steps, chunk).swapaxes(0, 1)
  arrays: tuple[jax.Array, ...] = (hidden, targets)
  if support_SMK is not None:
    padded = jnp.pad(
      support_SMK, ((0, 0), (0, fill), (0, 0)), constant_values=-1
    )
    arrays += (padded.reshape(s, steps, chunk, -1).swapaxes(0, 1),)

  @jax.checkpoint
  def one(hidden_SCD, targets_SC, support_SCK=None):
    logits = model.logits(hidden_SCD)
    return score(logits, targets_SC, temperature, banned_V, support_SCK)

  _, scores = lax.scan(lambda _, x: (None, one(*x)), None, arrays)
  return jax.tree.map(
    lambda x: x.swapaxes(0, 1).reshape(s, steps * chunk)[:, :m], scores
  )


def batch_scores(
  model: base.Policy,
  batch: batching.Batch,
  *,
  temperature: float = 1.0,
  banned_V: np.ndarray | None = None,
  chunk: int = 1024,
) -> tuple[TokenScores, jax.Array]:
  """Scores of every target of a packed batch, [S, M]; padding holds zeros.

  Returns:
    Them, and the hidden states [S, M, D] that they are of.
  """
  hidden = gather_hidden(model(batch.inputs), batch.index)
  scores = token_scores(
    model,
    hidden,
    batch.targets,
    temperature=temperature,
    banned_V=banned_V,
    chunk=chunk,
    support_SMK=batch.support,
  )
  return jax.tree.map(lambda x: jnp.where(batch.mask, x, 0.0), scores), hidden


def banned_mask(
  vocabulary: int, banned_token_ids: Sequence[int]
) -> np.ndarray | None:
  """Returns bool[V] of banned ids; None when there is none.

  Raises:
    ValueError: an id outside the vocabulary.
  """
  if not banned_token_ids:
    return None
  mask = np.zeros(vocabulary, bool)
  for token in banned_token_ids:
    if not 0 <= token < vocabulary:
      raise ValueError(
        f"banned_token_ids holds {token}, the vocabulary has {vocabulary}"
      )
    mask[token] = True
  return mask
