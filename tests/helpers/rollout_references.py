"""Expected completions, computed without the engine.

A Qwen3-VL of two layers with weights of order 1, so that every token depends
on every earlier one and on the pixels; its forward pass without a cache; a
token-by-token replay whose weights change on the way; and the distribution
that a request is sampled from, in float64 numpy.

Axis names: T = tokens of a sequence, S = sampled tokens, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from flax import nnx
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

TIE = 1e-5
"""Log-probs closer than this may change places by rounding."""
SIZES = ((32, 32), (48, 32))  # Of screenshots: 4 and 6 tokens.
PATCHES = {(32, 32): 16, (48, 32): 24}

Sequence_ = tuple[np.ndarray, Sequence[trajectory.ImageSpan]]
"""Tokens int32[T] and the images that they show."""


def tiny_qwen(seed: int = 0, talkative: bool = False):
  """(model, processor, tokenizer); equal seeds give equal weights.

  A talkative one hardly ever ends its turn by itself.
  """
  tokenizer = policy_files.load_tokenizer("tiny_vl")
  vision = qwen_config.VisionConfig(
    depth=2,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    out_hidden_size=48,
    patch_size=8,
    num_position_embeddings=25,
    deepstack_visual_indexes=(0,),
  )
  text = qwen_config.TextConfig(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mrope_section=(4, 2, 2),
  )
  find = tokenizer.token_to_id
  config = qwen_config.QwenVLConfig(
    family="qwen3_vl",
    vision=vision,
    text=text,
    image_token_id=find("<|image_pad|>"),
    video_token_id=find("<|video_pad|>"),
    vision_start_token_id=find("<|vision_start|>"),
    vision_end_token_id=find("<|vision_end|>"),
    remat="none",
  )
  model = qwen_vl.QwenVL(config, nnx.Rngs(0))
  randomise(model, seed)
  if talkative:
    head = model.lm_head.weight
    head[...] = head[...].at[jnp.array([find("<|im_end|>")])].set(0.0)
  processor = qwen_vl_inputs.QwenVLProcessor(
    patch_size=8,
    min_pixels=1,
    max_pixels=1 << 20,
    image_token_id=config.image_token_id,
  )
  return model, processor, tokenizer


def randomise(model: nnx.Module, seed: int) -> None:
  """Weights of order 1 / sqrt(inputs): activations stay of order 1."""
  rng = np.random.default_rng(seed)
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  changed = []
  for path, variable in flat:
    value = np.asarray(variable[...])
    noise = rng.normal(size=value.shape)
    if value.ndim == 1:  # Norms stay near 1 and biases near 0.
      value = value + 0.1 * noise
    elif {"embed_tokens", "lm_head"} & set(map(str, path)):
      value = noise / 2
    else:
      value = noise / np.sqrt(np.prod(value.shape[:-1]))
    changed.append((path, variable.replace(jnp.asarray(value, jnp.float32))))
  nnx.update(model, nnx.from_flat_state(changed))


def logprobs_of(logits: np.ndarray, banned: Sequence[int]) -> np.ndarray:
  """float32[T, V] log-probs once the banned ids are left out."""
  logits = np.array(logits)
  logits[:, list(banned)] = -np.inf
  peak = logits.max(axis=-1, keepdims=True)
  return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


# --- the forward pass without a cache ----------------------------------------


@nnx.jit
def _forward(model, inputs):
  return model.logits(model(inputs))


class Recompute:
  """`model(inputs)`, several sequences a call, all padded to one shape."""

  _ROWS = 8

  def __init__(self, model, processor, store, length: int, images: int):
    """`length` tokens and `images` images are what a sequence has at most."""
    self.model, self._processor, self._store = model, processor, store
    self._length = length
    patches = images * max(PATCHES.values())
    self._patches = patches - patches % max(processor.patches_per_token, 1)

  def logits(self, sequences: Sequence[Sequence_]) -> list[np.ndarray]:
    """float32[T, V] of each sequence."""
    found = []
    for i in range(0, len(sequences), self._ROWS):
      some = sequences[i : i + self._ROWS]
      out = np.asarray(_forward(self.model, self._inputs(some)))
      found += [row[: len(tokens)] for row, (tokens, _) in zip(out, some)]
    return found

  def _inputs(self, sequences: Sequence[Sequence_]) -> base.PolicyInputs:
    b, t, p = self._ROWS, self._length, self._patches
    zeros = lambda *shape: np.zeros(shape, np.int32)
    inputs = base.PolicyInputs(
      tokens=zeros(b, t),
      positions=zeros(b, t, 3),
      segment_ids=zeros(b, t),
      vision_index=np.full((b, t), -1, np.int32),
      patches=np.zeros((b, p, self._processor.patch_bytes), np.uint8),
      patch_segments=zeros(b, p),
      patch_positions=zeros(b, p, self._processor.position_axes),
    )
    for row, (tokens, spans) in enumerate(sequences):
      n, at = len(tokens), 0
      inputs.tokens[row, :n] = tokens
      inputs.positions[row, :n] = self._processor.positions(tokens, spans)
      inputs.segment_ids[row, :n] = 1
      for i, span in enumerate(spans):
        patched = self._processor.patchify(self._store.get(span.image))
        end = at + len(patched.patches)
        inputs.patches[row, at:end] = patched.patches
        inputs.patch_segments[row, at:end] = i + 1
        inputs.patch_positions[row, at:end] = patched.positions
        first = at // self._processor.patches_per_token
        numbers = span.numbers(tokens)
        inputs.vision_index[row, span.offset : span.end] = np.where(
          numbers >= 0, first + numbers, -1
        )
        at = end
    return inputs


# --- a cache filled by hand --------------------------------------------------


@nnx.jit
def _extend(model, cache, token, place, start, vision):
  """One token behind `start` cached ones: its logits [V], and the cache."""
  index = None if vision is None else jnp.zeros((1, 1), jnp.int32)
  hidden, cache = model.extend(
    token[None, None],
    place[None, None],
    start[None],
    jnp.ones(1, jnp.int32),
    cache,
    index,
    vision,
  )
  return model.logits(hidden)[0, 0], cache


@nnx.jit
def _see(model, patches, segments, positions):
  return model.encode_images(patches, segments, positions)


class Replay:
  """One sequence, one token at a time; `model` may be exchanged on the way.

  What is in the cache stays as it is, whatever the weights are by then.
  """

  def __init__(self, model, processor, store, length: int):
    self.model = model
    self.tokens = np.zeros(0, np.int32)
    self._processor, self._store = processor, store
    self._cache = model.init_cache(1, length)
    self._spans: tuple[trajectory.ImageSpan, ...] = ()
    self._read = 0  # Tokens in the cache.

  def show(self, tokens: np.ndarray, spans) -> None:
    """A prompt that begins with `self.tokens`; read when it is needed."""
    np.testing.assert_array_equal(tokens[: len(self.tokens)], self.tokens)
    self.tokens, self._spans = np.asarray(tokens, np.int32), tuple(spans)
    self._logits(len(self.tokens) - 1)  # All but the last, as a prefill does.

  def sample(self, banned: Sequence[int]) -> tuple[int, float]:
    """The likeliest next token and its log-prob; appends it."""
    (row,) = logprobs_of(self._logits(len(self.tokens))[None], banned)
    token = int(row.argmax())
    self.tokens = np.append(self.tokens, np.int32(token))
    return token, float(row[token])

  def _logits(self, end: int) -> np.ndarray | None:
    """Reads up to `end` tokens; logits behind the last."""
    places = self._processor.positions(self.tokens, self._spans)
    logits = None
    for i in range(self._read, end):
      logits, self._cache = _extend(
        self.model,
        self._cache,
        jnp.asarray(self.tokens[i]),
        jnp.asarray(places[i]),
        jnp.asarray(i, jnp.int32),
        self._vision(i),
      )
    self._read = max(self._read, end)
    return None if logits is None else np.asarray(logits)

  def _vision(self, i: int):
    """[1, 1, …]: the vision token that stands at token i; None for text."""
    for span in self._spans:
      if span.offset <= i < span.end:
        patched = self._processor.patchify(self._store.get(span.image))
        seen = _see(
          self.model,
          patched.patches[None],
          np.ones((1, len(patched.patches)), np.int32),
          patched.positions[None],
        )
        return seen[:, i - span.offset, None]
    return None


# --- what a request is sampled from ------------------------------------------


@dataclasses.dataclass(frozen=True)
class Distribution:
  """Of each sampled token.

  Attributes:
    logprobs: float64[S, V]; -inf where the token cannot be drawn.
    clear: bool[S], False where rounding decides what top-k or top-p keeps.
  """

  logprobs: np.ndarray
  clear: np.ndarray


def distribution(
  logits: np.ndarray,
  sampling: policy_client.SamplingParams,
  banned: Sequence[int],
) -> Distribution:
  """From raw logits [S, V]: ban, temperature, min-p, top-k, top-p of the rest.

  By sorting, which the engine's sampler does not do. Greedy requests tell
  log-probs at temperature 1, without truncation.
  """
  x = np.array(logits, np.float64)
  x[:, list(banned)] = -np.inf
  clear = np.ones(len(x), bool)
  if sampling.temperature > 0:
    x /= sampling.temperature
    if sampling.min_p:
      edge = x.max(-1, keepdims=True) + np.log(sampling.min_p)
      clear &= (np.abs(x - edge) > TIE).all(-1)
      x[x < edge] = -np.inf
    order = np.argsort(-x, axis=-1, kind="stable")
    ranked = np.take_along_axis(x, order, axis=-1)
    k = sampling.top_k
    if 0 < k < x.shape[-1]:
      with np.errstate(invalid="ignore"):  # Two that min-p left out.
        clear &= ~(ranked[:, k - 1] - ranked[:, k] <= TIE)
      ranked[:, k:] = -np.inf
    chance = np.exp(ranked - ranked[:, :1])
    chance /= chance.sum(-1, keepdims=True)
    before = np.cumsum(chance, axis=-1) - chance
    if sampling.top_p < 1:
      kept = before < sampling.top_p
      for other in (sampling.top_p - TIE, sampling.top_p + TIE):
        clear &= (kept == (before < other)).all(-1)
      # Equally likely tokens at the edge are kept or left out together.
      last = np.maximum(kept.sum(-1) - 1, 0)[:, None]
      after = np.minimum(last + 1, x.shape[-1] - 1)
      edge = np.take_along_axis(ranked, last, -1)
      clear &= (edge - np.take_along_axis(ranked, after, -1) > TIE)[:, 0]
      ranked[~kept] = -np.inf
    np.put_along_axis(x, order, ranked, axis=-1)
  x -= x.max(-1, keepdims=True)
  with np.errstate(divide="ignore"):
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
  return Distribution(x, clear)


def check_completion(
  logits: np.ndarray,
  tokens: np.ndarray,
  logprobs: np.ndarray,
  sampling: policy_client.SamplingParams,
  banned: Sequence[int],
) -> int:
  """Holds a completion to the raw logits [S, V] in front of its tokens.

  Greedy tokens are the likeliest ones, others can be drawn at all; log-probs
  are equal within 1e-4. Returns how many tokens rounding left undecided.
  """
  want = distribution(logits, sampling, banned)
  rows = np.arange(len(tokens))
  told = want.logprobs[rows, tokens]
  if sampling.temperature == 0:
    best, second = -np.sort(-want.logprobs, axis=-1)[:, :2].T
    clear = best - second > TIE
    np.testing.assert_array_equal(
      np.asarray(tokens)[clear], want.logprobs.argmax(-1)[clear]
    )
    np.testing.assert_allclose(told, best, atol=TIE)
  else:
    clear = want.clear
    assert np.isfinite(told[clear]).all(), "a token that was left out"
  np.testing.assert_allclose(
    np.asarray(logprobs)[clear], told[clear], atol=1e-4, rtol=0
  )
  return int((~clear).sum())
