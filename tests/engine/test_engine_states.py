"""Layers of linear attention in the engine: states in pages.

What the engine samples is held to full forward passes, and to the learner.
"""

import numpy as np
import pytest
import rollout_micro_policy as micro
import rollout_references as references
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(600)

CONTEXT, PAGE = 128, 16
GREEDY = policy_client.SamplingParams(max_new_tokens=9, temperature=0.0)


@pytest.fixture(scope="module")
def parts():
  model, processor, _ = checkpoint.create_policy("qwen3_5_tiny")
  references.randomise(model, 0)
  table = model.decoder.embed_tokens.weight
  table.set_value(table[...] / 4)
  return model, processor, images_lib.ImageStore()


@pytest.fixture(scope="module")
def make(parts):
  """Makes engines, which share compiled programs."""
  model, processor, store = parts
  programs_of, engines = {}, []

  def engine(**changes):
    options = dict(
      slots=4,
      context_length=CONTEXT,
      decode_rows=(4,),
      prefill_rows=(4,),
      prefill_buckets=(32,),
      window_buckets=(CONTEXT,),
      image_buckets=(2,),
      patch_buckets=(64,),
      decode_steps_per_call=4,
      page_size=PAGE,
      banned_token_ids=model.config.banned_token_ids,
    )
    built = micro.engine_of(model, processor, store, **(options | changes))
    programs = built._programs  # pylint: disable=protected-access
    if not changes:
      programs._compiled.update(programs_of)  # pylint: disable=protected-access
    engines.append(built)
    return built

  yield engine
  for one in engines:
    one.close()


@pytest.fixture(scope="module")
def recompute(parts):
  return references.Recompute(*parts, length=CONTEXT, images=6)


