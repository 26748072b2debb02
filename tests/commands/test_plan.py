"""A plan's figures against XLA's, and what it advises against what it says."""

import contextlib
import dataclasses
import io
import json
import math

from flax import nnx
import forced_devices
import jax
import numpy as np
import published_sizes
import pytest
from tunix.rl.multi_turn import plan
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.planning import chips
from tunix.rl.multi_turn.planning import planned_run
from tunix.rl.multi_turn.planning import tpu_compiler
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import cached_attention

# One layer is traced, not each.
SCANNED = "policy.config.scan_layers=true"
TINY = ("policy.name=qwen3_vl_tiny", "topology=v5e:2x4", "--analytic")

_LOOP = """
import jax, json, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tunix.rl.multi_turn.planning import tpu_compiler
mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
def body(x, _):
  return jax.lax.psum(x, "b") / 4, None
def program(x):
  x, _ = jax.lax.scan(body, x, None, length=5)
  return jax.lax.all_gather(x, ("a", "b"), tiled=True)
local = jax.shard_map(program, mesh=mesh, in_specs=P(("a", "b")),
                      out_specs=P(), check_vma=False)
text = jax.jit(local).lower(jnp.zeros((64, 16))).compile().as_text()
found = tpu_compiler.collectives(text, 8)
print(json.dumps({k: [v.runs, v.received] for k, v in found.items()}))
"""


@pytest.mark.slow
def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
  figures = forced_devices.report("-c", _LOOP, devices=8)
  part = 8 * 16 * 4
  assert figures["all-reduce"] == [5, 5 * 2 * part * 3 // 4]
  assert figures["all-gather"] == [1, 8 * part * 7 // 8]


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
  sent = tpu_compiler.collectives(text, 16)
  assert sent["all-gather"] == tpu_compiler.Sent(
    1, 9, 9 * 256 * 3 // 4, 256, 128
  )
  assert sent["reduce-scatter"].received == 400
  assert sent["all-reduce"].received == 2 * 40 * 15 // 16


@pytest.mark.parametrize("name, devices, hosts", (
    ("v5e:16x16", 256, 64), ("v5p:2x2x2", 8, 2), ("v6e:2x2", 4, 1),
    ("v5e:1x1", 1, 1), ("h100:8", 8, 1),
))  # fmt: skip
def test_topologies(name, devices, hosts):
  topology = chips.Topology.of(name)
  assert (topology.devices, topology.hosts) == (devices, hosts)


@pytest.mark.parametrize(
  "arguments, problem",
  (
    ((), "topology= is missing"),
    (("topology=v5e:4x4x4",), "v5e takes 2 whole numbers"),
    (("topology=a100:8",), "'a100' is not known"),
    (("topology=h100:16",), "one machine of up to 8 GPUs; write h100:8"),
    (("topology=v5e:2x4", "mesh.fsdp=4"), "has 8 chips"),
    (("topology=v5e:2x4", "learner.rowz=1"), "learner.rowz"),
  ),
)
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
      tokens,
      positions,
      np.zeros(b, np.int32),
      np.full(b, t, np.int32),
      model.init_cache(b, t),
    )
    return model.encode_images(
      patches, np.ones((1, n), bool), places
    ), model.logits(hidden)

  (cost,) = [jax.jit(forward).lower(state).cost_analysis()]
  # Every token of a cached row is held against the whole row.
  planned = planned_run.forward_flops(model, b * t, t, b * t, n, n)
  assert planned == pytest.approx(cost["flops"], rel=0.1)


def test_operations_of_linear_attention_are_xlas():
  """One layer of four has keys, and a long cache is most of a token's work."""
  model = planned_run.policy_facts.find("qwen3_5_tiny").model
  graph, state = nnx.split(model)
  b, length = 2, 4096
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)

  def forward(state, tokens, positions, starts, lengths):
    model = nnx.merge(graph, state)
    hidden, _ = model.extend(
      tokens, positions, starts, lengths, model.init_cache(b, length)
    )
    return model.logits(hidden)

  lowered = jax.jit(forward).lower(
    state, ints(b, 1), ints(b, 1, 3), ints(b), ints(b)
  )
  planned = planned_run.forward_flops(model, b, length, b, 0, 0)
  assert planned == pytest.approx(lowered.cost_analysis()["flops"], rel=0.1)


