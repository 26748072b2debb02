"""Weighs each sampled token in the loss of a step.

The loss is the sum of weight x token loss, with weights made here from the
whole step's token counts. Therefore the packing of tokens into rows,
micro-batches and devices does not matter, and tokens left out of the batch
because their gradient is 0 still count.

Axis names: N = training sequences of an optimizer step.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np
from tunix.rl.multi_turn.core import registry


@dataclasses.dataclass(frozen=True, eq=False)
class StepTokens:
  """Sizes of everything an optimizer step learns from.

  Attributes:
    tokens_N: int64[N], sampled tokens of each sequence, all > 0.
    episode_N: int64[N], number of the episode each sequence belongs to.
    length: the constant length L, in tokens.
  """

  tokens_N: np.ndarray
  episode_N: np.ndarray
  length: int

  def __post_init__(self):
    if len(self.tokens_N) != len(self.episode_N):
      raise ValueError(
        f"StepTokens has {len(self.tokens_N)} sequences and"
        f" {len(self.episode_N)} episode numbers"
      )
    if len(self.tokens_N) and np.min(self.tokens_N) <= 0:
      raise ValueError("a training sequence has no sampled token")
    if self.length <= 0:
      raise ValueError(f"StepTokens.length must be > 0, got {self.length}")


Aggregator = Callable[[StepTokens], np.ndarray]
"""Returns float64[N]: the weight of every token of each sequence."""

AGGREGATORS: registry.Registry[Aggregator] = registry.Registry(
  "loss aggregation"
)


@AGGREGATORS.register("token_mean")
def token_mean(step: StepTokens) -> np.ndarray:
  """Weighs every token equally: 1 / (number of tokens).

  Yu et al. 2025, "DAPO", section 3.3 (arXiv:2503.14476).
  """
  return np.full(len(step.tokens_N), 1.0 / max(step.tokens_N.sum(), 1))


@AGGREGATORS.register("sequence_mean")
def sequence_mean(step: StepTokens) -> np.ndarray:
  """Weighs every sequence equally, every token of a sequence equally.

  Shao et al. 2024 (arXiv:2402.03300), equation 3, where an output is one
  sequence. An agent that rewrites its history has several an episode.
  """
  return 1.0 / (step.tokens_N * float(max(len(step.tokens_N), 1)))


@AGGREGATORS.register("episode_mean")
def episode_mean(step: StepTokens) -> np.ndarray:
  """Weighs every episode equally, every token of an episode equally.

  Shao et al. 2024 (arXiv:2402.03300), equation 3, where an output is everything
  the policy sampled in an episode.
  """
  unique, inverse = np.unique(step.episode_N, return_inverse=True)
  per_episode = np.bincount(
    inverse, weights=step.tokens_N, minlength=len(unique)
  )
  return 1.0 / (per_episode[inverse] * max(len(unique), 1))


@AGGREGATORS.register("constant")
def constant(step: StepTokens) -> np.ndarray:
  """1 / (number of episodes x L): no bias towards short or long episodes.

  Liu et al. 2025, "Dr. GRPO" (arXiv:2503.20783).
  """
  episodes = max(len(np.unique(step.episode_N)), 1)
  return np.full(len(step.tokens_N), 1.0 / (episodes * step.length))
