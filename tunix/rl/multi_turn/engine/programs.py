"""The engine's device side: buffers, and programs of fixed shape over them.

Three programs: `encode` turns patches into vision tokens and scatters them
into a pool, `prefill` appends prompt tokens to rows' KV caches, `decode`
samples several tokens a row in one loop. A row's cache lies in pages of a
fixed number of tokens, which its caller names. Each is compiled ahead of time
for the (rows, tokens, window) buckets it is called with, so that after
`compile` has seen every bucket nothing is ever compiled again: a call whose
shape was not announced is compiled on the spot and counted.

Promises: KV cache and vision pool are donated, hence updated in place;
parameters are never donated. A program reads and writes only the pages of the
first `window` positions of its rows; page 0 stays zero. A policy that reads
pages by itself is given them where they lie; for any other one, the rows' pages
are laid side by side before a call's first step and written back after its
last.

Does not decide what runs when, or know sessions; not thread-safe, except for
`compile`.

Axis names: R = rows of a call, T = tokens of a row, K = steps of a decode
call, N = pages of a row, S = images of a call, P = patches of an image,
F = bytes of a patch, V = vision tokens of an image.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, Callable, NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.engine import parameters
from tunix.rl.multi_turn.engine import sampler
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import kernels

MAX_STOP_TOKENS = 8

# Columns of the int32 table that describes rows to `decode`.
TOKEN, VISION, POS_T, POS_H, POS_W, NEXT_POS = 0, 1, 2, 3, 4, 5
START, REMAINING, INDEX, KEY_HI, KEY_LO = 6, 7, 8, 9, 10
# Floats are bit patterns.
TEMPERATURE, TOP_P, MIN_P, TOP_K, STOP = 11, 12, 13, 14, 15
COLUMNS = STOP + MAX_STOP_TOKENS


@dataclasses.dataclass(frozen=True)
class Variant:
  """One compiled shape.

  Attributes:
    kind: "encode", "prefill" or "decode".
    rows: images of an encode call, sequences of the others.
    tokens: patches an image, tokens a row, or steps.
    window: positions of a row's cache that are read; 0 for encode.
    details: a decode call that says more of what it samples from.
    masked: a decode call whose rows have masks of tokens.
  """

  kind: str
  rows: int
  tokens: int
  window: int = 0
  details: bool = False
  masked: bool = False


class Decoded(NamedTuple):
  """What a decode call has sampled.

  Attributes:
    tokens: int32[R, K].
    logprobs: float32[R, K].
    counts: int32[R], how many of them each row sampled.
    steps: how many were run.
    entropies: float32[R, K], see `sampler.entropy`; None unless the programs
      make them.
    details: float32[R, K], int32[R, K, 20] and float32[R, K, 20], see
      `sampler.Details`; None unless asked for.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  counts: np.ndarray
  steps: int
  entropies: np.ndarray | None
  details: sampler.Details | None


def _replicated(params: tuple[jax.Array, ...]) -> Any:
  """On every device of the parameters' mesh; None on a single device."""
  for x in params:
    if isinstance(x.sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
          x.sharding.mesh, jax.sharding.PartitionSpec()
      )
  return None


