"""Adapters: off they change nothing, on they are W + scale A B; PEFT files."""

import dataclasses
import functools
import json

from flax import nnx
import forced_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import lora_files
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

from tests.policy import test_hf_checkpoint as checkpoints

FAMILIES = checkpoints.FAMILIES
RANK, ALPHA = 4, 10.0
# The tower as well, where it has names of its own and where it has not.
ADAPTED = {
  "qwen3_vl": dict(
    targets=(*lora.TARGETS, "qkv", "proj", "linear_fc1", "linear_fc2"),
    vision=True,
  ),
  "qwen3_vl_moe": {},
  "qwen3_5": {},
  "qwen3_5_moe": {},
  "qwen2_5_vl": dict(targets=(*lora.TARGETS, "0", "2"), vision=True),
  "opencua": {},
  "glm4v": {},
  "glm4v_moe": {},
  "gemma3": dict(targets=(*lora.TARGETS, "out_proj", "fc1"), vision=True),
  "smolvlm": dict(
    targets=(*lora.TARGETS, "out_proj", "fc1", "proj"), vision=True
  ),
  "idefics3": {},
  "qwen2_vl": dict(targets=(*lora.TARGETS, "fc1", "fc2"), vision=True),
}
SMALL = 40  # Attention scores of order 1: no softmax that hides a mistake.


def policy(family, seed=0, **changes):
  config = dataclasses.replace(
    checkpoints.tiny(family), remat="none", **changes
  )
  model = checkpoints.policy(config, seed)
  for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if variable.ndim > 1:
      variable.set_value(variable[...] / SMALL)
  return model


def adapters(model):
  return nnx.to_flat_state(nnx.state(model, layers.LoRAParam))


def train(model, seed=1):
  """Random B in place of the zeros, as if it had been trained."""
  rng = np.random.default_rng(seed)
  for layer in lora.adapted(model):
    b = layer.linear.lora_b
    b.set_value(jnp.asarray(rng.normal(0, 0.05, b.shape), b.dtype))


def adapted(family, **changes):
  model = policy(family, **changes)
  lora.add(model, RANK, ALPHA, **ADAPTED[family])
  train(model)
  return model


