"""Adds to rewards before advantages are computed: prices of length and of KL.

What is added to a turn's reward counts in its episode's as well. Statistics of
rewards are reported without it.

Promises: prices are <= 0 for the length, and for k2 and k3.

Axis names: N = episodes, K = turns of one.
"""

from __future__ import annotations

import numpy as np


def soft_overlong(
    lengths_N: np.ndarray, limit: int, cache: int
) -> np.ndarray:
  """float64[N]: 0 up to limit - cache tokens, then falling to -1 at the limit.

  Yu et al. 2025, "DAPO", equation 13 (arXiv:2503.14476), with L_max = limit
  and L_cache = cache; longer than the limit costs 1.

  Args:
    lengths_N: tokens sampled in each episode.
    limit: L_max, in tokens.
    cache: L_cache, in tokens, in (0, limit].
  """
  over = (limit - cache - np.asarray(lengths_N, np.float64)) / cache
  return np.clip(over, -1.0, 0.0)


def kl_price(
    kl_T: np.ndarray, turn_ids_T: np.ndarray, coef: float, turns: int
) -> np.ndarray:
  """Returns float64[K]: -coef times the sum of each turn's KL.

  The reward of Ouyang et al. 2022, "InstructGPT", equation 2
  (arXiv:2203.02155), and of Ahmadian et al. 2024, "Back to Basics", equation 3
  (arXiv:2402.14740), at turns.

  Args:
    kl_T: KL estimate of each sampled token, in nats.
    turn_ids_T: the turn that sampled it.
    coef: price of a nat.
    turns: K.
  """
  total_K = np.bincount(turn_ids_T, weights=kl_T, minlength=turns)
  return -coef * total_K


def length_price(
    tokens_K: np.ndarray, limit: int, cache: int
) -> np.ndarray:
  """Returns float64[K]: `soft_overlong` of an episode, at its last turn."""
  out = np.zeros(len(tokens_K), np.float64)
  if len(out):
    out[-1] = soft_overlong(np.array([tokens_K.sum()]), limit, cache)[0]
  return out
