"""The GRPO learner: groups of trajectories in, better weights out.

It owns the trained parameters, the optimizer state and the integer version.
One `update` turns groups into advantages, packs them, adds up gradients over
micro-batches, and makes one optimizer step a minibatch and epoch; then the
version is one higher, whether or not anything could be learned (admission of
new groups counts versions).

Promises: the caller's model is copied and never touched; `policy_state` is a
copy that later updates, which work in place, cannot change; the same groups
in the same state give the same bits; batches have one shape, so each program
is compiled once (`compiles` counts).

Does not know environments or queues (see `loop`). One caller at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any, Iterator, Mapping, Sequence

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import batching
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import examples as example_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import optimizer
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import importance
from tunix.rl.multi_turn.learner.algorithms import objectives
from tunix.rl.multi_turn.policy import base

LearnerConfig = config_lib.LearnerConfig
Example = example_lib.Example
Metrics = dict[str, float]


@dataclasses.dataclass
class Counters:
  """Integers that a checkpoint keeps.

  Attributes:
    version: of the weights, one higher after each update.
    updates: calls of `update` and `update_on_sequences`.
    optimizer_steps: steps made.
    skipped_steps: steps not made because a gradient was not finite.
    empty_updates: updates in which nothing had a gradient.
    dropped_sequences: sequences longer than a row that were left out.
  """

  version: int = 0
  updates: int = 0
  optimizer_steps: int = 0
  skipped_steps: int = 0
  empty_updates: int = 0
  dropped_sequences: int = 0


class _Clock:
  """Wall seconds by phase."""

  def __init__(self):
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
      yield
    finally:
      spent = time.perf_counter() - started
      self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


@dataclasses.dataclass
class _Minibatch:
  """What one optimizer step learns from, packed and on its devices."""

  batches: list[batching.Batch]
  extras: list[update.Extra]
  stats: batching.PackStats


class Learner:
  """See the module docstring."""

  def __init__(
      self,
      model: Any,
      processor: base.Processor,
      image_store: image_lib.ImageStore,
      config: LearnerConfig,
      mesh: Mesh | None = None,
      reference: Any = None,
  ):
    """Args:

      model: the policy, an nnx module; its `nnx.Param`s are copied. With a
        LoRA adapter, the adapter's are, and the others are used as they are
        and never trained; nobody may donate them. Its config may name
        `banned_token_ids`, `pad_token_id` and `vocab_size`.
      processor: its host side.
      image_store: pixels of the images that trajectories refer to.
      config: see there.
      mesh: as of `sharding.make_mesh`; None is the default device.
      reference: module of the same structure that the KL term is measured to;
        copied. Needed when kl_coef > 0.

    Raises:
      ValueError: rows that do not divide over the mesh, or a KL term without
        a reference.
    """
    self.config = config
    self.mesh = mesh
    self.counters = Counters()
    self.advantages: Mapping[str, np.ndarray] = {}
    """Of the last `update`: trajectory id -> float32[turns], valid members."""
    self.left_out: Mapping[str, tuple[str, ...]] = {}
    """Of the last `update`: see `examples.left_out`."""
    self._processor = processor
    self._split = update.SplitModel(model)
    self._placement = update.Placement.of(self._split, model, mesh)
    about = model.config
    banned = tuple(getattr(about, "banned_token_ids", ()))
    self._programs = update.Programs(
        self._split,
        config,
        logprobs.banned_mask(about.vocab_size, banned) if banned else None,
        self._placement,
        proximal_is_current=config.minibatches * config.epochs == 1,
    )
    self._params = self._place(self._split.params_of(model))
    self._frozen = {
        name: jax.device_put(value, self._placement.frozen[name])
        for name, value in self._split.frozen_of(model).items()
    }
    self._reference = None
    if config.kl_coef:
      if reference is None:
        raise ValueError(
            f"kl_coef={config.kl_coef} needs a reference model; pass reference="
            " (the model itself, to stay near where training starts)"
        )
      self._reference = self._place(self._split.params_of(reference))
    self._opt_state = self._programs.init_optimizer(self._params)
    self._schedule = optimizer.make_schedule(config)
    self._buffers = self._placement.shards
    if config.rows % self._buffers:
      raise ValueError(
          f"rows={config.rows} must be a multiple of the {self._buffers} batch"
          " shards of the mesh (data x fsdp)"
      )
    if mesh is not None and config.row_length % mesh.shape["sequence"]:
      raise ValueError(
          f"row_length={config.row_length} must be a multiple of the"
          f" {mesh.shape['sequence']} shards of the mesh's axis sequence"
      )
    self._packer = batching.Packer(
        processor,
        image_store,
        share_prompts=config.share_prompts
        and bool(getattr(model, "supports_prefix_ids", False)),
        pad_token_id=getattr(about, "pad_token_id", 0),
        banned_token_ids=banned,
    )
    self.shape: batching.BatchShape | None = None
    if config.patches and config.targets:
      self.shape = batching.BatchShape(
          config.rows,
          config.row_length,
          self._buffers,
          config.patches,
          config.targets,
      )

  # --- what others see ------------------------------------------------------

  @property
  def version(self) -> int:
    return self.counters.version

  @property
  def compiles(self) -> dict[str, int]:
    """Program -> how often it was compiled; 1 each after the first update."""
    return dict(self._programs.compiles)

  def policy_state(self) -> nnx.State:
    """A copy of the parameters, for publishing."""
    return self._split.state(self._programs.copy(self._params), self._frozen)

  def policy(self) -> Any:
    """A copy of the policy as a module."""
    return self._split.merge(self._programs.copy(self._params), self._frozen)

  def parameters(self) -> dict[str, jax.Array]:
    """A copy of the trained parameters as {name: array}."""
    return self._programs.copy(self._params)

  # --- learning -------------------------------------------------------------

  def update(
      self, groups: Sequence[trajectory.TrajectoryGroup]
  ) -> Metrics:
    """Learns from groups; the version is one higher afterwards.

    Raises:
      ValueError: no group, a sequence longer than a row (overlong="error"), or
        data that cannot have come from this policy.
      KeyError: an image is no longer in the store.
    """
    if not groups:
      raise ValueError("an update needs at least one group")
    clock = _Clock()
    config = self.config
    with clock("pack"):
      per_group, stats = example_lib.from_groups(
          groups,
          advantages.ESTIMATORS.get(config.advantage),
          advantages.AdvantageOptions(config.std_eps, config.gamma),
      )
    self.advantages = stats.advantages
    metrics = stats.metrics()
    metrics |= _sampled_metrics(
        [e for group in per_group for e in group], self.version
    )
    order = np.arange(len(per_group))
    if config.minibatches > 1:
      rng = np.random.default_rng([config.seed, self.counters.updates])
      order = rng.permutation(order)
    parts = [
        [e for i in part for e in per_group[i]]
        for part in np.array_split(order, config.minibatches)
    ]
    learned, skipped = self._learn(parts, clock)
    self.left_out = example_lib.left_out(groups, skipped)
    return metrics | learned

  def update_on_sequences(
      self, sequences: Sequence[trajectory.TokenSequence]
  ) -> Metrics:
    """Learns to imitate demonstrations; for objectives without advantages.

    Raises:
      ValueError: the objective needs rewards, or as `update`.
    """
    objective = objectives.OBJECTIVES.get(self.config.objective)
    if objective.uses_advantages:
      raise ValueError(
          f"objective {self.config.objective!r} learns from rewarded groups;"
          " use update(groups), or objective='behaviour_cloning'"
      )
    if not sequences:
      raise ValueError("an update needs at least one sequence")
    clock = _Clock()
    with clock("pack"):
      all_examples = example_lib.from_sequences(sequences)
    parts = np.array_split(
        np.arange(len(all_examples)), self.config.minibatches
    )
    learned, _ = self._learn(
        [[all_examples[i] for i in p] for p in parts], clock
    )
    return learned

  def sequence_logprobs(
      self, sequences: Sequence[trajectory.TokenSequence]
  ) -> list[np.ndarray]:
    """float32[T] log-probs of the sampled tokens, 0 elsewhere.

    They are of the present weights and, without truncation, of the same
    distribution that the sampler drew from.
    """
    all_examples = example_lib.from_sequences(sequences)
    packed = self._pack(all_examples, np.ones(len(all_examples)))
    out = [np.zeros(len(s), np.float32) for s in sequences]
    for batch in packed.batches:
      found = np.asarray(
          self._programs.score(self._params, self._frozen, batch)
      )
      mask, number = np.asarray(batch.mask), np.asarray(batch.sequences)
      for i in np.unique(number[mask]):
        out[i][sequences[i].loss_mask] = found[mask & (number == i)]
    return out

  def _learn(
      self, parts: Sequence[Sequence[Example]], clock: _Clock
  ) -> tuple[Metrics, list[tuple[Example, str]]]:
    """Optimizer steps on minibatches, `epochs` times.

    Returns:
      Readings, and the examples that were left out, with `examples`' reasons.
    """
    started = time.perf_counter()
    before = dict(clock.seconds)
    config, counters = self.config, self.counters
    correction = importance.CORRECTIONS.get(config.importance)
    skipped: list[tuple[Example, str]] = []
    minibatches = []
    with clock("pack"):
      for part in parts:
        kept, long = self._fitting(part)
        skipped += [(e, example_lib.TOO_LONG) for e in long]
        weighed = self._weigh(kept)
        learned_from = {id(e) for e in weighed[0]} if weighed else set()
        skipped += [
            (e, example_lib.ZERO_ADVANTAGE)
            for e in kept
            if id(e) not in learned_from
        ]
        if weighed is not None:
          minibatches.append(self._pack(*weighed))
    if correction.needs_proximal and config.minibatches * config.epochs > 1:
      with clock("score"):
        self._score_into(minibatches, "proximal", self._params)
    if self._reference is not None:
      with clock("score"):
        self._score_into(minibatches, "reference", self._reference)
    readings = []
    for _ in range(config.epochs):
      for minibatch in minibatches:
        with clock("step"):
          readings.append(self._step(minibatch))
    counters.dropped_sequences += sum(
        reason == example_lib.TOO_LONG for _, reason in skipped
    )
    counters.updates += 1
    counters.version += 1
    counters.empty_updates += not readings
    stats = _add_stats([m.stats for m in minibatches])
    seconds = time.perf_counter() - started + sum(before.values())
    learned = _mean_readings(readings)
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
                stats.sequence_tokens * config.epochs / max(seconds, 1e-9)
            ),
        }
        | {f"seconds_{k}": v for k, v in clock.seconds.items()}
    )
    return metrics, skipped

  def _fitting(
      self, examples: Sequence[Example]
  ) -> tuple[list[Example], list[Example]]:
    """Examples that fit a row, and those that do not."""
    row_length = self.config.row_length
    long = set(self._packer.check(examples, row_length))
    if long and self.config.overlong == "error":
      worst = max(len(examples[i].sequence) for i in long)
      raise ValueError(
          f"{len(long)} of {len(examples)} sequences are longer than"
          f" row_length={row_length} tokens (the longest has {worst}); raise"
          " learner.row_length or lower engine.context_length (in code:"
          " LearnerConfig.overlong='drop')"
      )
    return (
        [e for i, e in enumerate(examples) if i not in long],
        [e for i, e in enumerate(examples) if i in long],
    )

  def _weigh(
      self, examples: Sequence[Example]
  ) -> tuple[list[Example], np.ndarray] | None:
    """Examples with a gradient and their tokens' weights; None without one.

    Weights are made before anything is skipped.
    """
    config = self.config
    if not examples:
      return None
    weights_N = aggregation.AGGREGATORS.get(config.loss_aggregation)(
        aggregation.StepTokens(
            np.array([e.sequence.num_sampled for e in examples], np.int64),
            np.array([e.episode for e in examples], np.int64),
            config.loss_length or config.row_length,
        )
    )
    if config.skip_zero_advantage and config.policy_gradient_only:
      keep = np.array([e.has_gradient for e in examples])
      weights_N = weights_N[keep]
      examples = [e for e, k in zip(examples, keep) if k]
      if not examples:
        return None
    return list(examples), weights_N

  def _pack(
      self, examples: Sequence[Example], weights_N: np.ndarray
  ) -> _Minibatch:
    if self.shape is None:
      self.shape = self._suggest(examples)
    plan = self._packer.plan(examples, self.shape)
    batches = [
        self._put(b) for b in self._packer.fill(plan, examples, weights_N)
    ]
    extras = [update.Extra(b.logprobs, b.logprobs) for b in batches]
    return _Minibatch(batches, extras, plan.stats)

  def _suggest(self, examples: Sequence[Example]) -> batching.BatchShape:
    return self._packer.suggest(
        examples,
        self.config.rows,
        self.config.row_length,
        self._buffers,
        self.config.patches,
        self.config.targets,
    )

  def _score_into(
      self, minibatches: Sequence[_Minibatch], field: str, params: Any
  ) -> None:
    for minibatch in minibatches:
      minibatch.extras = [
          dataclasses.replace(
              extra,
              **{field: self._programs.score(params, self._frozen, batch)},
          )
          for extra, batch in zip(minibatch.extras, minibatch.batches)
      ]
      jax.block_until_ready(minibatch.extras)

  def _step(self, minibatch: _Minibatch) -> Metrics:
    """One optimizer step; its readings."""
    programs = self._programs
    grads, sums = programs.start(
        self._params, self._frozen, minibatch.batches[0], minibatch.extras[0]
    )
    for batch, extra in zip(minibatch.batches, minibatch.extras):
      grads, sums = programs.accumulate(
          self._params, grads, sums, self._frozen, batch, extra
      )
    self._params, self._opt_state, norm, made = programs.apply(
        self._params, self._opt_state, grads
    )
    sums, norm, made = jax.device_get((sums, norm, made))
    self.counters.optimizer_steps += int(made)
    self.counters.skipped_steps += 1 - int(made)
    tokens = max(float(sums.tokens), 1.0)
    readings = {k: float(v) / tokens for k, v in sums.total.items()}
    readings |= {k: float(v) for k, v in sums.most.items()}
    return readings | {"loss": float(sums.loss), "grad_norm": float(norm)}

  # --- placement ------------------------------------------------------------

  def _put(self, batch: batching.Batch) -> batching.Batch:
    return jax.device_put(batch, self._placement.batch)

  def _place(self, params: update.Params) -> update.Params:
    """Copies parameters to their place."""
    return self._programs.copy({
        name: jax.device_put(value, self._placement.params[name])
        for name, value in params.items()
    })

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
        "seed": self.config.seed,
    }

  def load(self, arrays: dict[str, Any], progress: dict[str, Any]) -> None:
    """Continues from `arrays` and `progress`, which are taken over.

    Raises:
      ValueError: they are of another model, optimiser or seed.
    """
    old, new = jax.tree.structure(self.arrays()), jax.tree.structure(arrays)
    if old != new:
      raise ValueError(
          "the checkpoint's arrays do not have this learner's structure;"
          " policy, optimizer, weight_decay and grad_clip must be as they were"
      )
    if progress["seed"] != self.config.seed:
      raise ValueError(
          f"the checkpoint was made with seed {progress['seed']}, this learner"
          f" has seed {self.config.seed}"
      )
    self._params = arrays["params"]
    self._opt_state = arrays["optimizer"]
    self.counters = Counters(**progress["counters"])
    if self.shape is None and progress["shape"] is not None:
      shape = batching.BatchShape(**progress["shape"])
      least = self._suggest(())
      # Another mesh or row length needs another shape, and a shape that some
      # row would not fit is of no use either.
      if (shape.rows, shape.row_length, shape.buffers) == (
          least.rows,
          least.row_length,
          least.buffers,
      ) and min(
          shape.patches - least.patches, shape.targets - least.targets
      ) >= 0:
        self.shape = shape


# --- readings ---------------------------------------------------------------


def _sampled_metrics(
    examples: Sequence[Example], version: int
) -> Metrics:
  """About the sampled tokens of all valid episodes, skipped ones included."""
  if not examples:
    return {}
  masks = [e.sequence.loss_mask for e in examples]
  lag = version - np.concatenate(
      [e.sequence.versions[m] for e, m in zip(examples, masks)]
  )
  values = np.concatenate([e.advantages[m] for e, m in zip(examples, masks)])
  return {
      "staleness_mean": float(lag.mean()),
      "staleness_max": float(lag.max()),
      "advantage_mean": float(values.mean()),
      "advantage_std": float(values.std()),
      "advantage_abs_max": float(np.abs(values).max()),
      "completion_tokens": float(len(values)),
  }


def _mean_readings(readings: Sequence[Metrics]) -> Metrics:
  """Means over optimizer steps, extremes of extremes; {} of no steps."""
  out: Metrics = {}
  for name in readings[0] if readings else ():
    values = [r[name] for r in readings]
    if name == "ratio_min":
      out[name] = -max(values)
    elif name.endswith("_max"):
      out[name] = max(values)
    else:
      out[name] = math.fsum(values) / len(values)
  return out


def _add_stats(stats: Sequence[batching.PackStats]) -> batching.PackStats:
  names = [f.name for f in dataclasses.fields(batching.PackStats)]
  return batching.PackStats(
      **{n: sum(getattr(s, n) for s in stats) for n in names}
  )
