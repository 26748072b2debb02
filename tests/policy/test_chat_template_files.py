"""Places of a checkpoint's chat template, and the prompts a run makes by it."""

import json
import shutil
import sys
import types

import chat_families
import chat_templates
import numpy as np
import pytest
import transformers
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.parser.renderer import template
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.trajectory_collector import sequence_builder

THINKING = chat_templates.TEMPLATES["qwen3_vl_thinking"]


def write(directory, kept_in, source):
  """Puts a template where published checkpoints of one age have it."""
  directory.mkdir(exist_ok=True)
  config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
  if kept_in == "chat_template.jinja":
    (directory / kept_in).write_text(source)
  elif kept_in == "chat_template.json":
    (directory / kept_in).write_text(json.dumps({"chat_template": source}))
  elif kept_in == "tokenizer_config.json":
    config["chat_template"] = source
  else:
    config["chat_template"] = [
      {"name": "tool_use", "template": "x"},
      {"name": "default", "template": source},
    ]
  (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
  "kept_in",
  [
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "a list",
  ],
)
def test_a_template_is_found_wherever_it_is_kept(tmp_path, kept_in):
  write(tmp_path, kept_in, "{{- eos_token }}|{{- more }}")
  template = policy_files.chat_template(tmp_path, {"more": 3})
  assert template.text([]) == "<|im_end|>|3"
  source = policy_files.resolve("tiny_vl") / "tokenizer.json"
  shutil.copyfile(source, tmp_path / "tokenizer.json")
  copied = tmp_path / "copy"
  copied.mkdir()
  policy_files.copy_tokenizer(tmp_path, copied)
  assert policy_files.chat_template(copied).source == template.source


def test_no_template_and_damaged_files(tmp_path):
  assert policy_files.chat_template(tmp_path) is None
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
    policy_files.chat_template(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(
    '{"chat_template": [{"name": "rag", "template": ""}]}'
  )
  with pytest.raises(ValueError, match=r"\['rag'\], none of them called"):
    policy_files.chat_template(tmp_path)


def config_of(policy, *argv):
  return config_lib.load_config(
    ["warm_start.source=none", f"policy={policy}", *argv]
  )


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
  """A checkpoint of Qwen3-VL's architecture with the thinking template."""
  directory = tmp_path_factory.mktemp("thinking")
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny")
  checkpoint.save_policy(directory, model)
  (directory / "chat_template.jinja").unlink(missing_ok=True)
  write(directory, "chat_template.json", THINKING)
  return directory


def renderer_of(policy, *argv):
  config = config_of(policy, *argv)
  tokenizer = policy_files.load_tokenizer(models.named_policy(config).tokenizer)
  processor = type("Processor", (), {"num_image_tokens": lambda *_: 4})()
  return models.make_renderer(config, processor, tokenizer)


def test_a_run_renders_by_the_checkpoints_own_template(thinking):
  own = renderer_of(thinking)
  assert isinstance(own, template.TemplateRenderer)
  messages = [{"role": "user", "content": "hi"}]
  assert own.decode(own.render(messages).tokens).endswith(
    "<|im_start|>assistant\n<think>\n"
  )
  assert choice.described(own) == (
    "chat template, which rewrites reasoning before a user message (sampled"
    " tokens stay)"
  )
  chatml = renderer_of(thinking, "policy.renderer=qwen")
  assert isinstance(chatml, qwen.QwenRenderer)
  for name in ("tiny_vl", "qwen3_vl_tiny"):
    assert isinstance(renderer_of(name), qwen.QwenRenderer)


def test_what_does_not_go_together_is_one_clear_line(thinking, tmp_path):
  cases = {
    ("policy.renderer=jinja",): "renderer",
    ("policy.renderer=qwen", "policy.template_options.a=1"): (
      "template_options .a. are of a chat template"
    ),
    ("policy.template_options.enable_thinking=false",): (
      "has no chat template with the variables enable_thinking"
    ),
  }
  for argv, message in cases.items():
    with pytest.raises(config_lib.ConfigError, match=message):
      renderer_of(thinking, *argv)
  with pytest.raises(config_lib.ConfigError, match="template_options"):
    renderer_of("tiny_vl", "policy.template_options.enable_thinking=false")
  broken = tmp_path / "broken"
  shutil.copytree(thinking, broken)
  write(broken, "chat_template.json", "{%- for")
  with pytest.raises(
    config_lib.ConfigError, match="policy.renderer=auto: the chat template is"
  ):
    renderer_of(broken)


def test_thinking_is_switched_off_by_a_setting(thinking, tmp_path):
  hybrid = tmp_path / "hybrid"
  shutil.copytree(thinking, hybrid)
  write(hybrid, "chat_template.json", chat_templates.TEMPLATES["qwen3"])
  messages = [{"role": "user", "content": "hi"}]
  off = renderer_of(hybrid, "policy.template_options.enable_thinking=false")
  reference = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(hybrid / "tokenizer.json"),
    chat_template=chat_templates.TEMPLATES["qwen3"],
  )
  for renderer, options in (
    (off, {"enable_thinking": False}),
    (renderer_of(hybrid), {}),
  ):
    text = reference.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, **options
    )
    ids = reference.encode(text, add_special_tokens=False)
    assert renderer.render(messages).tokens.tolist() == ids


