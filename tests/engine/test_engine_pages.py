"""Sequences share pages; a full cache costs time and nothing else."""

import asyncio
import dataclasses
import time

from flax import nnx
import numpy as np
import pytest
import rollout_micro_policy as micro
import trials
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import requests as requests_lib

pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
ONE_SHAPE = dict(
  decode_rows=(4,),
  prefill_rows=(4,),
  window_buckets=(micro.CONTEXT,),
  patch_buckets=(16,),
)
PAGE = 8
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module", name="model")
def _model():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="store")
def _store():
  return micro.new_store()


@pytest.fixture(scope="module", name="compiled")
def _compiled():
  return {}


@pytest.fixture(name="make")
def _make(model, store, compiled):
  """Makes engines; those with as much cache share compiled programs."""
  engines = []

  def make(**changes):
    engine = micro.make_engine(model, store, **(ONE_SHAPE | changes))
    programs = engine._programs  # pylint: disable=protected-access
    programs_of_size = compiled.setdefault(programs.state.pages, {})
    programs._compiled.update(programs_of_size)  # pylint: disable=protected-access
    engines.append((engine, programs_of_size))
    return engine

  yield make
  for engine, programs_of_size in engines:
    programs_of_size.update(engine._programs._compiled)  # pylint: disable=protected-access
    engine.close()


def slow_down(engine):
  """Leaves the event loop time to see tokens before the next ones come."""
  decode = engine._programs.decode  # pylint: disable=protected-access

  def slow(*args, **options):
    time.sleep(0.02)
    return decode(*args, **options)

  engine._programs.decode = slow  # pylint: disable=protected-access


def held(engine):
  return engine.stats()["pages_held"]


async def release(engine, names):
  for name in names:
    await engine.release(name)
  async with asyncio.timeout(60):
    while engine.stats()["sessions"]:
      await asyncio.sleep(0.002)


def prompt(store, rng, before=10, after=20, size=(16, 16)):
  tokens = micro.with_text(np.zeros(0, np.int32), rng, before)
  tokens, spans = micro.with_image(tokens, (), micro.picture(store, rng, size))
  return micro.with_text(tokens, rng, after), spans


@pytest.mark.parametrize("lockstep", ("false", "true"))
def test_a_group_prefills_its_prompt_once(make, model, store, lockstep):
  """To the token: the page in which prompts end is copied."""
  tokens, spans = prompt(store, np.random.default_rng(0))
  members = 7  # More than slots, than rows of a call.
  engine = make(lockstep=lockstep, share_prefixes="true")
  requests = [
    (f"m{i}", micro.prompt_of(tokens, spans), GREEDY) for i in range(members)
  ]
  for name, *_ in requests:
    engine.open_session(name)
  for completion in micro.generate(engine, *requests):
    micro.check_greedy(model, store, tokens, spans, completion)
  stats = engine.stats()
  n = len(tokens) - 1
  assert n % PAGE
  assert stats["prefilled_tokens"] == n == stats["unique_prompt_tokens"]
  assert stats["shared_tokens"] == (members - 1) * n
  assert stats["images_encoded"] == 1


