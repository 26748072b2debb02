"""Entropies of the policy's tokens: in the engine, in sequences, in files."""

import asyncio
import dataclasses
import json

from flax import nnx
import jax
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.clients import record_replay
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.engine import sampler
from tunix.rl.multi_turn.trajectory_collector import sequence_builder
from tunix.rl.queue import group_store

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
BANNED = (micro.PAD, micro.IMAGE)


def entropy_of(logprobs_SV):
  """float64[S], nats, of rows of log-probs; -inf adds nothing."""
  rows = np.asarray(logprobs_SV, np.float64)
  rows = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
  terms = np.exp(rows) * np.where(np.isfinite(rows), rows, 0.0)
  return -terms.sum(-1)


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
    # Room for one whole context and a little more: some are preempted.
    cache_tokens=micro.CONTEXT + 24,
    features=("grammar",),
    entropies=True,
  ) as engine:
    engine.warm_up()
    yield engine
    stats = engine.stats()
    assert stats["compiles_after_warm_up"] == 0
    assert stats["compiles_on_demand"] == 0


def expected(model, prompt, tokens, banned=BANNED):
  """float64[S] by a forward pass without a cache."""
  full = np.append(prompt, tokens).astype(np.int32)
  rows = micro.reference_logprobs(model, micro.new_store(), full, (), banned)
  return entropy_of(rows[len(prompt) - 1 : len(full) - 1])


def test_it_is_of_the_logits_that_are_not_banned():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(6, 150)) * 4
  logits[3] = 1e4 * (np.arange(150) == 7)  # Certain.
  logits[4] = -1e4  # All alike.
  banned = np.zeros(150, bool)
  banned[[0, 9]] = True
  rows = np.where(banned, -np.inf, logits)
  want = entropy_of(rows - rows.max(-1, keepdims=True))
  got = jax.jit(sampler.entropy)(logits.astype(np.float32), banned)
  np.testing.assert_allclose(got, want, atol=2e-6)
  assert got[3] == 0 and got[4] == pytest.approx(np.log(148), abs=1e-5)
  broken = np.full((1, 150), np.nan, np.float32)
  assert np.isnan(sampler.entropy(broken, banned)[0])


@pytest.mark.parametrize(
  "heat, top_k", [((1, 1, 0), 0), ((1, 0.5, 0), 0), ((1, 1, 1), 5)]
)
def test_a_draw_tells_it_whatever_it_draws_from(heat, top_k):
  rng = np.random.default_rng(1)
  logits = (rng.normal(size=(3, 150)) * 4).astype(np.float32)
  banned = np.arange(150) % 9 == 2
  alike = lambda value, kind=np.float32: np.full(3, value, kind)
  entropies = jax.jit(sampler.sample, static_argnames="entropies")(
      logits, banned, rng.integers(0, 99, (3, 2)).astype(np.uint32),
      alike(0, np.int32), np.array(heat, np.float32), alike(top_k, np.int32),
      alike(1), alike(0), np.bool_(top_k > 0), entropies=True,
  )[2]  # fmt: skip
  want = entropy_of(np.where(banned, -np.inf, logits.astype(np.float64)))
  np.testing.assert_allclose(entropies, want, atol=2e-6)


def test_the_engine_tells_that_of_a_pass_without_a_cache(engine, model):
  """Holds for any temperature and truncation, in every decode call."""
  requests = [
    ("plain", [3, 4, 5], Sampling(max_new_tokens=30, seed=1)),
    ("hot", [6, 4], Sampling(max_new_tokens=30, seed=2, temperature=1.9)),
    ("cold", [9, 9, 3, 4], Sampling(max_new_tokens=30, temperature=0.0)),
    ("few", [8], Sampling(max_new_tokens=30, seed=3, top_k=2, top_p=0.7)),
  ]
  before = engine.stats()["preemptions"]
  completions = micro.generate(
    engine, *((name, micro.prompt_of(p), s) for name, p, s in requests)
  )
  assert engine.stats()["preemptions"] > before
  for (_, prompt, _), completion in zip(requests, completions):
    assert completion.entropies.dtype == np.float32
    assert len(completion.entropies) == 30
    np.testing.assert_allclose(
      completion.entropies,
      expected(model, prompt, completion.tokens),
      atol=1e-4,
    )
    # It is not a constant, nor the log-prob by another name.
    assert completion.entropies.std() > 0.05
    assert not np.allclose(-completion.logprobs, completion.entropies, atol=0.1)


class Every:
  """A grammar of the tokens that a number divides."""

  def __init__(self, number):
    self.kept = np.arange(micro.VOCAB) % number == 0

  def allowed(self):
    return constrained_decoding.pack(self.kept)

  def advance(self, token):
    assert self.kept[token]


def test_with_a_grammar_it_is_of_what_may_be_drawn(engine, model):
  grammar, prompt = Every(7), [3, 4, 5]

  async def run():
    return await engine.generate(
      micro.prompt_of(prompt),
      Sampling(max_new_tokens=6, seed=4),
      session="guided",
      grammar=grammar,
    )

  completion = asyncio.run(asyncio.wait_for(run(), 250))
  banned = sorted({*BANNED, *np.flatnonzero(~grammar.kept).tolist()})
  np.testing.assert_allclose(
    completion.entropies,
    expected(model, prompt, completion.tokens, banned),
    atol=1e-4,
  )


