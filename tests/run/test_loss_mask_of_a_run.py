"""The loss masks that a run makes have the template of its policy."""

import types

import pytest
import transformers
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.recorded_data import sources
from tunix.rl.multi_turn.trajectory_collector import records

USER = {"role": "user", "content": "1 + 1 ="}
REPLY = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
  "messages",
  [
    [USER, REPLY],
    [USER, REPLY, USER, REPLY],
    [{"role": "system", "content": "Be brief."}, USER, REPLY],
  ],
)
def test_a_shipped_policys_own_system_message_is_kept(messages):
  config = config_lib.load_config(["buffer.loss_mask_type=qwen"])
  path = models.tokenizer_file(config).parent
  # Without the template, as a run loads it.
  tokenizer = policy_files.load_tokenizer(str(path))
  about = types.SimpleNamespace(
    vocab_size=tokenizer.get_vocab_size(), banned_token_ids=()
  )
  run = types.SimpleNamespace(
    config=config,
    policy=types.SimpleNamespace(
      renderer=None,
      tokenizer=tokenizer,
      model=types.SimpleNamespace(config=about),
    ),
    images=images_lib.ImageStore(),
    tokenizer_path=str(path),
  )
  reader = sources.make_reader(run, "buffer")
  record = records.read(
    {
      "uid": "u",
      "instance_id": "i",
      "messages": messages,
      "reward": 1.0,
      "extra_info": {},
    }
  )
  (sequence,) = reader.tokens(record)
  template = transformers.AutoTokenizer.from_pretrained(str(path))
  shown = template.apply_chat_template(messages, return_dict=True)
  assert sequence.tokens.tolist() == shown["input_ids"]
