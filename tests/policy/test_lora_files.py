"""Adapters in PEFT's files: equal to the bit, and refused by name."""

import json
import re

from flax import nnx
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import trials
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import lora_files

from tests.policy import test_hf_checkpoint as checkpoints
from tests.policy import test_lora as cases


@pytest.mark.parametrize(
  "family",
  trials.by_default(
    ["qwen3_vl_moe", "qwen3_5"], checkpoints.FAMILIES, unlike=checkpoints.UNLIKE
  ),
)
def test_saved_and_loaded_is_equal_to_the_bit(family, tmp_path):
  model = cases.adapted(family)
  assert lora_files.save(tmp_path / "a", model) == tmp_path / "a"
  assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
    lora_files.CONFIG,
    lora_files.WEIGHTS,
  ]
  tensors = safetensors_numpy.load_file(tmp_path / "a" / lora_files.WEIGHTS)
  (key,) = (
    name.replace(".lora_A.", ".lora_{}.")
    for name in tensors
    if name.endswith("layers.1.self_attn.q_proj.lora_A.weight")
    and ("language_model" in name or "text_model" in name)
  )
  assert tensors[key.format("A")].shape == (cases.RANK, 32)
  # Queries of two heads, with gates where there is linear attention.
  heads = 2 * model.config.text.head_dim * (1 + model.config.traits.linear)
  assert tensors[key.format("B")].shape == (heads, cases.RANK)
  for scan in (False, True):
    other = cases.policy(family, seed=0, scan_layers=scan)
    lora_files.load(tmp_path / "a", other)
    if not scan:
      checkpoints.assert_same(model, other)
      assert nnx.graphdef(model) == nnx.graphdef(other)
    lora_files.save(tmp_path / "b", other)
    for name in (lora_files.CONFIG, lora_files.WEIGHTS):
      assert (tmp_path / "a" / name).read_bytes() == (
        tmp_path / "b" / name
      ).read_bytes()


@hypothesis.given(
  st.floats(1e-3, 1e6) | st.integers(1, 1000), st.integers(1, 512)
)
def test_alpha_gives_the_scale_again(alpha, rank):
  scale = float(alpha / rank)
  assert lora_files._alpha(scale, rank) / rank == scale


def test_target_modules_mean_what_is_adapted_and_no_more(tmp_path):
  def saved(family, **arguments):
    model = cases.policy(family)
    lora.add(model, cases.RANK, **arguments)
    lora_files.save(tmp_path, model)
    config = json.loads((tmp_path / lora_files.CONFIG).read_text())
    return config["target_modules"], model

  assert saved("qwen3_vl")[0] == sorted(lora.TARGETS)
  # Here the tower's matrices are called as the decoder's,
  names, model = saved("qwen2_5_vl")
  assert set(names) == {n for a in lora.adapted(model) for n in a.names}
  # and here a convolution as a matrix.
  names, _ = saved("qwen3_vl", targets=["proj"], vision=True)
  assert names == [f"model.visual.blocks.{i}.attn.proj" for i in range(2)]


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory):
  directory = tmp_path_factory.mktemp("adapter")
  model = cases.policy("qwen2_5_vl")
  lora.add(model, cases.RANK, cases.ALPHA)
  cases.train(model)
  lora_files.save(directory, model, "some/base")
  return directory


def edited(source, directory, tensors=None, **config):
  """A copy of an adapter with other config fields or tensors."""
  fields = json.loads((source / lora_files.CONFIG).read_text()) | config
  (directory / lora_files.CONFIG).write_text(json.dumps(fields))
  content = safetensors_numpy.load_file(source / lora_files.WEIGHTS)
  content = tensors(content) if tensors else content
  safetensors_numpy.save_file(content, directory / lora_files.WEIGHTS)
  return directory


