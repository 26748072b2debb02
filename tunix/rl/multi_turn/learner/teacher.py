"""Scores sampled tokens by a frozen teacher policy, for distillation.

On-policy distillation: the student samples, and each of its tokens is compared
with the teacher's log-prob of it (Agarwal et al. 2023, "On-Policy Distillation
of Language Models", arXiv:2306.13649, with the reverse KL). The learner makes
an advantage of the difference, see `update`.

Promises: the teacher's weights are placed once and never change; its scores are
of the same distribution (ban, temperature, sampling mask) as the student's.

Does not: need the student's architecture or size; tokens, image placeholders
and patches must be the same.
"""

from __future__ import annotations

from typing import Any, cast

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.learner import batching
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import minibatches
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding


class Teacher:
  """A frozen policy; see the module docstring."""

  def __init__(
      self,
      model: base.Policy,
      student: base.Policy,
      mesh: Mesh | None,
      *,
      temperature: float,
      chunk: int,
      tree: bool,
  ):
    """Args:

      model: the teacher, an nnx module.
      student: the policy that is trained.
      mesh: Mesh of the learner.
      temperature: Temperature of the sampler.
      chunk: see `logprobs.token_scores`.
      tree: whether the rows of batches are trees.

    Raises:
      ValueError: it cannot read the student's batches.
    """
    if model.config.vocab_size < student.config.vocab_size:
      raise ValueError(
          f"the teacher has a vocabulary of {model.config.vocab_size} tokens,"
          f" the policy one of {student.config.vocab_size}; a teacher needs the"
          " policy's tokenizer"
      )
    if tree and not getattr(model, "supports_tree", False):
      raise ValueError(
          f"the teacher, a {type(model).__name__}, reads no trees; set"
          " learner.tree=false"
      )
    module = cast(nnx.Module, model)
    split = update.SplitModel(module)
    placement = update.Placement.of(split, model, mesh)
    put = lambda arrays, places: {
        name: sharding.put(value, places[name])
        for name, value in arrays.items()
    }
    self._params = put(split.params_of(module), placement.params)
    self._frozen = put(split.frozen_of(module), placement.frozen)
    # Ids beyond the student's vocabulary are never sampled either.
    banned = logprobs.banned_mask(
        model.config.vocab_size,
        (
            *student.config.banned_token_ids,
            *range(student.config.vocab_size, model.config.vocab_size),
        ),
    )

    def score(params: Any, frozen: Any, batch: batching.Batch) -> jax.Array:
      scores, _ = logprobs.batch_scores(
          split.merge(params, frozen),
          batch,
          temperature=temperature,
          banned_V=banned,
          chunk=chunk,
      )
      return scores.logprobs

    self._score = program.Program(
        jax.jit(score, out_shardings=placement.batch)
    )

  @classmethod
  def of(
      cls,
      algorithm: parts.Algorithm,
      model: base.Policy | None,
      student: base.Policy,
      mesh: Mesh | None,
      sampling: policy_client.SamplingParams,
      config: config_lib.LearnerConfig,
  ) -> Teacher | None:
    """Returns the teacher of a learner; None without distillation.

    Raises:
      ValueError: there should be one, or as of the constructor.
    """
    coef = algorithm.config.distill_coef
    if not coef:
      return None
    if model is None:
      raise ValueError(f"distill_coef={coef} needs a teacher; pass teacher=")
    return cls(
        model,
        student,
        mesh,
        temperature=sampling.temperature,
        chunk=config.logit_chunk,
        tree=minibatches.uses_tree(config, student),
    )

  def score(self, batch: batching.Batch) -> jax.Array:
    """Returns float32[S, M] log-probs of the targets; padding holds zeros."""
    return self._score(self._params, self._frozen, batch)

  @property
  def bytes(self) -> int:
    """Of its weights, over all devices."""
    return sum(
        int(np.prod(x.shape)) * x.dtype.itemsize
        for x in (*self._params.values(), *self._frozen.values())
    )
