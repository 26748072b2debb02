"""A one-layer policy with everything awkward a policy may have.

Two patches a vision token, image positions that advance by less than the
image's tokens (as M-RoPE's do), and a cache whose batch axis is not the
first. Small enough to compile in a second.
"""

from __future__ import annotations

import asyncio

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import base

VOCAB = 40
PAD, IMAGE, STOP = 0, 1, 2
WIDTH = 16
CONTEXT = 64


class MicroProcessor:
  """A patch is 4x4 pixels; two neighbours in a row are one token."""

  patch_bytes = 48
  patches_per_token = 2
  position_axes = 2

  def num_image_tokens(self, width, height):
    return (height // 4) * (width // 4) // 2

  def patchify(self, pixels):
    rows, cols = pixels.shape[0] // 4, pixels.shape[1] // 4
    cells = pixels.reshape(rows, 4, cols, 4, 3).transpose(0, 2, 1, 3, 4)
    grid = np.stack(np.mgrid[:rows, :cols], axis=-1).astype(np.int32)
    return base.PatchedImage(
      cells.reshape(-1, 48), grid.reshape(-1, 2), rows * cols // 2
    )

  def positions(self, tokens, images, start=0):
    out = np.zeros((len(tokens), 3), np.int32)
    at = position = 0
    for span in images:
      n = span.offset - at
      out[at : span.offset] = (position + np.arange(n))[:, None]
      position += n
      cols = span.image.width // 8
      index = np.arange(span.num_tokens)
      out[span.offset : span.end, 0] = position
      out[span.offset : span.end, 1] = position + index // cols
      out[span.offset : span.end, 2] = position + index % cols
      position += max(span.num_tokens // cols, cols)
      at = span.end
    out[at:] = (position + np.arange(len(tokens) - at))[:, None]
    return out[start:]


class MicroPolicy(nnx.Module):
  """Implements `base.Policy`; `forward` is the plain reference."""

  config = None

  def __init__(self, rngs: nnx.Rngs):
    def param(*shape, scale=1.0):
      value = jax.random.normal(rngs.params(), shape) * scale
      return nnx.Param(value.astype(jnp.float32))

    self.embedding = param(VOCAB, WIDTH)
    self.vision = param(2 * 48, WIDTH, scale=0.5)
    self.qkv = param(3, WIDTH, WIDTH, scale=0.4)
    self.output = param(WIDTH, VOCAB, scale=0.8)

  def _place(self, positions):
    scale = jnp.asarray([0.9, 0.37, 0.11, 0.05])
    angle = positions[..., None] * scale  # [..., 3, 4]
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    waves = waves.reshape(*positions.shape[:-1], 24)
    return waves[..., :WIDTH] + jnp.pad(
      waves[..., WIDTH:], [(0, 0)] * (waves.ndim - 1) + [(0, WIDTH - 8)]
    )

  def encode_images(self, patches, patch_segments, patch_positions):
    x = patches.astype(jnp.float32) / 127.5 - 1.0
    x = x * (patch_segments > 0)[..., None]
    x = x.reshape(*x.shape[:-2], -1, 96) @ self.vision[...]
    return x + jnp.sin(patch_positions[:, ::2, :1].astype(jnp.float32))

  def init_cache(self, batch, length):
    return {"kv": jnp.zeros((2, batch, length, WIDTH))}

  def _embed(self, tokens, positions, vision_index, vision):
    x = self.embedding[...][tokens]
    if vision_index is not None:
      seen = vision[0][jnp.maximum(vision_index, 0)]
      x = jnp.where((vision_index >= 0)[..., None], seen, x)
    return x + self._place(positions)

  def _attend(self, x, q, k, v, mask):
    scores = jnp.einsum("btd,bcd->btc", q, k) / 4.0
    scores = jnp.where(mask, scores, -1e30)
    return jnp.tanh(x + jnp.einsum("btc,bcd->btd", jax.nn.softmax(scores), v))

  def extend(
    self,
    tokens,
    positions,
    starts,
    lengths,
    cache,
    vision_index=None,
    vision=None,
  ):
    x = self._embed(tokens, positions, vision_index, vision)
    q, k, v = (x @ w for w in self.qkv[...])
    b, t, _ = x.shape
    length = cache["kv"].shape[2]
    index = starts[:, None] + jnp.arange(t)
    write = jnp.where(jnp.arange(t) < lengths[:, None], index, length)
    rows = jnp.arange(b)[:, None]
    kv = cache["kv"].at[:, rows, write].set(jnp.stack([k, v]), mode="drop")
    mask = jnp.arange(length) <= index[..., None]
    return self._attend(x, q, kv[0], kv[1], mask), {"kv": kv}

  def logits(self, hidden):
    return hidden @ self.output[...]

  def forward(self, tokens, positions, vision_index, vision):
    """float32[T, V] logits of one sequence, nothing cached."""
    x = self._embed(
      tokens[None], positions[None], vision_index[None], vision[None]
    )
    q, k, v = (x @ w for w in self.qkv[...])
    mask = np.tri(len(tokens), dtype=bool)[None]
    return self.logits(self._attend(x, q, k, v, mask))[0]


PROCESSOR = MicroProcessor()


@nnx.jit
def _forward(model, tokens, positions, vision_index, vision):
  return model.forward(tokens, positions, vision_index, vision)


def reference_logprobs(model, store, tokens, spans, banned=(PAD, IMAGE)):
  """float32[T, V] log-probs after the ban, by a full forward pass."""
  n = len(tokens)
  padded = np.zeros(CONTEXT, np.int32)
  padded[:n] = tokens
  positions = np.zeros((CONTEXT, 3), np.int32)
  positions[:n] = PROCESSOR.positions(tokens, spans)
  index = np.full(CONTEXT, -1, np.int32)
  vision = np.zeros((CONTEXT, WIDTH), np.float32)
  for span in spans:
    patched = PROCESSOR.patchify(store.get(span.image))
    seen = model.encode_images(
      patched.patches[None],
      np.ones((1, len(patched.patches)), np.int32),
      patched.positions[None],
    )
    index[span.offset : span.end] = np.arange(span.offset, span.end)
    vision[span.offset : span.end] = seen[0]
  logits = np.array(
    _forward(model, *map(jnp.asarray, (padded, positions, index, vision)))
  )[:n]
  logits[:, list(banned)] = -np.inf
  peak = logits.max(axis=-1, keepdims=True)
  return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def make_engine(model, store, **changes):
  options = dict(
    slots=4,
    context_length=CONTEXT,
    decode_rows=(2, 4),
    prefill_rows=(2,),
    prefill_buckets=(8,),
    window_buckets=(32,),
    image_buckets=(2,),
    patch_buckets=(8, 16),
    banned_token_ids=(PAD, IMAGE),
    decode_steps_per_call=4,
  )
  return engine_of(model, PROCESSOR, store, **(options | changes))


def engine_of(model, processor, store, **options):
  """An engine; options are fields of `EngineConfig` and facts of a run."""
  facts = {
    name: options.pop(name)
    for name in ("image_sizes", "banned_token_ids", "seed", "version")
    if name in options
  }
  return engine_lib.RolloutEngine(
    model, processor, store, engine_config.EngineConfig(**options), **facts
  )


def picture(store, rng, size=(16, 16)):
  """A new screenshot of (width, height); 16x16 is 8 tokens, 16x8 is 4."""
  shape = (size[1], size[0], 3)
  return store.put(rng.integers(0, 255, shape, dtype=np.uint8))


def with_image(tokens, spans, image):
  """Appends the image's placeholders."""
  count = PROCESSOR.num_image_tokens(image.width, image.height)
  spans = (*spans, trajectory.ImageSpan(image, len(tokens), count))
  return np.append(tokens, np.full(count, IMAGE)).astype(np.int32), spans


def with_text(tokens, rng, count):
  return np.append(tokens, rng.integers(3, VOCAB, count)).astype(np.int32)


def prompt_of(tokens, spans=()):
  return policy_client.TokenPrompt(np.asarray(tokens, np.int32), tuple(spans))


def new_store():
  return images_lib.ImageStore()


def generate(engine, *requests):
  """Runs (session, prompt, sampling) requests concurrently."""

  async def run():
    return await asyncio.gather(
      *(engine.generate(p, s, session=name) for name, p, s in requests)
    )

  return asyncio.run(asyncio.wait_for(run(), 250))


def check_greedy(model, store, tokens, spans, completion):
  """Tokens are the argmax, log-probs those at temperature 1."""
  full = np.append(tokens, completion.tokens)
  logprobs = reference_logprobs(model, store, full, spans)
  rows = logprobs[len(tokens) - 1 : len(full) - 1]
  np.testing.assert_array_equal(completion.tokens, rows.argmax(axis=-1))
  np.testing.assert_allclose(completion.logprobs, rows.max(axis=-1), atol=1e-4)
