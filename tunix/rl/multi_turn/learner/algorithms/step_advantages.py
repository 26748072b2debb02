"""Computes advantages with statistics over all groups of a step.

Promises: advantages are finite; a step of equal rewards gets 0 exactly.

Does not: see tokens themselves; it sees how many each turn has.

Axis names: G = groups of the step, N = members of a group, K = turns of one.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.learner.algorithms import advantages

Groups = Sequence[advantages.GroupRewards]
PerGroup = list[tuple[np.ndarray, ...]]


def _normalised(
    groups: Groups, values: PerGroup, std_eps: float
) -> PerGroup:
  """(A - mean) / (std + eps) over all sampled tokens of the step.

  A turn's value counts once for each of its tokens, as it does in the loss.
  """
  flat = np.concatenate(
      [v for group in values for v in group] or [np.zeros(0)]
  )
  lengths = np.concatenate(
      [t for group in groups for t in group.tokens] or [np.zeros(0)]
  ).astype(np.float64)
  if len(lengths) != len(flat):
    raise ValueError("this estimator needs GroupRewards.tokens")
  if not lengths.sum() or flat.min() == flat.max():
    return [tuple(np.zeros_like(v) for v in group) for group in values]
  mean = (lengths * flat).sum() / lengths.sum()
  variance = (lengths * np.square(flat - mean)).sum() / lengths.sum()
  std = float(np.sqrt(variance)) + std_eps
  if not std:  # Differences too small to be squared.
    return [tuple(np.zeros_like(v) for v in group) for group in values]
  return [tuple((v - mean) / std for v in group) for group in values]


def _reinforce_pp(
    groups: Groups, options: advantages.AdvantageOptions
) -> PerGroup:
  returns = [
      tuple(advantages.discounted_returns(t, options.gamma) for t in g.turns)
      for g in groups
  ]
  return _normalised(groups, returns, options.std_eps)


def _reinforce_pp_baseline(
    groups: Groups, options: advantages.AdvantageOptions
) -> PerGroup:
  centred = [advantages.dr_grpo(group, options) for group in groups]
  return _normalised(groups, centred, options.std_eps)


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
