"""Computes policy objectives: a loss for each token, to be minimised.

An objective sees tokens only. Masking, weighting and summing are done by the
caller (see `aggregation`), and so are the KL and entropy terms.

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

_DEFAULTS = config_lib.AlgorithmConfig()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Inputs of an objective; all float32[M] unless said otherwise.

  Attributes:
    logprobs: of the weights being trained; carries the gradient.
    anchor: log-probs the ratio is taken to.
    weight: importance weights.
    advantages: of each token.
    sequences: int32[M], number of the token's sequence in the step.
  """

  logprobs: jax.Array
  anchor: jax.Array
  weight: jax.Array
  advantages: jax.Array | np.ndarray
  sequences: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
  """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""

  clip_low: float = _DEFAULTS.clip_low
  clip_high: float = _DEFAULTS.clip_high


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
  section 3.1 (arXiv:2503.14476).
  """
  log_ratio = jnp.clip(
      tokens.logprobs - tokens.anchor, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO
  )
  ratio = jnp.exp(log_ratio)
  low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
  a = tokens.advantages
  gain = jnp.minimum(ratio * a, jnp.clip(ratio, low, high) * a)
  clipped_low = (ratio < low) & (a < 0)
  clipped_high = (ratio > high) & (a > 0)
  return -tokens.weight * gain, {
      "clip_fraction": (clipped_low | clipped_high).astype(jnp.float32),
      "clip_fraction_low": clipped_low.astype(jnp.float32),
      "clip_fraction_high": clipped_high.astype(jnp.float32),
  }


def behaviour_cloning(
    tokens: TokenBatch, options: ObjectiveOptions
) -> tuple[jax.Array, Readings]:
  """-log p of the demonstrated token (Pomerleau 1989, "ALVINN")."""
  del options
  return -tokens.logprobs, {}


OBJECTIVES.register("grpo", Objective(clipped))
OBJECTIVES.register(
    "behaviour_cloning", Objective(behaviour_cloning, uses_advantages=False)
)
