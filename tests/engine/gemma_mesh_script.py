"""Run by test_whole_images_mesh in a process of its own with eight CPU devices.

Samples from and scores a small Gemma 3 on a mesh and on one device; prints, as
JSON, the tokens and log-probs as sampled, and as the learner scores them there
from packed rows.
"""

import asyncio
import json

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

MESHES = {"one": None, "mesh": dict(data=1, fsdp=2, sequence=2, tensor=2)}
GREEDY = policy_client.SamplingParams(max_new_tokens=6, temperature=0.0)


def prompt(config, processor, store, seed, words):
  """Words and two images, whose chunks of 8 tokens would part them."""
  rng = np.random.default_rng(seed)
  tokens, spans = list(rng.integers(1, 99, words)), []
  for _ in range(2):
    image = store.put(rng.integers(0, 256, (30, 20, 3), np.uint8))
    count = processor.num_image_tokens(30, 20)
    tokens.append(config.vision_start_token_id)
    spans.append(trajectory.ImageSpan(image, len(tokens), count))
    tokens += [processor.image_token_id] * count
    tokens += [config.vision_end_token_id, *rng.integers(1, 99, words)]
  return policy_client.TokenPrompt(np.array(tokens, np.int32), tuple(spans))


def sequence_of(prompt, got):
  n, m = len(prompt.tokens), len(got.tokens)
  return trajectory.TokenSequence(
    np.append(prompt.tokens, got.tokens),
    np.arange(n + m) >= n,
    np.append(np.zeros(n, np.float32), got.logprobs),
    np.append(np.full(n, -1, np.int32), got.versions),
    np.zeros(n + m, np.int32),
    prompt.images,
  )


def report(directory, sizes):
  mesh = sharding.make_mesh(**sizes) if sizes else None
  model = hf_checkpoint.load_model(directory, mesh)
  processor = qwen_checkpoint.processor_of(model.config)
  store = images_lib.ImageStore()
  prompts = [
    prompt(model.config, processor, store, i, 2 + 3 * i) for i in range(4)
  ]
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=4,
      context_length=64,
      decode_rows=(4,),
      prefill_rows=(4,),
      prefill_buckets=(8,),
      patch_buckets=(144,),
      page_size=6,
    ),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:

    async def all_of_them():
      return await asyncio.gather(
        *(
          engine.generate(p, GREEDY, session=str(i))
          for i, p in enumerate(prompts)
        )
      )

    completions = asyncio.run(all_of_them())
  sequences = [sequence_of(p, got) for p, got in zip(prompts, completions)]
  learner = learner_lib.Learner(
    model,
    processor,
    store,
    # Two or three sequences a row.
    learner_lib.LearnerConfig(rows=4, row_length=96),
    learner_lib.AlgorithmConfig(objective="behaviour_cloning"),
    mesh=mesh,
  )
  scored = learner.sequence_logprobs(sequences)
  norm = learner.update_on_sequences(sequences)["grad_norm"]
  return {
    "tokens": [list(map(int, got.tokens)) for got in completions],
    "sampled": [list(map(float, got.logprobs)) for got in completions],
    "scored": [
      [float(x) for x in row[len(p.tokens) :]]
      for p, row in zip(prompts, scored)
    ],
    "norm": float(norm),
  }


def main(directory):
  print(json.dumps({k: report(directory, v) for k, v in MESHES.items()}))


if __name__ == "__main__":
  import sys

  main(sys.argv[1])
