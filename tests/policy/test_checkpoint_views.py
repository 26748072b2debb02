"""Experts one by one, against a checkpoint that has them joined."""

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import tensor_files

from tests.policy import test_hf_checkpoint as checkpoints


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
