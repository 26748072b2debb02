"""Computes advantages from a critic's values: GAE over turns and tokens.

An episode is one chain of sampled tokens, through all its turns and training
sequences. The reward of a turn is that of its last token. Discount and lambda
differ within a turn, where nothing but the policy's own tokens happens, and
between turns, where the environment acts.

Promises: a pure function of rewards, values and turns; float64 throughout.

Does not: compare episodes; see log-probs or groups.

Axis names: M = sampled tokens of an episode, K = its turns.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeValues:
  """Rewards and values of an episode, the input of a `TokenEstimator`.

  Attributes:
    rewards_K: float64[K], of its turns.
    turn_ids_M: int[M], the turn that sampled each token; never decreases.
    values_M: float64[M], the critic's value of the state before each token.
    last: value of the state after the last token; 0 where the episode's end
      is the task's.
  """

  rewards_K: np.ndarray
  turn_ids_M: np.ndarray
  values_M: np.ndarray
  last: float = 0.0

  def __post_init__(self):
    if len(self.turn_ids_M) != len(self.values_M):
      raise ValueError(
        f"EpisodeValues has {len(self.turn_ids_M)} turn ids and"
        f" {len(self.values_M)} values"
      )
    if np.any(np.diff(self.turn_ids_M) < 0):
      raise ValueError("EpisodeValues.turn_ids_M must not decrease")
    if len(self.turn_ids_M) and self.turn_ids_M[-1] >= len(self.rewards_K):
      raise ValueError(
        f"EpisodeValues has a token of turn {self.turn_ids_M[-1]} and rewards"
        f" of {len(self.rewards_K)} turns"
      )


@dataclasses.dataclass(frozen=True)
class GaeOptions:
  """Discounts and decays.

  Attributes:
    gamma: discount between turns; it is 1 within a turn.
    turn_lambda: decay between turns.
    token_lambda: decay between tokens of a turn.
  """

  gamma: float = 1.0
  turn_lambda: float = 0.95
  token_lambda: float = 1.0


@dataclasses.dataclass(frozen=True)
class TokenEstimator:
  """An advantage estimator that needs a value head.

  Attributes:
    apply: (episode, options) -> (advantages float64[M], value targets
      float64[M]).
  """

  apply: Callable[[EpisodeValues, GaeOptions], tuple[np.ndarray, np.ndarray]]


def generalized_advantages(
  episode: EpisodeValues, options: GaeOptions
) -> tuple[np.ndarray, np.ndarray]:
  """Returns advantages A [M] and value targets A + V [M].

  With delta_t = r_t + gamma_t V_(t+1) - V_t, A_t = delta_t + gamma_t lambda_t
  A_(t+1): Schulman et al. 2015, "High-Dimensional Continuous Control Using
  Generalized Advantage Estimation", equation 16 (arXiv:1506.02438). gamma_t and
  lambda_t are those of the turn's boundary at the last token of a turn. V after
  the last token is `last`: an episode that a limit cuts goes on in the mind of
  the critic (Pardo et al. 2018, "Time Limits in Reinforcement Learning",
  arXiv:1712.00378). With both lambdas 1 the target is the discounted return.

  The reward of a turn without a token (none was sampled in it) counts at the
  last token before it, or at the first token where there is none.
  """
  turns, values = episode.turn_ids_M, episode.values_M
  size = len(turns)
  advantages_M = np.zeros(size, np.float64)
  if not size:
    return advantages_M, advantages_M.copy()
  # 1. A turn's reward counts at its last token.
  is_last_M = np.append(turns[1:] != turns[:-1], True)
  rewards_M = np.zeros(size, np.float64)
  for turn, reward in enumerate(episode.rewards_K):
    here = int(np.searchsorted(turns, turn, side="right")) - 1
    rewards_M[max(here, 0)] += float(reward)
  # 2. From the last token back: each advantage needs the following one.
  following, running = float(episode.last), 0.0
  for t in range(size - 1, -1, -1):
    gamma = options.gamma if is_last_M[t] else 1.0
    decay = options.turn_lambda if is_last_M[t] else options.token_lambda
    delta = rewards_M[t] + gamma * following - values[t]
    running = delta + gamma * decay * running
    advantages_M[t] = running
    following = float(values[t])
  return advantages_M, advantages_M + values


gae = TokenEstimator(generalized_advantages)
"""Of `algorithm.advantage=gae`; see `generalized_advantages`."""
