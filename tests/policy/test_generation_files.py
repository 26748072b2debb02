"""A saved policy's completions end where its turns do, in transformers too."""

import json
import shutil

import pytest
import torch
import transformers
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files

SHIPPED = "qwen3_vl_tiny"


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory):
  directory = tmp_path_factory.mktemp("saved") / "policy"
  checkpoint.save_policy(directory, checkpoint.load_policy(SHIPPED)[0])
  return directory


def read(path):
  return json.loads(path.read_text(encoding="utf-8"))


def ids():
  tokenizer = policy_files.load_tokenizer(SHIPPED)
  return [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]


CALL = (
  '<tool_call>\n{"name": "computer_use", "arguments": {"action":'
  ' "left_click", "coordinate": [500, 500]}}\n</tool_call>'
)


def generated(directory, tokens=40):
  """Generates after a call that ends the policy's turn."""
  model = transformers.AutoModelForImageTextToText.from_pretrained(
    directory, dtype=torch.float32
  )
  tokenizer = policy_files.load_tokenizer(SHIPPED)
  prompt = tokenizer.encode(
    f"<|im_start|>user\nClick.<|im_end|>\n<|im_start|>assistant\n{CALL}"
  ).ids
  torch.manual_seed(0)
  output = model.generate(
    torch.tensor([prompt]),
    max_new_tokens=tokens,
    do_sample=False,
    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
  )[0].tolist()
  return output[len(prompt) :]


def test_a_saved_policy_names_the_end_of_its_turns(saved):
  end, pad = ids()
  generation = read(saved / "generation_config.json")
  assert (generation["eos_token_id"], generation["pad_token_id"]) == (end, pad)
  config = read(saved / "config.json")
  for part in (config, config["text_config"]):
    assert (part["eos_token_id"], part["pad_token_id"]) == (end, pad)
  loaded = transformers.GenerationConfig.from_pretrained(saved)
  assert loaded.do_sample and not loaded.top_k and loaded.temperature == 1.0


def test_generate_ends_with_the_turn(saved, tmp_path):
  end, _ = ids()
  output = generated(saved)
  assert output[-1] == end and end not in output[:-1] and len(output) < 40
  # Without what is written here it samples on.
  bare = tmp_path / "bare"
  shutil.copytree(saved, bare)
  (bare / "generation_config.json").unlink()
  config = read(bare / "config.json")
  for part in (config, config["text_config"]):
    del part["eos_token_id"]
  (bare / "config.json").write_text(json.dumps(config))
  assert len(generated(bare)) == 40


def test_what_a_policy_came_with_is_kept(saved, tmp_path):
  copied = tmp_path / "kept"
  shutil.copytree(saved, copied)
  own = {"eos_token_id": [7, 8], "temperature": 0.1}
  (copied / "generation_config.json").write_text(json.dumps(own))
  config = read(copied / "config.json")
  del config["eos_token_id"]
  config["text_config"]["eos_token_id"] = 7
  (copied / "config.json").write_text(json.dumps(config))
  policy_files.write_generation(copied)
  assert read(copied / "generation_config.json") == own
  written = read(copied / "config.json")
  assert written["eos_token_id"] == [7, 8]
  assert written["text_config"]["eos_token_id"] == 7


def test_a_tokenizer_without_an_end_says_nothing(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  policy_files.write_generation(tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
