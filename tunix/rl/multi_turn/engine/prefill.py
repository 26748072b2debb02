"""Keys and values of what active requests have read, in chunks.

Promises: tokens that several prompts begin with are computed once; the most
urgent come first; a request whose images or positions cannot be had fails
alone. The shapes of a request's calls follow from the request.

Synchronous and single-threaded: the scheduler's.

Axis names: see `scheduler`.
"""

from __future__ import annotations

import time
from typing import Callable, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import pages as pages_lib
from tunix.rl.multi_turn.engine import positions as positions_lib
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import vision_feed

P = programs_lib


class Prefill:
  """See the module docstring."""

  def __init__(
      self,
      programs: P.Programs,
      buckets: buckets_lib.Buckets,
      slots: requests_lib.SlotTable,
      table: np.ndarray,
      pages: pages_lib.PagePool,
      vision: vision_feed.VisionFeed,
      positions: positions_lib.Positions,
      counters: requests_lib.Counters,
      *,
      most_calls: int,
      fail: Callable[[requests_lib.Request, Exception], None],
  ):
    """Args:

      programs: the device side.
      buckets: shapes of calls.
      slots: the requests; those that are active are served.
      table: int32[slots, COLUMNS], whose START says how far each is.
      pages: that sequences hold.
      vision: where images' vision tokens are.
      positions: of tokens.
      counters: added to.
      most_calls: of a round while others could decode; 0: no limit.
      fail: ends a request.
    """
    self._programs = programs
    self._buckets = buckets
    self._slots = slots
    self._table = table
    self._pages = pages
    self._vision = vision
    self._positions = positions
    self._counters = counters
    self._most_calls = most_calls
    self._end = fail

  def run(self) -> None:
    """Fills what is wanting, or as much as a round may."""
    started = time.perf_counter()
    vision = self._counters.seconds_vision
    calls = 0
    while True:
      groups, ready = self._wanting()
      if not groups:
        break
      if ready and self._most_calls and calls >= self._most_calls:
        break
      # The most urgent first; among equals long chunks, which fill calls.
      urgency = {k: (-group[0].priority, k) for k, group in groups.items()}
      size, window = max(groups, key=urgency.get)
      calls += self._chunks(groups[size, window], size, window)
    jax.block_until_ready(self._programs.cache)
    self._counters.seconds_prefill += time.perf_counter() - started - (
        self._counters.seconds_vision - vision
    )

  def _wanting(
      self,
  ) -> tuple[dict[tuple[int, int], list[requests_lib.Request]], bool]:
    """Who needs a chunk, by (chunk, window); and whether anybody is ready."""
    # Shapes follow from a request alone.
    groups: dict[tuple[int, int], list[requests_lib.Request]] = {}
    coming: set[bytes] = set()  # Pages that somebody is about to fill.
    ready = False
    for request in sorted(self._slots.active, key=lambda r: r.turn):
      sequence, goal = self._slots.sequence(request), request.length - 1
      if sequence.adopt(goal):
        self._table[request.slot, P.START] = sequence.cached
      need = goal - sequence.cached
      if need <= 0:
        ready = True
        continue
      key = sequence.next_key(goal)
      if key is not None:
        if key in coming:
          continue  # Will be adopted.
        coming.add(key)
      size = buckets_lib.smallest(self._buckets.tokens, need)
      end = max(size, sequence.cached + min(need, size))
      window = buckets_lib.smallest(self._buckets.windows, end)
      groups.setdefault((size, window), []).append(request)
    return groups, ready

  def _chunks(
      self, requests: Sequence[requests_lib.Request], size: int, window: int
  ) -> int:
    """Appends the next up to `size` tokens of each of these requests.

    Of all whose images fit the pool together: encode calls are full then.

    Returns:
      How many calls that took.
    """
    rows = []
    spans: list[trajectory.ImageSpan] = []
    for request in requests:
      start = int(self._table[request.slot, P.START])
      end = min(start + size, request.length - 1)
      own = [
          s for s in request.prompt.images if s.offset < end and s.end > start
      ]
      if rows and not self._vision.fits(spans + own):
        continue  # Another time.
      try:
        if own:
          self._vision.check(own)
        placed = self._positions.between(request, start, end)
      except Exception as error:  # pylint: disable=broad-except
        self._end(request, error)
        continue
      spans += own
      rows.append((request, start, end, own, placed))
    self._vision.ensure(spans)
    most = self._buckets.prefill_rows[-1]
    for i in range(0, len(rows), most):
      self._call(rows[i : i + most], size, window)
    return -(-len(rows) // most)

  def _call(self, rows, size: int, window: int) -> None:
    """One call for (request, start, end, images, positions) of each row."""
    count = buckets_lib.smallest(self._buckets.prefill_rows, len(rows))
    starts = np.zeros(count, np.int32)
    lengths = np.zeros(count, np.int32)
    tokens = np.zeros((count, size), np.int32)
    positions = np.zeros((count, size, 3), np.int32)
    vision = np.full((count, size), -1, np.int32)
    for r, (request, start, end, own, placed) in enumerate(rows):
      starts[r], lengths[r] = start, end - start
      tokens[r, : end - start] = self._slots.tokens[request.slot, start:end]
      positions[r, : end - start] = placed
      for span in own:
        a, b = max(start, span.offset), min(end, span.end)
        places = self._vision.places(span)
        vision[r, a - start : b - start] = places[
            a - span.offset : b - span.offset
        ]
    held = [self._slots.sequence(row[0]).pages for row in rows]
    pages = self._pages.rows(held, count, window)
    self._programs.prefill(pages, tokens, positions, vision, starts, lengths)
    for request, start, end, *_ in rows:
      self._table[request.slot, P.START] = end
      self._slots.sequence(request).advance(end)
      request.prefilled += end - start
    self._counters.prefill_calls += 1
    self._counters.prefill_places += count * size
    self._counters.prefilled_tokens += int(lengths.sum())