@pytest.mark.parametrize(
  "field,value",
  [
    ("peft_type", "IA3"),
    ("use_dora", True),
    ("use_rslora", True),
    ("modules_to_save", ["lm_head"]),
    ("rank_pattern", {"q_proj": 8}),
    ("alpha_pattern", {"q_proj": 8}),
    ("bias", "all"),
    ("fan_in_fan_out", True),
    ("layers_to_transform", [0]),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("init_lora_weights", "pissa"),
    ("r", 0),
    ("lora_alpha", None),
  ],
)
def test_what_is_not_computed_here_is_refused_by_name(
  saved_adapter, tmp_path, field, value
):
  edited(saved_adapter, tmp_path, **{field: value})
  model = cases.policy("qwen2_5_vl")
  with pytest.raises(ValueError, match=re.escape(f"holds {field}={value!r}")):
    lora_files.load(tmp_path, model)
  assert not lora.has_adapter(model)


def test_files_of_peft_load(saved_adapter, tmp_path):
  """Half precision, names of before transformers 4.52, fields we do not know;
  what a pattern means is matched against both names."""
  old = lambda key: key.replace("model.language_model.", "model.")
  half = lambda tensors: {
    old(key): value.astype(np.float16) for key, value in tensors.items()
  }
  edited(
    saved_adapter,
    tmp_path,
    half,
    target_modules=r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj",
    lora_dropout=0.1,
    peft_version="0.99",
    inference_mode=False,
    init_lora_weights="gaussian",
  )
  want, model = cases.policy("qwen2_5_vl"), cases.policy("qwen2_5_vl")
  lora_files.load(saved_adapter, want)
  lora_files.load(tmp_path, model)
  pairs = zip(cases.adapters(want), cases.adapters(model), strict=True)
  for (path, a), (_, b) in pairs:
    rounded = np.asarray(a[...]).astype(np.float16).astype(np.float32)
    assert checkpoints.same(b[...], rounded), path


EXTRA = "base_model.model.lm_head.lora_A.weight"
TOWER = "base_model.model.model.visual.blocks.0.attn.proj.lora_A.weight"
FIRST = (
  "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A"
  ".weight"
)


@pytest.mark.parametrize(
  "edit,message",
  [
    (lambda t: t.pop(FIRST), "layers.0.self_attn.q_proj are missing"),
    (
      lambda t: t.update({EXTRA: t[FIRST]}),
      f"1 tensors fit no linear layer: {EXTRA}",
    ),
    (
      lambda t: t.update({FIRST: np.ones((3, 32), np.float32)}),
      r"q_proj.lora_A.weight has shape \[3, 32\], r=4.*\[4, 32\]",
    ),
    (
      lambda t: [t.pop(k) for k in list(t) if ".layers.1." in k],
      "mlp.down_proj are missing",
    ),
    (lambda t: t.clear(), "are missing"),
    (
      lambda t: t.update({TOWER: np.ones((4, 32), np.float32)}),
      f"{TOWER} is of a layer that target_modules does not name",
    ),
  ],
  ids=["missing", "extra", "misshapen", "layer", "empty", "untargeted"],
)
@pytest.mark.parametrize("scan", [False, True], ids=["list", "stacked"])
def test_tensors_that_do_not_fit_are_named(
  saved_adapter, tmp_path, edit, message, scan
):
  def tensors(content):
    edit(content)
    return content

  edited(saved_adapter, tmp_path, tensors)
  model = cases.policy("qwen2_5_vl", scan_layers=scan)
  with pytest.raises(ValueError, match=message + r"[\s\S]*'some/base'"):
    lora_files.load(tmp_path, model)
  assert not lora.has_adapter(model)


def test_missing_and_cut_files_are_named(saved_adapter, tmp_path):
  model = cases.policy("qwen2_5_vl")
  for name in (lora_files.WEIGHTS, lora_files.CONFIG):
    edited(saved_adapter, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}; give a dir"):
      lora_files.load(tmp_path, model)
  edited(saved_adapter, tmp_path)
  data = (tmp_path / lora_files.WEIGHTS).read_bytes()
  (tmp_path / lora_files.WEIGHTS).write_bytes(data[:-1])
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    lora_files.load(tmp_path, model)
