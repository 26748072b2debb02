"""Computes attention and matrix products by each backend's best kernel.

On TPU attention, of rows and of images, is the splash kernel that ships with
JAX; on GPU it is cuDNN's flash attention, which from Hopper on knows where
sequences of a row begin, and otherwise runs in chunks of queries whose masks
are affordable; everywhere else (and where a kernel does not apply) attention is
plain XLA in chunks of queries, whose scores are computed again in the backward
pass; on CPU block by block (see `blocks`). On CPU, products of bfloat16
operands are summed into float32 outputs, which is several times faster there
than bfloat16 outputs.

On a mesh, attention runs on all tokens of a device's rows with a part of the
heads: parts of the tokens (axis `sequence`) are exchanged for parts of the
heads and back (Jacobs et al. 2023, DeepSpeed-Ulysses), so that a causal mask
loads devices alike and no kernel need know of other devices' tokens.

Promises: the same numbers on every backend, up to rounding. Every function is
differentiable.

Axis names: B = rows, T = tokens, C = keys, N = query heads, K = KV heads,
H = head width, S = buffers, P = patches; X = B * K.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import blocks as blocks_lib

_NEG = -1e30

MAX_SCORES = 1 << 26
"""Attention scores of images that exist at a time; more go block by block."""

SPLASH_BLOCK = 128
"""The splash kernel takes multiples of so many places only."""

MAX_MASK = 1 << 27
"""Places of a mask for cuDNN that exist at a time, three bytes each."""

MOST_SPLIT = 64
"""Rows up to which `dot_rounded` splits them."""

PACKED_FROM = 1024
"""Places of a row from which cuDNN gets segments instead of a mask."""

ROW_SEGMENTS, IMAGE_SEGMENTS = 16, 4
"""Segments of a row or block that cuDNN gets; where there are more, a mask.

Each costs empty blocks of the kernel: H200, 36 screenshots of 3,520 patches.
"""


@dataclasses.dataclass(frozen=True)
class Reach:
  """Bound of the distance between patches of one image in a buffer.

  Attributes:
    places: The most places from an image's first patch to its end.
    aligned: no image crosses a multiple of `places`.
  """

  places: int
  aligned: bool = False


@dataclasses.dataclass(frozen=True)
class Sight:
  """Interval of its sequence that each token sees.

  Attributes:
    last_BT: int32, the place of the last one, its own at least.
    window: tokens up to its own that it sees, itself among them; 0 = all.
    lookahead: Bound of `last_BT`: less than this many places after the token.
    depth_BT: int32, in a tree the number of a token in its sequence, by which
      the window counts. None = its place.
  """

  last_BT: jax.Array
  window: int = 0
  lookahead: int = 1
  depth_BT: jax.Array | None = None


def windows_help(head_dim: int) -> bool:
  """Returns whether `image_attention` costs less where images are `aligned`.

  Not on the splash kernel, which skips blocks out of reach by itself. It needs
  a whole number of `SPLASH_BLOCK` places instead.

  Args:
    head_dim: Width of the vision tower's heads.
  """
  return not _splash_takes_images(head_dim)


# --- matrix products -------------------------------------------------------


def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns [..., I] @ [I, O] in the dtype of x, summed in float32.

  Flat: XLA:CPU's gradients of products with two leading axes take twice as
  long.
  """
  kernel = kernel.astype(x.dtype)
  flat = x.reshape(-1, x.shape[-1])
  if x.dtype == jnp.bfloat16 and compiling.backend() == "cpu":
    out = _wide_dot(flat, kernel)
  else:
    out = flat @ kernel
  return out.reshape(*x.shape[:-1], kernel.shape[-1])


def dot_rounded(x: jax.Array, levels: jax.Array) -> jax.Array:
  """Returns [..., I] @ int8[I, O] in the dtype of x.

  On a CPU, where few rows would wait for all weights to become floats, a row of
  x is the sum of three of int8, each of what the former leave: to 1e-7 of its
  largest number. The products are whole numbers, exact in int32.
  """
  flat = x.reshape(-1, x.shape[-1])
  if compiling.backend() != "cpu" or len(flat) > MOST_SPLIT:
    return dot(x, levels)
  flat = flat.astype(jnp.float32)
  unit = jnp.max(jnp.abs(flat), axis=-1, keepdims=True) / 127
  remainder = flat / jnp.where(unit > 0, unit, 1.0)
  parts = []
  for _ in range(3):
    parts.append(jnp.round(remainder))
    remainder = (remainder - parts[-1]) * 254
  split = jnp.concatenate(parts).astype(jnp.int8)
  out = jnp.dot(split, levels, preferred_element_type=jnp.int32)
  high, middle, low = jnp.split(out.astype(jnp.float32), 3)
  out = ((high + (middle + low / 254) / 254) * unit).astype(x.dtype)
  return out.reshape(*x.shape[:-1], levels.shape[-1])


