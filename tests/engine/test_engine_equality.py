"""The engine against a forward pass that has no cache, at length.

200 random prompts a policy: episodes of five turns, several images a turn,
in groups whose members begin alike (the same prompt, the same tokens with
other pixels, other words at the end or at the beginning), more of them than
slots, on pages shorter than what they have in common.
"""

import asyncio
import base64
import dataclasses
import io

from flax import nnx
import numpy as np
import openai
from PIL import Image
import pytest
import rollout_micro_policy as micro
import rollout_references as references
import rollout_server_runner
import shared_programs
import trials
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
CONTEXT, TURNS, GROUP, PAGE = 192, 5, 5, 8
SWAPPED = 100
"""Tokens of a completion in which the weights change."""
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module", name="qwen")
def _qwen():
  """(model, processor, tokenizer) of a small Qwen3-VL."""
  return references.tiny_qwen()


@pytest.fixture(scope="module", name="store")
def _store():
  return images_lib.ImageStore()


def make_engine(policy, store, **changes):
  model, processor, _ = policy
  options = dict(
    slots=6,
    context_length=CONTEXT,
    image_sizes=references.SIZES,
    banned_token_ids=model.config.banned_token_ids,
    decode_steps_per_call=4,
    page_size=PAGE,
  )
  return micro.engine_of(model, processor, store, **(options | changes))


def warm_up(engine):
  """`on_update` changes no program."""
  settings = dataclasses.replace(engine.config, on_update="keep_kv")
  shared_programs.warm_up(engine, "tiny_qwen", settings)


@pytest.fixture(scope="module", name="engine")
def _engine(qwen, store):
  with make_engine(qwen, store) as engine:
    warm_up(engine)
    yield engine
    assert engine.stats()["compiles_after_warm_up"] == 0


@pytest.fixture(scope="module", name="recompute")
def _recompute(qwen, store):
  model, processor, _ = qwen
  return references.Recompute(
    model, processor, store, CONTEXT, images=2 * TURNS
  )


# --- random episodes ---------------------------------------------------------


class Qwen:
  """Parts of an episode of the small Qwen3-VL."""

  vocabulary = 1300

  def __init__(self, policy, store):
    self.processor, self.store = policy[1], store
    self.banned = policy[0].config.banned_token_ids
    self._pad = policy[0].config.image_token_id

  def picture(self, rng):
    width, height = references.SIZES[rng.integers(2)]
    return self.store.put(
      rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    )

  def with_image(self, tokens, spans, image):
    count = self.processor.num_image_tokens(image.width, image.height)
    spans = (*spans, trajectory.ImageSpan(image, len(tokens), count))
    return np.append(tokens, np.full(count, self._pad)).astype(np.int32), spans

  def with_text(self, tokens, rng, count):
    return np.append(tokens, rng.integers(300, 1300, count)).astype(np.int32)


class Micro:
  """The same for the policy of one layer."""

  banned = (micro.PAD, micro.IMAGE)
  vocabulary = micro.VOCAB
  with_image = staticmethod(micro.with_image)
  with_text = staticmethod(micro.with_text)

  def __init__(self, store):
    self._store = store

  def picture(self, rng):
    return micro.picture(self._store, rng, ((16, 8), (16, 16))[rng.integers(2)])


def opening(world, group, member):
  """Members 0 and 1 read the same; 2 sees another picture.

  Of the words, 3 reads other ones at the end, 4 at the beginning: from its
  second page on its tokens are those of the others.
  """
  rng = np.random.default_rng((group, 7))
  other = np.random.default_rng((group, 8))
  tokens = world.with_text(np.zeros(0, np.int32), rng, PAGE - 2)
  image = world.picture(rng)
  if member == 2:
    while True:
      candidate = world.picture(other)
      if (candidate.width, candidate.height) == (image.width, image.height):
        break
    image = candidate
  tokens, spans = world.with_image(tokens, (), image)
  tokens = world.with_text(tokens, rng, PAGE + 4)
  if member == 3:
    tokens = world.with_text(tokens[:-2], other, 2)
  if member == 4:
    tokens[:2] = world.with_text(tokens[:0], other, 2)
  return tokens, spans


