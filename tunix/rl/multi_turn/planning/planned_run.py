"""Describes a run on a TPU slice from shapes: its parts, memory and work.

`PlannedRun` holds the policy's shapes on the learner's mesh and the engine's,
`memory` predicts what a device holds, `work` the operations of each program.

Does not: compile, read weights, or count gyms, the hosts' memory, and the
devices of processes that only roll out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.agents import presets as agent_presets
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import config as engine_config_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.learner import frozen
from tunix.rl.multi_turn.learner.batches import minibatches
from tunix.rl.multi_turn.planning import chips
from tunix.rl.multi_turn.planning import compiled_update
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base as policy_base
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

_STAND_IN = "qwen3_vl_tiny"
"""policy.name in a configuration whose policy is a published size."""


def load(
  arguments: Sequence[str], topology: chips.Topology
) -> tuple[config_lib.TrainConfig, str, list[str]]:
  """The configuration of a run on the slice.

  A mesh that is not given is fsdp over all chips, and learner.rows one row a
  batch shard. A published size brings its family's agent, unless an agent or an
  environment is given.

  Returns:
    The configuration, the policy's name (a published size may be given), and
    the settings that were chosen.

  Raises:
    ConfigError: it is wrong, or its mesh is not made of the slice's chips.
  """
  published = {key.lower(): key for key in qwen_config.SIZES}
  arguments, name = list(arguments), ""
  for i, argument in enumerate(arguments):
    key, _, value = argument.partition("=")
    if key in ("policy", "policy.name") and value.lower() in published:
      name, arguments[i] = published[value.lower()], f"{key}={_STAND_IN}"
  keys = {argument.partition("=")[0] for argument in arguments}
  chosen: list[str] = []
  written = config_lib.load_config([*arguments, "--dry-run"])
  plain = config_lib.load_config(["--dry-run"])
  own = ("agent", "environment")
  if (
    name
    and not any(key.startswith(own) for key in keys)
    and (
      # A file may hold them, too.
      (written.agent.name, written.agent.parser, written.environment.name)
      == (plain.agent.name, plain.agent.parser, plain.environment.name)
    )
  ):
    agent = agent_presets.FAMILIES.get(qwen_config.SIZES[name].family)
    chosen += [f"agent.name={agent}"] if agent else []
  if written.mesh.devices == 1 < topology.devices and not any(
    key.startswith("mesh.") for key in keys
  ):
    chosen.append(f"mesh.fsdp={topology.devices}")
  if f"mesh.fsdp={topology.devices}" in chosen and "learner.rows" not in keys:
    chosen.append(f"learner.rows={topology.devices}")
  config = config_lib.load_config([*arguments, *chosen, "--dry-run"])
  if config.mesh.devices + config.mesh.engine != topology.devices:
    raise config_lib.ConfigError(
      [
        "mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor ="
        f" {config.mesh.devices}, mesh.engine = {config.mesh.engine}, but"
        f" {topology.name} has {topology.devices} chips; set them to come to"
        " that"
      ]
    )
  return config, name or config.policy.name, chosen


def has_engine(config: config_lib.TrainConfig) -> bool:
  """Whether the devices of the learner hold an engine, too."""
  return config.has_engine and not config.mesh.engine


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """A run on a slice.

  Attributes:
    config: Settings of the run.
    name: Name of the policy.
    topology: the slice.
    model: shapes on the learner's mesh.
    engine_model: shapes on that of the engine of one host.
    processor: the policy's host side.
    mesh: Mesh of the learner, real or abstract.
    engine_mesh: Mesh of the engine, real or abstract.
  """

  config: config_lib.TrainConfig
  name: str
  topology: chips.Topology
  model: Any
  engine_model: Any
  processor: Any
  mesh: Any
  engine_mesh: Any

  @classmethod
  def of(
    cls,
    config: config_lib.TrainConfig,
    name: str,
    topology: chips.Topology,
    devices: Sequence[Any] | None = None,
    host_devices: Sequence[Any] | None = None,
  ) -> PlannedRun:
    """The shapes of a run.

    Args:
      config, name: as of `load`.
      topology: the slice.
      devices, host_devices: descriptions of its chips, and of a host's, for
        programs that will be compiled; None to predict.

    Raises:
      ValueError: a policy that is not there, or an adapter that cannot be.
    """
    sizes = config.mesh
    axes = {axis: getattr(sizes, axis) for axis in sharding.AXES}
    abstract = update_memory.abstract_mesh(**axes)
    local = update_memory.process_mesh(abstract, topology.hosts)
    mesh: Any = abstract
    engine_mesh: Any = local
    if devices is not None:
      mesh = sharding.make_mesh(devices=devices, **axes)
      here = devices if topology.hosts == 1 else host_devices
      engine_mesh = sharding.make_mesh(devices=here, **dict(local.shape))
    base = _find_policy(name)
    about = dict(config.policy.config)
    if name in qwen_config.SIZES:
      about = {"remat": "block"} | about
    else:
      about = {"compute_dtype": config.policy.dtype} | about
    changes = {
      key: value
      for key, value in about.items()
      if key in {f.name for f in dataclasses.fields(base.model.config)}
    }
    policy: Any = dataclasses.replace(base.model.config, **changes)
    if policy_base.optional(policy, "remat") == config_checks.AUTO:
      remat = _settled(config, name, topology)
      policy = dataclasses.replace(policy, remat=remat)
    # What is compiled needs real meshes, and what is predicted none.
    on = lambda where: _shapes(
      type(base.model),
      policy,
      config.policy.lora_rank,
      config.policy.lora_experts,
      None if devices is None else where,
    )
    return cls(
      config,
      base.name,
      topology,
      on(mesh),
      on(engine_mesh),
      base.processor,
      mesh,
      engine_mesh,
    )

  @property
  def screens(self) -> tuple[tuple[int, int], ...]:
    """Size of the gym's screenshots; () without any."""
    if not self.config.sees_screenshots:
      return ()
    gym = self.config.gym
    return (
      agent_registry.screenshot_size(self.config.agent, gym.width, gym.height),
    )

  @property
  def image_patches(self) -> int:
    """Patches of a screenshot."""
    per_token = self.processor.patches_per_token
    if not per_token or not self.screens:
      return 0
    return self.processor.num_image_tokens(*self.screens[0]) * per_token

  @functools.cached_property
  def engine_config(self) -> engine_config_lib.EngineConfig:
    """The engine's settings, with its pages' size where it follows."""
    config = dataclasses.replace(
      self.config.engine, lockstep="true" if self.config.lockstep else "false"
    )
    shapes = device_state.cache_shapes(self.engine_model)
    return page_layout.sized(shapes, config)

  @property
  def left_out(self) -> tuple[str, ...]:
    """Submodules that are not trained.

    Raises:
      ValueError: learner.freeze_vision of a policy that has no tower.
    """
    try:
      return frozen.modules(self.model, self.config.learner)
    except ValueError as error:
      raise ValueError(f"learner.{error}") from None

  @property
  def buckets(self) -> buckets_lib.Buckets:
    """Shapes of the engine's calls."""
    return buckets_lib.choose(
      self.processor,
      self.engine_config,
      self.screens,
      cached_attention.row_shards(self.engine_mesh),
      "tpu",
    )

  @property
  def shape(self) -> Any:
    """Of a micro-batch."""
    with compiling.compile_for("tpu"):
      aligned = minibatches.aligns_images(self.model)
    return compiled_update.least_shape(
      self.config.learner,
      self.processor,
      sharding.batch_shards(self.mesh),
      self.image_patches,
      aligned,
    )


