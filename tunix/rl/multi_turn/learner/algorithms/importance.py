"""Corrects for tokens that another distribution than the policy's sampled.

Other weights, another engine or truncation make the difference. A correction
chooses the policy that the objective's ratio is to, and weighs tokens.
`sampled` are the log-probs the sampler reported; `proximal` are those of the
learner's weights at the beginning of the update. Neither carries a gradient.

Axis names: M = tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import sequence_sums

_DEFAULTS = config_lib.AlgorithmConfig()


@dataclasses.dataclass(frozen=True)
class ImportanceOptions:
  """Bounds of the ratio of learner to sampler.

  Attributes:
    cap: largest weight; beyond it a weight is truncated (tis) or 0 (mis).
    low: mis gives weight 0 below it.
    veto: a sequence with a token whose ratio is below it has weight 0; 0 for
      no veto.
  """

  cap: float = _DEFAULTS.tis_cap
  low: float = _DEFAULTS.mis_low
  veto: float = _DEFAULTS.veto


@dataclasses.dataclass(frozen=True)
class Correction:
  """Corrects for tokens sampled by older weights or another engine.

  Attributes:
    apply: (proximal [M], sampled [M], options) -> (anchor [M], weight [M]);
      the objective's ratio is to `anchor`, its token losses are multiplied by
      `weight`.
    needs_proximal: whether `proximal` is read; if so an update of several
      optimizer steps starts with a forward pass over its tokens.
    needs_sequences: whether `apply` takes `sequences=`, int32[M], as
      `objectives.TokenBatch.sequences`.
  """

  apply: Callable[..., tuple[jax.Array, jax.Array]]
  needs_proximal: bool
  needs_sequences: bool = False


def corrected(
  correction: Correction,
  proximal: jax.Array,
  sampled: jax.Array,
  sequences: jax.Array | np.ndarray,
  options: ImportanceOptions,
) -> tuple[jax.Array, jax.Array]:
  """(anchor [M], weight [M]) of one buffer, the veto applied."""
  more = {"sequences": sequences} if correction.needs_sequences else {}
  anchor, weight = correction.apply(proximal, sampled, options, **more)
  if options.veto:
    weight = weight * kept(proximal, sampled, sequences, options.veto)
  return anchor, weight


CORRECTIONS: registry.Registry[Correction] = registry.Registry(
  "importance correction"
)


def none(
  proximal: jax.Array, sampled: jax.Array, options: ImportanceOptions
) -> tuple[jax.Array, jax.Array]:
  """The ratio is to the sampler's own log-probs; every token counts fully."""
  del proximal, options
  return sampled, jnp.ones_like(sampled)


def truncated(
  proximal: jax.Array, sampled: jax.Array, options: ImportanceOptions
) -> tuple[jax.Array, jax.Array]:
  """The ratio is to the learner at the update's start; weight min(c, p / s).

  Decoupled policies: Hilton et al. 2021, "Batch size-invariance for policy
  optimization" (arXiv:2110.00641), used for stale tokens by Fu et al. 2025,
  "AReaL" (arXiv:2505.24298). Truncation: Ionides 2008, "Truncated Importance
  Sampling"; for engine mismatch Yao et al. 2025, "Your Efficient RL Framework
  Secretly Brings You Off-Policy RL Training".
  """
  log_ratio = jnp.clip(proximal - sampled, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)
  return proximal, jnp.minimum(jnp.exp(log_ratio), options.cap)


def decoupled(
  proximal: jax.Array, sampled: jax.Array, options: ImportanceOptions
) -> tuple[jax.Array, jax.Array]:
  """As `truncated`, with the whole ratio p / s as weight.

  Hilton et al. 2021, equation 5 (arXiv:2110.00641).
  """
  del options
  return proximal, jnp.exp(_log_ratio(proximal, sampled))


def truncated_sequence(
  proximal: jax.Array,
  sampled: jax.Array,
  options: ImportanceOptions,
  *,
  sequences: jax.Array | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
  """As `truncated`, with min(c, product of p / s over the sequence).

  Liu et al. 2025, "When Speed Kills Stability", Seq-TIS: the unbiased ratio of
  a whole sequence, truncated.
  """
  log_ratio = sequence_sums.total(_log_ratio(proximal, sampled), sequences)
  return proximal, jnp.minimum(_exp(log_ratio), options.cap)


def masked(
  proximal: jax.Array, sampled: jax.Array, options: ImportanceOptions
) -> tuple[jax.Array, jax.Array]:
  """The ratio is to the learner; weight p / s, and 0 outside [low, cap].

  Ling team 2025, "IcePop" (low 0.5, cap 5). A token of weight 0 still counts
  in the number of tokens that the loss is divided by.
  """
  return proximal, _inside(_log_ratio(proximal, sampled), options)


def masked_sequence(
  proximal: jax.Array,
  sampled: jax.Array,
  options: ImportanceOptions,
  *,
  sequences: jax.Array | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
  """As `masked`, with the product of p / s over the sequence.

  Liu et al. 2025, "When Speed Kills Stability", Seq-MIS.
  """
  log_ratio = sequence_sums.total(_log_ratio(proximal, sampled), sequences)
  return proximal, _inside(log_ratio, options)


def masked_geometric(
  proximal: jax.Array,
  sampled: jax.Array,
  options: ImportanceOptions,
  *,
  sequences: jax.Array | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
  """As `masked`, with the geometric mean of p / s over the sequence.

  Li et al. 2025, "Trust Region Masking for Long-Horizon LLM RL": long
  sequences are judged as short ones are. The bounds are near 1, e.g. low 0.999
  and cap 1.001.
  """
  log_ratio = sequence_sums.mean(_log_ratio(proximal, sampled), sequences)
  return proximal, _inside(log_ratio, options)


def kept(
  proximal: jax.Array,
  sampled: jax.Array,
  sequences: jax.Array | np.ndarray,
  veto: float,
) -> jax.Array:
  """Returns float32[M], 0 in a sequence with a ratio < veto, else 1.

  Liu et al. 2025, "When Speed Kills Stability": one token that the learner
  would hardly have sampled marks a broken sequence (1e-4 there).
  """
  lowest = sequence_sums.least(_log_ratio(proximal, sampled), sequences)
  return (lowest >= math.log(veto)).astype(jnp.float32)


def _log_ratio(proximal: jax.Array, sampled: jax.Array) -> jax.Array:
  return jnp.clip(proximal - sampled, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)


def _exp(log_ratio: jax.Array) -> jax.Array:
  return jnp.exp(jnp.clip(log_ratio, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO))


def _inside(log_ratio: jax.Array, options: ImportanceOptions) -> jax.Array:
  ratio = _exp(log_ratio)
  return jnp.where((ratio >= options.low) & (ratio <= options.cap), ratio, 0.0)


CORRECTIONS.register("none", Correction(none, needs_proximal=False))
CORRECTIONS.register("tis", Correction(truncated, needs_proximal=True))
CORRECTIONS.register("decoupled", Correction(decoupled, needs_proximal=True))
CORRECTIONS.register("mis", Correction(masked, needs_proximal=True))
for _name, _apply in (
  ("tis_sequence", truncated_sequence),
  ("mis_sequence", masked_sequence),
  ("mis_geometric", masked_geometric),
):
  CORRECTIONS.register(
    _name, Correction(_apply, needs_proximal=True, needs_sequences=True)
  )