def draw_sampling(rng, vocabulary=1300):
  return Sampling(
    max_new_tokens=int(rng.integers(2, 8)),
    temperature=float(rng.choice([0.6, 1.0, 1.5])),
    top_p=float(rng.choice([0.5, 0.9, 1.0])),
    top_k=int(rng.choice([0, 3, 20])),
    seed=int(rng.integers(1 << 40)) if rng.random() < 0.5 else None,
    stop_token_ids=tuple(rng.integers(3, vocabulary, 4).tolist()),
  )


async def play(engine, world, name, group, member, greedy, context, most):
  """An episode; returns its last tokens, its images, and what was sampled."""
  rng = np.random.default_rng((group, member))
  tokens, spans = opening(world, group, member)
  sampled = []
  for turn in range(TURNS):
    if turn:
      for _ in range(int(rng.choice([0, 1, 1, most]))):
        tokens, spans = world.with_image(tokens, spans, world.picture(rng))
        tokens = world.with_text(tokens, rng, int(rng.integers(0, 3)))
      if rng.random() < 0.9:  # Else the prompt may end in a placeholder.
        tokens = world.with_text(tokens, rng, int(rng.integers(1, 6)))
    sampling = draw_sampling(rng, world.vocabulary)
    if greedy:
      sampling = dataclasses.replace(
        sampling, temperature=0.0, top_k=0, top_p=1.0
      )
    if len(tokens) + sampling.max_new_tokens > context:
      break
    got = await engine.generate(
      policy_client.TokenPrompt(tokens, spans), sampling, session=name
    )
    sampled.append((len(tokens), sampling, got))
    tokens = np.append(tokens, got.tokens)
    before = tokens, spans
  await engine.release(name)
  return *before, sampled


async def play_groups(engine, world, first, groups, greedy, context, most=2):
  """All members of all groups at a time, ten times as many as slots."""
  members = [(first + g, m) for g in range(groups) for m in range(GROUP)]
  async with asyncio.timeout(250):
    return await asyncio.gather(
      *(
        play(engine, world, f"{g}.{m}", g, m, greedy, context, most)
        for g, m in members
      )
    )


def check(episodes, logits, banned, check_ends=True):
  """Holds every completion to the logits; (prompts, tokens, undecided)."""
  prompts = count = undecided = 0
  for (_, _, sampled), logits_TV in zip(episodes, logits, strict=True):
    for start, sampling, got in sampled:
      end = start + len(got.tokens)
      stops = np.isin(got.tokens, sampling.stop_token_ids)
      assert not stops[:-1].any()
      stopped = got.finish_reason is policy_client.FinishReason.STOP
      if check_ends:
        assert stops[-1] == stopped
        assert stopped or len(got.tokens) == sampling.max_new_tokens
      undecided += references.check_completion(
        logits_TV[start - 1 : end - 1],
        got.tokens,
        got.logprobs,
        sampling,
        banned,
      )
      prompts, count = prompts + 1, count + len(got.tokens)
  return prompts, count, undecided


@pytest.mark.parametrize("greedy", trials.by_default([False], [True, False]))
async def test_200_prompts_of_a_qwen_equal_its_forward_pass(
  engine, recompute, qwen, store, greedy
):
  world = Qwen(qwen, store)
  groups = 8 if greedy else 4
  first = 0 if greedy else 1000
  episodes = await play_groups(engine, world, first, groups, greedy, CONTEXT)
  logits = recompute.logits([(tokens, spans) for tokens, spans, _ in episodes])
  prompts, count, undecided = check(episodes, logits, world.banned)
  assert prompts == groups * GROUP * TURNS
  assert undecided <= count / 50
  assert engine.stats()["evictions"] > 0  # Reading again, and still equal.


