"""Turns groups of trajectories into training examples with advantages.

Promises: only valid members count, and each group is normalised over its own
valid members; every sampled token of theirs carries its turn's advantage.

Does not: pack anything, or know an algorithm: the estimator is passed in.

Axis names: T = tokens of a sequence, K = turns of an episode.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.core.statistics import reward_parts
from tunix.rl.multi_turn.core.statistics import turn_groups
from tunix.rl.multi_turn.learner.algorithms import advantages

Look = Callable[[trajectory.ImageRef], str]
"""Digest of a screenshot, see `anchors`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """One sequence to learn from.

  Attributes:
    sequence: tokens, mask, log-probs and versions.
    advantages: float32[T], finite, 0 where the token was not sampled.
    episode: number of its episode, unique in a step.
    group: number of its group, unique in a step.
    trajectory_id: Id of its episode; "" for a demonstration.
    truncated: whether a limit ended its episode, see `was_truncated`.
    streams: name -> float32[T], more numbers of each sampled token; that of
      `core.statistics.turn_groups` is added.
  """

  sequence: trajectory.TokenSequence
  advantages: np.ndarray
  episode: int = 0
  group: int = 0
  trajectory_id: str = ""
  truncated: bool = False
  streams: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    values = np.asarray(self.advantages, np.float32)
    mask = self.sequence.loss_mask
    if values.shape != mask.shape:
      raise ValueError(
        f"Example.advantages has shape {values.shape} for {len(mask)} tokens"
      )
    for name, stream in {"advantages": values, **self.streams}.items():
      if np.shape(stream) != mask.shape or not np.all(np.isfinite(stream)):
        raise ValueError(f"Example.{name} must be {len(mask)} finite numbers")
    if not mask.any():
      raise ValueError("an Example needs at least one sampled token")
    if mask[0]:
      raise ValueError(
        "the first token of a sequence is marked as sampled, but nothing"
        " precedes it to predict it from; begin sequences with a prompt"
      )
    object.__setattr__(self, "advantages", np.where(mask, values, 0))
    place = {turn_groups.STREAM: turn_groups.stream_T(self.sequence)}
    object.__setattr__(self, "streams", {**self.streams, **place})

  @property
  def has_gradient(self) -> bool:
    return bool(np.any(self.advantages))


@dataclasses.dataclass(frozen=True)
class GroupStats:
  """Statistics of the groups of a step.

  Attributes:
    groups: all groups; `zero_groups` of them have advantage 0 throughout.
    episodes: all members; `valid` of them count.
    reward_mean, reward_std: over valid members.
    success: share of valid members that succeeded.
    turns: mean turns of valid members.
    advantages: trajectory id -> float32[K], of the turns of valid members.
    low_entropy: see `low_entropy_turns`.
  """

  groups: int
  zero_groups: int
  episodes: int
  valid: int
  reward_mean: float
  reward_std: float
  success: float
  turns: float
  advantages: Mapping[str, np.ndarray] = dataclasses.field(
    default_factory=dict, compare=False
  )
  low_entropy: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def metrics(self) -> dict[str, float]:
    return {
      "groups": float(self.groups),
      "zero_advantage_groups": float(self.zero_groups),
      "episodes": float(self.episodes),
      "valid_episodes": float(self.valid),
      "reward_mean": self.reward_mean,
      "reward_std": self.reward_std,
      "success_rate": self.success,
      "turns_mean": self.turns,
    }


def turn_rewards(episode: trajectory.Trajectory) -> np.ndarray:
  """Returns float64[K]: rewards of the turns; they sum to the episode's reward.

  K covers every turn in which a token was sampled, also one that did not
  become a step (a completion that could not be parsed). The rest of the
  episode's reward that no step accounts for is given to the last turn, unless
  it is rounding.
  """
  turns = len(episode.steps)
  for sequence in episode.sequences:
    if len(sequence):
      turns = max(turns, int(sequence.turn_ids[-1]) + 1)
  rewards = np.zeros(max(turns, 1), np.float64)
  for k, step in enumerate(episode.steps):
    rewards[k] = float(step.reward)
  remainder = float(episode.reward) - math.fsum(rewards)
  if not reward_equality.is_rounding(remainder, episode.reward_magnitude):
    rewards[-1] += remainder
  return rewards


def length_in_row(sequence: trajectory.TokenSequence) -> int:
  """Returns the number of tokens before the last sampled one, which predict."""
  return int(np.flatnonzero(sequence.loss_mask)[-1])