def test_an_engine_that_is_not_asked_tells_none(model):
  with micro.make_engine(
    model, micro.new_store(), decode_rows=(4,), window_buckets=(micro.CONTEXT,)
  ) as silent:
    prompt = micro.prompt_of([3, 4, 5])
    (completion,) = micro.generate(
      silent, ("s", prompt, Sampling(max_new_tokens=5, seed=1))
    )
  assert completion.entropies is None


# --- kept by sequences --------------------------------------------------------


class Renderer:
  """Turns are the numbers that messages say."""

  stop_token_ids = (micro.STOP,)
  image_token_id = micro.IMAGE

  def render(self, messages, add_generation_prompt=True):
    del add_generation_prompt
    return policy_client.TokenPrompt(
      np.array([int(m["content"]) for m in messages], np.int32)
    )

  def bridge(self, new_messages, *, last_sampled_is_eot):
    del last_sampled_is_eot
    return self.render(new_messages)

  def decode(self, ids):
    return str(int(ids[0]))


def completion_of(tokens, entropies):
  return policy_client.Completion(
    tokens,
    np.full(len(tokens), -1.0),
    np.zeros(len(tokens)),
    policy_client.FinishReason.LENGTH,
    entropies=entropies,
  )


def episode(*per_turn):
  """Two turns in one sequence, one token of prompt before each."""
  builder = sequence_builder.SequenceBuilder(Renderer())
  messages = []
  for number, entropies in enumerate(per_turn):
    messages.append({"role": "user", "content": str(10 + number)})
    builder.prompt(messages)
    text = builder.append(completion_of([20 + number, 30], entropies))
    messages.append({"role": "assistant", "content": text})
  return builder.build()


def test_a_sequence_has_them_where_tokens_were_sampled():
  (sequence,) = episode([0.5, 0.25], [1.5, 0.0])
  assert sequence.tokens.tolist() == [10, 20, 30, 11, 21, 30]
  assert sequence.entropies.tolist() == [0, 0.5, 0.25, 0, 1.5, 0]
  assert sequence.entropies.dtype == np.float32


def test_what_one_turn_does_not_tell_the_sequence_does_not_claim():
  for per_turn in ((None, None), ([0.5, 0.5], None), (None, [0.5, 0.5])):
    (sequence,) = episode(*per_turn)
    assert sequence.entropies is None
    assert "entropies" not in sequence.to_json()


def test_they_survive_json_and_the_queues_file(tmp_path):
  (with_entropies,) = episode([0.1, 0.7], [0.3, 2.0])
  (silent,) = episode(None, None)
  for sequence in (with_entropies, silent):
    again = trajectory.TokenSequence.from_json(
      json.loads(json.dumps(sequence.to_json()))
    )
    assert again == sequence
  assert with_entropies != silent
  members = [
    trajectory.Trajectory(
      trajectory_id=f"t{i}",
      sequences=[sequence],
      status=trajectory.TrajectoryStatus.SUCCEEDED,
    )
    for i, sequence in enumerate((with_entropies, silent))
  ]
  store = group_store.SqliteGroupStore(tmp_path / "queue.db")
  store.append(0, trajectory.TrajectoryGroup("g", "task", members))
  store.close()
  store = group_store.SqliteGroupStore(tmp_path / "queue.db")
  ((_, group),) = store.load()
  store.close()
  first, second = (t.sequences[0] for t in group.trajectories)
  np.testing.assert_array_equal(first.entropies, with_entropies.entropies)
  assert second.entropies is None


def test_a_recording_keeps_them(tmp_path):
  recording = record_replay.RecordedCompletions()
  recording.add("a", completion_of([4, 5], [0.5, 1.0]))
  recording.add("b", completion_of([4, 5], None))
  recording.save(tmp_path / "r.jsonl")
  loaded = record_replay.RecordedCompletions.load(tmp_path / "r.jsonl")
  completions = loaded.completions
  assert completions["a"][0].entropies.tolist() == [0.5, 1.0]
  assert completions["b"][0].entropies is None


def test_values_that_none_can_have_are_refused():
  with pytest.raises(ValueError, match="entropies has 1 entries for 2"):
    completion_of([4, 5], [0.5])
  builder = sequence_builder.SequenceBuilder(Renderer())
  builder.prompt([{"role": "user", "content": "9"}])
  for bad in ([0.5, -0.1], [np.nan, 0.1], [np.inf, 0.1]):
    with pytest.raises(
      sequence_builder.SamplingContractError, match="entropies must be"
    ):
      builder.append(completion_of([4, 5], bad))
  (good,) = episode([0.5, 0.5])
  for bad, words in (
    ([0.1, 0.5, 0.5], "not sampled carries an entropy"),
    ([0.0, -0.5, 0.5], ">= 0"),
    ([0.0, np.nan, 0.5], "finite"),
    ([0.0, 0.5], "2 entries for 3"),
  ):
    with pytest.raises(ValueError, match=words):
      dataclasses.replace(good, entropies=bad)
