"""Drafts save steps, and change nothing that is sampled."""

import asyncio

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import drafts
from tunix.rl.multi_turn.policy import text_inputs
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
Texts = st.lists(st.integers(0, 3), min_size=6, max_size=40)


# --- where drafts come from --------------------------------------------------


def draft_of(text, count):
  """Returns what followed the longest, then latest, earlier match."""
  last, best = len(text) - 1, (1, None)
  for place in range(4, last):
    length = 0
    while length < 4 and text[place - length] == text[last - length]:
      length += 1
    if length >= max(2, best[0]):
      best = length, place
  if best[1] is None:
    return [-1] * count
  behind = text[best[1] + 1 :]
  return [behind[i % len(behind)] for i in range(count)]


@given(text=Texts, count=st.integers(1, 5), pad=st.integers(0, 8))
def test_drafts_are_what_followed_the_latest_longest_match(text, count, pad):
  padded = np.array([[*text, *[-1] * (48 - len(text) + pad)]], np.int32)
  last = np.array([len(text) - 1], np.int32)
  got = np.asarray(drafts.propose(padded, last, count))
  assert got[0].tolist() == draft_of(text, count)


@given(
  drawn=st.lists(st.integers(0, 4), min_size=1, max_size=5),
  guesses=st.lists(st.integers(0, 4), min_size=5, max_size=5),
  most=st.integers(0, 6),
)
def test_a_draw_counts_until_a_draft_was_wrong_or_a_row_ends(
  drawn, guesses, most
):
  guessed = guesses[: len(drawn) - 1]
  want = 0
  for i, token in enumerate(drawn[:most]):
    if i and guessed[i - 1] != drawn[i - 1]:
      break
    want += 1
    if token == 4:  # The stop token.
      break
  got = drafts.accepted(
    np.array([drawn]),
    np.array([guessed], np.int32).reshape(1, -1),
    np.array([[4, -1]]),
    np.array([most]),
  )
  assert int(got[0]) == want


# --- the engine --------------------------------------------------------------


def make(model, mode, **options):
  return micro.make_engine(
    model,
    micro.new_store(),
    drafts=mode,
    window_buckets=(micro.CONTEXT,),
    **options,
  )


def sample(engine, count, tokens=40, **sampling):
  """Completions of prompts whose words come again, with their own seeds."""
  requests = []
  for i in range(count):
    rng = np.random.default_rng(i)
    prompt = np.tile(rng.integers(3, micro.VOCAB, 4), 4)[: 9 + i % 5]
    options = Sampling(max_new_tokens=tokens, seed=i, **sampling)
    requests.append((f"s{i}", micro.prompt_of(prompt), options))
  return micro.generate(engine, *requests)


@pytest.fixture(scope="module", name="model")
def _model():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="engines")
def _engines(model):
  with make(model, "false") as plain, make(model, "true") as drafted:
    yield plain, drafted