def turn_tokens(episode: trajectory.Trajectory, turns: int) -> np.ndarray:
  """Returns int64[turns]: tokens sampled in each turn."""
  counts = np.zeros(turns, np.int64)
  for sequence in episode.sequences:
    np.add.at(counts, sequence.turn_ids[sequence.loss_mask], 1)
  return counts


def turn_states(
  episode: trajectory.Trajectory, turns: int, look: Look | None = None
) -> tuple[str, ...]:
  """Digest of the observation before each of `turns` turns.

  Members of a group begin in the state of their task, which is "start" here.
  A screenshot counts by its SHA-256, or by `look`. "" after a turn without a
  record.

  Raises:
    ValueError: an observation that cannot be written as JSON.
  """
  states = ["start"]
  for step in episode.steps[: turns - 1]:
    try:
      observation = trajectory.encode(_looked_at(step.observation, look))
      text = json.dumps(observation, sort_keys=True)
    except TypeError as error:
      raise ValueError(f"an observation has no digest: {error}") from error
    states.append(hashlib.sha256(text.encode()).hexdigest())
  return tuple(states) + ("",) * (turns - len(states))


def _looked_at(value: object, look: Look | None) -> Any:
  """An observation with digests in place of its images."""
  if look is None:
    return value
  if isinstance(value, trajectory.ImageRef):
    return look(value)
  if isinstance(value, Mapping):
    return {key: _looked_at(one, look) for key, one in value.items()}
  if isinstance(value, (list, tuple)):
    return [_looked_at(one, look) for one in value]
  return value


_LIMITS = frozenset(
  {
    trajectory.TrajectoryStatus.MAX_TURNS,
    trajectory.TrajectoryStatus.CONTEXT_LIMIT,
  }
)


def was_truncated(episode: trajectory.Trajectory) -> bool:
  """Returns whether a limit of turns, context or tokens ended the episode.

  The last is `Step.info["response_truncated"]` of its last turn.
  """
  cut = bool(episode.steps) and bool(
    episode.steps[-1].info.get("response_truncated")
  )
  return cut or episode.status in _LIMITS


def group_rewards(
  group: trajectory.TrajectoryGroup,
  *,
  with_states: bool = False,
  with_parts: bool = False,
  look: Look | None = None,
  extra: Mapping[str, np.ndarray] | None = None,
) -> advantages.GroupRewards:
  """Returns a group's rewards: of its valid members, then of their peers.

  A peer is known by its reward alone: it is one turn of unknown length.

  Args:
    group: Group of a step.
    with_states: whether to digest observations.
    with_parts: whether to read the rewards' parts.
    look: Digest of a screenshot in them; None for its SHA-256.
    extra: trajectory id -> float64[K] added to the turns' rewards, and their
      sum to the episode's.

  Raises:
    ValueError: a reward that is not finite, or an observation without a
      digest; it names the group.
  """
  members = group.valid
  try:
    turns = [turn_rewards(m) for m in members]
    totals = [float(m.reward) for m in members]
    for i, member in enumerate(members):
      added = (extra or {}).get(member.trajectory_id)
      if added is not None:
        turns[i] = turns[i] + added
        totals[i] += float(added.sum())
    if group.peer_rewards:
      return advantages.GroupRewards(
        np.array([*totals, *group.peer_rewards], np.float64),
        (*turns, *(np.array([r]) for r in group.peer_rewards)),
        group_id=group.group_id,
        task_id=group.task_id,
      )
    return advantages.GroupRewards(
      np.array(totals, np.float64),
      tuple(turns),
      tokens=tuple(turn_tokens(m, len(t)) for m, t in zip(members, turns)),
      states=tuple(turn_states(m, len(t), look) for m, t in zip(members, turns))
      if with_states
      else (),
      episode_ids=tuple(m.trajectory_id for m in members),
      **(_parts_of(members) if with_parts else {}),
      group_id=group.group_id,
      task_id=group.task_id,
      greedy=None if group.extra is None else float(group.extra.reward),
    )
  except ValueError as error:
    raise ValueError(f"group {group.group_id!r}: {error}") from error


def _parts_of(
  members: Sequence[trajectory.Trajectory],
) -> dict[str, dict[str, Any]]:
  """`parts` and `part_weights` of members; a part that a member lacks is 0.

  Such a part added nothing to its reward: the episode ended before it.
  """
  parts = [reward_parts.of_episode(member) for member in members]
  weights = {name: p.weight for of_one in parts for name, p in of_one.items()}
  nothing = reward_parts.Part(0.0)
  return {
    "parts": {
      name: np.array([of_one.get(name, nothing).value for of_one in parts])
      for name in weights
    },
    "part_weights": weights,
  }


