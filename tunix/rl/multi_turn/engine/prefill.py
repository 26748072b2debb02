"""Prefills the prompts of active requests, in chunks.

Promises: tokens that several prompts begin with are computed once (in lockstep
where they are computed alike: `Prefill.plan`); a chunk ends within no image
whose tokens see each other; the most urgent requests come first; a request
whose images or positions cannot be had fails alone. The shapes of a request's
calls follow from the request.

Synchronous and single-threaded: the scheduler's.

Axis names: see `scheduler`.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import kv_cache
from tunix.rl.multi_turn.engine import page_pool
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import vision_cache
from tunix.rl.multi_turn.policy import base

_NOWHERE = np.iinfo(np.int32).max  # A page that no cache has.


class Positions:
  """Computes rotary positions of requests' tokens.

  The processor knows those of a prompt, images included; sampled tokens count
  on from its end.

  Attributes:
    whole_images: whether an image's tokens must be computed at once, see
      `base.Processor`.
  """

  def __init__(self, processor: base.Processor, text_token: int):
    """Args:

    processor: the policy's host side.
    text_token: any id of text, to stand for the first sampled one.
    """
    self._processor = processor
    self._text_token = text_token
    self.whole_images = bool(base.optional(processor, "whole_image_tokens"))

  def locate(self, request: requests_lib.Request, start: int) -> None:
    """Fills in the positions from token `start` to one past the prompt."""
    prompt = request.prompt
    if self.whole_images and prompt.images:
      last = prompt.images[-1]
      if last.end >= len(prompt):
        raise ValueError(
          f"the prompt ends in the image at {last.offset}, whose tokens see"
          " each other: its last one cannot wait for the first draw; end the"
          " prompt with text"
        )
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

  def between(
    self, request: requests_lib.Request, start: int, end: int
  ) -> np.ndarray:
    """Returns int32[end - start, 3]; sampled tokens continue the prompt's."""
    if start < request.positions_from:
      self.locate(request, start)
    assert request.positions is not None
    cached = request.positions[:-1]
    first = request.positions_from
    n = len(request.prompt)
    if end <= n:
      return cached[start - first : end - first]
    after = int(request.positions[-1, 0]) + np.arange(end - n, dtype=np.int32)
    joined = np.concatenate([cached, np.repeat(after[:, None], 3, axis=1)])
    return joined[start - first : end - first]


class _Chunk(NamedTuple):
  """Tokens [start, end) of a request, with their images and positions."""

  request: requests_lib.Request
  start: int
  end: int
  images: list[vision_cache.Placed]
  positions: np.ndarray


def _prefill_name(start: int, tokens: int, window: int) -> int:
  """Of the program that computes tokens from `start` on."""
  return page_pool.program_name("prefill", start, tokens, window)


def _before_image(images: Sequence[trajectory.ImageSpan], end: int) -> int:
  """`end`, or where the image begins that it would part.

  A chunk that begins within an image holds the rest of it: `buckets.choose`.
  """
  return next((s.offset for s in images if s.offset < end < s.end), end)


class _ComingCalls:
  """Names of the calls that a round of lockstep makes, for others to wait."""

  def __init__(self, pool: page_pool.PagePool):
    self._size = pool.page_size
    self._names: set[tuple[int, bytes, bytes]] = set()

  def _name(
    self, sequence: kv_cache.CachedSequence, shard: int
  ) -> tuple[int, bytes, bytes] | None:
    """Of what a sequence computes until others can have it, if they can."""
    end = sequence.next_end()
    if end is None:
      return None
    block = sequence.cached // self._size
    ids = sequence.ids(block * self._size, end)
    return shard, sequence.parent_key(block), ids.tobytes()

  def add(
    self, sequence: kv_cache.CachedSequence, goal: int, shard: int
  ) -> None:
    """The next call of a sequence will be made."""
    if (name := self._name(sequence, shard)) is not None:
      self._names.add(name)

  def serves(
    self, sequence: kv_cache.CachedSequence, goal: int, shard: int
  ) -> bool:
    """Returns whether another sequence makes the next call of this one."""
    return self._name(sequence, shard) in self._names