def prompt(parts, rng, before, after, images=1):
  _, processor, store = parts
  tokens, spans = rng.integers(300, 2500, before).astype(np.int32), ()
  for _ in range(images):
    image = store.put(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    count = processor.num_image_tokens(64, 64)
    spans = (*spans, trajectory.ImageSpan(image, len(tokens), count))
    fill = np.full(count, processor.image_token_id)
    tokens = np.concatenate([tokens, fill, rng.integers(300, 2500, after)])
  return tokens.astype(np.int32), spans


def check(parts, recompute, tokens, spans, completion):
  full = np.append(tokens, completion.tokens)
  (logits,) = recompute.logits([(full, spans)])
  references.check_completion(
    logits[len(tokens) - 1 : -1],
    completion.tokens,
    completion.logprobs,
    GREEDY,
    parts[0].config.banned_token_ids,
  )


def test_turns_go_on_from_a_state_and_cuts_from_a_pages_end(
  parts, make, recompute
):
  rng = np.random.default_rng(0)
  engine = make()
  tokens, spans = prompt(parts, rng, 5, 10)
  first, cached = tokens, 0
  for _ in range(3):  # Each prompt extends what was sampled.
    (got,) = micro.generate(
      engine, ("a", micro.prompt_of(tokens, spans), GREEDY)
    )
    check(parts, recompute, tokens, spans, got)
    assert got.metrics["reused_tokens"] == cached
    cached = len(tokens) + len(got.tokens) - 1
    tokens = np.append(tokens, got.tokens)
    tokens = np.append(tokens, rng.integers(300, 2500, 7)).astype(np.int32)
  # Cut within a page: the tokens before that page are found.
  cut = np.append(first[:-2], rng.integers(300, 2500, 20)).astype(np.int32)
  (got,) = micro.generate(engine, ("a", micro.prompt_of(cut, spans), GREEDY))
  check(parts, recompute, cut, spans, got)
  assert got.metrics["reused_tokens"] == (len(first) - 2) // PAGE * PAGE


@pytest.mark.slow
def test_a_group_and_later_sessions_share_snapshots(parts, make, recompute):
  rng = np.random.default_rng(1)
  engine = make()
  tokens, spans = prompt(parts, rng, 9, 12, images=2)
  n, members = len(tokens) - 1, 6
  assert n > 3 * PAGE
  completions = micro.generate(
    engine,
    *(
      (f"m{i}", micro.prompt_of(tokens, spans), GREEDY) for i in range(members)
    ),
  )
  for got in completions:
    check(parts, recompute, tokens, spans, got)
  stats = engine.stats()
  assert stats["prefilled_tokens"] == n + (members - 1) * (n % PAGE)
  # The sampled tokens' pages are found as well.
  longer = np.append(tokens, completions[0].tokens)
  longer = np.append(longer, rng.integers(300, 2500, 5)).astype(np.int32)
  (got,) = micro.generate(
    engine, ("new", micro.prompt_of(longer, spans), GREEDY)
  )
  check(parts, recompute, longer, spans, got)
  cached = (len(tokens) + len(completions[0].tokens) - 1) // PAGE * PAGE
  assert got.metrics["reused_tokens"] == cached


@pytest.mark.slow
def test_a_cache_too_small_costs_time_alone(parts, make, recompute):
  rng = np.random.default_rng(2)
  engine = make(cache_tokens=CONTEXT + PAGE)
  prompts = [prompt(parts, rng, 20 + i, 25) for i in range(5)]
  completions = micro.generate(
    engine,
    *(
      (f"s{i}", micro.prompt_of(*one), GREEDY) for i, one in enumerate(prompts)
    ),
  )
  for (tokens, spans), got in zip(prompts, completions):
    check(parts, recompute, tokens, spans, got)


@pytest.mark.slow
def test_what_is_sampled_is_what_is_learned_from(parts, make):
  """Packed rows, whose sequences know nothing of each other."""
  model, processor, store = parts
  rng = np.random.default_rng(3)
  engine = make()
  prompts = [prompt(parts, rng, 3 + 5 * i, 6) for i in range(5)]
  drawn = policy_client.SamplingParams(max_new_tokens=12, seed=5)
  completions = micro.generate(
    engine,
    *((f"l{i}", micro.prompt_of(*one), drawn) for i, one in enumerate(prompts)),
  )
  sequences = []
  for (tokens, spans), got in zip(prompts, completions):
    n, m = len(tokens), len(got.tokens)
    zeros = np.zeros(n, np.float32)
    sequences.append(
      trajectory.TokenSequence(
        np.append(tokens, got.tokens),
        np.arange(n + m) >= n,
        np.append(zeros, got.logprobs).astype(np.float32),
        np.append(np.full(n, -1), got.versions).astype(np.int32),
        np.zeros(n + m, np.int32),
        spans,
      )
    )
  learner = learner_lib.Learner(
    model,
    processor,
    store,
    learner_lib.LearnerConfig(row_length=192, rows=2, patches=256),
  )
  for sequence, again in zip(sequences, learner.sequence_logprobs(sequences)):
    real = sequence.loss_mask
    np.testing.assert_allclose(
      again[real], sequence.logprobs[real], rtol=0, atol=4e-5
    )


def test_a_page_is_worth_its_snapshot(parts):
  shapes = device_state.cache_shapes(parts[0])
  config = engine_config.EngineConfig(context_length=8192)
  size = page_layout.sized(shapes, config).page_size
  # Three layers of 4 heads of 32 x 32 and 3 tokens of 256 channels; one of
  # keys and values for 2 heads of 48.
  states, token = 3 * 4 * (4 * 32 * 32 + 3 * 256), 4 * 2 * 2 * 48
  assert size % 64 == 0 and (size - 64) * token < states <= size * token
  settings = engine_config.EngineConfig(context_length=8192, page_size=32)
  assert page_layout.sized(shapes, settings) is settings
  short = engine_config.EngineConfig(context_length=96)
  assert page_layout.sized(shapes, short).page_size == 96
  plain, *_ = checkpoint.create_policy("qwen3_vl_tiny")
  assert page_layout.sized(device_state.cache_shapes(plain), config) is config
