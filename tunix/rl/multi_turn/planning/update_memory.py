"""Predicts the memory of a training step on each device, without running it.

Parameters, gradients and optimizer state are counted tensor by tensor with the
shardings that training uses (bytes a parameter: see `weight_bytes`);
activations follow from the sizes. The plan covers
the learner's two programs as compiled for TPU: `accumulate`, the forward and
backward pass of a micro-batch, and `apply`, the optimizer step. docs/tpu.md
compares it with the compiler's own figures. Activations are counted at the
moment when most of them are alive; a measured share is added for the gaps that
the compiler's heap has between them.

Does not: count the rollout engine, the reference model of a KL term, or the
memory that the runtime keeps for itself. Arrays are counted without the padding
of a TPU's tiles. Activations of linear attention are counted as those of full
attention, and those of a tower that is not trained as if it were. On CPU, where
attention is not a fused kernel, scores come on top.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Collection

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl_config

AnyMesh = sharding.AnyMesh
ROOM = 0.85
"""Share of a device's memory that a plan may fill which decides a setting."""

_GAPS = 0.28
"""Share of live memory: three programs that fitted took 1.25, 1.31 and 1.32
times as much."""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of an architecture that its activations depend on.

  Attributes:
    layers, width, heads, kv_heads, head_dim, mlp: of the decoder; `mlp` is the
      hidden units a token goes through, of all its experts together, the
      shared one included.
    full_layers: Layers that keep keys and values; the attention of the others
      is linear.
    linear_state: numbers of the recurrent state of such a layer.
    mlp_copies: times a token's row is copied for its experts, 0 without them.
    vocabulary: rows of the embedding.
    blocks, vision_width, vision_mlp: of the vision tower.
    deep: vision tokens' widths that are kept beside the first (deepstack).
    patches_per_token: patches that become one vision token.
    patch_bytes: uint8 numbers of a patch.
  """

  layers: int
  width: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  mlp_copies: int
  full_layers: int
  linear_state: int
  vocabulary: int
  blocks: int = 0
  vision_width: int = 0
  vision_mlp: int = 0
  deep: int = 0
  patches_per_token: int = 1
  patch_bytes: int = 0

  @classmethod
  def known(cls, config: object) -> bool:
    """Returns whether `of` takes this policy's config."""
    kinds = (
      qwen_text_config.QwenTextConfig,
      qwen_config.QwenVLConfig,
      tiny_vl_config.TinyVLConfig,
    )
    return isinstance(config, kinds)

  @classmethod
  def of(cls, config: Any) -> Sizes:
    """Sizes of a `QwenVLConfig`, a `QwenTextConfig` or a `TinyVLConfig`."""
    if isinstance(config, tiny_vl_config.TinyVLConfig):
      return cls(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp=config.mlp,
        mlp_copies=0,
        full_layers=config.layers,
        linear_state=0,
        vocabulary=config.vocab_size,
        blocks=config.vision_layers,
        vision_width=config.width,
        vision_mlp=config.vision_mlp,
        patch_bytes=24 * 24 * 3,
      )
    text = config.text
    tower: dict[str, int] = {}
    copies = text.num_experts_per_tok if text.num_experts else 0
    experts = text.moe_intermediate_size * copies
    if copies:
      experts += text.shared_expert_intermediate_size
    if isinstance(config, qwen_config.QwenVLConfig):
      vision = config.vision
      tower = {
        "blocks": vision.depth,
        "vision_width": vision.hidden_size,
        "vision_mlp": vision.intermediate_size,
        "deep": len(vision.deepstack_visual_indexes),
        "patches_per_token": vision.patches_per_token,
        "patch_bytes": 3 * vision.patch_size**2,
      }
    return cls(
      layers=text.num_hidden_layers,
      width=text.hidden_size,
      heads=text.num_attention_heads,
      kv_heads=text.num_key_value_heads,
      head_dim=text.head_dim,
      mlp=experts or text.intermediate_size,
      mlp_copies=copies,
      **_kinds_of_layers(text),
      vocabulary=text.vocab_size,
      **tower,
    )


