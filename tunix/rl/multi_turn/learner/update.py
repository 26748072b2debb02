"""Computes loss, gradients and optimizer steps on the devices.

Three programs of fixed shape: `accumulate` adds a micro-batch's gradients and
readings to running sums, `apply` makes the optimizer step, `score` gives
log-probs only. Parameters travel as a flat {name: array}: all `nnx.Param`s,
or, when the model has a LoRA adapter, those of the adapter; without those of
submodules that are frozen by name. All others travel beside them.

With a critic the value head's parameters (see `critic`) are among the trained
ones, and no part of the model.

Trained parameters are masters, float32 where the model's are narrower (see
`optimizer`); the model is computed with the masters rounded to its own types.

Promises: a program is compiled ahead of time for the shapes it meets, and then
refuses arrays that lie elsewhere instead of compiling again unnoticed:
`compiles` counts every compilation. The loss of a step is a weighted sum over
tokens with weights from the host, so micro-batches add up to the big batch
(clip_cov and kl_cov compare the tokens of a buffer, and depend on them). A
gradient that is not finite leaves parameters and optimizer state as they were,
and so does an empty step, whose tokens have no weight in any term of the loss:
no momentum, weight decay or schedule moves anything. Parameters, optimizer
state and running gradients are donated, hence updated in place.

A token has weight where a term of the loss counts it: the policy's term with an
advantage and an importance weight other than 0 (a vetoed token, and one outside
the bounds of mis, has none), any token of an objective without advantages, and
every token of a KL term, an entropy term or a value loss whose coefficient is
not 0. A clipped token has weight, whatever its gradient. A term that an
objective of another package adds counts by its gradient.

Does not: know groups, rewards or versions.

Axis names: S = buffers (batch shards), M = targets of a buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, Collection

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
from tunix.rl.multi_turn.core.statistics import turn_groups
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import critic
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import optimizer
from tunix.rl.multi_turn.learner import program
from tunix.rl.multi_turn.learner import readings as readings_lib
from tunix.rl.multi_turn.learner.algorithms import importance
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import objectives
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers

Params = dict[str, jax.Array]


class _Leaves:
  """A state as a flat {name: array} and back."""

  def __init__(self, state: nnx.State):
    paths, self._treedef = jax.tree_util.tree_flatten_with_path(state)
    self.names = [_name(path) for path, _ in paths]
    self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in paths]
    if len(set(self.names)) != len(self.names):
      raise ValueError("two parameters of the model have the same name")

  def flat(self, state: nnx.State) -> Params:
    leaves, treedef = jax.tree.flatten(state)
    if bool(treedef != self._treedef):  # type: ignore[operator]
      raise ValueError(
        "the module's parameters differ in structure from the learner's"
      )
    return dict(zip(self.names, leaves))

  def state(self, params: Params) -> nnx.State:
    return jax.tree.unflatten(
      self._treedef, [params[name] for name in self.names]
    )


class SplitModel:
  """An nnx module as a function of flat {name: array}s.

  Attributes:
    names: Names of the trained parameters.
    shapes: Shapes of their masters, in the same order.
    rounds: whether the model's parameters are narrower than their masters.
    trained: Filter of the trained variables.
  """

  def __init__(self, model: nnx.Module, left_out: Collection[str] = ()):
    """Args:

    model: the module.
    left_out: names of its submodules that are not trained.
    """
    adapter = jax.tree.leaves(nnx.state(model, layers.LoRAParam))
    kind = layers.LoRAParam if adapter else nnx.Param
    names = frozenset(left_out)
    self.trained: Any = nnx.All(
      kind, nnx.Not(layers.FixedParam), lambda path, value: path[0] not in names
    )
    parts: Any = nnx.split(model, self.trained, nnx.Param, ...)
    self._graphdef, state, frozen, self._rest = parts
    self._trained, self._frozen = _Leaves(state), _Leaves(frozen)
    self.names, own = self._trained.names, self._trained.shapes
    self._dtypes = {name: x.dtype for name, x in zip(self.names, own)}
    self.shapes = [
      jax.ShapeDtypeStruct(x.shape, optimizer.master_dtype(x.dtype))
      for x in own
    ]
    self.rounds = any(a.dtype != b.dtype for a, b in zip(own, self.shapes))

  def rounded(self, params: Params) -> Params:
    """Masters in the model's own types, without a value head's."""
    return {k: params[k].astype(x) for k, x in self._dtypes.items()}

  def params_of(self, model: nnx.Module) -> Params:
    """Returns the trained parameters of a module like this one, not copied."""
    return self._trained.flat(nnx.split(model, self.trained, ...)[1])

  def frozen_of(self, model: nnx.Module) -> Params:
    """Returns the model's frozen parameters, not copied."""
    parts: Any = nnx.split(model, self.trained, nnx.Param, ...)
    return self._frozen.flat(parts[2])

  def state(self, params: Params, frozen: Params) -> nnx.State:
    """Returns an nnx.State of all Params around these arrays."""
    return nnx.merge_state(
      self._trained.state(self.rounded(params)), self._frozen.state(frozen)
    )

  def merge(self, params: Params, frozen: Params) -> Any:
    return nnx.merge(
      self._graphdef,
      self._trained.state(self.rounded(params)),
      self._frozen.state(frozen),
      self._rest,
    )


