"""Makes the minibatches of an update: chooses, weighs and packs examples.

Where several processes learn together, each packs its own examples into its own
rows; they agree on weights, the shape of a batch and the number of batches, so
that all run the same programs.

Promises: weights count the tokens of all processes, also of examples left out
because their gradient is 0; an error in one process is an error in all; a batch
has one shape, which the first one decides where the configuration does not. It
grows, and never shrinks, with the largest image and the places that an
example's images need.

Does not: run programs, or know groups' rewards.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Callable, Mapping, Sequence, TypeVar

import jax
from jax.sharding import Mesh
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core.statistics import turn_groups
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import critic
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import sharding

LearnerConfig = config_lib.LearnerConfig
Example = example_lib.Example
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Minibatch:
  """Packed batches of one optimizer step, on their devices."""

  batches: list[batching.Batch]
  extras: list[update.Extra]
  stats: batching.PackStats

  def set(self, field: str, value: Callable[[batching.Batch], Any]) -> None:
    """Gives `update.Extra.<field>` of each batch its value, and waits."""
    self.extras = [
      dataclasses.replace(extra, **{field: value(batch)})
      for extra, batch in zip(self.extras, self.batches)
    ]
    jax.block_until_ready(self.extras)


class Minibatches:
  """See the module docstring.

  Attributes:
    packer: Packer of this process's examples.
    shape: Shape of this process's batches; None until the first decides it.
  """

  def __init__(
    self,
    model: base.Policy,
    processor: base.Processor,
    image_store: image_lib.ImageStore,
    config: LearnerConfig,
    algorithm: parts.Algorithm,
    placement: update.Placement,
    mesh: Mesh | None,
    processes: peers_lib.Peers,
  ):
    """Args:

      model, processor, image_store, config, mesh, processes: as of the learner.
      algorithm: Algorithm of the loss.
      placement: Placement of batches.

    Raises:
      ValueError: rows that do not divide over the mesh, or groups that do not
        over the processes.
    """
    if config.groups_per_step % processes.count:
      raise ValueError(
        f"groups_per_step={config.groups_per_step} must be a multiple of the"
        f" {processes.count} processes, which give as many each"
      )
    _check_division(config, placement.shards, mesh)
    self._config = config
    self._algorithm = algorithm
    self._placement = placement
    self._processes = processes
    # Of this process.
    self._buffers = 1 if mesh is None else sharding.local_batch_shards(mesh)
    self._rows = config.rows * self._buffers // placement.shards
    about = model.config
    self.packer = batching.Packer(
      processor,
      image_store,
      tree=uses_tree(config, model),
      pad_token_id=base.optional(about, "pad_token_id"),
      banned_token_ids=tuple(about.banned_token_ids),
      streams=streams_of(algorithm),
      support=support_of(algorithm),
    )
    self._aligned = aligns_images(model)
    self.shape = _fixed_shape(config, self._rows, self._buffers, self._aligned)
    # Whether the policy's programs depend on the largest image.
    self._bounded = bool(base.optional(model, "reads_image_patches"))
    self._image_multiple = max(processor.patches_per_token, 1)
    self._image_limit = int(base.optional(about, "max_image_patches"))

  def prepare(
    self, examples: Sequence[Example]
  ) -> tuple[Minibatch | None, list[tuple[Example, str]]]:
    """Returns a minibatch (None without a gradient) and what it leaves out."""
    fitting, long = self._in_all("check", lambda: self._fitting(examples))
    skipped = [(e, example_lib.TOO_LONG) for e in long]
    if self._algorithm.config.filter_truncated:
      skipped += [(e, example_lib.TRUNCATED) for e in fitting if e.truncated]
      fitting = [e for e in fitting if not e.truncated]
    weighed = self.weigh(fitting)
    learned_from = {id(e) for e in weighed[0]} if weighed else set()
    skipped += [
      (e, example_lib.ZERO_ADVANTAGE)
      for e in fitting
      if id(e) not in learned_from
    ]
    return None if weighed is None else self.pack(*weighed), skipped

  def _fitting(
    self, examples: Sequence[Example]
  ) -> tuple[list[Example], list[Example]]:
    """Examples that fit a row, and those that do not."""
    row_length = self._config.row_length
    long = set(self.packer.check(examples, row_length))
    if long and self._config.overlong == "error":
      worst = max(len(examples[i].sequence) for i in long)
      raise ValueError(
        f"{len(long)} of {len(examples)} sequences are longer than"
        f" row_length={row_length} tokens (the longest has {worst}); raise"
        " learner.row_length, lower engine.context_length, or leave them"
        " out with learner.overlong=drop"
      )
    return (
      [e for i, e in enumerate(examples) if i not in long],
      [e for i, e in enumerate(examples) if i in long],
    )

  def weigh(
    self, examples: Sequence[Example]
  ) -> tuple[list[Example], np.ndarray] | None:
    """Examples with a gradient and their tokens' weights; None without one.

    Weights are made before anything is skipped.
    """
    config = self._config
    weights_N = self._weights(examples)
    if config.skip_zero_advantage and self._algorithm.policy_gradient_only:
      keep = np.array([e.has_gradient for e in examples], bool)
      weights_N = weights_N[keep]
      examples = [e for e, k in zip(examples, keep) if k]
    if not self._processes.any("learn", bool(examples)):
      return None
    return list(examples), weights_N

  def _weights(self, examples: Sequence[Example]) -> np.ndarray:
    """float[N] weight of each example's tokens in the step of all processes."""
    of_all = self._processes.gather(
      "weigh", [[e.sequence.num_sampled, e.episode] for e in examples]
    )
    first = sum(len(counts) for counts in of_all[: self._processes.index])
    episodes: dict[tuple[int, int], int] = {}
    sampled, numbers = [], []
    for process, counts in enumerate(of_all):
      for tokens, episode in counts:
        sampled.append(tokens)
        number = episodes.setdefault((process, episode), len(episodes))
        numbers.append(number)
    if not sampled:
      return np.zeros(0)
    weights = self._algorithm.aggregate(
      aggregation.StepTokens(
        np.array(sampled, np.int64),
        np.array(numbers, np.int64),
        self._algorithm.config.loss_length or self._config.row_length,
      )
    )
    return weights[first : first + len(examples)]

  def pack(
    self, examples: Sequence[Example], weights_N: np.ndarray
  ) -> Minibatch:
    largest = max(
      self._processes.together(
        "largest image",
        lambda: self.packer.largest_image(examples, self._image_limit),
      )
    )
    shape = self._shape_for(examples, largest if self._bounded else 0)
    plan = self._in_all("plan", lambda: self.packer.plan(examples, shape))
    most = max(self._processes.gather("batches", len(plan.placed)))
    # A process with fewer rows joins in with empty ones.
    plan.placed.extend([] for _ in range(most - len(plan.placed)))
    filled = self._in_all(
      "fill", lambda: self.packer.fill(plan, examples, weights_N)
    )
    batches = [self._put(batch) for batch in filled]
    extras = [update.Extra(b.logprobs, b.logprobs) for b in batches]
    return Minibatch(batches, extras, plan.stats)

  def batch_shapes(self) -> batching.Batch | None:
    """Shapes of a batch and their places; None while `shape` is open.

    Every later batch has them, unless images come that are larger than the
    shape's bound. For a process that learns alone.
    """
    if self.shape is None or (self._bounded and not self.shape.image_patches):
      return None
    plan = self.packer.plan((), self.shape)
    plan.placed[:] = [[]]
    (batch,) = self.packer.fill(plan, (), np.zeros(0))
    place = self._placement.batch
    return jax.tree.map(lambda x: program.shape_of(x, place), batch)

  def _shape_for(
    self, examples: Sequence[Example], largest: int
  ) -> batching.BatchShape:
    """Returns the shape, grown where these examples need it.

    Args:
      examples: Examples of this process.
      largest: patches of the largest image of all processes; 0 = the policy's
        programs do not depend on it.
    """
    bound = packing.image_bound(largest, self._image_multiple)
    if self.shape is None:
      self.shape = self._agreed(self.suggest(examples, bound))
    if bound > self.shape.image_patches:
      self.shape = self._grown(self.shape, bound)
    if bound:
      places = self._processes.gather(
        "places", self.packer.places_of_one(examples, self.shape)
      )
      self.shape = self._grown(
        self.shape, self.shape.image_patches, max(places)
      )
    return self.shape

  def _grown(
    self, shape: batching.BatchShape, bound: int, places: int = 0
  ) -> batching.BatchShape:
    """See `BatchShape.bounded`."""
    return shape.bounded(bound, places, multiple=self._image_multiple)

  def _in_all(self, what: str, work: Callable[[], T]) -> T:
    """Returns the result of `work`; raises if it fails in any process."""
    results: list[T] = []
    self._processes.together(what, lambda: results.append(work()))
    return results[0]

  def _agreed(self, shape: batching.BatchShape) -> batching.BatchShape:
    """Returns the shape that holds what every process has."""
    shapes = self._processes.gather("shape", [shape.patches, shape.targets])
    patches, targets = (max(sizes) for sizes in zip(*shapes))
    return dataclasses.replace(shape, patches=patches, targets=targets)

  def suggest(
    self, examples: Sequence[Example], image_patches: int = 0
  ) -> batching.BatchShape:
    return self.packer.suggest(
      examples,
      self._rows,
      self._config.row_length,
      self._buffers,
      self._config.patches,
      self._config.targets,
      image_patches,
      self._aligned,
    )

  def restore_shape(self, stored: Mapping[str, Any]) -> None:
    """Takes over a checkpoint's shape, as far as batches here can have it.

    A configured shape stays, but for patches that it grew by with the data.
    """
    shape = batching.BatchShape(**{**stored, "aligned": self._aligned})
    least = self.shape or self.suggest(())
    # Another mesh or row length needs another shape, and a shape that some
    # row would not fit is of no use either.
    same = (shape.rows, shape.row_length, shape.buffers) == (
      least.rows,
      least.row_length,
      least.buffers,
    )
    enough = same and shape.patches >= least.patches
    if self.shape is None:
      if enough and shape.targets >= least.targets:
        self.shape = shape
    elif enough and shape.image_patches:  # Without a bound none ever grows.
      self.shape = dataclasses.replace(self.shape, patches=shape.patches)
    if self.shape is not None:
      # Else the same images would be computed in other blocks.
      bound = max(shape.image_patches, self.shape.image_patches)
      self.shape = self._grown(self.shape, bound)

  def _put(self, batch: batching.Batch) -> batching.Batch:
    put = functools.partial(
      sharding.put_rows,
      where=self._placement.batch,
      processes=self._processes.count,
    )
    return jax.tree.map(put, batch)


