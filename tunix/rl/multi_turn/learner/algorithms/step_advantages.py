"""Computes advantages with statistics over all groups of a step.

Promises: advantages are finite; a step of rewards that are equal up to rounding
gets 0 exactly.

Does not: see tokens themselves; it sees how many each turn has.

Axis names: G = groups of the step, N = members of a group, K = turns of one.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.learner.algorithms import advantages

Groups = Sequence[advantages.GroupRewards]
PerGroup = list[tuple[np.ndarray, ...]]


def _flat(values: PerGroup) -> np.ndarray:
  return np.concatenate([v for group in values for v in group] or [np.zeros(0)])


def _normalised(
  groups: Groups, values: PerGroup, magnitudes: PerGroup, std_eps: float
) -> PerGroup:
  """(A - mean) / (std + eps) over all sampled tokens of the step.

  A turn's value counts once for each of its tokens, as it does in the loss.

  Args:
    groups: Of the step.
    values: A of each turn.
    magnitudes: Of each A, the sum of the absolute rewards in it.
    std_eps: Added to the standard deviation.
  """
  flat = _flat(values)
  lengths = np.concatenate(
    [t for group in groups for t in group.tokens] or [np.zeros(0)]
  ).astype(np.float64)
  if len(lengths) != len(flat):
    raise ValueError("this estimator needs GroupRewards.tokens")
  if not lengths.sum() or reward_equality.all_equal(flat, _flat(magnitudes)):
    return [tuple(np.zeros_like(v) for v in group) for group in values]
  mean = (lengths * flat).sum() / lengths.sum()
  size = (lengths * np.abs(flat)).sum() / lengths.sum()
  if reward_equality.is_rounding(mean, size):
    mean = 0.0  # An advantage of 0 stays 0.
  variance = (lengths * np.square(flat - mean)).sum() / lengths.sum()
  std = float(np.sqrt(variance)) + std_eps
  if not std:  # Differences too small to be squared.
    return [tuple(np.zeros_like(v) for v in group) for group in values]
  return [tuple((v - mean) / std for v in group) for group in values]


def _reinforce_pp(
  groups: Groups, options: advantages.AdvantageOptions
) -> PerGroup:
  pairs = [advantages.turn_values(g, options.gamma) for g in groups]
  returns = [tuple(values) for values, _ in pairs]
  magnitudes = [tuple(summed) for _, summed in pairs]
  return _normalised(groups, returns, magnitudes, options.std_eps)


def _reinforce_pp_baseline(
  groups: Groups, options: advantages.AdvantageOptions
) -> PerGroup:
  centred = [advantages.dr_grpo(group, options) for group in groups]
  # Equal rewards are 0 here already; other differences are what they are.
  magnitudes = [tuple(map(np.abs, group)) for group in centred]
  return _normalised(groups, centred, magnitudes, options.std_eps)


def _gpg(groups: Groups, options: advantages.AdvantageOptions) -> PerGroup:
  centred = [advantages.dr_grpo(group, options) for group in groups]
  members = sum(len(g.turns) for g in groups)
  useful = sum(
    len(g.turns)
    for g, values in zip(groups, centred)
    if any(np.any(v) for v in values)
  )
  scale = members / useful if useful else 0.0
  return [tuple(scale * v for v in group) for group in centred]


def _sum_of_parts(group: advantages.GroupRewards, eps: float) -> np.ndarray:
  """float64[N]: weighted sum of a group's normalised parts.

  What no part accounts for, e.g. a KL price, is one more part of weight 1. It
  is divided by the total's deviation where that is larger, so that a small
  price stays small. A group without parts gets 0.
  """
  of_group = np.zeros(len(group.total_N))
  parts = [(group.part_weights[k], v) for k, v in group.parts.items()]
  remainder = group.total_N - sum(w * v for w, v in parts)
  sizes = group.magnitudes_N()
  terms = sizes + sum(np.abs(w * v) for w, v in parts)
  for weight, values in (*parts, (1.0, remainder)) if parts else ():
    # A part may be a sum, whose terms are those of the whole reward.
    summed = terms if values is remainder else np.maximum(np.abs(values), sizes)
    if not reward_equality.all_equal(values, summed):
      centred = values - values.mean()
      std = float(centred.std(ddof=1))
      if values is remainder:
        std = max(std, float(group.total_N.std(ddof=1)))
      of_group += weight * centred / (std + eps or np.inf)
  return of_group


def _gdpo(groups: Groups, options: advantages.AdvantageOptions) -> PerGroup:
  without = [g.group_id for g in groups if not g.parts and g.differ()]
  if without and not any(group.parts for group in groups):
    raise ValueError(
      f"group {without[0]!r}: advantage=gdpo normalises the parts of a"
      " reward, and this one has none; give environment.reward as a"
      " mapping, e.g. '{success: 1, format: 0.1}'"
    )
  sums = [_sum_of_parts(group, options.std_eps) for group in groups]
  flat = np.concatenate(sums or [np.zeros(0)])
  if not np.any(flat):
    return [tuple(np.zeros_like(t) for t in group.turns) for group in groups]
  # Each group's sum is centred, and the mean over the update is its rounding.
  std = float(flat.std(ddof=1)) + options.std_eps or np.inf
  return [
    tuple(np.full(len(t), a / std) for t, a in zip(group.turns, of_group))
    for group, of_group in zip(groups, sums)
  ]


reinforce_pp = advantages.StepEstimator(_reinforce_pp)
"""Each turn's return, normalised over the tokens of the step.

Hu et al. 2025, "REINFORCE++", equations 8 to 10 (arXiv:2501.03262): without a
group's baseline, so groups of one may be learned from. The KL price in them is
`algorithm.kl_in=reward`."""

reinforce_pp_baseline = advantages.StepEstimator(_reinforce_pp_baseline)
"""r - mean of the group, normalised over the tokens of the step.

Hu et al. 2025, "REINFORCE++", REINFORCE++-baseline (arXiv:2501.03262)."""

gpg = advantages.StepEstimator(_gpg)
"""alpha (r - mean of the group), alpha = B / (B - M): B the episodes of the
step, M those of groups without a gradient.

Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline", its
unbiased gradient with F_norm = 1 (arXiv:2504.02546)."""

gdpo = advantages.StepEstimator(_gdpo, needs_parts=True)
"""Each part of the reward normalised in its group, the weighted sum of these
normalised over the episodes of the step.

"GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward
RL Optimization", 2026 (arXiv:2601.05242): two episodes of equal total
whose parts differ keep different advantages, and a part of small spread is not
drowned by one of large spread. What no part accounts for, e.g. a KL price, is
ours: see `_sum_of_parts`."""
