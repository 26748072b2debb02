"""Options that few requests use, compared with a full forward pass."""

import asyncio

from flax import nnx
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import constrained_decoding

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
PROMPT = [3, 4, 5, 6, 7]
BANNED = (micro.PAD, micro.IMAGE)


@pytest.fixture(scope="module", name="model")
def _model():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="engine")
def _engine(model):
  with micro.make_engine(
    model,
    micro.new_store(),
    decode_rows=(4,),
    window_buckets=(micro.CONTEXT,),
    features=("details", "grammar", "penalties"),
  ) as engine:
    engine.warm_up()
    yield engine
    stats = engine.stats()
    assert stats["compiles_after_warm_up"] == 0
    assert stats["compiles_on_demand"] == 0


def generate(engine, *requests):
  """Runs (prompt, sampling, options) requests concurrently."""

  async def run():
    return await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(prompt), sampling, session=f"s{i}", **options
        )
        for i, (prompt, sampling, options) in enumerate(requests)
      )
    )

  return asyncio.run(asyncio.wait_for(run(), 250))


def rows_of(model, prompt, tokens, banned=BANNED):
  """float64[S, V] log-probs that the tokens were sampled from."""
  full = np.append(prompt, tokens).astype(np.int32)
  logprobs = micro.reference_logprobs(
    model, micro.new_store(), full, (), banned
  )
  return logprobs[len(prompt) - 1 : len(full) - 1].astype(np.float64)


def renormalised(rows, temperature, keep):
  """Log-probs at a temperature of what `keep` is true for."""
  logits = np.where(keep, rows / temperature, -np.inf)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def at(rows, tokens):
  return rows[np.arange(len(tokens)), tokens]


# --- min-p ------------------------------------------------------------------


def test_min_p_leaves_what_is_likely_enough(engine, model):
  options = dict(max_new_tokens=40, temperature=1.3, min_p=0.2)
  (completion,) = generate(engine, (PROMPT, Sampling(seed=1, **options), {}))
  scaled = rows_of(model, PROMPT, completion.tokens) / 1.3
  keep = scaled >= scaled.max(-1, keepdims=True) + np.log(0.2)
  assert (keep.sum(-1) < micro.VOCAB // 2).all()
  assert at(keep, completion.tokens).all()
  want = renormalised(rows_of(model, PROMPT, completion.tokens), 1.3, keep)
  np.testing.assert_allclose(
    completion.logprobs, at(want, completion.tokens), atol=1e-4
  )
  (other,) = generate(
    engine, (PROMPT, Sampling(seed=1, max_new_tokens=40, temperature=1.3), {})
  )
  assert other.tokens.tolist() != completion.tokens.tolist()


# --- penalties --------------------------------------------------------------


def penalties_of(tokens, frequency, presence):
  """float64[S, V] that each draw's logits lose, by the tokens before it."""
  times = np.zeros((len(tokens), micro.VOCAB))
  for i, token in enumerate(tokens[:-1]):
    times[i + 1 :, token] += 1
  return frequency * times + presence * (times > 0)


@pytest.mark.parametrize(
  "frequency,presence,temperature",
  [(0.3, 0.0, 1.0), (0.0, 1.5, 0.7), (-2.0, 0.5, 1.0), (2.0, 2.0, 0.0)],
)
def test_penalties_are_of_the_completion_and_log_probs_know_them(
  engine, model, frequency, presence, temperature
):
  options = dict(max_new_tokens=30, temperature=temperature, seed=4)
  penalized = Sampling(
    frequency_penalty=frequency, presence_penalty=presence, **options
  )
  one, plain = generate(
    engine, (PROMPT, penalized, {}), (PROMPT, Sampling(**options), {})
  )
  rows = rows_of(model, PROMPT, one.tokens)
  rows -= penalties_of(one.tokens, frequency, presence)
  want = renormalised(rows, temperature or 1.0, np.isfinite(rows))
  np.testing.assert_allclose(one.logprobs, at(want, one.tokens), atol=1e-4)
  if not temperature:
    np.testing.assert_array_equal(one.tokens, want.argmax(-1))
  assert one.tokens.tolist() != plain.tokens.tolist()
  # Beside it, a request without penalties is untouched.
  (alone,) = generate(engine, (PROMPT, Sampling(**options), {}))
  np.testing.assert_array_equal(plain.tokens, alone.tokens)


def test_penalties_go_with_a_grammar_and_raw_log_probs_do_not_know_them(
  engine, model
):
  sampling = Sampling(
    max_new_tokens=8,
    seed=5,
    presence_penalty=2.0,
    top_logprobs=20,
    raw_logprobs=True,
  )
  (completion,) = generate(engine, (PROMPT, sampling, {"grammar": EvenOdd(20)}))
  tokens = completion.tokens
  assert [t % 2 for t in tokens] == [0, 1] * 4
  raw = rows_of(model, PROMPT, tokens, banned=())
  np.testing.assert_allclose(
    completion.raw_logprobs, at(raw, tokens), atol=1e-4
  )
  rows = rows_of(model, PROMPT, tokens) - penalties_of(tokens, 0.0, 2.0)
  keep = np.isfinite(rows)
  for i in range(8):
    keep[i, 1 - i % 2 :: 2] = False
  keep[:, micro.STOP] = False
  want = renormalised(rows, 1.0, keep)
  np.testing.assert_allclose(completion.logprobs, at(want, tokens), atol=1e-4)


def test_a_preempted_completion_keeps_its_penalties(model):
  sampling = Sampling(max_new_tokens=40, seed=2, frequency_penalty=1.0)
  requests = [([3, 4, i], sampling, {}) for i in (5, 6, 7)]
  with micro.make_engine(
    model,
    micro.new_store(),
    decode_rows=(4,),
    window_buckets=(micro.CONTEXT,),
    cache_tokens=micro.CONTEXT + 24,
  ) as small:
    completions = generate(small, *requests)
    assert small.stats()["preemptions"]
    for completion, request in zip(completions, requests):
      (alone,) = generate(small, request)
      np.testing.assert_array_equal(completion.tokens, alone.tokens)
      np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-4)


