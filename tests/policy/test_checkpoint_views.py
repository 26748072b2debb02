"""FP8 with a scale a block, and experts one by one, against the definition."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy.checkpoints import checkpoint_views
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import tensor_files

from tests.policy import test_hf_checkpoint as checkpoints

BLOCK = (16, 24)
FP8 = {
  "quant_method": "fp8",
  "fmt": "e4m3",
  "activation_scheme": "dynamic",
  "weight_block_size": list(BLOCK),
  "modules_to_not_convert": ["lm_head"],
}


def rounded(weight):
  """(float8, scales), one block after the other."""
  out = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
  high, wide = BLOCK
  scales = np.zeros(
    (-(-weight.shape[0] // high), -(-weight.shape[1] // wide)), np.float32
  )
  for i in range(scales.shape[0]):
    for j in range(scales.shape[1]):
      at = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
      scales[i, j] = np.abs(weight[at]).max() / 448
      out[at] = (weight[at] / scales[i, j]).astype(out.dtype)
  return out, scales


def in_float8(directory):
  """Rounds a checkpoint's linear layers in place; what they mean, by key."""
  file = directory / tensor_files.SINGLE
  tensors, values = {}, {}
  for key, value in safetensors_numpy.load_file(file).items():
    if "_proj.weight" in key and value.ndim == 2 and "visual" not in key:
      tensors[key], scale = rounded(value)
      tensors[key + "_scale_inv"] = scale.astype(ml_dtypes.bfloat16)
      wide = tensors[key + "_scale_inv"].astype(np.float32)
      wide = wide.repeat(BLOCK[0], 0).repeat(BLOCK[1], 1)
      wide = wide[: value.shape[0], : value.shape[1]]
      values[key] = tensors[key].astype(np.float32) * wide
    else:
      tensors[key] = values[key] = value
  header, data, at = {}, b"", 0
  for key, value in tensors.items():  # safetensors' own writer has no float8.
    raw = np.ascontiguousarray(value).tobytes()
    kind = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}
    header[key] = {
      "dtype": kind[str(value.dtype)],
      "shape": list(value.shape),
      "data_offsets": [at, at + len(raw)],
    }
    data, at = data + raw, at + len(raw)
  text = json.dumps(header).encode()
  file.write_bytes(len(text).to_bytes(8, "little") + text + data)
  config = json.loads((directory / "config.json").read_text())
  config["quantization_config"] = FP8
  (directory / "config.json").write_text(json.dumps(config))
  return values


@pytest.mark.parametrize("scan", [False, True])
def test_float8_is_its_definition_to_the_bit(scan, tmp_path):
  hf_checkpoint.save_model(
    tmp_path, checkpoints.policy(checkpoints.tiny("qwen3_vl"))
  )
  values = in_float8(tmp_path)
  model = hf_checkpoint.load_model(tmp_path, scan_layers=scan)
  out = tmp_path / "out"
  hf_checkpoint.save_model(out, model, source=tmp_path)
  written = checkpoints.read(out)
  assert written.keys() == values.keys()
  for key, value in values.items():
    assert checkpoints.same(written[key], value), key
  saved = json.loads((out / "config.json").read_text())
  assert "quantization_config" not in saved
  again = hf_checkpoint.load_model(out, scan_layers=scan)
  checkpoints.assert_same(model, again)


def test_any_slice_of_float8_is_the_slice_of_the_whole(tmp_path):
  hf_checkpoint.save_model(
    tmp_path, checkpoints.policy(checkpoints.tiny("qwen3_vl"))
  )
  values = in_float8(tmp_path)
  views = checkpoint_views.views_of(
    tensor_files.Reader(tmp_path), {"quantization_config": FP8}
  )
  key = "model.language_model.layers.0.mlp.gate_proj.weight"
  rng = np.random.default_rng(0)
  for _ in range(50):
    spans = [sorted(rng.choice(n + 1, 2, False)) for n in values[key].shape]
    where = tuple(slice(*map(int, span)) for span in spans)
    assert checkpoints.same(views.read(key, where), values[key][where])


def test_a_scale_that_does_not_fit_is_named(tmp_path):
  hf_checkpoint.save_model(
    tmp_path, checkpoints.policy(checkpoints.tiny("qwen3_vl"))
  )
  in_float8(tmp_path)
  config = json.loads((tmp_path / "config.json").read_text())
  config["quantization_config"]["weight_block_size"] = [8, 8]
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="needs .*_scale_inv of shape"):
    hf_checkpoint.load_model(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_one_by_one_are_the_joined_ones(family, tmp_path):
  model = checkpoints.policy(checkpoints.tiny(family))
  hf_checkpoint.save_model(tmp_path / "joined", model)
  tensors, single = checkpoints.read(tmp_path / "joined"), {}
  for key, value in tensors.items():
    layer, _, name = key.partition(".experts.")
    if not name:
      single[key] = value
      continue
    if family == "qwen3_vl_moe":  # Published with [in, out].
      value = value.swapaxes(1, 2)
    for i, expert in enumerate(value):
      parts = {"down": expert}
      if name == "gate_up_proj":
        parts = dict(zip(("gate", "up"), np.split(expert, 2)))
      for part, matrix in parts.items():
        single[f"{layer}.experts.{i}.{part}_proj.weight"] = matrix.copy()
  directory = tmp_path / "single"
  directory.mkdir()
  safetensors_numpy.save_file(single, directory / tensor_files.SINGLE)
  config = (tmp_path / "joined" / "config.json").read_bytes()
  (directory / "config.json").write_bytes(config)
  checkpoints.assert_same(model, hf_checkpoint.load_model(directory))
  lost = next(key for key in single if ".experts.1." in key)
  del single[lost]
  safetensors_numpy.save_file(single, directory / tensor_files.SINGLE)
  with pytest.raises(ValueError, match=lost.replace(".", r"\.")):
    hf_checkpoint.load_model(directory)
