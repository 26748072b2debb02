"""A checkpoint's processor files: read, held against each other, written.

The reference is transformers' own: its `Processor.save_pretrained` writes the
files, its image processor gives the pixels.
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Reference = pytest.importorskip(
  "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
).Qwen2VLImageProcessorPil

SIZE = "Qwen3-VL-2B"
OWN = {
  "as published": {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
  },
  "few pixels": {
    "size": {"shortest_edge": 3136, "longest_edge": 5120},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
  },
  "own mean and std": {
    "size": {"shortest_edge": 1024, "longest_edge": 90000},
    "image_mean": [0.1, 0.45, 0.9],
    "image_std": [0.3, 0.21, 1.5],
  },
  "small patches": {
    "size": {"shortest_edge": 6400, "longest_edge": 100000},
    "patch_size": 6,
    "merge_size": 3,
    "image_mean": [0.2, 0.3, 0.4],
    "image_std": [0.5, 0.6, 0.7],
  },
}


def config_of(patch_size=16, merge_size=2, **_):
  raw = qwen_config.to_hf(qwen_config.SIZES[SIZE])
  raw["vision_config"]["patch_size"] = patch_size
  raw["vision_config"]["spatial_merge_size"] = merge_size
  return raw


def reference_of(settings):
  return Reference(**{"patch_size": 16, "temporal_patch_size": 2, **settings})


def written_by_transformers(directory, settings):
  """A directory that transformers' Processor wrote, with a config.json."""
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(policy_files.resolve("tiny_vl") / "tokenizer.json")
  )
  # Of the classes with these images the one that needs no torchvision;
  # `save_pretrained` is that of all of them.
  transformers.ColQwen2Processor(
    image_processor=reference_of(settings), tokenizer=tokenizer
  ).save_pretrained(directory)
  (directory / "config.json").write_text(json.dumps(config_of(**settings)))
  return directory


def edit(file, **changes):
  raw = json.loads(file.read_text()) if file.is_file() else {}
  file.write_text(json.dumps(raw | changes))


def pixels(width, height):
  rng = np.random.default_rng((width, height))
  return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def normalised(config, patches):
  """As the tower's first layer does it, in float32."""
  x = jnp.asarray(patches).reshape(len(patches), 3, -1).astype(jnp.float32)
  mean, std = np.array(
    [config.vision.image_mean, config.vision.image_std], np.float32
  )
  return np.asarray((x / 255.0 - mean[:, None]) / std[:, None])


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("name", OWN)
def test_pixels_and_tokens_are_those_of_transformers(name, tmp_path):
  settings = OWN[name]
  directory = written_by_transformers(tmp_path, settings)
  assert not (directory / "preprocessor_config.json").exists()
  config = checkpoint.load_config(directory)
  processor = qwen_checkpoint.processor_of(config, directory)
  reference = Reference.from_pretrained(directory)
  assert processor.max_pixels == settings["size"]["longest_edge"]
  assert "processor_config.json" in processor.describe()
  for size in ((64, 64), (128, 96), (300, 41), (513, 512), (1280, 720)):
    image = pixels(*size)
    want = reference(images=[Image.fromarray(image)], return_tensors="np")
    _, rows, columns = want["image_grid_thw"][0]
    merge = settings.get("merge_size", 2)
    got = processor.patchify(image)
    assert processor.num_image_tokens(*size) == rows * columns // merge**2
    assert got.num_tokens == rows * columns // merge**2
    values = want["pixel_values"].reshape(rows * columns, 3, 2, -1)
    # The reference normalises in another order of float32 operations.
    np.testing.assert_allclose(
      normalised(config, got.patches), values[:, :, 0], rtol=0, atol=2e-6
    )


@pytest.mark.slow
def test_the_tower_normalises_by_the_checkpoint(tmp_path):
  """A run's model, not only its processor, reads mean and std."""
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", seed=0)
  saved = checkpoint.save_policy(tmp_path / "a", model)
  own = shutil.copytree(saved, tmp_path / "b")
  mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
  edit(own / "preprocessor_config.json", image_mean=mean, image_std=std)
  loaded, processor, _ = checkpoint.load_policy(own)
  image = processor.patchify(pixels(64, 48))
  shown = image.patches.reshape(-1, 3, processor.patch_bytes // 3) / 255
  # Pixels that look to the published statistics as these do to the other.
  same = (shown - np.array(mean)[:, None]) / np.array(std)[:, None]
  same = (same * 0.5 + 0.5) * 255
  where = np.ones((1, len(shown)), np.int32), image.positions[None]
  want = model.encode_images(same.reshape(1, len(shown), -1), *where)
  got = loaded.encode_images(image.patches[None], *where)
  np.testing.assert_allclose(got, want, atol=1e-4)
  published = model.encode_images(image.patches[None], *where)
  assert np.abs(published - want).max() > 1e-2


# --- several files -----------------------------------------------------------


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"max_pixels": 9216}, "max_pixels=9216, .* 5120"),
    ({"size": {"shortest_edge": 64}}, "min_pixels=64, .* 3136"),
    ({"image_mean": [0.1, 0.5, 0.5]}, r"image_mean=\(0.1, .* \(0.5,"),
    ({"patch_size": 14}, "patch_size=14, .* 16"),
    ({"resample": 2}, "resample=2, .* 3"),
  ],
)
def test_files_that_contradict_each_other_are_refused(
  changes, message, tmp_path
):
  directory = written_by_transformers(tmp_path, OWN["few pixels"])
  edit(directory / "preprocessor_config.json", **changes)
  match = f"preprocessor_config.json has {message}"
  with pytest.raises(ValueError, match=match):
    checkpoint.load_config(directory)


