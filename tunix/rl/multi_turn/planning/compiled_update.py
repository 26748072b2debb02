"""Compiles the learner's update for shapes, and reports the memory it takes.

Nothing is executed and no array of a batch exists: a program of a terabyte is
compiled as fast as a small one. Compiling takes seconds for a small policy and
minutes for a large one; `update_memory` predicts without.

Does not: count the rollout engine.
"""

from __future__ import annotations

import math
from typing import Any, Callable, cast, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import critic
from tunix.rl.multi_turn.learner import frozen as frozen_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import minibatches
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import compiling


def least_shape(
  config: config_lib.LearnerConfig,
  processor: base.Processor,
  shards: int,
  image_patches: int = 0,
  aligned: bool = True,
) -> packing.BatchShape:
  """Returns the smallest batch that a learner with these settings compiles.

  Without learner.patches and learner.targets the first batch decides them, and
  they may become larger. `image_patches` are those of the largest image;
  `aligned` is `minibatches.aligns_images` of the policy.
  """
  length = config.row_length
  ppt = max(processor.patches_per_token, 1)
  return packing.BatchShape(
    config.rows,
    length,
    shards,
    config.patches or length * processor.patches_per_token,
    config.targets or length,
    aligned=aligned,
  ).bounded(packing.image_bound(image_patches, ppt), multiple=ppt)


def activations(
  model: base.Policy,
  processor: base.Processor,
  config: config_lib.LearnerConfig,
  algorithm: config_lib.AlgorithmConfig,
  *,
  sampling: policy_client.SamplingConfig,
  mesh: Mesh | None = None,
  image_patches: int = 0,
) -> int | None:
  """Returns the bytes that the update of a micro-batch takes on each device.

  Those of its batch and temporary buffers, hence activations and the gradients
  of the micro-batch; parameters, running gradients and optimizer state exist
  beside them.

  Args:
    model: the policy.
    processor: its host side.
    config, algorithm, sampling, mesh: as of a `Learner`.
    image_patches: Patches of the largest image; 0 = not known.

  Returns:
    The bytes; None on a backend that does not report them.

  Raises:
    ValueError: an unknown algorithm.
  """
  lowered = programs(
    model,
    processor,
    config,
    algorithm,
    sampling=sampling,
    mesh=mesh,
    image_patches=image_patches,
  )
  compiled = lowered.accumulate.compile(compiling.update_options())
  memory = compiled.memory_analysis()
  if memory is None:
    return None
  return memory.temp_size_in_bytes + max(
    0, memory.argument_size_in_bytes - lowered.weights
  )


class Programs(NamedTuple):
  """A learner's programs before they are compiled.

  Attributes:
    accumulate: forward and backward pass of a micro-batch.
    apply: lowers the optimizer step.
    weights: bytes on a device of parameters, running gradients and frozen
      parameters, which are arguments of the first.
    shape: Shape of the micro-batch.
  """

  accumulate: jax.stages.Lowered
  apply: Callable[[], jax.stages.Lowered]
  weights: int
  shape: packing.BatchShape


def programs(
  model: base.Policy,
  processor: base.Processor,
  config: config_lib.LearnerConfig,
  algorithm: config_lib.AlgorithmConfig,
  *,
  sampling: policy_client.SamplingConfig,
  mesh: Mesh | None = None,
  image_patches: int = 0,
) -> Programs:
  """Lowers an update; see `activations`."""
  module = cast(nnx.Module, model)
  split = update.SplitModel(module, frozen_lib.modules(model, config))
  placement = update.Placement.of(split, model, mesh)
  about = model.config
  operators = parts.Algorithm.of(algorithm)
  width = 0
  if operators.has_critic:
    width = critic.width_of(model, processor, config.rows)
  steps = update.UpdatePrograms(
    split,
    config,
    operators,
    logprobs.banned_mask(about.vocab_size, tuple(about.banned_token_ids)),
    placement,
    temperature=sampling.temperature,
    width=width,
  )

  def placed(shape: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

  params = {
    name: placed(shape, placement.params[name])
    for name, shape in zip(split.names, split.shapes)
  }
  if operators.has_critic:
    params |= {
      name: placed(shape, placement.head[name])
      for name, shape in critic.shapes(width).items()
    }
  frozen = {
    name: placed(value, placement.frozen[name])
    for name, value in split.frozen_of(module).items()
  }
  size = least_shape(
    config,
    processor,
    placement.shards,
    image_patches,
    minibatches.aligns_images(model),
  )
  batch = _batch(
    size,
    processor,
    placement.batch,
    tree=minibatches.uses_tree(config, model),
    algorithm=operators,
  )
  extra = update.Extra(
    batch.logprobs,
    batch.logprobs,
    teacher=batch.logprobs if algorithm.distill_coef else None,
  )
  _, sums = jax.eval_shape(steps.loss, params, frozen, batch, extra)
  sums = jax.tree.map(lambda x: placed(x, placement.replicated), sums)

  def apply() -> jax.stages.Lowered:
    state = jax.eval_shape(steps.init_optimizer, params)
    state = jax.tree.map(placed, state, steps.optimizer_placement)
    return steps.apply.lower(params, state, params, sums.weighted)

  return Programs(
    steps.accumulate.lower(params, params, sums, frozen, batch, extra),
    apply,
    sum(map(_device_bytes, jax.tree.leaves((params, params, frozen)))),
    size,
  )


def _device_bytes(shape: jax.ShapeDtypeStruct) -> int:
  local = shape.sharding.shard_shape(shape.shape)
  return jnp.dtype(shape.dtype).itemsize * math.prod(local)


def _batch(
  shape: packing.BatchShape,
  processor: base.Processor,
  place: jax.sharding.Sharding,
  *,
  tree: bool,
  algorithm: parts.Algorithm,
) -> batching.Batch:
  """Returns a `batching.Batch` of shapes."""
  b, t, s, m = shape.rows, shape.row_length, shape.buffers, shape.targets
  p = shape.patches

  def array(dtype: jax.typing.DTypeLike, *dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

  i32, f32 = jnp.int32, jnp.float32
  inputs = base.PolicyInputs(
    tokens=array(i32, b, t),
    positions=array(i32, b, t, 3),
    segment_ids=array(i32, b, t),
    vision_index=array(i32, b, t),
    patches=array(jnp.uint8, s, p, processor.patch_bytes),
    patch_segments=array(i32, s, p),
    patch_positions=array(i32, s, p, processor.position_axes),
    seen_until=array(i32, b, t) if tree else None,
    image_patches=shape.image_patches,
    aligned_images=shape.aligned and bool(shape.image_patches),
  )
  ints = ("index", "targets", "versions", "sequences", "groups")
  floats = ("logprobs", "advantages", "weights")
  streams = minibatches.streams_of(algorithm)
  support = minibatches.support_of(algorithm)
  return batching.Batch(
    inputs=inputs,
    mask=array(jnp.bool_, s, m),
    streams={name: array(f32, s, m) for name in streams},
    support=array(i32, s, m, support) if support else None,
    **{name: array(i32, s, m) for name in ints},
    **{name: array(f32, s, m) for name in floats},
  )