def _settled(
  config: config_lib.TrainConfig, name: str, topology: chips.Topology
) -> str:
  """The remat that a run chooses there, see `run_memory.settle_remat`."""
  room = update_memory.ROOM * topology.chip.memory
  *faster, careful = config_checks.REMATS
  for remat in faster:
    about = dict(config.policy.config) | {"remat": remat}
    tried = dataclasses.replace(
      config, policy=dataclasses.replace(config.policy, config=about)
    )
    if total(memory(PlannedRun.of(tried, name, topology))) <= room:
      return remat
  return careful


_find_policy = functools.cache(policy_facts.find)


@functools.cache
def _shapes(
  kind: Any, policy: Any, lora_rank: int, experts: bool, mesh: jax.sharding.Mesh
) -> Any:
  def make() -> Any:
    if issubclass(kind, qwen_text.QwenText):
      model = kind(policy, random_keys.Keys(), mesh)
      if lora_rank:
        lora.add(model, rank=lora_rank, experts=experts)
      return model
    if lora_rank:
      raise ValueError(
        f"policy.lora_rank={lora_rank}: {kind.__name__} takes no adapter; set 0"
      )
    return kind(policy, random_keys.Keys())

  return nnx.eval_shape(make)


def memory(run: PlannedRun) -> dict[str, int]:
  """Part -> predicted bytes of the fullest device.

  "update, temporary" and "rollout, temporary" take turns: the larger counts.

  Raises:
    ValueError: a policy whose sizes are not known, a teacher that is not there,
      or no tower to freeze.
  """
  config, shape = run.config, run.shape
  work = update_memory.Work(
    row_length=shape.row_length,
    rows=shape.rows_per_buffer,
    patches=shape.patches,
    targets=shape.targets,
    logit_chunk=config.learner.logit_chunk,
  )
  planned = update_memory.plan(run.model, run.mesh, work, left_out=run.left_out)
  parts = {
    "parameters": planned.parameters,
    "gradients": planned.gradients,
    "optimizer": _optimizer_bytes(run, planned),
  }
  if config.algorithm.kl_coef and config.learner.reference_on == "device":
    # Of what is trained, in the model's own type.
    parts["KL reference"] = planned.new_gradients
  if config.algorithm.teacher:
    parts["teacher"] = _teacher_bytes(run)
  if has_engine(config):
    caches = _caches(run, run.engine_config)
    weights = device_state.weight_bytes(
      run.engine_model, run.engine_mesh, config.engine.weights
    )
    parts |= {
      "rollout weights": weights,
      "KV cache": caches.kv,
      "vision cache": caches.vision,
    }
    if config.eval.beside:
      slots = config.eval.slots or config.engine.slots
      second = dataclasses.replace(run.engine_config, slots=slots)
      caches = _caches(run, second)
      parts |= {
        "evaluation's weights": weights,
        "evaluation's caches": caches.kv + caches.vision,
      }
  parts["batch"] = planned.batch
  parts["update, temporary"] = planned.alive + planned.heap_gaps
  return parts


