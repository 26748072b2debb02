"""Log-probs against numpy, in chunks, and against the rollout engine."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.policy import base

from tests.learner import learner_cases


class _Head:
  """The part of a policy that log-probs need."""

  def __init__(self, kernel_DV):
    self.kernel_DV = kernel_DV

  def logits(self, hidden):
    return hidden @ self.kernel_DV


def _inputs(s=2, m=23, d=8, v=50, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(s, m, d)), jnp.float32)
  kernel = jnp.asarray(rng.normal(size=(d, v)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, v - 5, (s, m)), jnp.int32)
  banned = np.zeros(v, bool)
  banned[-5:] = True
  return hidden, kernel, targets, banned


def test_scores_equal_float64_numpy():
  hidden, kernel, targets, banned = _inputs()
  got = logprobs.token_scores(
    _Head(kernel), hidden, targets, temperature=0.7, banned_V=banned
  )
  logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
  logits = np.where(banned, -np.inf, logits) / 0.7
  logits -= logits.max(-1, keepdims=True)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  chosen = np.take_along_axis(p, np.asarray(targets)[..., None], -1)[..., 0]
  entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0), -1)
  np.testing.assert_allclose(got.logprobs, np.log(chosen), atol=1e-5)
  np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)
  np.testing.assert_array_equal(got.top, p.argmax(-1) == targets)


@pytest.mark.parametrize("chunk", [1, 5, 8, 23, 64])
def test_chunks_change_neither_values_nor_gradients(chunk):
  hidden, kernel, targets, banned = _inputs()

  def loss(args, chunk):
    hidden, kernel = args
    scores = logprobs.token_scores(
      _Head(kernel), hidden, targets, banned_V=banned, chunk=chunk
    )
    weight = jnp.arange(targets.size).reshape(targets.shape) / targets.size
    return jnp.sum(weight * (scores.logprobs + 0.3 * scores.entropy))

  grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  want, want_grads = grad((hidden, kernel), 10_000)
  got, got_grads = grad((hidden, kernel), chunk)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for a, b in zip(got_grads, want_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_no_array_of_all_tokens_by_vocabulary_exists():
  # 512 targets, chunks of 32, vocabulary 4096: whole logits are 8 MiB.
  hidden, kernel, targets, banned = _inputs(s=1, m=512, d=16, v=4096)

  def loss(kernel, chunk):
    return logprobs.token_scores(
      _Head(kernel), hidden, targets, banned_V=banned, chunk=chunk
    ).logprobs.sum()

  def peak(chunk):
    grad = jax.jit(jax.grad(lambda k: loss(k, chunk)))
    compiled = grad.lower(kernel).compile()
    assert ("512,4096" in compiled.as_text()) == (chunk >= 512)
    return compiled.memory_analysis().temp_size_in_bytes

  assert peak(32) < 4096 * 32 * 4 * 6 < peak(512)


def test_banned_targets_outside_the_vocabulary_are_refused():
  with pytest.raises(ValueError, match="50"):
    logprobs.banned_mask(50, [50])
  assert logprobs.banned_mask(50, []) is None


ALONE = 48  # Tokens and patches that `_alone` pads to: one compile.


@functools.lru_cache(maxsize=None)
def _forward():
  model, _ = learner_cases.policy(0)
  return jax.jit(lambda inputs: model.logits(model(inputs)))


def _alone(case, sequence, temperature):
  """Log-probs by one unpacked, unpadded forward pass and float64 softmax."""
  refs = [s.image for s in sequence.images]
  patched = [case.processor.patchify(case.store.get(r)) for r in refs]
  length = len(sequence)
  vision = np.full(length, -1)
  at = 0
  for span, image in zip(sequence.images, patched):
    vision[span.offset : span.end] = at + np.arange(span.num_tokens)
    at += image.num_tokens

  def padded(x, fill=0):
    out = np.full((1, ALONE, *x.shape[1:]), fill, x.dtype)
    out[0, : len(x)] = x
    return out

  inputs = base.PolicyInputs(
    tokens=padded(sequence.tokens),
    positions=padded(
      case.processor.positions(sequence.tokens, sequence.images)
    ),
    segment_ids=padded(np.ones(length, np.int32)),
    vision_index=padded(vision.astype(np.int32), -1),
    patches=padded(np.concatenate([p.patches for p in patched])),
    patch_segments=padded(
      np.concatenate(
        [np.full(len(p.patches), i + 1) for i, p in enumerate(patched)]
      ).astype(np.int32)
    ),
    patch_positions=padded(np.concatenate([p.positions for p in patched])),
  )
  logits = np.array(_forward()(inputs), np.float64)[0, :length]
  logits[:, list(case.model.config.banned_token_ids)] = -np.inf
  logits = logits / temperature
  logits -= logits.max(-1, keepdims=True)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  out = np.zeros(length)
  for t in np.flatnonzero(sequence.loss_mask):
    out[t] = logp[t - 1, sequence.tokens[t]]
  return out


@pytest.mark.parametrize("tree", ["false", "true"])
def test_packed_log_probs_equal_each_sequence_alone(case, tree):
  learner = case.learner(tree=tree, temperature=0.8)
  sequences = [
    s
    for g in case.groups(count=2, size=3, turns=2)
    for t in g
    for s in t.sequences
  ]
  got = learner.sequence_logprobs(sequences)
  for packed, sequence in zip(got, sequences, strict=True):
    np.testing.assert_allclose(packed, _alone(case, sequence, 0.8), atol=2e-5)


def test_log_probs_equal_those_the_engine_sampled_with(case):
  """Two turns with a screenshot each, before and after an update."""
  episodes, temperature = 3, 0.9
  learner = case.learner(
    temperature=temperature, objective="behaviour_cloning", learning_rate=3e-2
  )

  async def play(engine, i):
    tokens, mask, lps, versions, turns, spans = [], [], [], [], [], []
    for turn in range(2):
      ref = case.image()
      count = case.processor.num_image_tokens(ref.width, ref.height)
      bridge = case.text(3).tolist()
      spans.append(trajectory.ImageSpan(ref, len(tokens) + len(bridge), count))
      bridge += [case.pad] * count + case.text(2).tolist()
      completion = await engine.generate(
        policy_client.TokenPrompt(tokens + bridge, tuple(spans)),
        policy_client.SamplingParams(
          max_new_tokens=6, temperature=temperature, seed=100 * i + turn
        ),
        session=f"s{i}",
      )
      sampled = completion.tokens.tolist()
      tokens += bridge + sampled
      mask += [False] * len(bridge) + [True] * len(sampled)
      lps += [0.0] * len(bridge) + completion.logprobs.tolist()
      versions += [-1] * len(bridge) + completion.versions.tolist()
      turns += [turn] * (len(bridge) + len(sampled))
    return trajectory.TokenSequence(
      tokens, mask, lps, versions, turns, tuple(spans)
    )

  async def play_all(engine, first):
    return await asyncio.wait_for(
      asyncio.gather(*(play(engine, first + i) for i in range(episodes))), 120
    )

  def check(sequences, version):
    scored = learner.sequence_logprobs(sequences)
    for sequence, logprobs_T in zip(sequences, scored, strict=True):
      assert sequence.num_sampled == 12
      assert set(sequence.versions[sequence.loss_mask]) == {version}
      np.testing.assert_allclose(logprobs_T, sequence.logprobs, atol=1e-4)

  with engine_lib.RolloutEngine(
    case.model,
    case.processor,
    case.store,
    engine_config.EngineConfig(
      slots=episodes,
      context_length=64,
      prefill_rows=(episodes,),
      prefill_buckets=(16,),
      image_buckets=(1,),
    ),
    image_sizes=((32, 32),),
    banned_token_ids=case.model.config.banned_token_ids,
  ) as engine:
    before = asyncio.run(play_all(engine, 0))
    check(before, 0)
    learner.update_on_sequences(before)
    engine.update_weights(learner.version, learner.policy_state()).result(60)
    after = asyncio.run(play_all(engine, 10))
    check(after, 1)
  # The update mattered: the old samples' log-probs have moved.
  moved = learner.sequence_logprobs(before)[0] - before[0].logprobs
  assert np.abs(moved).max() > 0.05
