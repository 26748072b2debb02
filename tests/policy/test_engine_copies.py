"""Parameters go from the learner's devices to the engine's own."""

import forced_devices
import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import json
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import sharding

def parameter(seed, axes, *shape):
  value = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return nnx.Param(jnp.asarray(value), axes=axes)

class Model(nnx.Module):
  def __init__(self):
    self.matrix = parameter(0, ("fsdp", "tensor"), 24, 16)
    self.vector = parameter(1, (None,), 7)
    self.odd = parameter(2, ("tensor", None), 5, 3)

cases = 0
for learner, count in [
  (dict(fsdp=2), 2), (dict(fsdp=4), 2), (dict(fsdp=6), 2), (dict(fsdp=3), 4),
  (dict(data=2, tensor=2), 4), (dict(tensor=4), 1), (dict(data=1), 3),
  (dict(data=2, fsdp=2), 4), (dict(fsdp=2, tensor=2), 2),
]:
  size = int(np.prod(list(learner.values())))
  devices = jax.devices()
  mesh = sharding.make_mesh(**({"data": 1} | learner), devices=devices[:size])
  own = devices[size:size + count]
  copies = sharding.EngineCopies(mesh, own, {("matrix",): jnp.bfloat16})
  model = Model()
  state = nnx.state(model)
  state = jax.tree.map(
    lambda v: v.replace(
      jax.device_put(v[...], sharding.parameter_sharding(v, mesh))),
    state, is_leaf=lambda v: isinstance(v, nnx.Variable))
  assert copies.mesh.size == count
  copies.of_state(state)  # Constants of tracing come from the host.
  with jax.transfer_guard_device_to_host("disallow_explicit"):
    with jax.transfer_guard_host_to_device("disallow_explicit"):
      copied = copies.of_state(state)
  for name, want in (("matrix", jnp.bfloat16), ("vector", jnp.float32),
                     ("odd", jnp.float32)):
    value = copied[name][...]
    assert value.dtype == want and value.devices() == set(own), (learner, name)
    assert value.sharding.is_equivalent_to(
      sharding.parameter_sharding(state[name], copies.mesh), value.ndim)
    expected = np.asarray(state[name][...]).astype(want)
    assert np.array_equal(np.asarray(value), expected), (learner, count, name)
    for shard in value.addressable_shards:
      assert np.array_equal(np.asarray(shard.data), expected[shard.index])
  cases += 1
print(json.dumps(cases))
"""


def test_every_part_arrives_without_passing_through_the_host():
  assert forced_devices.report("-c", PROGRAM, devices=8) == 9
