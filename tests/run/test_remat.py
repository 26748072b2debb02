"""A run recomputes results of an update as the available memory demands."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.planning import run_memory
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.run import models

QWEN = ("policy=qwen3_vl_tiny", "warm_start.source=none")


def made(tmp_path, remat):
  config = config_lib.load_config(
    [
      f"run.dir={tmp_path}",
      *small_runs.SMALL,
      *QWEN,
      f"policy.config.remat={remat}",
    ]
  )
  return config, models.make_policy(config, None, "")


@pytest.mark.parametrize(
  "name",
  [
    config_checks.REMATS[0],
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in config_checks.REMATS[1:]
    ),
  ],
)
@pytest.mark.slow
def test_the_fastest_that_leaves_room_is_chosen(name, tmp_path, monkeypatch):
  # The process grows while this test makes its policies.
  monkeypatch.setattr(memory_limits, "process_bytes", lambda: 0)
  config, policy = made(tmp_path, name)
  parts = run_memory.of_run(
    config, policy.model, policy.processor, None, exact=None
  )
  assert f"remat={name}" in str(parts.table())
  # Half of it, as a CPU's prediction is within a factor of two.
  there = 2 * parts.total(on_host=False, least=True)
  monkeypatch.setattr(memory_limits, "host_bytes", lambda: there)
  _, settled = made(tmp_path, "auto")
  assert settled.model.config.remat == name
  monkeypatch.setattr(memory_limits, "host_bytes", lambda: 1)
  _, settled = made(tmp_path, "auto")
  assert settled.model.config.remat == "block"


def test_a_choice_of_the_user_stays(tmp_path):
  config, policy = made(tmp_path, "dots")
  assert (
    run_memory.settle_remat(config, policy.model, policy.processor, None)
    is None
  )
  assert policy.model.config.remat == "dots"


@pytest.mark.slow
def test_a_policy_is_told_in_all_its_parts(tmp_path):
  """Its programs are those of a policy that was made with the setting."""

  def program(policy):
    model, processor = policy.model, policy.processor
    patches = jnp.zeros((1, 16, processor.patch_bytes), jnp.uint8)
    places = jnp.zeros((1, 16, processor.position_axes), jnp.int32)

    def loss(state):
      images = nnx.merge(graph, state).encode_images(
        patches, jnp.ones((1, 16), jnp.int32), places
      )
      return sum(x.sum() for x in jax.tree.leaves(images))

    graph, state = nnx.split(model)
    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    return text.count("checkpoint"), text.count("dot_general")

  collected = {}
  for remat in config_checks.REMATS:
    _, policy = made(tmp_path, remat)
    collected[remat] = program(policy)
  assert len(set(collected.values())) == len(collected)
  _, policy = made(tmp_path, "block")
  for remat in config_checks.REMATS:
    layers.set_remat(policy.model, remat)
    assert program(policy) == collected[remat]
    settings = dataclasses.replace(policy.model.config, remat=remat)
    assert policy.model.config == settings