class _ComingPages:
  """The page that each request of a call fills next, for later ones to wait.

  One page of a request is enough: a later request that would gain from a page
  after it holds all before that page, and so would the earlier one, which
  adopts every published page.
  """

  def __init__(self, pool: page_pool.PagePool):
    self._size, self._copies = pool.page_size, pool.copies
    # Of each page that will be filled, by its shard and the key before it.
    self._ids: dict[tuple[int, bytes], list[np.ndarray]] = {}

  def add(
    self, sequence: kv_cache.CachedSequence, goal: int, shard: int
  ) -> None:
    """A sequence will be cached up to `goal` tokens."""
    block = sequence.cached // self._size
    start = block * self._size
    ids = sequence.ids(start, min(start + self._size, goal))
    place = shard, sequence.parent_key(block)
    self._ids.setdefault(place, []).append(ids)

  def serves(
    self, sequence: kv_cache.CachedSequence, goal: int, shard: int
  ) -> bool:
    """Returns whether waiting saves a twentieth of a sequence's tokens."""
    block, cached_part = divmod(sequence.cached, self._size)
    start = block * self._size
    coming = self._ids.get((shard, sequence.parent_key(block)))
    if not coming:
      return False
    end = min(start + self._size, goal)
    ids = sequence.ids(start, end)
    least = len(ids)
    if self._copies:
      need = goal - sequence.cached
      least = min(least, cached_part + max(1, need // 20))
    elif least < self._size:
      return False  # Nothing but whole pages can be had.
    return any(
      np.array_equal(other[:least], ids[:least])
      for other in coming
      if len(other) >= least and other[cached_part] == ids[cached_part]
    )


class Prefill:
  """Fills the caches of active requests up to their last token."""

  def __init__(
    self,
    programs: programs_lib.Programs,
    buckets: buckets_lib.Buckets,
    slots: requests_lib.SlotTable,
    vision: vision_cache.VisionCache,
    positions: Positions,
    counters: requests_lib.Counters,
    *,
    most_calls: int,
    fail: Callable[[requests_lib.Request, Exception], None],
  ):
    """Args:

    programs: the device side.
    buckets: shapes of calls.
    slots: the requests; active ones are served.
    vision: holds images' vision tokens.
    positions: computes tokens' positions.
    counters: Counters that this adds to.
    most_calls: Limit of a round's calls while a request is ready; 0: none.
    fail: ends a request.
    """
    self._programs = programs
    self._buckets = buckets
    self._slots = slots
    self._vision = vision
    self._positions = positions
    self._counters = counters
    self._most_calls = most_calls
    self._fail = fail

  def run(self) -> None:
    """Prefills until all requests are ready, or as much as a round may."""
    with self._counters.spending("prefill"):
      self._run()

  def _run(self) -> None:
    calls = 0
    while True:
      # 1. Group what is missing by the shape of its program. Requests that
      #    another one's call serves wait, and adopt its pages the next time.
      groups, ready = self._wanting()
      # 2. Make the copies before any page is written: a source may change.
      self.copy_pages()
      if not groups:
        break
      # 3. Long prompts must not keep requests from decoding.
      if ready and self._most_calls and calls >= self._most_calls:
        break
      # 4. The most urgent first; among equals long chunks, which fill calls.
      urgency = {k: (-group[0].priority, k) for k, group in groups.items()}
      size, window = max(groups, key=urgency.__getitem__)
      calls += self._chunks(groups[size, window], size, window)
    jax.block_until_ready(self._programs.state.cache)

  def _wanting(
    self,
  ) -> tuple[dict[tuple[int, int], list[requests_lib.Request]], bool]:
    """Requests that need a chunk, by (chunk, window); whether any is ready."""
    # Shapes follow from a request alone.
    groups: dict[tuple[int, int], list[requests_lib.Request]] = {}
    kind = _ComingCalls if self._buckets.fixed_rows else _ComingPages
    coming = kind(self._slots.pools[0])
    ready = False
    for request in sorted(self._slots.active, key=lambda r: r.turn):
      sequence, goal = self._slots.sequence(request), request.length - 1
      if sequence.adopt(goal):
        self._slots.start[request.slot] = sequence.cached
      if sequence.cached >= goal:
        ready = True
        continue
      if sequence.shares:
        shard = self._slots.shard(request)
        if coming.serves(sequence, goal, shard):
          continue  # Will be adopted.
        coming.add(sequence, goal, shard)
      _, size, window = self._shape(request, sequence.cached, goal)
      groups.setdefault((size, window), []).append(request)
    return groups, ready

  def _shape(
    self, request: requests_lib.Request, start: int, goal: int
  ) -> tuple[int, int, int]:
    """Of the call that computes a request's tokens from `start` on.

    Returns:
      Where it ends; tokens and cache positions of its program.
    """
    last, exact = goal, self._buckets.fixed_rows
    # Where no page is copied, none but whole ones can be shared.
    page = 1
    if exact and not self._programs.state.copies_pages:
      page = self._slots.pools[0].page_size
    head = request.head // page * page
    if exact and start < head < goal:
      goal = head
    need = min(goal - start, self._slots.pools[0].room(start))
    size = buckets_lib.smallest(self._buckets.tokens, need)
    end = start + min(need, size)
    window = buckets_lib.smallest(self._buckets.windows, max(size, end))
    boundary = self._parting(request, end // page * page)
    if end == last or boundary <= start:
      boundary = self._parting(request, end)
    return boundary, size, window

  def _parting(self, request: requests_lib.Request, end: int) -> int:
    """`end`, or before the image that may not be parted there."""
    if not self._positions.whole_images:
      return end
    return _before_image(request.prompt.images, end)

  def plan(
    self, request: requests_lib.Request, start: int, goal: int
  ) -> Iterator[tuple[int, int]]:
    """The calls that compute a request's tokens from `start` to `goal`: see
    `kv_cache.Plan`."""
    while start < goal:
      end, *shape = self._shape(request, start, goal)
      if end <= start:
        return  # It ends in an image that may not be parted: `Positions`.
      yield end, _prefill_name(start, *shape)
      start = end

  def copy_pages(self) -> bool:
    """Makes the copies by which sequences have adopted parts of pages.

    Returns:
      Whether there were any; what they were made from is held no longer.
    """
    copies = [
      (shard, source, target)
      for shard, pool in enumerate(self._slots.pools)
      for source, target in pool.take_copies()
    ]
    if not copies:
      return False
    shards = [shard for shard, *_ in copies]
    for call in buckets_lib.deal(
      shards, self._buckets.copies, len(self._slots.pools)
    ):
      sources = np.zeros(call.size, np.int32)
      targets = np.full(call.size, _NOWHERE, np.int32)
      for row, item in zip(call.rows, call.items, strict=True):
        _, sources[row], targets[row] = copies[item]
      self._programs.copy(sources, targets)
      self._counters.copied_pages += len(call.items)
    return True

  def _chunks(
    self, requests: Sequence[requests_lib.Request], size: int, window: int
  ) -> int:
    """Appends up to `size` further tokens of each of the requests.

    Serves all requests whose images fit the pool together, so that encode
    calls are full.

    Returns:
      The number of calls.
    """
    chunks: list[_Chunk] = []
    spans: list[vision_cache.Placed] = []
    for request in requests:
      shard = self._slots.shard(request)
      start = int(self._slots.start[request.slot])
      end, *_ = self._shape(request, start, request.length - 1)
      own = [
        (shard, s)
        for s in request.prompt.images
        if s.offset < end and s.end > start
      ]
      if chunks and not self._vision.fits(spans + own):
        continue  # Another time.
      try:
        if own:
          self._vision.check(own)
        positions = self._positions.between(request, start, end)
      except Exception as error:  # pylint: disable=broad-except
        self._fail(request, error)
        continue
      spans += own
      chunks.append(_Chunk(request, start, end, own, positions))
    self._vision.ensure(spans)
    shards = [self._slots.shard(chunk.request) for chunk in chunks]
    calls = list(
      buckets_lib.deal(
        shards, self._buckets.prefill_rows, len(self._slots.pools)
      )
    )
    for call in calls:
      self._call([chunks[item] for item in call.items], call, size, window)
    return len(calls)

  def _call(
    self,
    chunks: Sequence[_Chunk],
    call: buckets_lib.Call,
    size: int,
    window: int,
  ) -> None:
    """Prefills one chunk a row."""
    count = call.size
    rows = np.zeros(count, programs_lib.prefill_row(size))
    tokens, positions = rows["tokens"], rows["positions"]
    vision = rows["vision"]
    vision[:] = -1
    for r, (request, start, end, images, placed) in zip(
      call.rows, chunks, strict=True
    ):
      rows["start"][r], rows["length"][r] = start, end - start
      tokens[r, : end - start] = self._slots.tokens[request.slot, start:end]
      positions[r, : end - start] = placed
      for shard, span in images:
        a, b = max(start, span.offset), min(end, span.end)
        places = self._vision.places(shard, span)
        numbers = span.numbers(request.prompt.tokens)
        numbers = numbers[a - span.offset : b - span.offset]
        vision[r, a - start : b - start] = np.where(
          numbers >= 0, places[numbers], -1
        )
    pages_of_rows = [
      self._slots.sequence(chunk.request).pages for chunk in chunks
    ]
    pages = self._slots.pools[0].table(pages_of_rows, call.rows, count, window)
    self._programs.prefill(pages, rows)
    for request, start, end, *_ in chunks:
      self._slots.start[request.slot] = end
      sequence = self._slots.sequence(request)
      sequence.advance(end, _prefill_name(start, size, window))
      sequence.announce()
      request.prefilled += end - start
      again = min(end, sequence.lost) - start
      self._counters.recomputed_tokens += max(0, again)
    self._counters.prefill_calls += 1
    self._counters.prefill_places += count * size
    self._counters.prefilled_tokens += int(rows["length"].sum())
