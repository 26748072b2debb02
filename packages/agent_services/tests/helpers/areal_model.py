"""Writes a tiny model of transformers for AReaL's trainer.

    python areal_model.py TOKENIZER DIRECTORY

Runs in the environment that `make areal` makes. `DIRECTORY/model` is a language
model with that tokenizer, `DIRECTORY/processor` an image processor alone:
processors of vision-language models need torchvision.
"""

import sys

import torch
import transformers


def main(tokenizer, directory):
  words = transformers.AutoTokenizer.from_pretrained(tokenizer)
  torch.manual_seed(0)
  model = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
      vocab_size=4096,
      hidden_size=32,
      intermediate_size=64,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=1,
      head_dim=16,
      max_position_embeddings=1024,
      tie_word_embeddings=False,
    )
  )
  model.save_pretrained(f"{directory}/model")
  words.save_pretrained(f"{directory}/model")
  transformers.Qwen2VLImageProcessor(
    patch_size=8, size={"shortest_edge": 256, "longest_edge": 1 << 20}
  ).save_pretrained(f"{directory}/processor")


if __name__ == "__main__":
  main(*sys.argv[1:])
