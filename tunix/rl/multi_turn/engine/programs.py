"""Compiles and calls the engine's device programs, each of a fixed shape.

`encode` turns patches into vision tokens and scatters them into a pool,
`prefill` appends prompt tokens to rows' KV caches, `decode` samples several
tokens a row in one loop. A row's cache lies in pages of a fixed number of
tokens, which the caller names. Each program is compiled ahead of time for the
(rows, tokens, window) buckets of its calls; a call of another shape is compiled
on the spot and counted.

Promises: KV cache and vision pool are donated, hence updated in place;
parameters never are. On a mesh, the rows of a call are split into as many
blocks as there are shards, and a row's pages and vision tokens lie in the shard
of its block. A program reads and writes only the pages of the first
`window` positions of its rows; page 0 stays zero. A policy that reads pages by
itself gets them where they lie; for any other one, the rows' pages are laid
side by side before a call's first step and written back after its last.

Does not decide what runs when, or know sessions; not thread-safe, except for
`compile`.

Axis names: R = rows of a call, T = tokens of a row, K = tokens of a decode
call, N = pages of a row, S = images of a call, P = patches of an image,
F = bytes of a patch, V = vision tokens of an image, W = 32-bit words of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import Any, Callable, cast, NamedTuple, Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import drafts as drafts_lib
from tunix.rl.multi_turn.engine import sampler
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import compiling

MAX_STOP_TOKENS = 8

DECODE_ROW = np.dtype(
  [
    ("token", np.int32),  # The last one, which the cache does not hold yet.
    ("vision", np.int32),  # Its place in the vision pool; -1: a text token.
    ("position", np.int32, (3,)),  # Its rotary position.
    ("next_position", np.int32),  # Of the first token to be sampled.
    ("start", np.int32),  # Tokens that the cache holds.
    ("remaining", np.int32),  # Tokens to be sampled at most; 0: the row rests.
    ("index", np.int32),  # Draws so far.
    ("key", np.uint32, (2,)),  # Of the row's random numbers.
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("frequency_penalty", np.float32),
    ("presence_penalty", np.float32),
    ("top_k", np.int32),
    ("stops", np.int32, (MAX_STOP_TOKENS,)),  # End the row; -1: none.
  ]
)
"""A row of a decode call."""


@functools.lru_cache(maxsize=None)
def prefill_row(tokens: int) -> np.dtype:
  """Returns the type of a row of a prefill call of `tokens` tokens.

  start: tokens that the cache holds. length: real ones among the new; 0
  changes nothing. tokens, positions: the new ones, with their rotary
  positions. vision: their places in the vision pool, -1 for text.
  """
  return np.dtype(
    [
      ("start", np.int32),
      ("length", np.int32),
      ("tokens", np.int32, (tokens,)),
      ("vision", np.int32, (tokens,)),
      ("positions", np.int32, (tokens, 3)),
    ]
  )


def _put_at(all_RK, new, live_R, step, count_R, width: int):
  """Writes a step's results, [R * D, …], behind those of each row so far."""
  if width == 1:  # A row that runs has a token of each step.
    return all_RK.at[:, step].set(
      jnp.where(live_R, new, 0) if new.ndim == 1 else new
    )
  new_RD = new.reshape(-1, width, *new.shape[1:])
  return drafts_lib.write(all_RK, new_RD, live_R, count_R)


def words(rows_R: np.ndarray) -> np.ndarray:
  """Returns int32[R, W], the memory of contiguous rows.

  One array crosses to the device at once; numpy copies rows some times faster
  in words than field by field.
  """
  return rows_R.view(np.int32).reshape(len(rows_R), -1)