@pytest.mark.parametrize("greedy", trials.by_default([False], [True, False]))
async def test_200_prompts_of_the_micro_policy_equal_its_forward_pass(greedy):
  model, store = micro.MicroPolicy(nnx.Rngs(0)), micro.new_store()
  world = Micro(store)
  with micro.make_engine(
    model,
    store,
    patch_buckets=(16,),
    decode_rows=(4,),
    window_buckets=(micro.CONTEXT,),
  ) as engine:
    episodes = await play_groups(
      engine, world, 0, 20, greedy, micro.CONTEXT, most=1
    )
  logits = [
    micro.reference_logprobs(model, store, tokens, spans, banned=())
    for tokens, spans, _ in episodes
  ]
  prompts, count, undecided = check(episodes, logits, world.banned)
  assert prompts >= 200
  assert undecided <= count / 50


@pytest.mark.slow
async def test_a_cache_that_is_too_small_for_what_runs_changes_no_answer(
  recompute, qwen, store
):
  """Room for one whole context and a bit: requests are preempted."""
  world = Qwen(qwen, store)
  # A request is admitted with room for its first call: many short ones.
  with make_engine(
    qwen, store, cache_tokens=CONTEXT + 64, decode_steps_per_call=1
  ) as engine:
    warm_up(engine)
    episodes = await play_groups(engine, world, 2000, 4, True, CONTEXT)
    mixed = await play_groups(engine, world, 3000, 2, False, CONTEXT)
    assert engine.stats()["preemptions"] > 0
  episodes += mixed
  logits = recompute.logits([(tokens, spans) for tokens, spans, _ in episodes])
  prompts, count, undecided = check(episodes, logits, world.banned)
  assert prompts == 6 * GROUP * TURNS
  assert undecided <= count / 50


def test_the_members_of_a_group_differ_where_they_should(qwen, store):
  """Else sharing by tokens alone would go unnoticed."""
  world = Qwen(qwen, store)
  for group in range(10):
    a, b, pixels, end, begin = (opening(world, group, m) for m in range(GROUP))
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[0], pixels[0])
    assert a[1] == b[1] == end[1] == begin[1] and a[1] != pixels[1]
    for other, places in ((end, [-2, -1]), (begin, [0, 1])):
      differ = np.flatnonzero(a[0] != other[0])
      assert len(differ) and set(differ) <= {p % len(a[0]) for p in places}
    assert len(a[0]) > 2 * PAGE


async def greedy(engine, recompute, tokens, spans, session):
  """A completion that is what `recompute` says."""
  got = await engine.generate(
    policy_client.TokenPrompt(tokens, spans), GREEDY, session=session
  )
  (logits,) = recompute.logits([(np.append(tokens, got.tokens), spans)])
  references.check_completion(
    logits[len(tokens) - 1 : -1],
    got.tokens,
    got.logprobs,
    GREEDY,
    recompute.model.config.banned_token_ids,
  )
  return np.append(tokens, got.tokens)


async def test_a_history_that_is_rewritten_is_its_own_sessions(
  engine, recompute, qwen, store
):
  """Others go on from what they had in common with it before."""
  world, rng = Qwen(qwen, store), np.random.default_rng(5)
  tokens, spans = opening(world, 40, 0)
  tokens = world.with_text(tokens, rng, 4 * PAGE)
  grown = {
    name: await greedy(engine, recompute, tokens, spans, name)
    for name in ("writer", "reader", "third")
  }
  for cut in (5 * PAGE - 3, 3 * PAGE + 2):
    changed = world.with_text(tokens[:cut], rng, 3 * PAGE)
    await greedy(engine, recompute, changed, spans, "writer")
    for name in ("reader", "third"):
      grown[name] = world.with_text(grown[name], rng, 3)
      grown[name] = await greedy(engine, recompute, grown[name], spans, name)
  fresh = world.with_text(tokens, rng, 1)
  await greedy(engine, recompute, fresh, spans, "fourth")
  for name in ("writer", "reader", "third", "fourth"):
    await engine.release(name)


