"""Saving and loading policy directories, strictly."""

import json
import math

from flax import nnx
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("policy")
  model, _, _ = checkpoint.create_policy("nano", seed=5, max_cells=77)
  checkpoint.save_policy(path, model)
  return path, model


def copy_with(saved, tmp_path, edit):
  """A copy of the saved policy whose tensors `edit` has changed."""
  path, model = saved
  checkpoint.save_policy(tmp_path, model)
  tensors = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  edit(tensors)
  safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
  return tmp_path


def test_round_trip_is_exact(saved):
  path, model = saved
  loaded, processor, tokenizer = checkpoint.load_policy(path)
  assert loaded.config == model.config
  assert processor.max_cells == 77
  assert tokenizer.get_vocab_size() == model.config.vocab_size
  got = checkpoint.named_parameters(loaded)
  want = checkpoint.named_parameters(model)
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_half_precision_halves_the_file(saved, tmp_path):
  path, model = saved
  checkpoint.save_policy(tmp_path, model, dtype="float16")
  small, large = (
    (p / "model.safetensors").stat().st_size for p in (tmp_path, path)
  )
  assert small < 0.55 * large
  loaded, _, _ = checkpoint.load_policy(tmp_path)
  got = checkpoint.named_parameters(loaded)
  for name, value in checkpoint.named_parameters(model).items():
    assert got[name].dtype == np.float32
    np.testing.assert_allclose(got[name], value, atol=2e-3, err_msg=name)


def test_shipped_size_fits_the_package():
  config = tiny_vl.config_for(checkpoint.load_tokenizer("tiny_vl"), "tiny")
  model = nnx.eval_shape(lambda: tiny_vl.TinyVL(config, nnx.Rngs(0)))
  count = sum(
    math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model))
  )
  assert 1e6 < count < 2e6
  tokenizer = sum(
    file.stat().st_size
    for name in policy_files.TOKENIZER_FILES
    if (file := policy_files.DATA / "tiny_vl" / name).is_file()
  )
  assert 2 * count + tokenizer < 8 << 20


def test_a_seed_decides_the_weights(saved):
  _, model = saved
  again, _, _ = checkpoint.create_policy("nano", seed=5)
  other, _, _ = checkpoint.create_policy("nano", seed=6)
  want = np.asarray(model.embedding[...])
  np.testing.assert_array_equal(again.embedding[...], want)
  assert not np.array_equal(other.embedding[...], want)


def test_a_missing_tensor_is_named(saved, tmp_path):
  path = copy_with(saved, tmp_path, lambda t: t.pop("blocks.1.gate"))
  with pytest.raises(ValueError, match=r"missing.*blocks\.1\.gate"):
    checkpoint.load_policy(path)


def test_an_extra_tensor_is_named(saved, tmp_path):
  path = copy_with(
    saved, tmp_path, lambda t: t.update(surplus=np.zeros(3, np.float32))
  )
  with pytest.raises(ValueError, match="surplus"):
    checkpoint.load_policy(path)


def test_a_misshapen_tensor_is_named(saved, tmp_path):
  def edit(tensors):
    tensors["norm"] = tensors["norm"][:-1].copy()

  path = copy_with(saved, tmp_path, edit)
  with pytest.raises(ValueError, match="'norm'"):
    checkpoint.load_policy(path)


def test_an_unknown_config_field_is_named(saved, tmp_path):
  _, model = saved
  checkpoint.save_policy(tmp_path, model)
  file = tmp_path / "config.json"
  file.write_text(json.dumps({**json.loads(file.read_text()), "depth": 3}))
  with pytest.raises(ValueError, match="depth"):
    checkpoint.load_policy(tmp_path)


def test_an_unknown_policy_lists_the_shipped_ones():
  with pytest.raises(FileNotFoundError, match="tiny_vl"):
    checkpoint.load_policy("no_such_policy")


def test_an_unknown_size_lists_the_known_ones():
  with pytest.raises(ValueError, match="nano"):
    checkpoint.create_policy("huge")