def pick(
  rows: np.ndarray, index_A: np.ndarray, to_A: np.ndarray, count: int
) -> np.ndarray:
  """Returns `count` rows, of which rows `to` copy the ones at `index`.

  The others are zeros: rows at rest.
  """
  picked_RW = np.zeros((count, rows.itemsize // 4), np.int32)
  picked_RW[to_A] = words(rows)[index_A]
  return picked_RW.view(rows.dtype)[:, 0]


def _fields(words_RW: jax.Array, row: np.dtype) -> dict[str, jax.Array]:
  """Returns the fields of a program's rows by name, [R, …] each."""
  fields = {}
  for name, (kind, start, *_) in (row.fields or {}).items():
    part = words_RW[:, start // 4 : (start + kind.itemsize) // 4]
    part = lax.bitcast_convert_type(part, kind.base)
    fields[name] = part.reshape(len(part), *kind.shape)
  return fields


@dataclasses.dataclass(frozen=True)
class Variant:
  """One compiled shape.

  Attributes:
    kind: "encode", "prefill", "decode" or "copy".
    rows: images of an encode call, pages of a copy, sequences of the others.
    tokens: patches an image, or tokens a row; a page's of a copy.
    window: positions of a row's cache that are read; 0 for encode and copy.
    drafts: tokens that a step of a decode call drafts for each row.
    details: a decode call that returns `sampler.Details`.
    masked: a decode call whose rows have masks of tokens.
    penalized: a decode call that lowers the logits of sampled tokens.
  """

  kind: str
  rows: int
  tokens: int
  window: int = 0
  drafts: int = 0
  details: bool = False
  masked: bool = False
  penalized: bool = False

  @property
  def features(self) -> tuple[bool, ...]:
    """Whether the call needs each of `config.FEATURES`."""
    return self.details, self.masked, self.penalized


class Decoded(NamedTuple):
  """Tokens that a decode call has sampled.

  Attributes:
    tokens: int32[R, K].
    logprobs: float32[R, K].
    counts: int32[R], tokens that each row sampled.
    steps: steps that ran.
    row_steps: steps in which a row sampled, summed over the rows.
    drafted: Tokens that were drafted, within the rows' limits.
    entropies: float32[R, K], see `sampler.entropy`; None unless the programs
      make them.
    details: float32[R, K], int32[R, K, 20] and float32[R, K, 20], see
      `sampler.Details`; None unless asked for.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  counts: np.ndarray
  steps: int
  row_steps: int
  drafted: int
  entropies: np.ndarray | None
  details: sampler.Details | None


class Programs:
  """Compiles programs over a policy's `DeviceState` and calls them.

  Attributes:
    state: weights, KV cache and vision pool.
    banned: bool[vocabulary], True where a token is never sampled.
    entropies: decode calls return entropies.
    compile_count: programs compiled so far.
    compile_seconds: wall seconds that this took, summed over threads.
  """

  def __init__(
    self,
    state: device_state.DeviceState,
    *,
    banned_token_ids: Sequence[int] = (),
    entropies: bool = False,
  ):
    """Args:

      state: the buffers.
      banned_token_ids: never sampled.
      entropies: every decode call returns them.

    Raises:
      ValueError: the policy has no such token, or none is left to sample.
    """
    self.state = state
    self.entropies = entropies
    self.banned = np.zeros(state.vocabulary, bool)
    for token in banned_token_ids:
      if not 0 <= token < state.vocabulary:
        raise ValueError(
          f"banned_token_ids holds {token}; the policy's vocabulary is"
          f" [0, {state.vocabulary})"
        )
      self.banned[token] = True
    if self.banned.all():
      raise ValueError("banned_token_ids leaves no token to sample")
    self.compile_count = 0
    self.compile_seconds = 0.0
    self._compiled: dict[Variant, Callable[..., Any]] = {}
    self._lock = threading.Lock()

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
    `vision_tokens` or more is dropped (padding). Places are those of the
    row's own shard.
    """
    images, patches = real_SP.shape
    state = self.state
    state.pool = self._program(Variant("encode", images, patches))(
      state.params,
      state.pool,
      patches_SPF,
      real_SP,
      positions_SPA,
      destination_SV,
    )

  def copy(self, sources_R: np.ndarray, targets_R: np.ndarray) -> None:
    """Copies pages of the KV cache, each within its row's shard.

    Args:
      sources_R: int32.
      targets_R: int32, none of them a source; those out of range are dropped.
    """
    state = self.state
    variant = Variant("copy", len(sources_R), state.page_size)
    state.cache = self._program(variant)(state.cache, sources_R, targets_R)

  def prefill(self, pages_RN: np.ndarray, rows_R: np.ndarray) -> None:
    """Appends tokens to rows' caches.

    Args:
      pages_RN: int32, each row's pages; all of them are the window.
      rows_R: Rows of the type `prefill_row`.
    """
    state = self.state
    (tokens,) = rows_R.dtype["tokens"].shape
    window = pages_RN.shape[1] * state.page_size
    program = self._program(Variant("prefill", len(rows_R), tokens, window))
    state.cache = program(
      state.params, state.cache, state.pool, pages_RN, words(rows_R)
    )

  def decode(
    self,
    pages_RN: np.ndarray,
    rows_R: np.ndarray,
    most: int,
    *,
    details: bool = False,
    allowed: np.ndarray | None = None,
    sampled: np.ndarray | None = None,
    drafts: int = 0,
    texts: np.ndarray | None = None,
  ) -> Decoded:
    """Samples up to `most` tokens a row.

    Args:
      pages_RN: int32; room for start + K tokens of every row that runs.
      rows_R: Rows of the type DECODE_ROW.
      most: K.
      details: return `Decoded.details`.
      allowed: uint32[R, `mask_words`], a bit for each token that may be
        sampled; None allows every token that is not banned.
      sampled: int32[R, window], the tokens that each row has sampled in
        earlier calls, then -1; None where no row has a penalty.
      drafts: Tokens to draft at each step; K is a multiple of 1 + drafts. Not
        with `details`, `allowed` or `sampled`.
      texts: int32[R, RECENT + window + K], see `drafts.Drafter.texts`; with
        drafts.
    """
    state = self.state
    window = pages_RN.shape[1] * state.page_size
    features = details, allowed is not None, sampled is not None
    variant = Variant("decode", len(rows_R), most, window, drafts, *features)
    optional = {"allowed": allowed, "sampled": sampled, "texts": texts}
    state.cache, *out = self._program(variant)(
      state.params,
      state.cache,
      state.pool,
      self.banned,
      pages_RN,
      words(rows_R),
      {k: array for k, array in optional.items() if array is not None},
    )
    tokens, logprobs, counts, steps, rows, drafted, *more = jax.device_get(out)
    ran = int(steps), int(rows), int(drafted)
    return Decoded(tokens, logprobs, counts, *ran, *more)

  @property
  def mask_words(self) -> int:
    """Words of 32 bits that hold one for each token."""
    return -(-self.state.vocabulary // 32)

  # --- compilation -----------------------------------------------------------

  def compile(self, variant: Variant) -> None:
    """Compiles `variant` unless that is done; may run in any thread."""
    with self._lock:
      if variant in self._compiled:
        return
    started = time.perf_counter()
    options: dict[str, Any] | None = compiling.compiler_options()
    compiled = self.lower(variant).compile(options)
    with self._lock:
      if variant not in self._compiled:
        self._compiled[variant] = compiled
        self.compile_count += 1
        self.compile_seconds += time.perf_counter() - started

  def lower(self, variant: Variant) -> jax.stages.Lowered:
    """Returns a program before it is compiled."""
    build = {
      "encode": self._build_encode,
      "prefill": self._build_prefill,
      "decode": self._build_decode,
      "copy": self._build_copy,
    }[variant.kind]
    return build(variant)

  @property
  def compiled(self) -> frozenset[Variant]:
    with self._lock:
      return frozenset(self._compiled)

  def _program(self, variant: Variant) -> Callable[..., Any]:
    program = self._compiled.get(variant)
    if program is None:
      self.compile(variant)
      program = self._compiled[variant]
    return program

  def _build_encode(self, variant: Variant) -> jax.stages.Lowered:
    images, patches = variant.rows, variant.tokens
    state = self.state

    def keep(pool_leaf, new, destination):
      flat = destination.reshape(-1)
      return pool_leaf.at[0, flat].set(
        new.reshape(-1, *new.shape[2:]), mode="drop"
      )

    if state.row_place is not None:
      rows = state.row_place.spec
      keep = jax.shard_map(
        keep,
        mesh=state.row_place.mesh,
        in_specs=(rows, rows, rows),
        out_specs=rows,
        check_vma=False,
      )

    def encode(params, pool, patches, real, positions, destination):
      vision = state.merge(params).encode_images(patches, real, positions)
      return jax.tree.map(
        lambda pool_leaf, new: keep(pool_leaf, new, destination), pool, vision
      )

    return state.jit(encode, state.row_place, donate_argnums=1).lower(
      state.params,
      state.pool_shape,
      *state.encode_shapes(images, patches),
      state.rows_shape(
        jnp.int32, images, patches // state.processor.patches_per_token
      ),
    )

  def _build_copy(self, variant: Variant) -> jax.stages.Lowered:
    state = self.state
    assert state.layout is not None
    pages = state.rows_shape(jnp.int32, variant.rows)
    return state.jit(
      state.layout.copy, state.cache_place, donate_argnums=0
    ).lower(state.cache_shape, pages, pages)

  def _build_prefill(self, variant: Variant) -> jax.stages.Lowered:
    state, row = self.state, prefill_row(variant.tokens)

    def prefill(params, cache, pool, pages, words_RW):
      rows = _fields(words_RW, row)
      extend, part = self._extend(
        state.merge(params), cache, pages, rows["start"]
      )
      _, part = extend(
        rows["tokens"],
        rows["positions"],
        rows["start"],
        rows["length"],
        part,
        rows["vision"],
        pool,
      )
      return self._put(
        cache, part, pages, rows["start"], rows["length"], variant.tokens
      )

    return state.jit(prefill, state.cache_place, donate_argnums=1).lower(
      state.params,
      state.cache_shape,
      state.pool_shape,
      self._pages_shape(variant),
      state.rows_shape(jnp.int32, variant.rows, row.itemsize // 4),
    )

  def _build_decode(self, variant: Variant) -> jax.stages.Lowered:
    state, most, width = self.state, variant.tokens, 1 + variant.drafts

    def decode(params, cache, pool, banned, pages, words_RW, optional):
      model = state.merge(params)
      rows = _fields(words_RW, DECODE_ROW)
      if variant.masked:
        banned = banned | self._masked(optional["allowed"])
      extend, part = self._extend(model, cache, pages, rows["start"])
      draw = self._sampler(rows, banned, variant)
      # The place of the last token in the text that drafts come from.
      place_R = drafts_lib.RECENT + rows["start"]

      def body(carry):
        (
          step,
          ran,
          drafted,
          part,
          token,
          vision,
          position,
          count,
          live,
          out,
          times,
          text,
        ) = carry
        # 1. Feed each row's last token, and drafts of the next tokens.
        budget = jnp.where(live, rows["remaining"] - count, 0)
        behind = jnp.zeros((variant.rows, 0), jnp.int32)
        fed = token[:, None], position[:, None], vision[:, None]
        if variant.drafts:
          behind = drafts_lib.propose(text, place_R + count, variant.drafts)
          fed = drafts_lib.feed(*fed, behind, rows["next_position"] + count)
        tokens, positions, visions = fed
        hidden, part = extend(
          tokens,
          positions,
          rows["start"] + count,
          jnp.minimum(budget, width),
          part,
          visions,
          pool,
        )
        # 2. Draw a token after each of them; count draws after right drafts.
        flat = hidden.reshape(-1, hidden.shape[-1])
        drawn, logprob, *more = draw(model.logits(flat), count, times)
        times = self._counted(times, drawn[:, None], live[:, None])
        drawn_RD = drawn.reshape(-1, width)
        new = drafts_lib.accepted(drawn_RD, behind, rows["stops"], budget)
        # 3. Beyond a row's count, nothing is read.
        out = jax.tree.map(
          lambda all_RK, x: _put_at(all_RK, x, live, step, count, width),
          out,
          (drawn, logprob, *more),
        )
        if variant.drafts:
          text = drafts_lib.write(text, drawn_RD, live, place_R + count + 1)
        last = jnp.take_along_axis(
          drawn_RD, jnp.maximum(new - 1, 0)[:, None], axis=1
        )
        token = jnp.where(live, last[:, 0], token)
        vision = jnp.where(live, -1, vision)
        count, ran = count + new, ran + live.sum()
        drafted += drafts_lib.count(behind, budget)
        position = jnp.where(
          live[:, None], (rows["next_position"] + count - 1)[:, None], position
        )
        live &= (count < rows["remaining"]) & ~jnp.any(
          rows["stops"] == last, axis=-1
        )
        return (
          step + 1, ran, drafted, part, token, vision, position, count, live,
          out, times, text,
        )  # fmt: skip

      carry = (
        jnp.int32(0),
        jnp.int32(0),
        jnp.int32(0),
        part,
        rows["token"],
        rows["vision"],
        rows["position"],
        jnp.zeros(variant.rows, jnp.int32),
        rows["remaining"] > 0,
        self._outputs(variant),
        self._times(variant, optional),
        optional.get("texts"),
      )
      step, ran, drafted, part, _, _, _, count, _, out, *_ = lax.while_loop(
        lambda c: (c[0] < most // width) & jnp.any(c[8]), body, carry
      )
      cache = self._put(cache, part, pages, rows["start"], count, most)
      tokens, logprobs, entropies, details = out
      ran_in = step, ran, drafted
      return cache, tokens, logprobs, count, *ran_in, entropies, details

    optional = {}
    if variant.masked:
      optional["allowed"] = state.rows_shape(
        jnp.uint32, variant.rows, self.mask_words
      )
    if variant.penalized:
      optional["sampled"] = state.rows_shape(
        jnp.int32, variant.rows, variant.window
      )
    if variant.drafts:
      columns = drafts_lib.RECENT + variant.window + most
      optional["texts"] = state.rows_shape(jnp.int32, variant.rows, columns)
    places = (state.cache_place, *(state.place,) * 8)
    return state.jit(decode, places, donate_argnums=1).lower(
      state.params,
      state.cache_shape,
      state.pool_shape,
      state.shape(jnp.bool_, state.vocabulary),
      self._pages_shape(variant),
      state.rows_shape(jnp.int32, variant.rows, DECODE_ROW.itemsize // 4),
      optional,
    )

  # --- parts of the programs -------------------------------------------------

  def _pages_shape(self, variant: Variant) -> jax.ShapeDtypeStruct:
    return self.state.rows_shape(
      jnp.int32, variant.rows, variant.window // self.state.page_size
    )

  def _masked(self, allowed: jax.Array) -> jax.Array:
    """Returns bool[R, vocabulary]: tokens whose bit is not set."""
    token = jnp.arange(self.state.vocabulary)
    bits = allowed[:, token // 32] >> (token % 32).astype(jnp.uint32)
    return bits & 1 == 0

  def _times(self, variant: Variant, optional: dict[str, jax.Array]):
    """Returns float32[R, vocabulary], how often each row has sampled each
    token; None where no row has a penalty."""
    if not variant.penalized:
      return None
    sampled_RT = optional["sampled"]
    zeros = jnp.zeros((variant.rows, self.state.vocabulary), jnp.float32)
    return self._counted(zeros, sampled_RT, sampled_RT >= 0)

  def _counted(self, times_RV, tokens_RT: jax.Array, real_RT: jax.Array):
    """Adds each row's real tokens to its counts, which may be None."""
    if times_RV is None:
      return None
    row_R1 = jnp.arange(len(times_RV))[:, None]
    return times_RV.at[row_R1, jnp.maximum(tokens_RT, 0)].add(
      real_RT.astype(jnp.float32)
    )

  def _sampler(self, rows: dict[str, jax.Array], banned, variant: Variant):
    """(logits, draws of this call so far, `_times`) -> next draws.

    Logits are [R * D, V]: behind the last token of each row and its drafts.
    """
    truncated = jnp.any(
      (rows["remaining"] > 0)
      & (rows["temperature"] > 0)
      & ((rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0))
    )
    penalties = rows["frequency_penalty"], rows["presence_penalty"]
    width = 1 + variant.drafts
    wide = lambda name: jnp.repeat(rows[name], width, axis=0)

    def draw(logits, count, times):
      index = (rows["index"] + count)[:, None] + jnp.arange(width)
      return sampler.sample(
        logits,
        banned,
        wide("key"),
        index.reshape(-1),
        wide("temperature"),
        wide("top_k"),
        wide("top_p"),
        wide("min_p"),
        truncated,
        None if times is None else sampler.penalty(times, *penalties),
        details=variant.details,
        entropies=self.entropies,
      )

    return draw

  def _outputs(self, variant: Variant):
    """Zeros for the results of each step, [R, K, …], as `sampler.sample`'s."""
    shape = variant.rows, variant.tokens
    details = None
    if variant.details:
      k = min(sampler.MAX_TOP_LOGPROBS, self.state.vocabulary)
      details = sampler.Details(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, k), jnp.int32),
        jnp.zeros((*shape, k), jnp.float32),
      )
    return (
      jnp.zeros(shape, jnp.int32),
      jnp.zeros(shape, jnp.float32),
      jnp.zeros(shape, jnp.float32) if self.entropies else None,
      details,
    )

  def _extend(
    self,
    model: base.Policy,
    cache: object,
    pages_RN: jax.Array,
    starts: jax.Array,
  ):
    """The policy's `extend`, and the cache to give it first."""
    if self.state.layout is not None:
      return model.extend, self.state.layout.take(cache, pages_RN, starts)
    paged = cast(device_state.PagedPolicy, model)

    def extend(tokens, positions, starts, lengths, cache, vision, pool):
      return paged.extend_pages(
        tokens, positions, starts, lengths, cache, pages_RN, vision, pool
      )

    return extend, cache

  def _put(self, cache, part, pages_RN, starts, counts, most: int):
    """Writes back `_extend`'s new positions, `most` a row."""
    if self.state.layout is None:
      return part
    return self.state.layout.put(cache, part, pages_RN, starts, counts, most)
