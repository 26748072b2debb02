"""Run by test_engine_shards in a process of its own with eight CPU devices.

Plays two turns of several sessions on one device and on meshes, and prints as
JSON what was sampled and what a device holds.
"""

import asyncio
import json

from flax import nnx
import jax
import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

from tests.engine import engine_mesh_script


class Forced:
  """A `Grammar` of one text, token by token; then any token may come."""

  def __init__(self, tokens, vocabulary):
    self._tokens = iter(tokens)
    self._vocabulary = vocabulary
    self.advance(-1)

  def allowed(self):
    return self._mask

  def advance(self, token):
    del token
    tokens_V = np.zeros(self._vocabulary, bool)
    tokens_V[next(self._tokens, slice(None))] = True
    self._mask = constrained_decoding.pack(tokens_V)


SIZE = engine_mesh_script.SIZE
MESHES = {
  "one": None,
  "rows": dict(data=2, fsdp=4),
  "all": dict(data=1, fsdp=2, sequence=2, tensor=2),
}
SESSIONS = 10
SHARED = 16  # Tokens that all prompts begin with: two pages.


def make(mesh):
  """A policy in bfloat16 with float32 parameters."""
  model, processor, _ = checkpoint.create_policy(
    "qwen3_vl_tiny", mesh=mesh, screen=SIZE
  )
  nnx.update(
    model, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, nnx.state(model))
  )
  return model, processor


def prompts(processor, store):
  """One each session; images repeat, and so does the beginning."""
  head = np.random.default_rng(0).integers(0, 90, SHARED).astype(np.int32)
  drawn = []
  for i in range(SESSIONS):
    own = engine_mesh_script.prompt(processor, store, i % 4, 3 + i % 5)
    spans = tuple(
      type(s)(s.image, s.offset + SHARED, s.num_tokens) for s in own.images
    )
    tokens = np.concatenate([head, own.tokens])
    drawn.append(policy_client.TokenPrompt(tokens, spans))
  return drawn


def play(mesh, seconds=400, **settings):
  """Two turns of all sessions, the second one with a forced beginning."""
  model, processor = make(mesh)
  store = images_lib.ImageStore()
  config = engine_config.EngineConfig(
    slots=8,
    context_length=64,
    page_size=8,
    prefill_buckets=(16,),
    window_buckets=(64,),
    decode_steps_per_call=4,
    **settings,
  )
  sampling = policy_client.SamplingParams(
    max_new_tokens=5, temperature=1.0, seed=7, top_logprobs=2
  )
  completions = []
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    config,
    image_sizes=(SIZE,),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:

    async def turn(texts, grammars):
      for i in range(SESSIONS):
        engine.open_session(str(i))
      return await asyncio.gather(
        *(
          engine.generate(p, sampling, session=str(i), grammar=grammar)
          for i, (p, grammar) in enumerate(zip(texts, grammars))
        )
      )

    texts = prompts(processor, store)
    first = asyncio.run(
      asyncio.wait_for(turn(texts, [None] * SESSIONS), seconds)
    )
    texts = [
      policy_client.TokenPrompt(
        np.concatenate([p.tokens, c.tokens, [5, 6]]).astype(np.int32), p.images
      )
      for p, c in zip(texts, first)
    ]
    forced = [
      Forced([3, 4], engine.vocabulary) if i % 2 else None
      for i in range(SESSIONS)
    ]
    second = asyncio.run(asyncio.wait_for(turn(texts, forced), seconds))
    completions = [*first, *second]
    stats, device_bytes = engine.stats(), engine.device_bytes
    tokens = engine.cache_tokens
  return {
    "tokens": [c.tokens.tolist() for c in completions],
    "logprobs": [c.logprobs.tolist() for c in completions],
    "top": [np.asarray(c.top_logprobs).tolist() for c in completions],
    "stats": stats,
    "device_bytes": device_bytes,
    "cache_tokens": tokens,
  }


def main():
  assert jax.device_count() == 8
  report = {}
  for name, axes in MESHES.items():
    mesh = axes and sharding.make_mesh(**axes)
    report[name] = play(mesh)
  # Lockstep twice; and pages for hardly more than a sequence a shard.
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=4)
  for name in ("lockstep", "again"):
    report[name] = play(mesh, lockstep="true")
  report["short"] = play(mesh, cache_tokens=128)
  print(json.dumps(report))


if __name__ == "__main__":
  main()
