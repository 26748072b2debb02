"""Computes advantages: a number for each turn of each member of a group.

An `Estimator` sees one group at a time, a `StepEstimator` all groups of a step
(those are in `step_advantages`). `of_step` calls either. A `gae.TokenEstimator`
sees one episode and a critic's values; `critic` calls it.

Only valid members enter (see `TrajectoryGroup.valid`): a failure outside the
policy is no evidence about it. Statistics are over one group, of any size. A
group of one has nothing to be compared with and gets 0, and so does, exactly, a
group of rewards that are equal up to rounding (`reward_equality`; learners skip
such groups), and one whose rewards differ by less than float64 can square.
Where a mean is subtracted, the rest is centred up to its own rounding.

Promises: advantages are finite, in float32 too, for every value that
`GroupRewards` accepts.

Does not: see tokens or log-probs; a KL price in the reward is in the rewards
already (see `reward_prices`).

Axis names: N = valid members of a group, K = turns of one member.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.net import peers as peers_lib

_LIMIT = 1e6 * reward_range.MAX_REWARD
"""A turn may hold what is left of its episode's reward beside other turns'."""

_DEFAULTS = config_lib.AlgorithmConfig()


@dataclasses.dataclass(frozen=True, eq=False)
class GroupRewards:
  """Rewards of the valid members of one group.

  Attributes:
    total_N: float64[N], undiscounted episode rewards.
    turns: N arrays float64[K], reward of each turn.
    tokens: N arrays int64[K], tokens sampled in each turn; () if unknown.
    states: N tuples of K digests of the observation before each turn, ""
      where it is unknown; () unless the estimator `needs_states`.
    episode_ids: N trajectory ids; () if unknown.
    parts: name of a part of the reward -> float64[N], its value before its
      weight; {} for a reward of one piece, and unless the estimator
      `needs_parts`.
    part_weights: Weights of the parts, by name.
    group_id, task_id: of the group.
    greedy: reward of the greedy episode beside the group; None without one.
  """

  total_N: np.ndarray
  turns: tuple[np.ndarray, ...]
  tokens: tuple[np.ndarray, ...] = ()
  states: tuple[tuple[str, ...], ...] = ()
  episode_ids: tuple[str, ...] = ()
  parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  part_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  group_id: str = ""
  task_id: str = ""
  greedy: float | None = None

  def __post_init__(self):
    total = np.asarray(self.total_N, np.float64)
    turns = tuple(np.asarray(t, np.float64) for t in self.turns)
    tokens = tuple(np.asarray(t, np.int64) for t in self.tokens)
    if total.ndim != 1 or len(total) != len(turns):
      raise ValueError(
        f"GroupRewards has totals of shape {total.shape} and turns of"
        f" {len(turns)} members"
      )
    for values in (total, *turns):
      if not np.all(np.abs(values) <= _LIMIT):
        raise ValueError(
          "GroupRewards holds a reward that is not finite or beyond"
          f" {_LIMIT:g}: {values}"
        )
    lengths = [len(t) for t in turns]
    for name, per_member in (("tokens", tokens), ("states", self.states)):
      if per_member and [len(member) for member in per_member] != lengths:
        raise ValueError(
          f"GroupRewards.{name} is of {[len(m) for m in per_member]} turns,"
          f" turns is of {lengths}"
        )
    parts = {k: np.asarray(v, np.float64) for k, v in self.parts.items()}
    for name, values in parts.items():
      weight = self.part_weights.get(name, math.nan)
      if (
        values.shape != total.shape
        or not math.isfinite(weight)
        or not (np.all(np.abs(values) <= _LIMIT / max(1.0, abs(weight))))
      ):
        raise ValueError(
          f"GroupRewards.parts[{name!r}] must be {len(total)} finite numbers"
          f" with a weight, got {values} and {weight}"
        )
    object.__setattr__(self, "parts", parts)
    object.__setattr__(self, "total_N", total)
    object.__setattr__(self, "turns", turns)
    object.__setattr__(self, "tokens", tokens)

  def magnitudes_N(self) -> np.ndarray:
    """Returns float64[N], each member's sum of its turns' absolute rewards."""
    turns = [np.abs(t).sum() for t in self.turns]
    return np.maximum(np.abs(self.total_N), turns)

  def differ(self) -> bool:
    """Returns whether the episodes' rewards differ, by more than rounding."""
    return not reward_equality.all_equal(self.total_N, self.magnitudes_N())

  def lengths_N(self) -> np.ndarray:
    """Returns float64[N]: tokens that each member sampled.

    Raises:
      ValueError: `tokens` are unknown.
    """
    if len(self.tokens) != len(self.turns):
      raise ValueError("this estimator needs GroupRewards.tokens")
    return np.array([t.sum() for t in self.tokens], np.float64)