def test_sequences_that_part_within_a_page_share_up_to_there(
  make, model, store
):
  """A request waits for pages worth a call, copies them and continues alone."""
  rng = np.random.default_rng(11)
  begin = micro.with_text(np.zeros(0, np.int32), rng, 2 * PAGE + PAGE // 2)
  prompts = [np.append(begin, [3 + i]).astype(np.int32) for i in range(3)]
  prompts = [micro.with_text(p, rng, 7) for p in prompts]
  engine = make()
  requests = [
    (f"m{i}", micro.prompt_of(p), GREEDY) for i, p in enumerate(prompts)
  ]
  for p, completion in zip(prompts, micro.generate(engine, *requests)):
    micro.check_greedy(model, store, p, (), completion)
  stats = engine.stats()
  n = len(prompts[0]) - 1
  assert stats["prefilled_tokens"] == n + 2 * (n - len(begin))
  assert stats["unique_prompt_tokens"] == stats["prefilled_tokens"]
  assert stats["copied_pages"] == 2


def test_unique_tokens_do_not_hide_what_is_computed_again(make, store):
  tokens, spans = prompt(store, np.random.default_rng(12))
  engine = make(share_prefixes="false")
  requests = [
    (f"m{i}", micro.prompt_of(tokens, spans), GREEDY) for i in range(3)
  ]
  completions = micro.generate(engine, *requests)
  n = len(tokens) - 1
  stats = engine.stats()
  assert stats["prefilled_tokens"] == 3 * n
  assert stats["unique_prompt_tokens"] == n
  # What a session has sampled is cached, but for the last token.
  longer = np.append(tokens, [*completions[0].tokens, 3, 4]).astype(np.int32)
  micro.generate(engine, ("m0", micro.prompt_of(longer, spans), GREEDY))
  after = engine.stats()
  assert after["unique_prompt_tokens"] == n + 2
  assert after["prefilled_tokens"] == 3 * n + 2
  # Sampling again from what is cached, or from its beginning, takes none away.
  for again in (longer, longer[: n - 3]):
    spans_within = [span for span in spans if span.end <= len(again)]
    micro.generate(engine, ("m0", micro.prompt_of(again, spans_within), GREEDY))
    assert engine.stats()["unique_prompt_tokens"] == n + 2


def test_a_later_session_finds_what_a_released_one_left(make, model, store):
  rng = np.random.default_rng(1)
  tokens, spans = prompt(store, rng)
  engine = make()
  micro.generate(engine, ("a", micro.prompt_of(tokens, spans), GREEDY))
  asyncio.run(release(engine, ["a"]))
  assert held(engine) == 0
  longer = micro.with_text(tokens, rng, 5)
  (got,) = micro.generate(engine, ("b", micro.prompt_of(longer, spans), GREEDY))
  micro.check_greedy(model, store, longer, spans, got)
  assert engine.stats()["shared_tokens"] >= len(tokens) // PAGE * PAGE
  # Sampled tokens are found as well.
  continued = micro.with_text(np.append(longer, got.tokens), rng, 3)
  before = engine.stats()["prefilled_tokens"]
  next_prompt = micro.prompt_of(continued, spans)
  (got,) = micro.generate(engine, ("c", next_prompt, GREEDY))
  micro.check_greedy(model, store, continued, spans, got)
  assert engine.stats()["prefilled_tokens"] - before < 2 * PAGE


@pytest.mark.parametrize("lockstep", ("false", "true"))
def test_a_full_cache_preempts_and_loses_nothing(make, lockstep):
  """Four long completions in a cache that holds little more than one."""
  rng = np.random.default_rng(4)
  requests = []
  for i in range(4):
    tokens = micro.with_text(np.zeros(0, np.int32), rng, 9 + i)
    requests.append(
      (
        f"s{i}",
        micro.prompt_of(tokens),
        Sampling(max_new_tokens=45, temperature=1.3, seed=i, top_k=9),
      )
    )

  def play(engine):
    for name, *_ in requests:
      engine.open_session(name)
    return micro.generate(engine, *requests)

  want = play(make())
  engine = make(cache_tokens=80, lockstep=lockstep)
  got = play(engine)
  stats = engine.stats()
  assert stats["preemptions"] > 0
  assert stats["completed"] == 4 and not stats["failed"]
  for a, b in zip(got, want):
    assert len(a.tokens) == 45
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
  asyncio.run(release(engine, [name for name, *_ in requests]))
  assert held(engine) == 0


async def test_many_sessions_in_a_small_cache(make, model, store):
  """Images, turns, cancellations; right to the token, and no page is lost."""
  engine = make(cache_tokens=micro.CONTEXT + 2 * PAGE)

  async def play(name, seed):
    rng = np.random.default_rng(seed)
    tokens, spans = prompt(store, rng, 3, 3, (16, 8))
    for _ in range(3):
      sampling = Sampling(
        max_new_tokens=int(rng.integers(2, 14)), temperature=0.0
      )
      call = engine.generate(
        micro.prompt_of(tokens, spans), sampling, session=name
      )
      if rng.random() < 0.2:
        with pytest.raises(TimeoutError):
          async with asyncio.timeout(0.001):
            await call
            raise TimeoutError  # Was as fast.
        continue
      completion = await call
      micro.check_greedy(model, store, tokens, spans, completion)
      tokens = micro.with_text(np.append(tokens, completion.tokens), rng, 2)
    if rng.random() < 0.7:
      await engine.release(name)

  names = [f"p{i}" for i in range(24)]
  async with asyncio.timeout(250):
    await asyncio.gather(*(play(name, i) for i, name in enumerate(names)))
  stats = engine.stats()
  assert stats["evictions"] > 0 and stats["preemptions"] > 0
  assert stats["active"] == stats["waiting"] == 0
  await release(engine, names)
  assert held(engine) == 0


class TellingPolicy(micro.MicroPolicy):
  """A policy whose keys and values depend on the program that computed them."""

  def extend(self, tokens, positions, starts, lengths, cache, *images):
    marks = 0.1 * tokens.shape[1] + 0.01 * cache["kv"].shape[2]
    marks += 0.001 * starts[:, None, None]
    return super().extend(
      tokens, positions + marks, starts, lengths, cache, *images
    )


@pytest.fixture(
  name="copies", params=trials.by_default([True], [True, False], unlike=[False])
)
def _copies(request, monkeypatch):
  """Whether a page's beginning can be copied: not every policy's can."""
  monkeypatch.setattr(device_state.DeviceState, "copies_pages", request.param)
  return request.param


@pytest.mark.parametrize("head", (True, False))
def test_a_group_waits_for_no_call_that_it_cannot_use(
  make, store, copies, head
):
  """Members without copies compute the end of their prompt in one call."""
  tokens, spans = prompt(store, np.random.default_rng(0), before=12)
  tokens[9] = 5
  sampling = dataclasses.replace(GREEDY, stop_token_ids=(5,) if head else ())
  engine = make(lockstep="true", slots=12, prefill_rows=(12,))
  requests = [
    (f"m{i}", micro.prompt_of(tokens, spans), sampling) for i in range(12)
  ]
  for name, *_ in requests:
    engine.open_session(name)
  micro.generate(engine, *requests)
  n, stats = len(tokens) - 1, engine.stats()
  assert stats["prefill_calls"] <= -(-n // PAGE) + 1
  last = 0 if copies else 11 * (n % PAGE)
  assert stats["prefilled_tokens"] <= n + last


def test_in_lockstep_no_bit_depends_on_other_sessions(store, copies):
  """Neither sharing, nor other sessions of now or before, change a bit."""
  stop, model = 5, TellingPolicy(nnx.Rngs(0))

  def make(**options):
    return micro.make_engine(
      model,
      store,
      lockstep="true",
      prefill_buckets=(8, 24),
      cache_tokens=12 * micro.CONTEXT,
      **options,
    )

  async def episode(engine, i):
    everyone, group, own = (
      np.random.default_rng([kind, n]) for kind, n in enumerate((0, i // 3, i))
    )
    tokens = micro.with_text(np.zeros(0, np.int32), everyone, 19)
    tokens = np.where(tokens == stop, 6, tokens)
    tokens = np.append(tokens, stop).astype(np.int32)
    tokens = micro.with_text(tokens, group, 5 + i // 3)
    tokens, spans = micro.with_image(
      tokens, (), micro.picture(store, group, (16, 8))
    )
    tokens = micro.with_text(tokens, group, 6)
    results = []
    for turn in range(3):
      sampling = Sampling(
        max_new_tokens=5, seed=i // 2 + turn, stop_token_ids=(stop,)
      )
      got = await engine.generate(
        micro.prompt_of(tokens, spans), sampling, session=f"s{i}"
      )
      results.append((got.tokens.tolist(), got.logprobs.tobytes()))
      rng = group if i % 2 else own
      tokens = np.append(tokens, got.tokens).astype(np.int32)
      if turn == i % 4:  # It rewrites its history.
        tokens, spans = tokens[: spans[0].offset - i % 3], ()
      tokens = micro.with_text(tokens, rng, 4)
    await engine.release(f"s{i}")
    return results

  async def play(engine, size):
    results = []
    for start in range(0, 12, size):
      some = range(start, min(start + size, 12))
      for i in some:
        engine.open_session(f"s{i}")
      results += await asyncio.gather(*(episode(engine, i) for i in some))
    return results

  def played(engine, together):
    return asyncio.run(asyncio.wait_for(play(engine, together), 250))

  with make(share_prefixes="false") as alone, make() as engine:
    want = played(alone, 12)
    spent = alone.stats()["prefilled_tokens"]
    for together in (12, 5, 1):
      before = engine.stats()["prefilled_tokens"]
      assert want == played(engine, together), together
      stats = engine.stats()
      assert stats["prefilled_tokens"] - before < 0.8 * spent
    assert stats["evictions"] == 0
    assert bool(stats["copied_pages"]) == copies


def play_group(engine, store, delay_seed):
  """Groups of three that begin alike, in a cache too small for them."""
  delays = np.random.default_rng(delay_seed)

  async def episode(i):
    shared, rng = np.random.default_rng(i // 3), np.random.default_rng(i)
    tokens = micro.with_text(np.array([3], np.int32), shared, 9)
    image = micro.picture(store, shared, (16, 8))
    tokens, spans = micro.with_image(tokens, (), image)
    results = []
    for _ in range(1 + i % 4):
      got = await engine.generate(
        micro.prompt_of(tokens, spans),
        Sampling(max_new_tokens=5, seed=100 * i + len(tokens)),
        session=f"g{i}",
      )
      results.append((got.tokens.tolist(), got.logprobs.tobytes()))
      tokens = micro.with_text(np.append(tokens, got.tokens), rng, 2)
      await asyncio.sleep(delays.random() * 0.02)
    await engine.release(f"g{i}")
    return results

  async def run():
    for i in range(9):
      engine.open_session(f"g{i}")
    return await asyncio.gather(*(episode(i) for i in range(9)))

  return asyncio.run(asyncio.wait_for(run(), 250))


@pytest.mark.slow
def test_lockstep_shares_pages_and_is_equal_to_the_bit(make, store):
  """Also when an engine has done other things before."""
  # Fewer pages than the sessions want, so that idle ones lose theirs.
  small = dict(
    lockstep="true", share_prefixes="true", cache_tokens=2 * micro.CONTEXT
  )
  first = make(**small)
  want = play_group(first, store, 1)
  stats = first.stats()
  assert stats["shared_tokens"] and stats["copied_pages"]
  assert stats["evictions"]
  assert want == play_group(make(**small), store, 2)
  other = make(**small)
  asyncio.run(
    asyncio.wait_for(
      other.generate(
        micro.prompt_of([3, 4]), Sampling(max_new_tokens=3), session="x"
      ),
      60,
    )
  )
  asyncio.run(other.release("x"))
  play_group(other, store, 3)
  assert want == play_group(other, store, 4)


async def test_an_update_in_the_middle_of_preemptions(make, model, store):
  """Each token's version is that of the weights that drew it."""
  engine = make(cache_tokens=72, on_update="recompute")
  slow_down(engine)
  other = micro.MicroPolicy(nnx.Rngs(9))
  rng = np.random.default_rng(6)
  prompts = [micro.with_text(np.zeros(0, np.int32), rng, 9) for _ in range(4)]
  sampled = 0

  def on_tokens(new):
    nonlocal sampled
    sampled += len(new)
    if sampled > 60 and engine.version == 0:
      engine.update_weights(1, other)

  async with asyncio.timeout(250):
    completions = await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(p),
          Sampling(max_new_tokens=45, temperature=0.0),
          session=f"s{i}",
          on_tokens=on_tokens,
        )
        for i, p in enumerate(prompts)
      )
    )
  assert engine.stats()["preemptions"] > 0
  mixed = 0
  for p, completion in zip(prompts, completions):
    full = np.append(p, completion.tokens)
    by_weights = [
      micro.reference_logprobs(m, store, full, ())[len(p) - 1 : -1]
      for m in (model, other)
    ]
    assert (np.diff(completion.versions) >= 0).all()
    mixed += len(set(completion.versions.tolist())) == 2
    for i, (token, version) in enumerate(
      zip(completion.tokens, completion.versions)
    ):
      row = by_weights[version][i]
      assert token == row.argmax()
      assert abs(completion.logprobs[i] - row.max()) < 1e-4
  assert mixed


async def test_between_turns_waits_for_the_preempted_too(make, model, store):
  """Completions keep one version each, however often they begin again."""
  engine = make(cache_tokens=72, update_policy="between_turns")
  slow_down(engine)
  rng = np.random.default_rng(6)
  prompts = [micro.with_text(np.zeros(0, np.int32), rng, 9) for _ in range(4)]
  other = micro.MicroPolicy(nnx.Rngs(9))
  updates = []

  def on_tokens(new):
    del new
    if not updates and engine.stats()["preemptions"]:
      updates.append(engine.update_weights(1, other))

  async with asyncio.timeout(250):
    completions = await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(p),
          Sampling(max_new_tokens=45, temperature=0.0),
          session=f"s{i}",
          on_tokens=on_tokens,
        )
        for i, p in enumerate(prompts)
      )
    )
    late = await engine.generate(
      micro.prompt_of(prompts[0]), GREEDY, session="late"
    )
  assert updates
  for p, completion in zip(prompts, completions):
    (version,) = set(completion.versions.tolist())
    weights = (model, other)[version]
    micro.check_greedy(weights, store, p, (), completion)
  assert set(late.versions.tolist()) == {1}