def dot_wide(x: jax.Array, table: jax.Array) -> jax.Array:
  """Returns [..., I] times the transpose of [O, I], kept in float32."""
  rows = _rows(x)
  out = jax.lax.dot_general(
    rows,
    table.astype(x.dtype),
    (((x.ndim - 1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  return out if rows is x else out[:1]


@jax.custom_vjp
def _wide_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
  wide = jnp.dot(_rows(x), kernel, preferred_element_type=jnp.float32)
  return wide[: len(x)].astype(x.dtype)


def _rows(x: jax.Array) -> jax.Array:
  """Returns two rows for one of bfloat16 on a CPU, where XLA has no fast
  product of such a vector and a matrix: it takes six times as long."""
  alone = x.shape[:-1] == (1,) and x.dtype == jnp.bfloat16
  if not alone or compiling.backend() != "cpu":
    return x
  return jnp.pad(x, ((0, 1), (0, 0)))


def _wide_dot_forward(x, kernel):
  return _wide_dot(x, kernel), (x, kernel)


def _wide_dot_backward(residuals, cotangent):
  x, kernel = residuals
  return _wide_dot(cotangent, kernel.T), _wide_dot(x.T, cotangent)


_wide_dot.defvjp(_wide_dot_forward, _wide_dot_backward)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an einsum; of bfloat16 operands, summed into float32."""
  if a.dtype == jnp.bfloat16:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
  return jnp.einsum(spec, a, b)


# --- attention over explicit masks -----------------------------------------


def attend(
  q_BTNH: jax.Array, k_BKCH: jax.Array, v_BKCH: jax.Array, mask_BTC: jax.Array
) -> jax.Array:
  """Grouped-query attention under a mask; [B, T, N, H]."""
  return _attend(q_BTNH, k_BKCH, "xqh,xch->xqc", v_BKCH, mask_BTC)


def attend_cached(
  q_BTNH: jax.Array, k_BKHC: jax.Array, v_BKCH: jax.Array, mask_BTC: jax.Array
) -> jax.Array:
  """As `attend`, with keys as a cache holds them: few queries read all of
  them, which on a CPU takes half as long from rows of places."""
  return _attend(q_BTNH, k_BKHC, "xqh,xhc->xqc", v_BKCH, mask_BTC)


def _attend(q_BTNH, keys, product, v_BKCH, mask_BTC) -> jax.Array:
  b, t, n, h = q_BTNH.shape
  kv, length = v_BKCH.shape[1:3]
  # One batch axis, heads outside tokens: no operand is copied at each step of
  # decoding, and the gradients stay plain batched matmuls.
  q = (q_BTNH * h**-0.5).reshape(b, t, kv, n // kv, h)
  q = q.transpose(0, 2, 3, 1, 4).reshape(b * kv, (n // kv) * t, h)
  k = keys.reshape(b * kv, *keys.shape[2:])
  v = v_BKCH.reshape(b * kv, length, h)
  scores = _einsum(product, q, k).reshape(b, n, t, length)
  scores = jnp.where(mask_BTC[:, None], scores.astype(jnp.float32), _NEG)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  mixed = _einsum("xqc,xch->xqh", weights.reshape(b * kv, -1, length), v)
  mixed = mixed.astype(q.dtype)
  mixed = mixed.reshape(b, kv, n // kv, t, h).transpose(0, 3, 1, 2, 4)
  return mixed.reshape(b, t, n, h)


# --- packed rows -----------------------------------------------------------


def causal_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segments_BT: jax.Array,
  until_BT: jax.Array | np.ndarray | None = None,
  mesh: jax.sharding.Mesh | None = None,
  sight: Sight | None = None,
) -> jax.Array:
  """Attention to earlier tokens of the own segment; [B, T, N, H].

  Args:
    q_BTNH: queries.
    k_BTKH: keys.
    v_BTKH: values.
    segments_BT: int32, which sequence of the row a token belongs to.
    until_BT: int32, `PolicyInputs.seen_until`: the place after the last token
      that sees a token; None = the end of its segment.
    mesh: over which rows, tokens and heads are split.
    sight: Interval that a token sees in place of all earlier ones; in a tree
      with its depths.
  """
  ids: tuple[jax.Array, ...] = (segments_BT,)
  if until_BT is not None:
    ids = segments_BT, jnp.asarray(until_BT)
  # 1. Without a GPU or a TPU: loops over blocks on a CPU, else XLA in chunks.
  run: Callable[..., jax.Array] = _causal_local
  # 2. An interval of its own for each token fits no kernel's causal mask, so
  #    its chunks always have explicit masks.
  if sight is not None:
    if until_BT is not None and sight.depth_BT is None:
      raise ValueError("in a tree a Sight needs depth_BT")
    depth = () if sight.depth_BT is None else (sight.depth_BT,)
    ids = segments_BT, sight.last_BT, *ids[1:], *depth
    flash = "cudnn" if _cudnn_applies(q_BTNH, q_BTNH.shape[1]) else None
    run = functools.partial(
      _seen_local, window=sight.window, lookahead=sight.lookahead, flash=flash
    )
  # 3. On TPU splash skips the blocks of other segments. It knows segments but
  #    no trees.
  elif until_BT is None and _splash_applies(q_BTNH):
    run = _splash_local
  # 4. On GPU cuDNN, by segments where it takes them, else under a mask.
  elif _cudnn_applies(q_BTNH, q_BTNH.shape[1]):
    run = functools.partial(_causal_local, flash="cudnn")
  # 5. On a mesh each device has all tokens of its rows and a part of the heads,
  #    so that none of the above needs to know of other devices.
  return _over_mesh(run, q_BTNH, k_BTKH, v_BTKH, ids, mesh, "tensor")


def _causal_local(
  q_BTNH, k_BTKH, v_BTKH, segments_BT, until_BT=None, *, flash=None
) -> jax.Array:
  """Attends in chunks of queries, by XLA or an implementation of `jax.nn`."""
  t = segments_BT.shape[1]
  if not flash and _blocks_apply(t):
    return blocks_lib.attend(
      q_BTNH, k_BTKH, v_BTKH, segments_BT, until_BT, causal=True
    )
  masked = lambda q, k, v: _causal_chunks(
    q, k, v, segments_BT, until_BT, flash=flash
  )
  if flash and _packed_applies(t):
    return _packed(
      q_BTNH, k_BTKH, v_BTKH, segments_BT, ROW_SEGMENTS, masked, True, until_BT
    )
  return masked(q_BTNH, k_BTKH, v_BTKH)


def _causal_chunks(
  q_BTNH, k_BTKH, v_BTKH, segments_BT, until_BT=None, *, flash=None
) -> jax.Array:
  """As `causal_attention`, a chunk of queries at a time under its mask."""
  b, t = segments_BT.shape
  k, v, axis, chunk, attend_ = _chunks(k_BTKH, v_BTKH, b, flash)

  def part(start: int, end: int) -> jax.Array:
    # 1. Own segment; in a tree, tokens whose descendants reach the query.
    if until_BT is None:
      mask = segments_BT[:, start:end, None] == segments_BT[:, None, :end]
    else:
      mask = until_BT[:, None, :end] > np.arange(start, end)[:, None]
    # 2. Earlier tokens and the own one.
    mask &= np.tri(end - start, end, start, dtype=bool)
    # 3. A chunk needs the keys up to its own end only.
    keys_values = (jax.lax.slice_in_dim(x, 0, end, axis=axis) for x in (k, v))
    return attend_(q_BTNH[:, start:end], *keys_values, mask)

  parts = [part(i, min(i + chunk, t)) for i in range(0, t, chunk)]
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _chunks(k_BTKH, v_BTKH, rows: int, flash: str | None):
  """Keys, values, their axis of tokens, queries of a chunk, and attention."""
  t = k_BTKH.shape[1]
  if flash:
    chunk = max(1, MAX_MASK // (rows * t * 128)) * 128
    flash_ = functools.partial(_flash, implementation=flash)
    return k_BTKH, v_BTKH, 1, chunk, flash_
  chunk = max(128, -(-t // 1024) * 128)
  attend_ = attend if t <= chunk else jax.checkpoint(attend)
  return k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), 2, chunk, attend_


def _seen_local(
  q_BTNH,
  k_BTKH,
  v_BTKH,
  segments_BT,
  last_BT,
  until_BT=None,
  depth_BT=None,
  *,
  window,
  lookahead,
  flash,
) -> jax.Array:
  """As `_causal_local`, under a `Sight`."""
  b, t = segments_BT.shape
  if not flash and _blocks_apply(t):
    return blocks_lib.attend(
        q_BTNH, k_BTKH, v_BTKH, segments_BT, until_BT,
        causal=True, last_BT=last_BT, window=window, depth_BT=depth_BT,
    )  # fmt: skip
  k, v, axis, chunk, attend_ = _chunks(k_BTKH, v_BTKH, b, flash)

  def part(start: int, end: int) -> jax.Array:
    # 1. The keys that any query of the chunk may see; even, for cuDNN. In a
    #    tree the tokens before it lie anywhere.
    near = window and until_BT is None
    low = max(0, start - window + 1) // 128 * 128 if near else 0
    high = min(t, end + lookahead - 1)
    high = min(t, -(-high // 128) * 128)
    # 2. Up to the last token that the query sees, of its own segment.
    key, query = np.arange(low, high), np.arange(start, end)[:, None]
    mask = key <= last_BT[:, start:end, None]
    if until_BT is None:
      mask &= segments_BT[:, start:end, None] == segments_BT[:, None, low:high]
    else:
      mask &= until_BT[:, None, low:high] > query
    # 3. No further back than the window: in places of the row, or in depths of
    #    the tree, where neighbours in the row may be far apart.
    if window and depth_BT is None:
      mask &= key > query - window
    elif window:
      farthest = depth_BT[:, start:end, None] - window
      mask &= depth_BT[:, None, low:high] > farthest
    keys_values = (
      jax.lax.slice_in_dim(x, low, high, axis=axis) for x in (k, v)
    )
    return attend_(q_BTNH[:, start:end], *keys_values, mask)

  parts = [part(i, min(i + chunk, t)) for i in range(0, t, chunk)]
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _blocks_apply(tokens: int) -> bool:
  """Whether loops over tiles of scores are worth their turns: elsewhere than
  on a CPU one large product is quicker than many small ones, and so it is for
  few tokens."""
  return compiling.backend() == "cpu" and tokens >= blocks_lib.LEAST


def image_attention(
  q_SPNH: jax.Array,
  k_SPNH: jax.Array,
  v_SPNH: jax.Array,
  segments_SP: jax.Array,
  reach: int,
  cut: bool = False,
  mesh: jax.sharding.Mesh | None = None,
  tensor: str | None = None,
  aligned: bool = False,
) -> jax.Array:
  """Attention to all patches of the own segment; [S, P, N, H].

  Patches of a segment lie within `reach` places of each other, so that a
  block of queries needs the keys of its neighbourhood only and the cost is
  linear in the buffer.

  Args:
    q_SPNH: queries.
    k_SPNH: keys.
    v_SPNH: values.
    segments_SP: int32; equal ids see each other. Or bool: a buffer's True
      places see each other, and the outputs of False ones are not read.
    reach: see above.
    cut: whether patches further apart do not see each other although they are
      of one segment; else they may or may not.
    mesh: over which buffers, patches and heads are split.
    tensor: the mesh's axis that heads are split over beside `sequence`, if
      any.
    aligned: whether no segment crosses a multiple of `reach`, so that a block
      of queries needs its own keys only: a third of the neighbourhood's. Used
      where `windows_help`.
  """
  # Scores of whole neighbourhoods would be gigabytes where images are large.
  p, head_dim = q_SPNH.shape[1], q_SPNH.shape[3]
  if _splash_takes_images(head_dim) and p % SPLASH_BLOCK == 0:
    run = functools.partial(_splash_local, reach=reach)
  else:
    flash = "cudnn" if _cudnn_applies(q_SPNH, reach) else None
    run = functools.partial(
      _image_local, reach=reach, cut=cut, flash=flash, aligned=aligned
    )
  return _over_mesh(run, q_SPNH, k_SPNH, v_SPNH, (segments_SP,), mesh, tensor)


def _image_local(
  q_SPNH, k_SPNH, v_SPNH, segments_SP, *, reach, cut, flash=None, aligned=False
):
  """Blocks of queries with their neighbourhoods; see `_causal_local`."""
  s, p, heads, head_dim = q_SPNH.shape
  # 1. Aligned images cross no block: each block becomes a buffer of its own,
  #    and a query is scored against one block of keys instead of three.
  if aligned and p > reach:
    fill = -p % reach
    split = lambda x: jnp.pad(
      x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2)
    ).reshape(-1, reach, *x.shape[2:])
    mixed = _image_local(
      *map(split, (q_SPNH, k_SPNH, v_SPNH, segments_SP)),
      reach=reach,
      cut=cut,
      flash=flash,
    )
    return mixed.reshape(s, p + fill, heads, head_dim)[:, :p]
  # 2. On a CPU loop over the blocks that share an image; `cut` is no rule of
  #    those loops.
  if not (cut or flash) and _blocks_apply(p):
    ids = segments_SP.astype(jnp.int32)
    return blocks_lib.attend(q_SPNH, k_SPNH, v_SPNH, ids, causal=False)
  # 3. One image a buffer: its queries share one mask of keys.
  block = min(reach, p)
  alone = block == p
  if segments_SP.dtype == jnp.bool_ and alone and not (cut or flash):
    return _attend_where(q_SPNH, k_SPNH, v_SPNH, segments_SP)
  # 4. cuDNN gets a few images as sequences of one buffer; 5. else each block of
  #    queries attends to the blocks around it, under masks.
  near = functools.partial(_neighbourhoods, block=block, cut=cut, flash=flash)
  if flash and alone and not cut and _packed_applies(p):
    return _packed(
      q_SPNH,
      k_SPNH,
      v_SPNH,
      segments_SP,
      IMAGE_SEGMENTS,
      lambda q, k, v: near(q, k, v, segments_SP),
      False,
    )
  return near(q_SPNH, k_SPNH, v_SPNH, segments_SP)


def _neighbourhoods(
  q_SPNH, k_SPNH, v_SPNH, segments_SP, *, block, cut, flash
) -> jax.Array:
  """Attends in blocks of queries to the blocks around them, under masks."""
  s, p, heads, head_dim = q_SPNH.shape
  blocks = -(-p // block)
  fill = blocks * block - p

  # 1. Cut the buffer into whole blocks of queries, one batch row each.
  def pad(x, before, after):
    return jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))

  q = pad(q_SPNH, 0, fill).reshape(s * blocks, block, heads, head_dim)
  own = pad(segments_SP, 0, fill).reshape(s * blocks, block)
  # 2. Give each block the keys before it, its own, and those after it: no two
  #    patches of an image are further apart than a block.
  k, v, segments = k_SPNH, v_SPNH, segments_SP
  if blocks == 1:
    span = block
  else:
    span = 3 * block

    def neighbours(x):
      x = pad(x, block, block + fill)
      parts = [
        x[:, i * block : (i + blocks) * block].reshape(
          s * blocks, block, *x.shape[2:]
        )
        for i in range(3)
      ]
      return jnp.concatenate(parts, axis=1)

    k, v, segments = neighbours(k), neighbours(v), neighbours(segments)
  # 3. A query sees its own image; with `cut`, no further than a block.
  mask = own[:, :, None] == segments[:, None, :]
  if cut:
    distance = np.arange(span)[None, :] - np.arange(block)[:, None]
    mask &= np.abs(distance - (span - block) // 2) <= block
  attend_: Callable[..., jax.Array] = attend
  if flash:
    attend_ = functools.partial(_flash, implementation=flash)
    at_once = mask.size <= MAX_MASK
  else:
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    at_once = mask.size * heads <= MAX_SCORES
  if at_once:
    mixed = attend_(q, k, v, mask)
  else:
    # 4. Scores or masks of all blocks would not fit: one block at a time, and
    #    again in the backward pass.
    one = jax.checkpoint(lambda x: attend_(*(a[None] for a in x))[0])
    mixed = jax.lax.map(one, (q, k, v, mask))
  return mixed.reshape(s, blocks * block, heads, head_dim)[:, :p]


def _attend_where(q_SPNH, k_SPNH, v_SPNH, real_SP) -> jax.Array:
  """Attends from all queries to the same keys, those of real places.

  A key's mask is added to its scores as one more feature, against a one of
  each query: on a CPU a mask of all scores takes as long as the scores.
  """
  s, p, n, h = q_SPNH.shape
  q = (q_SPNH * h**-0.5).astype(q_SPNH.dtype)
  q = jnp.concatenate([q, jnp.ones((s, p, n, 1), q.dtype)], axis=-1)
  added = jnp.where(real_SP, 0.0, _NEG).astype(q.dtype)
  added = jnp.broadcast_to(added[:, :, None, None], (s, p, n, 1))
  k = jnp.concatenate([k_SPNH, added], axis=-1)
  flat = lambda x: x.swapaxes(1, 2).reshape(s * n, p, -1)
  scores = _einsum("xqh,xch->xqc", flat(q), flat(k)).astype(jnp.float32)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  mixed = _einsum("xqc,xch->xqh", weights, flat(v_SPNH)).astype(q.dtype)
  return mixed.reshape(s, n, p, h).swapaxes(1, 2)


# --- meshes ----------------------------------------------------------------


def _over_mesh(
  run: Callable[..., jax.Array],
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  ids: tuple[jax.Array, ...],
  mesh: jax.sharding.Mesh | None,
  tensor: str | None,
) -> jax.Array:
  """run(q, k, v, *ids) on each device with its rows and heads, all tokens."""
  if mesh is None or q_BTNH.shape[0] % sharding.batch_shards(mesh):
    return run(q_BTNH, k_BTKH, v_BTKH, *ids)
  heads, kv = q_BTNH.shape[2], k_BTKH.shape[2]
  axes: list[str] = []  # That split heads; the rest repeat the work.
  for axis in (tensor, "sequence"):
    split = math.prod(mesh.shape[a] for a in axes)
    if axis and heads % math.lcm(kv, split * mesh.shape[axis]) == 0:
      axes.append(axis)
  split = math.prod(mesh.shape[a] for a in axes)
  copies = split // math.gcd(kv, split)
  if copies > 1:  # Fewer KV heads than devices: each has its own copy.
    k_BTKH, v_BTKH = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))
  # Where projections leave them; else the compiler might rather move weights.
  q_BTNH, k_BTKH, v_BTKH = (
    sharding.constrain(x, mesh, *sharding.TOKENS, tensor)
    for x in (q_BTNH, k_BTKH, v_BTKH)
  )
  P = jax.sharding.PartitionSpec
  wide = P(sharding.BATCH_AXES, None, tuple(axes), None)
  mixed = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(wide, wide, wide, *(P(sharding.BATCH_AXES) for _ in ids)),
    out_specs=wide,
    check_vma=False,
  )(q_BTNH, k_BTKH, v_BTKH, *ids)
  return sharding.constrain(mixed, mesh, *sharding.TOKENS, tensor)


# --- cuDNN's attention -----------------------------------------------------


def _cudnn_applies(q_BTNH: jax.Array, block: int) -> bool:
  """Returns whether cuDNN's kernel takes this dtype, width and block."""
  h = q_BTNH.shape[3]
  half = q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
  even = min(block, q_BTNH.shape[1]) % 2 == 0
  takes = half and even and h <= 128 and h % 8 == 0
  return compiling.backend() == "gpu" and takes


def _flash(q_BTNH, k_BCKH, v_BCKH, mask_BTC, *, implementation) -> jax.Array:
  """As `attend`, but tokens lie outside heads; no scores are ever stored."""
  return jax.nn.dot_product_attention(
    q_BTNH,
    k_BCKH,
    v_BCKH,
    mask=mask_BTC[:, None],
    implementation=implementation,
  )


def _packed_applies(places: int) -> bool:
  """Returns whether cuDNN takes segments by their places: Hopper and later."""
  if compiling.backend() != "gpu" or places < PACKED_FROM:
    return False
  from jax._src.cudnn import fused_attention_stablehlo as cudnn  # pylint: disable=g-import-not-at-top

  return cudnn.check_compute_capability("9.0")


def _packed(
  q_BTNH,
  k_BTKH,
  v_BTKH,
  segments_BT,
  most: int,
  masked: Callable[..., jax.Array],
  causal: bool,
  until_BT=None,
) -> jax.Array:
  """Attends within each run of equal ids; ids of a row lie in one run each.

  1. A row of at most `most` runs is a batch of sequences for cuDNN, which skips
     what they do not see and needs no mask. Padding is a run, too: its outputs
     must be finite.
  2. If any row has more runs, or holds a tree with branches, `masked` computes
     all rows, and again in the backward pass, so that it saves nothing beside
     the first branch.
  """
  # The public function has no argument for sequences that share a row.
  from jax._src.cudnn import fused_attention_stablehlo as cudnn  # pylint: disable=g-import-not-at-top

  b, t = segments_BT.shape
  new_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
  new_BT = jnp.concatenate([jnp.ones((b, 1), bool), new_BT], axis=1)
  kind = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING

  def by_runs(q, k, v):
    # Each run's start, -1 behind the last one; a run ends where the next one
    # starts, the last one with the row.
    first = lambda new_T: jnp.nonzero(new_T, size=most + 1, fill_value=-1)[0]
    starts = jax.vmap(first)(new_BT).astype(jnp.int32).at[:, most].set(-1)
    ends = jnp.roll(starts, -1, axis=1)
    ends = jnp.where((starts >= 0) & (ends < 0), t, ends)
    lengths = jnp.where(starts >= 0, ends - starts, -1)[:, :most]
    return cudnn.dot_product_attention(
      q,
      k,
      v,
      q_seqlen=lengths,
      kv_seqlen=lengths,
      q_offsets=starts,
      kv_offsets=starts,
      scale=q.shape[-1] ** -0.5,
      mask_type=kind,
    )

  if q_BTNH.size >= 2**31:  # The kernel's places are int32.
    return masked(q_BTNH, k_BTKH, v_BTKH)
  fits = jnp.max(jnp.sum(new_BT, axis=1)) <= most
  if until_BT is not None:  # Without branches all see to the run's end.
    begin_BT = jnp.where(new_BT, np.arange(t), t)
    begin_BT = jnp.pad(begin_BT[:, 1:], ((0, 0), (0, 1)), constant_values=t)
    end_BT = jax.lax.cummin(begin_BT, axis=1, reverse=True)
    fits &= jnp.all((until_BT == end_BT) | (segments_BT == 0))
  by_mask = jax.checkpoint(masked)
  return jax.lax.cond(fits, by_runs, by_mask, q_BTNH, k_BTKH, v_BTKH)


# --- splash attention ------------------------------------------------------


def _splash_applies(q_BTNH: jax.Array) -> bool:
  """Returns whether the kernel takes rows of this length and head size."""
  t, h = q_BTNH.shape[1], q_BTNH.shape[3]
  return compiling.backend() == "tpu" and t % SPLASH_BLOCK == 0 and h % 128 == 0


def _splash_takes_images(head_dim: int) -> bool:
  """Returns whether the kernel takes images, given a whole number of blocks."""
  return compiling.backend() == "tpu" and head_dim >= 64 and head_dim % 8 == 0


def _splash_local(
  q_BTNH, k_BTKH, v_BTKH, segments_BT, *, interpret=False, reach=None
):
  """The kernel on one device's rows and heads.

  Causal, or with a `reach`: to places that far away on either side.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # pylint: disable=g-import-not-at-top

  _, t, n, _ = q_BTNH.shape
  block = next(b for b in (512, 256, 128) if t % b == 0)
  sizes = splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  mask: splash.Mask
  if reach is None:
    mask = splash.CausalMask((t, t))
  else:
    mask = splash.LocalMask((t, t), (reach, reach), 0)
  kernel = splash.make_splash_mha(
    mask=splash.MultiHeadMask([mask] * n),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  # The kernel scales nothing and takes heads before tokens, a row at a time.
  segments_BT = segments_BT.astype(jnp.int32)
  ids = splash.SegmentIds(q=segments_BT, kv=segments_BT)
  scaled = q_BTNH * q_BTNH.shape[-1] ** -0.5
  mixed = jax.vmap(kernel)(
    scaled.swapaxes(1, 2), k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), ids
  )
  return mixed.swapaxes(1, 2).astype(q_BTNH.dtype)