# --- alternatives and raw log-probs -----------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_alternatives_are_of_the_sampled_distribution(
  engine, model, temperature
):
  plain = Sampling(max_new_tokens=12, temperature=temperature, top_k=6, seed=3)
  detailed = Sampling(
    max_new_tokens=12,
    temperature=temperature,
    top_k=6,
    seed=3,
    top_logprobs=8,
    raw_logprobs=True,
  )
  one, two = generate(engine, (PROMPT, plain, {}), (PROMPT, detailed, {}))
  # Asking changes nothing.
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
  assert one.top_tokens is one.top_logprobs is one.raw_logprobs is None
  rows = rows_of(model, PROMPT, two.tokens)
  order = np.argsort(-rows, axis=-1)[:, :8]
  assert two.top_tokens.shape == two.top_logprobs.shape == (len(rows), 8)
  if temperature:
    sixth = np.sort(rows, axis=-1)[:, -6][:, None]
    want = renormalised(rows, temperature, rows >= sixth)
    assert np.isneginf(two.top_logprobs[:, 6:]).all()
    first = slice(6)
  else:
    want, first = rows, slice(8)
  np.testing.assert_array_equal(two.top_tokens[:, first], order[:, first])
  np.testing.assert_allclose(
    two.top_logprobs[:, first],
    np.take_along_axis(want, order, -1)[:, first],
    atol=1e-4,
  )
  raw = rows_of(model, PROMPT, two.tokens, banned=())
  np.testing.assert_allclose(two.raw_logprobs, at(raw, two.tokens), atol=1e-4)
  assert not np.allclose(two.raw_logprobs, two.logprobs, atol=1e-2)


def test_the_two_do_not_share_a_decode_call_but_a_batch(engine):
  requests = [
    (PROMPT, Sampling(seed=i, max_new_tokens=20, top_logprobs=i % 2), {})
    for i in range(6)
  ]
  together = generate(engine, *requests)
  for i, request in enumerate(requests):
    (alone,) = generate(engine, request)
    np.testing.assert_array_equal(together[i].tokens, alone.tokens)
    assert (together[i].top_tokens is None) == (not i % 2)


