"""Checkpoints: what `transformers` wrote is read, what is written it reads."""

import dataclasses
import json
import pathlib
import shutil

from flax import nnx
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import trials
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_defaults
from tunix.rl.multi_turn.policy.models.qwen import qwen_families

FAMILIES = qwen_config.FAMILIES
# OpenCUA's classes come with its checkpoints.
OF_TRANSFORMERS = tuple(name for name in FAMILIES if name != "opencua")
DIFFERENT = ("qwen3_vl_moe", "qwen3_5", "qwen2_5_vl")
"""Families that share least: deepstack and experts; a recurrent state; windows
and biases. Parts of GLM, Gemma and the dense Qwens are in slow tests."""
UNLIKE = ("qwen3_vl", "glm4v_moe", "gemma3", "smolvlm")
"""Families that differ from these and from one another: the slow cases of
`.ci/run`. Others have their parts in another combination."""


def tiny(family, **text_changes):
  """A configuration of a family, as small as it gets."""
  text = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rope_theta=1e4,
    mrope_section=(4, 2, 2),
  )
  traits = qwen_families.VISION_LANGUAGE[family]
  if traits.experts:
    text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
  if traits.linear:
    text |= dict(
      full_attention_layers=(1,),
      head_dim=32,
      partial_rotary_factor=0.5,
      linear_num_key_heads=1,
      linear_num_value_heads=2,
      linear_key_head_dim=8,
      linear_value_head_dim=12,
      linear_conv_kernel_dim=4,
    )
  if traits.tower == "glm4v":
    text |= dict(partial_rotary_factor=0.5, mrope_section=(1, 1, 2))
  if traits.sigmoid_router:
    text |= dict(mlp_only_layers=(0,), shared_expert_intermediate_size=24)
    text |= dict(rms_norm_eps=1e-5)
  if traits.flat_positions:
    text |= dict(mrope_section=(8, 0, 0))
  if traits.linear and traits.experts:
    text |= dict(intermediate_size=0, shared_expert_intermediate_size=16)
  if traits.windows:
    text |= dict(full_attention_layers=(1,), sliding_window=8)
    text |= dict(local_rope_theta=1e3, query_pre_attn_scalar=8.0)
  tower = {
    "siglip": dict(patch_size=14, num_position_embeddings=16),
    "idefics3": dict(patch_size=14, num_position_embeddings=16, tile_size=60),
    "qwen2": dict(patch_size=14, intermediate_size=64),
    "qwen2_5": dict(patch_size=14, window_size=56, fullatt_block_indexes=(1,)),
    "glm4v": dict(patch_size=14, num_position_embeddings=16),
    "qwen3": dict(
      num_position_embeddings=16,
      deepstack_visual_indexes=(0, 1) if traits.deepstack else (),
    ),
  }[traits.tower]
  return qwen_config.QwenVLConfig(
    family=family,
    vision=qwen_config.VisionConfig(
      depth=2,
      hidden_size=32,
      num_heads=2,
      out_hidden_size=32,
      **{"intermediate_size": 40, **tower},
    ),
    text=qwen_config.TextConfig(**(text | text_changes)),
    **image_tokens(family),
  )


def image_tokens(family):
  if family == "opencua":  # Its file has the first alone.
    return dict(
      image_token_id=90,
      video_token_id=90,
      vision_start_token_id=151661,
      vision_end_token_id=151663,
    )
  if family in ("smolvlm", "idefics3"):  # Nor of anything else.
    return dict.fromkeys(qwen_defaults.IMAGE_TOKENS, 90)
  if family == "gemma3":  # It has none of videos.
    return dict(
      image_token_id=90,
      video_token_id=90,
      vision_start_token_id=92,
      vision_end_token_id=93,
      tie_word_embeddings=True,
    )
  return dict(
    image_token_id=90,
    video_token_id=91,
    vision_start_token_id=92,
    vision_end_token_id=93,
  )


