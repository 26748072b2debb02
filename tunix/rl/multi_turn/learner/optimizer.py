"""Builds the optimizer: AdamW or Muon, a schedule, clipping by global norm.

Pure optax over a flat {name: array} of parameters. Muon (Jordan et al. 2024)
orthogonalises the momentum of matrices; tables that are looked up rather than
multiplied by (embeddings, positions) stay with AdamW, as its authors advise.

Parameters narrower than float32 are trained on float32 masters: the optimizer's
parameters and moments are float32 whatever the model's are, and the model reads
round(master). A bfloat16 has 8 significant bits, so that a step of 1e-6 is lost
in every weight above 5e-4; in a master it is lost above 32 only. The weights
that act differ from the masters by half a unit in the last place at most, a
relative 2^-9.
"""

from __future__ import annotations

import re
from typing import Collection

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from tunix.rl.multi_turn.learner import config as config_lib

_TABLES = re.compile(r"embed|axis|head")


def master_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the type that such a parameter is trained in: >= float32."""
  dtype = jnp.dtype(dtype)
  narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else dtype


def make_schedule(
  config: config_lib.LearnerConfig, peak: float | None = None
) -> optax.Schedule:
  """Learning rate of optimizer step 0, 1, 2, …

  A linear rise over `warmup_steps` whose first step is not 0, then constant, or
  falling by a line or a cosine to 0 at `optimizer_steps`.

  Raises:
    ValueError: the schedule falls, and warm-up leaves no step for it.
  """
  peak = config.learning_rate if peak is None else peak
  warmup = config.warmup_steps
  after = config.optimizer_steps - warmup
  if config.schedule != "constant" and after <= 0:
    raise ValueError(
      f"schedule={config.schedule!r} ends after"
      f" {config.optimizer_steps} optimizer steps, but"
      f" warmup_steps={warmup}; lower the second"
    )
  if config.schedule == "constant":
    main = optax.constant_schedule(peak)
  elif config.schedule == "linear":
    main = optax.linear_schedule(peak, 0.0, after)
  else:
    main = optax.cosine_decay_schedule(peak, after)
  if not warmup:
    return main
  rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([rise, main], [warmup])


def make_optimizer(
  config: config_lib.LearnerConfig,
) -> optax.GradientTransformation:
  """Clipping, then the optimizer with decay of matrices and the schedule."""
  steps = []
  if config.grad_clip:
    steps.append(optax.clip_by_global_norm(config.grad_clip))
  adam = optax.adamw(
    make_schedule(config),
    b1=config.b1,
    b2=config.b2,
    eps=config.adam_eps,
    weight_decay=config.weight_decay,
    mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
  )
  if config.optimizer == "muon":
    muon = optax.contrib.muon(
      make_schedule(config, config.muon_learning_rate),
      weight_decay=config.weight_decay,
    )
    steps.append(optax.multi_transform({"adam": adam, "muon": muon}, _labels))
  else:
    steps.append(adam)
  return optax.chain(*steps)


HEAD, POLICY = "value_head", "policy"
"""Labels of the two optimizers of `with_head`."""


def with_head(
  policy: optax.GradientTransformation,
  config: config_lib.LearnerConfig,
  names: Collection[str],
  learning_rate: float,
) -> optax.GradientTransformation:
  """`policy`, and Adam with clipping of its own for the value head's names.

  The norm of one is not clipped by the other's, and neither's state holds
  anything of the other.
  """
  steps = []
  if config.grad_clip:
    steps.append(optax.clip_by_global_norm(config.grad_clip))
  steps.append(
    optax.adam(learning_rate, b1=config.b1, b2=config.b2, eps=config.adam_eps)
  )
  return optax.multi_transform(
    {POLICY: policy, HEAD: optax.chain(*steps)},
    lambda params: {k: HEAD if k in names else POLICY for k in params},
  )


def _labels(params: dict[str, jax.Array]) -> dict[str, str]:
  return {
    name: "muon" if x.ndim == 2 and not _TABLES.search(name) else "adam"
    for name, x in params.items()
  }
