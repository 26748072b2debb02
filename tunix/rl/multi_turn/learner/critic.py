"""Adds a value head to the learner: its parameters, its loss, its advantages.

The head is linear in the policy's hidden states: value = h . w + b, in float32,
of the state before each sampled token. It is a part of the learner's state and
of its checkpoints, trained with a learning rate of its own, and never of the
policy that is published or saved. Both are 0 at the start, so that the first
advantages are returns.

Promises: an episode's values are those of the weights at the update's start;
advantages and targets are computed once an update, in float64, over all
sequences of an episode together; an episode that a limit ended is extended by
the value after its last token where `gae_bootstrap` is on.

Does not: have layers of its own beside the policy's trunk. With a LoRA adapter
the trunk that it shares is the adapter's.

Axis names: S = buffers, M = sampled tokens of a buffer or an episode,
T = tokens of a sequence, K = turns of an episode.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy import base

WEIGHT, BIAS = "value_head.weight", "value_head.bias"
NAMES = (WEIGHT, BIAS)
"""Names of the head's parameters among the trained ones."""
VALUES, TARGETS = "values", "value_targets"
STREAMS = (VALUES, TARGETS)
"""Streams of an example that the value loss reads, see `Example.streams`."""

Score = Callable[[Sequence[trajectory.TokenSequence]], "list[np.ndarray]"]
"""Sequences -> float32[T] values at their sampled tokens, 0 elsewhere."""


