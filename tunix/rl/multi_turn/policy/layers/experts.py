"""Implements mixtures of experts, in the place of a decoder layer's MLP.

Promises: no token is dropped; with a mesh each device computes its own rows'
pairs of token and expert with its own experts.

Axis names: see `base`; and E = experts, I = hidden units, X = (token, expert)
pairs, r = rank of an adapter.
"""

from __future__ import annotations

from typing import Mapping

from flax import nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

PARTS = ("gate_proj", "up_proj", "down_proj")
"""An expert's matrices, as an adapter names them."""

LowRank = Mapping[str, tuple[jax.Array, jax.Array]]
"""Part -> A [E, in, r] and B [E, r, out], scaled."""


class ExpertAdapter(nnx.Module):
  """Room for a low-rank adapter of one of `PARTS`, of all experts.

  A is [E, in, r] and B [E, r, out]; None without an adapter.
  """

  def __init__(self):
    self.lora_a = nnx.data(None)
    self.lora_b = nnx.data(None)
    self.lora_scale = 0.0


class Router(nnx.Module):
  """Chooses experts and their weights, which add up to 1."""

  def __init__(self, text: qwen_shapes.TextConfig, init: layers.Init):
    self.weight = init.normal(
      (text.hidden_size, text.num_experts), ("fsdp", None), transposed=True
    )
    self.top_k = text.num_experts_per_tok

  def __call__(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = kernels.dot(x_TD, self.weight[...])
    chances = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(chances, self.top_k)
    weights /= weights.sum(-1, keepdims=True)
    return weights.astype(x_TD.dtype), experts


class SigmoidRouter(nnx.Module):
  """Chooses experts by sigmoids, of the best groups of experts.

  A correction, which is not trained, is added where experts are chosen and not
  to their weights. A group is judged by its two best experts. Weights add up
  to the scaling factor. In float32 throughout, as in the reference.
  """

  def __init__(self, text: qwen_shapes.TextConfig, init: layers.Init):
    self.weight = init.normal(
      (text.hidden_size, text.num_experts), ("fsdp", None), transposed=True
    )
    self.e_score_correction_bias = init.fixed(text.num_experts)
    self.top_k = text.num_experts_per_tok
    self.groups, self.top_groups = text.expert_groups, text.chosen_groups
    self.scale = text.routed_scaling_factor

  def __call__(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores_TE = jax.nn.sigmoid(
      jnp.matmul(
        x_TD.astype(jnp.float32),
        self.weight[...].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
      )
    )
    choice_TE = scores_TE + self.e_score_correction_bias[...]
    if self.groups > 1:
      grouped = choice_TE.reshape(len(x_TD), self.groups, -1)
      of_groups = jax.lax.top_k(grouped, 2)[0].sum(-1)
      _, best = jax.lax.top_k(of_groups, self.top_groups)
      in_best = jax.nn.one_hot(best, self.groups).sum(-2) > 0
      choice_TE = jnp.where(in_best[..., None], grouped, -jnp.inf).reshape(
        choice_TE.shape
      )
    _, experts = jax.lax.top_k(choice_TE, self.top_k)
    weights = jnp.take_along_axis(scores_TE, experts, axis=-1)
    weights /= weights.sum(-1, keepdims=True) + 1e-20
    return weights * self.scale, experts


class Experts(nnx.Module):
  """All experts of a layer; each [in, out], as in the checkpoint."""

  def __init__(self, text: qwen_shapes.TextConfig, init: layers.Init):
    count, width = text.num_experts, text.hidden_size
    hidden = text.moe_intermediate_size
    # Gate and up lie side by side on the last axis: split over "tensor" they
    # would come apart, so the axis of experts is split instead.
    self.gate_up_proj = init.normal(
      (count, width, 2 * hidden), ("tensor", "fsdp", None)
    )
    self.down_proj = init.normal(
      (count, hidden, width), ("tensor", None, "fsdp")
    )
    self.gate_up_proj_scale = nnx.data(None)
    self.down_proj_scale = nnx.data(None)
    for part in PARTS:
      setattr(self, part + "_lora", ExpertAdapter())

  def adapters(self, dtype: DTypeLike) -> LowRank:
    """Of the parts that have one."""
    pairs = {}
    for part in PARTS:
      adapter = getattr(self, part + "_lora")
      if adapter.lora_a is not None:
        b = adapter.lora_b[...] * adapter.lora_scale
        pairs[part] = adapter.lora_a[...].astype(dtype), b.astype(dtype)
    return pairs

  def matrices(self, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """Gate and up [E, D, 2 I], down [E, I, D]; of an int8 copy restored."""
    return tuple(
      weight[...].astype(dtype)
      if scale is None
      else (weight[...] * scale[...]).astype(dtype)
      for weight, scale in (
        (self.gate_up_proj, self.gate_up_proj_scale),
        (self.down_proj, self.down_proj_scale),
      )
    )


class Gate(nnx.Module):
  """sigmoid(x @ weight), a number for each token [B, T, 1]."""

  def __init__(self, width: int, init: layers.Init):
    self.weight = init.normal((width, 1), ("fsdp", None), transposed=True)

  def __call__(self, x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(kernels.dot(x, self.weight[...]))


class SparseMLP(nnx.Module):
  """Each token goes through its top-k experts, and a shared one if any.

  Pairs of token and expert are sorted by expert, so that the experts' products
  are one grouped matrix product each, and no token is ever dropped. With a
  mesh, every device computes its own rows' pairs with its own experts, and the
  results are summed over `tensor`.
  """

  def __init__(
    self,
    text: qwen_shapes.TextConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None,
    sigmoid_router: bool = False,
  ):
    """Args:

    text: sizes.
    init: Maker of fresh weights.
    mesh: Mesh that the weights lie on, if any.
    sigmoid_router: see `qwen_families.Family`.
    """
    self.gate = (SigmoidRouter if sigmoid_router else Router)(text, init)
    self.experts = Experts(text, init)
    self.mesh = mesh
    shared = text.shared_expert_intermediate_size
    make = lambda: layers.GatedMLP(text.hidden_size, shared, init)
    gated = shared and not sigmoid_router
    self.shared_expert = make() if gated else None
    self.shared_expert_gate = Gate(text.hidden_size, init) if gated else None
    # As the checkpoint names it.
    self.shared_experts = make() if shared and not gated else None

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    chosen = self._chosen(x_BTD)
    if self.shared_experts is not None:
      return chosen + self.shared_experts(x_BTD)
    if self.shared_expert is None or self.shared_expert_gate is None:
      return chosen
    share = self.shared_expert_gate(x_BTD)
    return chosen + share * self.shared_expert(x_BTD)

  def _chosen(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the weighted sum of each token's chosen experts: [B, T, D]."""
    b, t, d = x_BTD.shape
    weights, experts = self.gate(x_BTD.reshape(-1, d))
    k = weights.shape[-1]
    up, down = self.experts.matrices(x_BTD.dtype)
    low = self.experts.adapters(x_BTD.dtype)
    args = (
      x_BTD,
      weights.reshape(b, t, k),
      experts.reshape(b, t, k),
      up,
      down,
      low,
    )
    mesh, count = self.mesh, up.shape[0]
    if mesh is None or not (
      b % sharding.batch_shards(mesh) == 0
      and t % mesh.shape["sequence"] == 0
      and count % mesh.shape["tensor"] == 0
    ):
      return _through_experts(*args, first=0)
    P = jax.sharding.PartitionSpec
    share = count // mesh.shape["tensor"]

    def local(*args):
      first = jax.lax.axis_index("tensor") * share
      return jax.lax.psum(_through_experts(*(*args, first)), "tensor")

    batch, split = P(*sharding.TOKENS), P("tensor")
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(batch, batch, batch, split, split, split),
      out_specs=batch,
      check_vma=False,
    )(*args)


def _through_experts(
  x_BTD: jax.Array,
  weights_BTK: jax.Array,
  experts_BTK: jax.Array,
  up_EDI: jax.Array,
  down_EID: jax.Array,
  low: LowRank,
  first: int | jax.Array,
) -> jax.Array:
  """Sums a token's chosen experts from this call's: first, first + 1, …."""
  b, t, d = x_BTD.shape
  k = weights_BTK.shape[-1]
  count = up_EDI.shape[0]
  # 1. Sort the pairs of token and chosen expert by expert: a ragged product
  #    takes the rows of each expert together. Pairs of experts of other devices
  #    come last, behind all groups.
  chosen = experts_BTK.reshape(-1) - first
  is_local = (chosen >= 0) & (chosen < count)
  chosen = jnp.where(is_local, chosen, count)
  order = jnp.argsort(chosen, stable=True)
  sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
  x_XD = x_BTD.reshape(-1, d)[order // k]

  def added(y: jax.Array, x: jax.Array, part: str) -> jax.Array:
    if part not in low:
      return y
    a, b = low[part]
    return y + jax.lax.ragged_dot(jax.lax.ragged_dot(x, a, sizes), b, sizes)

  # 2. The experts' MLPs, one product a matrix.
  both = jax.lax.ragged_dot(x_XD, up_EDI, sizes)
  gate, up = jnp.split(both, 2, axis=-1)
  gate, up = added(gate, x_XD, "gate_proj"), added(up, x_XD, "up_proj")
  hidden_XI = jax.nn.silu(gate) * up
  y_XD = jax.lax.ragged_dot(hidden_XI, down_EID, sizes)
  y_XD = added(y_XD, hidden_XI, "down_proj")
  # 3. Add the weighted rows to their tokens. Rows behind the last group are not
  #    computed, so they may hold anything.
  weight = jnp.where(is_local, weights_BTK.reshape(-1), 0)[order]
  y_XD = jnp.where(weight[:, None] != 0, y_XD * weight[:, None], 0)
  summed = (
    jnp.zeros((b * t, d), jnp.float32)
    .at[order // k]
    .add(y_XD.astype(jnp.float32))
  )
  return summed.astype(x_BTD.dtype).reshape(b, t, d)