async def test_a_prompt_that_cannot_be_placed_again_fails_alone(
  make, model, store, monkeypatch
):
  """The second time it is asked, the processor raises."""
  engine = make(cache_tokens=72, share_prefixes="false")
  processor = engine._processor  # pylint: disable=protected-access
  rng = np.random.default_rng(6)
  prompts = [
    micro.with_text(np.zeros(0, np.int32), rng, 9 + i) for i in range(4)
  ]
  lengths, ask = set(), type(processor).positions

  def positions(self, tokens, images, start=0):
    if len(tokens) in lengths and len(tokens) == 13:  # The last one's.
      raise ValueError("not again")
    lengths.add(len(tokens))
    return ask(self, tokens, images, start)

  monkeypatch.setattr(type(processor), "positions", positions)
  # As if what is known began later than where it is prefilled from.
  placing = engine._scheduler._positions  # pylint: disable=protected-access
  locate = placing.locate

  def forgetful(request, start):
    locate(request, start)
    if len(request.prompt) == 12:
      request.positions = request.positions[4:]
      request.positions_from += 4

  monkeypatch.setattr(placing, "locate", forgetful)
  async with asyncio.timeout(100):
    outcomes = await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(p),
          Sampling(max_new_tokens=20, temperature=0.0),
          session=f"s{i}",
        )
        for i, p in enumerate(prompts)
      ),
      return_exceptions=True,
    )
  assert isinstance(outcomes[3], ValueError) and "not again" in str(outcomes[3])
  for p, completion in zip(prompts[:3], outcomes):
    micro.check_greedy(model, store, p, (), completion)
  assert engine.stats()["recoveries"] == 0


