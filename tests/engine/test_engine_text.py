"""A text policy through the engine and the learner, as any other policy."""

import asyncio

import forced_devices
import numpy as np
import pytest
import rollout_references as references
import trials
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)

TURNS, SESSIONS, CONTEXT = 3, 6, 128


@pytest.fixture(
  scope="module",
  params=trials.by_default([True], [False, True], ids=["whole", "adapter"]),
)
def parts(request):
  """(model, processor, renderer); weights of order 1, or an adapter's."""
  model, processor, tokenizer = checkpoint.create_policy("qwen3_text_tiny")
  references.randomise(model, 0)
  table = model.model.embed_tokens.weight
  table.set_value(table[...] / 4)  # Logits, which it gives too, of order 1.
  if request.param:
    lora.add(model, rank=4, alpha=8.0)
  return (
    model,
    processor,
    qwen.QwenRenderer(tokenizer, processor.num_image_tokens),
  )


@pytest.fixture(scope="module")
def engine(parts):
  model, processor, _ = parts
  with engine_lib.RolloutEngine(
    model,
    processor,
    images_lib.ImageStore(),
    engine_config.EngineConfig(
      slots=4,
      context_length=CONTEXT,
      decode_rows=(4,),
      prefill_rows=(4,),
      prefill_buckets=(32,),
      window_buckets=(CONTEXT,),
    ),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    engine.warm_up()
    yield engine
    assert engine.stats()["compiles_after_warm_up"] == 0


@pytest.fixture(scope="module")
def learner(parts):
  model, processor, _ = parts
  return learner_lib.Learner(
    model,
    processor,
    images_lib.ImageStore(),
    learner_lib.LearnerConfig(rows=2, row_length=CONTEXT, learning_rate=1e-2),
    learner_lib.AlgorithmConfig(advantage="rloo"),
  )


async def play(engine, renderer, name, seed):
  """Several turns of one session, sampled; their one sequence."""
  rng = np.random.default_rng(seed)
  question = [{"role": "user", "content": f"Add {rng.integers(99)} to 5."}]
  tokens = renderer.render(question).tokens
  mask = np.zeros(len(tokens), bool)
  logprobs = np.zeros(len(tokens), np.float32)
  versions = np.full(len(tokens), -1, np.int32)
  turns = np.zeros(len(tokens), np.int32)
  for turn in range(TURNS):
    got = await engine.generate(
      policy_client.TokenPrompt(tokens, ()),
      policy_client.SamplingParams(
        max_new_tokens=int(rng.integers(3, 9)),
        temperature=1.0,
        seed=int(rng.integers(1 << 30)),
        stop_token_ids=renderer.stop_token_ids,
      ),
      session=name,
    )
    ended = got.tokens[-1] == renderer.end_of_turn_id
    bridge = renderer.bridge(
      [{"role": "tool", "content": "more"}], last_sampled_is_eot=bool(ended)
    ).tokens
    bridge = bridge if turn < TURNS - 1 else bridge[:0]
    n, m = len(got.tokens), len(bridge)
    tokens = np.concatenate([tokens, got.tokens, bridge])
    mask = np.append(mask, [True] * n + [False] * m)
    logprobs = np.concatenate([logprobs, got.logprobs, np.zeros(m)])
    versions = np.append(versions, [*got.versions, *[-1] * m])
    turns = np.append(turns, np.full(n + m, turn))
  await engine.release(name)
  return trajectory.TokenSequence(
    tokens.astype(np.int32),
    mask,
    logprobs.astype(np.float32),
    versions.astype(np.int32),
    turns.astype(np.int32),
    (),
  )


def sample(engine, renderer, seed):
  async def run():
    return await asyncio.gather(
      *(
        play(engine, renderer, f"{seed}-{i}", 100 * seed + i % 3)
        for i in range(SESSIONS)
      )
    )

  return asyncio.run(asyncio.wait_for(run(), 250))


def assert_token_exact(sequences, learner):
  scored = learner.sequence_logprobs(sequences)
  for sequence, again in zip(sequences, scored):
    assert sequence.loss_mask.sum() >= TURNS
    np.testing.assert_allclose(again, sequence.logprobs, rtol=0, atol=1e-5)


def group_of(sequences, version):
  return trajectory.TrajectoryGroup(
    "g",
    "task",
    tuple(
      trajectory.Trajectory(
        task="t",
        steps=[trajectory.Step() for _ in range(TURNS)],
        reward=float(i % 3 == 0),  # Equal episodes, equal rewards.
        status=trajectory.TrajectoryStatus.SUCCEEDED,
        sequences=[sequence],
        trajectory_id=f"e{version}-{i}",
      )
      for i, sequence in enumerate(sequences)
    ),
    start_version=version,
  )


def test_what_is_sampled_is_what_is_learned_from(parts, engine, learner):
  _, _, renderer = parts
  before = sample(engine, renderer, 1)
  assert_token_exact(before, learner)
  metrics = learner.update([group_of(before, 0)])
  assert metrics["grad_norm"] > 0 and np.isfinite(metrics["loss"])
  assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
  assert learner.shape.patches == 0 and "patch_efficiency" not in metrics
  assert metrics["shared_tokens"] > 0  # Prompts that begin alike.
  engine.update_weights(1, learner.policy_state()).result(60)
  after = sample(engine, renderer, 2)
  assert all(set(s.versions[s.loss_mask]) == {1} for s in after)
  assert_token_exact(after, learner)
  stale = np.concatenate(
    [
      again - s.logprobs
      for s, again in zip(before, learner.sequence_logprobs(before))
    ]
  )
  assert np.abs(stale).max() > 1e-3  # The update has changed something.


def test_nothing_is_encoded_and_an_image_is_refused(parts, engine):
  model, _, renderer = parts
  stats = engine.stats()
  assert stats["images_encoded"] == 0
  assert not any(v.kind == "encode" for v in engine._programs.compiled)
  size = engine._state.pool.size
  assert size == 0
  placeholder = model.config.banned_token_ids[0]
  tokens = np.array([5, placeholder, placeholder, 6], np.int32)
  ref = trajectory.ImageRef("0" * 64, 32, 32)
  prompt = policy_client.TokenPrompt(tokens, (trajectory.ImageSpan(ref, 1, 2),))
  with pytest.raises(ValueError, match="qwen3_text_tiny reads text only"):
    asyncio.run(
      engine.generate(
        prompt, policy_client.SamplingParams(max_new_tokens=1), session="i"
      )
    )
  with pytest.raises(ValueError, match="qwen3_text_tiny reads text only"):
    renderer.prompt_of_tokens(tokens, [ref])


def test_screenshots_are_refused_when_the_engine_is_made(parts):
  model, processor, _ = parts
  with pytest.raises(ValueError, match="reads text only.*320x240"):
    engine_lib.RolloutEngine(
      model,
      processor,
      images_lib.ImageStore(),
      engine_config.EngineConfig(slots=2, context_length=64),
      image_sizes=((320, 240),),
    )


@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_device():
  report = forced_devices.report(
    "-m",
    "tests.engine.text_mesh_script",
    devices=4,
    seconds=250,
    flags="--xla_backend_optimization_level=0",
  )
  assert len(report["sampled"]) == 8 and report["drafted"] > 0
  for name in ("mesh", "one"):
    np.testing.assert_allclose(
      report[name], report["sampled"], rtol=0, atol=1e-5
    )
  assert report["mesh_norm"] == pytest.approx(report["one_norm"], rel=1e-5)
