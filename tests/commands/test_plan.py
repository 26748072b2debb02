"""A plan's figures against XLA's, and what it advises against what it says."""

import dataclasses
import json

from flax import nnx
import forced_devices
import jax
import numpy as np
import pytest
from tunix.rl.multi_turn import plan
from tunix.rl.multi_turn.commands import chips
from tunix.rl.multi_turn.commands import hlo
from tunix.rl.multi_turn.commands import plan_programs
from tunix.rl.multi_turn.commands import plan_run
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.policy import checkpoint

TINY = ("policy.name=qwen3_vl_tiny", "topology=v5e:2x4", "--analytic")

_LOOP = """
import jax, json, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tunix.rl.multi_turn.commands import hlo
mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
def body(x, _):
  return jax.lax.psum(x, "b") / 4, None
def program(x):
  x, _ = jax.lax.scan(body, x, None, length=5)
  return jax.lax.all_gather(x, ("a", "b"), tiled=True)
local = jax.shard_map(program, mesh=mesh, in_specs=P(("a", "b")),
                      out_specs=P(), check_vma=False)
text = jax.jit(local).lower(jnp.zeros((64, 16))).compile().as_text()
found = hlo.collectives(text, 8)
print(json.dumps({k: [v.runs, v.received] for k, v in found.items()}))
"""