class Programs:
  """Owns parameters, KV cache and vision pool of one policy.

  On one device, or on the mesh where the policy's parameters lie; cache and
  pool are then on each of its devices.
  """

  def __init__(
      self,
      model: base.Policy,
      *,
      slots: int,
      context_length: int,
      pages: int,
      page_size: int,
      banned_token_ids: tuple[int, ...],
      vision_tokens: int,
      patch_bytes: int,
      patches_per_token: int,
      position_axes: int,
      weights: str = "same",
      entropies: bool = False,
  ):
    """Args:

      model: its present parameters are copied, so that its owner may donate
        or update them.
      slots: rows that run at a time.
      context_length: tokens of a sequence.
      pages: of the KV cache, page 0 included.
      page_size: tokens of a page.
      banned_token_ids: never sampled.
      vision_tokens: size of the vision pool in tokens.
      patch_bytes: F.
      patches_per_token: P / V.
      position_axes: numbers that say where a patch is.
      weights: "same" as the model's, or "int8", see `policy.int8`.
      entropies: every decode call tells them.

    Raises:
      ValueError: a setting that cannot be, or not with this policy.
    """
    self.slots = slots
    self.context_length = context_length
    self.pages = pages
    self.page_size = page_size
    self.patch_bytes = patch_bytes
    self.patches_per_token = patches_per_token
    self.position_axes = position_axes
    self.vision_tokens = vision_tokens
    self.entropies = entropies
    self._given = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for path, x in parameters.pure_leaves(nnx.state(model)).items()
    }
    self._required = set(parameters.pure_leaves(nnx.state(model, nnx.Param)))
    self._convert = lambda named: named
    if weights == "int8":
      self._convert = int8.Converter(model)
      model = self._convert.copy()
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    # What was rounded is nobody else's.
    self.params = tuple(
        x if x.dtype == jnp.int8 else jnp.array(x, copy=True) for x in leaves
    )
    named = parameters.pure_leaves(state)
    if len(named) != len(leaves):
      raise ValueError("the policy's parameters do not have unique paths")
    order = {id(x): i for i, x in enumerate(leaves)}
    self._paths = {path: order[id(leaf)] for path, leaf in named.items()}
    self._merge = lambda params: nnx.merge(
        graphdef, jax.tree.unflatten(treedef, params)
    )

    def cache_shape(batch, length):
      return jax.eval_shape(
          lambda p: self._merge(p).init_cache(batch, length), self.params
      )

    n = page_size
    self._place = _replicated(self.params)
    self._reads_pages = getattr(model, "reads_pages", False)
    if self._reads_pages:
      init = lambda p: self._merge(p).init_pages(pages, n)
    else:
      init = lambda p: self._merge(p).init_cache(pages, n)
      self._layout = page_layout.PageLayout(cache_shape, pages, n)
    # Where the policy wants them, else everywhere.
    self._init_cache = (
        jax.jit(init) if self._reads_pages else self._jit(init)
    )
    self.cache = self._init_cache(self.params)
    self._cache_place = jax.tree.map(lambda x: x.sharding, self.cache)
    self._cache_shape = jax.tree.map(
        lambda x: self._shape(x.dtype, *x.shape)
        if self._place is None
        else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        self.cache,
    )
    patches = self._encode_shapes(1, patches_per_token)
    vision = jax.eval_shape(
        lambda p, *a: self._merge(p).encode_images(*a), self.params, *patches
    )
    self._pool_shape = jax.tree.map(
        lambda x: self._shape(x.dtype, 1, vision_tokens, *x.shape[2:]),
        vision,
    )
    self.vocabulary = self._vocabulary()
    banned = np.zeros(self.vocabulary, bool)
    for token in banned_token_ids:
      if not 0 <= token < self.vocabulary:
        raise ValueError(
            f"banned_token_ids holds {token}; the policy's vocabulary is"
            f" [0, {self.vocabulary})"
        )
      banned[token] = True
    if banned.all():
      raise ValueError("banned_token_ids leaves no token to sample")
    self.banned = banned
    self.compile_count = 0
    self.compile_seconds = 0.0
    self._compiled: dict[Variant, Callable[..., Any]] = {}
    self._lock = threading.Lock()
    self.reset()

  # --- buffers ---------------------------------------------------------------

  def reset(self) -> None:
    """Fresh KV cache and vision pool; what they held is gone."""
    self.cache = self.pool = None
    self.cache = self._init_cache(self.params)
    self.pool = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
        self._pool_shape,
    )

  def prepare_params(self, params: Any) -> tuple[jax.Array, ...]:
    """Checks and places new parameters; `set_params` takes the result.

    Args:
      params: an nnx module, an nnx.State (full or Param only) or its pure
        dict. Values are cast to the policy's dtypes and moved to its device,
        never copied when they are already there: the caller must not donate
        or delete them while the engine uses them.

    Raises:
      ValueError: a parameter is missing, unknown, or has another shape.
    """
    named = parameters.checked(params, self._given, self._required)
    new = list(self.params)
    for path, value in self._convert(named).items():
      old = self.params[self._paths[path]]
      if value.dtype != old.dtype:
        value = value.astype(old.dtype)
      new[self._paths[path]] = jax.device_put(value, old.sharding)
    return tuple(new)

  def set_params(self, params: tuple[jax.Array, ...]) -> None:
    self.params = params

  # --- calls -----------------------------------------------------------------

  def encode(
      self,
      patches_SPF: np.ndarray,
      real_SP: np.ndarray,
      positions_SPA: np.ndarray,
      destination_SV: np.ndarray,
  ) -> None:
    """Encodes one image a row into the pool's places `destination`.

    Patches that are not `real` (bool) are padding. A destination of
    `vision_tokens` or more is dropped (padding).
    """
    images, patches = real_SP.shape
    self.pool = self._program(Variant("encode", images, patches))(
        self.params,
        self.pool,
        patches_SPF,
        real_SP,
        positions_SPA,
        destination_SV,
    )

  def prefill(
      self,
      pages_RN: np.ndarray,
      tokens_RT: np.ndarray,
      positions_RT3: np.ndarray,
      vision_RT: np.ndarray,
      starts_R: np.ndarray,
      lengths_R: np.ndarray,
  ) -> None:
    """Appends tokens to rows; their N pages are the window.

    A row of length 0 changes nothing.
    """
    rows, tokens = tokens_RT.shape
    packed = np.concatenate(
        [
            np.stack([starts_R, lengths_R], axis=1),
            tokens_RT,
            vision_RT,
            positions_RT3.reshape(rows, -1),
        ],
        axis=1,
        dtype=np.int32,
    )
    window = pages_RN.shape[1] * self.page_size
    self.cache = self._program(Variant("prefill", rows, tokens, window))(
        self.params, self.cache, self.pool, pages_RN, packed
    )

  def decode(
      self,
      pages_RN: np.ndarray,
      table: np.ndarray,
      steps: int,
      *,
      details: bool = False,
      allowed: np.ndarray | None = None,
  ) -> Decoded:
    """Samples up to `steps` tokens a row.

    Args:
      pages_RN: int32; room for START + K tokens of every row that runs.
      table: int32[R, COLUMNS]; a row with REMAINING 0 rests.
      steps: K.
      details: say more of what is sampled from.
      allowed: uint32[R, `mask_words`], a bit for each token that may be
        sampled; None for all that are not banned.
    """
    window = pages_RN.shape[1] * self.page_size
    masked = allowed is not None
    variant = Variant("decode", len(table), steps, window, details, masked)
    masks = (allowed,) if masked else ()
    self.cache, *out = self._program(variant)(
        self.params, self.cache, self.pool, self.banned, pages_RN, table, *masks
    )
    tokens, logprobs, counts, ran, entropies, told = jax.device_get(out)
    return Decoded(tokens, logprobs, counts, int(ran), entropies, told)

  @property
  def mask_words(self) -> int:
    """Words of 32 bits that hold one for each token."""
    return -(-self.vocabulary // 32)

  # --- compilation -----------------------------------------------------------

  def compile(self, variant: Variant) -> None:
    """Compiles `variant` unless that is done; may run in any thread."""
    with self._lock:
      if variant in self._compiled:
        return
    started = time.perf_counter()
    build = {
        "encode": self._build_encode,
        "prefill": self._build_prefill,
        "decode": self._build_decode,
    }[variant.kind]
    compiled = build(variant).compile(kernels.compiler_options())
    with self._lock:
      if variant not in self._compiled:
        self._compiled[variant] = compiled
        self.compile_count += 1
        self.compile_seconds += time.perf_counter() - started

  @property
  def compiled(self) -> frozenset[Variant]:
    with self._lock:
      return frozenset(self._compiled)

  def _shape(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An array that is not a parameter, and where it lies."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

  def _jit(
      self, function: Callable[..., Any], out: Any = None, **options: Any
  ) -> Any:
    """Programs hand arrays to each other, so all must say where these lie."""
    if self._place is not None:
      options["out_shardings"] = self._place if out is None else out
    return jax.jit(function, **options)

  def _program(self, variant: Variant) -> Callable[..., Any]:
    program = self._compiled.get(variant)
    if program is None:
      self.compile(variant)
      program = self._compiled[variant]
    return program

  def _encode_shapes(self, images: int, patches: int):
    f = self.patch_bytes
    return (
        self._shape(jnp.uint8, images, patches, f),
        self._shape(jnp.bool_, images, patches),
        self._shape(jnp.int32, images, patches, self.position_axes),
    )

  def _vocabulary(self) -> int:
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

    def one_step(params, tokens, positions, starts, lengths):
      model = self._merge(params)
      hidden, _ = model.extend(
          tokens, positions, starts, lengths, model.init_cache(1, 8)
      )
      return model.logits(hidden)

    logits = jax.eval_shape(
        one_step, self.params, ints(1, 1), ints(1, 1, 3), ints(1), ints(1)
    )
    return logits.shape[-1]

  def _build_encode(self, variant: Variant):
    images, patches = variant.rows, variant.tokens
    tokens = patches // self.patches_per_token

    def encode(params, pool, patches, real, positions, destination):
      vision = self._merge(params).encode_images(patches, real, positions)
      flat = destination.reshape(-1)
      return jax.tree.map(
          lambda kept, new: kept.at[0, flat].set(
              new.reshape(-1, *new.shape[2:]), mode="drop"
          ),
          pool,
          vision,
      )

    return self._jit(encode, donate_argnums=1).lower(
        self.params,
        self._pool_shape,
        *self._encode_shapes(images, patches),
        self._shape(jnp.int32, images, tokens),
    )

  def _build_prefill(self, variant: Variant):
    rows, length, window = variant.rows, variant.tokens, variant.window

    def prefill(params, cache, pool, pages, packed):
      starts, lengths = packed[:, 0], packed[:, 1]
      tokens, vision, positions = jnp.split(
          packed[:, 2:], (length, 2 * length), axis=1
      )
      extend, part = self._extend(self._merge(params), cache, pages)
      _, part = extend(
          tokens,
          positions.reshape(rows, length, 3),
          starts,
          lengths,
          part,
          vision,
          pool,
      )
      return self._put(cache, part, pages, starts, lengths, length)

    return self._jit(prefill, self._cache_place, donate_argnums=1).lower(
        self.params,
        self._cache_shape,
        self._pool_shape,
        self._shape(jnp.int32, rows, window // self.page_size),
        self._shape(jnp.int32, rows, 2 + 5 * length),
    )

  def _build_decode(self, variant: Variant):
    rows, steps, window = variant.rows, variant.tokens, variant.window

    def decode(params, cache, pool, banned, pages, table, allowed=None):
      model = self._merge(params)
      if allowed is not None:
        token = jnp.arange(self.vocabulary)
        bits = allowed[:, token // 32] >> (token % 32).astype(jnp.uint32)
        banned = banned | (bits & 1 == 0)
      as_float = lambda x: lax.bitcast_convert_type(x, jnp.float32)
      keys = lax.bitcast_convert_type(
          table[:, KEY_HI : KEY_LO + 1], jnp.uint32
      )
      temperature = as_float(table[:, TEMPERATURE])
      top_p, top_k = as_float(table[:, TOP_P]), table[:, TOP_K]
      min_p = as_float(table[:, MIN_P])
      stops = table[:, STOP:]
      remaining = table[:, REMAINING]
      truncated = jnp.any(
          (remaining > 0)
          & (temperature > 0)
          & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
      )
      next_pos = table[:, NEXT_POS]
      extend, part = self._extend(model, cache, pages)

      def body(carry):
        step, part, token, vision, position, count, live, out = carry
        hidden, part = extend(
            token[:, None],
            position[:, None],
            table[:, START] + count,
            live.astype(jnp.int32),
            part,
            vision[:, None],
            pool,
        )
        logits = model.logits(hidden[:, 0])
        drawn, logprob, entropy, told = sampler.sample(
            logits,
            banned,
            keys,
            table[:, INDEX] + count,
            temperature,
            top_k,
            top_p,
            min_p,
            truncated,
            details=variant.details,
            entropies=self.entropies,
        )
        # Of a row that rests, nobody reads what is beyond its count.
        out = jax.tree.map(
            lambda all_RK, new_R: all_RK.at[:, step].set(new_R),
            out,
            (
                jnp.where(live, drawn, 0),
                jnp.where(live, logprob, 0.0),
                entropy,
                told,
            ),
        )
        token = jnp.where(live, drawn, token)
        position = jnp.where(
            live[:, None], (next_pos + count)[:, None], position
        )
        vision = jnp.where(live, -1, vision)
        count = count + live
        live &= (count < remaining) & ~jnp.any(
            stops == drawn[:, None], axis=-1
        )
        return step + 1, part, token, vision, position, count, live, out

      told = None
      if variant.details:
        k = min(sampler.MAX_TOP_LOGPROBS, self.vocabulary)
        told = sampler.Details(
            jnp.zeros((rows, steps), jnp.float32),
            jnp.zeros((rows, steps, k), jnp.int32),
            jnp.zeros((rows, steps, k), jnp.float32),
        )
      carry = (
          jnp.int32(0),
          part,
          table[:, TOKEN],
          table[:, VISION],
          table[:, POS_T : POS_W + 1],
          jnp.zeros(rows, jnp.int32),
          remaining > 0,
          (
              jnp.zeros((rows, steps), jnp.int32),
              jnp.zeros((rows, steps), jnp.float32),
              jnp.zeros((rows, steps), jnp.float32) if self.entropies else None,
              told,
          ),
      )
      step, part, _, _, _, count, _, out = lax.while_loop(
          lambda c: (c[0] < steps) & jnp.any(c[6]), body, carry
      )
      cache = self._put(cache, part, pages, table[:, START], count, steps)
      tokens, logprobs, entropies, told = out
      return cache, tokens, logprobs, count, step, entropies, told

    masks = ()
    if variant.masked:
      masks = (self._shape(jnp.uint32, rows, self.mask_words),)
    places = (self._cache_place, *(self._place,) * 6)
    return self._jit(decode, places, donate_argnums=1).lower(
        self.params,
        self._cache_shape,
        self._pool_shape,
        self._shape(jnp.bool_, self.vocabulary),
        self._shape(jnp.int32, rows, window // self.page_size),
        self._shape(jnp.int32, rows, COLUMNS),
        *masks,
    )

  # --- pages of the cache ----------------------------------------------------

  def _extend(self, model, cache, pages_RN):
    """The policy's `extend`, and the cache that it is to be given first."""
    if not self._reads_pages:
      return model.extend, self._layout.take(cache, pages_RN)

    def extend(tokens, positions, starts, lengths, cache, vision, pool):
      return model.extend_pages(
          tokens, positions, starts, lengths, cache, pages_RN, vision, pool
      )

    return extend, cache

  def _put(self, cache, part, pages_RN, starts, counts, most):
    """Writes back what `_extend`'s cache has got, `most` positions a row."""
    if self._reads_pages:
      return part
    return self._layout.put(cache, part, pages_RN, starts, counts, most)