@dataclasses.dataclass(frozen=True)
class Placement:
  """Shardings of the arrays.

  Attributes:
    params: sharding of each trained parameter.
    frozen: Sharding of each other parameter.
    batch: Sharding of arrays with a leading axis B or S.
    replicated: Sharding of everything else.
    shards: Number of batch shards.
    head: Sharding of a value head's parameters.
  """

  params: dict[str, jax.sharding.Sharding]
  frozen: dict[str, jax.sharding.Sharding]
  batch: jax.sharding.Sharding
  replicated: jax.sharding.Sharding
  shards: int

  @property
  def head(self) -> dict[str, jax.sharding.Sharding]:
    return dict.fromkeys(critic.NAMES, self.replicated)

  @classmethod
  def of(cls, split: SplitModel, model: Any, mesh: Mesh | None) -> Placement:
    """Returns places on `mesh` by the parameters' `axes`, or on one device."""
    if mesh is None:
      here: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
      )
      frozen = dict.fromkeys(split.frozen_of(model), here)
      return cls(dict.fromkeys(split.names, here), frozen, here, here, 1)
    placed = nnx.merge(
      *nnx.split(model)[:1],
      jax.tree.map(
        lambda v: v.replace(sharding.parameter_sharding(v, mesh)),
        nnx.state(model),
        is_leaf=lambda v: isinstance(v, nnx.Variable),
      ),
    )
    # Shardings lie where the arrays were.
    trained: Any = split.params_of(placed)
    rest_of_model: Any = split.frozen_of(placed)
    return cls(
      trained,
      rest_of_model,
      sharding.batch_sharding(mesh),
      sharding.replicated(mesh),
      sharding.batch_shards(mesh),
    )


def _name(path: tuple[Any, ...]) -> str:
  """ "blocks.0.q" of a tree path; the step into the variable is left out."""
  steps = tuple(k for k in path if not isinstance(k, jax.tree_util.GetAttrKey))
  return jax.tree_util.keystr(steps, simple=True, separator=".")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sums:
  """Readings of a step, added up over micro-batches.

  Attributes:
    loss: scalar, the loss.
    total: name -> sum over tokens.
    most: name -> maximum over tokens.
    tokens: scalar, number of tokens.
    weighted: scalar, number of tokens with weight; see the module docstring.
    by_turn: see `readings_lib.turn_sums`; 0 without their stream.
  """

  loss: jax.Array
  total: dict[str, jax.Array]
  most: dict[str, jax.Array]
  tokens: jax.Array
  weighted: jax.Array
  by_turn: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Extra:
  """Arrays that the loss of a batch reads beside the batch.

  Attributes:
    proximal, reference: log-probs of other weights, float32[S, M]; where one
      is not needed it holds the sampled log-probs.
    kl_coef: scalar, where the coefficient changes between updates.
    teacher: log-probs of the policy that is distilled, float32[S, M].
  """

  proximal: base.Array
  reference: base.Array
  kl_coef: base.Array | None = None
  teacher: base.Array | None = None


