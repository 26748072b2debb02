"""Facts and costs of a policy before it is trained."""

import dataclasses
import json

import forced_devices
import jax
import numpy as np
from PIL import Image
import published_sizes
import pytest
import trials
from tunix.rl.multi_turn.commands import inspect_policy
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config


def report(capsys, *arguments):
  assert inspect_policy.main([*arguments, "--json"]) == 0
  return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
  """Returns standard error of a refused command."""
  try:
    status = inspect_policy.main(arguments)
  except SystemExit as stopped:  # argparse's own.
    status = stopped.code
  assert status == 2
  return capsys.readouterr().err


# --- published sizes ----------------------------------------------------------


# The others differ in numbers only.
@pytest.mark.parametrize(
    "name",
    ("Qwen3-VL-2B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen2.5-VL-7B"),
)  # fmt: skip
def test_parameters_of_published_sizes(name):
  parts = policy_facts.parameters_by_part(policy_facts.find(name).model)
  assert parts["total"] == pytest.approx(
    published_sizes.PUBLISHED[name], rel=1e-3
  )
  counted = sum(v for k, v in parts.items() if k not in ("total", "active"))
  assert counted == parts["total"]
  if name.endswith("A3B"):
    assert parts["active"] == pytest.approx(3.35e9, rel=0.05)
  else:
    outside = parts["vision tower"] + parts["mergers"]
    assert parts["active"] == parts["total"] - outside
  assert bool(parts["head"]) != qwen_config.SIZES[name].tie_word_embeddings


def test_a_published_name_needs_no_files_and_no_weights(capsys):
  figures = report(capsys, "qwen3-vl-4b", "--mesh", "fsdp=16", "--images", "2")
  assert figures["name"] == "Qwen3-VL-4B"
  assert figures["screens"][0] == {
    "screen": "1280x720",
    "resized": "1280x704",
    "tokens": 880,
    "patches": 3520,
  }
  assert figures["sequence"]["tokens"] == 2 * 880 + 2000
  # 36 layers x keys and values x 8 heads of 128 in bfloat16.
  assert figures["sequence"]["kv_bytes_per_token"] == 36 * 2 * 8 * 128 * 2
  total = figures["parameters"]["total"]
  memory = figures["memory"]["bytes"]
  assert 4 * total / 16 < memory["parameters"] < 4.1 * total / 16
  assert memory["optimizer"] == 2 * memory["gradients"]


def test_layers_of_linear_attention_keep_no_keys(capsys, tmp_path):
  config = qwen_config.to_hf(published_sizes.SIZES["Qwen3.5-9B"])
  (tmp_path / "config.json").write_text(json.dumps(config))
  figures = report(capsys, str(tmp_path))
  # 8 of 32 layers x keys and values x 4 heads of 256 in float32.
  assert figures["sequence"]["kv_bytes_per_token"] == 8 * 2 * 4 * 256 * 4


def test_the_command_prints_tables(capsys):
  arguments = ["Qwen2.5-VL-3B", "--screen", "1920x1080"]
  assert inspect_policy.main(arguments) == 0
  shown = capsys.readouterr().out
  for piece in ("qwen2_5_vl", "decoder layers", "1920x1080", "KV cache"):
    assert piece in shown


# --- forward ------------------------------------------------------------------


@pytest.mark.parametrize(
  "name",
  trials.by_default(
    [], policy_facts.BUILT_IN, unlike=["tiny_vl", "qwen3_5_tiny"]
  ),
)
def test_a_built_in_runs_on_a_generated_picture(name, capsys):
  figures = report(capsys, name, "--screen", "96x64", "--forward")["forward"]
  chances = [t["probability"] for t in figures["top"]]
  assert len(chances) == 5
  assert chances == sorted(chances, reverse=True)
  assert 0 < sum(chances) <= 1 + 1e-9
  assert figures["random_weights"] == (name not in by_name.SHIPPED)
  assert bool(figures["image_tokens"]) == ("_text_" not in name)
  assert inspect_policy.main([name, "--screen", "96x64"]) == 0
  assert "forward" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_saved_directory_is_read_and_run_on_a_picture(tmp_path, capsys):
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", screen=(64, 64))
  checkpoint.save_policy(tmp_path / "p", model, dtype="bfloat16")
  Image.new("RGB", (64, 48), (200, 10, 10)).save(tmp_path / "shot.png")
  arguments = [
    str(tmp_path / "p"),
    "--screen=64x64",
    "--forward",
    f"--image={tmp_path / 'shot.png'}",
    "--prompt=Click OK.",
  ]
  figures = report(capsys, *arguments)
  assert figures["files"] == {"BF16": 2 * figures["parameters"]["total"]}
  assert not figures["forward"]["random_weights"]
  shown = inspect_policy.text_of(figures)
  assert "BF16" in shown and "next token" in shown
  bad = refusal(capsys, *arguments[:3], f"--image={tmp_path / 'none.png'}")
  assert "none.png" in bad