def inputs(config):
  """Some text and an image of 4x4 patches."""
  rng = np.random.default_rng(0)
  side = config.vision.patch_size
  processor = qwen_vl_inputs.QwenVLProcessor(
    patch_size=side, min_pixels=1, max_pixels=1 << 20
  )
  image = processor.patchify(
    rng.integers(0, 256, (4 * side, 4 * side, 3), dtype=np.uint8)
  )
  tokens = rng.integers(0, 80, (1, 12)).astype(np.int32)
  if config.vision_start_token_id != config.image_token_id:
    tokens[0, 3] = config.vision_start_token_id
  tokens[0, 4:8] = config.image_token_id
  index = np.full((1, 12), -1, np.int32)
  index[0, 4:8] = range(4)
  place = [(i, i, i) for i in range(4)]
  place += [(4, 4 + i // 2, 4 + i % 2) for i in range(4)]
  place += [(i, i, i) for i in range(6, 10)]
  if config.traits.flat_positions:
    place = [(i, i, i) for i in range(12)]
  return base.PolicyInputs(
    tokens=tokens,
    positions=np.array([place], np.int32),
    segment_ids=np.ones((1, 12), np.int32),
    vision_index=index,
    patches=image.patches[None],
    patch_segments=np.ones((1, 16), np.int32),
    patch_positions=image.positions[None],
  )


# LLVM's optimiser is half of what a tiny model takes to compile.
@functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={"xla_backend_optimization_level": 0},
)
def _logits(graph, state, batch):
  model = nnx.merge(graph, state)
  return model.logits(model(batch))


def logits(model):
  """float32[1, 12, vocabulary]."""
  return np.asarray(_logits(*nnx.split(model), inputs(model.config)))


# --- what is computed ------------------------------------------------------


def test_an_adapter_on_a_single_block_runs_where_blocks_are_scanned():
  outputs = []
  for scan in (False, True):
    model = policy("qwen3_vl", scan_layers=scan)
    depth = len(model.visual.blocks)
    assert depth > 1
    lora.add(
      model, RANK, ALPHA, targets=(f"{depth - 1}.attn.qkv",), vision=True
    )
    assert len(lora.adapted(model)) == 1
    train(model)
    batch = inputs(model.config)
    outputs.append(
      nnx.jit(lambda model, *images: model.encode_images(*images))(
        model, batch.patches, batch.patch_segments, batch.patch_positions
      )
    )
  np.testing.assert_allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize(
  "family,scan",
  trials.by_default(
    [("qwen3_vl", True)],
    [*((f, False) for f in FAMILIES), ("qwen3_vl", True)],
    unlike=[(f, False) for f in ("qwen3_5", *checkpoints.UNLIKE)],
  ),
)
def test_off_is_the_base_to_the_bit_and_merged_is_on(family, scan):
  model = policy(family, scan_layers=scan)
  want = logits(model)
  lora.add(model, RANK, ALPHA, **ADAPTED[family])
  np.testing.assert_array_equal(logits(model), want)

  train(model)
  on = logits(model)
  assert np.abs(on - want).max() > 0.01 * np.abs(want).max()
  np.testing.assert_array_equal(logits(lora.reference(model)), want)
  with lora.disabled(model):
    assert not lora.has_adapter(model)
    np.testing.assert_array_equal(logits(model), want)
  np.testing.assert_array_equal(logits(model), on)

  lora.merge(model)
  assert not adapters(model) and not lora.has_adapter(model)
  np.testing.assert_allclose(logits(model), on, atol=1e-5 * np.abs(on).max())


def test_taking_it_off_copies_no_base_weight():
  model = adapted("qwen3_vl")
  of = lambda m: {
    path: v[...]
    for path, v in nnx.to_flat_state(nnx.state(m, nnx.Param))
    if not isinstance(v, layers.LoRAParam)
  }
  before = of(model)
  reference = lora.reference(model)
  assert nnx.graphdef(reference) == nnx.graphdef(model)
  with lora.disabled(model):
    inside = of(model)
  for weights in (inside, of(reference), of(model)):
    assert weights.keys() == before.keys()
    assert all(weights[path] is before[path] for path in before)
  b = lora.adapted(model)[0].linear.lora_b
  assert np.abs(b[...]).max() > 0, "the reference's zeros are its own"
  with pytest.raises(KeyError):
    with lora.disabled(model):
      raise KeyError("inside")
  assert lora.has_adapter(model)
  merged = nnx.merge(*nnx.split(model))
  lora.merge(merged)
  assert any(of(merged)[path] is not before[path] for path in before)
  lora.remove(model)
  assert not adapters(model)
  for weights in (of(reference), of(model)):
    assert all(weights[path] is before[path] for path in before)


@pytest.mark.parametrize(
  "family",
  trials.by_default(
    ["qwen3_vl_moe"],
    checkpoints.OF_TRANSFORMERS,
    unlike=["qwen3_5", "qwen2_5_vl", *checkpoints.UNLIKE],
  ),
)
def test_the_saved_file_added_to_the_reference_gives_our_logits(
  family, tmp_path
):
  original = checkpoints.reference(checkpoints.tiny(family))
  from safetensors import torch as safetensors_torch
  import torch

  original.save_pretrained(tmp_path / "base")
  adapted = hf_checkpoint.load_model(tmp_path / "base", remat="none")
  lora.add(adapted, RANK, ALPHA, **ADAPTED[family])
  train(adapted)
  lora_files.save(tmp_path / "adapter", adapted, "some/base")

  config = json.loads((tmp_path / "adapter" / lora_files.CONFIG).read_text())
  assert config["base_model_name_or_path"] == "some/base"
  scale = config["lora_alpha"] / config["r"]
  tensors = safetensors_torch.load_file(
    tmp_path / "adapter" / lora_files.WEIGHTS
  )
  before = _reference_logits(original, adapted.config)
  for key, a in tensors.items():
    if ".lora_A." in key:
      module = key.removeprefix("base_model.model.").removesuffix(
        ".lora_A.weight"
      )
      b = tensors[key.replace(".lora_A.", ".lora_B.")]
      with torch.no_grad():
        original.get_submodule(module).weight += scale * b @ a
  want = _reference_logits(original, adapted.config)
  size = np.abs(want).max()
  assert np.abs(want - before).max() > 0.05 * size
  np.testing.assert_allclose(logits(adapted), want, atol=2e-5 * size)


def _reference_logits(model, config):
  import torch

  batch = inputs(config)
  side = config.vision.patch_size
  if config.traits.tower in ("siglip", "idefics3"):
    return _siglip_logits(model, config, batch)
  tower = model.model.visual
  patches = torch.tensor(batch.patches[0]).float().reshape(16, 3, side, side)
  if config.traits.tower == "qwen3":
    mean = std = torch.full((3,), 0.5)
  else:
    mean = torch.tensor(qwen_vl_inputs.QWEN2_5_VL["image_mean"])
    std = torch.tensor(qwen_vl_inputs.QWEN2_5_VL["image_std"])
  pixels = (patches / 255 - mean[:, None, None]) / std[:, None, None]
  pixels = pixels[:, :, None].expand(-1, -1, 2, -1, -1).reshape(16, -1)
  assert pixels.shape[1] == tower.patch_embed.proj.weight[0].numel()
  tokens = torch.tensor(batch.tokens).long()
  with torch.no_grad():
    output = model(
      input_ids=tokens,
      pixel_values=pixels,
      image_grid_thw=torch.tensor([[1, 4, 4]]),
      mm_token_type_ids=(tokens == config.image_token_id).int(),
      use_cache=False,
    )
  return output.logits.numpy()


def _siglip_logits(model, config, batch):
  import torch

  side = config.vision.patch_size
  cells = torch.tensor(batch.patches[0]).float()
  cells = cells.reshape(2, 2, 2, 2, 3, side, side).permute(4, 0, 2, 5, 1, 3, 6)
  pixels = cells.reshape(1, 3, 4 * side, 4 * side) / 127.5 - 1
  tokens = torch.tensor(batch.tokens).long()
  extra = {"token_type_ids": (tokens == config.image_token_id).int()}
  if config.traits.tower == "idefics3":
    extra, pixels = {}, pixels[None]
  with torch.no_grad():
    return model(
      input_ids=tokens, pixel_values=pixels, use_cache=False, **extra
    ).logits.numpy()


@pytest.mark.parametrize("scan", [False, True], ids=["list", "stacked"])
@pytest.mark.slow
def test_gradients_are_those_of_the_product(scan):
  """dA = scale dW B^T and dB = scale A^T dW, and nothing else has any."""
  model = policy("qwen3_vl", scan_layers=scan)
  batch = inputs(model.config)
  if scan:  # The tower is not, and is in the other case.
    batch = dataclasses.replace(batch, patches=batch.patches[:, :0])
  lora.add(model, RANK, ALPHA, **({} if scan else ADAPTED["qwen3_vl"]))
  train(model)

  def loss(model):
    return (model.logits(model(batch)) ** 2).mean()

  def gradients(kind):
    graph, state, static = nnx.split(model, kind, ...)
    run = jax.jit(
      jax.grad(lambda s: loss(nnx.merge(graph, s, static))),
      compiler_options={"xla_backend_optimization_level": 0},
    )
    return {path: v[...] for path, v in nnx.to_flat_state(run(state))}

  only = gradients(layers.LoRAParam)
  assert only.keys() == {path for path, _ in adapters(model)}
  everything = gradients(nnx.Param)
  assert len(everything) > len(only)
  checked = 0
  for path, linear in nnx.iter_graph(model):
    if not isinstance(linear, layers.Linear) or linear.lora_a is None:
      continue
    checked += 1
    a, b, scale = linear.lora_a[...], linear.lora_b[...], linear.lora_scale
    assert scale == ALPHA / RANK
    dw = everything[*path, "weight"]
    for part, want in (
      ("lora_a", scale * dw @ b.swapaxes(-1, -2)),
      ("lora_b", scale * a.swapaxes(-1, -2) @ dw),
    ):
      size = float(np.abs(want).max())
      assert size > 0, path
      for grads in (only, everything):
        np.testing.assert_allclose(
          grads[*path, part], want, atol=1e-4 * size, err_msg=str(path)
        )
  assert 2 * checked == len(only)
  # nnx's own way to ask for them.
  selected = nnx.DiffState(0, layers.LoRAParam)
  grads = jax.eval_shape(
    lambda s: nnx.grad(loss, argnums=selected)(
      nnx.merge(nnx.graphdef(model), s)
    ),
    nnx.state(model),
  )
  assert {path for path, _ in nnx.to_flat_state(grads)} == only.keys()


@pytest.mark.parametrize("scan", [False, True], ids=["list", "stacked"])
def test_merging_rounds_once(scan):
  model = adapted("qwen3_vl", param_dtype="bfloat16", scan_layers=scan)
  want = {}
  for layer in lora.adapted(model):
    linear = layer.linear
    change = np.matmul(linear.lora_a[...], linear.lora_b[...])
    wide = np.asarray(linear.weight[...], np.float32)
    want[layer.names] = wide + linear.lora_scale * change
  lora.merge(model)
  for layer in lora.linears(model):
    if layer.names in want:
      weight = layer.linear.weight[...]
      assert weight.dtype == jnp.bfloat16
      np.testing.assert_allclose(
        np.asarray(weight, np.float32), want[layer.names], rtol=2**-8
      )


# --- a fresh adapter -------------------------------------------------------


def test_fresh_numbers_are_peft_s_and_do_not_depend_on_stacking():
  stacked, listed, other = (
    policy("qwen3_vl", scan_layers=scan) for scan in (True, False, False)
  )
  for model, seed in ((stacked, 0), (listed, 0), (other, 1)):
    lora.add(model, 8, seed=seed)
  values = []
  lists = {a.names[0]: a.linear for a in lora.adapted(listed)}
  linears = {a.names[0]: a.linear for a in lora.adapted(other)}
  for layer in lora.adapted(stacked):
    assert layer.linear.lora_scale == 4.0
    wide, out = layer.sizes
    for name, a, b in zip(
      layer.names, layer.linear.lora_a[...], layer.linear.lora_b[...]
    ):
      assert a.shape == (wide, 8) and a.dtype == jnp.float32
      assert b.shape == (8, out) and not b.any()
      assert checkpoints.same(a, lists[name].lora_a[...])
      assert not checkpoints.same(a, linears[name].lora_a[...])
      values.append(np.asarray(a).ravel() * wide**0.5)
  values = np.concatenate(values)
  # Uniform within +-1 / sqrt(in), and no two layers alike.
  assert -1 <= values.min() < -0.99 and 0.99 < values.max() <= 1
  assert abs(values.std() - 3**-0.5) < 0.01
  assert len(np.unique(values)) > 0.99 * len(values)


def test_only_the_decoder_unless_asked():
  model = policy("qwen2_5_vl")
  lora.add(model, RANK)
  names = [n for a in lora.adapted(model) for n in a.names]
  assert len(names) == 3 * len(lora.TARGETS)
  assert all(name.startswith("model.language_model.") for name in names)
  lora.remove(model)
  lora.add(model, RANK, targets=["mlp.gate_proj"], vision=True)
  names = [n for a in lora.adapted(model) for n in a.names]
  assert sorted(names) == [
    *(f"model.language_model.layers.{i}.mlp.gate_proj" for i in range(3)),
    *(f"model.visual.blocks.{i}.mlp.gate_proj" for i in range(2)),
  ]


def test_experts_stay_as_they_are():
  model = policy("qwen3_vl_moe")
  lora.add(model, RANK)
  short = {n.rsplit(".", 1)[-1] for a in lora.adapted(model) for n in a.names}
  assert short == {"q_proj", "k_proj", "v_proj", "o_proj"}
  lora.remove(model)
  with pytest.raises(ValueError, match="experts only; pass exp.*k_proj, o_pr"):
    lora.add(model, RANK, targets=["gate_proj", "experts"])


@pytest.mark.parametrize(
  "arguments,message",
  [
    ({"targets": ["q_prj"]}, "'q_prj' matches no.*did you mean 'q_proj'"),
    ({"targets": ["q_proj", "x.up_proj"]}, "did you mean 'up_proj'"),
    ({"targets": ["qkv"]}, "'qkv' is in the vision tower only; pass vis"),
    ({"targets": []}, "targets must be a list of names"),
    ({"targets": "q_proj"}, "targets must be a list of names"),
    ({"vision": True}, "no target is in the tower; add.*linear_fc1"),
    ({"rank": 0}, "rank must be an int >= 1, got 0"),
    ({"rank": 2.0}, "rank must be an int >= 1, got 2.0"),
  ],
)
def test_what_cannot_be_added_is_named(arguments, message):
  model = policy("qwen3_vl")
  with pytest.raises(ValueError, match=message):
    lora.add(model, **arguments)
  assert not lora.has_adapter(model)


def test_one_adapter_at_a_time(tmp_path):
  model = adapted("qwen3_vl")
  lora_files.save(tmp_path, model)
  for call in (
    lambda: lora.add(model),
    lambda: lora_files.load(tmp_path, model),
  ):
    with pytest.raises(ValueError, match="adapter already; lora.merge or"):
      call()
  with pytest.raises(ValueError, match="merge it first .lora.merge. or save"):
    hf_checkpoint.save_model(tmp_path / "whole", model)
  lora.remove(model)
  for call in (
    lambda: lora.remove(model),
    lambda: lora.merge(model),
    lambda: lora_files.save(tmp_path, model),
    lambda: lora.reference(model),
    lambda: lora.disabled(model).__enter__(),
  ):
    with pytest.raises(ValueError, match="no LoRA adapter; lora.add"):
      call()


# --- meshes ----------------------------------------------------------------

MESH_SCRIPT = """
import pathlib
import sys
import jax
import numpy as np
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import lora_files
from tunix.rl.multi_turn.policy import sharding

P = jax.sharding.PartitionSpec
directory, adapter, merged, out = map(pathlib.Path, sys.argv[1:])
mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
for scan in (False, True):
  model = hf_checkpoint.load_model(directory, mesh, scan_layers=scan)
  lead = (None,) * scan
  def check():
    for layer in lora.adapted(model):
      linear = layer.linear
      back = layer.names[0].rsplit(".", 1)[-1] in ("o_proj", "down_proj")
      into, out_ = ("tensor", "fsdp") if back else ("fsdp", "tensor")
      assert linear.weight[...].sharding.spec == P(*lead, into, out_)
      for part, spec in (("lora_a", P(*lead, into, None)),
                         ("lora_b", P(*lead, None, out_))):
        value = getattr(linear, part)
        assert value[...].sharding == jax.NamedSharding(mesh, spec), (
            layer.names, value[...].sharding, spec)
        assert sharding.parameter_sharding(value, mesh).spec == spec
  lora.add(model, 4, 10.0)
  check()
  for old, new in zip(lora.adapted(model),
                      lora.adapted(lora.reference(model))):
    old, new = old.linear.lora_b[...], new.linear.lora_b[...]
    assert not new.any() and new.sharding == old.sharding
  lora.remove(model)
  lora_files.load(adapter, model)
  check()
  lora_files.save(out / "adapter", model, "base")
  for name in (lora_files.CONFIG, lora_files.WEIGHTS):
    assert (out / "adapter" / name).read_bytes() == (
        adapter / name).read_bytes()
  places = {t.path: t.variable[...].sharding
            for t in hf_checkpoint.tensors_of(model)}
  lora.merge(model)
  assert places == {t.path: t.variable[...].sharding
                    for t in hf_checkpoint.tensors_of(model)}
  hf_checkpoint.save_model(out / "merged", model)
  one = hf_checkpoint.load_model(merged)
  two = hf_checkpoint.load_model(out / "merged")
  for a, b in zip(hf_checkpoint.tensors_of(one), hf_checkpoint.tensors_of(two)):
    np.testing.assert_allclose(a.variable[...], b.variable[...], atol=1e-6)
print("placed")
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_on_a_mesh_the_adapter_lies_as_the_weights_do(tmp_path):
  model = policy("qwen3_vl")
  hf_checkpoint.save_model(tmp_path / "base", model)
  lora.add(model, RANK, ALPHA)
  train(model)
  lora_files.save(tmp_path / "adapter", model, "base")
  lora.merge(model)
  hf_checkpoint.save_model(tmp_path / "merged", model)
  names = ("base", "adapter", "merged", "out")
  assert "placed" in forced_devices.run(
    "-c", MESH_SCRIPT, *(tmp_path / name for name in names)
  )