def policy(config, seed=0):
  """A policy of which every parameter is random, biases and norms too."""
  model = hf_checkpoint.abstract_model(config)
  rng = np.random.default_rng(seed)
  fill = lambda v: v.replace(
    jax.numpy.asarray(rng.normal(0.5, 0.5, v.shape), v.dtype)
  )
  state = nnx.state(model, nnx.Param)
  is_variable = lambda v: isinstance(v, nnx.Variable)
  nnx.update(model, jax.tree.map(fill, state, is_leaf=is_variable))
  return model


def parameters(model):
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  return {".".join(map(str, path)): v[...] for path, v in flat}


def same(a, b):
  """Equal to the bit, dtype and NaNs included."""
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype and a.shape == b.shape
  return a.tobytes() == b.tobytes()


def assert_same(a, b):
  a, b = parameters(a), parameters(b)
  assert a.keys() == b.keys()
  assert [name for name in a if not same(a[name], b[name])] == []


def read(directory):
  """All tensors of a checkpoint, by key."""
  return {
    key: value
    for file in directory.glob("*.safetensors")
    for key, value in safetensors_numpy.load_file(file).items()
  }


# --- the reference ---------------------------------------------------------


def reference(config, dtype="float32", seed=0):
  """transformers' model of a configuration, all of it random."""
  torch = pytest.importorskip("torch")
  import transformers

  raw = qwen_config.to_hf(config)
  defaults = transformers.AutoConfig.for_model(config.family)
  # Its default ids are outside of a vocabulary this small.
  raw["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2}
  model = getattr(transformers, raw["architectures"][0])(
    type(defaults).from_dict(raw)
  )
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, buffer in model.named_buffers():
      if name.endswith("correction_bias"):  # Of float32 in every checkpoint.
        buffer.normal_(0.0, 0.2)
    for parameter in model.parameters():
      parameter.normal_(0.0, 0.2)
      # Not `made.to`, which rounds the rotary frequencies as well.
      parameter.data = parameter.data.to(getattr(torch, dtype))
  return model.eval()


def reference_logits(model):
  """Of some text and an image of 4x4 patches."""
  import torch

  config = model.config
  generator = torch.Generator().manual_seed(1)
  side = config.vision_config.patch_size
  tokens = torch.randint(0, 80, (1, 12), generator=generator)
  if config.model_type in ("smolvlm", "idefics3"):
    tokens[0, 4:8] = config.image_token_id
    tiles = torch.randn((1, 1, 3, 4 * side, 4 * side), generator=generator)
    with torch.no_grad():
      return model(
        input_ids=tokens, pixel_values=tiles.to(model.dtype), use_cache=False
      ).logits
  if config.model_type == "gemma3":
    tokens[0, 4:8] = config.image_token_id
    image = torch.randn((1, 3, 4 * side, 4 * side), generator=generator)
    with torch.no_grad():
      return model(
        input_ids=tokens,
        pixel_values=image.to(model.dtype),
        token_type_ids=(tokens == config.image_token_id).int(),
        use_cache=False,
      ).logits
  start = getattr(config, "vision_start_token_id", None)
  tokens[0, 3] = config.image_start_token_id if start is None else start
  tokens[0, 4:8] = config.image_token_id
  pixels = torch.randn((16, 6 * side * side), generator=generator)
  with torch.no_grad():
    return model(
      input_ids=tokens,
      pixel_values=pixels.to(model.dtype),
      image_grid_thw=torch.tensor([[1, 4, 4]]),
      mm_token_type_ids=(tokens == config.image_token_id).int(),
      use_cache=False,
    ).logits


def assert_equal_models(a, b):
  import torch

  a_state, b_state = a.state_dict(), b.state_dict()
  assert a_state.keys() == b_state.keys()
  for name, value in a_state.items():
    assert value.dtype == b_state[name].dtype, name
    assert torch.equal(value, b_state[name]), name
  assert torch.equal(reference_logits(a), reference_logits(b))


def from_pretrained(model, directory):
  loaded, info = type(model).from_pretrained(
    directory, output_loading_info=True
  )
  assert not any(info.values()), info
  return loaded.eval()


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
@pytest.mark.parametrize(
  "dtype,sharded",
  trials.by_default(
    [("bfloat16", True)], [("float32", False), ("bfloat16", True)]
  ),
)
def test_round_trip_through_the_reference_is_equal_to_the_bit(
  family, dtype, sharded, tmp_path
):
  original = reference(tiny(family), dtype)
  limit = "60KB" if sharded else "1GB"
  original.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
  assert (tmp_path / "theirs" / hf_checkpoint.INDEX).exists() == sharded

  model = hf_checkpoint.load_model(tmp_path / "theirs", param_dtype=dtype)
  fixed = {"float32"} if model.config.traits.sigmoid_router else set()
  dtypes = {str(v.dtype) for v in parameters(model).values()}
  assert dtypes == {dtype} | fixed
  hf_checkpoint.save_model(
    tmp_path / "ours",
    model,
    # With the original config.json, and with one made of what we know.
    source=tmp_path / "theirs" if sharded else None,
    max_file_bytes=60_000 if sharded else 1 << 30,
  )
  assert (tmp_path / "ours" / hf_checkpoint.INDEX).exists() == sharded
  assert_equal_models(original, from_pretrained(original, tmp_path / "ours"))
  again = hf_checkpoint.load_model(tmp_path / "ours", param_dtype=dtype)
  assert_same(model, again)


@pytest.mark.parametrize("hidden", [24, 16, 32], ids=str)
def test_experts_are_read_either_way_round(hidden, tmp_path):
  """24: no matrix is square; 16: gate and up; 32: down."""
  config = tiny("qwen3_vl_moe", moe_intermediate_size=hidden)
  original = reference(config)
  original.save_pretrained(tmp_path / "new")  # [E, out, in]
  shutil.copytree(tmp_path / "new", tmp_path / "published")
  published = {
    key: value.swapaxes(1, 2).copy() if ".experts." in key else value
    for key, value in read(tmp_path / "new").items()
  }
  safetensors_numpy.save_file(
    published, tmp_path / "published" / hf_checkpoint.SINGLE
  )
  new, old = (
    hf_checkpoint.load_model(tmp_path / name) for name in ("new", "published")
  )
  assert_same(new, old)
  # We write the published layout, unless transformers would misread it.
  hf_checkpoint.save_model(tmp_path / "ours", old)
  want = published if hidden == 24 else read(tmp_path / "new")
  saved = read(tmp_path / "ours")
  assert saved.keys() == want.keys()
  assert all(same(saved[key], want[key]) for key in want)
  assert_equal_models(original, from_pretrained(original, tmp_path / "ours"))
  assert_same(old, hf_checkpoint.load_model(tmp_path / "ours"))


def test_opencuas_files_have_the_names_of_its_own_classes(tmp_path):
  """Names of its modelling code: `vision_tower`, and Qwen2's as a whole."""
  pytest.importorskip("torch")
  import opencua_reference

  config = tiny("opencua")
  original = opencua_reference.OpenCua(qwen_config.to_hf(config)).eval()
  for name in ("theirs", "ours"):
    (tmp_path / name).mkdir()
  original.save_pretrained(tmp_path / "theirs")
  model = hf_checkpoint.load_model(tmp_path / "theirs")
  assert model.config == config
  hf_checkpoint.save_model(tmp_path / "ours", model)
  want, got = read(tmp_path / "theirs"), read(tmp_path / "ours")
  assert got.keys() == want.keys()
  assert {key.split(".")[0] for key in got} == {
    "vision_tower",
    "language_model",
  }
  assert all(same(got[key], want[key]) for key in want)
  opencua_reference.OpenCua.from_pretrained(tmp_path / "ours")


# --- what files look like --------------------------------------------------


def test_keys_of_older_files_are_read(tmp_path):
  model = policy(tiny("qwen2_5_vl"))
  hf_checkpoint.save_model(tmp_path, model)
  file = tmp_path / hf_checkpoint.SINGLE
  tensors = safetensors_numpy.load_file(file)
  old = {
    key.replace("model.visual.", "visual.").replace(
      "model.language_model.", "model."
    ): value
    for key, value in tensors.items()
  }
  assert "visual.blocks.0.norm1.weight" in old
  assert "model.layers.0.self_attn.q_proj.weight" in old
  safetensors_numpy.save_file(old, file)
  assert_same(model, hf_checkpoint.load_model(tmp_path))


def test_a_tied_matrix_may_be_there_twice(tmp_path):
  config = dataclasses.replace(tiny("qwen3_vl"), tie_word_embeddings=True)
  model = policy(config)
  hf_checkpoint.save_model(tmp_path, model)
  file = tmp_path / hf_checkpoint.SINGLE
  tensors = safetensors_numpy.load_file(file)
  assert "lm_head.weight" not in tensors
  embedding = tensors["model.language_model.embed_tokens.weight"]
  tensors["lm_head.weight"] = embedding
  safetensors_numpy.save_file(tensors, file)
  assert_same(model, hf_checkpoint.load_model(tmp_path))


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize(
  "family",
  trials.by_default(["qwen3_vl", "gemma3"], FAMILIES, unlike=DIFFERENT),
)
def test_a_tied_matrix_is_written_twice_for_readers_that_need_it(
  family, source, tmp_path
):
  """Also beside the config.json that the policy was read from."""
  config = dataclasses.replace(tiny(family), tie_word_embeddings=True)
  model = policy(config)
  first = hf_checkpoint.save_model(tmp_path / "first", model)
  before = (first / "config.json").read_bytes()
  directory = hf_checkpoint.save_model(
    tmp_path / "untied", model, source=first if source else None, untied=True
  )
  assert (first / "config.json").read_bytes() == before
  loaded = hf_checkpoint.load_model(directory)
  assert not loaded.config.tie_word_embeddings
  table = np.asarray(model.decoder.embed_tokens.weight[...])
  np.testing.assert_array_equal(loaded.lm_head.weight[...], table)
  np.testing.assert_array_equal(loaded.decoder.embed_tokens.weight[...], table)
  # A policy that is not tied is written unchanged.
  again = hf_checkpoint.save_model(tmp_path / "again", loaded, untied=True)
  assert_same(loaded, hf_checkpoint.load_model(again))


@pytest.mark.parametrize(
  "family",
  trials.by_default(["qwen3_vl", "qwen3_vl_moe"], FAMILIES, unlike=UNLIKE),
)
def test_stacked_layers_load_and_save_the_same_files(family, tmp_path):
  model = policy(tiny(family))
  hf_checkpoint.save_model(tmp_path / "list", model, max_file_bytes=50_000)
  stacked = hf_checkpoint.load_model(tmp_path / "list", scan_layers=True)
  traits = stacked.config.traits
  mixed = traits.linear or traits.sigmoid_router or traits.windows
  assert stacked.language_model.stacked != mixed  # Of two kinds: a list.
  for name, value in parameters(stacked).items():
    if name.startswith("language_model.layers.") and not mixed:
      lists = [
        parameters(model)[name.replace("layers.", f"layers.{i}.")]
        for i in range(3)
      ]
      assert same(value, np.stack(lists)), name
  hf_checkpoint.save_model(tmp_path / "stack", stacked, max_file_bytes=50_000)
  files = sorted(p.name for p in (tmp_path / "list").iterdir())
  assert len(files) > 4
  assert files == sorted(p.name for p in (tmp_path / "stack").iterdir())
  for name in files:
    one, other = (tmp_path / d / name for d in ("list", "stack"))
    assert one.read_bytes() == other.read_bytes(), name


def test_dtypes_are_converted_and_named_in_the_config(tmp_path):
  model = policy(tiny("qwen3_vl"))
  hf_checkpoint.save_model(tmp_path / "wide", model)
  config = json.loads((tmp_path / "wide" / "config.json").read_text())
  config["torch_dtype"] = config["text_config"]["dtype"] = "float32"
  (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
  for name in ("bfloat16", "float16"):
    hf_checkpoint.save_model(
      tmp_path / name, model, source=tmp_path / "wide", dtype=name
    )
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == name
    assert "torch_dtype" not in config
    back = hf_checkpoint.load_model(tmp_path / name)
    dtype = getattr(ml_dtypes, name, name)
    for key, value in parameters(back).items():
      want = np.asarray(parameters(model)[key]).astype(dtype)
      assert same(value, want.astype(np.float32)), key


def test_companions_are_copied_and_several_files_have_an_index(tmp_path):
  model = policy(tiny("qwen3_vl"))
  source, out = tmp_path / "source", tmp_path / "out"
  hf_checkpoint.save_model(source, model)
  config = json.loads((source / "config.json").read_text())
  (source / "config.json").write_text(json.dumps(config | {"extra": 7}))
  (source / "tokenizer.json").write_text("{}")
  (source / "notes.txt").write_text("not the checkpoint's")
  out.mkdir()
  (out / "notes.txt").write_text("somebody's")
  hf_checkpoint.save_model(out, model, source=source, max_file_bytes=40_000)
  assert json.loads((out / "config.json").read_text())["extra"] == 7
  assert (out / "tokenizer.json").read_text() == "{}"
  assert (out / "notes.txt").read_text() == "somebody's"
  index = json.loads((out / hf_checkpoint.INDEX).read_text())
  files = set(index["weight_map"].values())
  assert files == {p.name for p in out.glob("*.safetensors")}
  assert len(files) > 3
  total = 0
  for name in files:
    tensors = safetensors_numpy.load_file(out / name)
    assert {index["weight_map"][key] for key in tensors} == {name}
    size = sum(value.nbytes for value in tensors.values())
    total += size
    assert size <= 40_000 or len(tensors) == 1
  assert total == index["metadata"]["total_size"]
  assert not list(out.glob("*.part"))
  # Fewer files take the place of more, and the other way round.
  hf_checkpoint.save_model(out, model)
  assert [p.name for p in out.glob("model*")] == [hf_checkpoint.SINGLE]
  hf_checkpoint.save_model(out, model, max_file_bytes=40_000)
  assert {p.name for p in out.glob("*.safetensors")} == files
  assert_same(model, hf_checkpoint.load_model(out))


# --- faults ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A checkpoint of several files; copied by who wants to damage it."""
  directory = tmp_path_factory.mktemp("saved")
  model = policy(tiny("qwen3_vl"))
  hf_checkpoint.save_model(directory, model, max_file_bytes=80_000)
  return directory


@pytest.fixture
def damaged(saved, tmp_path):
  return pathlib.Path(shutil.copytree(saved, tmp_path / "damaged"))


def change(directory, edit):
  """Edits the tensors of the file that holds the first layer's norm."""
  index = json.loads((directory / hf_checkpoint.INDEX).read_text())
  file = directory / index["weight_map"][NORM]
  tensors = safetensors_numpy.load_file(file)
  edit(tensors)
  for key in tensors:
    index["weight_map"][key] = file.name
  safetensors_numpy.save_file(tensors, file)
  (directory / hf_checkpoint.INDEX).write_text(json.dumps(index))


NORM = "model.language_model.layers.0.input_layernorm.weight"


def test_a_missing_tensor_is_named(damaged):
  change(damaged, lambda tensors: tensors.pop(NORM))
  with pytest.raises(ValueError, match=f"missing tensors {NORM}.*one check"):
    hf_checkpoint.load_model(damaged)


def test_many_missing_tensors_are_counted(damaged):
  config = json.loads((damaged / "config.json").read_text())
  config["text_config"]["num_hidden_layers"] = 5
  (damaged / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r"missing tensors .*layers\.3.* more"):
    hf_checkpoint.load_model(damaged)


def test_an_extra_tensor_is_named(damaged):
  extra = "model.visual.blocks.9.norm1.weight"
  change(damaged, lambda tensors: tensors.update({extra: np.ones(3)}))
  with pytest.raises(ValueError, match=f"unexpected tensors {extra}"):
    hf_checkpoint.load_model(damaged)


def test_a_misshapen_tensor_is_named_with_both_shapes(damaged):
  wrong = np.ones(31, np.float32)
  change(damaged, lambda tensors: tensors.update({NORM: wrong}))
  with pytest.raises(
    ValueError, match=rf"tensor {NORM} has shape \[31\], .* needs \[32\]"
  ):
    hf_checkpoint.load_model(damaged)


def test_quantized_tensors_are_refused(damaged):
  wrong = np.ones(32, np.int8)
  change(damaged, lambda tensors: tensors.update({NORM: wrong}))
  with pytest.raises(ValueError, match=f"{NORM} has dtype I8, only F64.*quant"):
    hf_checkpoint.load_model(damaged)


def test_a_missing_file_is_named(damaged):
  name = sorted(p.name for p in damaged.glob("*.safetensors"))[1]
  (damaged / name).unlink()
  with pytest.raises(FileNotFoundError, match=f"lacks {name}.*download"):
    hf_checkpoint.load_model(damaged)


def test_a_cut_file_is_named(damaged):
  file = sorted(damaged.glob("*.safetensors"))[1]
  file.write_bytes(file.read_bytes()[:-7])
  with pytest.raises(ValueError, match=f"{file.name} is not a whole safetens"):
    hf_checkpoint.load_model(damaged)


def test_no_weights_at_all(damaged):
  (damaged / hf_checkpoint.INDEX).unlink()
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
    hf_checkpoint.load_model(damaged)


def test_no_config(damaged, tmp_path):
  (damaged / "config.json").unlink()
  for directory in (damaged, tmp_path / "nowhere"):
    with pytest.raises(FileNotFoundError, match="has no config.json; give"):
      hf_checkpoint.load_model(directory)


def test_a_config_that_is_cut_or_of_another_model(damaged):
  file = damaged / "config.json"
  text = file.read_text()
  file.write_text(text[:-20])
  with pytest.raises(ValueError, match="config.json is not valid JSON"):
    hf_checkpoint.load_model(damaged)
  file.write_text(text.replace('"qwen3_vl"', '"a"'))
  with pytest.raises(ValueError, match="model_type='a'; give.*qwen2_5_vl"):
    hf_checkpoint.load_model(damaged)


def test_the_index_says_which_copy_of_a_tensor_counts(saved, damaged):
  index = json.loads((damaged / hf_checkpoint.INDEX).read_text())
  file = (
    damaged
    / sorted({*index["weight_map"].values()} - {index["weight_map"][NORM]})[-1]
  )
  tensors = safetensors_numpy.load_file(file)
  tensors[NORM] = np.zeros(32, np.float32)
  safetensors_numpy.save_file(tensors, file)
  assert_same(
    hf_checkpoint.load_model(saved), hf_checkpoint.load_model(damaged)
  )


def test_saving_refuses_what_it_cannot_do(saved, tmp_path):
  model = hf_checkpoint.load_model(saved)
  with pytest.raises(ValueError, match="dtype must be one of float32.*'int8'"):
    hf_checkpoint.save_model(tmp_path / "a", model, dtype="int8")
  other = policy(tiny("qwen3_vl", intermediate_size=64))
  with pytest.raises(ValueError, match="another model: text is.*source=None"):
    hf_checkpoint.save_model(tmp_path / "a", other, source=saved)
  assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("most", [60_000, 1 << 30], ids=["files", "file"])
def test_an_interrupted_save_leaves_the_old_checkpoint(
  saved, damaged, monkeypatch, most
):
  new = policy(tiny("qwen3_vl"), seed=1)
  as_stored, calls = hf_checkpoint._as_stored, []

  def fail_late(*args, **kwargs):
    calls.append(args)
    if len(calls) == 60:
      raise OSError("no space left on device")
    return as_stored(*args, **kwargs)

  monkeypatch.setattr(hf_checkpoint, "_as_stored", fail_late)
  before = {p.name: p.read_bytes() for p in damaged.iterdir()}
  with pytest.raises(OSError, match="no space"):
    hf_checkpoint.save_model(damaged, new, max_file_bytes=most)
  assert {p.name: p.read_bytes() for p in damaged.iterdir()} == before
  # A killed process leaves its files: neither read nor kept.
  (damaged / "model-00001-of-00099.safetensors.part").write_bytes(b"half")
  old = hf_checkpoint.load_model(saved)
  assert_same(old, hf_checkpoint.load_model(damaged))
  hf_checkpoint.save_model(damaged, new, max_file_bytes=most)
  assert not list(damaged.glob("*.part"))
  assert_same(new, hf_checkpoint.load_model(damaged))
