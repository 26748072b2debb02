"""Loads published GUI agents: the table of docs/policies.md, tried.

A row's model_type is tried with a configuration of published shape.
"""

import dataclasses
import json
import pathlib
import re

import published_sizes
import pytest
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "policies.md"

# transformers 4.49's form, in which UI-TARS-1.5-7B and other fine-tunings of
# Qwen2.5-VL-7B are published: the decoder's fields at the top, and a tower of
# which only what differs from the class's defaults is written.
FLAT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "mrope_section": [16, 24, 24], "rope_type": "default",
        "type": "default",
    },
    "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0.dev0", "use_cache": True,
    "use_sliding_window": False, "video_token_id": 151656,
    "vision_config": {
        "hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl",
        "spatial_patch_size": 14, "tokens_per_second": 2,
        "torch_dtype": "float32",
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
FLAT_IMAGES = {
  "min_pixels": 3136,
  "max_pixels": 12845056,
  "patch_size": 14,
  "temporal_patch_size": 2,
  "merge_size": 2,
  "image_mean": [0.48145466, 0.4578275, 0.40821073],
  "image_std": [0.26862954, 0.26130258, 0.27577711],
  "image_processor_type": "Qwen2_5_VLImageProcessor",
  "processor_class": "Qwen2_5_VLProcessor",
}

TEXT = {
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "num_hidden_layers": 28,
  "num_attention_heads": 16,
  "num_key_value_heads": 8,
  "vocab_size": 151936,
  "rope_theta": 1000000,
  "tie_word_embeddings": True,
}


def rows():
  """(model_type, what the table has of it)."""
  families = {}
  for line in DOCS.read_text().splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) == 3 and re.fullmatch(r"`\w+`(, `\w+`)*", cells[1]):
      if cells[2].startswith(("loads", "refused")):
        for kind in re.findall(r"`(\w+)`", cells[1]):
          families[kind] = cells[2]
  return families


def raw_of(kind):
  """A config.json of a published checkpoint of this type."""
  if kind == "qwen2_5_vl":
    return FLAT
  if kind in ("qwen2", "qwen3", "llama"):
    return {"model_type": kind, **TEXT}
  sizes = {
    "qwen3_vl": "Qwen3-VL-8B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
    "qwen2_vl": "Qwen2-VL-7B",
    "qwen3_5": "Qwen3.5-9B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "glm4v": "GLM-4.1V-9B",
    "glm4v_moe": "GLM-4.5V",
    "gemma3": "Gemma-3-4B",
    "smolvlm": "SmolVLM2-256M",
    "idefics3": "Idefics3-8B",
  }
  if kind in sizes:
    return qwen_config.to_hf(published_sizes.SIZES[sizes[kind]])
  if kind == "opencua":  # Its classes come with the checkpoint.
    return {
      "model_type": kind,
      "media_placeholder_token_id": 151664,
      "vision_config": FLAT["vision_config"] | {"out_hidden_size": 1024},
      "text_config": {"model_type": "qwen2", **TEXT},
    }
  transformers = pytest.importorskip("transformers")
  return transformers.AutoConfig.for_model(kind).to_dict()


def directory_of(tmp_path, raw):
  (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
  file = policy_files.resolve("tiny_vl") / "tokenizer.json"
  (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
  return tmp_path


def test_the_table_names_every_type():
  table = rows()
  loads = {k for k, text in table.items() if text.startswith("loads")}
  assert loads == {*qwen_checkpoint.FAMILIES, *qwen_checkpoint.TEXT_FAMILIES}
  refused = {kind for kind in table if kind not in loads}
  assert refused == set(config_checks.NOT_HERE)


@pytest.mark.parametrize("kind", sorted(rows()))
def test_a_row_is_what_happens(kind, tmp_path):
  directory = directory_of(tmp_path, raw_of(kind))
  if rows()[kind].startswith("loads"):
    config = checkpoint.load_config(directory)
    assert config.family == kind
    assert hf_checkpoint.abstract_model(_few_layers(config))
    return
  reason = re.escape(config_checks.NOT_HERE[kind])
  with pytest.raises(ValueError, match=f"'{kind}' \\({reason}\\); policies"):
    checkpoint.load_config(directory)
  with pytest.raises(ValueError, match=f"of type '{kind}'"):
    checkpoint.load_policy(directory)


def _few_layers(config):
  return dataclasses.replace(
    config, text=dataclasses.replace(config.text, num_hidden_layers=4)
  )


def test_a_flat_file_is_the_published_size(tmp_path):
  directory = directory_of(tmp_path, FLAT)
  config = checkpoint.load_config(directory)
  want = published_sizes.SIZES["Qwen2.5-VL-7B"]
  assert config == want
  (directory / "preprocessor_config.json").write_text(json.dumps(FLAT_IMAGES))
  processor = qwen_checkpoint.processor_of(
    checkpoint.load_config(directory), directory
  )
  assert (processor.min_pixels, processor.max_pixels) == (3136, 12845056)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3"])
def test_quantized_checkpoints_are_refused(method, kind, tmp_path):
  quantized = {
    "quant_method": method,
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "visual"],
    "weight_block_size": [128, 128],
  }
  raw = {**raw_of(kind), "quantization_config": quantized}
  with pytest.raises(ValueError, match=f"'{method}', quantized .*bfloat16"):
    checkpoint.load_config(directory_of(tmp_path, raw))
