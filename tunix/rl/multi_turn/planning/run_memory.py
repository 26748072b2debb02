"""Predicts a run's memory, and refuses a run that cannot fit.

A line is what a part takes at least: batches whose size the first data decides
are counted at their smallest. Activations are the learner's compiled size where
`exact` asks for it, or where the prediction is within a factor of
`COMPILE_WITHIN` of the memory there is; else predicted by
`update_memory`, within a factor of two, in milliseconds.

Does not: count the engine's temporary buffers, gyms and browsers, what a
compiler takes for a moment, or other programs' memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Sequence

from flax import nnx
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.learner import frozen
from tunix.rl.multi_turn.learner import optimizer
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.planning import compiled_update
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers

COMPILE_WITHIN = 16
_PROGRAMS = 400 << 20
"""What a CPU's compiled programs, and their products of matrices while they
run, take beside arrays: measured at 50 million parameters."""
human = memory_limits.human


@dataclasses.dataclass(frozen=True)
class Part:
  """Memory of one part of a run.

  Attributes:
    name: Label of the part.
    bytes: Least size, on one device or on the host.
    settings: Dotted keys that it grows with; () for none.
    on_host: Whether it lies in the host's memory.
    how: how the figure was found, if not by counting.
    bound: whether it is what the part may take at most, so that a run without
      room for it may still go well.
  """

  name: str
  bytes: int
  settings: tuple[str, ...] = ()
  on_host: bool = False
  how: str = ""
  bound: bool = False


@dataclasses.dataclass(frozen=True)
class Memory:
  """A run's memory against what there is.

  Attributes:
    parts: Parts of the run.
    device: bytes of one device; None where it does not report them.
    host: bytes of this machine's memory, or of its cgroup.
    shared: whether devices use the host's memory, as a CPU does.
  """

  parts: tuple[Part, ...]
  device: int | None
  host: int
  shared: bool

  def total(self, on_host: bool, least: bool = False) -> int:
    """Bytes of the parts in one kind of memory; `least` without bounds."""
    return sum(
      part.bytes
      for part in self.parts
      if (self.shared or part.on_host == on_host) and not (least and part.bound)
    )

  def table(self) -> list[tuple[str, str]]:
    """(name, figure) rows for people."""
    rows = [
      (part.name, human(part.bytes) + (f" ({part.how})" if part.how else ""))
      for part in self.parts
    ]
    for where, on_host, there in self._kinds():
      free = human(there) if there is not None else "unknown"
      rows.append(
        (f"in all, {where}", f"{human(self.total(on_host))} of {free}")
      )
    return rows

  def problems(self, config: config_lib.TrainConfig) -> list[str]:
    """Describes what cannot fit, naming the settings to change."""
    refusals = []
    for where, on_host, there in self._kinds():
      total = self.total(on_host, least=True)
      if there is None or total <= there:
        continue
      parts = [
        part for part in self.parts if self.shared or part.on_host == on_host
      ]
      # The largest that a setting decides; the rest is not the fault.
      worst = max(
        (part for part in parts if part.settings and not part.bound),
        key=lambda part: part.bytes,
      )
      values = ", ".join(
        f"{key}={loader.value_of(config, key)}" for key in worst.settings
      )
      refusals.append(
        f"{values}: the run takes {human(total)} at least, of it {worst.name}"
        f" {human(worst.bytes)}, and {where} has {human(there)};"
        f" {_fix(worst.settings)}"
      )
    return refusals

  def _kinds(self) -> list[tuple[str, bool, int | None]]:
    if self.shared:
      return [("this machine", True, self.host)]
    return [("a device", False, self.device), ("this machine", True, self.host)]


def _fix(settings: tuple[str, ...]) -> str:
  numbers = [key for key in settings if key != "policy.name"]
  fixes = [f"lower {' or '.join(numbers)}"] if numbers else []
  if "policy.name" in settings:
    fixes.append("choose a smaller policy.name")
  return ", or ".join(fixes)


def of_run(
  config: config_lib.TrainConfig,
  model: Any,
  processor: base.Processor,
  mesh: jax.sharding.Mesh | None,
  *,
  exact: bool | None,
) -> Memory:
  """The memory of a run of this policy.

  Args:
    config: Settings of the run.
    model: its policy.
    processor: the policy's host side.
    mesh: Mesh of the policy.
    exact: compiles the learner's update for the size of its activations;
      False: only where that may decide; None: never.
  """
  host, device = memory_limits.host_bytes(), memory_limits.device_bytes()
  shared = jax.default_backend() == "cpu"
  parts = _weights(config, model, mesh or update_memory.abstract_mesh())
  if shared or not config.mesh.engine:
    parts += _engine(config, model, processor, mesh)
  if config.learner.steps or config.warm_start.steps:
    parts.append(
      _activations(config, model, processor, mesh, exact=exact, there=device)
    )
  parts.append(
    Part("this process", memory_limits.process_bytes(), on_host=True)
  )
  if shared:
    parts.append(
      Part(
        "compiled programs", _PROGRAMS, on_host=True, how="at most", bound=True
      )
    )
  if processor.patches_per_token:
    cached = (config.engine.patch_cache_mib << 20) + batching.PATCH_CACHE_BYTES
    for name, size, settings in (
      ("image cache", images_lib.CAPACITY_BYTES, ()),
      ("image patches", cached, ("engine.patch_cache_mib",)),
    ):
      parts.append(
        Part(name, size, settings, on_host=True, how="at most", bound=True)
      )
  return Memory(tuple(parts), device, host, shared)


def settle_remat(
  config: config_lib.TrainConfig,
  model: Any,
  processor: base.Processor,
  mesh: jax.sharding.Mesh | None,
) -> str | None:
  """Chooses the remat of a policy whose configuration leaves it to the run.

  The first of `config_checks.REMATS` whose prediction leaves room; "block"
  where memory is not known. Processes agree on the most careful of theirs.

  Args:
    config, model, processor, mesh: as of `of_run`; the model is changed.

  Returns:
    The choice; None where the configuration has made one.
  """
  about = base.optional(model, "config")  # A policy of a user may have none.
  if base.optional(about, "remat") != config_checks.AUTO:
    return None
  # On a CPU predictions are within a factor of two.
  share = 0.5 if jax.default_backend() == "cpu" else update_memory.ROOM
  learns = config.learner.steps or config.warm_start.steps
  chosen = len(config_checks.REMATS) - 1
  for index, remat in enumerate(config_checks.REMATS[:-1] if learns else ()):
    layers.set_remat(model, remat)
    planned = of_run(config, model, processor, mesh, exact=None)
    there = planned.host if planned.shared else planned.device
    if there and planned.total(on_host=False, least=True) <= share * there:
      chosen = index
      break
  if jax.process_count() > 1:
    of_all = multihost_utils.process_allgather(np.int32(chosen))
    chosen = int(np.max(of_all))
  layers.set_remat(model, config_checks.REMATS[chosen])
  return config_checks.REMATS[chosen]


def of_weights(config: config_lib.TrainConfig, size: int) -> Memory:
  """The memory of the weights alone, before any are made.

  Args:
    config: Settings of the run.
    size: Bytes of the weights on all devices together.
  """
  changed = tuple(f"policy.config.{key}" for key in config.policy.config)
  part = Part(
    "parameters",
    size // max(1, config.mesh.devices // config.mesh.data),
    ("policy.name", *changed),
  )
  shared = jax.default_backend() == "cpu"
  return Memory(
    (part,), memory_limits.device_bytes(), memory_limits.host_bytes(), shared
  )


def _weights(
  config: config_lib.TrainConfig, model: Any, mesh: update_memory.AnyMesh
) -> list[Part]:
  adapted = bool(jax.tree.leaves(nnx.state(model, layers.LoRAParam)))
  kind = layers.LoRAParam if adapted else nnx.Param
  parameters = update_memory.parameter_bytes(model, mesh)
  left_out = _left_out(config, model)
  weights = update_memory.weight_bytes(model, mesh, 4, left_out)
  trained, masters = weights.own, weights.masters
  shapes = {
    name: jax.ShapeDtypeStruct(value.shape, optimizer.master_dtype(value.dtype))
    for name, value in _named(model, kind, left_out).items()
  }
  state = jax.eval_shape(optimizer.make_optimizer(config.learner).init, shapes)
  trained_bytes = _tree_bytes(shapes)
  grows = ("policy.name",)
  each = lambda size, count: f"{size / max(count, 1):.3g} bytes a parameter"
  count = update_memory.parameter_bytes(model, mesh, itemsize=1)
  copied = each(masters, masters // 4)
  # Sharded as the parameters are.
  moments = _tree_bytes(state) * masters // max(trained_bytes, 1)
  out = [Part("parameters", parameters, grows, how=each(parameters, count))]
  learns = bool(config.learner.steps or config.warm_start.steps)
  if learns:
    out += [
      Part(
        "parameters that are trained, a copy",
        masters,
        grows,
        how=copied + ", float32 masters" * (masters > trained),
      ),
      Part("gradients", masters, grows, how=copied),
      Part(
        "optimizer state",
        moments,
        (*grows, "learner.optimizer"),
        how=each(moments, masters // 4),
      ),
    ]
  if learns and config.algorithm.kl_coef:
    out.append(
      Part(
        "KL reference",
        trained,
        (*grows, "algorithm.kl_coef"),
        on_host=config.learner.reference_on == "host",
      )
    )
  if learns and config.algorithm.teacher:
    size = _bytes_of_files(config.algorithm.teacher)
    out.append(
      Part("teacher", size, ("algorithm.teacher",), how="by its files")
    )
  # On a CPU the engine's devices share the memory of the learner's.
  apart = config.mesh.engine and jax.default_backend() != "cpu"
  if config.has_engine and not apart:
    local = update_memory.process_mesh(mesh, jax.process_count())
    copy = device_state.weight_bytes(model, local, config.engine.weights)
    here = update_memory.parameter_bytes(model, local, itemsize=1)
    out.append(
      Part(
        "rollout copy of the parameters",
        copy,
        (*grows, "engine.weights"),
        how=each(copy, here),
      )
    )
    if config.eval.beside:
      out.append(
        Part(
          "evaluation's copy of the parameters",
          copy,
          (*grows, "eval.beside"),
          how=each(copy, here),
        )
      )
  return out


def _left_out(
  config: config_lib.TrainConfig, model: base.Policy
) -> tuple[str, ...]:
  """Returns the submodules that the learner freezes."""
  try:
    return frozen.modules(model, config.learner)
  except ValueError as error:
    raise config_lib.ConfigError([f"learner.{error}"]) from None


def _engine(
  config: config_lib.TrainConfig,
  model: Any,
  processor: base.Processor,
  mesh: jax.sharding.Mesh | None,
) -> list[Part]:
  if not config.has_engine:
    return []
  has_screen = config.sees_screenshots

  def caches_of(slots: int) -> cache_memory.CacheBytes:
    return cache_memory.of_engine(
      model,
      processor,
      dataclasses.replace(config.engine, slots=slots),
      ((config.gym.width, config.gym.height),) if has_screen else (),
      update_memory.process_mesh(mesh, jax.process_count()),
    )

  evaluation = []
  try:
    caches = caches_of(config.engine.slots)
    if config.eval.beside:
      second = caches_of(config.eval.slots or config.engine.slots)
      size = second.kv + second.vision + second.images
      evaluation = [Part("evaluation's caches", size, ("eval.slots",))]
  except ValueError as error:
    raise config_lib.ConfigError([f"engine: {error}"]) from None
  tokens: tuple[str, ...] = ("engine.slots", "engine.context_length")
  if config.engine.page_size:
    tokens += ("engine.page_size",)
  buckets = tuple(
    f"engine.{name}"
    for name in ("image_buckets", "patch_buckets")
    if getattr(config.engine, name)
  )
  return [
    Part(
      "KV cache",
      caches.kv,
      ("engine.cache_tokens",) if config.engine.cache_tokens else tokens,
      how=f"{caches.kv_tokens} tokens",
    ),
    Part(
      "vision cache",
      caches.vision,
      ("engine.vision_cache_tokens",)
      if config.engine.vision_cache_tokens
      else tokens,
    ),
    Part("images of an encode call", caches.images, buckets),
    *evaluation,
  ]


def _activations(
  config: config_lib.TrainConfig,
  model: Any,
  processor: base.Processor,
  mesh: jax.sharding.Mesh | None,
  *,
  exact: bool | None,
  there: int | None,
) -> Part:
  learner = config.learner
  shards = 1 if mesh is None else sharding.batch_shards(mesh)
  shape = compiled_update.least_shape(learner, processor, shards)
  work = update_memory.Work(
    row_length=shape.row_length,
    rows=shape.rows_per_buffer,
    patches=shape.patches,
    targets=shape.targets,
    logit_chunk=learner.logit_chunk,
  )
  predicted = None
  if update_memory.Sizes.known(model.config):
    plan = update_memory.plan(
      model,
      mesh or update_memory.abstract_mesh(),
      work,
      left_out=_left_out(config, model),
    )
    predicted = plan.alive + plan.heap_gaps + plan.batch
  settings = ("learner.rows", "learner.row_length")
  name = "activations of an update"
  remat = base.optional(model.config, "remat")
  remat = remat and f", remat={remat}"
  far, hopeless = True, False
  if predicted is not None and there is not None:
    hopeless = predicted > there * COMPILE_WITHIN
    far = hopeless or predicted < there // COMPILE_WITHIN
  compiled = None
  if exact is not None and not hopeless and (exact or not far):
    compiled = compiled_update.activations(
      model,
      processor,
      learner,
      config.algorithm,
      sampling=config.sampling,
      mesh=mesh,
      image_patches=_screenshot_patches(config, processor),
    )
  if compiled is not None:
    return Part(name, compiled, settings, how="compiled" + remat)
  how = (
    "predicted" + remat
    if predicted is not None
    else "not known for this policy"
  )
  return Part(name, predicted or 0, settings, how=how)


def _screenshot_patches(
  config: config_lib.TrainConfig, processor: base.Processor
) -> int:
  """Patches of a screenshot; 0 where the policy sees none."""
  if not processor.patches_per_token or not config.sees_screenshots:
    return 0
  screen = agent_registry.screenshot_size(
    config.agent, config.gym.width, config.gym.height
  )
  return processor.num_image_tokens(*screen) * processor.patches_per_token


def _named(
  model: nnx.Module, kind: type[nnx.Variable], left_out: Sequence[str] = ()
) -> dict[str, Any]:
  return {
    "/".join(map(str, path)): variable
    for path, variable in nnx.to_flat_state(nnx.state(model, kind))
    if path[0] not in left_out
  }


def _bytes_of_files(policy: str) -> int:
  """Of a policy's weights on the disk; 0 where there are none to be found."""
  try:
    folder = policy_files.resolve(policy)
  except (OSError, ValueError):
    return 0  # Loading it reports this.
  return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def _tree_bytes(tree: object) -> int:
  return sum(
    math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
  )
