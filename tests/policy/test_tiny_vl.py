"""The small policy: cached equals full, packed equals unpacked, isolation."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

TOL = 1e-5


@pytest.fixture(scope="module")
def policy():
  model, processor, _ = checkpoint.create_policy("nano", vision_window=5)
  return model, processor


# Everything runs under one jit a shape: op by op, XLA compiles each alone.
@nnx.jit
def full(model, inputs):
  return model(inputs)


@nnx.jit
def encode(model, *patches):
  return model.encode_images(*patches)


@nnx.jit
def extend(model, *args):
  return model.extend(*args)


def pixels(rng, height=33, width=40):
  return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


class Sequence:
  """Random tokens with one image somewhere in them."""

  def __init__(self, rng, config, processor, length, image):
    patched = processor.patchify(image)
    self.patched = patched
    n = patched.num_tokens
    assert n < length
    at = int(rng.integers(0, length - n))
    self.tokens = rng.integers(0, config.number_start + 1000, length).astype(
      np.int32
    )
    self.tokens[at : at + n] = config.image_token_id
    self.index = np.full(length, -1, np.int32)
    self.index[at : at + n] = np.arange(n)


def pack(rows, patches_fill=3, length=None):
  """PolicyInputs of rows, each a list of Sequences; one buffer."""
  if length is None:
    length = max(sum(len(s.tokens) for s in row) for row in rows) + 2
  b = len(rows)
  tokens = np.zeros((b, length), np.int32)
  positions = np.zeros((b, length, 3), np.int32)
  segments = np.zeros((b, length), np.int32)
  index = np.full((b, length), -1, np.int32)
  patches, patch_segments, patch_positions = [], [], []
  image = offset = 0
  for r, row in enumerate(rows):
    cursor = 0
    for i, s in enumerate(row):
      at = slice(cursor, cursor + len(s.tokens))
      tokens[r, at] = s.tokens
      positions[r, at] = np.arange(len(s.tokens))[:, None]
      segments[r, at] = i + 1
      index[r, at] = np.where(s.index >= 0, s.index + offset, -1)
      cursor = at.stop
      image += 1
      n = s.patched.num_tokens
      patches.append(s.patched.patches)
      patch_positions.append(s.patched.positions)
      patch_segments.append(np.full(n, image, np.int32))
      offset += n
  f = patches[0].shape[1]
  patches.append(np.zeros((patches_fill, f), np.uint8))
  patch_positions.append(np.zeros((patches_fill, 2), np.int32))
  patch_segments.append(np.zeros(patches_fill, np.int32))
  return base.PolicyInputs(
    tokens=tokens,
    positions=positions,
    segment_ids=segments,
    vision_index=index,
    patches=np.concatenate(patches)[None],
    patch_segments=np.concatenate(patch_segments)[None],
    patch_positions=np.concatenate(patch_positions)[None],
  )


def sequences(policy, seed, lengths):
  rng = np.random.default_rng(seed)
  model, processor = policy
  return [
    Sequence(
      rng,
      model.config,
      processor,
      n,
      # 2 x 3 cells, the last ones cut short: one shape to compile.
      pixels(rng, int(rng.integers(17, 33)), int(rng.integers(33, 49))),
    )
    for n in lengths
  ]


def test_packed_rows_equal_rows_of_their_own(policy):
  model, _ = policy
  a, b, c = sequences(policy, 0, (20, 23, 31))
  packed = full(model, pack([[a, b], [c]]))
  for where, s in (((0, 0), a), ((0, 20), b), ((1, 0), c)):
    alone = full(model, pack([[s]], patches_fill=1, length=33))
    row, at = where
    n = len(s.tokens)
    np.testing.assert_allclose(packed[row, at : at + n], alone[0, :n], atol=TOL)


def test_a_token_sees_no_later_token(policy):
  model, _ = policy
  (s,) = sequences(policy, 1, (30,))
  inputs = pack([[s]], patches_fill=1, length=33)
  before = full(model, inputs)
  tokens = inputs.tokens.copy()
  free = np.flatnonzero(s.index < 0)
  changed = int(free[len(free) // 2])
  tokens[0, changed] = 7 if tokens[0, changed] != 7 else 8
  after = full(model, dataclasses.replace(inputs, tokens=tokens))
  np.testing.assert_array_equal(before[0, :changed], after[0, :changed])
  assert not np.allclose(before[0, changed], after[0, changed])


def test_an_image_sees_no_other_image(policy):
  model, processor = policy
  rng = np.random.default_rng(2)
  first, second = (processor.patchify(pixels(rng)) for _ in range(2))
  n = first.num_tokens
  both = encode(
    model,
    np.concatenate([first.patches, second.patches])[None],
    np.repeat([1, 2], n)[None],
    np.concatenate([first.positions, second.positions])[None],
  )
  for at, image in ((0, first), (n, second)):
    alone = encode(
      model,
      image.patches[None],
      np.ones((1, n), np.int32),
      image.positions[None],
    )
    np.testing.assert_allclose(both[0, at : at + n], alone[0], atol=TOL)


@pytest.mark.parametrize("seed", range(3))
def test_extend_in_random_pieces_equals_the_full_forward_pass(policy, seed):
  model, _ = policy
  rng = np.random.default_rng(seed)
  lengths = (19, 26, 33)
  seqs = sequences(policy, seed, lengths)
  inputs = pack([[s] for s in seqs])
  want = np.asarray(full(model, inputs))
  vision = encode(
    model, inputs.patches, inputs.patch_segments, inputs.patch_positions
  )
  # One shape for all pieces, so that one compile serves them.
  width, capacity = 8, 40
  cache = model.init_cache(len(seqs), capacity)
  starts = np.zeros(len(seqs), np.int32)
  got = np.zeros_like(want)
  while np.any(starts < lengths):
    counts = np.minimum(
      rng.integers(0, width + 1, len(seqs)), np.array(lengths) - starts
    ).astype(np.int32)
    piece = {
      name: np.zeros(
        (len(seqs), width, *getattr(inputs, name).shape[2:]), np.int32
      )
      for name in ("tokens", "positions", "vision_index")
    }
    # Garbage behind a row's real tokens must not matter.
    piece["tokens"][:] = rng.integers(0, 99, piece["tokens"].shape)
    piece["vision_index"][:] = rng.integers(-1, 3, piece["tokens"].shape)
    for r, (start, count) in enumerate(zip(starts, counts)):
      for name, array in piece.items():
        array[r, :count] = getattr(inputs, name)[r, start : start + count]
    hidden, cache = extend(
      model,
      piece["tokens"],
      piece["positions"],
      starts,
      counts,
      cache,
      piece["vision_index"],
      vision,
    )
    for r, (start, count) in enumerate(zip(starts, counts)):
      got[r, start : start + count] = hidden[r, :count]
    starts = starts + counts
  for r, n in enumerate(lengths):
    np.testing.assert_allclose(got[r, :n], want[r, :n], atol=TOL)


def test_decoding_token_by_token_equals_the_full_forward_pass(policy):
  model, _ = policy
  tokens = np.random.default_rng(5).integers(0, 1500, (2, 9)).astype(np.int32)
  want = full(
    model,
    base.PolicyInputs(
      tokens=tokens,
      positions=np.tile(np.arange(9, dtype=np.int32)[None, :, None], (2, 1, 3)),
      segment_ids=np.ones((2, 9), np.int32),
      vision_index=np.full((2, 9), -1, np.int32),
      patches=np.zeros(
        (1, 1, vision_inputs.TinyVLProcessor.patch_bytes), np.uint8
      ),
      patch_segments=np.zeros((1, 1), np.int32),
      patch_positions=np.zeros((1, 1, 2), np.int32),
    ),
  )
  cache = model.init_cache(2, 9)
  ones = np.ones(2, np.int32)
  for t in range(9):
    hidden, cache = extend(
      model,
      tokens[:, t : t + 1],
      np.full((2, 1, 3), t, np.int32),
      ones * t,
      ones,
      cache,
    )
    np.testing.assert_allclose(hidden[:, 0], want[:, t], atol=TOL)


def test_tokens_beyond_the_cache_are_dropped(policy):
  model, _ = policy
  cache = jax.tree.map(lambda x: x + 3.0, model.init_cache(1, 4))
  _, after = extend(
    model,
    np.array([[1, 2, 3]]),
    np.zeros((1, 3, 3), np.int32),
    np.array([3]),
    np.array([3]),
    cache,
  )
  for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
    if old.shape[2] != 4:  # Keys: places are the last axis.
      old, new = old.swapaxes(2, 3), new.swapaxes(2, 3)
    np.testing.assert_array_equal(old[:, :, :3], new[:, :, :3])
    assert not np.allclose(old[:, :, 3], new[:, :, 3])


def test_stem_equals_convolutions_on_the_whole_image(policy):
  """The flat cells with halo give what real convolutions give on the image,
  on sides that are no multiple of a cell."""
  model, processor = policy
  stem = model.stem
  rng = np.random.default_rng(6)
  image = pixels(rng, 37, 50)
  patched = processor.patchify(image)
  got = nnx.jit(lambda m, x: m.stem(x))(model, patched.patches[None])[0]

  height, width = 48, 64
  padded = np.pad(
    image, ((4, 4 + height - 37), (4, 4 + width - 50), (0, 0)), mode="edge"
  )
  x = padded.astype(np.float64) / 127.5 - 1

  def conv(x, kernel, size, stride):
    h = (x.shape[0] - size) // stride + 1
    w = (x.shape[1] - size) // stride + 1
    out = np.zeros((h, w, kernel.shape[1]))
    for i in range(h):
      for j in range(w):
        window = x[
          i * stride : i * stride + size, j * stride : j * stride + size
        ]
        out[i, j] = window.reshape(-1) @ kernel
    return out

  def gelu(z):
    return np.asarray(jax.nn.gelu(z.astype(np.float32)), np.float64)

  kernels = [
    np.asarray(p[...], np.float64) for p in (stem.conv1, stem.conv2, stem.conv3)
  ]
  x = gelu(conv(x, kernels[0], 4, 4))
  x = gelu(conv(x, kernels[1], 3, 1))
  x = conv(x, kernels[2], 2, 2)
  x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
  rows, cols = height // 16, width // 16
  cells = x.reshape(rows, 2, cols, 2, -1).transpose(0, 2, 1, 3, 4)
  cells = cells.reshape(rows * cols, -1)
  want = gelu(cells @ np.asarray(stem.up[...])) @ np.asarray(stem.down[...])
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_axis_features_are_a_kernel_that_peaks_where_positions_coincide():
  f = np.asarray(tiny_vl.number_features())
  kernel = f @ f.T
  np.testing.assert_allclose(np.diag(kernel), 1.0, atol=1e-5)
  assert np.array_equal(kernel.argmax(1), np.arange(1000))
  far = np.abs(np.arange(1000)[:, None] - np.arange(1000)) > 300
  assert kernel[far].max() < 0.05


def test_number_logits_follow_positions_along_the_gated_axis(policy):
  """A hidden state that holds x's position and asks for x gets number x."""
  model, _ = policy
  model = nnx.clone(model)
  d = model.config.width
  u_x, u_y = 0.2, 0.8
  f = tiny_vl.axis_features(jnp.array([u_x, u_y]))
  direction = f[0] @ model.axis_x[...] + f[1] @ model.axis_y[...]
  start = model.config.number_start
  model.embedding[...] = jnp.zeros_like(model.embedding[...])
  model.axis_number[...] = jnp.zeros_like(model.axis_number[...])
  for axis, _ in ((0, u_x), (1, u_y)):
    gate = np.zeros((d, 2), np.float32)
    gate[:, axis] = np.asarray(direction) * 1e3
    gate[:, 1 - axis] = -np.asarray(direction) * 1e3
    model.axis_gate[...] = jnp.asarray(gate)
    # The nano width cannot hold 64 features: hold them exactly instead.
    model.axis_x[...] = jnp.eye(64, d) if axis == 0 else jnp.zeros((64, d))
    model.axis_y[...] = jnp.eye(64, d) if axis == 1 else jnp.zeros((64, d))
    features = np.asarray(tiny_vl.number_features())
    hidden = jnp.asarray(direction)
    logits = np.asarray(model.logits(hidden[None]))[0]
    want = np.zeros(model.config.vocab_size, np.float32)
    want[start : start + 1000] = features[:, :d] @ np.asarray(direction)[:64]
    np.testing.assert_allclose(logits, want, atol=1e-4)