def turn_advantages(
  groups: Sequence[trajectory.TrajectoryGroup],
  estimator: advantages.AnyEstimator,
  options: advantages.AdvantageOptions,
  *,
  extra: Mapping[str, np.ndarray] | None = None,
  look: Look | None = None,
) -> dict[str, np.ndarray]:
  """Trajectory id -> float32[K], of the turns of valid members.

  Raises:
    ValueError: The cases of `from_groups`.
  """
  reads = {
    "with_states": getattr(estimator, "needs_states", False),
    "with_parts": getattr(estimator, "needs_parts", False),
  }
  counted = [g for g in groups if g.valid]
  per_group = advantages.of_step(
    estimator,
    [group_rewards(g, look=look, extra=extra, **reads) for g in counted],
    options,
  )
  return {
    member.trajectory_id: np.asarray(values, np.float32)
    for group, per_turn in zip(counted, per_group, strict=True)
    # The peers' are behind the members'.
    for member, values in zip(
      group.valid, per_turn[: len(group.valid)], strict=True
    )
  }


Tokens = Mapping[str, Mapping[int, tuple[np.ndarray, Mapping[str, np.ndarray]]]]
"""Trajectory id -> number of its sequence -> float32[T] advantages, streams."""


def from_groups(
  groups: Sequence[trajectory.TrajectoryGroup],
  estimator: advantages.AnyEstimator,
  options: advantages.AdvantageOptions,
  *,
  extra: Mapping[str, np.ndarray] | None = None,
  borrowed: frozenset[str] = frozenset(),
  look: Look | None = None,
  entropy_share: float = 1.0,
) -> tuple[list[list[Example]], GroupStats]:
  """Examples of each group, and the groups' statistics.

  Args:
    groups: Groups of a step.
    estimator: Estimator of advantages.
    options: Options of the estimator.
    extra: see `group_rewards`; statistics are of the rewards without it.
    borrowed: trajectory ids that statistics leave out.
    look: see `group_rewards`.
    entropy_share: see `low_entropy_turns`.

  Raises:
    ValueError: a reward or advantage is not finite, naming the group.
  """
  per_episode = turn_advantages(
    groups, estimator, options, extra=extra, look=look
  )
  return from_advantages(
    groups, per_episode, borrowed=borrowed, entropy_share=entropy_share
  )


def from_advantages(
  groups: Sequence[trajectory.TrajectoryGroup],
  per_episode: Mapping[str, np.ndarray],
  tokens: Tokens | None = None,
  borrowed: frozenset[str] = frozenset(),
  entropy_share: float = 1.0,
) -> tuple[list[list[Example]], GroupStats]:
  """As `from_groups`, of advantages that are known.

  Args:
    groups: Groups of a step.
    per_episode: trajectory id -> float32[K], of valid members.
    tokens: Each token's own advantage, if it has one. A group then counts
      as one without a gradient if all rewards of the step are equal up to
      rounding: a value head's errors alone make no group teach.
    borrowed: trajectory ids that statistics leave out.
    entropy_share: see `low_entropy_turns`.

  Raises:
    ValueError: an advantage is not finite.
  """
  out: list[list[Example]] = []
  rewards, magnitudes, successes, turns = [], [], [], []
  low: dict[str, tuple[int, ...]] = {}
  episode_number = zero = 0
  for number, group in enumerate(groups):
    examples: list[Example] = []
    members = group.valid
    low |= low_entropy_turns(members, entropy_share)
    for member in members:
      values = per_episode[member.trajectory_id]
      truncated = was_truncated(member)
      for i, sequence in enumerate(member.sequences):
        if sequence.num_sampled:  # Else its tokens are stale or untrained.
          streams: Mapping[str, np.ndarray] = {}
          if tokens is None:
            values_T = values[sequence.turn_ids]
          else:
            values_T, streams = tokens[member.trajectory_id][i]
          chosen = sequence.without_turns(low.get(member.trajectory_id, ()))
          if not chosen.num_sampled:
            continue
          examples.append(
            Example(
              chosen,
              values_T,
              episode=episode_number,
              group=number,
              trajectory_id=member.trajectory_id,
              truncated=truncated,
              streams=streams,
            )
          )
      episode_number += 1
      if member.trajectory_id in borrowed:
        continue
      rewards.append(float(member.reward))
      magnitudes.append(member.reward_magnitude)
      successes.append(member.status is trajectory.TrajectoryStatus.SUCCEEDED)
      turns.append(member.num_turns)
    zero += not any(e.has_gradient for e in examples)
    out.append(examples)
  even = reward_equality.all_equal(rewards, magnitudes)
  if tokens is not None:
    zero = len(out) if even else 0
  stats = GroupStats(
    groups=len(out),
    zero_groups=zero,
    episodes=sum(len(g) for g in groups) - len(borrowed),
    valid=len(rewards),
    reward_mean=float(np.mean(rewards)) if rewards else 0.0,
    reward_std=0.0 if even else float(np.std(rewards)),
    success=float(np.mean(successes)) if successes else 0.0,
    turns=float(np.mean(turns)) if turns else 0.0,
    advantages={k: v for k, v in per_episode.items() if k not in borrowed},
    low_entropy=low,
  )
  return out, stats