def test_sizes_of_a_layer_with_a_shared_expert():
  sizes = update_memory.Sizes.of(published_sizes.SIZES["Qwen3.5-35B-A3B"])
  assert (sizes.mlp, sizes.mlp_copies) == ((8 + 1) * 512, 8)
  assert (sizes.layers, sizes.full_layers) == (40, 10)
  assert sizes.linear_state == 32 * 128 * 128


def test_a_plan_is_read_by_people_and_programs(capsys):
  assert plan.main(TINY) == 0
  text = capsys.readouterr().out
  for words in (
    "qwen3_vl_tiny on v5e:2x4: 8 chips, 2 hosts",
    "memory of a device, predicted",
    "KV cache",
    "roofline",
    "Assumed:",
    "fits,",
  ):
    assert words in text
  assert plan.main([*TINY, "--json"]) == 0
  data = json.loads(capsys.readouterr().out)
  assert data["fits"] and data["how"] == "predicted"
  assert data["total"] == sum(data["memory"].values())
  assert data["mesh"]["fsdp"] == 8 and data["engine_mesh"]["fsdp"] == 4
  for rate in data["roofline"].values():
    assert rate["tokens_per_second_per_chip"] > 0
    assert rate["bound"] in rate["seconds"]


def run_of(*arguments, topology="v5e:2x4"):
  topology = chips.Topology.of(topology)
  config, name, _ = planned_run.load(list(arguments), topology)
  return planned_run.PlannedRun.of(config, name, topology)


def test_parts_grow_with_their_settings():
  memory = lambda *a: planned_run.memory(
    run_of("policy.name=qwen3_vl_tiny", *a)
  )
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


@pytest.mark.parametrize("name", ("qwen3_vl_tiny", "qwen3_5_tiny"))
def test_caches_are_those_that_the_engine_makes(name):
  run = run_of(
    f"policy.name={name}", "mesh.fsdp=4", "mesh.tensor=2", "learner.rows=4"
  )
  states, token = planned_run.row_bytes(run.engine_model)
  assert bool(states) == (name == "qwen3_5_tiny")
  # A page's keys and values are worth its snapshot of the states.
  assert run.buckets.page_size * token >= states
  sizes = cache_memory.sizes(
    run.processor,
    run.engine_config,
    run.buckets,
    cached_attention.row_shards(run.engine_mesh),
  )
  shapes = planned_run._shapes(
    type(run.model), run.model.config, 0, False, run.engine_mesh
  )
  state = device_state.DeviceState(
    shapes,
    run.processor,
    pages=sizes.pages,
    page_size=run.buckets.page_size,
    vision_tokens=sizes.vision_tokens,
    mesh=run.engine_mesh,
  )
  size = lambda tree: sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
  planned = planned_run.memory(run)
  assert planned["KV cache"] == size(state.cache_shape)
  assert planned["vision cache"] == size(state.pool_shape)
  assert planned["rollout weights"] == size(state.params)
  # A decode step reads all weights, keys and values; states both ways.
  work = planned_run.works(run)["decode step"]
  row = run.buckets.windows[-1] * token + 2 * states
  rows = run.buckets.decode_rows[-1]
  assert work.hbm > planned["rollout weights"] + rows * row / 4


def test_a_policy_with_linear_attention_is_planned(capsys):
  arguments = ["mesh.fsdp=4", "mesh.tensor=2", "learner.rows=4", "--analytic"]
  assert (
    plan.main(["topology=v5e:2x4", "policy=qwen3_5_tiny", "--json", *arguments])
    == 0
  )
  data = json.loads(capsys.readouterr().out)
  assert data["fits"] and data["memory"]["KV cache"]
  assert data["mesh"]["tensor"] == data["engine_mesh"]["tensor"] == 2


def test_a_tower_that_is_frozen_takes_less():
  name = "policy.name=qwen3_vl_tiny"
  full, frozen = run_of(name), run_of(name, "learner.freeze_vision=true")
  tower = update_memory.parameter_bytes(full.model.visual, full.mesh)
  before, after = planned_run.memory(full), planned_run.memory(frozen)
  assert before["parameters"] == after["parameters"]
  assert before["gradients"] - after["gradients"] == tower
  assert before["optimizer"] - after["optimizer"] == 2 * tower
  assert after["update, temporary"] < before["update, temporary"]
  update, less = (planned_run.works(r)["accumulate"] for r in (full, frozen))
  assert less.flops < update.flops
  assert less.hbm < update.hbm and less.ici < update.ici