class UpdatePrograms:
  """The compiled programs of one model and configuration."""

  def __init__(
    self,
    split: SplitModel,
    config: config_lib.LearnerConfig,
    algorithm: parts.Algorithm,
    banned_V: np.ndarray | None,
    placement: Placement,
    temperature: float = 1.0,
    width: int = 0,
  ):
    """Args:

    split: the model.
    config: Settings of the learner.
    algorithm: makes the loss.
    banned_V: bool[V] or None, see `logprobs.score`.
    placement: Shardings of the arrays.
    temperature: Temperature of the sampler.
    width: Width of the model's hidden states; read with a critic.
    """
    self._split = split
    self._width = width
    self._config = config
    self._algorithm = algorithm
    self._banned = banned_V
    self._placement = placement
    self._temperature = temperature
    self._tx = optimizer.make_optimizer(config)
    params, one = dict(placement.params), placement.replicated
    policy_params = placement.params
    shapes = dict(zip(split.names, split.shapes))
    if algorithm.has_critic:
      self._tx = optimizer.with_head(
        self._tx, config, critic.NAMES, algorithm.config.value_learning_rate
      )
      params |= placement.head
      shapes |= critic.shapes(width)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
      """State of a parameter is found under its name and has its shape."""
      last = path[-1] if path else None
      name = last.key if isinstance(last, jax.tree_util.DictKey) else None
      if name in shapes and shapes[name].shape == leaf.shape:
        return params[name]
      return one

    self.optimizer_placement = jax.tree_util.tree_map_with_path(
      place, jax.eval_shape(self._tx.init, shapes)
    )
    self.accumulate = program.Program(
      jax.jit(
        self._accumulate, donate_argnums=(1, 2), out_shardings=(params, one)
      )
    )
    self.apply = program.Program(
      jax.jit(
        self._apply,
        donate_argnums=(0, 1),
        out_shardings=(params, self.optimizer_placement, one, one),
      )
    )
    self.score = program.Program(
      jax.jit(self._score, out_shardings=placement.batch)
    )
    self.value = program.Program(
      jax.jit(self._value, out_shardings=placement.batch)
    )
    self._start: tuple[program.Program, Sums] | None = None
    self._start_lock = threading.Lock()
    self._all_placement = params
    dtypes = {name: shape.dtype for name, shape in shapes.items()}
    self.masters = jax.jit(
      lambda params: {
        name: jnp.array(x, dtypes[name], copy=True)
        for name, x in params.items()
        if name in policy_params
      },
      out_shardings=policy_params,
    )
    self.publish = jax.jit(
      lambda params: jax.tree.map(jnp.copy, split.rounded(params)),
      out_shardings=policy_params,
    )

  @property
  def compiles(self) -> dict[str, int]:
    names = ["accumulate", "apply", "score"]
    if self._algorithm.has_critic:
      names.append("value")
    return {name: getattr(self, name).compiles for name in names}

  def init_head(self) -> Params:
    """Returns a value head of zeros at its place; {} without a critic."""
    if not self._algorithm.has_critic:
      return {}
    return {
      name: sharding.put(
        np.zeros(shape.shape, shape.dtype), self._placement.head[name]
      )
      for name, shape in critic.shapes(self._width).items()
    }

  def init_optimizer(self, params: Params) -> optax.OptState:
    """Optimizer state that lies where the parameters lie."""
    init = jax.jit(self._tx.init, out_shardings=self.optimizer_placement)
    return init(params)

  # -- programs --

  def loss(
    self, params: Params, frozen: Params, batch: batching.Batch, extra: Extra
  ) -> tuple[jax.Array, Sums]:
    """Sum of weight x token loss over a batch, and its readings."""
    scores, hidden = self._scores(params, frozen, batch)
    values = None
    if self._algorithm.has_critic:
      values = critic.values(params, hidden)
    return self.loss_of_scores(scores, batch, extra, values)

  def loss_of_scores(
    self,
    scores: logprobs.TokenScores,
    batch: batching.Batch,
    extra: Extra,
    values: jax.Array | None = None,
  ) -> tuple[jax.Array, Sums]:
    """As `loss`, from the scores of the batch's tokens and their values."""
    algorithm, config = self._algorithm, self._algorithm.config
    lp = scores.logprobs
    # In an update of a single step the proximal policy is the one being
    # trained: no second forward pass.
    proximal = jax.lax.stop_gradient(lp)
    if self._config.steps_per_update > 1:
      proximal = jnp.asarray(extra.proximal)
    # The parts of an algorithm see one buffer at a time.
    anchor, weight = jax.vmap(
      functools.partial(
        importance.corrected,
        algorithm.correction,
        options=algorithm.importance_options,
      )
    )(proximal, jnp.asarray(batch.logprobs), jnp.asarray(batch.sequences))
    options = algorithm.objective_options
    advantages = jnp.asarray(batch.advantages)
    if config.distill_coef:
      # The sampled token's part of the reverse KL, as an advantage.
      further = jax.lax.stop_gradient(jnp.asarray(extra.teacher) - anchor)
      advantages = advantages + config.distill_coef * jnp.clip(
        further, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO
      )
    token_loss, readings = jax.vmap(
      lambda tokens: algorithm.objective.apply(tokens, options)
    )(
      objectives.TokenBatch(
        logprobs=lp,
        anchor=jax.lax.stop_gradient(anchor),
        weight=jax.lax.stop_gradient(weight),
        advantages=advantages,
        sequences=jnp.asarray(batch.sequences),
      )
    )
    readings = dict(readings)
    readings["policy_loss"] = token_loss
    readings["entropy"] = scores.entropy
    readings["top_token"] = scores.top
    readings["logprob"] = lp
    most = {}
    weighted = jnp.ones_like(lp, bool)
    if algorithm.objective.uses_advantages:
      weighted = (weight != 0) & (advantages != 0)
      moved = jnp.clip(lp - batch.logprobs, -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)
      ratio = jnp.exp(moved)
      readings["ratio_mean"] = ratio
      readings["sampler_kl"] = jnp.expm1(moved) - moved
      readings["importance_weight"] = weight
      most["ratio_max"] = ratio
      most["ratio_min"] = -ratio
      most["logprob_gap_max"] = jnp.abs(moved)
    if config.kl_in_loss:
      price = jax.vmap(algorithm.kl)(lp, jnp.asarray(extra.reference))
      coef = config.kl_coef if extra.kl_coef is None else extra.kl_coef
      token_loss = token_loss + coef * price
      weighted |= jnp.asarray(coef) != 0
      readings["kl"] = price
    if config.entropy_coef:
      token_loss = token_loss - config.entropy_coef * scores.entropy
      weighted |= True
    if config.distill_coef:
      readings["teacher_kl"] = lp - jnp.asarray(extra.teacher)
    if values is not None:
      value_loss, clipped = critic.value_loss(
        values,
        jnp.asarray(batch.streams[critic.VALUES]),
        jnp.asarray(batch.streams[critic.TARGETS]),
        config.value_clip,
      )
      token_loss = token_loss + config.value_coef * value_loss
      weighted |= config.value_coef != 0
      readings["value_loss"] = value_loss
      readings["value_clip_fraction"] = clipped
    mask = batch.mask
    by_turn = jnp.zeros(readings_lib.TURN_SHAPE, jnp.float32)
    if turn_groups.STREAM in batch.streams and "sampler_kl" in readings:
      by_turn = readings_lib.turn_sums(
        jnp.asarray(batch.streams[turn_groups.STREAM]),
        jnp.asarray(mask),
        tuple(readings[name] for name in readings_lib.TURN_VALUES),
      )
    # Selected before the product: a padding token's loss may be anything.
    loss = jnp.sum(jnp.where(mask, token_loss, 0.0) * batch.weights)
    sums = Sums(
      loss=loss,
      total={
        name: jnp.sum(jnp.where(mask, jax.lax.stop_gradient(x), 0.0))
        for name, x in readings.items()
      },
      most={
        name: jnp.max(jnp.where(mask, jax.lax.stop_gradient(x), -jnp.inf))
        for name, x in most.items()
      },
      tokens=jnp.sum(mask.astype(jnp.float32)),
      weighted=jnp.sum((mask & weighted).astype(jnp.float32)),
      by_turn=by_turn,
    )
    return loss, sums

  def start(
    self, params: Params, frozen: Params, batch: batching.Batch, extra: Extra
  ) -> tuple[Params, Sums]:
    """Zero gradients, and readings of no tokens as `loss` will report them."""
    return self._starting(params, frozen, batch, extra)[0](params)

  def _starting(
    self, params: Params, frozen: Params, batch: batching.Batch, extra: Extra
  ) -> tuple[program.Program, Sums]:
    """Returns the program of `start` and the shapes of its readings."""
    with self._start_lock:
      if self._start is None:
        here = self._placement.replicated
        _, sums = jax.eval_shape(self.loss, params, frozen, batch, extra)

        def zeros(params):
          zero = jnp.zeros((), jnp.float32)
          return jax.tree.map(jnp.zeros_like, params), Sums(
            loss=zero,
            total={name: zero for name in sums.total},
            most={name: zero - jnp.inf for name in sums.most},
            tokens=zero,
            weighted=zero,
            by_turn=jnp.zeros(readings_lib.TURN_SHAPE, jnp.float32),
          )

        self._start = (
          program.Program(
            jax.jit(zeros, out_shardings=(self._all_placement, here))
          ),
          jax.tree.map(lambda x: program.shape_of(x, here), sums),
        )
      return self._start

  def prepare_step(
    self,
    params: Params,
    opt_state: optax.OptState,
    frozen: Params,
    batch: batching.Batch,
    extra: Extra,
    acting: tuple[Any, ...] = (),
  ) -> None:
    """Compiles what a step calls; the arguments are shapes (`shapes_of`)."""
    start, sums = self._starting(params, frozen, batch, extra)
    start.prepare(params)
    # Gradients lie where the parameters lie.
    self.accumulate.prepare(params, params, sums, frozen, batch, extra)
    self.apply.prepare(params, opt_state, params, sums.weighted, *acting)

  def _accumulate(
    self,
    params: Params,
    grads: Params,
    sums: Sums,
    frozen: Params,
    batch: batching.Batch,
    extra: Extra,
  ) -> tuple[Params, Sums]:
    new, here = jax.grad(self.loss, has_aux=True)(params, frozen, batch, extra)
    return jax.tree.map(jnp.add, grads, new), Sums(
      loss=sums.loss + here.loss,
      total=jax.tree.map(jnp.add, sums.total, here.total),
      most=jax.tree.map(jnp.maximum, sums.most, here.most),
      tokens=sums.tokens + here.tokens,
      weighted=sums.weighted + here.weighted,
      by_turn=sums.by_turn + here.by_turn,
    )

  def _apply(
    self,
    params: Params,
    opt_state: optax.OptState,
    grads: Params,
    weighted: base.Array,
    acting: base.Array | None = None,
  ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
    """Makes an optimizer step; with `acting` 0 the value head alone moves.

    Returns:
      (params, state, gradient norm, 1.0 if the step was made: its gradient is
      finite, and a token had weight).
    """
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm) & ((jnp.asarray(weighted) > 0) | (norm > 0))
    updates, new_state = self._tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)

    def keep(
      path: tuple[Any, ...], new: jax.Array, old: jax.Array
    ) -> jax.Array:
      keys = {k.key for k in path if isinstance(k, jax.tree_util.DictKey)}
      head = bool(keys & {optimizer.HEAD, *critic.NAMES})
      is_step = ok if acting is None or head else ok & (acting > 0)
      return jnp.where(is_step, new, old)

    keep_all = jax.tree_util.tree_map_with_path
    return (
      keep_all(keep, new_params, params),
      keep_all(keep, new_state, opt_state),
      norm,
      ok.astype(jnp.float32),
    )

  def _score(
    self, params: Params, frozen: Params, batch: batching.Batch
  ) -> jax.Array:
    return self._scores(params, frozen, batch)[0].logprobs

  def _value(
    self, params: Params, frozen: Params, batch: batching.Batch
  ) -> jax.Array:
    model = self._split.merge(params, frozen)
    hidden = logprobs.gather_hidden(model(batch.inputs), batch.index)
    return jnp.where(batch.mask, critic.values(params, hidden), 0.0)

  def _scores(
    self, params: Params, frozen: Params, batch: batching.Batch
  ) -> tuple[logprobs.TokenScores, jax.Array]:
    """Scores [S, M] and the hidden states [S, M, D] they are of."""
    return logprobs.batch_scores(
      self._split.merge(params, frozen),
      batch,
      temperature=self._temperature,
      banned_V=self._banned,
      chunk=self._config.logit_chunk,
    )
