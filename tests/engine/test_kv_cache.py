"""Pages of the KV cache: who holds them, and what is found in them."""

import functools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import kv_cache
from tunix.rl.multi_turn.engine import page_pool

SIZE = 4


def image(seed, offset, count=3):
  pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
  ref = images_lib.ImageStore().put(pixels)
  return trajectory.ImageSpan(ref, offset, count)


def sequence(pool, share=True):
  return kv_cache.CachedSequence(pool, share)


def fill(seq, tokens, spans=()):
  """Computes all but the last token, as the engine does."""
  tokens = np.asarray(tokens, np.int32)
  seq.begin(tokens, spans, len(tokens) - 1)
  cached = seq.cached
  assert seq.grow(len(tokens))
  seq.advance(len(tokens) - 1)
  return cached


class Model:
  """Contents of every page of a pool, written by hand."""

  def __init__(self, pages, share, copies):
    self.pool = page_pool.PagePool(pages, SIZE, copies=copies)
    self.share = share
    self.content = [None] * (pages * SIZE)
    self.sequences = {}
    self.weights = 0
    # Of sequences with a plan: each token's program, had they computed it.
    self.alone = {}

  def check(self):
    holders = {}
    for seq in self.sequences.values():
      for page in seq.pages:
        assert page != 0
        holders[page] = holders.get(page, 0) + 1
      # Everything before it, since keys and values depend on all of it.
      for i in range(seq.cached):
        place = seq.pages[i // SIZE] * SIZE + i % SIZE
        assert self.content[place][:2] == (
          self.weights,
          tuple(seq.tokens[: i + 1]),
        )
        if seq in self.alone:
          assert self.content[place][2] == tuple(self.alone[seq][: i + 1])
    assert self.pool.available == self.pool.capacity - len(holders)
    if not self.share:
      assert all(count == 1 for count in holders.values())

  def copy(self):
    """As the device does, before anything is written."""
    copies = self.pool.take_copies()
    assert not {a for a, _ in copies} & {b for _, b in copies}
    for source, target in copies:
      at = slice(source * SIZE, (source + 1) * SIZE)
      self.content[target * SIZE : (target + 1) * SIZE] = self.content[at]

  def write(self, seq, start, end, program=0):
    before = ()
    if start:
      place = seq.pages[(start - 1) // SIZE] * SIZE + (start - 1) % SIZE
      before = self.content[place][2]
    for i in range(start, end):
      page = seq.pages[i // SIZE]
      readers = [s for s in self.sequences.values() if page in s.pages]
      assert readers == [seq]
      before += (program,)
      computed = (self.weights, tuple(seq.tokens[: i + 1]), before)
      self.content[page * SIZE + i % SIZE] = computed


def common_of(a, b):
  n = min(len(a), len(b))
  differ = np.flatnonzero(a[:n] != b[:n])
  return differ[0] if len(differ) else n


def calls(chunk, goal, start):
  """Equal chunks, each a program of its own."""
  while start < goal:
    end = min(start + chunk, goal)
    yield end, page_pool.program_name(start, chunk)
    start = end


TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=18)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  pages=st.integers(6, 16),
  share=st.booleans(),
  copies=st.booleans(),
  planned=st.booleans(),
  steps=st.lists(
    st.tuples(
      st.integers(0, 3),
      st.sampled_from(("run", "run", "run", "rest", "clear", "forget")),
      TOKENS,
      st.integers(1, 18),
    ),
    max_size=30,
  ),
)
def test_pages_hold_what_their_sequences_say(
  pages, share, copies, planned, steps
):
  """Any order of beginning, growing, resting, clearing and new weights.

  With a plan a sequence holds what it had computed without the others.
  """
  model = Model(pages, share, copies)
  for name, action, tokens, chunk in steps:
    seq = model.sequences.setdefault(name, sequence(model.pool, share))
    if action == "clear":
      seq.clear()
    elif action == "rest":
      seq.rest()
    elif action == "forget":  # New weights.
      model.weights += 1
      model.pool.forget()
      for other in model.sequences.values():
        other.outdate()
    else:
      tokens = np.asarray(tokens, np.int32)
      before = seq.tokens[: seq.cached].copy()
      goal = len(tokens) - 1
      plan = None
      if planned:
        plan = functools.partial(calls, chunk, goal)
        own = min(common_of(before, tokens), goal)
        if own < len(before):
          own -= own % SIZE  # Others may hold the page where it is cut.
        alone = model.alone.get(seq, [])[:own]
        for end, program in plan(own):
          alone += [program] * (end - len(alone))
        model.alone[seq] = alone
      common = seq.begin(tokens, (), goal, plan)
      assert common == common_of(before, tokens)
      assert seq.cached <= len(tokens) - 1
      if not seq.grow(len(tokens)):
        model.copy()
        seq.rest()
        model.check()
        continue
      model.copy()
      model.check()
      for start in range(seq.cached, len(tokens) - 1, chunk):
        end = min(start + chunk, goal)
        program = page_pool.program_name(start, chunk)
        model.write(seq, start, end, program)
        seq.advance(end, program)
        seq.announce()
        model.check()
    model.check()
  for seq in model.sequences.values():
    seq.clear()
  assert model.pool.available == model.pool.capacity


def test_equal_beginnings_share_whole_pages():
  pool = page_pool.PagePool(32, SIZE)
  a, b = sequence(pool), sequence(pool)
  assert fill(a, range(10)) == 0
  assert fill(b, [*range(8), 50, 51, 52]) == 8
  assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2]
  assert pool.adopted == 2 * SIZE
  alone = sequence(pool, share=False)
  assert fill(alone, range(10)) == 0


