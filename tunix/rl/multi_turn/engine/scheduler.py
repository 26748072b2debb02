"""Runs the engine's rounds: admission, prefill, decode, results.

`Scheduler.step` is one round: waiting requests get slots and pages, `prefill`
computes in chunks what their caches lack, and one decode call samples up to K
tokens for every request that is ready. New weights take over between rounds.

Promises: a request that cannot be served fails alone; the tokens of a request
depend on its own prompt, seed and the weights, not on the other requests of
the batch (up to rounding: see `buckets.Buckets.fixed_rows`). When pages run
short, idle sessions lose theirs first, then the last in the queue, then the
last that run: these are computed again later, and the first of all always goes
on. Tokens that several prompts begin with are prefilled once.

On a mesh, slots, pages and vision tokens belong to shards. A session stays in
the shard that has its pages, a new one goes where the fewest requests run; all
of the above holds in each shard, and pages are shared within one.

Synchronous and single-threaded; threads, futures and deadlines are the
engine's business.

Axis names: A = active slots, R = rows, T = tokens of a row, K = tokens of a
decode call.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.engine import drafts as drafts_lib
from tunix.rl.multi_turn.engine import page_pool
from tunix.rl.multi_turn.engine import prefill as prefill_lib
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import vision_cache

EngineError = requests_lib.EngineError
Weights = tuple[jax.Array, ...]


class Scheduler:
  """Decides which program the device runs next, for the waiting requests.

  Attributes:
    slots: requests and sessions.
    pools: Pools of the KV cache's pages, one a shard.
    counters: Counters of the engine's work.
    version: Version of the weights in use.
  """

  def __init__(
    self,
    programs: programs_lib.Programs,
    patches: vision_cache.PatchCache,
    buckets: buckets_lib.Buckets,
    config: config_lib.EngineConfig,
    *,
    seed: int,
    version: int = 0,
  ):
    """Args:

    programs: the device side.
    patches: makes images' patches.
    buckets: shapes of calls.
    config: the engine's settings.
    seed: Seed of the randomness of requests without a seed.
    version: Version of the present weights.
    """
    self.version = version
    self.counters = requests_lib.Counters()
    self._programs = programs
    self._buckets = buckets
    self._config = config
    self._vision = vision_cache.VisionCache(
      programs, patches, self.counters, buckets
    )
    self._drafter = drafts_lib.Drafter(
      always=buckets.always_drafts,
      remembers=bool(buckets.drafts) and not config.is_lockstep,
    )
    self._rng = np.random.default_rng(seed)
    state = programs.state
    self._shards = state.shards
    self.pools = [
      page_pool.PagePool(
        state.pages,
        state.page_size,
        state.layout is not None and state.layout.keeps_state,
        copies=bool(buckets.copies),
      )
      for _ in range(state.shards)
    ]
    self.slots = requests_lib.SlotTable(
      -(-config.slots // state.shards) * state.shards,
      config.context_length + buckets.most,
      self.pools,
      config.shares_prefixes,
      programs.entropies,
    )
    self._positions = prefill_lib.Positions(
      state.processor, int(np.argmin(programs.banned))
    )
    self._prefill = prefill_lib.Prefill(
      programs,
      buckets,
      self.slots,
      self._vision,
      self._positions,
      self.counters,
      most_calls=0 if config.is_lockstep else config.prefill_calls_per_round,
      fail=self._end,
    )
    self._prefixes = requests_lib.KnownPrefixes()
    self._unbanned = constrained_decoding.pack(~programs.banned)
    self._weights: tuple[int, Weights] | None = None
    self._done: list[requests_lib.Request] = []
    self._poisoned = False  # The caches hold values that are not finite.

  # --- state changes between rounds ------------------------------------------

  @property
  def busy(self) -> bool:
    return any(r is not None for r in self.slots.requests)

  def set_weights(self, version: int, params: Weights) -> None:
    """Takes new weights into use as soon as the update policy allows.

    Args:
      version: Version of the weights.
      params: The result of `DeviceState.prepare`.
    """
    self._weights = (version, params)
    self._apply_weights()

  def _apply_weights(self) -> None:
    if self._weights is None:
      return
    if self._config.update_policy == "between_turns" and (
      self.busy or any(r.preempted for r in self.slots.waiting)
    ):
      return
    self.version, self._programs.state.params = self._weights
    self._weights = None
    self.counters.weight_updates += 1
    self._prefixes.clear()
    self._vision.clear()
    self.forget_pages()
    # A completion that has begun may keep its pages. Whatever has sampled
    # nothing yet is the new weights' alone.
    keeps = self._config.on_update == "keep_kv"
    for request in self.slots.active:
      if not (keeps and request.sampled):
        self.slots.sequence(request).outdate()
        self.slots.preempt(request)
    for session in self.slots.holders:
      runs = session.request is not None and session.request.slot is not None
      session.sequence.outdate(keep=runs)
      if not runs:
        session.length = 0

  def cancel(self, request: requests_lib.Request) -> None:
    """Frees the request's slot; its session keeps its pages, idle."""
    if request.outcome is None:
      self.counters.cancelled += 1
      self._end(request, EngineError("cancelled"), deliver=False)

  def release(self, session: str) -> None:
    """Forgets a session; fails its request, if it has one."""
    open_session = self.slots.sessions.get(session)
    if open_session is not None and open_session.request is not None:
      self._end(
        open_session.request,
        EngineError(f"session {session!r} was released during its request"),
      )
    self.slots.release(session)

  def recover(self, error: BaseException) -> None:
    """After a device failure: fails active requests, starts from empty."""
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
    self.forget_pages()
    self._clear_sequences()
    self._vision.clear()
    self._programs.state.reset()

  def forget_pages(self) -> None:
    """No later request finds what is cached now; its holders keep it."""
    for pool in self.pools:
      pool.forget()

  def _clear_sequences(self) -> None:
    for request in self.slots.active:
      self.slots.preempt(request)
    for session in self.slots.holders:
      session.sequence.clear()

  def take_done(self) -> list[requests_lib.Request]:
    """Requests that have got an outcome since the last call."""
    finished, self._done = self._done, []
    return finished

  def step(self) -> None:
    """Runs one round; leaves finished requests for `take_done`."""
    # 1. New weights take over here, never within a round.
    self._apply_weights()
    # 2. Waiting requests get a slot and pages, as far as both suffice.
    self._admit()
    # 3. Compute the prompts that caches lack; long ones take several rounds.
    self._prefill.run()
    # 4. One decode call for each group of requests that are ready.
    self._decode()
    if self._poisoned:
      # 5. A NaN in the cache outlives its owner: zero times NaN is NaN.
      self._poisoned = False
      self._drop_caches()

  # --- admission -------------------------------------------------------------

  def _admit(self) -> None:
    batch = self.slots.batch
    full: set[int] = set()
    for request in list(self.slots.waiting):
      if batch is not None and request not in batch:
        continue
      if self._weights is not None and not request.preempted:
        continue  # Requests that have begun end with the present weights.
      if not self.slots.has_room or len(full) == self._shards:
        break
      try:
        # FIFO: no shard admits a later request before one that it has not
        # been able to admit.
        tried = [s for s in self.slots.shards_for(request) if s not in full]
        if not any(self._load(request, shard) for shard in tried):
          full.update(tried)
      except Exception as error:  # pylint: disable=broad-except
        self._end(request, error)

  def _load(self, request: requests_lib.Request, shard: int) -> bool:
    """Gives the request pages and a slot of the shard.

    Returns:
      False if the shard has no free slot or too few pages.
    """
    # 1. Turn the session's sequence into the request's; it keeps and adopts
    #    all of its prefix that is cached.
    if not self.slots.has_slot(shard):
      return False
    self.slots.move(self.slots.sessions[request.session], shard)
    prompt, preempted = request.prompt, request.preempted
    n = max(len(prompt), request.length)
    session = self.slots.sessions[request.session]
    sequence = session.sequence
    tokens = preempted.tokens if preempted else prompt.tokens
    before = sequence.cached
    plan = functools.partial(self._prefill.plan, request, goal=n - 1)
    shared = sequence.begin(
      tokens, prompt.images, n - 1, plan if self._buckets.fixed_rows else None
    )
    # 2. Reserve pages, for the first decode call too, or the request would be
    #    preempted there.
    budget = self._config.context_length - n
    if preempted:
      budget = int(preempted.row["remaining"])
    budget = min(budget, request.sampling.max_new_tokens, self._most(request))
    if not self._make_room(request, n - 1 + budget):
      if before or self._shards == 1:
        sequence.rest()
      else:  # What others hold here must not bind it to this shard.
        sequence.clear()
      return False
    # 3. Fill the slot: from the state at the preemption, or afresh.
    slot = self.slots.place(request)
    self.slots.tokens[slot, :n] = tokens
    sequence.tokens = self.slots.tokens[slot]  # Grows with the sampled ones.
    if preempted:
      self.slots.restore(request)
    else:
      request.length = n
      request.reused = sequence.cached
      request.admitted = time.monotonic()
      self._positions.locate(request, sequence.cached)
      self._describe(request)
      self.counters.prompt_tokens += n
      own = min(session.length if shared >= before else shared, n - 1)
      seen_before = self._prefixes.add(tokens[: n - 1], prompt.images)
      self.counters.unique_prompt_tokens += n - 1 - max(seen_before, own)
      session.length = n - 1
    self.slots.start[slot] = sequence.cached
    return True

  def _describe(self, request: requests_lib.Request) -> None:
    """Fills in the row of a request that has sampled nothing yet."""
    assert request.positions is not None
    prompt, sampling = request.prompt, request.sampling
    row = self.slots.rows[request.slot]
    n = len(prompt)
    seed = sampling.seed
    if seed is None:
      seed = int(self._rng.integers(0, 1 << 64, dtype=np.uint64))
    row["key"] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    row["token"] = prompt.tokens[-1]
    row["vision"] = -1
    offset = n - 1 - request.positions_from
    row["position"] = request.positions[offset]
    row["next_position"] = request.positions[offset + 1, 0]
    row["index"] = 0
    row["temperature"] = sampling.temperature
    row["top_p"] = sampling.top_p
    row["min_p"] = sampling.min_p
    row["frequency_penalty"] = sampling.frequency_penalty
    row["presence_penalty"] = sampling.presence_penalty
    row["top_k"] = min(sampling.top_k, self._programs.state.vocabulary)
    row["stops"] = -1
    stops = sampling.stop_token_ids
    row["stops"][: len(stops)] = stops
    row["remaining"] = min(
      sampling.max_new_tokens, self._config.context_length - n
    )

  # --- pages -----------------------------------------------------------------

  def _make_room(self, request: requests_lib.Request, tokens: int) -> bool:
    """Takes pages for `tokens` tokens, if need be from idle sessions.

    Returns:
      False if idle and waiting sessions have too few.
    """
    sequence = self.slots.sequence(request)
    while not sequence.grow(tokens):
      if self._prefill.copy_pages():
        continue  # What is copied from needs no page of its own any more.
      victim = self.slots.victim(request)
      if victim is None:
        return False
      victim.sequence.clear()
      self.counters.evictions += 1
    return True

  def _make_room_running(
    self, request: requests_lib.Request, tokens: int
  ) -> bool:
    """As `_make_room`, if need be from later requests that run.

    Returns:
      False when the request itself was preempted.
    """
    shard = self.slots.shard(request)
    while not self._make_room(request, tokens):
      last = max(
        (r for r in self.slots.active if self.slots.shard(r) == shard),
        key=lambda r: r.turn,
      )
      self.slots.preempt(last)
      self.counters.preemptions += 1
      if last is request:
        return False
    return True

  # --- decode ----------------------------------------------------------------

  def _decode(self) -> None:
    # 1. Make room for each request's next tokens, in order of service: a later
    #    one may lose its pages to an earlier one.
    groups: dict[tuple[int, bool, bool, bool], list[requests_lib.Request]] = {}
    ready = self._with_pending_images()
    for request in sorted(ready, key=lambda r: r.turn):
      if request.slot is None:
        continue  # An earlier one needed its pages.
      self._make_room_running(request, self._decode_end(request))
    # 2. Group by program, which follows from the request alone.
    for request in ready:
      if request.slot is not None:
        end = self._decode_end(request)
        window = buckets_lib.smallest(self._buckets.windows, end)
        masked = request.grammar is not None
        kind = window, request.detailed, masked, request.penalized
        groups.setdefault(kind, []).append(request)
    # 3. One call for as many rows as the largest bucket holds.
    for (window, details, masked, penalized), group in groups.items():
      masks: dict[requests_lib.Request, np.ndarray] | None = None
      if masked:
        masks, failed = constrained_decoding.masks(group, self._unbanned)
        for request, error in failed.items():
          self._end(request, error)
        group = list(masks)
      shards = [self.slots.shard(request) for request in group]
      sizes = self._buckets.decode_rows
      for call in buckets_lib.deal(shards, sizes, self._shards):
        active = [group[item] for item in call.items]
        self._decode_call(active, call, window, details, masks, penalized)

  def _decode_end(self, request: requests_lib.Request) -> int:
    """Returns the tokens that the request's cache has after the next call."""
    slots, slot = self.slots, request.slot
    most = self._most(request)
    return int(slots.start[slot] + min(slots.remaining[slot], most))

  def _most(self, request: requests_lib.Request) -> int:
    """Returns the tokens that a decode call samples for a request at most."""
    if request.grammar is not None:
      return 1  # A grammar must see a token before it can allow the next.
    plain = request.detailed or request.penalized
    return self._buckets.steps if plain else self._buckets.most

  def _decode_call(
    self,
    active: Sequence[requests_lib.Request],
    call: buckets_lib.Call,
    window: int,
    details: bool,
    masks: dict[requests_lib.Request, np.ndarray] | None,
    penalized: bool,
  ) -> None:
    """Samples up to K tokens for each of the requests in `active`."""
    with self.counters.spending("decode"):
      most, allowed, sampled = self._buckets.steps, None, None
      slots_A = np.array([r.slot for r in active], np.int32)
      pages_of_rows = [self.slots.sequence(request).pages for request in active]
      if masks is not None:
        most = 1
        words = self._programs.mask_words
        allowed = np.full((call.size, words), 0xFFFFFFFF, np.uint32)
        allowed[call.rows] = [masks[request] for request in active]
      if penalized:
        sampled = np.full((call.size, window), -1, np.int32)
        for place, request in zip(call.rows, active, strict=True):
          span = slice(len(request.prompt), request.length)
          tokens = self.slots.tokens[request.slot, span]
          sampled[place, : len(tokens)] = tokens
      rows = programs_lib.pick(self.slots.rows, slots_A, call.rows, call.size)
      if self.pools[0].keeps_state:
        for place in call.rows:
          room = self.pools[0].room(int(rows[place]["start"]))
          rows[place]["remaining"] = min(int(rows[place]["remaining"]), room)
      drafts, texts, kind = 0, None, (call.size, window)
      can_draft = self._buckets.drafts and not (
        details or penalized or masks is not None
      )
      if can_draft and self._drafter.pays(*kind):
        drafts, most = self._buckets.drafts, self._buckets.drafted
        sequences = [self.slots.tokens[r.slot, : r.length] for r in active]
        texts = self._drafter.texts(
          sequences, call.rows, call.size, window + most
        )
      started, compiled = time.perf_counter(), self._programs.compile_count
      decoded = self._programs.decode(
        self.pools[0].table(pages_of_rows, call.rows, call.size, window),
        rows,
        most,
        details=details,
        allowed=allowed,
        sampled=sampled,
        drafts=drafts,
        texts=texts,
      )
      count = int(decoded.counts[call.rows].sum())
      if can_draft and self._programs.compile_count == compiled:
        seconds = time.perf_counter() - started
        # A call of a fixed shape takes as long for a few rows as for all.
        rate = count / len(active) / max(seconds, 1e-9)
        self._drafter.note(bool(drafts), rate, *kind)
    self.counters.decode_calls += 1
    self.counters.decode_steps += decoded.steps
    self.counters.decode_places += decoded.steps * call.size
    self.counters.drafted_tokens += decoded.drafted
    self.counters.accepted_tokens += count - decoded.row_steps
    if decoded.details is not None:
      for i, request in zip(call.rows, active, strict=True):
        request.details.append(
          tuple(
            np.asarray(array)[i, : decoded.counts[i]]
            for array in decoded.details
          )
        )
    program = page_pool.program_name(
      "decode", most, window, drafts, details, masks is not None, penalized
    )
    self._harvest(active, slots_A, call.rows, decoded, program)

  def _check_images(
    self, request: requests_lib.Request, spans: Sequence[vision_cache.Placed]
  ) -> bool:
    """Returns whether these images can be had; fails the request if not."""
    try:
      self._vision.check(spans)
      return True
    except Exception as error:  # pylint: disable=broad-except
      self._end(request, error)
      return False

  def _with_pending_images(self) -> list[requests_lib.Request]:
    """Returns the requests that may decode now.

    A prompt that ends in an image needs that image's last vision token in the
    pool; when they do not all fit, some wait for the next round.
    """
    ready = []
    spans: list[vision_cache.Placed] = []
    ending = []
    for request in self.slots.active:
      if self.slots.start[request.slot] < request.length - 1:
        continue  # Still to be prefilled.
      images = request.prompt.images
      if (
        request.sampled or not images or (images[-1].end < len(request.prompt))
      ):
        ready.append(request)
        continue
      placed = self.slots.shard(request), images[-1]
      if self._vision.fits([*spans, placed]) or not spans:
        if self._check_images(request, [placed]):
          spans.append(placed)
          ending.append(request)
    self._vision.ensure(spans)
    for request in ending:
      shard = self.slots.shard(request)
      places = self._vision.places(shard, request.prompt.images[-1])
      self.slots.rows[request.slot]["vision"] = places[-1]
    return ready + ending

  def _harvest(
    self,
    active: Sequence[requests_lib.Request],
    slots_A: np.ndarray,
    at: np.ndarray,
    decoded: programs_lib.Decoded,
    program: int,
  ) -> None:
    """Records the tokens of a decode call; ends requests that are over.

    Args:
      active: the call's requests.
      slots_A: int32, their slots.
      at: int32, their rows of the call.
      decoded: Tokens and log-probs that the call sampled.
      program: the name of the call's program.
    """
    # 1. Copy each request's sampled tokens behind its earlier ones.
    tokens_AK, logprobs_AK = decoded.tokens[at], decoded.logprobs[at]
    counts_A = decoded.counts[at].astype(np.int32)
    lengths_A = np.array([r.length for r in active])
    real_AK = np.arange(tokens_AK.shape[1]) < counts_A[:, None]
    row, step = np.nonzero(real_AK)
    place = (slots_A[row], lengths_A[row] + step)
    slots = self.slots
    slots.tokens[place] = tokens_AK[row, step]
    slots.logprobs[place] = logprobs_AK[row, step]
    slots.versions[place] = self.version
    if slots.entropies is not None and decoded.entropies is not None:
      slots.entropies[place] = decoded.entropies[at][row, step]
    last_A = tokens_AK[np.arange(len(active)), np.maximum(counts_A - 1, 0)]
    finite_AK = np.isfinite(np.where(real_AK, logprobs_AK, 0.0))
    finite_A = np.asarray(finite_AK.all(axis=1))
    # 2. Advance the rows: the last token is fed to the next call.
    rows = programs_lib.pick(
      slots.rows, slots_A, np.arange(len(active)), len(active)
    )
    rows["token"] = last_A
    rows["vision"] = -1
    rows["start"] += counts_A
    rows["index"] += counts_A
    rows["remaining"] -= counts_A
    rows["position"] = (rows["next_position"] + counts_A - 1)[:, None]
    rows["next_position"] += counts_A
    programs_lib.words(slots.rows)[slots_A] = programs_lib.words(rows)
    # 3. A request is over at a stop token, at its limit, or when broken.
    stopped_A = (rows["stops"] == last_A[:, None]).any(axis=1)
    over_A = stopped_A | (rows["remaining"] <= 0) | ~finite_A
    self.counters.decode_tokens += int(counts_A.sum())
    self.counters.mixed_tokens += sum(
      int(count)
      for request, count in zip(active, counts_A)
      if slots.sequence(request).outdated
    )
    self._poisoned |= not finite_A.all()
    # 4. Publish full pages, show the new tokens, and end what is over.
    cached_A = rows["start"].tolist()
    for i, request in enumerate(active):
      slots.sequence(request).advance(cached_A[i], program)
      start = request.length
      request.length += int(counts_A[i])
      if not finite_A[i]:
        self._end(
          request,
          EngineError(
            "the policy's logits are not finite (weights version"
            f" {self.version}); training has diverged or the weights are"
            " broken"
          ),
        )
        continue
      if counts_A[i]:
        try:
          ended = self._show(request, start, bool(stopped_A[i]))
        except Exception as error:  # pylint: disable=broad-except
          self._end(request, error)
          continue
        stopped_A[i] |= ended
        over_A[i] |= ended
      if over_A[i]:
        self._end(request, slots.completion(request, bool(stopped_A[i])))

  def _show(
    self, request: requests_lib.Request, start: int, stopped: bool
  ) -> bool:
    """Shows the tokens from `start` on to grammar, stop condition and caller.

    Returns:
      Whether the stop condition ends the completion.
    """
    tokens = self.slots.tokens[request.slot]
    sampled = request.length
    ended = request.is_constrained and constrained_decoding.ends(
      request, tokens, start, stopped
    )
    if ended:
      self.counters.surplus_tokens += sampled - request.length
    if request.on_tokens is not None and request.loop is not None:
      new = tokens[start : request.length].copy()
      with contextlib.suppress(RuntimeError):  # The loop was closed.
        request.loop.call_soon_threadsafe(request.on_tokens, new)
    return ended

  def _end(
    self,
    request: requests_lib.Request,
    outcome: policy_client.Completion | BaseException,
    deliver: bool = True,
  ) -> None:
    request.outcome = outcome
    if isinstance(outcome, policy_client.Completion):
      self._remember(request)
      self._drafter.remember(outcome.tokens)
    self.slots.finish(request)
    if deliver:
      ok = isinstance(outcome, policy_client.Completion)
      self.counters.completed += ok
      self.counters.failed += not ok
      self._done.append(request)

  def _remember(self, request: requests_lib.Request) -> None:
    """Counts a request's tokens as known, except the last: it is not cached."""
    if self.slots.sequence(request).outdated:
      return
    n = request.length - 1
    tokens = self.slots.tokens[request.slot, :n]
    self._prefixes.add(tokens, request.prompt.images)
    self.slots.sessions[request.session].length = n