async def test_other_pixels_are_other_answers(engine, recompute, qwen, store):
  """The policy looks: equal tokens with other pixels have other logits."""
  world = Qwen(qwen, store)
  openings = [opening(world, 3, m) for m in (0, 2)]
  one, two = (rows[-1] for rows in recompute.logits(openings))
  assert np.abs(one - two).max() > 0.1


# --- weights that change -----------------------------------------------------


@pytest.fixture(scope="module", name="later")
def _later():
  """The model with other weights."""
  return references.tiny_qwen(seed=1)[0]


async def swapped(engine, later, prompts, count):
  """Greedy completions of all prompts; new weights come while they run.

  Session i gets `prompts[i]`. The weights are handed over when the first
  session has reported 10 tokens.
  """
  handed = []

  def on_tokens(tokens):
    counts.append(len(tokens))
    if sum(counts) >= 10 and not handed:
      handed.append(engine.update_weights(1, nnx.state(later, nnx.Param)))

  counts: list[int] = []
  sampling = Sampling(max_new_tokens=count, temperature=0.0)
  async with asyncio.timeout(250):
    got = await asyncio.gather(
      *(
        engine.generate(
          policy_client.TokenPrompt(*prompt),
          sampling,
          session=f"swap{i}",
          on_tokens=None if i else on_tokens,
        )
        for i, prompt in enumerate(prompts)
      )
    )
  assert handed[0].result(60) == 1
  return got


@pytest.fixture(scope="module", name="prompts")
def _prompts(qwen, store):
  world = Qwen(qwen, store)
  return [opening(world, g, m) for g, m in ((0, 0), (0, 1), (0, 2), (1, 4))]


@pytest.mark.slow
async def test_a_swap_in_mid_completion_equals_a_replay_by_hand(
  qwen, later, store, prompts
):
  model, processor, _ = qwen
  banned = model.config.banned_token_ids
  world = Qwen(qwen, store)
  rng = np.random.default_rng(0)
  with make_engine(qwen, store) as engine:
    warm_up(engine)
    first = await swapped(engine, later, prompts, SWAPPED)
    follow_ups = []
    for i, ((tokens, spans), got) in enumerate(zip(prompts, first)):
      tokens = world.with_text(np.append(tokens, got.tokens), rng, 2)
      tokens, spans = world.with_image(tokens, spans, world.picture(rng))
      tokens = world.with_text(tokens, rng, 3)
      again = await engine.generate(
        policy_client.TokenPrompt(tokens, spans), GREEDY, session=f"swap{i}"
      )
      follow_ups.append((tokens, spans, again))
  mixed = 0
  for (tokens, spans), got, (more, spans_then, again) in zip(
    prompts, first, follow_ups
  ):
    old = int((got.versions == 0).sum())
    assert got.versions.tolist() == [0] * old + [1] * (SWAPPED - old)
    mixed += 0 < old < SWAPPED
    replay = references.Replay(model, processor, store, CONTEXT)
    replay.show(tokens, spans)
    by_hand = []
    for i in range(SWAPPED):
      if i == old:
        replay.model = later
      by_hand.append(replay.sample(banned))
    # The next turn reads nothing of the old weights, its own history's neither.
    replay = references.Replay(later, processor, store, CONTEXT)
    replay.show(more, spans_then)
    by_hand += [replay.sample(banned) for _ in range(len(again.tokens))]
    tokens_by_hand, logprobs = zip(*by_hand)
    assert tokens_by_hand == (*got.tokens, *again.tokens)
    np.testing.assert_allclose(
      logprobs, [*got.logprobs, *again.logprobs], atol=1e-4
    )
    assert set(again.versions.tolist()) == {1}
  assert mixed == len(prompts)


