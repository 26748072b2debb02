"""Fields that a config.json leaves out are as in transformers.

Every field of transformers' classes is left out in turn; what we read then is
what we read of the file that transformers makes of it.
"""

import json

import pytest
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peer("transformers")
# OpenCUA's classes come with its checkpoints.
VISION_LANGUAGE = tuple(f for f in qwen_config.FAMILIES if f != "opencua")
FAMILIES = (*VISION_LANGUAGE, *qwen_text_config.FAMILIES)
SECTIONS = ("text_config", "vision_config")
TILED = ("smolvlm", "idefics3")


def read(raw):
  """Our reading of a file, or its refusal."""
  raw = json.loads(json.dumps(raw))
  vl = raw["model_type"] in qwen_config.FAMILIES
  try:
    return (qwen_config if vl else qwen_text_config).from_hf(raw)
  except ValueError as error:
    return str(error)


def as_transformers_has_it(raw):
  """A file with everything that transformers adds to it."""
  raw = json.loads(json.dumps(raw))
  family = raw.pop("model_type")
  return transformers.AutoConfig.for_model(family, **raw).to_dict()


def out_width(family):
  """The tower's field that must equal the decoder's width; "" = none."""
  if family in ("gemma3", "smolvlm", "idefics3"):
    return ""
  return "hidden_size" if family == "qwen2_vl" else "out_hidden_size"


def published(family):
  """A whole file that transformers writes, of its default sizes."""
  raw = as_transformers_has_it({"model_type": family})
  if family == "gemma3":  # Of itself it is contradictory.
    raw["mm_tokens_per_image"] = 49
  elif family in TILED:  # Seven patches of its side are no pairs.
    raw["scale_factor"] = 7
    # Its own decoder is not the Llama of a section that lacks these.
    raw["text_config"] |= {"rms_norm_eps": 1e-6, "pad_token_id": None}
  elif family in qwen_config.FAMILIES:  # So it is.
    raw["vision_config"][out_width(family)] = raw["text_config"]["hidden_size"]
  if family == "glm4v":  # Its rotary axes fill half of a head.
    raw["text_config"]["rope_parameters"] |= {"partial_rotary_factor": 0.5}
  if family == "glm4v_moe":
    raw["text_config"]["head_dim"] = 128
  return raw


def fields_of(family):
  raw = published(family)
  for name, value in raw.items():
    if name in SECTIONS:
      yield from ((name, field) for field in value)
    elif name != "model_type":
      yield ("", name)


def without(raw, section, field):
  raw = json.loads(json.dumps(raw))
  part = raw[section] if section else raw
  del part[field]
  return raw


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_may_be_left_out_as_in_transformers(family):
  raw = published(family)
  complete = read(raw)
  assert not isinstance(complete, str), complete
  fields = list(fields_of(family))
  assert len(fields) > 25
  for section, field in fields:
    base = raw
    if (family, field) in (
      ("glm4v", "rope_parameters"),
      ("glm4v_moe", "head_dim"),
      ("gemma3", "mm_tokens_per_image"),
      ("smolvlm", "scale_factor"),
      ("idefics3", "scale_factor"),
    ):
      # Then its axes do not fill a head, or its tokens an image or a tile:
      # transformers fails, too.
      continue
    wide = (section, field) == ("vision_config", out_width(family))
    if wide and not family.startswith("glm4v"):
      # Its default wants a decoder of that width.
      text = raw["text_config"] | {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 28,
        "head_dim": raw["text_config"].get("head_dim", 128),
      }
      base = raw | {"text_config": text}
    less = without(base, section, field)
    got = read(less)
    assert not isinstance(got, str), (section, field, got)
    assert got == read(as_transformers_has_it(less)), (section, field)
    if base is raw:
      assert got == complete, (section, field)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_values_beside_a_missing_field_stay(family):
  """A default is not what the other fields would suggest."""
  raw = published(family)
  part = raw.get("text_config", raw)
  # Heads need not add up to the width but in qwen2.
  part |= {"hidden_size": 2560, "num_attention_heads": 20}
  part |= {"num_key_value_heads": 4, "vocab_size": 1000}
  if "vision_config" in raw and out_width(family):
    raw["vision_config"][out_width(family)] = 2560
  part.pop("head_dim", None)
  got = read(raw)
  assert not isinstance(got, str), got
  assert got == read(as_transformers_has_it(raw))
  wide = family.startswith(("qwen3_5", "gemma3"))
  assert got.text.head_dim == (256 if wide else 128)


def test_a_4b_file_without_head_dim_is_read():
  """Heads of 128, although 2560 / 32 = 80."""
  want = qwen_config.SIZES["Qwen3-VL-4B"]
  raw = qwen_config.to_hf(want)
  del raw["text_config"]["head_dim"]
  assert qwen_config.from_hf(raw) == want
  raw["text_config"]["head_dim"] = None
  assert qwen_config.from_hf(raw) == want


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize("top", [None, False, True])
@pytest.mark.parametrize("text", [None, False, True])
def test_the_head_is_tied_where_transformers_ties_it(family, top, text):
  raw = published(family)
  for part, value in ((raw, top), (raw["text_config"], text)):
    part.pop("tie_word_embeddings", None)
    if value is not None:
      part["tie_word_embeddings"] = value
  shrink = {
    "vocab_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
  }
  raw["text_config"] |= {
    k: v for k, v in shrink.items() if k in raw["text_config"]
  }
  raw["text_config"].pop("layer_types", None)
  raw["text_config"] |= {
    "hidden_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
  }
  deep = {
    "qwen3_vl": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"fullatt_block_indexes": [0]},
  }.get(family, {})
  raw["vision_config"] |= {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_heads": 2,
    **deep,
  }
  if family == "qwen2_vl":
    raw["vision_config"]["embed_dim"] = 32
  if family in TILED:
    raw["vision_config"] = {
      "hidden_size": 32,
      "intermediate_size": 8,
      "num_hidden_layers": 1,
      "num_attention_heads": 2,
    }
  elif family == "gemma3":
    raw["vision_config"] = {
      "hidden_size": 32,
      "intermediate_size": 8,
      "num_hidden_layers": 1,
      "num_attention_heads": 2,
      "vision_use_head": False,
    }
  else:
    raw["vision_config"][out_width(family)] = 128
  fields = dict(raw)
  config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
  module = transformers.AutoModelForImageTextToText.from_config(config)
  tied = module.lm_head.weight is module.get_input_embeddings().weight
  assert read(raw).tie_word_embeddings == tied