def test_a_policy_without_a_tower_has_none_to_freeze(capsys):
  arguments = ["topology=v5e:2x4", "--analytic", "learner.freeze_vision=true"]
  text = ["policy=qwen3_text_tiny", "environment=gsm8k"]
  assert plan.main([*arguments, *text]) == 2
  shown = capsys.readouterr()
  assert "freeze_vision" in shown.err and not shown.out
  assert "Traceback" not in shown.err


def test_models_beside_the_policy_are_counted():
  memory = lambda *a: planned_run.memory(run_of("policy.name=tiny_vl", *a))
  plain = memory()
  second = memory("eval.beside=true", "eval.every=1", "eval.slots=8")
  assert second["evaluation's weights"] == second["rollout weights"]
  caches = second["evaluation's caches"]
  slots = memory("engine.slots=8")
  assert caches == slots["KV cache"] + slots["vision cache"]
  assert (
    planned_run.total(second)
    == planned_run.total(plain) + caches + (plain["rollout weights"])
  )
  kl = ("algorithm.kl_coef=0.1", "learner.skip_zero_advantage=false")
  assert memory(*kl)["KL reference"] == plain["parameters"]
  assert memory(*kl, "learner.reference_on=host") == plain
  taught = memory(
    "algorithm.teacher=tiny_vl", "algorithm.distill_coef=1", kl[1]
  )
  assert taught == plain | {"teacher": plain["parameters"]}
  with pytest.raises(ValueError, match="algorithm.teacher=/no/such"):
    memory("algorithm.teacher=/no/such", "algorithm.distill_coef=1", kl[1])


def test_a_reference_of_an_adapter_is_the_adapters():
  parts = planned_run.memory(
    run_of(
      "policy.name=qwen3_vl_tiny",
      "policy.lora_rank=2",
      "algorithm.kl_coef=0.1",
      "learner.skip_zero_advantage=false",
    )
  )
  assert parts["KL reference"] == parts["gradients"]


def test_engines_of_other_hosts_take_nothing_here(capsys):
  run = run_of("policy.name=qwen3_vl_tiny", "rollout.via=hosts")
  assert not {"rollout weights", "KV cache", "vision cache"} & set(
    planned_run.memory(run)
  )
  assert set(planned_run.works(run)) == {"accumulate"}
  turned = sum(plan.knobs(run.config, run.name), [])
  assert not any(s.startswith("engine.slots") for s in turned)
  assert plan.main([*TINY, "rollout.via=hosts"]) == 0
  shown = capsys.readouterr().out
  assert "none on these chips (rollout.via=hosts)" in shown
  assert "KV cache" not in shown


@pytest.mark.slow
def test_the_advice_makes_it_fit(capsys, monkeypatch):
  """Each setting that is said to suffice does, and says so itself."""
  arguments = [*TINY, "--json"]
  assert plan.main(arguments) == 0
  needed = json.loads(capsys.readouterr().out)["total"]
  small = dataclasses.replace(chips.CHIPS["v5e"], memory=int(0.6 * needed))
  monkeypatch.setitem(chips.CHIPS, "v5e", small)
  assert plan.main(arguments) == 1
  data = json.loads(capsys.readouterr().out)
  assert not data["fits"] and data["fixes"]
  best = data["fixes"][0]
  assert best["total"] < data["total"]
  enough = [f for f in data["fixes"] if f["total"] <= data["available"]]
  assert enough, data["fixes"]
  assert plan.main([*arguments, *enough[0]["settings"]]) == 0
  again = json.loads(capsys.readouterr().out)
  assert again["fits"] and again["total"] == enough[0]["total"]


@pytest.fixture(scope="module")
def spare():
  """Arguments of a run that leaves memory, and its plan."""
  arguments = [
    "topology=v5e:4x4",
    "policy=Qwen3-VL-2B",
    "agent=tool",
    SCANNED,
    "--analytic",
    "--json",
  ]
  with contextlib.redirect_stdout(io.StringIO()) as out:
    plan.main(arguments)
  return arguments, json.loads(out.getvalue())


def test_a_gpu_machine_is_planned_with_the_rows_of_the_familys_agent(capsys):
  plan.main(["topology=h100:8", "policy=Qwen2.5-VL-7B", SCANNED])
  shown = capsys.readouterr()
  assert "memory of a device, predicted" in shown.out and not shown.err
  assert chips.CHIPS["h100"].gpu and "fsdp=8" in shown.out
  assert "agent.name=qwen2_5_vl_computer_use" in shown.out
  assert "8 rows x 16384 tokens" in shown.out