async def test_a_swap_that_recomputes_goes_on_as_the_new_weights_would(
  qwen, later, recompute, store, prompts
):
  _, processor, _ = qwen
  banned = recompute.model.config.banned_token_ids
  with make_engine(qwen, store, on_update="recompute") as engine:
    warm_up(engine)
    completions = await swapped(engine, later, prompts, SWAPPED)
  renewed = references.Recompute(
    later, processor, store, CONTEXT, images=2 * TURNS
  )
  sequences = [
    (np.append(tokens, got.tokens), spans)
    for (tokens, spans), got in zip(prompts, completions)
  ]
  for (tokens, _), got, before, after in zip(
    prompts,
    completions,
    recompute.logits(sequences),
    renewed.logits(sequences),
    strict=True,
  ):
    old = int((got.versions == 0).sum())
    assert 0 < old < SWAPPED
    assert got.versions.tolist() == [0] * old + [1] * (SWAPPED - old)
    start = len(tokens) - 1
    for logits, part in ((before, slice(0, old)), (after, slice(old, SWAPPED))):
      references.check_completion(
        logits[start:-1][part],
        got.tokens[part],
        got.logprobs[part],
        GREEDY,
        banned,
      )


@pytest.mark.parametrize("shared_tokens", [2 * PAGE + 3, PAGE - 3])
async def test_a_session_begun_after_a_swap_knows_nothing_of_the_old_weights(
  qwen, later, store, shared_tokens
):
  """Nor does it take up what an older session has kept over the swap."""
  world, rng = Qwen(qwen, store), np.random.default_rng(shared_tokens)
  renewed = references.Recompute(
    later, qwen[1], store, CONTEXT, images=2 * TURNS
  )
  first = world.with_text(np.zeros(0, np.int32), rng, shared_tokens)
  with make_engine(qwen, store) as engine:
    warm_up(engine)
    got = await engine.generate(
      policy_client.TokenPrompt(first), GREEDY, session="old"
    )
    engine.update_weights(1, nnx.state(later, nnx.Param))
    # The old one goes on, in part with what the old weights have read.
    tokens = world.with_text(np.append(first, got.tokens), rng, 4 * PAGE)
    await engine.generate(
      policy_client.TokenPrompt(tokens), GREEDY, session="old"
    )
    for name, prompt in (("new", tokens), ("short", first)):
      await greedy(engine, renewed, prompt, (), name)


# --- over the wire -----------------------------------------------------------


def _data_url(pixels):
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "PNG")
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


@pytest.fixture(scope="module", name="server")
def _server(engine, qwen, store):
  with rollout_server_runner.Server("qwen", engine, qwen, store) as server:
    yield server


async def play_by_http(server, client, processor, store, pad, seed, greedy):
  """A session by the `openai` client; the same records as of `play`."""
  rng = np.random.default_rng((seed, 99))
  session = await server.start()
  messages, shown, sampled, history = [], [], [], []
  for turn in range(3):
    sampling = draw_sampling(rng)
    sampling = dataclasses.replace(sampling, stop_token_ids=())
    if greedy:
      sampling = Sampling(
        max_new_tokens=sampling.max_new_tokens, temperature=0.0
      )
    content = [{"type": "text", "text": f"turn {turn} of {seed}"}]
    for _ in range(int(rng.choice([0, 1, 2]))):
      width, height = references.SIZES[rng.integers(2)]
      pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
      shown.append(pixels)
      url = {"url": _data_url(pixels)}
      content.append({"type": "image_url", "image_url": url})
    messages.append({"role": "user", "content": content})
    answer = await client.with_options(
      base_url=session["base_url"]
    ).chat.completions.create(
      model="qwen",
      messages=messages,
      max_tokens=sampling.max_new_tokens,
      temperature=sampling.temperature,
      top_p=sampling.top_p,
      seed=None if sampling.seed is None else sampling.seed % 2**31,
      logprobs=True,
      extra_body={"return_token_ids": True, "top_k": sampling.top_k},
    )
    (choice,) = answer.choices
    prompt = answer.prompt_token_ids
    assert prompt[: len(history)] == history
    history = prompt + choice.token_ids
    got = policy_client.Completion(
      tokens=choice.token_ids,
      logprobs=[t.logprob for t in choice.logprobs.content],
      versions=[choice.policy_versions[0][1]] * len(choice.token_ids),
      finish_reason=policy_client.FinishReason.LENGTH,
    )
    sampled.append((len(prompt), sampling, got))
    messages.append({"role": "assistant", "content": choice.message.content})
  tokens, spans, at = np.array(history, np.int32), [], 0
  for pixels in shown:
    image = store.put(pixels)
    count = processor.num_image_tokens(image.width, image.height)
    while tokens[at] != pad:
      at += 1
    spans.append(trajectory.ImageSpan(image, at, count))
    at += count
  trajectory.check_spans(tokens, spans)
  return tokens, spans, sampled


