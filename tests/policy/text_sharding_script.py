"""Run by test_qwen_sharding in a process of its own with eight CPU devices.

Logits and gradients of text policies on one device and on meshes; prints, as
JSON, how far they are apart and what share of the weights a device holds.
"""

import dataclasses
import json
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

from tests.policy import qwen_sharding_script

WINDOWS = {
  "full_attention_layers": (1, 3),
  "sliding_window": 6,
  "local_rope_theta": 1e3,
  "query_pre_attn_scalar": 20.0,
}


def main(family, *names):
  jax.config.update("jax_disable_most_optimizations", True)
  assert jax.device_count() == 8
  config = qwen_checkpoint.small_config("qwen3_text_tiny")
  windows = WINDOWS if family == "gemma3_text" else {}
  config = dataclasses.replace(
    config,
    family=family,
    text=dataclasses.replace(config.text, **windows),
    tie_word_embeddings=family != "llama",
  )
  model = qwen_checkpoint.random_model(config)
  rows, length = 8, 32
  place = np.arange(length, dtype=np.int32)
  inputs = base.PolicyInputs(
    tokens=np.random.default_rng(0)
    .integers(1, 200, (rows, length))
    .astype(np.int32),
    positions=np.broadcast_to(place[None, :, None], (rows, length, 3)),
    segment_ids=np.ones((rows, length), np.int32),
    vision_index=np.full((rows, length), -1, np.int32),
    patches=np.zeros((rows, 0, 0), np.uint8),
    patch_segments=np.zeros((rows, 0), np.int32),
    patch_positions=np.zeros((rows, 0, 0), np.int32),
  )

  def loss(model):
    logits = model.logits(model(inputs))
    scores = jax.nn.log_softmax(logits)[:, :-1]
    of = jnp.asarray(inputs.tokens)[:, 1:, None]
    return jnp.take_along_axis(scores, of, -1).mean()

  run = nnx.jit(nnx.value_and_grad(loss))
  loss_there, want_slopes = run(model)
  scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_slopes))
  total = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
  report = {}
  for name in names:
    mesh = sharding.make_mesh(**qwen_sharding_script.MESHES[name])
    placed = qwen_sharding_script.on_mesh(model, mesh)
    loss_here, slopes = run(placed)
    apart = [
      float(np.abs(np.asarray(a) - np.asarray(b)).max())
      for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(want_slopes))
    ]
    local_bytes = sum(
      x.addressable_shards[0].data.nbytes
      for x in jax.tree.leaves(nnx.state(placed))
    )
    report[name] = {
      "loss": abs(float(loss_here) - float(loss_there)),
      "gradient": max(apart) / scale,
      "weights_share": local_bytes / total,
    }
  print(json.dumps(report))


if __name__ == "__main__":
  main(*sys.argv[1:])
