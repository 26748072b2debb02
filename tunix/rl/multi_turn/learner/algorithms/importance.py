"""Corrects for tokens that another distribution than the policy's sampled.

Other weights, another engine or truncation make the difference. A correction
chooses the policy that the objective's ratio is to, and weighs tokens.
`sampled` are the log-probs the sampler reported; `proximal` are those of the
learner's weights at the beginning of the update. Neither carries a gradient.

Axis names: M = tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner.algorithms import kl

_DEFAULTS = config_lib.AlgorithmConfig()


@dataclasses.dataclass(frozen=True)
class ImportanceOptions:
  """`cap` truncates the ratio of learner to sampler."""

  cap: float = _DEFAULTS.tis_cap


@dataclasses.dataclass(frozen=True)
class Correction:
  """Corrects for tokens sampled by older weights or another engine.

  Attributes:
    apply: (proximal [M], sampled [M], options) -> (anchor [M], weight [M]);
      the objective's ratio is to `anchor`, its token losses are multiplied by
      `weight`.
    needs_proximal: whether `proximal` is read; if so an update of several
      optimizer steps starts with a forward pass over its tokens.
  """

  apply: Callable[
      [jax.Array, jax.Array, ImportanceOptions], tuple[jax.Array, jax.Array]
  ]
  needs_proximal: bool


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
  log_ratio = jnp.clip(
      proximal - sampled, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO
  )
  return proximal, jnp.minimum(jnp.exp(log_ratio), options.cap)


CORRECTIONS.register("none", Correction(none, needs_proximal=False))
CORRECTIONS.register("tis", Correction(truncated, needs_proximal=True))
