"""Trains a policy on groups of trajectories: the GRPO learner.

The learner owns the trained parameters, the optimizer state and the integer
version. One `update` computes the groups' advantages, packs their sequences,
adds up gradients over micro-batches, and makes one optimizer step a minibatch
and epoch, but for steps in which no token has weight (see `update`); then the
version is one higher, whether or not anything could be learned (admission of
new groups counts versions).

Parameters narrower than float32 are trained on float32 masters (`optimizer`);
checkpoints hold the masters, and what is published has the model's own types.

Promises: the caller's model is copied and never touched; `policy_state` is a
copy that later updates, which work in place, cannot change; the same groups
in the same state give the same bits; batches have one shape, so each program
is compiled once, and again when an image is larger than all before it by some
eighth, or an example's images need more places than a batch shard holds, be
learner.patches set or not (`compiles` counts).

Does not: know environments or queues (see `loop`), or serve two callers at a
time.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast, Collection, Mapping, Sequence

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import ahead
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import critic
from tunix.rl.multi_turn.learner import frozen
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import optimizer
from tunix.rl.multi_turn.learner import program as program_lib
from tunix.rl.multi_turn.learner import readings as readings_lib
from tunix.rl.multi_turn.learner import reference as reference_lib
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import anchors
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import minibatches as minibatch_lib
from tunix.rl.multi_turn.learner.batches import reward_prices
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding

AlgorithmConfig = config_lib.AlgorithmConfig
LearnerConfig = config_lib.LearnerConfig
Example = example_lib.Example
Metrics = readings_lib.Metrics
Minibatch = minibatch_lib.Minibatch


@dataclasses.dataclass
class LearnerCounters:
  """Integers that a checkpoint keeps.

  Attributes:
    version: Version of the weights, one higher after each update.
    updates: calls of `update` and `update_on_sequences`.
    optimizer_steps: steps made.
    skipped_steps: steps not made because a gradient was not finite.
    empty_updates: updates in which no token had weight (see `update`): neither
      parameters nor optimizer state moved.
    dropped_sequences: sequences longer than a row that were left out.
  """

  version: int = 0
  updates: int = 0
  optimizer_steps: int = 0
  skipped_steps: int = 0
  empty_updates: int = 0
  dropped_sequences: int = 0


class Learner:
  """See the module docstring.

  Attributes:
    config, algorithm: settings, and the resolved algorithm.
    gamma, seed: as given.
    counters: kept by checkpoints.
    shape: Shape of every batch; None until the first one decides it. Its bound
      of an image's patches grows with the data.
    advantages: Advantages of the last `update`: trajectory id ->
      float32[turns], of valid members.
    left_out: Turns that the last `update` left out, see `examples.left_out`.
    kl_coef: Coefficient of the next update; a checkpoint keeps it.
  """

  def __init__(
    self,
    model: base.Policy,
    processor: base.Processor,
    image_store: image_lib.ImageStore,
    config: LearnerConfig = LearnerConfig(),
    algorithm: AlgorithmConfig = AlgorithmConfig(),
    *,
    sampling: policy_client.SamplingConfig = policy_client.SamplingParams(),
    gamma: float = 1.0,
    seed: int = 0,
    mesh: Mesh | None = None,
    reference: base.Policy | None = None,
    processes: peers_lib.Peers = peers_lib.ALONE,
    teacher: base.Policy | None = None,
  ):
    """Args:

      model: the policy, an nnx module; its `nnx.Param`s are copied. With a
        LoRA adapter only the adapter's are copied; the others are used without
        a copy and never trained, and the caller must not donate them.
      processor: its host side.
      image_store: pixels of the images that trajectories refer to.
      config: optimizer and batches.
      algorithm: names the parts of the loss.
      sampling: parameters that the episodes are sampled with; read are
        temperature, top_k and top_p.
      gamma: discount a turn, for estimators of turns; in [0, 1].
      seed: Seed of the order of groups in minibatches.
      mesh: Mesh of `sharding.make_mesh`; None is the default device.
      reference: module of the same structure that the KL term is measured to;
        copied. Needed when kl_coef > 0.
      processes: Processes of the run. Each calls the same methods in the same
        order, an update with groups of its own; `config.rows` are the rows of
        all.
      teacher: the policy that is distilled. Needed when distill_coef > 0.

    Raises:
      ValueError: an unknown algorithm, sampling that it cannot learn from,
        rows that do not divide over the mesh, or a KL term without a
        reference.
    """
    if not 0 <= gamma <= 1:
      raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    self.config = config
    self.algorithm = parts.Algorithm.of(algorithm)
    self.algorithm.check_sampling(sampling)
    self.gamma = gamma
    self.seed = seed
    self.kl_coef = algorithm.kl_coef
    self.counters = LearnerCounters()
    self.advantages: Mapping[str, np.ndarray] = {}
    self.left_out: Mapping[str, tuple[str, ...]] = {}
    module = cast(nnx.Module, model)
    self._split = update.SplitModel(module, frozen.modules(model, config))
    self._placement = update.Placement.of(self._split, model, mesh)
    self._processes = processes
    about = model.config
    banned = tuple(about.banned_token_ids)
    self._programs = update.UpdatePrograms(
      self._split,
      config,
      self.algorithm,
      logprobs.banned_mask(about.vocab_size, banned),
      self._placement,
      temperature=sampling.temperature,
      width=critic.width_of(model, processor, config.rows)
      if self.algorithm.has_critic
      else 0,
    )
    self._begin(module, reference)
    self._teacher = reference_lib.Teacher.of(
      self.algorithm, teacher, model, mesh, sampling, config
    )
    self._schedule = optimizer.make_schedule(config)
    self._images = image_store
    self._minibatches = minibatch_lib.Minibatches(
      model,
      processor,
      image_store,
      config,
      self.algorithm,
      self._placement,
      mesh,
      processes,
    )

  def _begin(self, module: nnx.Module, reference: base.Policy | None) -> None:
    """Takes over a policy's weights, with a new optimizer state.

    Those of before are let go first, unless the new ones are refused: the
    devices need not hold both.
    """
    params = self._split.params_of(module)
    frozen_params = self._split.frozen_of(module)
    referred = self._params_of_reference(reference)
    self._params, self._frozen, self._opt_state = {}, {}, None
    self._reference = None
    self._params = {
      **self._programs.masters(self._put_params(params)),
      **self._programs.init_head(),
    }
    self._frozen = {
      name: sharding.put(value, self._placement.frozen[name])
      for name, value in frozen_params.items()
    }
    if referred is not None:
      self._reference = reference_lib.Reference(
        self._programs.publish(self._put_params(referred)),
        self.config.reference_on == "host",
      )
    self._opt_state = self._programs.init_optimizer(self._params)

  def begin_from(
    self, model: base.Policy, reference: base.Policy | None = None
  ) -> None:
    """Replaces the weights before the first update.

    A learner can so be built, and `compile_ahead`, while the weights that it
    begins with are still in the making.

    No `compile_ahead` may be beginning meanwhile.

    Args:
      model: Module of the structure that the learner was built with; copied.
      reference: Reference, see `__init__`.

    Raises:
      ValueError: another structure, or updates have been made.
    """
    if self.counters.updates:
      raise ValueError(
        f"the learner has made {self.counters.updates} updates; begin from"
        " other weights with a new learner"
      )
    self._begin(cast(nnx.Module, model), reference)

  def compile_ahead(self) -> bool:
    """Compiles the programs of an update before there is data.

    Runs no update and changes nothing; an update that another thread makes
    meanwhile waits for the program that it needs.

    Returns:
      False, and nothing is compiled, while the shape of batches is open (see
      `config.patches` and `config.targets`), and where several processes learn,
      which would start programs in different orders.
    """
    # No array from here on: an update may donate them, and other weights
    # replace them.
    weights = program_lib.shapes_of(
      (self._params, self._opt_state, self._frozen)
    )
    batch = self._minibatches.batch_shapes()
    if batch is None or self._processes.count > 1:
      return False
    ahead.compile_update(
      self._programs,
      self._split,
      self._placement,
      self.algorithm,
      weights,
      batch,
      scores=self.algorithm.config.kl_in_loss or self._scores_first,
    )
    return True

  def _params_of_reference(
    self, model: base.Policy | None
  ) -> dict[str, jax.Array] | None:
    """Returns the reference's parameters, not copied; None without KL."""
    kl_coef = self.algorithm.config.kl_coef
    if not kl_coef:
      return None
    if model is None:
      raise ValueError(
        f"kl_coef={kl_coef} needs a reference model; pass reference="
        " (the model itself, to stay near where training starts)"
      )
    return self._split.params_of(cast(nnx.Module, model))

  def _referred(self) -> dict[str, jax.Array]:
    """Returns the reference's parameters on the devices."""
    return self._reference.params() if self._reference is not None else {}

  @property
  def shape(self) -> batching.BatchShape | None:
    return self._minibatches.shape

  @shape.setter
  def shape(self, shape: batching.BatchShape) -> None:
    self._minibatches.shape = shape

  @property
  def groups_per_step(self) -> int:
    """Groups that this process gives to an update."""
    return self.config.groups_per_step // self._processes.count

  # --- parameters -----------------------------------------------------------

  @property
  def version(self) -> int:
    return self.counters.version

  @property
  def compiles(self) -> dict[str, int]:
    """Program -> how often it was compiled; 1 each after the first update."""
    return dict(self._programs.compiles)

  def policy_state(self) -> nnx.State:
    """Returns a copy of the parameters in the model's types, for publishing."""
    return self._split.state(self._programs.publish(self._params), self._frozen)

  def policy(self) -> Any:
    """Returns a copy of the policy as a module."""
    return self._split.merge(self._programs.publish(self._params), self._frozen)

  def parameters(self) -> dict[str, jax.Array]:
    """Returns a copy of the trained parameters as {name: array}.

    They are masters: float32 where the model's are narrower.
    """
    return self._programs.masters(self._params)

  # --- learning -------------------------------------------------------------

  def update(
    self,
    groups: Sequence[trajectory.TrajectoryGroup],
    borrowed: Collection[str] = (),
  ) -> Metrics:
    """Learns from groups; the version is one higher afterwards.

    Args:
      groups: Groups of the update.
      borrowed: trajectory ids of members that are other groups' (see
        `replay`): trained on, and left out of statistics of rewards, of
        `advantages` and of `left_out`.

    Raises:
      ValueError: no group in any process, a sequence longer than a row
        (overlong="error"), or data that cannot have come from this policy.
      KeyError: an image is no longer in the store.
    """
    # A process without groups joins in with empty rows.
    if not self._processes.any("groups", bool(groups)):
      raise ValueError("an update needs at least one group")
    clock = readings_lib.Clock()
    config = self.config
    with clock("score" if self.algorithm.config.kl_in_reward else "pack"):
      prices, priced = reward_prices.of_groups(
        groups,
        self.algorithm,
        self.kl_coef,
        config.row_length,
        lambda sequences: self._logprobs(self._referred(), sequences),
      )
    per_group, stats = self._examples(
      groups, prices, priced, clock, frozenset(borrowed)
    )
    self.advantages = stats.advantages
    metrics = stats.metrics() | priced
    metrics |= readings_lib.of_samples(
      [e for group in per_group for e in group], self.version
    )
    order = np.arange(len(per_group))
    if config.minibatches > 1:
      rng = np.random.default_rng([self.seed, self.counters.updates])
      order = rng.permutation(order)
    minibatches = [
      [e for i in part for e in per_group[i]]
      for part in np.array_split(order, config.minibatches)
    ]
    learned, skipped = self._learn(minibatches, clock)
    reasons = example_lib.left_out(groups, skipped, stats.low_entropy)
    self.left_out = {k: v for k, v in reasons.items() if k not in borrowed}
    metrics = readings_lib.of_all(
      self._processes.gather("metrics", metrics | learned)
    )
    target = self.algorithm.config.kl_target
    if target and "kl" in metrics:
      metrics["kl_coef"] = self.kl_coef
      self.kl_coef = kl.adapted_coef(self.kl_coef, metrics["kl"], target)
    return metrics

  def _examples(
    self,
    groups: Sequence[trajectory.TrajectoryGroup],
    prices: reward_prices.Prices,
    readings: Metrics,
    clock: readings_lib.Clock,
    borrowed: frozenset[str] = frozenset(),
  ) -> tuple[list[list[Example]], example_lib.GroupStats]:
    """Examples of each group; readings of a critic are added to `readings`."""
    estimate = self.algorithm.estimate
    if not isinstance(estimate, gae.TokenEstimator):
      with clock("pack"):
        return example_lib.from_groups(
          groups,
          advantages.over_processes(estimate, self._processes),
          self.algorithm.advantage_options(self.gamma),
          extra=prices,
          borrowed=borrowed,
          look=anchors.look_of(self.algorithm.config, self._images),
          entropy_share=self.algorithm.config.entropy_share,
        )
    with clock("score"):
      token_advantages, more = critic.of_groups(
        groups,
        self.algorithm,
        self.gamma,
        self.config.row_length,
        lambda sequences: self._scored(
          self._programs.value, self._acting(), sequences
        ),
        extra=prices,
        processes=self._processes,
      )
    readings |= more
    return example_lib.from_advantages(
      groups,
      {k: v.turns_K.astype(np.float32) for k, v in token_advantages.items()},
      {k: v.per_sequence for k, v in token_advantages.items()},
      entropy_share=self.algorithm.config.entropy_share,
    )

  def update_on_sequences(
    self, sequences: Sequence[trajectory.TokenSequence]
  ) -> Metrics:
    """Learns to imitate demonstrations; for objectives without advantages.

    Raises:
      ValueError: the objective needs rewards, or as `update`.
    """
    if self.algorithm.objective.uses_advantages:
      raise ValueError(
        f"objective {self.algorithm.config.objective!r} learns from rewarded"
        " groups; use update(groups), or objective='behaviour_cloning'"
      )
    if not sequences and self._processes.count == 1:
      raise ValueError("an update needs at least one sequence")
    clock = readings_lib.Clock()
    with clock("pack"):
      all_examples = example_lib.from_sequences(sequences)
    order = np.arange(len(all_examples))
    minibatches = [
      [all_examples[i] for i in part]
      for part in np.array_split(order, self.config.minibatches)
    ]
    learned, _ = self._learn(minibatches, clock)
    return readings_lib.of_all(self._processes.gather("metrics", learned))

  def sequence_logprobs(
    self, sequences: Sequence[trajectory.TokenSequence]
  ) -> list[np.ndarray]:
    """Returns float32[T] log-probs of the sampled tokens, 0 elsewhere.

    They are of the present weights and, without truncation, of the same
    distribution that the sampler drew from.
    """
    return self._logprobs(self._acting(), sequences)

  def _logprobs(
    self,
    params: dict[str, jax.Array],
    sequences: Sequence[trajectory.TokenSequence],
  ) -> list[np.ndarray]:
    """As `sequence_logprobs`, of other weights."""
    return self._scored(self._programs.score, params, sequences)

  def _scored(
    self,
    program: Any,
    params: dict[str, jax.Array],
    sequences: Sequence[trajectory.TokenSequence],
  ) -> list[np.ndarray]:
    """Runs a program: float32[T] of each sequence, 0 at unsampled tokens.

    Where several processes learn, all call it together.
    """
    if not self._processes.any("scored", bool(sequences)):
      return []
    all_examples = example_lib.from_sequences(sequences)
    packed = self._minibatches.pack(all_examples, np.ones(len(all_examples)))
    out = [np.zeros(len(s), np.float32) for s in sequences]
    for batch in packed.batches:
      values = sharding.local_rows(program(params, self._frozen, batch))
      mask = sharding.local_rows(batch.mask)
      number = sharding.local_rows(batch.sequences)
      for i in np.unique(number[mask]):
        out[i][sequences[i].loss_mask] = values[mask & (number == i)]
    return out

  def _learn(
    self, minibatches: Sequence[Sequence[Example]], clock: readings_lib.Clock
  ) -> tuple[Metrics, list[tuple[Example, str]]]:
    """Optimizer steps on minibatches, `epochs` times.

    Returns:
      Readings, and the examples that were left out, with `examples`' reasons.
    """
    started = time.perf_counter()
    before = sum(clock.seconds.values())
    counters = self.counters
    skipped: list[tuple[Example, str]] = []
    packed: list[Minibatch] = []
    with clock("pack"):
      for examples in minibatches:
        minibatch, skipped_here = self._minibatches.prepare(examples)
        skipped += skipped_here
        if minibatch is not None:
          packed.append(minibatch)
    if self.algorithm.config.kl_target and self.algorithm.config.kl_in_loss:
      self._price(packed)
    if self._scores_first:
      with clock("score"):
        self._score_into(packed, "proximal", self._acting())
    if self.algorithm.config.kl_in_loss:
      with clock("score"):
        self._score_into(packed, "reference", self._referred())
    if self._teacher is not None:
      with clock("score"):
        for minibatch in packed:
          minibatch.set("teacher", self._teacher.score)
    readings = []
    attempted = counters.optimizer_steps + counters.skipped_steps
    for _ in range(self.config.epochs):
      for minibatch in packed:
        with clock("step"):
          readings.append(self._step(minibatch))
    counters.dropped_sequences += sum(
      reason == example_lib.TOO_LONG for _, reason in skipped
    )
    counters.updates += 1
    counters.version += 1
    attempted -= counters.optimizer_steps + counters.skipped_steps
    counters.empty_updates += not attempted
    stats = batching.PackStats.total(m.stats for m in packed)
    seconds = time.perf_counter() - started + before
    learned = readings_lib.with_turn_means(readings_lib.mean(readings))
    if learned:
      learned["learning_rate"] = float(
        self._schedule(max(counters.optimizer_steps - 1, 0))
      )
    metrics = (
      learned
      | stats.metrics()
      | {
        "optimizer_steps": float(counters.optimizer_steps),
        "skipped_steps": float(counters.skipped_steps),
        "empty_updates": float(counters.empty_updates),
        "dropped_sequences": float(counters.dropped_sequences),
        "compiles": float(sum(self.compiles.values())),
        "version": float(counters.version),
        "seconds_learn": seconds,
        "learner_tokens_per_second": (
          stats.sequence_tokens * self.config.epochs / max(seconds, 1e-9)
        ),
      }
      | {f"seconds_{k}": v for k, v in clock.seconds.items()}
    )
    return metrics, skipped

  def _price(self, minibatches: Sequence[Minibatch]) -> None:
    """Gives the present KL coefficient to the programs."""
    coef = sharding.put(np.float32(self.kl_coef), self._placement.replicated)
    for minibatch in minibatches:
      minibatch.set("kl_coef", lambda _: coef)

  def _score_into(
    self, minibatches: Sequence[Minibatch], field: str, params: object
  ) -> None:
    for minibatch in minibatches:
      minibatch.set(
        field, lambda batch: self._programs.score(params, self._frozen, batch)
      )

  def _step(self, minibatch: Minibatch) -> Metrics:
    """One optimizer step; its readings."""
    programs = self._programs
    grads, sums = programs.start(
      self._params, self._frozen, minibatch.batches[0], minibatch.extras[0]
    )
    for batch, extra in zip(minibatch.batches, minibatch.extras):
      grads, sums = programs.accumulate(
        self._params, grads, sums, self._frozen, batch, extra
      )
    self._params, self._opt_state, norm, was_applied = programs.apply(
      self._params, self._opt_state, grads, sums.weighted, *self._warming()
    )
    sums, norm, was_applied = jax.device_get((sums, norm, was_applied))
    self.counters.optimizer_steps += int(was_applied)
    self.counters.skipped_steps += int(not np.isfinite(norm))
    tokens = max(float(sums.tokens), 1.0)
    readings = {k: float(v) / tokens for k, v in sums.total.items()}
    readings |= {k: float(v) for k, v in sums.most.items()}
    readings |= readings_lib.turns_of_step(sums.by_turn, tokens)
    return readings | {"loss": float(sums.loss), "grad_norm": float(norm)}

  @property
  def _scores_first(self) -> bool:
    """Whether an update begins with log-probs of its first weights."""
    corrected = self.algorithm.correction.needs_proximal
    return corrected and self.config.steps_per_update > 1

  def _warming(self) -> tuple[jax.Array, ...]:
    """Returns whether warm-up of the value head is over, as an argument."""
    if not (self.algorithm.config.value_warmup and self.algorithm.has_critic):
      return ()
    warm = self.counters.updates >= self.algorithm.config.value_warmup
    return (sharding.put(np.float32(warm), self._placement.replicated),)

  # --- placement ------------------------------------------------------------

  def _put_params(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters at their place; not copied if they lie there already."""
    return {
      name: sharding.put(value, self._placement.params[name])
      for name, value in params.items()
    }

  def _acting(self) -> dict[str, jax.Array]:
    """Parameters in the model's types, in which a reference is kept too."""
    if not self._split.rounds:
      return self._params
    head = {k: v for k, v in self._params.items() if k in critic.NAMES}
    return self._programs.publish(self._params) | head

  # --- checkpoints ----------------------------------------------------------

  def arrays(self) -> dict[str, Any]:
    """Parameters and optimizer state, not copied: a pytree to save."""
    return {"params": self._params, "optimizer": self._opt_state}

  def progress(self) -> dict[str, Any]:
    """JSON values that, with `arrays`, are the learner's whole state.

    Random choices are functions of the seed and these counters.
    """
    return {
      "counters": dataclasses.asdict(self.counters),
      "shape": dataclasses.asdict(self.shape) if self.shape else None,
      "seed": self.seed,
      "kl_coef": self.kl_coef,
    }

  def load(self, arrays: dict[str, Any], progress: dict[str, Any]) -> None:
    """Continues from `arrays` and `progress`, which are taken over.

    Raises:
      ValueError: they are of another model, optimizer or seed.
    """
    old, new = jax.tree.structure(self.arrays()), jax.tree.structure(arrays)
    if bool(old != new):  # type: ignore[operator]
      raise ValueError(
        "the checkpoint's arrays do not have this learner's structure;"
        " policy, optimizer, weight_decay, grad_clip, freeze_vision and a"
        " value head must be as they were"
      )
    if progress["seed"] != self.seed:
      raise ValueError(
        f"the checkpoint was made with seed {progress['seed']}, this learner"
        f" has seed {self.seed}"
      )
    self._params = arrays["params"]
    self._opt_state = arrays["optimizer"]
    self.counters = LearnerCounters(**progress["counters"])
    if self.algorithm.config.kl_target:
      # Absent in checkpoints from before there was a target.
      self.kl_coef = progress.get("kl_coef") or self.kl_coef
    if progress["shape"] is not None:
      self._minibatches.restore_shape(progress["shape"])