def ends(engine, *requests):
  """Sessions in the order in which they end, a round at a time."""
  scheduler = engine._scheduler  # pylint: disable=protected-access
  for request in requests:
    scheduler.slots.enqueue(request)
  order = []
  for _ in range(100):
    scheduler.step()
    order += [r.session for r in scheduler.take_done()]
    if len(order) == len(requests):
      return order
  raise AssertionError(f"only {order} ended")


def test_priority_is_served_first(make):
  engine = make(slots=1, decode_rows=(1,), prefill_rows=(1,))
  requests = [
    requests_lib.Request(f"p{p}", micro.prompt_of([3, 4]), GREEDY, priority=p)
    for p in (3, 2, -1, 1)
  ]
  assert ends(engine, *requests) == ["p-1", "p1", "p2", "p3"]


def test_a_short_request_does_not_overtake_one_that_waits_for_pages(make):
  engine = make(cache_tokens=micro.CONTEXT)
  long = Sampling(max_new_tokens=micro.CONTEXT - 30, temperature=0.0)
  requests = [
    requests_lib.Request(name, micro.prompt_of(tokens), sampling, priority=p)
    for p, (name, tokens, sampling) in enumerate(
      (
        ("runs", [3] * 25, long),
        ("waits", [4] * (micro.CONTEXT - 10), GREEDY),
        ("short", [5, 6], GREEDY),
      )
    )
  ]
  assert ends(engine, *requests) == ["runs", "waits", "short"]
  assert requests[1].admitted < requests[2].admitted
  assert not engine.stats()["preemptions"]


