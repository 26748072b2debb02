"""Writes the tokenizer's files of a GGUF file's metadata.

Two kinds of vocabularies: byte-level BPE with merges (`gpt2`), split by the
rule that `tokenizer.ggml.pre` names, and SentencePiece's BPE with scores
(`llama`), whose merges follow from the scores.

Promises: ids are the file's; a rule of splitting that is not known here is
refused by name, as text would become other tokens than in training.

Does not: read the file (see `gguf_files`), or load `transformers`, whose
conversion splits by other rules than SmolLM2's and Gemma's own tokenizers.
"""

from __future__ import annotations

import pathlib
from typing import Any, Mapping, Sequence

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tunix.rl.multi_turn.policy import tensor_files

_CONTROL, _USER_DEFINED = 3, 4  # Of `tokenizer.ggml.token_type`.
_SPACE = "▁"

# As Llama 3's and Qwen2's tokenizer.json have them; they differ in how many
# digits stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[Any]:
  pattern = tokenizers.Regex(_WORDS % digits)
  return [pre_tokenizers.Split(pattern, "isolated")]


def _pre_tokenizers(name: Any) -> list[Any]:
  """Returns the steps before bytes, of `tokenizer.ggml.pre`.

  Raises:
    ValueError: another name.
  """
  steps = {
      "gpt-2": [],
      "smollm": [pre_tokenizers.Digits(individual_digits=True)],
      "llama-bpe": _split("{1,3}"),
      "qwen2": _split(""),
  }
  if name not in steps:
    raise ValueError(
        f"tokenizer.ggml.pre={name!r} is no rule of splitting known here"
        f" ({', '.join(steps)}); give the safetensors checkpoint, which has a"
        " tokenizer.json"
    )
  return steps[name]


def write(fields: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Writes tokenizer.json, its configuration and the chat template.

  Args:
    fields: The file's metadata.
    directory: Of the policy.

  Raises:
    ValueError: no tokenizer, or one of another kind.
  """
  get = lambda name, default=None: fields.get(f"tokenizer.ggml.{name}", default)
  tokens, kind = get("tokens"), get("model")
  if not tokens:
    raise ValueError(
        "the metadata hold no tokenizer (tokenizer.ggml.tokens); give a"
        " conversion with its vocabulary"
    )
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if kind == "gpt2":
    encoder = _byte_level(get("pre"), vocabulary, get("merges") or ())
  elif kind == "llama":
    encoder = _sentence_piece(get, tokens, vocabulary)
  else:
    raise ValueError(
        f"tokenizer.ggml.model={kind!r} is no kind of tokenizer known here"
        " (gpt2, llama)"
    )
  types = get("token_type") or ()
  # In the order of their ids, so that none is added anew.
  for i, (token, type_) in enumerate(zip(tokens, types)):
    if type_ in (_CONTROL, _USER_DEFINED):
      special = type_ == _CONTROL
      added = tokenizers.AddedToken(token, special=special, normalized=False)
      encoder.add_tokens([added])
      if encoder.token_to_id(token) != i:
        raise ValueError(f"token {i} of the metadata, {token!r}, occurs twice")
  names = {
      "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding",
  }  # pyformat: disable
  ids = {role: get(f"{name}_token_id") for role, name in names.items()}
  if get("add_bos_token") and ids["bos"] is not None:
    bos = tokens[ids["bos"]]
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
    )
  encoder.save(str(directory / "tokenizer.json"))
  config = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      **{
          f"{role}_token": tokens[i]
          for role, i in ids.items()
          if i is not None and i < len(tokens)
      },
  }
  (directory / "tokenizer_config.json").write_bytes(
      tensor_files.json_bytes(config)
  )
  template = fields.get("tokenizer.chat_template")
  if template:
    file = directory / "chat_template.jinja"
    file.write_text(template, encoding="utf-8")


def _byte_level(
    pre: Any, vocabulary: Mapping[str, int], merges: Sequence[str]
) -> tokenizers.Tokenizer:
  steps = _pre_tokenizers(pre)
  encoder = tokenizers.Tokenizer(models.BPE(
      dict(vocabulary),
      [tuple(merge.split(" ", 1)) for merge in merges],
      ignore_merges=pre == "llama-bpe",
  ))
  own_split = bool(steps) and isinstance(steps[0], pre_tokenizers.Split)
  bytes_ = pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=not own_split
  )
  encoder.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_])
  encoder.decoder = decoders.ByteLevel()
  if pre == "qwen2":
    encoder.normalizer = normalizers.NFC()
  return encoder


def _sentence_piece(
    get: Any, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> tokenizers.Tokenizer:
  unknown = get("unknown_token_id")
  encoder = tokenizers.Tokenizer(models.BPE(
      dict(vocabulary),
      _merges(tokens, vocabulary, get("scores") or ()),
      unk_token=None if unknown is None else tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
  ))
  steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
  ends: list[Any] = [
      decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
  ]  # pyformat: disable
  if get("add_space_prefix", True):
    steps.insert(0, normalizers.Prepend(_SPACE))
    ends.append(decoders.Strip(" ", 1, 0))
  encoder.normalizer = normalizers.Sequence(steps)
  encoder.decoder = decoders.Sequence(ends)
  return encoder


def _merges(
    tokens: Sequence[str],
    vocabulary: Mapping[str, int],
    scores: Sequence[float],
) -> list[tuple[str, str]]:
  """Lists the ways to join two pieces to a third, best scores first."""
  if len(scores) != len(tokens):
    raise ValueError(
        f"tokenizer.ggml.scores has {len(scores)} entries for"
        f" {len(tokens)} tokens"
    )
  joins = [
      (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]])
      for i, token in enumerate(tokens)
      for at in range(1, len(token))
      if token[:at] in vocabulary and token[at:] in vocabulary
  ]
  return [(tokens[a], tokens[b]) for _, a, b in sorted(joins)]
