"""Implements gated linear attention: the delta rule with a decaying state.

A head keeps a matrix S [key, value], its recurrent state. A token multiplies S
by exp(g), replaces what S answers to its key k by its value v as far as beta
says, and reads S with its query:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  out = S^T q

`delta_rule` computes chunks of tokens at a time with matrix products, in which
only the state passes from chunk to chunk (Yang et al. 2024, "Gated Delta
Networks"); `step` is one token. `GatedDeltaNet` is the layer of Qwen3.5:
projections, a short causal convolution, the rule, a gated norm.

Promises: the numbers of the token-by-token rule, up to rounding, however tokens
are cut into chunks and calls; nothing passes from a segment of a packed row to
another; tokens that are not real leave the state unchanged. State and decay are
float32.

Does not: keep states; see `engine.page_layout`. Source: the paper, and
`transformers`' `qwen3_5`, to which the numbers are held in tests.

Axis names: B = rows, T = tokens, N = value heads, H = key width, V = value
width, X = channels of the convolution, W = its tokens, M = chunks, C = tokens
of a chunk.
"""

from __future__ import annotations

import math
from typing import Callable

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

State = tuple[jax.Array, jax.Array]
"""The last inputs of the convolution [B, W - 1, X], and S [B, N, H, V]."""

CHUNK = 64
_EXACT = jax.lax.Precision.HIGHEST


def init_state(text: qwen_shapes.TextConfig, batch: int, dtype) -> State:
  """Returns the state before a sequence's first token, of one layer."""
  heads, lead = text.linear_num_value_heads, text.linear_conv_kernel_dim - 1
  wide, out = text.linear_key_head_dim, text.linear_value_head_dim
  return (
    jnp.zeros((batch, lead, _channels(text)), dtype),
    jnp.zeros((batch, heads, wide, out), jnp.float32),
  )


def _channels(text: qwen_shapes.TextConfig) -> int:
  keys = text.linear_num_key_heads * text.linear_key_head_dim
  return 2 * keys + text.linear_num_value_heads * text.linear_value_head_dim


# --- the rule ----------------------------------------------------------------