def test_a_planned_size_keeps_the_agent_of_a_file(tmp_path):
  file = tmp_path / "run.yaml"
  file.write_text("agent: {name: ui_tars_1}")
  config, name, chosen = planned_run.load(
    [str(file), "policy=Qwen3-VL-2B"], chips.Topology.of("h100:8")
  )
  assert name == "Qwen3-VL-2B" and config.agent.name == "ui_tars_1"
  assert "agent" not in str(chosen)


def test_memory_to_spare_is_offered_for_speed(spare):
  _, offers = spare
  offered = {f["settings"][0]: f for f in offers["faster"]}
  assert set(offered) == {
    "policy.config.remat=none",
    "policy.config.remat=dots",
  }
  for promised in offered.values():
    assert offers["total"] < promised["total"] <= offers["available"]
    assert promised["update"] > 1.2


@pytest.mark.slow
def test_what_is_offered_is_as_fast_as_it_says(spare, capsys, monkeypatch):
  """And fits; what does not fit is not offered."""
  arguments, before = spare

  def made(*more):
    plan.main([*arguments, *more])
    return json.loads(capsys.readouterr().out)

  seconds = lambda planned: max(
    planned["roofline"]["accumulate"]["seconds"].values()
  )
  offered = {f["settings"][0]: f for f in before["faster"]}
  for setting, promised in offered.items():
    planned = made(setting)
    assert planned["fits"] and planned["total"] == promised["total"]
    gain = seconds(before) / seconds(planned)
    assert gain == pytest.approx(promised["update"]) and gain > 1.2
    assert setting not in {f["settings"][0] for f in planned["faster"]}
  most = offered["policy.config.remat=none"]["total"]
  small = dataclasses.replace(chips.CHIPS["v5e"], memory=most - 1)
  monkeypatch.setitem(chips.CHIPS, "v5e", small)
  assert [f["settings"] for f in made()["faster"]] == [
    ["policy.config.remat=dots"]
  ]


def test_a_remat_left_to_the_run_is_the_fastest_that_fits(monkeypatch):
  def settled(share_of):
    """The choice where memory is `share_of` a remat's, with its room."""
    most = planned_run.total(planned_run.memory(runs[share_of]))
    chip = dataclasses.replace(
      chips.CHIPS["v5e"], memory=math.ceil(most / update_memory.ROOM)
    )
    with monkeypatch.context() as patch:
      patch.setitem(chips.CHIPS, "v5e", chip)
      planned = run_of(*arguments, "policy.config.remat=auto")
    assert planned_run.total(planned_run.memory(planned)) <= most
    return planned.model.config.remat

  arguments = ["policy.name=qwen3_vl_tiny"]
  runs = {
    remat: run_of(*arguments, f"policy.config.remat={remat}")
    for remat in config_checks.REMATS
  }
  assert {remat: settled(remat) for remat in runs} == {
    remat: remat for remat in runs
  }


def test_without_the_compiler_it_predicts_and_says_so(monkeypatch, capsys):
  monkeypatch.setattr(tpu_compiler, "find_compiler", lambda: "")
  assert plan.main([a for a in TINY if a != "--analytic"]) == 0
  shown = capsys.readouterr()
  assert "libtpu is not installed" in shown.err
  assert "predicted" in shown.out and "compiled" not in shown.out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
  not tpu_compiler.find_compiler(), reason="no libtpu (make tpu-plan)"
)
def test_a_small_run_is_compiled(capsys):
  arguments = [a for a in TINY if a != "--analytic"]
  status = plan.main([
      *arguments, "--json", "mesh.fsdp=4", "mesh.tensor=2", "learner.rows=4",
      "policy.config.scan_layers=true", "engine.slots=8", "engine.drafts=true",
  ])  # fmt: skip
  data = json.loads(capsys.readouterr().out)
  assert status == 0 and data["how"] == "compiled"
  assert set(data["programs"]) == {
    "accumulate",
    "apply",
    "decode",
    "decode with drafts",
    "prefill",
    "encode",
    "weight copy",
  }
  for program in data["programs"].values():
    assert not program["refused"] and program["arguments"] > 0
  run = run_of("policy.name=qwen3_vl_tiny")
  assert (
    cache_memory.sizes(run.processor, run.engine_config, run.buckets, 4).pages
    > 1
  )