@pytest.mark.parametrize(
  "sampling",
  [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 9},
    {"temperature": 0.5, "stop_token_ids": (5, 9)},
  ],
)
def test_what_is_sampled_is_the_same(engines, sampling):
  plain, drafted = (sample(engine, 24, **sampling) for engine in engines)
  for one, other in zip(plain, drafted, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    assert one.finish_reason == other.finish_reason
  stats = engines[1].stats()
  assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
  assert stats["decode_steps"] < engines[0].stats()["decode_steps"]


@pytest.mark.parametrize(
  "options",
  [
    {"decode_steps_per_call": 1, "draft_tokens": 5, "entropies": True},
    # Room for a sequence and a half: rows lose their pages and begin again.
    {"decode_steps_per_call": 2, "draft_tokens": 9, "cache_tokens": 96},
  ],
)
def test_screenshots_small_calls_and_preemptions(model, options):
  def play(mode):
    store, requests = micro.new_store(), []
    for i in range(6):
      rng = np.random.default_rng(i)
      tokens, spans = micro.with_text(np.zeros(0, np.int32), rng, 3), ()
      image = micro.picture(store, rng, (16, 8))
      tokens, spans = micro.with_image(tokens, spans, image)
      if i % 2:  # Else the prompt ends in the screenshot.
        tokens = np.append(tokens, [5, 6, 5, 6]).astype(np.int32)
      sampling = Sampling(max_new_tokens=30, seed=i, temperature=0.3)
      requests.append((f"s{i}", micro.prompt_of(tokens, spans), sampling))
    with micro.make_engine(
      model, store, drafts=mode, window_buckets=(micro.CONTEXT,), **options
    ) as engine:
      engine.warm_up()
      completions = micro.generate(engine, *requests)
      stats = engine.stats()
    assert stats["compiles_after_warm_up"] == 0
    return completions, stats

  plain, drafted = play("false"), play("true")
  for one, other in zip(plain[0], drafted[0], strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    if options.get("entropies"):
      np.testing.assert_allclose(one.entropies, other.entropies, atol=2e-5)
  stats = drafted[1]
  assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
  assert ("cache_tokens" in options) <= (stats["preemptions"] > 0)
  assert 0 < stats["batch_occupancy"] <= 1


def test_details_and_penalties_go_without_drafts(model):
  options = {"features": ("details", "grammar", "penalties")}
  with make(model, "true", **options) as engine:
    engine.warm_up()
    sample(engine, 3, tokens=12, raw_logprobs=True)
    sample(engine, 3, tokens=12, frequency_penalty=0.5)
    assert engine.stats()["drafted_tokens"] == 0
    assert engine.stats()["compiles_after_warm_up"] == 0


def test_nothing_compiles_after_warm_up(model):
  with make(model, "auto") as engine:
    engine.warm_up()
    sample(engine, 8)
    assert engine.stats()["compiles_after_warm_up"] == 0


@pytest.mark.slow
def test_of_200_000_draws_all_are_equal_but_for_ties(engines):
  draws = differ = 0
  for seed in range(100):
    rng = np.random.default_rng(seed)
    prompt = micro.prompt_of(np.tile(rng.integers(3, micro.VOCAB, 3), 3))
    requests = [
      (f"{seed}.{i}", prompt, Sampling(max_new_tokens=40, seed=100 * seed + i))
      for i in range(50)
    ]
    plain, drafted = (micro.generate(engine, *requests) for engine in engines)
    for one, other in zip(plain, drafted, strict=True):
      draws += len(one.tokens)
      differ += one.tokens.tolist() != other.tokens.tolist()
  assert draws == 200_000
  # A draw whose random bits fall on the border of two tokens may go either way.
  assert differ <= 5


@pytest.mark.parametrize(
  "family",
  [pytest.param("gemma3_text wide", marks=pytest.mark.slow), "llama tied"],
)
def test_published_architectures_take_wrong_drafts_back(family, tmp_path):
  """Also where layers see a sliding window only."""
  qwen_reference = pytest.importorskip("qwen_reference")
  configs = qwen_reference.CONFIGS | qwen_reference.TEXT_CONFIGS
  reference = qwen_reference.Reference(configs[family], tmp_path)
  results = []
  for mode in ("false", "true"):
    with micro.engine_of(
      reference.policy(),
      text_inputs.TextProcessor(),
      micro.new_store(),
      drafts=mode,
      slots=4,
      context_length=128,
      decode_rows=(4,),
      prefill_rows=(4,),
      prefill_buckets=(32,),
      window_buckets=(128,),
    ) as engine:
      results.append(sample(engine, 6, tokens=90, temperature=0.0))
      assert (engine.stats()["accepted_tokens"] > 0) == (mode == "true")
  for one, other in zip(*results, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_lockstep_drafts_from_a_row_alone(model):
  """No bit depends on what other rows sample."""

  def play(engine, count):
    for i in range(count):
      engine.open_session(f"s{i}")
    return [
      (c.tokens.tolist(), c.logprobs.tobytes()) for c in sample(engine, count)
    ]

  with make(model, "true", lockstep="true") as engine:
    alone = play(engine, 1)
  with make(model, "true", lockstep="true") as engine:
    sample_before = play(engine, 3)
    assert engine.stats()["accepted_tokens"] > 0
  assert sample_before[:1] == alone


def test_auto_takes_the_faster_way_and_tries_the_other_again():
  drafter = drafts.Drafter(always=False, remembers=True)
  kind = (8, 128)

  def play(rate):
    """Ways of 500 calls, with drafts as fast as the rate."""
    ways = []
    for _ in range(500):
      ways.append(drafter.pays(*kind))
      drafter.note(ways[-1], rate if ways[-1] else 10, *kind)
    return ways

  ways = play(30)
  assert sum(ways[:6]) == 3 and sum(ways) >= 480
  assert not any(play(5)[-100:])
  play(30)  # The slower way is timed after up to 512 calls.
  assert all(play(30)[-100:])
  # Another kind starts anew: both ways are timed.
  other = []
  for _ in range(6):
    other.append(drafter.pays(1, 128))
    drafter.note(other[-1], 10, 1, 128)
  assert sum(other) == 3
  assert drafts.Drafter(always=True, remembers=True).pays(*kind)


def test_other_rows_texts_are_remembered_unless_in_lockstep():
  for remembers in (True, False):
    drafter = drafts.Drafter(always=True, remembers=remembers)
    drafter.remember(np.array([7, 8, 9]))
    (row,) = drafter.texts([np.array([1, 2])], np.array([0]), 1, 6)
    assert (8 in row) == remembers
    assert row[drafts.RECENT :].tolist() == [1, 2, -1, -1, -1, -1]


def test_recurrent_layers_are_refused_and_auto_does_without():
  model, processor, _ = checkpoint.create_policy("qwen3_5_tiny")
  options = {"slots": 2, "context_length": 64, "prefill_buckets": (32,)}
  with pytest.raises(ValueError, match="engine.drafts=true: .* recurrent"):
    micro.engine_of(
      model, processor, micro.new_store(), drafts="true", **options
    )
  engine = micro.engine_of(
    model, processor, micro.new_store(), drafts="auto", **options
  )
  prompt = micro.prompt_of([5, 6, 7, 5, 6])

  async def run():
    return await engine.generate(
      prompt, Sampling(max_new_tokens=9, temperature=0.0), session="a"
    )

  with engine:
    assert len(asyncio.run(run()).tokens) == 9
    assert engine.stats()["drafted_tokens"] == 0


def test_auto_is_off_in_lockstep():
  auto = engine_config.EngineConfig(drafts="auto")
  assert auto.resolved(lockstep=False).uses_drafts
  assert not auto.resolved(lockstep=True).uses_drafts