def _kinds_of_layers(text: Any) -> dict[str, int]:
  count = text.num_hidden_layers
  state = (
    text.linear_num_value_heads
    * text.linear_key_head_dim
    * text.linear_value_head_dim
  )
  linear = sum(map(text.is_linear, range(count)))
  return {"full_layers": count - linear, "linear_state": state}


@dataclasses.dataclass(frozen=True)
class Work:
  """A micro-batch, as one batch shard sees it.

  Attributes:
    row_length: tokens of a row.
    rows: rows a shard.
    patches: patches of the shard's buffer.
    targets: sampled tokens of the shard.
    logit_chunk: targets whose logits exist at a time.
  """

  row_length: int
  rows: int = 1
  patches: int = 0
  targets: int = 0
  logit_chunk: int = 1024

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name in ("patches", "targets") else 1
      if value < least:
        raise ValueError(f"{field.name} must be >= {least}, got {value}")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
  """Predicted bytes of a training step on one device.

  Attributes:
    parameters: trained ones as masters, and frozen ones.
    gradients: the running sum over micro-batches.
    new_gradients: those of one micro-batch, until they are added.
    cast: copies of the parameters in a narrower dtype, which the compiler
      makes of all stacked layers before their loop.
    optimizer: AdamW's two moments.
    layer_residuals: kept by the forward pass of all decoder layers.
    layer_peak: activations and their gradients inside the decoder layer that
      is being computed again and differentiated.
    vision_residuals: kept of the tower, its output and its additions to the
      decoder's first layers.
    vision_peak: inside the tower's block that is being differentiated.
    logits: Logits of one chunk and their gradients.
    batch: tokens, positions, patches, targets.
  """

  parameters: int
  gradients: int
  new_gradients: int
  cast: int
  optimizer: int
  layer_residuals: int
  layer_peak: int
  vision_residuals: int
  vision_peak: int
  logits: int
  batch: int

  @property
  def activations(self) -> int:
    """The most that `accumulate` holds beside arguments and gradients.

    Decoder layers are differentiated before the tower, by when their residuals
    are freed.
    """
    decoder = self.layer_residuals + max(self.layer_peak, self.logits)
    return self.vision_residuals + max(decoder, self.vision_peak)

  @property
  def alive(self) -> int:
    """The most that exists at a time beside the program's arguments."""
    return self.new_gradients + self.cast + self.activations

  @property
  def heap_gaps(self) -> int:
    """Memory that the compiler takes beyond that."""
    return round(_GAPS * self.alive)

  @property
  def accumulate(self) -> int:
    """Memory of a micro-batch's program, without optimizer state."""
    arguments = self.parameters + self.gradients + self.batch
    return arguments + self.alive + self.heap_gaps

  @property
  def total(self) -> int:
    """The most that a device holds during a step."""
    return self.accumulate + self.optimizer

  def as_dict(self) -> dict[str, int]:
    return dataclasses.asdict(self) | {
      "activations": self.activations,
      "heap_gaps": self.heap_gaps,
      "accumulate": self.accumulate,
      "total": self.total,
    }


def abstract_mesh(
  data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1
) -> jax.sharding.AbstractMesh:
  """Returns a mesh of devices that need not exist.

  Raises:
    ValueError: a size below 1.
  """
  sizes = (data, fsdp, sequence, tensor)
  for name, size in zip(sharding.AXES, sizes):
    if size < 1:
      raise ValueError(f"mesh axis {name} must be >= 1, got {size}")
  return jax.sharding.AbstractMesh(
    sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sizes)
  )


def process_mesh(mesh: AnyMesh | None, processes: int) -> Any:
  """Returns the mesh of one of several processes' own devices, see
  `sharding.HostCopies`; the mesh itself where there is one process."""
  if mesh is None or processes == 1:
    return mesh
  remaining = mesh.size // processes
  sizes = {}
  for name in ("tensor", "sequence", "fsdp"):
    sizes[name] = math.gcd(mesh.shape[name], remaining)
    remaining //= sizes[name]
  return abstract_mesh(data=remaining, **sizes)