def _caches(
  run: PlannedRun, config: engine_config_lib.EngineConfig
) -> cache_memory.CacheBytes:
  with compiling.compile_for("tpu"):
    return cache_memory.of_engine(
      run.engine_model,
      run.processor,
      config,
      run.screens,
      run.engine_mesh,
      "tpu",
    )


def _teacher_bytes(run: PlannedRun) -> int:
  name = run.config.algorithm.teacher
  try:
    model = _find_policy(name).model
  except (OSError, ValueError) as error:
    raise ValueError(f"algorithm.teacher={name}: {error}") from None
  return update_memory.parameter_bytes(model, run.mesh)


def _optimizer_bytes(run: PlannedRun, planned: update_memory.MemoryPlan) -> int:
  # Two moments of AdamW, one of Muon and of momentum.
  one = planned.gradients
  return 2 * one if run.config.learner.optimizer == "adamw" else one


def total(parts: dict[str, int]) -> int:
  """The most that a device holds at a time."""
  turns = [size for name, size in parts.items() if "temporary" in name]
  lasting = sum(size for name, size in parts.items() if "temporary" not in name)
  return lasting + max(turns, default=0)


# --- work --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
  """A program's work on a device, at least.

  Attributes:
    tokens: Tokens that all devices of the program process.
    devices: Devices of the program.
    flops: multiplications and additions of matrix products.
    hbm: bytes read and written: weights, caches, kept activations.
    ici: bytes received, predicted: weights gathered, gradients scattered.
  """

  tokens: int
  devices: int
  flops: float
  hbm: float
  ici: float

  def seconds(
    self, chip: chips.Chip, ici: float | None = None
  ) -> dict[str, float]:
    """Resource -> seconds at its peak; the largest bounds the program."""
    return {
      "compute": self.flops / chip.flops,
      "memory": self.hbm / chip.hbm,
      "network": (self.ici if ici is None else ici) / chip.ici,
    }


def forward_flops(
  model: Any,
  tokens: int,
  attended: float,
  logits: int,
  patches: int,
  image_patches: int,
) -> float:
  """Matrix products of a forward pass, two operations a multiplication.

  Of linear attention, a token's products with the state are counted, which is
  the least there can be: computed in chunks, they are more.

  Args:
    model: the policy, of arrays or of shapes.
    tokens: Tokens that go through the decoder.
    attended: keys that each of them attends to, on average, in layers of full
      attention.
    logits: tokens whose logits are computed.
    patches: Patches that go through the vision tower.
    image_patches: Patches that each of them attends to.
  """
  sizes = update_memory.Sizes.of(model.config)
  parts = policy_facts.parameters_by_part(model)
  tables = parts["embedding"] + parts["head"]
  decoder = parts["active"] - tables
  flops = 2.0 * decoder * tokens
  heads = sizes.heads * sizes.head_dim
  flops += 4.0 * sizes.full_layers * heads * attended * tokens
  # The state answers to the key, is changed, and is read.
  linear = sizes.layers - sizes.full_layers
  flops += 6.0 * linear * sizes.linear_state * tokens
  flops += 2.0 * sizes.vocabulary * sizes.width * logits
  if patches:
    flops += 2.0 * parts["vision tower"] * patches
    flops += 2.0 * parts["mergers"] * patches / sizes.patches_per_token
    flops += 4.0 * sizes.blocks * sizes.vision_width * image_patches * patches
  return flops