def test_bad_values_are_refused():
  for options, words in (
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": float("nan")}, "min_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
  ):
    with pytest.raises(ValueError, match=words):
      Sampling(**options)
  with pytest.raises(ValueError, match="raw_logprobs has 1 entries"):
    policy_client.Completion([1, 2], [0, 0], [0, 0], "stop", raw_logprobs=[0])


# --- an end that only text knows --------------------------------------------


class Pair:
  """Ends with the first time that two tokens follow each other."""

  def __init__(self, pair):
    self.pair, self.shown = pair, []

  def __call__(self, tokens):
    self.shown.append(len(tokens))
    for i in range(len(tokens) - 1):
      if tuple(tokens[i : i + 2]) == self.pair:
        return i + 2
    return None


@pytest.mark.parametrize("end", [2, 3, 4, 5, 9])
def test_a_completion_ends_with_the_token_that_completes_it(engine, end):
  sampling = Sampling(max_new_tokens=24, seed=11)
  (uncut,) = generate(engine, (PROMPT, sampling, {}))
  tokens = uncut.tokens.tolist()
  pair = tuple(tokens[end - 2 : end])
  first = next(i for i in range(2, 25) if tuple(tokens[i - 2 : i]) == pair)
  reported, stop_when = [], Pair(pair)
  before = engine.stats()
  (cut,) = generate(
    engine,
    (PROMPT, sampling, {"stop_when": stop_when, "on_tokens": reported.append}),
  )
  after = engine.stats()
  assert cut.tokens.tolist() == tokens[:first]
  np.testing.assert_allclose(cut.logprobs, uncut.logprobs[:first], atol=1e-5)
  assert cut.finish_reason == policy_client.FinishReason.STOP
  # No callback gets the tokens that were sampled beyond the end.
  assert np.concatenate(reported).tolist() == tokens[:first]
  surplus = after["surplus_tokens"] - before["surplus_tokens"]
  assert surplus == stop_when.shown[-1] - first <= 3


def test_the_turn_after_a_cut_goes_on_with_what_was_kept(engine, model):
  sampling = Sampling(max_new_tokens=24, seed=11)
  (uncut,) = generate(engine, (PROMPT, sampling, {}))
  pair = tuple(uncut.tokens[1:3].tolist())

  async def turns():
    first = await engine.generate(
      micro.prompt_of(PROMPT), sampling, session="cut", stop_when=Pair(pair)
    )
    prompt = [*PROMPT, *first.tokens.tolist(), 9, 10]
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    return prompt, await engine.generate(
      micro.prompt_of(prompt), greedy, session="cut"
    )

  prompt, second = asyncio.run(turns())
  rows = rows_of(model, prompt, second.tokens)
  np.testing.assert_array_equal(second.tokens, rows.argmax(-1))
  np.testing.assert_allclose(second.logprobs, rows.max(-1), atol=1e-4)
  assert second.metrics["reused_tokens"] >= len(prompt) - 5


def test_one_that_steers_badly_fails_alone(engine):
  def raises(tokens):
    raise KeyError("steering")

  async def run():
    return await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(PROMPT),
          Sampling(max_new_tokens=8, seed=1),
          session=f"b{i}",
          stop_when=stop_when,
        )
        for i, stop_when in enumerate((raises, lambda t: 0, None))
      ),
      return_exceptions=True,
    )

  one, two, three = asyncio.run(run())
  assert isinstance(one, KeyError)
  assert isinstance(two, ValueError) and "stop_when returned 0" in str(two)
  assert len(three.tokens) == 8
  assert engine.healthy and not engine.stats()["active"]


# --- grammars ---------------------------------------------------------------


