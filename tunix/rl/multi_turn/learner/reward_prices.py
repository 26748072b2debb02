"""Prices of length and KL that an update takes off its episodes' rewards.

Promises: only valid members are priced; statistics of rewards do not contain
prices; without `overlong_tokens` and `kl_in=reward` there are none.

Does not: compute log-probs; the caller passes a function that does.

Axis names: T = tokens of a sequence, K = turns of an episode.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import examples as example_lib
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.algorithms import shaping

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
      prices[member.trajectory_id] = shaping.length_price(
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
    price = shaping.kl_price(
        nats, sequence.turn_ids[mask], kl_coef, turns[name]
    )
    prices[name] = prices.get(name, 0.0) + price
    total += float(nats.sum())
    tokens += len(nats)
  return total / max(tokens, 1)
