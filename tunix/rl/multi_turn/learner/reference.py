"""Keeps the policy that the KL is measured to: a copy of what is trained.

With an adapter that is the adapter's: the base weights are shared, and a
reference costs no more than what is trained.

Promises: the copy never changes; on the host it is divided as its arrays are,
and takes device memory only while it is used.
"""

from __future__ import annotations

from typing import Any, cast, Mapping, Sequence

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import minibatches
from tunix.rl.multi_turn.learner.batches import minibatches as minibatch_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

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
    mesh = base.optional(model, "mesh")
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
    self, params: object, sequences: Sequence[trajectory.TokenSequence]
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
    if tree and not base.optional(model, "supports_tree"):
      raise ValueError(
        f"the teacher, a {type(model).__name__}, reads no trees; set"
        " learner.tree=false"
      )
    module = cast(nnx.Module, model)
    split = update.SplitModel(module)
    placement = update.Placement.of(split, model, mesh)
    put = lambda arrays, places: {
      name: sharding.put(value, places[name]) for name, value in arrays.items()
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

    def score(
      params: dict[str, jax.Array], frozen: Any, batch: batching.Batch
    ) -> jax.Array:
      scores, _ = logprobs.batch_scores(
        split.merge(params, frozen),
        batch,
        temperature=temperature,
        banned_V=banned,
        chunk=chunk,
      )
      return scores.logprobs

    self._score = program.Program(jax.jit(score, out_shardings=placement.batch))

  @classmethod
  def of(
    cls,
    algorithm: parts.Algorithm,
    model: base.Policy | None,
    student: base.Policy,
    mesh: Mesh | None,
    sampling: policy_client.SamplingConfig,
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


class Reference:
  """See the module docstring."""

  def __init__(self, params: Mapping[str, jax.Array], on_host: bool):
    """Args:

    params: copied already, at their place on the devices.
    on_host: whether they wait in the hosts' memory.
    """
    self._places = {name: x.sharding for name, x in params.items()}
    self._on_host = on_host
    self._kept = dict(params)
    if on_host:
      self._kept = {
        name: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        for name, x in params.items()
      }

  def params(self) -> dict[str, jax.Array]:
    """Returns the parameters, on the devices."""
    if not self._on_host:
      return self._kept
    return {
      name: jax.device_put(x, self._places[name])
      for name, x in self._kept.items()
    }