class EvenOdd:
  """Even and odd tokens by turns, `length` of them, then the end."""

  def __init__(self, length):
    self.length, self.taken = length, []

  def allowed(self):
    mask = np.zeros(micro.VOCAB, bool)
    if len(self.taken) == self.length:
      mask[micro.STOP] = True
    else:
      mask[len(self.taken) % 2 :: 2] = True
      mask[micro.STOP] = False
    return constrained_decoding.pack(mask)

  def advance(self, token):
    self.taken.append(token)


def test_a_grammar_is_kept_to_and_log_probs_are_of_what_it_leaves(
  engine, model
):
  sampling = Sampling(
    max_new_tokens=20, seed=5, temperature=1.2, stop_token_ids=(micro.STOP,)
  )
  grammar = EvenOdd(9)
  constrained, free = generate(
    engine, (PROMPT, sampling, {"grammar": grammar}), (PROMPT, sampling, {})
  )
  tokens = constrained.tokens.tolist()
  assert [t % 2 for t in tokens[:9]] == [0, 1] * 4 + [0]
  assert tokens[9:] == [micro.STOP] and grammar.taken == tokens[:9]
  assert constrained.finish_reason == policy_client.FinishReason.STOP
  assert constrained.logprobs[-1] == 0
  rows = rows_of(model, PROMPT, constrained.tokens)
  keep = np.zeros(rows.shape, bool)
  for i in range(9):
    keep[i, i % 2 :: 2] = True
  keep[:, list(BANNED)] = False  # Banned all the same.
  keep[:, micro.STOP] = False
  keep[9, micro.STOP] = True
  want = renormalised(rows, 1.2, keep)
  np.testing.assert_allclose(
    constrained.logprobs, at(want, constrained.tokens), atol=1e-4
  )
  # Who has none is free.
  (alone,) = generate(engine, (PROMPT, sampling, {}))
  np.testing.assert_array_equal(free.tokens, alone.tokens)


def test_a_grammar_and_alternatives_go_together(engine):
  sampling = Sampling(
    max_new_tokens=6, seed=5, top_logprobs=20, raw_logprobs=True
  )
  (completion,) = generate(engine, (PROMPT, sampling, {"grammar": EvenOdd(20)}))
  for i, (tokens, logprobs) in enumerate(
    zip(completion.top_tokens, completion.top_logprobs)
  ):
    allowed = tokens[np.isfinite(logprobs)]
    assert set(allowed % 2) == {i % 2} and not set(allowed) & set(BANNED)
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-4)
  assert (completion.raw_logprobs < completion.logprobs).all()


def test_a_grammar_that_leaves_nothing_fails_its_request(engine):
  class Nothing(EvenOdd):
    def allowed(self):
      mask = np.zeros(micro.VOCAB, bool)
      mask[list(BANNED)] = True
      return constrained_decoding.pack(mask)

  async def run():
    return await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(PROMPT),
          Sampling(max_new_tokens=8, seed=1),
          session=f"g{i}",
          grammar=grammar,
        )
        for i, grammar in enumerate((Nothing(3), EvenOdd(20)))
      ),
      return_exceptions=True,
    )

  nothing, other = asyncio.run(run())
  assert isinstance(nothing, ValueError)
  assert "allows no token" in str(nothing)
  assert len(other.tokens) == 8


def test_what_is_preempted_loses_no_detail_and_no_state(model):
  sampling = Sampling(max_new_tokens=40, seed=2, top_logprobs=3)
  # Room for one whole context and a little more.
  with micro.make_engine(
    model,
    micro.new_store(),
    decode_rows=(4,),
    window_buckets=(micro.CONTEXT,),
    cache_tokens=micro.CONTEXT + 24,
  ) as small:
    options = [{"grammar": EvenOdd(60)}, {}, {"stop_when": Pair((-1, -1))}]
    requests = [([3, 4, i], sampling, o) for i, o in enumerate(options, 5)]
    completions = generate(small, *requests)
    assert small.stats()["preemptions"]
    for i, (prompt, _, option) in enumerate(requests):
      if "grammar" in option:
        option = {"grammar": EvenOdd(60)}
      (alone,) = generate(small, (prompt, sampling, option))
      np.testing.assert_array_equal(completions[i].tokens, alone.tokens)
      np.testing.assert_array_equal(completions[i].top_tokens, alone.top_tokens)
      got = completions[i]
      assert len(got.top_logprobs) == len(got.tokens) == 40
    stats = small.stats()
    assert stats["compiles_on_demand"] == stats["compiles_after_warm_up"] == 0