def test_a_plan_shares_whole_calls_of_the_same_programs():
  pool = page_pool.PagePool(32, SIZE, copies=True)
  tokens = np.arange(12, dtype=np.int32)

  def begun(tokens, chunk):
    seq, goal = sequence(pool), len(tokens) - 1
    plan = functools.partial(calls, chunk, goal)
    seq.begin(np.asarray(tokens, np.int32), (), goal, plan)
    return seq, plan

  first, plan = begun(tokens, 6)
  assert first.grow(12)
  for end, program in plan(0):
    first.advance(end, program)
    first.announce()
  assert begun(tokens, 6)[0].cached == 11
  assert begun(tokens[:10], 6)[0].cached == 9
  assert begun([*tokens[:10], 50, 51], 6)[0].cached == 6  # Not 10.
  assert begun(tokens, 5)[0].cached == begun(tokens, 8)[0].cached == 0


def test_a_long_plan_hashes_each_page_a_few_times(monkeypatch):
  hashed, page_key = 0, page_pool.page_key

  def counted(*args):
    nonlocal hashed
    hashed += 1
    return page_key(*args)

  monkeypatch.setattr(page_pool, "page_key", counted)
  pool = page_pool.PagePool(1024, SIZE, copies=True)
  tokens = np.arange(SIZE * 500 + 2, dtype=np.int32)
  plan = functools.partial(calls, 3 * SIZE, len(tokens) - 1)
  first, second = sequence(pool), sequence(pool)
  for seq in (first, second):
    seq.begin(tokens, (), len(tokens) - 1, plan)
    assert seq.grow(len(tokens))
    for end, program in plan(seq.cached):
      seq.adopt(len(tokens) - 1)
      seq.advance(end, program)
      seq.announce()
  assert pool.adopted == len(tokens) - 1
  assert hashed < 3 * 2 * 500


def test_of_many_pages_that_begin_alike_the_newest_are_found():
  pool = page_pool.PagePool(512, SIZE, copies=True)
  for i in range(100):
    fill(seq := sequence(pool), [7, 8 + i, 3])
    seq.announce()
  assert fill(sequence(pool), [7, 8 + 99, 3]) == 2
  assert fill(sequence(pool), [7, 8, 3]) == 1


def test_the_page_where_sequences_part_is_copied():
  pool = page_pool.PagePool(32, SIZE, copies=True)
  a, b, c = sequence(pool), sequence(pool), sequence(pool)
  fill(a, range(10))
  a.announce()
  assert fill(b, range(10)) == 9
  assert fill(c, [0, 1, 2, 3, 4, 5, 50, 51, 52]) == 6  # Of a full page, too.
  assert pool.take_copies() == [
    (a.pages[2], b.pages[2]),
    (a.pages[1], c.pages[1]),
  ]
  assert pool.adopted == 9 + 6
  # Other pixels are others here as well.
  tokens = [7, 1, 1, 8]
  fill(a, tokens, (image(0, 1, 2),))
  a.announce()
  assert fill(b, tokens, (image(1, 1, 2),)) == 1
  assert fill(c, tokens, (image(0, 1, 2),)) == 3


def test_the_last_token_is_never_taken_from_the_cache():
  pool = page_pool.PagePool(32, SIZE)
  fill(sequence(pool), range(9))
  for n in range(2, 9):
    seq = sequence(pool)
    seq.begin(np.arange(n, dtype=np.int32), (), n - 1)
    assert seq.cached == (n - 1) // SIZE * SIZE
    seq.clear()


