"""Prices of length and KL that an update takes off its episodes' rewards.

Promises: only valid members are priced; statistics of rewards do not contain
prices; without `overlong_tokens` and `kl_in=reward` there are none. Prices are
<= 0 for the length, and for k2 and k3.

Does not: compute log-probs; the caller passes a function that does.

Axis names: N = episodes, T = tokens of a sequence, K = turns of an episode.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import examples as example_lib

Score = Callable[[Sequence[trajectory.TokenSequence]], "list[np.ndarray]"]
"""Sequences -> float32[T] reference log-probs of their sampled tokens."""

Prices = dict[str, np.ndarray]
"""Trajectory id -> float64[K], added to the turns' rewards."""


def of_groups(
  groups: Sequence[trajectory.TrajectoryGroup],
  algorithm: parts.Algorithm,
  kl_coef: float,
  row_length: int,
  score: Score,
) -> tuple[Prices, dict[str, float]]:
  """Returns the prices of the groups' valid members, and readings of them.

  Args:
    groups: Groups of an update.
    algorithm: its settings and KL estimator.
    kl_coef: price of a nat.
    row_length: longer sequences have no KL price: no row holds them.
    score: Scores by the reference; called where the KL is in the reward.
  """
  config = algorithm.config
  members = [m for group in groups for m in group.valid]
  prices: Prices = {}
  readings: dict[str, float] = {}
  if not members and not config.kl_in_reward:
    return prices, readings  # The score may be one of several processes.
  turns = {m.trajectory_id: len(example_lib.turn_rewards(m)) for m in members}
  if members and config.overlong_tokens:
    for member in members:
      tokens = example_lib.turn_tokens(member, turns[member.trajectory_id])
      prices[member.trajectory_id] = length_price(
        tokens, config.overlong_tokens, config.overlong_begin
      )
    readings["overlong_price"] = float(
      np.mean([-p.sum() for p in prices.values()])
    )
  if config.kl_in_reward:
    readings["kl"] = _add_kl(
      prices, members, turns, algorithm, kl_coef, row_length, score
    )
  return prices, readings


def _add_kl(
  prices: Prices,
  members: Sequence[trajectory.Trajectory],
  turns: dict[str, int],
  algorithm: parts.Algorithm,
  kl_coef: float,
  row_length: int,
  score: Score,
) -> float:
  """Adds each member's KL to its prices; returns the mean KL a token."""
  pairs = [
    (member.trajectory_id, sequence)
    for member in members
    for sequence in member.sequences
    if sequence.num_sampled and len(sequence) <= row_length
  ]
  references = score([sequence for _, sequence in pairs])
  total, tokens = 0.0, 0
  for (name, sequence), reference in zip(pairs, references, strict=True):
    mask = sequence.loss_mask
    nats = np.asarray(
      algorithm.kl(sequence.logprobs[mask], reference[mask]), np.float64
    )
    price = kl_price(nats, sequence.turn_ids[mask], kl_coef, turns[name])
    prices[name] = prices.get(name, 0.0) + price
    total += float(nats.sum())
    tokens += len(nats)
  return total / max(tokens, 1)


def soft_overlong(lengths_N: np.ndarray, limit: int, cache: int) -> np.ndarray:
  """Returns float64[N], 0 up to limit - cache tokens, falling to -1 at limit.

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


def length_price(tokens_K: np.ndarray, limit: int, cache: int) -> np.ndarray:
  """Returns float64[K]: `soft_overlong` of an episode, at its last turn."""
  out = np.zeros(len(tokens_K), np.float64)
  if len(out):
    out[-1] = soft_overlong(np.array([tokens_K.sum()]), limit, cache)[0]
  return out
