"""Compiles the programs of an update from shapes, before there is data.

Promises: runs nothing, makes no array, and keeps none alive: an update, or
other weights, may come while it compiles.

Does not: compile the programs that score for a KL in the reward, for a critic
or by a teacher.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import batching


def compile_update(
  programs: update.UpdatePrograms,
  split: update.SplitModel,
  placement: update.Placement,
  algorithm: parts.Algorithm,
  weights: tuple[Any, Any, Any],
  batch: batching.Batch,
  *,
  scores: bool,
) -> None:
  """Compiles an optimizer step, and the scores before it.

  Args:
    programs: Programs of the learner.
    split, placement, algorithm: Parts that the programs were made of.
    weights: shapes of parameters, optimizer state and frozen parameters.
    batch: shapes of a batch.
    scores: whether updates score their tokens before the first step.
  """
  params, opt_state, frozen = weights
  config = algorithm.config
  scalar: Any = jax.ShapeDtypeStruct(
    (), jnp.float32, sharding=placement.replicated
  )
  extra = update.Extra(
    batch.logprobs,
    batch.logprobs,
    kl_coef=scalar if config.kl_target and config.kl_in_loss else None,
    teacher=batch.logprobs if config.distill_coef else None,
  )
  if scores:
    own = jax.eval_shape(split.rounded, params)
    acting = params | {
      name: program.shape_of(x, placement.params[name])
      for name, x in own.items()
    }
    programs.score.prepare(acting, frozen, batch)
  warming = config.value_warmup and algorithm.has_critic
  programs.prepare_step(
    params, opt_state, frozen, batch, extra, (scalar,) if warming else ()
  )