def test_files_that_agree_are_read_as_one(tmp_path):
  directory = written_by_transformers(tmp_path, OWN["few pixels"])
  edit(directory / "preprocessor_config.json", max_pixels=5120, patch_size=16)
  settings = image_settings.read(directory, "qwen3_vl")
  assert settings.values["max_pixels"] == 5120
  assert settings.source == "preprocessor_config.json and processor_config.json"


@pytest.mark.parametrize(
  "field, own, of_model",
  [
    ("patch_size", 14, "patch_size=16"),
    ("merge_size", 3, "spatial_merge_size=2"),
  ],
)
def test_what_contradicts_the_model_is_refused(field, own, of_model, tmp_path):
  directory = written_by_transformers(tmp_path, OWN["few pixels"])
  raw = json.loads((directory / "processor_config.json").read_text())
  raw["image_processor"][field] = own
  edit(directory / "processor_config.json", **raw)
  with pytest.raises(ValueError, match=f"{field}={own}, .*{of_model}; make"):
    checkpoint.load_config(directory)


def test_images_of_another_kind_and_damage_are_refused(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(config_of()))
  file = tmp_path / "processor_config.json"
  edit(file, image_processor={"image_processor_type": "Glm4vImageProcessor"})
  with pytest.raises(ValueError, match="'Glm4vImageProcessor', whose images"):
    checkpoint.load_config(tmp_path)
  edit(file, image_processor=["patch_size"])
  with pytest.raises(ValueError, match="image_processor must be an object"):
    checkpoint.load_config(tmp_path)
  file.write_text("{")
  with pytest.raises(ValueError, match="processor_config.json is not valid"):
    checkpoint.load_config(tmp_path)


def test_a_file_without_a_field_has_transformers_default(tmp_path):
  reference = Reference()
  edit(tmp_path / "preprocessor_config.json", patch_size=14)
  values = image_settings.read(tmp_path, "qwen3_vl").values
  limits = reference.size
  assert values["min_pixels"] == limits["shortest_edge"]
  assert values["max_pixels"] == limits["longest_edge"]
  for name in ("patch_size", "merge_size", "temporal_patch_size"):
    assert values[name] == getattr(reference, name)
  assert values["image_mean"] == tuple(reference.image_mean)
  assert values["image_std"] == tuple(reference.image_std)


def test_a_file_of_transformers_4_without_sections_decides_nothing(tmp_path):
  edit(tmp_path / "processor_config.json", processor_class="Qwen3VLProcessor")
  assert image_settings.read(tmp_path, "qwen3_vl") is None


# --- written -----------------------------------------------------------------


def limits_of(directory):
  """As transformers 5 and, by the older keys, 4 read them."""
  size = Reference.from_pretrained(directory).size
  raw = json.loads((directory / "preprocessor_config.json").read_text())
  new = size["shortest_edge"], size["longest_edge"]
  assert new == (raw["min_pixels"], raw["max_pixels"])
  return new


def test_a_saved_policy_sees_what_the_run_saw(tmp_path):
  model, _, _ = checkpoint.create_policy(
    "qwen3_vl_tiny", seed=0, max_pixels=20000
  )
  first = checkpoint.save_policy(tmp_path / "first", model)
  # As transformers 5 would leave it after more training.
  raw = json.loads((first / "preprocessor_config.json").read_text())
  (first / "preprocessor_config.json").unlink()
  del raw["min_pixels"], raw["max_pixels"]
  edit(
    first / "processor_config.json",
    image_processor=raw,
    video_processor={"fps": 2},
    processor_class="Qwen3VLProcessor",
  )
  model, processor, _ = checkpoint.load_policy(first)
  assert processor.max_pixels == 20000

  second = checkpoint.save_policy(tmp_path / "second", model, tokenizer=first)
  assert limits_of(second) == (processor.min_pixels, 20000)
  remaining = json.loads((second / "processor_config.json").read_text())
  assert remaining == {"processor_class": "Qwen3VLProcessor"}
  video = json.loads((second / "video_preprocessor_config.json").read_text())
  assert video == {"fps": 2}
  again, same, _ = checkpoint.load_policy(second, max_pixels=10000)
  assert same.patch_size == processor.patch_size
  assert again.config.vision == model.config.vision
  third = checkpoint.save_policy(tmp_path / "third", again, tokenizer=second)
  assert limits_of(third) == (processor.min_pixels, 10000)
  assert checkpoint.load_policy(third)[1] == same


def test_files_that_need_no_change_stay_as_they_are(tmp_path):
  model, _, _ = checkpoint.create_policy("qwen2_5_vl_tiny", seed=0)
  first = checkpoint.save_policy(tmp_path / "first", model)
  edit(first / "preprocessor_config.json", do_convert_rgb=True)
  loaded, _, _ = checkpoint.load_policy(first)
  second = checkpoint.save_policy(tmp_path / "second", loaded, tokenizer=first)
  name = "preprocessor_config.json"
  assert (second / name).read_bytes() == (first / name).read_bytes()
  assert hf_checkpoint.load_config(second) == hf_checkpoint.load_config(first)