@dataclasses.dataclass(frozen=True)
class AdvantageOptions:
  """Numbers of the estimators.

  Attributes:
    std_eps: added to the standard deviation.
    gamma: discounts a turn.
    step_weight: Weight of GiGPO's and HGPO's advantages among equal states.
    history: States before a turn's own that HGPO compares, at most.
    history_alpha: HGPO weighs k + 1 equal states by (k + 1)^history_alpha.
    pass_k: k of pass_at_k.
    filter_reward: least reward that filtered learns from.
  """

  std_eps: float = _DEFAULTS.std_eps
  gamma: float = 1.0
  step_weight: float = _DEFAULTS.gigpo_step_weight
  history: int = _DEFAULTS.hgpo_history
  history_alpha: float = _DEFAULTS.hgpo_alpha
  pass_k: int = _DEFAULTS.pass_k
  filter_reward: float = _DEFAULTS.filter_reward


Estimator = Callable[[GroupRewards, AdvantageOptions], "tuple[np.ndarray, ...]"]
"""Returns N arrays float64[K]: the advantage of each turn of each member."""


@dataclasses.dataclass(frozen=True)
class StepEstimator:
  """An estimator of all groups of a step together.

  Attributes:
    apply: (groups, options) -> of each group what an `Estimator` returns.
    needs_states: whether `GroupRewards.states` is read.
    needs_parts: whether `GroupRewards.parts` is read.
  """

  apply: Callable[
    [Sequence[GroupRewards], AdvantageOptions],
    "Sequence[tuple[np.ndarray, ...]]",
  ]
  needs_states: bool = False
  needs_parts: bool = False


ESTIMATORS: registry.Registry[Any] = registry.Registry("advantage estimator")
"""Name -> `Estimator`, `GreedyEstimator`, `StepEstimator` or
`gae.TokenEstimator`."""


@dataclasses.dataclass(frozen=True)
class GreedyEstimator:
  """An `Estimator` that reads `GroupRewards.greedy`.

  The collector plays one greedy episode beside each group for it, which is
  never trained on.
  """

  apply: Estimator


AnyEstimator = Estimator | GreedyEstimator | StepEstimator


def of_step(
  estimator: AnyEstimator,
  groups: Sequence[GroupRewards],
  options: AdvantageOptions,
) -> list[tuple[np.ndarray, ...]]:
  """Returns the advantages of each group of a step.

  Raises:
    ValueError: an advantage for another number of groups, members or turns
      than there are, naming the group.
  """
  if isinstance(estimator, StepEstimator):
    results = list(estimator.apply(groups, options))
  else:
    one = (
      estimator.apply if isinstance(estimator, GreedyEstimator) else estimator
    )
    results = [_of_group(one, group, options) for group in groups]
  if len(results) != len(groups):
    raise ValueError(
      f"the advantage estimator returned {len(results)} groups of {len(groups)}"
    )
  for group, values in zip(groups, results):
    got = [np.shape(v) for v in values]
    want = [t.shape for t in group.turns]
    if got != want:
      raise ValueError(
        f"group {group.group_id!r}: the advantage estimator returned shapes"
        f" {got} for turns of {want}"
      )
  return results