def test_gradients_reach_every_parameter(policy):
  model, _ = policy
  seqs = sequences(policy, 7, (30, 30))
  for s in seqs:
    s.tokens[s.index < 0] = model.config.number_start + 500
  inputs = pack([[s] for s in seqs])

  @nnx.jit
  @nnx.grad
  def grad(model):
    logits = model.logits(model(inputs))
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 700])

  for name, value in checkpoint.named_parameters(grad(model)).items():
    assert np.isfinite(value).all() and np.abs(value).max() > 0, name


def test_bfloat16_is_close_to_float32(policy):
  model, _ = policy
  (s,) = sequences(policy, 8, (30,))
  inputs = pack([[s]], patches_fill=1, length=33)
  want = full(model, inputs)
  low = tiny_vl.TinyVL(
    dataclasses.replace(model.config, compute_dtype="bfloat16"), nnx.Rngs(0)
  )
  nnx.update(low, nnx.state(model))
  got = full(low, inputs)
  assert got.dtype == jnp.bfloat16
  assert low.logits(got).dtype == jnp.float32
  error = np.abs(np.asarray(got, np.float32) - want)[0, : len(s.tokens)]
  assert error.max() < 0.15 and error.mean() < 0.02


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(heads=3, kv_heads=2), "heads=3"),
    (dict(head_dim=15), "head_dim"),
    (dict(vision_heads=3), "vision_heads"),
    (dict(compute_dtype="int8"), "compute_dtype"),
    (dict(number_start=5000), "number_start"),
    (dict(banned_token_ids=()), "banned_token_ids"),
  ],
)
def test_contradictory_configs_are_refused(policy, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(policy[0].config, **changes)
