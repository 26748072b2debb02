"""What the engine runs next: admission, prefill, decode, results.

`Scheduler.step` is one round: waiting requests get slots, whatever their
slots' caches lack is prefilled in chunks, and one decode call samples up to K
tokens for every active request. New weights are taken up between rounds.

Promises: a request that cannot be served fails alone; the tokens of a
request depend on its own prompt, seed and the weights, not on who shares the
batch (up to rounding: see `fixed_rows`).

Synchronous and single-threaded; threads, futures and deadlines are the
engine's business.

Axis names: R = rows, T = tokens of a row, K = steps of a decode call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.rollout import programs as programs_lib
from tunix.rl.multi_turn.rollout import slots as slots_lib
from tunix.rl.multi_turn.rollout import vision_pool

P = programs_lib


class EngineError(RuntimeError):
  """The engine, not the request, failed; the message names the cause."""


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Every shape the engine may compile; all tuples ascend.

  Attributes:
    decode_rows: rows of a decode call; more rows go into further calls.
    prefill_rows: rows of a prefill call, likewise.
    tokens: tokens a row of a prefill call; longer suffixes are chunked.
    windows: cache positions a call may touch; the last is the context length.
    images: images of an encode call.
    patches: patches of an image; larger images are refused.
    steps: tokens a decode call samples at most (K).
    fixed_rows: use only the largest rows and images. Windows and chunks follow
      from a request alone; with this all shapes it meets do, whoever shares
      its batch, and equal requests give results equal to the bit.
  """

  decode_rows: tuple[int, ...]
  prefill_rows: tuple[int, ...]
  tokens: tuple[int, ...]
  windows: tuple[int, ...]
  images: tuple[int, ...]
  patches: tuple[int, ...]
  steps: int
  fixed_rows: bool = False

  def __post_init__(self):
    fixed = ("decode_rows", "prefill_rows", "images")
    for name in (*fixed, "tokens", "windows", "patches"):
      value = tuple(sorted(set(getattr(self, name))))
      if not value or value[0] < 1:
        raise ValueError(f"{name} buckets must be positive, got {value}")
      if self.fixed_rows and name in fixed:
        value = value[-1:]
      object.__setattr__(self, name, value)
    if self.steps < 1:
      raise ValueError(f"decode_steps_per_call must be >= 1, got {self.steps}")

  def variants(self) -> list[P.Variant]:
    """All of them, the ones every run needs first."""
    found = []
    for window in reversed(self.windows):
      for rows in reversed(self.decode_rows):
        found.append(P.Variant("decode", rows, self.steps, window))
      for rows in reversed(self.prefill_rows):
        for tokens in reversed(self.tokens):
          if tokens <= window:
            found.append(P.Variant("prefill", rows, tokens, window))
    for patches in self.patches:
      for images in self.images:
        found.append(P.Variant("encode", images, patches))
    return found


