"""Tells transformers where a saved policy's completions end.

Without an end-of-turn id in generation_config.json, `generate` samples on past
the end of a turn, up to its limit of tokens.

Promises: a generation_config.json that the policy came with stays unchanged;
config.json gets ids that it lacks, and none is replaced.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tunix.rl.multi_turn.policy import tensor_files

NAME = "generation_config.json"


def write(directory: str | pathlib.Path) -> None:
  """Completes a policy's directory, which has its tokenizer and config.json.

  Nothing is written where the tokenizer names no end of a turn.

  Raises:
    OSError: a file cannot be written.
  """
  directory = pathlib.Path(directory)
  ids = ids_of(directory)
  if "eos_token_id" not in ids:
    return
  generation = directory / NAME
  if generation.is_file():  # Its own, which config.json then repeats.
    existing = tensor_files.read_json(generation)
    ids |= {key: existing[key] for key in ids if existing.get(key) is not None}
  else:
    _replace(generation, {
        **ids,
        # As the policy is trained: of the whole distribution.
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    })  # pyformat: disable
  path = directory / "config.json"
  config = tensor_files.read_json(path)
  completed = _with(config, ids)
  if isinstance(text := config.get("text_config"), dict):
    completed["text_config"] = _with(text, ids)
  if completed != config:
    _replace(path, completed)


def ids_of(directory: pathlib.Path) -> dict[str, int]:
  """`eos_token_id` and `pad_token_id`, as tokenizer_config.json names them."""
  ids: dict[str, int] = {}
  path = directory / "tokenizer_config.json"
  if not path.is_file() or not (directory / "tokenizer.json").is_file():
    return ids
  named = tensor_files.read_json(path)
  added = tensor_files.read_json(directory / "tokenizer.json")
  added_ids = {
      token["content"]: token["id"] for token in added.get("added_tokens", ())
  }
  for role in ("eos", "pad"):
    token = named.get(f"{role}_token")
    # Older files hold {"content": …}.
    text = token.get("content") if isinstance(token, dict) else token
    if text in added_ids:
      ids[f"{role}_token_id"] = added_ids[text]
  return ids


def _with(config: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
  absent = {k: v for k, v in ids.items() if config.get(k) is None}
  return {**config, **absent}


def _replace(path: pathlib.Path, content: dict[str, Any]) -> None:
  part = tensor_files.part(path)
  part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  part.replace(path)