def over_processes(
  estimator: AnyEstimator, processes: peers_lib.Peers
) -> AnyEstimator:
  """Makes an estimator see the groups of all processes.

  An `Estimator` of one group is as it was; of a `StepEstimator` all processes
  must call the result together. Rewards, token counts and digests travel.
  """
  if processes.count == 1 or not isinstance(estimator, StepEstimator):
    return estimator

  def apply(
    groups: Sequence[GroupRewards], options: AdvantageOptions
  ) -> Sequence[tuple[np.ndarray, ...]]:
    own = [
      {
        field.name: _as_lists(getattr(group, field.name))
        for field in dataclasses.fields(group)
      }
      for group in groups
    ]
    of_all = processes.gather("rewards", own)
    first = sum(map(len, of_all[: processes.index]))
    every = [GroupRewards(**group) for groups in of_all for group in groups]
    return estimator.apply(every, options)[first : first + len(groups)]

  return dataclasses.replace(estimator, apply=apply)


def _as_lists(value: object) -> Any:
  if isinstance(value, np.ndarray):
    return value.tolist()
  if isinstance(value, tuple):
    return [_as_lists(part) for part in value]
  if isinstance(value, Mapping):
    return {name: _as_lists(part) for name, part in value.items()}
  return value


def _of_group(
  estimator: Estimator, group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  try:
    return estimator(group, options)
  except ValueError as error:
    raise ValueError(f"group {group.group_id!r}: {error}") from error


def adapted(
  function: Callable[..., Any] | StepEstimator,
) -> Estimator | StepEstimator:
  """Returns an estimator unchanged, or one around a function of google-tunix.

  Those take (rewards float32[N], num_generations) and return [N], e.g. what
  `tunix.rl.function_registry.register_advantage_estimator` registers for
  groups. They are called for one group at a time; a group of equal rewards
  gets 0 without a call.
  """
  if isinstance(function, StepEstimator) or not callable(function):
    return function
  try:
    names = inspect.signature(function).parameters
  except (TypeError, ValueError):  # A builtin.
    return function
  if "num_generations" not in names:
    return function

  def estimate(
    group: GroupRewards, options: AdvantageOptions
  ) -> tuple[np.ndarray, ...]:
    del options
    r = group.total_N
    if not group.differ():
      return _zeros(group)
    got = np.asarray(function(r.astype(np.float32), len(r)), np.float64)
    if got.shape != r.shape:
      raise ValueError(
        f"{function.__module__}:{function.__qualname__} returned shape"
        f" {got.shape} for {len(r)} rewards"
      )
    return _spread(group, got)

  return estimate


def _centred(values: np.ndarray) -> np.ndarray:
  """Values minus their mean, exact up to the rounding of their differences."""
  above = values - values.min()
  return above - above.mean()


def _std(values: np.ndarray, options: AdvantageOptions) -> float:
  """Standard deviation plus eps; 0 if the differences cannot be squared."""
  return float((values - values.min()).std(ddof=1)) + options.std_eps


def _zeros(group: GroupRewards) -> tuple[np.ndarray, ...]:
  return tuple(np.zeros(len(t), np.float64) for t in group.turns)


def _spread(
  group: GroupRewards, advantage_N: np.ndarray
) -> tuple[np.ndarray, ...]:
  """One number a member, the same for all its turns."""
  return tuple(
    np.full(len(t), a, np.float64) for t, a in zip(group.turns, advantage_N)
  )


@ESTIMATORS.register("grpo")
def grpo(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """(r - mean) / (std + eps), std with N - 1 in the denominator.

  Shao et al. 2024, "DeepSeekMath", section 4.1.2 (arXiv:2402.03300).
  """
  if not group.differ():
    return _zeros(group)
  r = group.total_N
  return _spread(group, _centred(r) / (_std(r, options) or math.inf))


@ESTIMATORS.register("dr_grpo")
def dr_grpo(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """r - mean, without the division that favours easy and hard tasks.

  Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783).
  """
  del options
  if not group.differ():
    return _zeros(group)
  return _spread(group, _centred(group.total_N))


@ESTIMATORS.register("rloo")
def rloo(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """r - mean of the other members' r.

  Ahmadian et al. 2024, "Back to Basics", section 2.3 (arXiv:2402.14740).
  """
  del options
  if not group.differ():
    return _zeros(group)
  r = group.total_N - group.total_N.min()
  return _spread(group, r - (r.sum() - r) / (len(r) - 1))


def discounted_returns(rewards_K: np.ndarray, gamma: float) -> np.ndarray:
  """Returns float64[K]: sum over j >= k of gamma^(j - k) r_j."""
  returns = np.zeros(len(rewards_K), np.float64)
  running = 0.0
  for k in range(len(rewards_K) - 1, -1, -1):
    running = float(rewards_K[k]) + gamma * running
    returns[k] = running
  return returns


def turn_values(
  group: GroupRewards, gamma: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Of each member: `discounted_returns`, and the magnitudes summed in them."""
  returns = [discounted_returns(t, gamma) for t in group.turns]
  return returns, [discounted_returns(np.abs(t), gamma) for t in group.turns]


@ESTIMATORS.register("turn_returns")
def turn_returns(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """Discounted return from each turn, normalised over all turns of the group.

  The outcome-per-step form of Shao et al. 2024, section 4.1.3
  (arXiv:2402.03300), with returns discounted by gamma before normalisation:
  a turn is credited with what followed it, not with what came before.
  """
  returns, magnitudes = turn_values(group, options.gamma)
  flat = np.concatenate(returns) if returns else np.zeros(0)
  if len(returns) < 2 or reward_equality.all_equal(
    flat, np.concatenate(magnitudes)
  ):
    return _zeros(group)
  scaled = _centred(flat) / (_std(flat, options) or math.inf)
  ends = np.cumsum([len(g) for g in returns])
  return tuple(np.split(scaled, ends[:-1]))


@ESTIMATORS.register("opo")
def opo(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """r - sum(l r) / sum(l), l the tokens that a member sampled.

  The baseline of least variance where a token's squared gradient is the same
  everywhere: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline",
  (arXiv:2505.23585).
  """
  del options
  if not group.differ():
    return _zeros(group)
  r = group.total_N - group.total_N.min()
  lengths = group.lengths_N()
  return _spread(group, r - (lengths * r).sum() / lengths.sum())


def _remax(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  del options
  if group.greedy is None:
    raise ValueError(
      "remax needs the reward of a greedy episode, GroupRewards.greedy"
    )
  r, greedy = group.total_N, float(group.greedy)
  # A member's reward may be the greedy one's up to rounding.
  same_N = [
    reward_equality.all_equal((one, greedy), (magnitude, abs(greedy)))
    for one, magnitude in zip(r, group.magnitudes_N())
  ]
  return _spread(group, np.where(same_N, 0.0, r - greedy))


remax = GreedyEstimator(_remax)
"""r - r of the greedy episode of the same task.

Li et al. 2023, "ReMax", equation 4 (arXiv:2310.10505). The baseline depends on
the task alone, so that groups of one may be learned from."""

ESTIMATORS.register("remax", remax)


@ESTIMATORS.register("none")
def none(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """0: rewards are not learned from, for distillation alone."""
  del options
  return _spread(group, np.zeros_like(group.total_N))


@ESTIMATORS.register("reward")
def reward(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """r itself: normalised elsewhere, or the weight of an example.

  With objective policy_gradient: reward-weighted regression, Peters and Schaal
  2007, "Reinforcement Learning by Reward-Weighted Regression", section 3.
  """
  del options
  return _spread(group, group.total_N)


@ESTIMATORS.register("filtered")
def filtered(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """1 where r >= filter_reward, up to rounding, else 0: cloning of the good
  episodes.

  Chen et al. 2021, "Decision Transformer", section 4: filtered behaviour
  cloning ("percentile BC", arXiv:2106.01345), with a fixed bound.
  """
  good = reward_equality.reaches(
    group.total_N, options.filter_reward, group.magnitudes_N()
  )
  return _spread(group, good.astype(np.float64))


@ESTIMATORS.register("pass_at_k")
def pass_at_k(
  group: GroupRewards, options: AdvantageOptions
) -> tuple[np.ndarray, ...]:
  """Gain in the best of k episodes that a member makes: the unbiased gradient
  of E[max reward of k].

  N / C(N, k) times the sum over the sets of k members with this one of
  (max over the set - max over the others of the set): Walder & Karkhanis 2025,
  "Pass@K Policy Optimization", the estimator s^(loo-1) of equation 33
  (arXiv:2505.15201), times N because the loss is a mean over episodes. With
  k = 1 the set has no others, and it is `rloo`. In a group of fewer than k
  members k is their number.
  """
  r, k = group.total_N, min(options.pass_k, len(group.total_N))
  if not group.differ():
    return _zeros(group)
  if k == 1:
    return rloo(group, options)
  n = len(r)
  order = np.argsort(r, kind="stable")
  ascending = r[order]
  # With member i the best of the set and j the second, k - 2 more are of the
  # j members below.
  ways = np.array([math.comb(j, k - 2) for j in range(n)], np.float64)
  gains = np.array(
    [(ways[:i] * (ascending[i] - ascending[:i])).sum() for i in range(n)]
  )
  advantage_N = np.empty(n)
  advantage_N[order] = gains * n / math.comb(n, k)
  return _spread(group, advantage_N)


def _by_history(
  group: GroupRewards, options: AdvantageOptions, history: int, alpha: float
) -> tuple[np.ndarray, ...]:
  """Adds to `grpo` what turns get among those of equal states.

  For each depth k up to `history`, turns are compared whose last k + 1 states
  are equal (fewer where the episode began since). A turn's part is the mean of
  its normalised returns over the depths at which it has company, weighed by
  (k + 1)^alpha.
  """
  if len(group.states) != len(group.turns):
    raise ValueError("gigpo and hgpo need GroupRewards.states")
  returns, magnitudes = turn_values(group, options.gamma)
  sums = [np.zeros_like(g) for g in returns]
  weights = [np.zeros_like(g) for g in returns]
  for depth in range(history + 1):
    pools: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for i, member in enumerate(group.states):
      for k, state in enumerate(member):
        if state:
          pools.setdefault(member[max(0, k - depth) : k + 1], []).append((i, k))
    weight = (depth + 1) ** alpha
    for places in pools.values():
      if len(places) == 1:
        continue
      values = np.array([returns[i][k] for i, k in places])
      summed = [magnitudes[i][k] for i, k in places]
      scaled = np.zeros_like(values)
      if not reward_equality.all_equal(values, summed):
        scaled = _centred(values) / (_std(values, options) or math.inf)
      for (i, k), value in zip(places, scaled):
        sums[i][k] += weight * value
        weights[i][k] += weight
  return tuple(
    e + options.step_weight * s / np.where(w, w, 1)
    for e, s, w in zip(grpo(group, options), sums, weights)
  )


def _gigpo(
  groups: Sequence[GroupRewards], options: AdvantageOptions
) -> list[tuple[np.ndarray, ...]]:
  return [
    _of_group(lambda g, o: _by_history(g, o, 0, 0.0), group, options)
    for group in groups
  ]


def _hgpo(
  groups: Sequence[GroupRewards], options: AdvantageOptions
) -> list[tuple[np.ndarray, ...]]:
  def one(group: GroupRewards, o: AdvantageOptions) -> tuple[np.ndarray, ...]:
    return _by_history(group, o, o.history, o.history_alpha)

  return [_of_group(one, group, options) for group in groups]


gigpo = StepEstimator(_gigpo, needs_states=True)
"""A^E + w A^S: the episode's reward among the group's episodes, and the
discounted return from a turn among the turns of the group that began in the
same state (observations with equal digests; a state met once has A^S = 0).

Feng et al. 2025, "Group-in-Group Policy Optimization", section 4, with F_norm =
std (arXiv:2505.10978)."""

hgpo = StepEstimator(_hgpo, needs_states=True)
"""`gigpo` whose A^S is a weighted mean over groups of turns with equal
histories of growing length; see `_by_history`.

After He et al. 2026, "Hierarchy-of-Groups Policy Optimization"
(arXiv:2602.22817). Differs where that says nothing of a turn: one without
company at a depth leaves the depth out, and the episode's advantage is added as
in GiGPO."""

ESTIMATORS.register("gigpo", gigpo)
ESTIMATORS.register("hgpo", hgpo)

_OF_STEPS = "tunix.rl.multi_turn.learner.algorithms.step_advantages"
for _name in ("reinforce_pp", "reinforce_pp_baseline", "gpg", "gdpo"):
  ESTIMATORS.register(_name, f"{_OF_STEPS}:{_name}")
ESTIMATORS.register("gae", "tunix.rl.multi_turn.learner.algorithms.gae:gae")
