"""The policy on 8 devices equals the policy on one. Runs in a subprocess:
the number of devices is decided when JAX starts."""

import os

import forced_devices
import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from flax import nnx
import jax
import numpy as np
import test_tiny_vl as helpers
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy import sharding

assert len(jax.devices()) == 8
mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
model, processor, _ = checkpoint.create_policy("nano")
path = sys.argv[1]
checkpoint.save_policy(path, model)
policy = (model, processor)
# Four batch shards: four rows, each with a buffer of its own.
rows = [helpers.pack([[s]]) for s in helpers.sequences(policy, 0, (30,) * 4)]
most = max(r.patches.shape[1] for r in rows)
def grow(x):
  out = np.zeros((1, most, *x.shape[2:]), x.dtype)
  out[:, : x.shape[1]] = x
  return out
stack = lambda name, f=lambda x: x: np.concatenate(
    [f(getattr(r, name)) for r in rows])
inputs = base.PolicyInputs(
    **{{n: stack(n) for n in
        ("tokens", "positions", "segment_ids", "vision_index")}},
    **{{n: stack(n, grow) for n in
        ("patches", "patch_segments", "patch_positions")}},
)
def loss(model, inputs):
  hidden = model(inputs)
  return jax.numpy.mean(model.logits(hidden) ** 2), hidden
run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
(want, want_hidden), want_grads = run(model, inputs)

loaded, _, _ = checkpoint.load_policy(path, mesh=mesh)
sharding.shard_model(model, mesh)
for m in (model, loaded):
  gate = m.blocks[0].gate[...]
  assert gate.sharding.spec == jax.P("fsdp", "tensor"), gate.sharding
  assert gate.addressable_shards[0].data.size * 4 == gate.size
  assert m.axis_gate[...].is_fully_replicated
  (got, hidden), grads = run(
      m, jax.device_put(inputs, sharding.batch_sharding(mesh)))
  np.testing.assert_allclose(got, want, rtol=1e-5)
  real = inputs.segment_ids > 0
  np.testing.assert_allclose(
      np.asarray(hidden)[real], np.asarray(want_hidden)[real], atol=2e-5)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads)):
    np.testing.assert_allclose(a, b, atol=1e-5)

assert sharding.batch_shards(mesh) == 4
for sizes in (dict(data=3), dict(data=-1, fsdp=-1), dict(tensor=0)):
  try:
    sharding.make_mesh(**sizes)
  except ValueError:
    continue
  raise AssertionError(sizes)
print("sharded equals unsharded")
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_eight_devices_equal_one(tmp_path):
  output = forced_devices.run(
    "-c", SCRIPT.format(tests=os.path.dirname(__file__)), tmp_path / "policy"
  )
  assert "sharded equals unsharded" in output