def shapes(width: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the head's parameters for hidden states of this width."""
  return {
    WEIGHT: jax.ShapeDtypeStruct((width,), jnp.float32),
    BIAS: jax.ShapeDtypeStruct((), jnp.float32),
  }


def width_of(model: base.Policy, processor: base.Processor, rows: int) -> int:
  """D of a policy's hidden states, from shapes alone.

  Args:
    model: the policy.
    processor: its host side.
    rows: Rows of a batch, which the policy's mesh divides.
  """
  length, patches = 16, max(processor.patches_per_token, 0)
  # Shapes in place of arrays.
  ints: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  pixels: Any = jax.ShapeDtypeStruct(
    (rows, patches, processor.patch_bytes), jnp.uint8
  )
  inputs = base.PolicyInputs(
    tokens=ints(rows, length),
    positions=ints(rows, length, 3),
    segment_ids=ints(rows, length),
    vision_index=ints(rows, length),
    patches=pixels,
    patch_segments=ints(rows, patches),
    patch_positions=ints(rows, patches, processor.position_axes),
  )
  return int(jax.eval_shape(lambda arrays: model(arrays), inputs).shape[-1])


def values(params: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
  """Returns float32[...] of hidden states [..., D]."""
  weight = params[WEIGHT]
  product = hidden.astype(jnp.float32) * weight
  return jnp.sum(product, axis=-1) + params[BIAS]


def value_loss(
  new: jax.Array, old: jax.Array, targets: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array]:
  """(loss, 1.0 where the clip holds), each of the inputs' shape.

  max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2) / 2: the value loss
  that came with Schulman et al. 2017, "PPO" (arXiv:1707.06347), as described by
  Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients",
  section 3 (arXiv:2005.12729). `clip` 0 is the plain square.
  """
  plain = jnp.square(new - targets)
  if not clip:
    return 0.5 * plain, jnp.zeros_like(new)
  clipped = jnp.square(old + jnp.clip(new - old, -clip, clip) - targets)
  is_clipped = (clipped > plain).astype(jnp.float32)
  return 0.5 * jnp.maximum(plain, clipped), is_clipped


# --- host side ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAdvantages:
  """Advantages of one episode's tokens.

  Attributes:
    per_sequence: Number of each training sequence with a sampled token ->
      its float32[T] advantages, and its streams.
    turns_K: float64[K], each turn's mean advantage.
  """

  per_sequence: Mapping[int, tuple[np.ndarray, dict[str, np.ndarray]]]
  turns_K: np.ndarray


def of_groups(
  groups: Sequence[trajectory.TrajectoryGroup],
  algorithm: parts.Algorithm,
  gamma: float,
  row_length: int,
  score: Score,
  *,
  extra: Mapping[str, np.ndarray] | None = None,
  processes: peers_lib.Peers = peers_lib.ALONE,
) -> tuple[dict[str, TokenAdvantages], dict[str, float]]:
  """Computes the advantages of the valid members' tokens, and readings.

  Args:
    groups: Groups of an update.
    algorithm: one with a critic.
    gamma: discount a turn.
    row_length: longer sequences have no values: no row holds them. They count
      with value 0, and are left out of the update or refused by it.
    score: Computes values by the weights at the update's start; called once.
    extra: trajectory id -> float64[K] added to the turns' rewards.
    processes: Processes whose tokens are normalised together.

  Returns:
    Trajectory id -> its advantages.
  """
  # 1. Collect the sequences to score. One that a limit cut gets one more token:
  #    its value is that of the state at the end.
  members = [m for group in groups for m in group.valid]
  bootstrap = algorithm.config.gae_bootstrap
  sequences: list[trajectory.TokenSequence] = []
  place: dict[tuple[str, int], int] = {}
  ends: set[str] = set()
  for member in members:
    sampled = [i for i, s in enumerate(member.sequences) if s.num_sampled]
    for i in sampled:
      sequence = member.sequences[i]
      if example_lib.length_in_row(sequence) > row_length:
        continue
      if (
        bootstrap
        and i == sampled[-1]
        and example_lib.was_truncated(member)
        and len(sequence) <= row_length
      ):
        sequence = _with_end(sequence)
        ends.add(member.trajectory_id)
      place[member.trajectory_id, i] = len(sequences)
      sequences.append(sequence)
  # 2. Score all of them in one call, then estimate episode by episode.
  scores = score(sequences)
  options = algorithm.gae_options(gamma)
  out: dict[str, TokenAdvantages] = {}
  for member in members:
    out[member.trajectory_id] = _of_episode(
      member,
      {
        i: scores[place[member.trajectory_id, i]]
        for i in range(len(member.sequences))
        if (member.trajectory_id, i) in place
      },
      member.trajectory_id in ends,
      algorithm,
      options,
      (extra or {}).get(member.trajectory_id),
    )
  # 3. Readings are of advantages before they are normalised.
  readings = _readings(members, out)
  if algorithm.config.gae_normalise:
    out = _normalised(members, out, algorithm.config.std_eps, processes)
  return out, readings


def _with_end(sequence: trajectory.TokenSequence) -> trajectory.TokenSequence:
  """With one more token, as if sampled: its value is that of the end's state.

  Any token will do: the state is what comes before it. The last one, if the
  policy sampled it, is no placeholder of an image; else a sampled one is.
  """
  sampled = int(sequence.tokens[np.flatnonzero(sequence.loss_mask)[-1]])
  append = lambda array, value: np.append(array, value)
  return trajectory.TokenSequence(
    tokens=append(sequence.tokens, sampled),
    loss_mask=append(sequence.loss_mask, True),
    logprobs=append(sequence.logprobs, 0.0),
    versions=append(sequence.versions, max(sequence.versions.max(), 0)),
    turn_ids=append(sequence.turn_ids, sequence.turn_ids[-1]),
    images=sequence.images,
    support=None
    if sequence.support is None
    else np.pad(sequence.support, ((0, 1), (0, 0)), constant_values=-1),
  )


def _of_episode(
  member: trajectory.Trajectory,
  scores: Mapping[int, np.ndarray],
  has_end: bool,
  algorithm: parts.Algorithm,
  options: gae.GaeOptions,
  extra: np.ndarray | None,
) -> TokenAdvantages:
  """Advantages and targets of a member, not normalised."""
  rewards_K = example_lib.turn_rewards(member)
  if extra is not None:
    rewards_K = rewards_K + extra
  used = [(i, s) for i, s in enumerate(member.sequences) if s.num_sampled]
  turns, values_of = [], []
  for i, sequence in used:
    turns.append(sequence.turn_ids[sequence.loss_mask])
    scored = scores.get(i, np.zeros(len(sequence)))[: len(sequence)]
    values_of.append(np.asarray(scored[sequence.loss_mask], np.float64))
  none = np.zeros(0)
  turn_ids_M = np.concatenate(turns or [none.astype(np.int64)])
  if member.stale_tokens and len(turn_ids_M):
    # Rewards before the first token of the loss were earned by tokens that
    # left it.
    rewards_K = np.where(
      np.arange(len(rewards_K)) < turn_ids_M[0], 0.0, rewards_K
    )
  values_M = np.concatenate(values_of or [none])
  last = float(scores[used[-1][0]][-1]) if has_end else 0.0
  estimator = algorithm.estimate
  assert isinstance(estimator, gae.TokenEstimator)
  advantages_M, targets_M = estimator.apply(
    gae.EpisodeValues(rewards_K, turn_ids_M, values_M, last), options
  )
  count_K = np.bincount(turn_ids_M, minlength=len(rewards_K))
  sum_K = np.bincount(
    turn_ids_M, weights=advantages_M, minlength=len(rewards_K)
  )
  per_sequence, at = {}, 0
  for i, sequence in used:
    here = slice(at, at + sequence.num_sampled)
    at = here.stop
    per_sequence[i] = (
      _spread(advantages_M[here], sequence),
      {
        VALUES: _spread(values_M[here], sequence),
        TARGETS: _spread(targets_M[here], sequence),
      },
    )
  return TokenAdvantages(per_sequence, sum_K / np.maximum(count_K, 1))


def _spread(
  values_M: np.ndarray, sequence: trajectory.TokenSequence
) -> np.ndarray:
  """Returns float32[T]: numbers of a sequence's sampled tokens, 0 elsewhere."""
  out = np.zeros(len(sequence), np.float32)
  out[sequence.loss_mask] = values_M
  return out


def _tokens(
  members: Sequence[trajectory.Trajectory],
  advantages_of: Mapping[str, TokenAdvantages],
  name: str = "",
) -> np.ndarray:
  """float64: advantages or a stream of all sampled tokens."""
  out = [np.zeros(0)]
  for member in members:
    for i, (values_T, streams) in advantages_of[
      member.trajectory_id
    ].per_sequence.items():
      mask = member.sequences[i].loss_mask
      out.append((streams[name] if name else values_T)[mask])
  return np.concatenate(out).astype(np.float64)


def _normalised(
  members: Sequence[trajectory.Trajectory],
  advantages_of: Mapping[str, TokenAdvantages],
  std_eps: float,
  processes: peers_lib.Peers,
) -> dict[str, TokenAdvantages]:
  """(A - mean) / (std + eps) over all sampled tokens of the update."""
  flat = _tokens(members, advantages_of)
  of_all = processes.gather(
    "token advantages",
    [
      len(flat),
      float(flat.sum()),
      float(np.square(flat).sum()),
      *([float(flat.min()), float(flat.max())] if len(flat) else ()),
    ],
  )
  count, total, squares = (sum(part) for part in zip(*(p[:3] for p in of_all)))
  ends = [end for part in of_all for end in part[3:]]
  mean = total / max(count, 1)
  std = float(np.sqrt(max(squares / max(count, 1) - mean**2, 0.0))) + std_eps
  # The mean and deviation of equal advantages are rounding.
  scale = 0.0 if reward_equality.all_equal(ends) or not std else 1.0 / std

  def of(one: TokenAdvantages, member: trajectory.Trajectory):
    return TokenAdvantages(
      {
        i: (
          np.where(
            member.sequences[i].loss_mask, (a - mean) * scale, 0.0
          ).astype(np.float32),
          streams,
        )
        for i, (a, streams) in one.per_sequence.items()
      },
      (one.turns_K - mean) * scale,
    )

  return {
    m.trajectory_id: of(advantages_of[m.trajectory_id], m) for m in members
  }


def _readings(
  members: Sequence[trajectory.Trajectory],
  advantages_of: Mapping[str, TokenAdvantages],
) -> dict[str, float]:
  """Returns readings of how well the values predict the targets."""
  values_M, targets_M = (_tokens(members, advantages_of, n) for n in STREAMS)
  if not len(values_M):
    return {}
  spread = float(targets_M.var())
  residual = float((targets_M - values_M).var())
  return {
    "value_mean": float(values_M.mean()),
    "value_target_mean": float(targets_M.mean()),
    # Targets are float32: less of their size is rounding.
    "explained_variance": 1.0 - residual / spread
    if spread > 1e-12 * float(np.square(targets_M).mean())
    else 0.0,
  }