def test_a_grammar_takes_pages_for_one_token_at_a_time(model):
  """Its tokens come one a call: pages for more would preempt for nothing."""
  page, steps = 8, 4
  with micro.make_engine(
    model,
    micro.new_store(),
    decode_rows=(4,),
    window_buckets=(micro.CONTEXT,),
    page_size=page,
    decode_steps_per_call=steps,
    slots=micro.CONTEXT // page,
    cache_tokens=micro.CONTEXT,
  ) as engine:
    many = micro.CONTEXT // page
    # The first call's tokens fill a page; the grammar ends within it.
    length = page - steps + 1
    sampling = Sampling(
      max_new_tokens=3 * page, seed=3, stop_token_ids=(micro.STOP,)
    )
    options = [{"grammar": EvenOdd(steps - 2)} for _ in range(many)]
    requests = [
      ([3 + i] * length, sampling, option) for i, option in enumerate(options)
    ]
    for completion in generate(engine, *requests):
      assert len(completion.tokens) == steps - 1
    assert engine.stats()["preemptions"] == 0


def test_compiling_on_demand_is_told_apart(model):
  with micro.make_engine(
    model, micro.new_store(), decode_rows=(4,), window_buckets=(micro.CONTEXT,)
  ) as engine:
    engine.warm_up()
    generate(engine, (PROMPT, Sampling(max_new_tokens=4), {}))
    assert engine.stats()["compiles_on_demand"] == 0
    generate(engine, (PROMPT, Sampling(max_new_tokens=4, top_logprobs=1), {}))
    generate(engine, (PROMPT, Sampling(max_new_tokens=4, top_logprobs=2), {}))
    stats = engine.stats()
    assert stats["compiles_on_demand"] == 1
    assert stats["compiles_after_warm_up"] == 0


class Panic(BaseException):
  """As native code raises that has failed an assertion."""


class Says:
  """A grammar whose mask is whatever it was given; an exception is raised."""

  def __init__(self, mask):
    self.mask = mask

  def allowed(self):
    if isinstance(self.mask, BaseException):
      raise self.mask
    return self.mask

  def advance(self, token):
    del token


def _raise(error):
  raise error


WORDS = -(-micro.VOCAB // 32)


@pytest.mark.parametrize(
  "options, words",
  (
    (dict(grammar=Says(np.ones(1, np.uint32))), r"uint32\[1\]"),
    (dict(grammar=Says(np.ones((1, WORDS), np.uint32))), r"uint32\[1, "),
    (dict(grammar=Says(np.ones(WORDS, np.float32))), "float32"),
    (dict(grammar=Says(Panic("lost"))), "Panic: lost"),
    (dict(stop_when=lambda tokens: 1.0), "1.0, which is not a number"),
    (dict(stop_when=lambda tokens: "x"), "'x', which is not a number"),
    (dict(stop_when=lambda tokens: _raise(Panic("lost"))), "Panic: lost"),
  ),
)
def test_who_steers_wrongly_fails_alone(engine, options, words):
  sampling = Sampling(max_new_tokens=9, seed=1)
  everything = constrained_decoding.pack(np.ones(micro.VOCAB, bool))
  right = dict(grammar=Says(everything))

  async def run():
    return await asyncio.gather(
      *(
        engine.generate(
          micro.prompt_of(PROMPT), sampling, session=name, **arguments
        )
        for name, arguments in (("a", {}), ("b", right), ("c", options))
      ),
      return_exceptions=True,
    )

  a, b, c = asyncio.run(asyncio.wait_for(run(), 100))
  assert len(a.tokens) == len(b.tokens) == 9
  with pytest.raises((ValueError, RuntimeError), match=words):
    raise c
  assert engine.healthy