def parameter_bytes(
  model: nnx.Module,
  mesh: AnyMesh,
  kind: type[nnx.Variable] = nnx.Param,
  itemsize: int = 0,
) -> int:
  """Returns the bytes of a model's parameters on one device of `mesh`.

  Args:
    model: Model with weights, or with shapes only.
    mesh: real or abstract.
    kind: Kind of variables that count.
    itemsize: bytes a number; 0 = as the parameters are.
  """
  total = 0
  for _, variable in nnx.to_flat_state(nnx.state(model, kind)):
    place = sharding.parameter_sharding(variable, mesh)
    size = itemsize or jnp.dtype(variable.dtype).itemsize
    total += size * math.prod(place.shard_shape(tuple(variable.shape)))
  return total


@dataclasses.dataclass(frozen=True)
class WeightBytes:
  """Bytes of a learner's weights on one device.

  Attributes:
    masters: Bytes of the trained parameters, 4 each; the running gradients and
      each of the optimizer's two moments take as many.
    own: Bytes of the trained parameters in the model's own type; the gradient
      of a micro-batch takes as many until it is added.
    frozen: Bytes of the other parameters.
    cast: Bytes of copies in a narrower type that exist while a micro-batch is
      computed: masters in the model's or the compute type, frozen ones in the
      latter.
  """

  masters: int
  own: int
  frozen: int
  cast: int


def weight_bytes(
  model: nnx.Module,
  mesh: AnyMesh,
  compute_itemsize: int,
  left_out: Collection[str] = (),
) -> WeightBytes:
  """Counts a learner's weights, tensor by tensor.

  Args:
    model: Model with weights, or with shapes only.
    mesh: real or abstract.
    compute_itemsize: bytes of a number of the activations.
    left_out: names of submodules that are not trained.
  """
  adapted = bool(jax.tree.leaves(nnx.state(model, layers.LoRAParam)))
  masters = own = frozen = cast = 0
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    place = sharding.parameter_sharding(variable, mesh)
    count = math.prod(place.shard_shape(tuple(variable.shape)))
    item = jnp.dtype(variable.dtype).itemsize
    adapter = isinstance(variable, layers.LoRAParam)
    fixed = isinstance(variable, layers.FixedParam)
    if path[0] in left_out or fixed or (adapted and not adapter):
      frozen += count * item
      cast += count * compute_itemsize * (compute_itemsize < item)
      continue
    narrow = min(item, compute_itemsize)
    masters += 4 * count
    own += count * item
    cast += count * narrow * (narrow < 4)
  return WeightBytes(masters, own, frozen, cast)


def plan(
  model: Any, mesh: AnyMesh, work: Work, left_out: Collection[str] = ()
) -> MemoryPlan:
  """Plans the memory of a step of `model` on each device of `mesh`.

  Args:
    model: the policy; shapes are enough. With a LoRA adapter only its
      matrices are trained.
    mesh: real or abstract, with the axes of `sharding.AXES`.
    work: Work of one batch shard.
    left_out: names of submodules that are not trained, see `weight_bytes`.
  """
  config = model.config
  remat = base.optional(config, "remat") or "none"
  remat = "block" if remat == config_checks.AUTO else remat
  sizes = Sizes.of(config)
  wide = jnp.dtype(config.compute_dtype).itemsize
  weights = weight_bytes(model, mesh, wide, left_out)
  return MemoryPlan(
    parameters=weights.masters + weights.frozen,
    gradients=weights.masters,
    new_gradients=weights.own,
    cast=weights.cast,
    optimizer=2 * weights.masters,
    **_decoder(sizes, work, mesh, remat, wide),
    **_tower(sizes, work, mesh, remat, wide, _trains_tower(model, left_out)),
    logits=_logits(sizes, work, mesh, wide),
    batch=_batch(sizes, work),
  )


