"""Run by test_engine_states_mesh in a process of its own with four CPU devices.

Two turns of several sessions with a small Qwen3.5, whose linear attention keeps
states in the cache's pages, on one device and on meshes; prints, as JSON, what
was sampled.
"""

import asyncio
import json

import jax
import numpy as np
import rollout_references as references
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

from tests.engine import engine_mesh_script
from tests.policy import qwen_sharding_script

SIZE = engine_mesh_script.SIZE
MESHES = {"one": None, "mesh": dict(data=1, fsdp=2, tensor=2)}
SESSIONS, SHARED, PAGE = 5, 16, 8


def play(mesh):
  model, processor, _ = checkpoint.create_policy("qwen3_5_tiny", screen=SIZE)
  references.randomise(model, 0)
  table = model.decoder.embed_tokens.weight
  table.set_value(table[...] / 4)
  if mesh is not None:
    model = qwen_sharding_script.on_mesh(model, mesh)
  store = images_lib.ImageStore()
  greedy = policy_client.SamplingParams(max_new_tokens=5, temperature=0.0)
  head = np.random.default_rng(0).integers(300, 2500, SHARED).astype(np.int32)
  prompts = []
  for i in range(SESSIONS):
    own = engine_mesh_script.prompt(processor, store, i % 3, 3 + i)
    spans = tuple(
      type(s)(s.image, s.offset + SHARED, s.num_tokens) for s in own.images
    )
    prompts.append(
      policy_client.TokenPrompt(np.concatenate([head, own.tokens]), spans)
    )
  completions = []
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=4,
      context_length=64,
      page_size=PAGE,
      prefill_buckets=(16,),
      window_buckets=(64,),
      decode_steps_per_call=4,
    ),
    image_sizes=(SIZE,),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:

    async def turn(texts):
      return await asyncio.gather(
        *(
          engine.generate(p, greedy, session=str(i))
          for i, p in enumerate(texts)
        )
      )

    first = asyncio.run(asyncio.wait_for(turn(prompts), 300))
    longer = [
      policy_client.TokenPrompt(
        np.concatenate([p.tokens, c.tokens, [5, 6]]).astype(np.int32), p.images
      )
      for p, c in zip(prompts, first)
    ]
    second = asyncio.run(asyncio.wait_for(turn(longer), 300))
    completions = [*first, *second]
    device_bytes = engine.device_bytes
  return {
    "tokens": [c.tokens.tolist() for c in completions],
    "logprobs": [c.logprobs.tolist() for c in completions],
    "reused": [c.metrics["reused_tokens"] for c in second],
    "kv_cache": device_bytes["kv_cache"],
  }


def main():
  assert jax.device_count() == 4
  print(
    json.dumps(
      {
        name: play(sizes and sharding.make_mesh(**sizes))
        for name, sizes in MESHES.items()
      }
    )
  )


if __name__ == "__main__":
  main()