class Scheduler:
  """See the module docstring."""

  def __init__(
      self,
      programs: P.Programs,
      processor: base.Processor,
      patches: vision_pool.PatchCache,
      shapes: Shapes,
      *,
      seed: int,
      on_update: str,
      update_policy: str,
  ):
    self.programs = programs
    self.shapes = shapes
    self.counters = slots_lib.Counters()
    self.version = 0
    self._processor = processor
    self._patches = patches
    self._on_update = on_update
    self._update_policy = update_policy
    self._rng = np.random.default_rng(seed)
    self._pool = vision_pool.VisionPool(programs.vision_tokens)
    self.slots = slots_lib.SlotTable(
        programs.slots, programs.context_length, shapes.steps
    )
    self._table = np.zeros((programs.slots, P.COLUMNS), np.int32)
    self._text_token = int(np.argmin(programs.banned))
    # None admits any waiting request, else only these (lockstep).
    self.lot: list[slots_lib.Request] | None = None
    self._weights: tuple[int, Any] | None = None
    self._done: list[slots_lib.Request] = []
    self._poisoned = False  # The caches hold values that are not finite.

  # --- state changes between rounds ------------------------------------------

  @property
  def busy(self) -> bool:
    return any(r is not None for r in self.slots.requests)

  def set_weights(self, version: int, params: Any) -> None:
    """Takes up new weights as soon as the update policy allows."""
    self._weights = (version, params)
    self._apply_weights()

  def _apply_weights(self) -> None:
    if self._weights is None:
      return
    if self._update_policy == "between_turns" and self.busy:
      return
    self.version, params = self._weights
    self._weights = None
    self.programs.set_params(params)
    self.counters.weight_updates += 1
    self._pool.clear()
    if self._on_update == "recompute":
      self._table[:, P.START] = 0

  def cancel(self, request: slots_lib.Request) -> None:
    """Frees what a request holds; its session keeps its slot, idle."""
    if request.outcome is None:
      self.counters.cancelled += 1
      self._end(request, EngineError("cancelled"), deliver=False)

  def release(self, session: str) -> None:
    held = self.slots.sessions.get(session)
    if held is not None and held.request is not None:
      self._end(
          held.request,
          EngineError(f"session {session!r} was released during its request"),
      )
    self.slots.release(session)

  def recover(self, error: BaseException) -> None:
    """After a device failure: fails what was active, starts from empty."""
    for request in self.slots.active:
      wrapped = EngineError(
          f"the engine failed at {type(error).__name__}: {error}"
      )
      wrapped.__cause__ = error
      self._end(request, wrapped)
    self._drop_caches()
    self.counters.recoveries += 1

  def _drop_caches(self) -> None:
    """Empties the device; active requests are prefilled again."""
    self._table[:, P.START] = 0
    self._pool.clear()
    self.programs.reset()

  def take_done(self) -> list[slots_lib.Request]:
    """Requests that have an outcome now, to be delivered."""
    done, self._done = self._done, []
    return done

  def step(self) -> None:
    """One round; leaves finished requests for `take_done`."""
    self._apply_weights()
    if self._weights is None:  # Else the running ones finish first.
      self._admit()
    self._prefill()
    self._decode()
    if self._poisoned:
      # A NaN in the cache outlives its owner: zero times NaN is NaN.
      self._poisoned = False
      self._drop_caches()

  # --- admission -------------------------------------------------------------

  def _admit(self) -> None:
    for request in list(self.slots.waiting):
      if self.lot is not None and request not in self.lot:
        continue
      if self.slots.place(request) is None:
        continue
      try:
        self._load(request)
      except Exception as error:  # pylint: disable=broad-except
        self._end(request, error)

  def _load(self, request: slots_lib.Request) -> None:
    """Writes the slot's table row and finds what is already cached."""
    slot, prompt = request.slot, request.prompt
    sampling = request.sampling
    n = len(prompt)
    session = self.slots.sessions[request.session]
    row = self._table[slot]
    tokens = self.slots.tokens[slot]
    # The slot may have belonged to another session: its cache is not ours.
    cached = int(row[P.START]) if session.spans is not None else 0
    shared = slots_lib.common_prefix(
        tokens[:cached], session.spans or (), prompt.tokens, prompt.images
    )
    start = min(shared, n - 1)
    row[P.START] = start
    row[P.REMAINING] = 0
    tokens[:n] = prompt.tokens
    session.spans = prompt.images
    request.length = n
    request.reused = start
    request.admitted = time.monotonic()
    self._locate(request, start)
    seed = sampling.seed
    if seed is None:
      seed = int(self._rng.integers(0, 1 << 64, dtype=np.uint64))
    key = np.array([seed >> 32, seed], object) & 0xFFFFFFFF
    row[P.KEY_HI : P.KEY_LO + 1] = key.astype(np.uint32).view(np.int32)
    row[P.TOKEN] = prompt.tokens[-1]
    row[P.VISION] = -1
    offset = n - 1 - request.positions_from
    row[P.POS_T : P.POS_W + 1] = request.positions[offset]
    row[P.NEXT_POS] = request.positions[offset + 1, 0]
    row[P.INDEX] = 0
    row[[P.TEMPERATURE, P.TOP_P]] = np.array(
        [sampling.temperature, sampling.top_p], np.float32
    ).view(np.int32)
    row[P.TOP_K] = min(sampling.top_k, self.programs.vocabulary)
    row[P.STOP :] = -1
    stops = sampling.stop_token_ids
    row[P.STOP : P.STOP + len(stops)] = stops
    row[P.REMAINING] = min(
        sampling.max_new_tokens, self.programs.context_length - n
    )
    self.counters.prompt_tokens += n
    self.counters.unique_prompt_tokens += max(
        0, n - (min(session.length, n) if shared >= cached else shared)
    )
    session.length = n

  def _locate(self, request: slots_lib.Request, start: int) -> None:
    """Rotary positions from token `start` to one past the prompt."""
    prompt = request.prompt
    extended = np.append(prompt.tokens, np.int32(self._text_token))
    positions = np.asarray(
        self._processor.positions(extended, prompt.images, start), np.int32
    )
    if positions.shape != (len(extended) - start, 3):
      raise ValueError(
          f"processor.positions returned shape {positions.shape} for tokens"
          f" {start} to {len(extended)}"
      )
    request.positions, request.positions_from = positions, start

  # --- prefill ---------------------------------------------------------------

  def _prefill(self) -> None:
    started = time.perf_counter()
    vision = self.counters.seconds_vision
    while True:
      # By (chunk, window), which follow from a request alone.
      groups: dict[tuple[int, int], list[slots_lib.Request]] = {}
      for request in self.slots.active:
        start = int(self._table[request.slot, P.START])
        need = request.length - 1 - start
        if need > 0:
          size = slots_lib.bucket(self.shapes.tokens, need)
          end = max(size, start + min(need, size))
          window = slots_lib.bucket(self.shapes.windows, end)
          groups.setdefault((size, window), []).append(request)
      if not groups:
        break
      size, window = max(groups)
      most = self.shapes.prefill_rows[-1]
      for i in range(0, len(groups[size, window]), most):
        self._prefill_chunk(groups[size, window][i : i + most], size, window)
    jax.block_until_ready(self.programs.cache)
    self.counters.seconds_prefill += time.perf_counter() - started - (
        self.counters.seconds_vision - vision
    )

  def _prefill_chunk(
      self, requests: Sequence[slots_lib.Request], size: int, window: int
  ) -> None:
    """Appends the next up to `size` tokens of each of these requests."""
    rows = []
    spans: list[trajectory.ImageSpan] = []
    for request in requests:
      start = int(self._table[request.slot, P.START])
      end = min(start + size, request.length - 1)
      own = [
          s for s in request.prompt.images if s.offset < end and s.end > start
      ]
      if rows and not self._pool.fits(spans + own):
        continue  # In the next call.
      if own and not self._check_images(request, own):
        continue
      spans += own
      rows.append((request, start, end, own))
    if not rows:
      return
    self._ensure_vision(spans)
    count = slots_lib.bucket(self.shapes.prefill_rows, len(rows))
    full = count == self.programs.slots
    slots = np.full(count, rows[0][0].slot, np.int32)
    if full:
      slots = np.arange(count, dtype=np.int32)
    starts = self._table[slots, P.START]
    lengths = np.zeros(count, np.int32)
    tokens = np.zeros((count, size), np.int32)
    positions = np.zeros((count, size, 3), np.int32)
    vision = np.full((count, size), -1, np.int32)
    for i, (request, start, end, own) in enumerate(rows):
      r = request.slot if full else i
      slots[r], starts[r], lengths[r] = request.slot, start, end - start
      tokens[r, : end - start] = self.slots.tokens[request.slot, start:end]
      positions[r, : end - start] = self._positions(request, start, end)
      for span in own:
        a, b = max(start, span.offset), min(end, span.end)
        places = self._pool.places(span.image.sha256)
        vision[r, a - start : b - start] = places[
            a - span.offset : b - span.offset
        ]
    self.programs.prefill(
        slots, tokens, positions, vision, starts, lengths, window
    )
    for request, start, end, _ in rows:
      self._table[request.slot, P.START] = end
      request.prefilled += end - start
    self.counters.prefill_calls += 1
    self.counters.prefill_places += count * size
    self.counters.prefilled_tokens += int(lengths.sum())

  def _positions(
      self, request: slots_lib.Request, start: int, end: int
  ) -> np.ndarray:
    """int32[end - start, 3]; sampled tokens count on from the prompt."""
    if start < request.positions_from:
      self._locate(request, start)
    known = request.positions[:-1]
    first = request.positions_from
    n = len(request.prompt)
    if end <= n:
      return known[start - first : end - first]
    after = int(request.positions[-1, 0]) + np.arange(end - n, dtype=np.int32)
    joined = np.concatenate([known, np.repeat(after[:, None], 3, axis=1)])
    return joined[start - first : end - first]

  # --- vision ----------------------------------------------------------------

  def _check_images(
      self,
      request: slots_lib.Request,
      spans: Sequence[trajectory.ImageSpan],
  ) -> bool:
    """Fails the request, and says so, when an image of it cannot be had."""
    try:
      for span in spans:
        if span.image.sha256 in self._pool:
          continue
        patched = self._patches.get(span)
        if len(patched.patches) > self.shapes.patches[-1]:
          raise ValueError(
              f"an image of {span.image.width}x{span.image.height} has"
              f" {len(patched.patches)} patches, more than the engine's largest"
              f" patch bucket, {self.shapes.patches[-1]}; raise patch_buckets"
          )
      if not self._pool.fits(spans):
        raise ValueError(
            f"{len(spans)} images of one chunk do not fit the vision pool of"
            f" {self._pool.capacity} tokens; raise vision_cache_tokens"
        )
      return True
    except Exception as error:  # pylint: disable=broad-except
      self._end(request, error)
      return False

  def _ensure_vision(self, spans: Sequence[trajectory.ImageSpan]) -> None:
    """Encodes those images whose vision tokens are not in the pool."""
    if not spans:
      return
    started = time.perf_counter()
    distinct = len({s.image.sha256 for s in spans})
    new = self._pool.reserve(spans)
    self.counters.vision_cache_hits += distinct - len(new)
    groups: dict[int, list[trajectory.ImageSpan]] = {}
    try:
      for span in new:
        patched = self._patches.get(span)
        size = slots_lib.bucket(self.shapes.patches, len(patched.patches))
        groups.setdefault(size, []).append(span)
      for size, group in groups.items():
        most = self.shapes.images[-1]
        for i in range(0, len(group), most):
          self._encode(group[i : i + most], size)
      jax.block_until_ready(self.programs.pool)
    except BaseException:
      for span in new:
        self._pool.forget(span.image.sha256)
      raise
    self.counters.seconds_vision += time.perf_counter() - started

  def _encode(
      self, spans: Sequence[trajectory.ImageSpan], size: int
  ) -> None:
    count = slots_lib.bucket(self.shapes.images, len(spans))
    programs = self.programs
    patches = np.zeros((count, size, programs.patch_bytes), np.uint8)
    segments = np.zeros((count, size), np.int32)
    positions = np.zeros((count, size, programs.position_axes), np.int32)
    destination = np.full(
        (count, size // programs.patches_per_token),
        programs.vision_tokens,
        np.int32,
    )
    for i, span in enumerate(spans):
      patched = self._patches.get(span)
      n = len(patched.patches)
      patches[i, :n] = patched.patches
      segments[i, :n] = 1
      positions[i, :n] = patched.positions
      places = self._pool.places(span.image.sha256)
      destination[i, : len(places)] = places
    programs.encode(patches, segments, positions, destination)
    self.counters.images_encoded += len(spans)

  # --- decode ----------------------------------------------------------------

  def _decode(self) -> None:
    groups: dict[int, list[slots_lib.Request]] = {}
    for request in self._with_pending_images():
      row = self._table[request.slot]
      end = row[P.START] + min(row[P.REMAINING], self.shapes.steps)
      window = slots_lib.bucket(self.shapes.windows, int(end))
      groups.setdefault(window, []).append(request)
    most = self.shapes.decode_rows[-1]
    for window, group in groups.items():
      for i in range(0, len(group), most):
        self._decode_call(group[i : i + most], window)

  def _decode_call(
      self, active: Sequence[slots_lib.Request], window: int
  ) -> None:
    """Samples up to K tokens for each of these requests."""
    started = time.perf_counter()
    steps = self.shapes.steps
    rows_A = np.array([r.slot for r in active], np.int32)
    count = slots_lib.bucket(self.shapes.decode_rows, len(active))
    if count == self.programs.slots:
      slots = np.arange(count, dtype=np.int32)
      table = self._table.copy()
      resting = np.ones(count, bool)
      resting[rows_A] = False
      table[resting, P.REMAINING] = 0
      at = rows_A
    else:
      slots = np.full(count, rows_A[0], np.int32)
      slots[: len(active)] = rows_A
      table = self._table[slots]
      table[len(active) :, P.REMAINING] = 0
      at = np.arange(len(active))
    tokens, logprobs, counts, ran = self.programs.decode(
        slots, table, steps, window
    )
    self.counters.seconds_decode += time.perf_counter() - started
    self.counters.decode_calls += 1
    self.counters.decode_steps += ran
    self.counters.decode_places += ran * count
    self._harvest(active, rows_A, tokens[at], logprobs[at], counts[at])

  def _with_pending_images(self) -> list[slots_lib.Request]:
    """The requests that may decode now.

    A prompt that ends in an image needs that image's last vision token in the
    pool; should they not all fit, some wait for the next round.
    """
    ready = []
    spans: list[trajectory.ImageSpan] = []
    ending = []
    for request in self.slots.active:
      images = request.prompt.images
      if request.sampled or not images or (
          images[-1].end < len(request.prompt)
      ):
        ready.append(request)
      elif self._pool.fits([*spans, images[-1]]) or not spans:
        if self._check_images(request, images[-1:]):
          spans.append(images[-1])
          ending.append(request)
    self._ensure_vision(spans)
    for request in ending:
      places = self._pool.places(request.prompt.images[-1].image.sha256)
      self._table[request.slot, P.VISION] = places[-1]
    return ready + ending

  def _harvest(self, active, rows_A, tokens_AK, logprobs_AK, counts_A) -> None:
    """Books what a decode call sampled."""
    counts_A = counts_A.astype(np.int32)
    lengths_A = np.array([r.length for r in active])
    steps = np.arange(tokens_AK.shape[1])
    real_AK = steps < counts_A[:, None]
    row, step = np.nonzero(real_AK)
    place = (rows_A[row], lengths_A[row] + step)
    self.slots.tokens[place] = tokens_AK[row, step]
    self.slots.logprobs[place] = logprobs_AK[row, step]
    self.slots.versions[place] = self.version
    last_A = tokens_AK[np.arange(len(active)), np.maximum(counts_A - 1, 0)]
    finite_A = np.isfinite(np.where(real_AK, logprobs_AK, 0.0)).all(axis=1)
    table = self._table[rows_A]
    table[:, P.TOKEN] = last_A
    table[:, P.VISION] = -1
    table[:, P.START] += counts_A
    table[:, P.INDEX] += counts_A
    table[:, P.REMAINING] -= counts_A
    table[:, P.POS_T : P.POS_W + 1] = (
        table[:, P.NEXT_POS] + counts_A - 1
    )[:, None]
    table[:, P.NEXT_POS] += counts_A
    self._table[rows_A] = table
    stopped_A = (table[:, P.STOP :] == last_A[:, None]).any(axis=1)
    over_A = stopped_A | (table[:, P.REMAINING] <= 0) | ~finite_A
    self.counters.decode_tokens += int(counts_A.sum())
    for i, request in enumerate(active):
      request.length += int(counts_A[i])
      if request.on_tokens is not None and counts_A[i] and finite_A[i]:
        end = request.length
        new = self.slots.tokens[request.slot, end - counts_A[i] : end].copy()
        with contextlib.suppress(RuntimeError):  # The loop was closed.
          request.loop.call_soon_threadsafe(request.on_tokens, new)
      if not over_A[i]:
        continue
      if finite_A[i]:
        self._end(request, self._completion(request, bool(stopped_A[i])))
      else:
        self._end(
            request,
            EngineError(
                "the policy's logits are not finite (weights version"
                f" {self.version}); training has diverged or the weights are"
                " broken"
            ),
        )
    self._poisoned |= not finite_A.all()

  def _completion(
      self, request: slots_lib.Request, stopped: bool
  ) -> policy_client.Completion:
    span = slice(len(request.prompt), request.length)
    reason = policy_client.FinishReason
    now = time.monotonic()
    return policy_client.Completion(
        tokens=self.slots.tokens[request.slot, span],
        logprobs=self.slots.logprobs[request.slot, span],
        versions=self.slots.versions[request.slot, span],
        finish_reason=reason.STOP if stopped else reason.LENGTH,
        metrics={
            "prefilled_tokens": float(request.prefilled),
            "reused_tokens": float(request.reused),
            "queue_seconds": request.admitted - request.submitted,
            "seconds": now - request.submitted,
        },
    )

  def _end(
      self,
      request: slots_lib.Request,
      outcome: policy_client.Completion | BaseException,
      deliver: bool = True,
  ) -> None:
    request.outcome = outcome
    if request.slot is not None:
      self._table[request.slot, P.REMAINING] = 0
    self.slots.finish(request)
    if deliver:
      ok = isinstance(outcome, policy_client.Completion)
      self.counters.completed += ok
      self.counters.failed += not ok
      self._done.append(request)
