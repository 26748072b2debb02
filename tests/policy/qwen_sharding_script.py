"""Run by test_qwen_sharding in a process of its own with eight CPU devices.

One update's loss and gradients of a small Qwen-VL, on one device and on
meshes; prints, as JSON, how far they are apart and what the compiled programs
move.
"""

import dataclasses
import json
import math
import sys

from flax import nnx
import jax
import numpy as np
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

from tests.learner import learner_cases
from tests.learner import learner_mesh_script

MESHES = {
  "fsdp4_tensor2": dict(data=1, fsdp=4, tensor=2),
  "data2_fsdp2_tensor2": dict(data=2, fsdp=2, tensor=2),
  "fsdp2_sequence2_tensor2": dict(data=1, fsdp=2, sequence=2, tensor=2),
  "data2_sequence4": dict(data=2, fsdp=1, sequence=4),
}


def small(family):
  """A config of the family, its vocabulary the largest thing in it."""
  name = "qwen2_5_vl_tiny" if family == "qwen2_5_vl" else "qwen3_vl_tiny"
  model, processor, _ = checkpoint.create_policy(name, screen=(32, 32))
  config = model.config
  text = dataclasses.replace(
    config.text,
    vocab_size=-(-config.text.vocab_size // 8) * 8,
    num_hidden_layers=2,
  )
  vision = dataclasses.replace(config.vision, depth=3)
  if family == "qwen3_5":
    vision = dataclasses.replace(vision, deepstack_visual_indexes=())
    text = dataclasses.replace(
      text,
      full_attention_layers=(1,),
      linear_num_key_heads=4,
      linear_num_value_heads=8,
      linear_key_head_dim=16,
      linear_value_head_dim=16,
      linear_conv_kernel_dim=4,
    )
  if family == "qwen2_vl":
    vision = dataclasses.replace(
      vision, num_position_embeddings=0, deepstack_visual_indexes=()
    )
  if family in ("glm4v", "glm4v_moe"):
    vision = dataclasses.replace(vision, deepstack_visual_indexes=())
    text = dataclasses.replace(
      text, partial_rotary_factor=0.5, mrope_section=(4, 2, 4)
    )
  if family == "qwen2_5_vl":
    vision = dataclasses.replace(vision, fullatt_block_indexes=(1,))
  if family == "glm4v_moe":
    text = dataclasses.replace(
      text,
      num_experts=4,
      num_experts_per_tok=2,
      moe_intermediate_size=64,
      shared_expert_intermediate_size=64,
      mlp_only_layers=(0,),
      expert_groups=2,
      chosen_groups=1,
      routed_scaling_factor=2.0,
    )
  if family == "gemma3":
    # Images of 32 x 32, not resized: 4 tokens.
    vision = dataclasses.replace(
      vision, num_position_embeddings=16, deepstack_visual_indexes=()
    )
    text = dataclasses.replace(
      text,
      mrope_section=(text.head_dim // 2, 0, 0),
      full_attention_layers=(1,),
      sliding_window=6,
      local_rope_theta=1e3,
      query_pre_attn_scalar=20.0,
    )
  if family == "qwen3_vl_moe":
    text = dataclasses.replace(
      text, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
  config = dataclasses.replace(
    config,
    family=family,
    text=text,
    vision=vision,
    # One family each way.
    tie_word_embeddings=family != "qwen3_vl",
    vision_tensor_parallel=family == "qwen3_vl",
    remat="block",
  )
  if family == "gemma3":
    processor = qwen_checkpoint.processor_of(config)
  return config, processor


def on_mesh(model, mesh):
  """A copy of the model that knows and lies on the mesh."""
  abstract = hf_checkpoint.abstract_model(model.config, mesh)
  copied = nnx.merge(nnx.split(abstract)[0], nnx.state(model))
  sharding.shard_model(copied, mesh)
  return copied


def main(family, *names):
  jax.config.update("jax_disable_most_optimizations", True)
  assert jax.device_count() == 8
  config, processor = small(family)
  model = hf_checkpoint.model_class(config)(config, nnx.Rngs(0))
  # Weights of order one, or attention would be next to uniform.
  nnx.update(
    model, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, nnx.state(model))
  )
  case = learner_cases.Case(own=(model, processor))
  options = dict(rows=8, patches=128, targets=24, row_length=64)
  examples = learner_cases.examples_of(case.groups(3, 4) + case.rewritten(3, 4))
  # One device computes each sequence by itself, a mesh those of trees.
  want, want_sums, _ = learner_cases.gradients(
    case.learner(tree="false", **options), examples
  )
  scale = max(float(np.abs(g).max()) for g in want.values())
  total = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
  report = {}
  for name in names:
    sizes = MESHES[name]
    mesh = sharding.make_mesh(**sizes)
    placed = on_mesh(model, mesh)
    learner = case.learner(mesh=mesh, model=placed, **options)
    grads, sums, _ = learner_cases.gradients(learner, examples)
    vocabulary = config.text.vocab_size
    shards = math.prod(mesh.shape[axis] for axis in sharding.MODEL_AXES)
    device = jax.devices()[0]
    here = sum(
      s.data.nbytes
      for x in jax.tree.leaves(nnx.state(placed))
      for s in x.addressable_shards
      if s.device == device
    )
    report[name] = {
      "loss": abs(float(sums.loss) - float(want_sums.loss)),
      "gradient": learner_cases.largest_difference(grads, want) / scale,
      # No other dimension of anything has this size.
      "whole_vocabulary": [
        gathered
        for gathered in learner_mesh_script.gathered_shapes(
          learner._programs.accumulate.compiled[0].as_text()
        )
        if vocabulary in gathered
      ],
      "weights_share": here / total,
      "model_devices": shards,
    }
  print(json.dumps(report))


if __name__ == "__main__":
  main(*sys.argv[1:])