def _decoder(
  sizes: Sizes, work: Work, mesh: AnyMesh, remat: str, wide: int
) -> dict[str, int]:
  # Tokens are exchanged for heads around attention: as many bytes.
  sequence, split = mesh.shape["sequence"], mesh.shape["tensor"]
  tokens = -(-work.rows * work.row_length // sequence)
  heads = sizes.heads * sizes.head_dim // split
  kv = max(sizes.kv_heads // split, sequence) * sizes.head_dim
  mlp = sizes.mlp // split
  width = sizes.width
  # Before and after norm and rotation: q and k; v; the kernel's output.
  attention = 3 * heads + 3 * kv
  hidden = 3 * mlp + sizes.mlp_copies * width
  residuals = {
    "block": width,
    "dots": 2 * width + heads + 2 * kv + 2 * mlp,
    "none": 6 * width + attention + hidden,
  }[remat]
  # A layer that is differentiated has been computed again as a whole: while
  # the MLP's gradients are made, attention's activations wait. q and the
  # kernel's output exist in the kernel's layout, too.
  inside = 2 * hidden + attention + 2 * heads + kv + 6 * width
  return {
    "layer_residuals": sizes.layers * tokens * residuals * wide,
    "layer_peak": tokens * inside * wide,
  }


def _trains_tower(model: nnx.Module, left_out: Collection[str]) -> bool:
  """Returns whether anything of the tower has a gradient."""
  names = set(base.optional(model, "vision_modules"))
  if not names:  # Not known: a policy of its own.
    return True
  adapted = bool(jax.tree.leaves(nnx.state(model, layers.LoRAParam)))
  kind = layers.LoRAParam if adapted else nnx.Param
  trained = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, kind))}
  return bool(trained & (names - set(left_out)))


def _tower(
  sizes: Sizes, work: Work, mesh: AnyMesh, remat: str, wide: int, trained: bool
) -> dict[str, int]:
  """`trained`: whether it has gradients; else its blocks keep nothing."""
  sequence = mesh.shape["sequence"]
  patches, width = -(-work.patches // sequence), sizes.vision_width
  residuals = {
    "block": width,
    "dots": 5 * width + sizes.vision_mlp,
    "none": 9 * width + 2 * sizes.vision_mlp,
  }[remat]
  # Heads narrower than a tile of 128 take twice their bytes.
  inside = 20 * width + 4 * sizes.vision_mlp
  tokens = patches // sizes.patches_per_token * (1 + sizes.deep)
  # Additions to the decoder's first layers, and their gradients.
  additions = 2 * sizes.deep * work.rows * work.row_length // sequence
  # Vision tokens are whole on each device of a row.
  out = (tokens * sequence + (additions if patches else 0)) * sizes.width
  # Mergers are not computed again: their hidden units are kept, once in
  # float32 for GELU.
  merged = tokens * sizes.patches_per_token * width * (3 * wide + 4)
  if not trained:
    residuals = merged = 0
  return {
    "vision_residuals": (
      (sizes.blocks * patches * residuals + out) * wide + merged
    ),
    "vision_peak": patches * inside * wide,
  }


def _logits(sizes: Sizes, work: Work, mesh: AnyMesh, wide: int) -> int:
  """float32 logits of a chunk, split along the vocabulary, and gradients.

  Rows of a data shard are computed by all of its devices together; where the
  vocabulary cannot be split each computes its own, with the whole matrix.
  """
  together = mesh.shape["fsdp"]
  shards = sharding.split(mesh, sizes.vocabulary, sharding.MODEL_AXES)
  if shards == 1 and together > 1:
    chunk = min(work.logit_chunk, work.targets)
    matrix = sizes.vocabulary * sizes.width * (wide + 4)  # And its gradient.
    return 2 * 4 * chunk * sizes.vocabulary + matrix
  chunk = min(work.logit_chunk, work.targets) * together
  return 2 * 4 * chunk * -(-sizes.vocabulary // shards)


def _batch(sizes: Sizes, work: Work) -> int:
  tokens = work.rows * work.row_length
  return (
    tokens * 6 * 4
    + work.patches * (sizes.patch_bytes + 5 * 4)
    + work.targets * (10 * 4 + 1)
  )