def test_a_later_request_of_less_weight_is_preempted(make):
  engine = make(cache_tokens=micro.CONTEXT)
  long = Sampling(max_new_tokens=50, temperature=0.0)
  requests = [
    requests_lib.Request(f"p{p}", micro.prompt_of([3, 4 + p]), long, priority=p)
    for p in (2, 1, 0)
  ]
  assert ends(engine, *requests) == ["p0", "p1", "p2"]
  assert engine.stats()["preemptions"] >= 2


@pytest.mark.parametrize("urgent", (0, 1))
def test_the_prompt_of_more_weight_is_prefilled_first(make, urgent):
  engine = make(prefill_buckets=(8, 16), prefill_rows=(1,))
  prefill, sizes = engine._programs.prefill, []  # pylint: disable=protected-access

  def noted(pages, rows):
    sizes.append(rows["tokens"].shape[1])
    prefill(pages, rows)

  engine._programs.prefill = noted  # pylint: disable=protected-access
  rng = np.random.default_rng(9)
  requests = [
    requests_lib.Request(
      f"{length}",
      micro.prompt_of(micro.with_text(np.zeros(0, np.int32), rng, length)),
      GREEDY,
      priority=abs(i - urgent),
    )
    for i, length in enumerate((6, 33))
  ]
  ends(engine, *requests)
  assert sizes == ([8, 16, 16] if urgent == 0 else [16, 16, 8])


