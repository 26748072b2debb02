"""Adapters on experts: each has matrices of its own, merged and in files."""

import json

from flax import nnx
import forced_devices
import jax
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import lora_files
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import experts

from tests.policy import test_hf_checkpoint as checkpoints
from tests.policy import test_lora as plain

FAMILIES = tuple(
  family
  for family in checkpoints.FAMILIES
  if checkpoints.tiny(family).text.num_experts
)
RANK, ALPHA = plain.RANK, plain.ALPHA


def train(model):
  """`test_lora.train`, by as much as tiny experts need to show it."""
  plain.train(model)
  for layer in of_experts(model):
    b = layer.linear.lora_b
    b.set_value(b[...] * 40)


def adapted(family, **changes):
  model = plain.policy(family, **changes)
  lora.add(model, RANK, ALPHA, experts=True)
  train(model)
  return model


def of_experts(model):
  return [layer for layer in lora.adapted(model) if layer.expert]


@pytest.mark.parametrize(
  "family, scan",
  trials.by_default(
    [("qwen3_vl_moe", True)],
    [*((f, False) for f in FAMILIES), ("qwen3_vl_moe", True)],
  ),
)
def test_off_is_the_base_to_the_bit_and_merged_is_on(family, scan):
  model = plain.policy(family, scan_layers=scan)
  want = plain.logits(model)
  lora.add(model, RANK, ALPHA, experts=True, targets=experts.PARTS)
  names = {name for layer in of_experts(model) for name in layer.names}
  sparse = [model.config.text.is_sparse(i) for i in range(3)]
  assert len(names) == 3 * 4 * sum(sparse)
  np.testing.assert_array_equal(plain.logits(model), want)
  train(model)
  on = plain.logits(model)
  assert np.abs(on - want).max() > 0.005 * np.abs(want).max()
  np.testing.assert_array_equal(plain.logits(lora.reference(model)), want)
  with lora.disabled(model):
    np.testing.assert_array_equal(plain.logits(model), want)
  lora.merge(model)
  assert not plain.adapters(model)
  np.testing.assert_allclose(
    plain.logits(model), on, atol=1e-5 * np.abs(on).max()
  )


def test_experts_have_matrices_of_their_own():
  """Of two experts only the one whose B is not zero changes."""
  model = plain.policy("qwen3_vl_moe")
  lora.add(model, RANK, ALPHA, targets=["down_proj"], experts=True)
  layer = of_experts(model)[0]
  assert layer.names[1].endswith("layers.0.mlp.experts.1.down_proj")
  before = np.asarray(layer.weight[...])
  b = np.zeros(layer.linear.lora_b.shape, np.float32)
  b[1] = 1.0
  layer.linear.lora_b.set_value(jax.numpy.asarray(b))
  a = np.asarray(layer.linear.lora_a[...])
  lora.merge(model)
  change = np.asarray(layer.weight[...]) - before
  assert not change[[0, 2, 3]].any()
  np.testing.assert_allclose(change[1], ALPHA / RANK * a[1] @ b[1], atol=1e-6)
  assert not np.array_equal(a[0], a[1])


@pytest.mark.slow
def test_gradients_are_those_of_the_product():
  model = adapted("qwen3_vl_moe")
  batch = plain.inputs(model.config)

  def gradients(kind):
    graph, state, static = nnx.split(model, kind, ...)
    loss = lambda m: (m.logits(m(batch)) ** 2).mean()
    run = jax.jit(
      jax.grad(lambda s: loss(nnx.merge(graph, s, static))),
      compiler_options={"xla_backend_optimization_level": 0},
    )
    return {path: v[...] for path, v in nnx.to_flat_state(run(state))}

  grads = gradients(nnx.Param)
  paths = {id(node): path for path, node in nnx.iter_graph(model)}
  for layer in of_experts(model):
    owner, name = layer.owner
    dw = grads[*paths[id(owner)], name][..., layer.columns or slice(None)]
    adapter = layer.linear
    a, b, scale = adapter.lora_a[...], adapter.lora_b[...], adapter.lora_scale
    path = paths[id(adapter)]
    for part, want in (
      ("lora_a", scale * dw @ b.swapaxes(-1, -2)),
      ("lora_b", scale * a.swapaxes(-1, -2) @ dw),
    ):
      size = float(np.abs(want).max())
      assert size > 0, path
      np.testing.assert_allclose(
        grads[*path, part], want, atol=1e-4 * size, err_msg=str(path)
      )


