"""What the engine runs next: admission, prefill, decode, results.

`Scheduler.step` is one round: waiting requests get rows and pages, what their
caches lack is prefilled in chunks, and one decode call samples up to K tokens
for every request that is ready. New weights are taken up between rounds.

Promises: a request that cannot be served fails alone; the tokens of a
request depend on its own prompt, seed and the weights, not on who shares the
batch (up to rounding: see `fixed_rows`). When pages run short, sessions that
rest lose theirs first, then the last in the queue, then the last that run:
these are computed again later, and the first of all always goes on. Tokens
that several prompts begin with are prefilled once.

Synchronous and single-threaded; threads, futures and deadlines are the
engine's business.

Axis names: R = rows, T = tokens of a row, K = steps of a decode call.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import cached_sequence
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import guidance
from tunix.rl.multi_turn.engine import pages as pages_lib
from tunix.rl.multi_turn.engine import positions as positions_lib
from tunix.rl.multi_turn.engine import prefill as prefill_lib
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import vision_feed
from tunix.rl.multi_turn.engine import vision_pool
from tunix.rl.multi_turn.policy import base

P = programs_lib


class EngineError(RuntimeError):
  """The engine, not the request, failed; the message names the cause."""


class Scheduler:
  """See the module docstring."""

  def __init__(
      self,
      programs: P.Programs,
      processor: base.Processor,
      patches: vision_pool.PatchCache,
      buckets: buckets_lib.Buckets,
      config: config_lib.EngineConfig,
      *,
      seed: int,
  ):
    """Args:

      programs: the device side.
      processor: the policy's host side.
      patches: where images' patches come from.
      buckets: shapes of calls.
      config: the engine's settings.
      seed: of requests that bring none.
    """
    self.programs = programs
    self.buckets = buckets
    self._config = config
    self.counters = requests_lib.Counters()
    self.version = 0
    self._vision = vision_feed.VisionFeed(
        programs, patches, self.counters, buckets.images, buckets.patches
    )
    self._rng = np.random.default_rng(seed)
    self.pages = pages_lib.PagePool(programs.pages, programs.page_size)
    self.slots = requests_lib.SlotTable(
        programs.slots,
        programs.context_length + buckets.steps,
        lambda: cached_sequence.CachedSequence(
            self.pages, config.shares_prefixes
        ),
        programs.entropies,
    )
    self._table = np.zeros((programs.slots, P.COLUMNS), np.int32)
    self._positions = positions_lib.Positions(
        processor, int(np.argmin(programs.banned))
    )
    self._prefill = prefill_lib.Prefill(
        programs,
        buckets,
        self.slots,
        self._table,
        self.pages,
        self._vision,
        self._positions,
        self.counters,
        most_calls=0 if config.is_lockstep else config.prefill_calls_per_round,
        fail=self._end,
    )
    self._unbanned = guidance.pack(~programs.banned)
    # None admits any waiting request, else only these (lockstep).
    self.lot: list[requests_lib.Request] | None = None
    self._weights: tuple[int, Any] | None = None
    self._done: list[requests_lib.Request] = []
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
    if self._config.update_policy == "between_turns" and (
        self.busy or any(r.preempted for r in self.slots.waiting)
    ):
      return
    self.version, params = self._weights
    self._weights = None
    self.programs.set_params(params)
    self.counters.weight_updates += 1
    self._vision.clear()
    self.pages.forget()
    if self._config.on_update == "recompute":
      self._clear_sequences()
    for session in self.slots.sessions.values():
      session.sequence.outdate()

  def cancel(self, request: requests_lib.Request) -> None:
    """Frees the request's row; its session keeps its pages, idle."""
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
    self.pages.forget()
    self._clear_sequences()
    self._vision.clear()
    self.programs.reset()

  def _clear_sequences(self) -> None:
    for request in self.slots.active:
      self._preempt(request)
    for session in self.slots.sessions.values():
      session.sequence.clear()

  def take_done(self) -> list[requests_lib.Request]:
    """Requests that have an outcome now, to be delivered."""
    done, self._done = self._done, []
    return done

  def step(self) -> None:
    """One round; leaves finished requests for `take_done`."""
    self._apply_weights()
    self._admit()
    self._prefill.run()
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
      if self._weights is not None and not request.preempted:
        continue  # Those that have begun end with the weights they have.
      if not self.slots.has_room:
        break
      try:
        if not self._load(request):
          break  # Nobody overtakes it.
      except Exception as error:  # pylint: disable=broad-except
        self._end(request, error)

  def _load(self, request: requests_lib.Request) -> bool:
    """Gives the request pages and a row; False when pages are wanting."""
    prompt = request.prompt
    n = max(len(prompt), request.length)
    session = self.slots.sessions[request.session]
    sequence = session.sequence
    tokens = request.preempted[1] if request.preempted else prompt.tokens
    before = sequence.cached
    shared = sequence.begin(tokens, prompt.images, n - 1)
    # For the first decode call too, or it would be preempted there.
    left = self.programs.context_length - n
    if request.preempted:
      left = int(request.preempted[0][P.REMAINING])
    left = min(left, request.sampling.max_new_tokens, self.buckets.steps)
    if not self._make_room(request, n - 1 + left):
      sequence.rest()
      return False
    slot = self.slots.place(request)
    row = self._table[slot]
    self.slots.tokens[slot, :n] = tokens
    sequence.tokens = self.slots.tokens[slot]  # Sampled ones will stand there.
    if request.preempted:
      row[:] = request.preempted[0]
      for array, held in zip(self.slots.told, request.preempted[2:]):
        array[slot, :n] = held
      request.preempted = None
    else:
      request.length = n
      request.reused = sequence.cached
      request.admitted = time.monotonic()
      self._positions.locate(request, sequence.cached)
      self._describe(request, row)
      self.counters.prompt_tokens += n
      self.counters.unique_prompt_tokens += max(
          0, n - (min(session.length, n) if shared >= before else shared)
      )
      session.length = n
    row[P.START] = sequence.cached
    return True

  def _describe(self, request: requests_lib.Request, row: np.ndarray) -> None:
    """Writes the table row of a request that has sampled nothing yet."""
    prompt, sampling = request.prompt, request.sampling
    n = len(prompt)
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
    row[[P.TEMPERATURE, P.TOP_P, P.MIN_P]] = np.array(
        [sampling.temperature, sampling.top_p, sampling.min_p], np.float32
    ).view(np.int32)
    row[P.TOP_K] = min(sampling.top_k, self.programs.vocabulary)
    row[P.STOP :] = -1
    stops = sampling.stop_token_ids
    row[P.STOP : P.STOP + len(stops)] = stops
    row[P.REMAINING] = min(
        sampling.max_new_tokens, self.programs.context_length - n
    )

  # --- pages -----------------------------------------------------------------

  def _make_room(self, request: requests_lib.Request, tokens: int) -> bool:
    """Pages for so many tokens, from whoever does not run; else False."""
    sequence = self.slots.sequence(request)
    while not sequence.grow(tokens):
      victim = self.slots.victim(request)
      if victim is None:
        return False
      victim.sequence.clear()
      self.counters.evictions += 1
    return True

  def _make_room_running(
      self, request: requests_lib.Request, tokens: int
  ) -> bool:
    """As `_make_room`, if need be from later ones; False: was preempted."""
    while not self._make_room(request, tokens):
      last = max(self.slots.active, key=lambda r: r.turn)
      self._preempt(last)
      self.counters.preemptions += 1
      if last is request:
        return False
    return True

  def _preempt(self, request: requests_lib.Request) -> None:
    """Back into the queue, with what it has sampled."""
    slot, n = request.slot, request.length
    rows = (self.slots.tokens, *self.slots.told)
    request.preempted = (
        self._table[slot].copy(),
        *(array[slot, :n].copy() for array in rows),
    )
    self.slots.displace(request)
    self.slots.sequence(request).clear()

  def _advance(self, request: requests_lib.Request, cached: int) -> None:
    self._table[request.slot, P.START] = cached
    self.slots.sequence(request).advance(cached)

  # --- decode ----------------------------------------------------------------

  def _decode(self) -> None:
    # What a request asks for alone decides on its program.
    groups: dict[tuple[int, bool, bool], list[requests_lib.Request]] = {}
    ready = self._with_pending_images()
    for request in sorted(ready, key=lambda r: r.turn):
      if request.slot is None:
        continue  # An earlier one needed its pages.
      self._make_room_running(request, self._decode_end(request))
    for request in ready:
      if request.slot is not None:
        end = self._decode_end(request)
        window = buckets_lib.smallest(self.buckets.windows, end)
        kind = window, request.detailed, request.grammar is not None
        groups.setdefault(kind, []).append(request)
    most = self.buckets.decode_rows[-1]
    for kind, group in groups.items():
      for i in range(0, len(group), most):
        self._decode_call(group[i : i + most], *kind)

  def _decode_end(self, request: requests_lib.Request) -> int:
    """Tokens that its cache has after the next call."""
    row = self._table[request.slot]
    # A grammar must see a token before it can tell of the next.
    steps = 1 if request.grammar is not None else self.buckets.steps
    return int(row[P.START] + min(row[P.REMAINING], steps))

  def _decode_call(
      self,
      active: Sequence[requests_lib.Request],
      window: int,
      details: bool,
      masked: bool,
  ) -> None:
    """Samples up to K tokens for each of these requests."""
    started = time.perf_counter()
    steps, allowed = self.buckets.steps, None
    if masked:
      steps = 1
      masks, failed = guidance.masks(active, self._unbanned)
      for request, error in failed.items():
        self._end(request, error)
      active = list(masks)
      if not active:
        return
    rows_A = np.array([r.slot for r in active], np.int32)
    count = buckets_lib.smallest(self.buckets.decode_rows, len(active))
    table = np.zeros((count, P.COLUMNS), np.int32)  # Others rest.
    table[: len(active)] = self._table[rows_A]
    held = [self.slots.sequence(request).pages for request in active]
    pages = self.pages.rows(held, count, window)
    if masked:
      allowed = np.full(
          (count, self.programs.mask_words), 0xFFFFFFFF, np.uint32
      )
      allowed[: len(active)] = list(masks.values())
    decoded = self.programs.decode(
        pages, table, steps, details=details, allowed=allowed
    )
    self.counters.seconds_decode += time.perf_counter() - started
    self.counters.decode_calls += 1
    self.counters.decode_steps += decoded.steps
    self.counters.decode_places += decoded.steps * count
    if details:
      for i, request in enumerate(active):
        request.details.append(
            tuple(array[i, : decoded.counts[i]] for array in decoded.details)
        )
    self._harvest(active, rows_A, decoded)

  def _check_images(
      self,
      request: requests_lib.Request,
      spans: Sequence[trajectory.ImageSpan],
  ) -> bool:
    """Fails the request, and says so, when an image of it cannot be had."""
    try:
      self._vision.check(spans)
      return True
    except Exception as error:  # pylint: disable=broad-except
      self._end(request, error)
      return False

  def _with_pending_images(self) -> list[requests_lib.Request]:
    """The requests that may decode now.

    A prompt that ends in an image needs that image's last vision token in the
    pool; should they not all fit, some wait for the next round.
    """
    ready = []
    spans: list[trajectory.ImageSpan] = []
    ending = []
    for request in self.slots.active:
      if self._table[request.slot, P.START] < request.length - 1:
        continue  # Still to be prefilled.
      images = request.prompt.images
      if request.sampled or not images or (
          images[-1].end < len(request.prompt)
      ):
        ready.append(request)
      elif self._vision.fits([*spans, images[-1]]) or not spans:
        if self._check_images(request, images[-1:]):
          spans.append(images[-1])
          ending.append(request)
    self._vision.ensure(spans)
    for request in ending:
      places = self._vision.places(request.prompt.images[-1])
      self._table[request.slot, P.VISION] = places[-1]
    return ready + ending

  def _harvest(
      self,
      active: Sequence[requests_lib.Request],
      rows_A: np.ndarray,
      decoded: P.Decoded,
  ) -> None:
    """Books what a decode call sampled."""
    at = slice(len(active))
    tokens_AK, logprobs_AK = decoded.tokens[at], decoded.logprobs[at]
    counts_A = decoded.counts[at].astype(np.int32)
    lengths_A = np.array([r.length for r in active])
    steps = np.arange(tokens_AK.shape[1])
    real_AK = steps < counts_A[:, None]
    row, step = np.nonzero(real_AK)
    place = (rows_A[row], lengths_A[row] + step)
    self.slots.tokens[place] = tokens_AK[row, step]
    self.slots.logprobs[place] = logprobs_AK[row, step]
    self.slots.versions[place] = self.version
    if decoded.entropies is not None:
      self.slots.entropies[place] = decoded.entropies[row, step]
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
      start = request.length
      request.length += int(counts_A[i])
      self._advance(request, int(table[i, P.START]))
      if counts_A[i] and finite_A[i]:
        try:
          ended = guidance.show(
              request, self.slots.tokens[request.slot], start, stopped_A[i]
          )
        except Exception as error:  # pylint: disable=broad-except
          self._end(request, error)
          continue
        if ended:
          self.counters.surplus_tokens += (
              start + int(counts_A[i]) - request.length
          )
        stopped_A[i] |= ended
        over_A[i] |= ended
        if request.on_tokens is not None:
          span = slice(start, request.length)
          new = self.slots.tokens[request.slot, span].copy()
          with contextlib.suppress(RuntimeError):  # The loop was closed.
            request.loop.call_soon_threadsafe(request.on_tokens, new)
      if not over_A[i]:
        continue
      if finite_A[i]:
        outcome = self.slots.completion(request, bool(stopped_A[i]))
        self._end(request, outcome)
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

  def _end(
      self,
      request: requests_lib.Request,
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