def works(run: PlannedRun) -> dict[str, Work]:
  """Program -> its work, of one call with full rows."""
  parts = memory(run)
  work_of = {"accumulate": _accumulate(run, parts)}
  return work_of | (_rollout(run, parts) if has_engine(run.config) else {})


def _gathered(
  model: nnx.Module, mesh: update_memory.AnyMesh, item: int
) -> tuple[int, int]:
  """(bytes of the weights that a device computes with, of its own shard)."""
  own = update_memory.parameter_bytes(model, mesh, itemsize=item)
  split = math.prod(mesh.shape[axis] for axis in ("fsdp", "sequence"))
  return own * split, own


def _accumulate(run: PlannedRun, planned: dict[str, int]) -> Work:
  shape, mesh, about = run.shape, run.mesh, run.model.config
  tokens, patches = shape.rows * shape.row_length, shape.buffers * shape.patches
  decoder = forward_flops(
    run.model, tokens, shape.row_length / 2, shape.buffers * shape.targets, 0, 0
  )
  tower = forward_flops(run.model, 0, 0, 0, patches, run.image_patches)
  remat = policy_base.optional(about, "remat") == "block"
  adapted = bool(jax.tree.leaves(nnx.state(run.model, layers.LoRAParam)))
  passes = 1 + 1 + (not adapted) + remat
  item = jnp.dtype(about.compute_dtype).itemsize
  gathered, own = _gathered(run.model, mesh, item)
  reads = 2 + remat
  # Beside an adapter, which is the decoder's, the tower is frozen, too.
  still = (
    policy_base.optional(run.model, "vision_modules")
    if adapted
    else run.left_out
  )
  tower_passes = 1 if still else passes
  once = [_gathered(getattr(run.model, name), mesh, item) for name in still]
  read = reads * gathered - (reads - 1) * sum(part[0] for part in once)
  own_bytes = reads * own - (reads - 1) * sum(part[1] for part in once)
  # Weights at each pass; residuals written and read; gradients added.
  hbm = read + 2 * planned["update, temporary"] + 2 * planned["gradients"]
  # Gradients are float32 sums, and travel in the compute type.
  split = math.prod(mesh.shape[axis] for axis in ("fsdp", "sequence"))
  ici = read - own_bytes + planned["gradients"] // 4 * item * (split - 1)
  if mesh.shape["data"] > 1:
    ici += 2 * planned["gradients"]
  flops = passes * decoder + tower_passes * tower
  return Work(tokens, mesh.size, flops / mesh.size, hbm, ici)


def row_bytes(model: policy_base.Policy) -> tuple[int, int]:
  """(recurrent states of a row, keys and values of a token) of a cache."""
  shape_of = device_state.cache_shapes(model)
  one, two = (jax.tree.leaves(shape_of(1, n)) for n in (1, 2))
  size = lambda leaf: math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
  states = sum(size(a) for a, b in zip(one, two) if a.shape == b.shape)
  return states, sum(map(size, two)) - sum(map(size, one))


def _rollout(run: PlannedRun, parts: dict[str, int]) -> dict[str, Work]:
  model, mesh, chosen = run.engine_model, run.engine_mesh, run.buckets
  devices = mesh.size
  item = jnp.dtype(model.config.compute_dtype).itemsize
  gathered, own = _gathered(model, mesh, item)
  if run.config.engine.weights == "int8":
    gathered, own = gathered // item, own // item
  window = chosen.windows[-1]
  states, kv = row_bytes(model)
  # Of a row: keys and values are read, states are read and written.
  row = window * kv + 2 * states
  work_of = {}
  rows = chosen.decode_rows[-1]
  work_of["decode step"] = Work(
    rows,
    devices,
    forward_flops(model, rows, window, rows, 0, 0) / devices,
    parts["rollout weights"] + gathered - own + rows * row / devices,
    gathered - own,
  )
  rows, tokens = chosen.prefill_rows[-1], chosen.tokens[-1]
  count = rows * tokens
  work_of["prefill"] = Work(
    count,
    devices,
    forward_flops(model, count, window / 2, 0, 0, 0) / devices,
    parts["rollout weights"] + gathered - own + rows * row / devices,
    gathered - own,
  )
  return work_of