@pytest.mark.parametrize("calls", (1, 0))
def test_a_long_prompt_does_not_hold_up_the_others(make, calls):
  engine = make(prefill_calls_per_round=calls)
  rng = np.random.default_rng(7)
  short, long = (
    requests_lib.Request(
      name,
      micro.prompt_of(micro.with_text(np.zeros(0, np.int32), rng, length)),
      Sampling(max_new_tokens=new, temperature=0.0),
    )
    for name, length, new in (("short", 5, 8), ("long", 56, 4))
  )
  # Seven chunks and one decode call, against one chunk and two.
  order = ["long", "short"] if calls == 0 else ["short", "long"]
  assert ends(engine, short, long) == order


@pytest.mark.parametrize(
  "options, message",
  (
    (dict(cache_tokens=63), "cache_tokens=63 is below context_length=64"),
    (dict(page_size=-1), "page_size\n.*greater than or equal to 0"),
  ),
)
def test_bad_sizes_are_refused(make, options, message):
  with pytest.raises(ValueError, match=message):
    make(**options)


@pytest.mark.parametrize("page_size", (1, 5, 64, 200))
def test_any_page_size_gives_the_same(make, model, store, page_size):
  engine = make(page_size=page_size, window_buckets=(30,))
  tokens, spans = prompt(store, np.random.default_rng(8))
  for _ in range(2):
    (got,) = micro.generate(
      engine, ("s", micro.prompt_of(tokens, spans), GREEDY)
    )
    micro.check_greedy(model, store, tokens, spans, got)
    tokens = np.append(tokens, got.tokens)