def aligns_images(model: base.Policy) -> bool:
  """Returns whether images are packed in windows: `BatchShape.aligned`."""
  return bool(base.optional(model, "wants_aligned_images"))


def uses_tree(config: LearnerConfig, model: base.Policy) -> bool:
  """Returns whether the rows of batches are trees.

  Raises:
    ValueError: learner.tree asks for what the policy does not support.
  """
  if config.tree == "false":
    return False
  if base.optional(model, "supports_tree"):
    return config.tree == "true" or compiling.backend() != "tpu"
  reason = (
    f"{type(model).__name__} computes the sequences of an update one by one:"
    " a layer's state goes on from each token of a row to the next, or the"
    " class does not declare supports_tree"
  )
  if hasattr(model, "supports_prefix_ids"):
    reason += " (supports_prefix_ids and prefix_ids were its former names)"
  if config.tree == "true":
    raise ValueError(f"learner.tree=true: {reason}; set learner.tree=auto")
  _log.warning("learner.tree=auto: %s", reason)
  return False


def streams_of(algorithm: parts.Algorithm) -> tuple[str, ...]:
  """Names of the streams that its batches hold."""
  streams = critic.STREAMS if algorithm.has_critic else ()
  if algorithm.objective.uses_advantages:
    streams = (*streams, turn_groups.STREAM)
  return streams


def support_of(algorithm: parts.Algorithm) -> int:
  """Returns the number of tokens in a sampling mask; 0 without one."""
  if not algorithm.config.keep_sampling_mask:
    return 0
  return policy_client.MAX_TOP_LOGPROBS + 1  # One sampled among ties.


def _fixed_shape(
  config: LearnerConfig, rows: int, buffers: int, aligned: bool
) -> batching.BatchShape | None:
  """Returns the configured shape; None where the first batch decides it."""
  if not (config.patches and config.targets):
    return None
  return batching.BatchShape(
    rows,
    config.row_length,
    buffers,
    config.patches,
    config.targets,
    aligned=aligned,
  )


def _check_division(
  config: LearnerConfig, buffers: int, mesh: Mesh | None
) -> None:
  """Raises ValueError unless rows and their tokens divide over the mesh."""
  if config.rows % buffers:
    raise ValueError(
      f"rows={config.rows} must be a multiple of the {buffers} batch"
      " shards of the mesh (data x fsdp)"
    )
  if mesh is not None and config.row_length % mesh.shape["sequence"]:
    raise ValueError(
      f"row_length={config.row_length} must be a multiple of the"
      f" {mesh.shape['sequence']} shards of the mesh's axis sequence"
    )
