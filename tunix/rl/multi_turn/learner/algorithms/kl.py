"""Estimates KL(policy || reference), a number for each sampled token.

With d = log p_reference - log p_policy of the sampled token, and r = exp(d):
J. Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx).
The expectation under the policy is the KL for k1 and k3, and close to it for
k2. As a penalty that gradients flow through, k2 has the gradient of
KL(policy || reference) in expectation, k3 that of KL(reference || policy), and
k1's vanishes: in the loss, k1 is a reading and no penalty. In the reward
(`reward_prices`) no gradient flows through any of them, and k1 is the
unbiased one.

Axis names: M = tokens.
"""

from __future__ import annotations

from typing import Callable

import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.core import registry

KlEstimator = Callable[[jax.Array, jax.Array], jax.Array]
"""(policy log-probs [M], reference log-probs [M]) -> [M], in nats."""

ESTIMATORS: registry.Registry[KlEstimator] = registry.Registry("KL estimator")

# exp() of a larger log-ratio overflows float32 sums; the loss is long lost by
# then, and a clipped value keeps the step finite.
MAX_LOG_RATIO = 20.0


@ESTIMATORS.register("k1")
def k1(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
  """-log r: unbiased, of high variance, may be negative."""
  return logprobs - reference


@ESTIMATORS.register("k2")
def k2(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
  """(log r)^2 / 2: biased, of low variance."""
  return 0.5 * jnp.square(reference - logprobs)


@ESTIMATORS.register("k3")
def k3(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
  """r - 1 - log r: unbiased, of low variance, never negative."""
  d = jnp.clip(reference - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.expm1(d) - d


GAIN, MOST = 0.1, 0.2


def adapted_coef(coef: float, measured: float, target: float) -> float:
  """Returns the next update's coefficient: higher if the KL is above target.

  coef (1 + 0.1 e), e = (measured - target) / target clipped to +-0.2: Ziegler
  et al. 2019, "Fine-Tuning Language Models from Human Preferences", section
  2.2 (arXiv:1909.08593).

  Args:
    coef: Coefficient of this update.
    measured: mean KL a token in it, in nats.
    target: KL to hold, in nats, > 0.
  """
  error = (measured - target) / target
  return coef * (1.0 + GAIN * min(max(error, -MOST), MOST))
