"""Run by test_engine_mesh in a process of its own with several CPU devices.

Completions of a small Qwen-VL on one device and on meshes; prints, as JSON,
what was sampled.
"""

import asyncio
import json

from flax import nnx
import jax
import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

MESHES = {"one": None, "split": dict(data=1, fsdp=2, tensor=2)}
CASES = ("one-same", "split-same", "one-int8", "split-int8")
SIZE = (32, 32)


def prompt(processor, store, seed, text):
  rng = np.random.default_rng(seed)
  image = store.put(rng.integers(0, 256, (*SIZE, 3), np.uint8))
  count = processor.num_image_tokens(*SIZE)
  pad = processor.image_token_id
  tokens = np.concatenate(
    [rng.integers(0, 90, text), np.full(count, pad), rng.integers(0, 90, text)]
  ).astype(np.int32)
  span = trajectory.ImageSpan(image, text, count)
  return policy_client.TokenPrompt(tokens, (span,))


def sample(mesh, weights, warm):
  model, processor, _ = checkpoint.create_policy(
    "qwen3_vl_tiny", mesh=mesh, screen=SIZE
  )
  nnx.update(
    model, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, nnx.state(model))
  )
  store = images_lib.ImageStore()
  prompts = [prompt(processor, store, i, 4 + 7 * i) for i in range(3)]
  greedy = policy_client.SamplingParams(max_new_tokens=6, temperature=0.0)
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=4, context_length=64, prefill_buckets=(32,), weights=weights
    ),
    image_sizes=(SIZE,),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    if warm:
      engine.warm_up()

    async def all_of_them():
      return await asyncio.gather(
        *(
          engine.generate(p, greedy, session=str(i))
          for i, p in enumerate(prompts)
        )
      )

    first = asyncio.run(all_of_them())
    # Weights as a learner on this mesh hands them over.
    nnx.update(
      model, jax.tree.map(lambda x: x * 1.01, nnx.state(model, nnx.Param))
    )
    engine.update_weights(1, nnx.state(model)).result(60)
    second = asyncio.run(all_of_them())
    assert not warm or engine.stats()["compiles_after_warm_up"] == 0
  completions = [*first, *second]
  return {
    "tokens": [c.tokens.tolist() for c in completions],
    "logprobs": [c.logprobs.tolist() for c in completions],
    "versions": [c.versions.tolist() for c in completions],
  }


def main():
  assert jax.device_count() == 4
  report = {}
  for case in CASES:
    name, weights = case.split("-")
    mesh = MESHES[name] and sharding.make_mesh(**MESHES[name])
    report[case] = sample(mesh, weights, warm=case == CASES[-1])
  print(json.dumps(report))


if __name__ == "__main__":
  main()