def test_pages_outlive_their_sequence_until_they_are_needed():
  pool = page_pool.PagePool(8, SIZE)
  a = sequence(pool)
  fill(a, range(13))
  a.clear()
  assert pool.available == pool.capacity and pool.kept == 3
  b = sequence(pool)
  assert fill(b, [*range(13), 90]) == 12
  b.clear()
  c = sequence(pool)
  assert c.grow(28)  # All there is.
  c.clear()
  assert fill(sequence(pool), range(13)) == 0


def test_the_end_of_a_sequence_goes_first():
  pool = page_pool.PagePool(8, SIZE)
  a = sequence(pool)
  fill(a, range(17))
  a.clear()
  other = sequence(pool)
  assert other.grow(5 * SIZE)  # Three free ones, and two of the kept.
  again = sequence(pool)
  again.begin(np.arange(17, dtype=np.int32), (), 16)
  assert again.cached == 8


def test_other_pixels_are_another_page():
  pool = page_pool.PagePool(32, SIZE)
  tokens = [7, 1, 1, 1, 8, 9, 10, 11, 12]
  first = fill(sequence(pool), tokens, (image(0, 1),))
  assert first == 0
  assert fill(sequence(pool), tokens, (image(1, 1),)) == 0
  assert fill(sequence(pool), tokens, (image(0, 1),)) == 8
  # The same pixels one token later in the run are other vision tokens.
  assert page_pool.page_key(
    b"", np.array([1, 1]), 4, (image(0, 3),)
  ) != page_pool.page_key(b"", np.array([1, 1]), 4, (image(0, 2, 4),))


def test_what_others_may_read_is_not_written():
  pool = page_pool.PagePool(32, SIZE)
  a, b = sequence(pool), sequence(pool)
  fill(a, range(10))
  fill(b, range(10))
  # b goes on otherwise from the middle of a page that a reads too.
  b.begin(np.array([0, 1, 2, 3, 4, 5, 60, 61, 62], np.int32), (), 8)
  assert b.cached == 4 and b.pages == a.pages[:1]
  b.clear()
  # Held alone, the page is written, and found no more.
  a.begin(np.array([0, 1, 2, 3, 4, 5, 60, 61, 62], np.int32), (), 8)
  assert a.cached == 6
  a.clear()
  assert fill(sequence(pool), range(10)) == 4


def test_new_weights_take_a_resting_sequences_pages():
  pool = page_pool.PagePool(32, SIZE)
  a = sequence(pool)
  fill(a, range(9))
  pool.forget()
  a.outdate()
  assert not a.pages and not a.cached
  assert pool.available == pool.capacity
  assert fill(a, range(17)) == 0
  assert a.lost == 8  # Of 16 computed, those that were cached before.
  assert fill(a, range(17)) == 16 and not a.lost
  a.outdate()
  assert fill(a, [90, 91, 92]) == 0 and not a.lost  # Another sequence.


@pytest.mark.parametrize("pages", (0, 1))
def test_a_pool_needs_pages(pages):
  with pytest.raises(ValueError, match="pages must be >= 2"):
    page_pool.PagePool(pages, SIZE)


def test_equal_tokens_with_other_pixels_share_what_precedes_the_picture():
  tokens = np.array([1, 2, 9, 9, 9, 3, 4], np.int32)
  own, other = image(0, 2), image(1, 2)
  common = kv_cache.common_prefix
  assert common(tokens, (own,), tokens, (own,)) == len(tokens)
  assert common(tokens, (own,), tokens, (other,)) == 2
  assert common(tokens, (own,), tokens, ()) == 2


def test_pages_of_older_weights_are_not_published():
  pool = page_pool.PagePool(16, SIZE)
  seq = sequence(pool)
  tokens = np.arange(3 * SIZE, dtype=np.int32)
  seq.begin(tokens, (), 3 * SIZE - 1)
  assert seq.grow(3 * SIZE)
  seq.advance(SIZE)
  pool.forget()
  seq.outdate(keep=True)  # Its completion is being sampled.
  assert seq.cached == SIZE
  seq.advance(3 * SIZE - 1)
  # They attend to keys of the old weights: a session that has the first page
  # of the new ones must not adopt them.
  other = sequence(pool)
  other.begin(tokens, (), 3 * SIZE - 1)
  assert other.grow(3 * SIZE)
  other.advance(SIZE)
  assert other.adopt(3 * SIZE - 1) == 0
