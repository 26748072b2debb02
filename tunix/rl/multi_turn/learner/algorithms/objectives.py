"""Computes policy objectives: a loss for each token, to be minimised.

An objective sees the sampled tokens of one buffer of a micro-batch; those of a
sequence are neighbours in it (`sequence_sums`). Masking, weighting and summing
are done by the caller (see `aggregation`), and so are the KL and entropy terms.

Axis names: M = tokens; padding among them is ignored by the caller.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import sequence_sums

_DEFAULTS = config_lib.AlgorithmConfig()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Inputs of an objective; all float32[M] unless said otherwise.

  Attributes:
    logprobs: Log-probs of the weights being trained; carries the gradient.
    anchor: log-probs the ratio is taken to.
    weight: importance weights.
    advantages: Advantage of each token.
    sequences: int32[M], number of the token's sequence in the step; -1 for
      padding.
  """

  logprobs: jax.Array
  anchor: jax.Array
  weight: jax.Array
  advantages: jax.Array | np.ndarray
  sequences: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
  """Numbers of the objectives.

  Attributes:
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: bounds the loss of a negative advantage by this many times its
      size; 0 for no bound.
    sapo_tau_pos, sapo_tau_neg: temperatures of SAPO's gate, by the sign of the
      advantage.
    cov_share: Share of tokens that clip_cov and kl_cov hold back.
    cov_low, cov_high: Bounds of the covariance of tokens that clip_cov takes.
    cov_kl_coef: Weight of the KL on the tokens that kl_cov takes.
  """

  clip_low: float = _DEFAULTS.clip_low
  clip_high: float = _DEFAULTS.clip_high
  dual_clip: float = _DEFAULTS.dual_clip
  sapo_tau_pos: float = _DEFAULTS.sapo_tau_pos
  sapo_tau_neg: float = _DEFAULTS.sapo_tau_neg
  cov_share: float = _DEFAULTS.cov_share
  cov_low: float = _DEFAULTS.cov_low
  cov_high: float = _DEFAULTS.cov_high
  cov_kl_coef: float = _DEFAULTS.cov_kl_coef


Readings = dict[str, jax.Array]
"""Metric name -> float32[M]; the mean over real tokens is reported."""


@dataclasses.dataclass(frozen=True)
class Objective:
  """An objective.

  Attributes:
    apply: (tokens, options) -> (loss [M], readings).
    uses_advantages: False for objectives of imitation, which need no rewards
      and no sampled log-probs.
  """

  apply: Callable[[TokenBatch, ObjectiveOptions], tuple[jax.Array, Readings]]
  uses_advantages: bool = True


OBJECTIVES: registry.Registry[Objective] = registry.Registry("objective")