@pytest.mark.parametrize("greedy", [True, False])
async def test_what_the_openai_client_is_told_equals_the_forward_pass(
  server, recompute, qwen, store, greedy
):
  model, processor, _ = qwen
  banned = model.config.banned_token_ids
  client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
  async with client, asyncio.timeout(250):
    episodes = await asyncio.gather(
      *(
        play_by_http(
          server,
          client,
          processor,
          store,
          model.config.image_token_id,
          seed,
          greedy,
        )
        for seed in range(20 if greedy else 10)
      )
    )
  logits = recompute.logits([(tokens, spans) for tokens, spans, _ in episodes])
  prompts, count, undecided = check(episodes, logits, banned, check_ends=False)
  assert prompts == 3 * len(episodes)
  assert undecided <= count / 50


# --- the references themselves -----------------------------------------------


def test_the_replay_without_a_swap_is_the_forward_pass(
  qwen, recompute, store, prompts
):
  model, processor, _ = qwen
  banned = model.config.banned_token_ids
  tokens, spans = prompts[0]
  replay = references.Replay(model, processor, store, CONTEXT)
  replay.show(tokens, spans)
  drawn, logprobs = zip(*(replay.sample(banned) for _ in range(6)))
  (logits,) = recompute.logits([(replay.tokens, spans)])
  references.check_completion(
    logits[len(tokens) - 1 : -1], np.array(drawn), logprobs, GREEDY, banned
  )


def test_the_distribution_is_what_the_words_say():
  logits = np.log([[0.5, 0.2, 0.15, 0.1, 0.05]])
  of = lambda **options: (
    np.exp(
      references.distribution(
        logits, Sampling(**options), options.pop("banned", ())
      ).logprobs[0]
    )
    .round(6)
    .tolist()
  )
  assert of() == [0.5, 0.2, 0.15, 0.1, 0.05]
  assert of(top_k=2) == [0.714286, 0.285714, 0, 0, 0]
  assert of(top_p=0.6) == [0.714286, 0.285714, 0, 0, 0]
  # Top-p of what top-k leaves: 0.71 is enough for 0.7.
  assert of(top_k=2, top_p=0.7) == [1, 0, 0, 0, 0]
  assert of(temperature=0.5)[0] == round(0.25 / 0.325, 6)
  tied = references.distribution(np.zeros((1, 4)), Sampling(top_k=2), ())
  assert not tied.clear.any()


def test_a_wrong_completion_is_told_from_a_right_one():
  logits = np.log([[0.6, 0.3, 0.1]])
  good = dict(tokens=np.array([0]), logprobs=np.log([0.6]))
  for change in (
    dict(tokens=np.array([1]), logprobs=np.log([0.3])),
    dict(logprobs=np.log([0.6]) + 2e-4),
  ):
    with pytest.raises(AssertionError):
      references.check_completion(
        logits, **(good | change), sampling=GREEDY, banned=()
      )
  with pytest.raises(AssertionError, match="left out"):
    references.check_completion(
      logits, np.array([2]), np.log([0.1]), Sampling(top_k=2), ()
    )
  references.check_completion(logits, **good, sampling=GREEDY, banned=())