def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
  found = forced_devices.report("-c", _LOOP, devices=8)
  part = 8 * 16 * 4
  assert found["all-reduce"] == [5, 5 * 2 * part * 3 // 4]
  assert found["all-gather"] == [1, 8 * part * 7 // 8]


def test_started_collectives_count_their_results():
  text = """HloModule m

%run (p: f32[8]) -> f32[8] {
  %g = (bf16[4,8], bf16[16,8]) all-gather-start(%p), replica_groups=[4,4]<=[16]
  %d = bf16[16,8] all-gather-done(%g)
}

ENTRY %main (p: f32[8], /*index=5*/q: f32[8]) -> f32[8] {
  %w = f32[8] while(%p), condition=%c, body=%run, {"known_trip_count":{"n":"9"}}
  %r = f32[100]{0} reduce-scatter(%p), replica_groups={{0,1},{2,3}}, to_apply=%c
  %a = f32[10]{0} all-reduce(%p), to_apply=%c
}
"""
  found = hlo.collectives(text, 16)
  assert found["all-gather"] == hlo.Sent(1, 9, 9 * 256 * 3 // 4, 256, 128)
  assert found["reduce-scatter"].received == 400
  assert found["all-reduce"].received == 2 * 40 * 15 // 16


@pytest.mark.parametrize("name, devices, hosts", (
    ("v5e:16x16", 256, 64), ("v5p:2x2x2", 8, 2), ("v6e:2x2", 4, 1),
    ("v5e:1x1", 1, 1),
))  # pyformat: disable
def test_topologies(name, devices, hosts):
  found = chips.Topology.of(name)
  assert (found.devices, found.hosts) == (devices, hosts)


@pytest.mark.parametrize("arguments, problem", (
    ((), "topology= is missing"),
    (("topology=v5e:4x4x4",), "v5e has 2 sides"),
    (("topology=a100:8",), "'a100' is not known"),
    (("topology=v5e:2x4", "mesh.fsdp=4"), "has 8 chips"),
    (("topology=v5e:2x4", "learner.rowz=1"), "learner.rowz"),
))  # pyformat: disable
def test_a_slip_is_one_line(arguments, problem, capsys):
  assert plan.main([*arguments, "--analytic", "policy.name=tiny_vl"]) == 2
  shown = capsys.readouterr()
  assert problem in shown.err and not shown.out
  assert "Traceback" not in shown.err


def test_operations_of_a_forward_pass_are_xlas():
  model, processor, _ = checkpoint.create_policy(
      "qwen3_vl_tiny", screen=(64, 64)
  )
  graph, state = nnx.split(model)
  b, t = 2, 64
  tokens = np.zeros((b, t), np.int32)
  positions = np.zeros((b, t, 3), np.int32)
  n = 16  # One image of 16 patches.
  patches = np.zeros((1, n, processor.patch_bytes), np.uint8)
  places = np.ones((1, n, processor.position_axes), np.int32)

  def forward(state):
    model = nnx.merge(graph, state)
    model.encode_images(patches, np.ones((1, n), bool), places)
    hidden, _ = model.extend(
        tokens, positions, np.zeros(b, np.int32), np.full(b, t, np.int32),
        model.init_cache(b, t),
    )  # pyformat: disable
    return model.encode_images(
        patches, np.ones((1, n), bool), places
    ), model.logits(hidden)

  (cost,) = [jax.jit(forward).lower(state).cost_analysis()]
  # Every token of a cached row is held against the whole row.
  planned = plan_run.forward_flops(model, b * t, t, b * t, n, n)
  assert planned == pytest.approx(cost["flops"], rel=0.1)


def test_a_plan_is_read_by_people_and_programs(capsys):
  assert plan.main(TINY) == 0
  text = capsys.readouterr().out
  for words in (
      "qwen3_vl_tiny on v5e:2x4: 8 chips, 2 hosts", "memory of a device,"
      " predicted", "KV cache", "roofline", "Assumed:", "fits,",
  ):  # pyformat: disable
    assert words in text
  assert plan.main([*TINY, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["fits"] and found["how"] == "predicted"
  assert found["total"] == sum(found["memory"].values())
  assert found["mesh"]["fsdp"] == 8 and found["engine_mesh"]["fsdp"] == 4
  for rate in found["roofline"].values():
    assert rate["tokens_per_second_per_chip"] > 0
    assert rate["bound"] in rate["seconds"]


def run_of(*arguments):
  topology = chips.Topology.of("v5e:2x4")
  config, name, _ = plan_run.load(list(arguments), topology)
  return plan_run.PlannedRun.of(config, name, topology)


def test_parts_grow_with_their_settings():
  memory = lambda *a: plan_run.memory(run_of("policy.name=qwen3_vl_tiny", *a))
  plain = memory()
  split = memory("mesh.fsdp=4", "mesh.tensor=2", "learner.rows=4")
  # A host's four chips: two shards of rows, two of heads, and four of rows.
  assert split["KV cache"] == pytest.approx(plain["KV cache"], rel=0.1)
  assert split["vision cache"] == 2 * plain["vision cache"]
  int8 = memory("engine.weights=int8", "algorithm.importance=tis")
  assert int8["rollout weights"] < plain["rollout weights"]
  lora = memory("policy.lora_rank=2")
  assert lora["gradients"] < plain["gradients"] / 5
  assert "KL reference" in memory(
      "algorithm.kl_coef=0.1", "learner.skip_zero_advantage=false"
  )


def test_the_advice_makes_it_fit(capsys, monkeypatch):
  """Each setting that is said to suffice does, and says so itself."""
  arguments = [*TINY, "--json"]
  assert plan.main(arguments) == 0
  needed = json.loads(capsys.readouterr().out)["total"]
  small = dataclasses.replace(chips.CHIPS["v5e"], memory=int(0.6 * needed))
  monkeypatch.setitem(chips.CHIPS, "v5e", small)
  assert plan.main(arguments) == 1
  found = json.loads(capsys.readouterr().out)
  assert not found["fits"] and found["fixes"]
  best = found["fixes"][0]
  assert best["total"] < found["total"]
  enough = [f for f in found["fixes"] if f["total"] <= found["available"]]
  assert enough, found["fixes"]
  assert plan.main([*arguments, *enough[0]["settings"]]) == 0
  again = json.loads(capsys.readouterr().out)
  assert again["fits"] and again["total"] == enough[0]["total"]


def test_without_the_compiler_it_predicts_and_says_so(monkeypatch, capsys):
  monkeypatch.setattr(plan_programs, "find_compiler", lambda: "")
  assert plan.main([a for a in TINY if a != "--analytic"]) == 0
  shown = capsys.readouterr()
  assert "libtpu is not installed" in shown.err
  assert "predicted" in shown.out and "compiled" not in shown.out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not plan_programs.find_compiler(),
    reason="no libtpu (make tpu-plan)",
)
def test_a_small_run_is_compiled(capsys):
  arguments = [a for a in TINY if a != "--analytic"]
  status = plan.main([
      *arguments, "--json", "mesh.fsdp=4", "mesh.tensor=2", "learner.rows=4",
      "policy.config.scan_layers=true", "engine.slots=8",
  ])  # pyformat: disable
  found = json.loads(capsys.readouterr().out)
  assert status == 0 and found["how"] == "compiled"
  assert set(found["programs"]) == {
      "accumulate", "apply", "decode", "prefill", "encode", "weight copy"
  }  # pyformat: disable
  for program in found["programs"].values():
    assert not program["refused"] and program["arguments"] > 0
  run = run_of("policy.name=qwen3_vl_tiny")
  assert cache_memory.sizes(
      run.processor, run.engine_config, run.buckets, 4
  ).pages > 1
