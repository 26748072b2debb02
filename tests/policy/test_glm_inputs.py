"""GLM-V's sizes, patches and processor files, against transformers'.

Its limits are of the pixels of a still taken twice; ours of one frame.
Positions are held to the reference in test_qwen_parity.
"""

import json

import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

from tests.policy import test_hf_checkpoint as checkpoints

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
glm = pytest.importorskip(
  "transformers.models.glm4v.image_processing_pil_glm4v"
)

SIZES = [(60, 40), (3, 300), (9, 29), (29, 9), (128, 96), (513, 512), (400, 27)]


def test_sizes_are_the_references():
  rng = np.random.default_rng(0)
  lifted = compared = 0
  for height, width in rng.integers(1, rng.choice([70, 3000], (3000, 2))):
    low = int(rng.integers(1, 1 << 17))
    high = low + int(rng.integers(0, 1 << 20))
    args = int(height), int(width), 28
    lifted += min(height, width) < 28
    try:
      want = glm.smart_resize(
        2, args[0], args[1], 2, 28, min_pixels=2 * low, max_pixels=2 * high
      )
    except ValueError:
      with pytest.raises(ValueError, match="aspect ratio"):
        qwen_vl_inputs.smart_resize(*args, low, high, lift_sides=True)
      continue
    compared += 1
    got = qwen_vl_inputs.smart_resize(*args, low, high, lift_sides=True)
    assert got == want, args
  assert compared > 2500 and lifted > 300


def directory(tmp_path, **size):
  """A tiny checkpoint with the processor file that transformers writes."""
  processor = glm.Glm4vImageProcessorPil(**({"size": size} if size else {}))
  processor.save_pretrained(tmp_path)
  (tmp_path / "config.json").write_text(
    json.dumps(qwen_config.to_hf(checkpoints.tiny("glm4v", vocab_size=2560)))
  )
  file = policy_files.resolve("tiny_vl") / "tokenizer.json"
  (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
  return processor


def normalised(processor, patches):
  x = patches.reshape(len(patches), 3, -1).astype(np.float32) / 255
  mean, std = np.array([processor.mean, processor.std], np.float32)
  return (x - mean[:, None]) / std[:, None]


@pytest.mark.parametrize(
  "size", [{}, {"shortest_edge": 3136, "longest_edge": 80000}], ids=str
)
def test_pixels_and_tokens_are_those_of_transformers(size, tmp_path):
  reference = directory(tmp_path, **size)
  processor = qwen_checkpoint.processor_of(
    checkpoint.load_config(tmp_path), tmp_path
  )
  assert processor.lift_sides
  assert 2 * processor.max_pixels == reference.size["longest_edge"]
  rng = np.random.default_rng(1)
  for width, height in SIZES:
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    want = reference(images=[Image.fromarray(pixels)], return_tensors="np")
    got = processor.patchify(pixels)
    _, rows, columns = want["image_grid_thw"][0]
    assert processor.grid(width, height) == (rows, columns)
    values = want["pixel_values"].reshape(len(got.patches), 3, 2, -1)
    np.testing.assert_allclose(
      normalised(processor, got.patches), values[:, :, 0], atol=2e-6
    )


def test_limits_that_a_run_used_are_saved_for_transformers(tmp_path):
  source, saved = tmp_path / "source", tmp_path / "saved"
  source.mkdir()
  directory(source)
  model, processor, _ = checkpoint.create_like(source, max_pixels=60_000)
  assert processor.max_pixels == 60_000
  checkpoint.save_policy(saved, model, source)
  assert checkpoint.load_config(saved) == checkpoint.load_config(source)
  again = qwen_checkpoint.processor_of(checkpoint.load_config(saved), saved)
  assert (again.max_pixels, again.min_pixels) == (60_000, 112 * 112 // 2)
  reference = glm.Glm4vImageProcessorPil.from_pretrained(saved)
  assert reference.size["longest_edge"] == 120_000
  loaded = transformers.AutoModelForImageTextToText.from_pretrained(saved)
  assert type(loaded).__name__ == "Glm4vForConditionalGeneration"


def test_a_file_of_another_kind_and_an_odd_limit_are_refused(tmp_path):
  directory(tmp_path)
  file = tmp_path / image_settings.PREPROCESSOR
  raw = json.loads(file.read_text())
  raw["size"] = {"shortest_edge": 3135, "longest_edge": 80000}
  file.write_text(json.dumps(raw))
  with pytest.raises(ValueError, match="shortest_edge=3135, .* multiple of 2"):
    checkpoint.load_config(tmp_path)
  raw["image_processor_type"] = "Qwen2VLImageProcessor"
  file.write_text(json.dumps(raw))
  with pytest.raises(ValueError, match="not computed here for glm4v"):
    checkpoint.load_config(tmp_path)
