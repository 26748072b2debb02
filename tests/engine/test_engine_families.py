"""Families of checkpoints in the engine, as loaded from transformers' files.

What the engine samples, turn after turn and for a group, is held to full
forward passes of the same weights.
"""

import numpy as np
import pytest
import rollout_micro_policy as micro
import rollout_references as references
import trials
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import text_inputs

qwen_reference = pytest.importorskip("qwen_reference")

pytestmark = pytest.mark.timeout(600)

CONTEXT, PAGE = 128, 16
SIDE = 24  # 6 x 6 patches, 9 vision tokens.
GREEDY = policy_client.SamplingParams(max_new_tokens=6, temperature=0.0)
DRAWN = policy_client.SamplingParams(max_new_tokens=6, temperature=1.0, seed=3)


@pytest.fixture(
  scope="module",
  params=trials.by_default(
    # Gemma's images are those of test_whole_images.py, SmolVLM's completions
    # those of test_smolvlm_policy.py.
    ["glm4v_moe groups"],
    [
      "glm4v_moe groups",
      "glm4v",
      "opencua",
      "gemma3",
      "gemma3 wide",
      "smolvlm",
      "idefics3",
      "llama",
      "llama tied",
      "gemma3_text",
      "gemma3_text wide",
    ],
    unlike=["gemma3", "smolvlm", "llama tied", "gemma3_text wide"],
  ),
)
def parts(request, tmp_path_factory):
  """The family's policy, processor and screenshots."""
  configs = qwen_reference.CONFIGS | qwen_reference.TEXT_CONFIGS
  reference = qwen_reference.Reference(
    configs[request.param], tmp_path_factory.mktemp("policy")
  )
  text = request.param in qwen_reference.TEXT_CONFIGS
  processor = text_inputs.TextProcessor() if text else reference.processor
  return reference.policy(), processor, images_lib.ImageStore()


def prompt(parts, rng, images):
  _, processor, store = parts
  if not processor.patch_bytes:
    return rng.integers(1, qwen_reference.WORDS, 24).astype(np.int32), ()
  words = lambda: rng.integers(1, qwen_reference.WORDS, 7)
  tokens, spans = words(), ()
  for _ in range(images):
    image = store.put(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
    shown, row = qwen_reference.placeholders(processor, SIDE, SIDE)
    start = [*tokens, qwen_reference.IMAGE_START]
    span = trajectory.ImageSpan(image, len(start), len(shown), row)
    spans = (*spans, span)
    tokens = np.array([*start, *shown, qwen_reference.IMAGE_END, *words()])
  return tokens.astype(np.int32), spans


def test_turns_and_groups_are_what_the_policy_says(parts):
  model, processor, store = parts
  rng = np.random.default_rng(0)
  banned = model.config.banned_token_ids
  images = {"image_buckets": (2,), "patch_buckets": (144,)}
  if not processor.patch_bytes:
    images = {}
  engine = micro.engine_of(
      model, processor, store, slots=4, context_length=CONTEXT,
      decode_rows=(4,), prefill_rows=(4,), prefill_buckets=(32,),
      window_buckets=(CONTEXT,), **images,
      decode_steps_per_call=3, page_size=PAGE, banned_token_ids=banned,
  )  # fmt: skip
  recompute = references.Recompute(
    *parts, length=CONTEXT, images=8 if images else 0
  )

  def check(tokens, spans, completion, sampling):
    full = np.append(tokens, completion.tokens)
    (logits,) = recompute.logits([(full, spans)])
    undecided = references.check_completion(
      logits[len(tokens) - 1 : -1],
      completion.tokens,
      completion.logprobs,
      sampling,
      banned,
    )
    assert undecided < len(completion.tokens)

  try:
    tokens, spans = prompt(parts, rng, images=2)
    reused = []
    for _ in range(2):  # The second prompt extends what was sampled.
      (got,) = micro.generate(
        engine, ("a", micro.prompt_of(tokens, spans), GREEDY)
      )
      check(tokens, spans, got, GREEDY)
      reused.append(got.metrics["reused_tokens"])
      after = rng.integers(1, qwen_reference.WORDS, 9)
      tokens = np.concatenate([tokens, got.tokens, after]).astype(np.int32)
    assert reused[0] == 0 < reused[1]
    tokens, spans = prompt(parts, rng, images=1)
    group = micro.generate(
      engine,
      *((f"g{i}", micro.prompt_of(tokens, spans), DRAWN) for i in range(4)),
    )
    for got in group:
      check(tokens, spans, got, DRAWN)
  finally:
    engine.close()