def low_entropy_turns(
  members: Sequence[trajectory.Trajectory], share: float
) -> dict[str, tuple[int, ...]]:
  """Trajectory id -> turns that are not trained on for their low entropy.

  Of all turns of the members, the `share` of the highest mean entropy a token
  stays (rounded up; the earlier of equal ones): turns in which the policy had
  no choice teach little. DART trains on the top 80 % of the steps
  (arXiv:2509.23866); it is ours that they are ranked within a group, and that a
  token's entropy is estimated by minus its log-prob where the engine recorded
  none.
  """
  if share >= 1:
    return {}
  sums: dict[tuple[str, int], float] = {}
  counts: dict[tuple[str, int], int] = {}
  for member in members:
    for sequence in member.sequences:
      mask = sequence.loss_mask
      entropies = sequence.entropies
      if entropies is None:
        entropies = -sequence.logprobs
      for turn, entropy in zip(sequence.turn_ids[mask], entropies[mask]):
        key = member.trajectory_id, int(turn)
        sums[key] = sums.get(key, 0.0) + float(entropy)
        counts[key] = counts.get(key, 0) + 1
  ranked = sorted(sums, key=lambda key: -sums[key] / counts[key])
  low: dict[str, tuple[int, ...]] = {}
  for name, turn in ranked[math.ceil(share * len(ranked)) :]:
    low[name] = (*low.get(name, ()), turn)
  return low


INVALID, ZERO_ADVANTAGE, TOO_LONG = "invalid", "zero_advantage", "too_long"
TRUNCATED, STALE, UNTRAINED = "truncated", "stale", "untrained"
LOW_ENTROPY = "low_entropy"
"""Reasons to leave sampled tokens out of an update: infrastructure ended their
episode; no token of their sequence has an advantage; their sequence is longer
than a row of the batch; a limit ended their episode, and the algorithm filters
such episodes; the queue took all tokens of the turn out for their age; the turn
was sampled from another distribution than the run's; the turn's entropy is
below that of the `algorithm.entropy_share` trained on."""


def left_out(
  groups: Sequence[trajectory.TrajectoryGroup],
  skipped: Sequence[tuple[Example, str]],
  low_entropy: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, tuple[str, ...]]:
  """Trajectory id -> of each turn, the reason to leave it out; "" if trained.

  Of every member of the groups, and as long as `turn_rewards`.

  Args:
    groups: Groups of an update.
    skipped: Examples that the update left out, and the reasons.
    low_entropy: see `GroupStats.low_entropy`.
  """
  reasons_of: dict[str, list[str]] = {}
  for group in groups:
    valid = {id(m) for m in group.valid}
    for member in group.trajectories:
      reason = "" if id(member) in valid else INVALID
      turns = len(turn_rewards(member))
      reasons_of[member.trajectory_id] = [reason] * turns
      masked = member.stale_tokens or member.untrained_tokens
      if masked and not reason:
        why = STALE if member.stale_tokens else UNTRAINED
        reasons_of[member.trajectory_id] = [
          "" if tokens else why for tokens in turn_tokens(member, turns)
        ]
  for name, low_turns in (low_entropy or {}).items():
    for turn in low_turns:
      reasons_of[name][turn] = LOW_ENTROPY
  for example, reason in skipped:
    sequence = example.sequence
    for turn in np.unique(sequence.turn_ids[sequence.loss_mask]):
      reasons_of[example.trajectory_id][int(turn)] = reason
  return {name: tuple(reasons) for name, reasons in reasons_of.items()}


def from_sequences(
  sequences: Sequence[trajectory.TokenSequence],
) -> list[Example]:
  """Demonstrations: every sampled token counts 1, each sequence an episode.

  Raises:
    ValueError: a sequence without a sampled token.
  """
  return [
    Example(s, s.loss_mask.astype(np.float32), episode=i, group=i)
    for i, s in enumerate(sequences)
  ]
