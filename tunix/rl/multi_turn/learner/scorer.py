"""Scores a few sampled tokens under any weights of one architecture.

    score = Scorer(model, processor, images, row_length=512)
    logprobs = score(state, sequences)

What the learner computes with, at a shape of its own: `logprobs.batch_scores`
on packed rows, one program for all calls. Its matrix products have the full
precision of their type, also on accelerators whose default is less.

Does not: train, keep weights, or serve two callers at a time.
"""

from __future__ import annotations

from typing import Any, Sequence

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import peers as peers_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import batching
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import examples as example_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import minibatches as minibatch_lib
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import qwen_text
from tunix.rl.multi_turn.policy import sharding

_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Type of stored weights -> bits of exponent and mantissa."""


class Scorer:
  """See the module docstring."""

  def __init__(
      self,
      model: base.Policy,
      processor: base.Processor,
      image_store: image_lib.ImageStore,
      *,
      row_length: int,
      temperature: float = 1.0,
      stored: str = "float32",
      merged: bool = False,
  ):
    """Args:

      model: The architecture; its weights are not read.
      processor: Host side of the policy.
      image_store: Pixels of the sequences' images.
      row_length: Tokens of the longest sequence.
      temperature: Temperature that the tokens were sampled at.
      stored: Type to which weights are rounded first.
      merged: Whether an adapter is added to the weights before that, as
        `disk_weights.policy_saver` does.
    """
    mesh = getattr(model, "mesh", None)
    split = update.SplitModel(model)  # type: ignore[arg-type]
    placement = update.Placement.of(split, model, mesh)
    config = config_lib.LearnerConfig(
        rows=placement.shards,
        row_length=row_length,
        groups_per_step=1,
        tree="false",
    )
    self._model = model
    self._minibatches = minibatch_lib.Minibatches(
        model,
        processor,
        image_store,
        config,
        parts.Algorithm.of(config_lib.AlgorithmConfig()),
        placement,
        mesh,
        peers_lib.ALONE,
    )
    about = model.config
    banned = logprobs.banned_mask(
        about.vocab_size, tuple(about.banned_token_ids)
    )
    self._merged = merged

    def rounded(value: jax.Array) -> jax.Array:
      bits = _BITS.get(stored)
      if bits is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
      return lax.reduce_precision(value, *bits)

    def score(
        graphdef: Any, state: nnx.State, batch: batching.Batch
    ) -> jax.Array:
      with jax.default_matmul_precision("highest"):
        scores, _ = logprobs.batch_scores(
            nnx.merge(graphdef, jax.tree.map(rounded, state)),
            batch,
            temperature=temperature,
            banned_V=banned,
            chunk=config.logit_chunk,
        )
      return scores.logprobs

    self._score = program.Program(jax.jit(score))

  def __call__(
      self, params: Any, sequences: Sequence[trajectory.TokenSequence]
  ) -> list[np.ndarray]:
    """Returns float32[S] log-probs of each sequence's sampled tokens.

    Args:
      params: The weights, an nnx state or a module.
      sequences: Each with at least one sampled token.
    """
    state = nnx.state(params) if isinstance(params, nnx.Module) else params
    model: Any = nnx.clone(self._model)  # type: ignore[type-var]
    nnx.update(model, state)
    if self._merged and isinstance(model, qwen_text.QwenText):
      if lora.has_adapter(model):
        lora.merge(model)
    examples = example_lib.from_sequences(sequences)
    packed = self._minibatches.pack(examples, np.ones(len(examples)))
    scores = [np.zeros(s.num_sampled, np.float32) for s in sequences]
    graphdef, weights = nnx.split(model)
    for batch in packed.batches:
      values = sharding.local_rows(self._score(graphdef, weights, batch))
      mask = sharding.local_rows(batch.mask)
      number = sharding.local_rows(batch.sequences)
      for i in np.unique(number[mask]):
        scores[i][:] = values[mask & (number == i)]
    return scores