@pytest.mark.parametrize(
  "family", trials.by_default(["qwen3_vl_moe"], FAMILIES, unlike=FAMILIES)
)
def test_the_file_added_to_the_reference_gives_our_logits(family, tmp_path):
  original = checkpoints.reference(checkpoints.tiny(family))
  from safetensors import torch as safetensors_torch
  import torch

  original.save_pretrained(tmp_path / "base")
  adapted = hf_checkpoint.load_model(tmp_path / "base", remat="none")
  lora.add(adapted, RANK, ALPHA, targets=experts.PARTS, experts=True)
  plain.train(adapted)
  lora_files.save(tmp_path / "adapter", adapted)
  config = json.loads((tmp_path / "adapter" / lora_files.CONFIG).read_text())
  named = set(config["target_modules"])
  text = adapted.config.text
  if adapted.config.traits.tower == "glm4v":  # Its MLP has the same names.
    assert {name.rpartition(".")[2] for name in named} == set(experts.PARTS)
  else:
    assert named == set(experts.PARTS)
  scale = config["lora_alpha"] / config["r"]
  tensors = safetensors_torch.load_file(
    tmp_path / "adapter" / lora_files.WEIGHTS
  )
  before = plain._reference_logits(original, adapted.config)
  count = 0
  for key, a in tensors.items():
    if ".lora_A." not in key:
      continue
    module = key.removeprefix("base_model.model.").removesuffix(
      ".lora_A.weight"
    )
    change = scale * tensors[key.replace(".lora_A.", ".lora_B.")] @ a
    home, dot, tail = module.partition(".experts.")
    with torch.no_grad():
      if not dot:  # The shared expert.
        original.get_submodule(module).weight += change
        continue
      count += 1
      number, part = tail.split(".")
      weights = original.get_submodule(home).experts
      if part == "down_proj":
        weights.down_proj[int(number)] += change
      else:
        half = weights.gate_up_proj.shape[1] // 2
        first = half * (part == "up_proj")
        weights.gate_up_proj[int(number), first : first + half] += change
  sparse = text.num_hidden_layers - len(text.mlp_only_layers)
  assert count == sparse * 4 * 3
  want = plain._reference_logits(original, adapted.config)
  size = np.abs(want).max()
  assert np.abs(want - before).max() > 0.01 * size
  np.testing.assert_allclose(plain.logits(adapted), want, atol=2e-5 * size)

  again = hf_checkpoint.load_model(tmp_path / "base", remat="none")
  lora_files.load(tmp_path / "adapter", again)
  checkpoints.assert_same(adapted, again)


def test_what_cannot_be_added_is_named():
  with pytest.raises(ValueError, match="experts=True, but qwen3_vl .* none"):
    lora.add(plain.policy("qwen3_vl"), RANK, experts=True)
  with pytest.raises(ValueError, match="no target is of experts; add some of"):
    lora.add(
      plain.policy("qwen3_vl_moe"), RANK, targets=["q_proj"], experts=True
    )


MESH = """
import json, sys
sys.path.insert(0, "tests/helpers")
import jax, numpy as np
from flax import nnx
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tests.policy import test_lora as plain, test_lora_experts as cases
one = cases.adapted("qwen3_vl_moe")
mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
base = nnx.merge(
    nnx.split(hf_checkpoint.abstract_model(one.config, mesh))[0],
    nnx.state(plain.policy("qwen3_vl_moe")))
sharding.shard_model(base, mesh)
lora.add(base, plain.RANK, plain.ALPHA, experts=True)
specs = sorted({str(v[...].sharding.spec) for p, v in plain.adapters(base)
                if "experts" in p})
cases.train(base)
sharding.shard_model(base, mesh)
def grads(model):
  graph, state, rest = nnx.split(model, layers.LoRAParam, ...)
  batch = plain.inputs(model.config)
  two = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
  def loss(s):
    m = nnx.merge(graph, s, rest)
    return (m.logits(m(two)) ** 2).mean()
  value, found = jax.jit(jax.value_and_grad(loss))(state)
  return float(value), {str(p): np.asarray(v[...]) for p, v in
                        nnx.to_flat_state(found)}
(a, ga), (b, gb) = grads(one), grads(base)
worst = max(np.abs(gb[k] - ga[k]).max() / np.abs(ga[k]).max() for k in ga)
merged = plain.logits(one)
lora.merge(base)
kept = {str(layer.weight[...].sharding.spec) for layer in lora.linears(base)
        if layer.expert}
print(json.dumps(dict(loss=abs(a - b) / a, gradient=float(worst), specs=specs,
                      kept=sorted(kept),
                      merged=float(np.abs(plain.logits(base) - merged).max()
                                   / np.abs(merged).max()))))
"""


@pytest.mark.slow
def test_experts_adapters_lie_over_the_axis_of_experts():
  report = forced_devices.report("-c", MESH, devices=4, seconds=300)
  assert report["loss"] < 1e-5 and report["gradient"] < 1e-4
  assert report["merged"] < 1e-5
  for specs in (report["specs"], report["kept"]):
    assert specs and all("'tensor'" in spec for spec in specs), report


def test_fresh_numbers_do_not_depend_on_stacking():
  listed, stacked = (
    plain.policy("qwen3_vl_moe", scan_layers=scan) for scan in (False, True)
  )
  for model in (listed, stacked):
    lora.add(model, RANK, experts=True)
    assert all(
      isinstance(layer.linear.lora_a, layers.LoRAParam)
      for layer in of_experts(model)
    )
  lists = {
    name: one
    for layer in of_experts(listed)
    for name, one in zip(layer.names, layer.linear.lora_a[...])
  }
  for layer in of_experts(stacked):
    a = layer.linear.lora_a[...]
    for name, one in zip(layer.names, a.reshape(-1, *a.shape[-2:])):
      assert checkpoints.same(one, lists[name])