def clipped(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-w min(ratio A, clip(ratio) A), both clips independent.

  Schulman et al. 2017, "PPO", equation 7 (arXiv:1707.06347), as in Shao et al.
  2024, "GRPO" (arXiv:2402.03300); separate clips: Yu et al. 2025, "DAPO",
  section 3.1 (arXiv:2503.14476). With dual_clip = c, max of that gain and c A
  where A < 0: Ye et al. 2020, "Mastering Complex Control", equation 5
  (arXiv:1912.09729).
  """
  return _clipped(_log_ratio(tokens), tokens, options)


def sequence_clipped(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """As `clipped`, with the geometric mean of the sequence's ratios.

  Each token carries its sequence's ratio, so a weight of 1 / (N tokens) makes
  the loss the mean over N sequences: Zheng et al. 2025, "GSPO", equations 5
  and 7 (arXiv:2507.18071). A sequence is a `TokenSequence`: an agent that
  rewrites its history has several an episode.
  """
  log_ratio = sequence_sums.mean(_log_ratio(tokens), tokens.sequences)
  return _clipped(log_ratio, tokens, options)


def sequence_clipped_token(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """As `sequence_clipped` in value, with the gradient of each token's own
  log-prob: for advantages that differ within a sequence.

  Zheng et al. 2025, "GSPO", equations 13 and 14 (arXiv:2507.18071).
  """
  log_ratio = jax.lax.stop_gradient(
    sequence_sums.mean(_log_ratio(tokens), tokens.sequences)
  )
  own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)
  return _clipped(log_ratio + own, tokens, options)


def cispo(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-w sg(clip(ratio)) A log p: the weight is clipped, no token is dropped.

  MiniMax 2025, "MiniMax-M1", equations 4 and 5 (arXiv:2506.13585); clip_low =
  1 is no lower bound.
  """
  ratio = jnp.exp(jax.lax.stop_gradient(_log_ratio(tokens)))
  low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
  gain = jnp.clip(ratio, low, high) * tokens.advantages * tokens.logprobs
  return -tokens.weight * gain, _clip_readings(ratio < low, ratio > high)


def policy_gradient(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-w A log p: no ratio, so one optimizer step an update.

  Williams 1992, "REINFORCE"; Chu et al. 2025, "GPG" (arXiv:2504.02546).
  """
  del options
  return -tokens.weight * tokens.advantages * tokens.logprobs, {}


def soft_gated(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-w (4 / tau) sigmoid(tau (ratio - 1)) A, tau by the sign of A.

  At ratio 1 the gradient is that of ratio A, and it falls smoothly on either
  side: Gao et al. 2025, "Soft Adaptive Policy Optimization"
  (arXiv:2511.20347).
  """
  ratio = jnp.exp(_log_ratio(tokens))
  a = jnp.asarray(tokens.advantages)
  tau = jnp.where(a > 0, options.sapo_tau_pos, options.sapo_tau_neg)
  gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
  return -tokens.weight * gate * a, {}


def clip_cov(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """As `clipped`, without the gradient of a few tokens of high covariance.

  Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for
  Reasoning Language Models", equations 11 and 12 (arXiv:2505.22617): of the
  tokens with cov_low < covariance < cov_high that the clip leaves, a random
  cov_share of all tokens. The means are over the buffer, as over the
  micro-batch in the authors' code; the draw is a function of its log-probs.
  """
  loss, readings = clipped(tokens, options)
  cov = covariances(tokens)
  free = readings["clip_fraction"] == 0
  inside = (cov > options.cov_low) & (cov < options.cov_high) & free
  bits = jax.lax.bitcast_convert_type(
    jnp.where(
      jnp.asarray(tokens.sequences) >= 0,
      jax.lax.stop_gradient(tokens.logprobs),
      0.0,
    ),
    jnp.uint32,
  )
  key = jax.random.fold_in(jax.random.key(0), jnp.sum(bits))
  drawn = jnp.where(inside, jax.random.uniform(key, cov.shape), -1.0)
  is_clipped = inside & _highest(drawn, tokens, options.cov_share)
  readings["held_fraction"] = is_clipped.astype(jnp.float32)
  return jnp.where(is_clipped, jax.lax.stop_gradient(loss), loss), readings


def kl_cov(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-w ratio A, and beta |log ratio| on the tokens of highest covariance.

  Cui et al. 2025, equations 13 and 14 (arXiv:2505.22617), with the authors'
  estimate of the KL from the sampling policy. No ratio is clipped.
  """
  log_ratio = _log_ratio(tokens)
  gain = jnp.exp(log_ratio) * jnp.asarray(tokens.advantages)
  is_priced = _highest(covariances(tokens), tokens, options.cov_share)
  price = jnp.where(is_priced, options.cov_kl_coef * jnp.abs(log_ratio), 0.0)
  readings = {"held_fraction": is_priced.astype(jnp.float32)}
  return tokens.weight * (price - gain), readings


def covariances(tokens: TokenBatch) -> jax.Array:
  """Returns float32[M], (log p - mean) (A - mean); -inf for padding."""
  real = jnp.asarray(tokens.sequences) >= 0
  count = jnp.maximum(jnp.sum(real), 1)

  def centred(values: jax.Array) -> jax.Array:
    real_values = jnp.where(real, values, 0.0)
    return real_values - jnp.sum(real_values) / count

  cov = centred(jax.lax.stop_gradient(tokens.logprobs)) * centred(
    jnp.asarray(tokens.advantages)
  )
  return jnp.where(real, cov, -jnp.inf)


def _highest(values: jax.Array, tokens: TokenBatch, share: float) -> jax.Array:
  """Returns bool[M], the share of real tokens with the highest values."""
  real = jnp.asarray(tokens.sequences) >= 0
  count = jnp.maximum((share * jnp.sum(real)).astype(jnp.int32), 1)
  order = jnp.argsort(jnp.where(real, -values, jnp.inf))
  rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
  return (rank < count) & real


def _log_ratio(tokens: TokenBatch) -> jax.Array:
  return jnp.clip(
    tokens.logprobs - tokens.anchor, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO
  )


def _clipped(
  log_ratio: jax.Array, tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  ratio = jnp.exp(log_ratio)
  low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
  a = jnp.asarray(tokens.advantages)
  gain = jnp.minimum(ratio * a, jnp.clip(ratio, low, high) * a)
  clipped_low = (ratio < low) & (a < 0)
  clipped_high = (ratio > high) & (a > 0)
  readings = _clip_readings(clipped_low, clipped_high)
  if options.dual_clip:
    bound = options.dual_clip * a
    readings["clip_fraction_dual"] = ((a < 0) & (gain < bound)).astype(
      jnp.float32
    )
    gain = jnp.where(a < 0, jnp.maximum(gain, bound), gain)
  return -tokens.weight * gain, readings


def _clip_readings(low: jax.Array, high: jax.Array) -> Readings:
  return {
    "clip_fraction": (low | high).astype(jnp.float32),
    "clip_fraction_low": low.astype(jnp.float32),
    "clip_fraction_high": high.astype(jnp.float32),
  }


def behaviour_cloning(
  tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-log p of the demonstrated token (Pomerleau 1989, "ALVINN")."""
  del options
  return -tokens.logprobs, {}


for _name, _apply in (
  ("grpo", clipped),
  ("gspo", sequence_clipped),
  ("gspo_token", sequence_clipped_token),
  ("cispo", cispo),
  ("policy_gradient", policy_gradient),
  ("sapo", soft_gated),
  ("clip_cov", clip_cov),
  ("kl_cov", kl_cov),
):
  OBJECTIVES.register(_name, Objective(_apply))
OBJECTIVES.register(
  "behaviour_cloning", Objective(behaviour_cloning, uses_advantages=False)
)