def step(
  q_BNH: jax.Array,
  k_BNH: jax.Array,
  v_BNV: jax.Array,
  g_BN: jax.Array,
  beta_BN: jax.Array,
  state_BNHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """One token: what it reads [B, N, V], and the new state; float32."""
  state = state_BNHV * jnp.exp(g_BN)[..., None, None]
  stored = (state * k_BNH[..., None]).sum(-2)
  change = (v_BNV - stored) * beta_BN[..., None]
  state = state + k_BNH[..., None] * change[..., None, :]
  return (state * q_BNH[..., None]).sum(-2), state


def delta_rule(
  q_BTNH: jax.Array,
  k_BTNH: jax.Array,
  v_BTNV: jax.Array,
  g_BTN: jax.Array,
  beta_BTN: jax.Array,
  segments_BT: jax.Array,
  state_BNHV: jax.Array,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Computes tokens one after the other, in chunks.

  Args:
    q_BTNH: queries, scaled.
    k_BTNH: keys.
    v_BTNV: values.
    g_BTN: logarithm of the decay, <= 0.
    beta_BTN: how far a value replaces the known one; 0 changes nothing.
    segments_BT: int32, a token's sequence; those of one follow each other.
    state_BNHV: before the first token, of whose segment it is.
    chunk: tokens computed at a time, a power of 2.

  Returns:
    What the tokens read [B, T, N, V], and the state after the last one.
  """
  # 1. Cut the rows into M chunks of C tokens. Padding belongs to the last
  #    segment and leaves its state unchanged.
  t = q_BTNH.shape[1]
  fill = -t % chunk
  pad = lambda x, mode="constant": jnp.pad(
    x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2), mode=mode
  )

  def chunks(x):  # [B, T, N, …] to [M, B, N, C, …]
    x = pad(x).astype(jnp.float32)
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))

  q, k, v, g, beta = map(chunks, (q_BTNH, k_BTNH, v_BTNV, g_BTN, beta_BTN))
  ids = pad(segments_BT, "edge").reshape(len(segments_BT), -1, chunk)
  ids = jnp.moveaxis(ids, 1, 0)[:, :, None]  # [M, B, 1, C]
  last = ids[..., -1:]
  before = jnp.concatenate([ids[:1, ..., :1], last[:-1]])
  # 2. The decay from a token (column) to a later one of its segment (row), from
  #    sums of their own: differences of sums from the chunk's beginning would
  #    cancel.
  later = np.tri(chunk, k=-1, dtype=bool)
  gap = jnp.cumsum(jnp.where(later, g[..., :, None], 0.0), axis=-2)
  alike = (ids[..., :, None] == ids[..., None, :]) & np.tri(chunk, dtype=bool)
  decay = jnp.where(alike, jnp.exp(gap), 0.0)
  remaining = decay[..., -1, :, None]
  # 3. The decay of the state that enters a chunk, which reaches the tokens of
  #    its own segment only.
  total = jnp.exp(jnp.cumsum(g, -1))
  reached = jnp.where(ids == before, total, 0.0)[..., None]
  state_decay = jnp.where(last == before, total[..., -1:], 0.0)[..., None]
  # 4. A token's change depends on the earlier changes of its chunk. The inverse
  #    of that triangular system gives all changes of a chunk at once, as
  #    `values` - `stored` @ state: linear in the state that enters.
  k_beta = k * beta[..., None]
  among = jnp.einsum("...ch,...dh->...cd", k_beta, k) * decay
  solve = _inverse(jnp.where(later, among, 0.0))
  values = jnp.einsum("...cd,...dv->...cv", solve, v * beta[..., None])
  stored = jnp.einsum("...cd,...dh->...ch", solve, k_beta * reached)
  scores = jnp.einsum("...ch,...dh->...cd", q, k) * decay

  # 5. Only these products wait for the chunk before.
  def one(state, parts):
    values, stored, scores, q, k, state_decay = parts
    new = values - stored @ state
    after = state * state_decay + k.swapaxes(-1, -2) @ new
    return after, q @ state + scores @ new

  state, out = jax.lax.scan(
    one,
    state_BNHV.astype(jnp.float32),
    (values, stored, scores, q * reached, k * remaining, state_decay),
  )
  out = jnp.moveaxis(out, (0, 2), (1, 3))  # [B, M, C, N, V]
  out = out.reshape(out.shape[0], -1, *out.shape[3:])
  return out[:, :t], state


def _inverse(strict: jax.Array) -> jax.Array:
  """Returns the inverse of 1 + a strictly lower triangular matrix [..., C, C].

  Blocks of the diagonal are inverted in pairs, from 1 x 1 upwards: all matrix
  products, and as exact as substitution (a series of powers is not).
  """
  size = strict.shape[-1]
  place = np.arange(size)
  inverse = jnp.broadcast_to(jnp.eye(size), strict.shape)
  block = 1
  while block < size:
    row, column = place[:, None] // block, place[None, :] // block
    below = (row % 2 == 1) & (column == row - 1)
    corner = jnp.where(below, strict, 0.0)
    change = jnp.matmul(inverse, corner, precision=_EXACT)
    inverse = inverse - jnp.matmul(change, inverse, precision=_EXACT)
    block *= 2
  return inverse


def _over_mesh(
  run: Callable[..., tuple[jax.Array, jax.Array]],
  arrays: tuple[jax.Array, ...],
  segments_BT: jax.Array,
  state_BNHV: jax.Array,
  mesh: jax.sharding.Mesh | None,
) -> tuple[jax.Array, jax.Array]:
  """run(*arrays, segments, state), each device its rows and heads."""
  if mesh is None or segments_BT.shape[0] % sharding.batch_shards(mesh):
    return run(*arrays, segments_BT, state_BNHV)
  axes: list[str] = []
  for axis in ("tensor", "sequence"):
    shards = math.prod(mesh.shape[a] for a in (*axes, axis))
    if state_BNHV.shape[1] % shards == 0:
      axes.append(axis)
  P = jax.sharding.PartitionSpec
  rows = P(sharding.BATCH_AXES)
  wide = P(sharding.BATCH_AXES, None, tuple(axes))
  states = P(sharding.BATCH_AXES, tuple(axes))
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(*(wide for _ in arrays), rows, states),
    out_specs=(wide, states),
    check_vma=False,
  )(*arrays, segments_BT, state_BNHV)


# --- the layer ---------------------------------------------------------------


class GatedNorm(nnx.Module):
  """x / rms(x) * weight * silu(gate) over the last axis."""

  def __init__(self, width: int, init: layers.Init, eps: float):
    self.weight = init.full(1.0, width)
    self.eps = eps

  def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
    wide = wide.astype(x.dtype) * self.weight[...].astype(x.dtype)
    return (wide * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class Convolution(nnx.Module):
  """A causal convolution of each channel, then silu."""

  def __init__(self, channels: int, width: int, init: layers.Init):
    self.weight = init.normal((channels, 1, width), (None,) * 3)
    self.width = width

  def __call__(
    self, x_BTX: jax.Array, before_BWX: jax.Array, segments_BT: jax.Array
  ) -> jax.Array:
    """[B, T, X]; `before`, the inputs ahead, are of the first's segment."""
    t, lead = x_BTX.shape[1], self.width - 1
    weight = self.weight[...].astype(x_BTX.dtype)
    inputs = jnp.concatenate([before_BWX.astype(x_BTX.dtype), x_BTX], axis=1)
    ids = jnp.pad(segments_BT, ((0, 0), (lead, 0)), mode="edge")
    total = jnp.zeros_like(x_BTX)
    for i in range(self.width):
      alike = (ids[:, i : i + t] == segments_BT)[..., None]
      part = jnp.where(alike, inputs[:, i : i + t], 0)
      total = total + part * weight[:, 0, i]
    return jax.nn.silu(total)


class Gates(layers.Linear):
  """A number for each head; kept exact where other matrices are rounded."""


class GatedDeltaNet(nnx.Module):
  """See the module docstring."""

  def __init__(
    self,
    text: qwen_shapes.TextConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None,
  ):
    self.text = text
    self.mesh = mesh
    width, heads = text.hidden_size, text.linear_num_value_heads
    out = heads * text.linear_value_head_dim
    channels = _channels(text)
    into = ("fsdp", "tensor")
    self.in_proj_qkv = layers.Linear(width, channels, init, into, False)
    self.in_proj_z = layers.Linear(width, out, init, into, False)
    self.in_proj_b = Gates(width, heads, init, ("fsdp", None), False)
    self.in_proj_a = Gates(width, heads, init, ("fsdp", None), False)
    self.conv1d = Convolution(channels, text.linear_conv_kernel_dim, init)
    self.dt_bias = init.full(1.0, heads)
    self.A_log = init.log_uniform(16.0, heads)
    self.norm = GatedNorm(text.linear_value_head_dim, init, text.rms_norm_eps)
    self.out_proj = layers.Linear(out, width, init, ("tensor", "fsdp"), False)

  def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """[B, T, D] of packed rows."""
    state = init_state(self.text, x_BTD.shape[0], x_BTD.dtype)
    real_BT = jnp.ones(segments_BT.shape, bool)
    return self._run(x_BTD, segments_BT, real_BT, state)[0]

  def extend(
    self,
    x_BTD: jax.Array,
    starts_B: jax.Array,
    lengths_B: jax.Array,
    state: State,
  ) -> tuple[jax.Array, State]:
    """Continues rows: returns [B, T, D] and the state after real tokens.

    Args:
      x_BTD: new tokens.
      starts_B: int32, tokens before them; 0 begins without a state.
      lengths_B: int32, how many of them are real.
      state: after the tokens before.
    """
    begun = (jnp.asarray(starts_B) > 0)[:, None, None]
    inputs, matrix = state
    inputs = jnp.where(begun, inputs, 0)
    matrix = jnp.where(begun[..., None], matrix, 0)
    real_BT = jnp.arange(x_BTD.shape[1]) < jnp.asarray(lengths_B)[:, None]
    segments_BT = jnp.ones(real_BT.shape, jnp.int32)
    out, mixed, matrix = self._run(
      x_BTD, segments_BT, real_BT, (inputs, matrix)
    )
    window = jnp.concatenate([inputs.astype(mixed.dtype), mixed], axis=1)
    last = jnp.asarray(lengths_B)[:, None] + jnp.arange(inputs.shape[1])
    latest = jnp.take_along_axis(window, last[..., None], axis=1)
    return out, (latest.astype(inputs.dtype), matrix)

  def _run(
    self,
    x_BTD: jax.Array,
    segments_BT: jax.Array,
    real_BT: jax.Array,
    state: State,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns [B, T, D], the convolution's inputs, and the new matrix."""
    text, (before, matrix) = self.text, state
    b, t, _ = x_BTD.shape
    mixed = self.in_proj_qkv(x_BTD)
    gate = self.in_proj_z(x_BTD).reshape(b, t, -1, text.linear_value_head_dim)
    beta = jax.nn.sigmoid(self.in_proj_b(x_BTD))
    step_size = jax.nn.softplus(
      self.in_proj_a(x_BTD).astype(jnp.float32)
      + self.dt_bias[...].astype(jnp.float32)
    )
    g = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step_size
    real = real_BT[..., None]
    g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0)
    channels = self.conv1d(mixed, before, segments_BT)
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    q, k, v = jnp.split(channels, [keys, 2 * keys], axis=-1)
    heads = lambda x, width: x.reshape(b, t, -1, width)
    groups = text.linear_num_value_heads // text.linear_num_key_heads
    wide = text.linear_key_head_dim
    q, k = (jnp.repeat(_unit(heads(x, wide)), groups, axis=2) for x in (q, k))
    q = q.astype(jnp.float32) * wide**-0.5
    parts = q, k, heads(v, text.linear_value_head_dim), g, beta
    if t == 1:
      one = [x[:, 0].astype(jnp.float32) for x in parts]
      out, matrix = step(*(*one, matrix))
      out = out[:, None]
    else:
      out, matrix = _over_mesh(
        delta_rule, parts, segments_BT, matrix, self.mesh
      )
    out = self.norm(out.astype(x_BTD.dtype), gate)
    return self.out_proj(out.reshape(b, t, -1)), mixed, matrix


def _unit(x: jax.Array) -> jax.Array:
  """x / |x| over the last axis."""
  return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