def test_forward_of_a_published_size_asks_for_its_directory(capsys):
  assert "directory" in refusal(capsys, "Qwen3-VL-2B", "--forward")


# --- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
  "arguments, problem",
  (
    (["Qwen3-VL-5B"], "Qwen3-VL-4B"),
    (["tiny_vl", "--mesh", "fdsp=2"], "data=1,fsdp=8,sequence=2"),
    (["tiny_vl", "--mesh", "fsdp=0"], "sizes >="),
    (["tiny_vl", "--screen", "720p"], "1280x720"),
    (["tiny_vl", "--screen", "1280x720"], "smaller"),
    (["tiny_vl", "--images", "-1"], "number >= 0"),
    ([], "policy"),
  ),
  ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_a_refusal_names_the_fix(arguments, problem, capsys):
  assert problem in refusal(capsys, *arguments)


def test_a_directory_without_a_policy_is_refused(tmp_path, capsys):
  assert "config.json" in refusal(capsys, str(tmp_path))


# --- the plan -----------------------------------------------------------------

PLACED = """
import json
import jax
from flax import nnx
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy import sharding
out = {}
for name in ("tiny_vl", "qwen3_vl_tiny", "qwen2_5_vl_tiny"):
  make = checkpoint.load_policy if name == "tiny_vl" else (
      checkpoint.create_policy)
  for sizes in (dict(data=1, fsdp=8), dict(data=2, fsdp=2, tensor=2)):
    model, _, _ = make(name)
    mesh = sharding.make_mesh(**sizes)
    sharding.shard_model(model, mesh)
    here = sum(
        s.data.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param))
        for s in x.addressable_shards if s.device == jax.devices()[0])
    abstract = update_memory.abstract_mesh(**sizes)
    out[f"{name} {sizes}"] = (
        here, update_memory.parameter_bytes(model, abstract))
print(json.dumps(out))
"""


@pytest.mark.slow
def test_planned_parameters_are_what_a_device_of_a_mesh_holds():
  figures = forced_devices.report("-c", PLACED)
  assert len(figures) == 6
  for case, (real, planned) in figures.items():
    assert real == planned, case


@pytest.fixture(scope="module")
def published():
  return policy_facts.find("Qwen3-VL-2B").model


def test_a_plan_grows_with_what_it_is_for(published):
  mesh = update_memory.abstract_mesh(fsdp=4)

  def total(**changes):
    fields = dict(row_length=8192, patches=3520, targets=1024) | changes
    return update_memory.plan(
      published, mesh, update_memory.Work(**fields)
    ).total

  for field, values in (
    ("row_length", (1024, 8192, 16384, 65536)),
    ("rows", (1, 2, 4)),
    ("patches", (0, 3520, 35200)),
    ("logit_chunk", (64, 512, 1024)),
  ):
    totals = [total(**{field: value}) for value in values]
    assert totals == sorted(totals), field
  assert total(row_length=16384) > total(row_length=8192)


def test_the_parts_of_a_plan_are_its_total(published):
  plan = update_memory.plan(
    published,
    update_memory.abstract_mesh(),
    update_memory.Work(row_length=4096, targets=512),
  )
  parts = dataclasses.asdict(plan)
  assert all(v >= 0 for v in parts.values())
  assert plan.accumulate + plan.optimizer == plan.total
  assert plan.total <= sum(parts.values()) + plan.heap_gaps


def test_kv_cache_bytes_are_those_of_the_cache():
  policy = policy_facts.find("qwen3_vl_tiny")
  cache = jax.eval_shape(lambda: policy.model.init_cache(1, 64))
  real = sum(
    int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache)
  )
  sequence = inspect_policy.describe(policy, (64, 64))["sequence"]
  assert real == 64 * sequence["kv_bytes_per_token"]


def test_a_text_policy_has_sequences_without_screenshots(capsys, tmp_path):
  facts = report(capsys, "qwen3_text_tiny")
  assert facts["sizes"]["family"] == "qwen3"
  assert not any("vision" in name for name in facts["sizes"])
  parts = facts["parameters"]
  assert parts["vision tower"] == parts["mergers"] == 0
  assert parts["total"] == parts["embedding"] + parts["decoder layers"]
  assert facts["screens"] == []
  assert facts["sequence"]["tokens"] == 2000 and not facts["sequence"]["images"]
  assert facts["memory"]["bytes"]["vision_residuals"] == 0
  shot = tmp_path / "shot.png"
  Image.new("RGB", (8, 8)).save(shot)
  bad = refusal(capsys, "qwen3_text_tiny", "--forward", f"--image={shot}")
  assert "reads text only" in bad
