"""Gemma 3 in the engine: images whose tokens see each other, and windows.

Chunks, pages and shared prefixes end anywhere, within images too; what is
sampled is held to full forward passes of the same weights.
"""

import contextlib

import numpy as np
import published_sizes
import pytest
import rollout_micro_policy as micro
import rollout_references as references
import trials
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets
from tunix.rl.multi_turn.engine import config as engine_config

qwen_reference = pytest.importorskip("qwen_reference")

pytestmark = pytest.mark.timeout(600)

CONTEXT, WHOLE = 96, 4
GREEDY = policy_client.SamplingParams(max_new_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
  reference = qwen_reference.Reference(
    qwen_reference.CONFIGS["gemma3"], tmp_path_factory.mktemp("policy")
  )
  return reference.policy(), reference.processor, images_lib.ImageStore()


@contextlib.contextmanager
def serving(parts, **changes):
  model, processor, store = parts
  options = dict(
      slots=4, context_length=CONTEXT, decode_rows=(4,), prefill_rows=(4,),
      prefill_buckets=(8,), window_buckets=(CONTEXT,), image_buckets=(2,),
      patch_buckets=(16,), decode_steps_per_call=3, page_size=6,
      banned_token_ids=model.config.banned_token_ids,
  )  # fmt: skip
  engine = micro.engine_of(model, processor, store, **(options | changes))
  try:
    yield engine
  finally:
    engine.close()


class Writer:
  """Prompts of words and images."""

  def __init__(self, parts, seed):
    self._processor, self._store = parts[1:]
    self.rng = np.random.default_rng(seed)
    self.tokens, self.spans = [], ()

  def words(self, count):
    self.tokens += list(self.rng.integers(1, qwen_reference.WORDS, count))
    return self

  def image(self, image=None):
    side = int(self.rng.integers(5, 40))
    image = image or self._store.put(
      self.rng.integers(0, 255, (side, 20, 3), dtype=np.uint8)
    )
    self.tokens.append(qwen_reference.IMAGE_START)
    self.spans = (
      *self.spans,
      trajectory.ImageSpan(image, len(self.tokens), WHOLE),
    )
    self.tokens += [self._processor.image_token_id] * WHOLE
    self.tokens.append(qwen_reference.IMAGE_END)
    return self

  @property
  def prompt(self):
    return micro.prompt_of(self.tokens, self.spans)


def checker(parts):
  recompute = references.Recompute(*parts, length=CONTEXT, images=6)
  banned = parts[0].config.banned_token_ids

  def check(prompt, completion, sampling=GREEDY):
    full = np.append(prompt.tokens, completion.tokens)
    (logits,) = recompute.logits([(full, prompt.images)])
    undecided = references.check_completion(
      logits[len(prompt.tokens) - 1 : -1],
      completion.tokens,
      completion.logprobs,
      sampling,
      banned,
    )
    assert undecided == 0
    return completion

  return check


@pytest.mark.parametrize(
  "page, share",
  trials.by_default(
    [(6, "true")], [(6, "true"), (6, "false"), (3, "true"), (16, "true")]
  ),
)
def test_chunks_and_pages_end_anywhere(parts, page, share):
  check = checker(parts)
  with serving(parts, page_size=page, share_prefixes=share) as engine:
    for seed in range(3):
      # The text before the images moves all ends over them.
      prompts = []
      for i in range(4):
        writer = Writer(parts, [seed, i]).words(2 + seed + 3 * i)
        for _ in range(4):
          writer.image().words(1 + i)
        prompts.append(writer.words(2).prompt)
      completions = micro.generate(
        engine,
        *((f"{seed} {i}", prompt, GREEDY) for i, prompt in enumerate(prompts)),
      )
      for prompt, got in zip(prompts, completions, strict=True):
        check(prompt, got)


@pytest.mark.slow
def test_prefixes_that_end_within_an_image_are_shared(parts):
  check = checker(parts)
  reused = set()
  with serving(parts) as engine:
    for words in range(1, 7):
      first = Writer(parts, words).words(words).image().words(3).prompt
      check(first, *micro.generate(engine, (f"a{words}", first, GREEDY)))
      # Begins alike, with the same pixels, and goes on otherwise at once: what
      # whole pages or copies hold of it ends in the image or behind it.
      second = Writer(parts, words).words(words)
      second.image().words(3)
      second.tokens[-3:] = [7, 8, 9]
      second.words(9).image().words(2)
      (got,) = micro.generate(engine, (f"b{words}", second.prompt, GREEDY))
      check(second.prompt, got)
      reused.add(got.metrics["reused_tokens"] - words - 1)
      # Other pixels at the same place share the words before them alone.
      other = Writer(parts, 100 + words)
      other.tokens = list(first.tokens[:words])
      other.image().words(4)
      (got,) = micro.generate(engine, (f"c{words}", other.prompt, GREEDY))
      check(other.prompt, got)
      assert got.metrics["reused_tokens"] <= words + 1
  assert max(reused) >= WHOLE  # Images were shared, not computed again.


def test_a_session_goes_on_turn_after_turn(parts):
  check = checker(parts)
  with serving(parts, page_size=5) as engine:
    writer, reused = Writer(parts, 5).words(3), []
    for _ in range(4):
      writer.image().words(2)
      prompt = writer.prompt
      (got,) = micro.generate(engine, ("a", prompt, GREEDY))
      check(prompt, got)
      reused.append(got.metrics["reused_tokens"])
      writer.tokens += list(map(int, got.tokens))
    assert reused == sorted(set(reused))


@pytest.mark.slow
def test_pages_that_run_short_are_filled_again(parts):
  """Requests are preempted, and prefilled once more from within an image."""
  check = checker(parts)
  long = policy_client.SamplingParams(max_new_tokens=24, temperature=0.0)
  with serving(parts, cache_tokens=132) as engine:
    prompts = [
      Writer(parts, i).words(3).image().words(2 + i).image().words(4).prompt
      for i in range(6)
    ]
    completions = micro.generate(
      engine, *((f"{i}", prompt, long) for i, prompt in enumerate(prompts))
    )
    for prompt, got in zip(prompts, completions, strict=True):
      check(prompt, got, long)
    stats = engine.stats()
    assert stats["preemptions"] + stats["evictions"] > 0


def test_a_prompt_that_ends_in_an_image_is_refused(parts):
  writer = Writer(parts, 3).words(4).image()
  prompt = micro.prompt_of(writer.tokens[:-1], writer.spans)
  with serving(parts) as engine:
    with pytest.raises(Exception, match="ends in the image at 5.*with text"):
      micro.generate(engine, ("a", prompt, GREEDY))
    (got,) = micro.generate(engine, ("a", writer.prompt, GREEDY))
    checker(parts)(writer.prompt, got)


def test_calls_too_short_for_an_image_are_refused(parts):
  config = engine_config.EngineConfig(prefill_buckets=(3,), context_length=64)
  with pytest.raises(ValueError, match="prefill_buckets.*4 tokens.*at least 4"):
    buckets.choose(parts[1], config, ())


@pytest.mark.parametrize("platform, want", [("cpu", (32, 288)), ("", None)])
def test_default_calls_hold_an_image_and_the_text_around_it(platform, want):
  from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

  processor = qwen_checkpoint.processor_of(published_sizes.SIZES["Gemma-3-4B"])
  chosen = buckets.choose(
    processor,
    engine_config.EngineConfig(context_length=4096),
    ((1280, 720),),
    platform=platform or "tpu",
  )
  assert chosen.tokens == (want or (64, 288))
  assert chosen.patches == (4096,)