@pytest.fixture
def their_policy(monkeypatch):
  """A factory whose tokenizer has no token of Qwen's, but a template."""
  family = chat_families.FAMILIES["mistral"]
  module = types.ModuleType("their_policies")

  def create(template=True):
    model, processor, _ = checkpoint.create_policy("nano")
    if template:
      processor.chat_template = chat_families.source(family)
      processor.special_tokens = dict(family.roles)
    return model, processor, chat_families.tokenizer(family).backend_tokenizer

  module.create = create
  monkeypatch.setitem(sys.modules, "their_policies", module)
  return family


def test_a_factorys_processor_may_bring_a_template(their_policy):
  config = config_of("their_policies:create")
  policy = models.make_policy(config, None, "")
  assert isinstance(policy.renderer, template.TemplateRenderer)
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "go </s>on"},
  ]
  shown = policy.renderer.render(messages).tokens.tolist()
  assert policy.renderer.decode(shown) == (
    "<s>[INST] Be brief.\n\ngo </s>on[/INST]"
  )
  end = policy.renderer.end_of_turn_id
  assert policy.renderer.stop_token_ids == (end,)
  assert shown.count(end) == 0  # "</s>" of the message is text.
  builder = sequence_builder.SequenceBuilder(policy.renderer)
  prompt = builder.prompt(messages)
  assert prompt.tokens.tolist() == shown
  sampled = [*policy.renderer.encode("well").tolist(), end]
  text = builder.append(
    policy_client.Completion(
      tokens=np.array(sampled, np.int32),
      logprobs=np.zeros(len(sampled), np.float32),
      versions=np.zeros(len(sampled), np.int32),
      finish_reason=policy_client.FinishReason.STOP,
    )
  )
  messages += [
    {"role": "assistant", "content": text},
    {"role": "user", "content": "on"},
  ]
  longer = builder.prompt(messages)
  ids = longer.tokens.tolist()
  assert ids[: len(shown) + len(sampled)] == [*shown, *sampled]
  assert builder.num_sequences == 1


def test_a_factory_without_qwens_tokens_and_template_is_told_both(their_policy):
  del their_policy
  config = config_of("their_policies:create", "policy.config.template=false")
  with pytest.raises(
    config_lib.ConfigError, match="no token <.im_start.>.*chat_template"
  ):
    models.make_policy(config, None, "")


def test_demonstrations_for_a_thinking_policy_close_the_reasoning(thinking):
  renderer = renderer_of(thinking)
  ids = demonstrations.completion_ids(renderer, "Click.")
  text = renderer.decode(ids)
  assert text == "\n</think>\n\nClick."
  messages = [{"role": "user", "content": "hi"}]
  prompt = renderer.decode(renderer.render(messages).tokens)
  reference = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(thinking / "tokenizer.json"), chat_template=THINKING
  )
  assert prompt + text == reference.apply_chat_template(
    [*messages, {"role": "assistant", "content": "Click."}], tokenize=False
  ).removesuffix("<|im_end|>\n")
  plain = renderer_of("tiny_vl")
  assert plain.decode(demonstrations.completion_ids(plain, "x")) == "x"
