"""Reads a tokenizer that a checkpoint keeps as tiktoken's ranks (OpenCUA).

`tiktoken.model` has a token's bytes, in base64, and its rank in each line.
`tokenizer_config.json` names the special tokens behind them, by id. The pattern
that splits text is a literal in the checkpoint's own `tokenization_*.py`, of
which nothing is run.

Promises: ids are those of tiktoken. Of the parts of a piece of text, the
neighbours that make the token of lowest rank are joined first, from the left; a
piece that is a token itself is that token. An id without a name is
`<|reserved_token_{id}|>`.

Does not: import tiktoken, or run code of a checkpoint.
"""

from __future__ import annotations

import ast
import base64
import binascii
import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tunix.rl.multi_turn.core import json_text

RANKS = "tiktoken.model"
_CONFIG = "tokenizer_config.json"
_PATTERN = "pat_str"


def read(directory: pathlib.Path) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a directory with `tiktoken.model`.

  Raises:
    FileNotFoundError: a file of it is missing.
    ValueError: a file is damaged, or no class there has a literal `pat_str`.
  """
  ranks = _ranks(directory / RANKS)
  special = _special(directory / _CONFIG, len(ranks))
  pattern = _pattern(directory)
  letters = _letters()
  spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
  model = models.BPE(
    vocab={spelled[token]: rank for token, rank in ranks.items()},
    merges=[(spelled[a], spelled[b]) for a, b in _merges(ranks)],
    ignore_merges=True,
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(name, special=True, normalized=False)
      for name in special
    ]
  )
  for number, name in enumerate(special, len(ranks)):
    if tokenizer.token_to_id(name) != number:
      raise ValueError(
        f"{directory / _CONFIG} names {name!r} for id {number}, which is"
        f" {tokenizer.token_to_id(name)} already; copy or download it again"
      )
  return tokenizer


def _ranks(file: pathlib.Path) -> dict[bytes, int]:
  """Token -> rank, which is its id; in the order of ranks."""
  ranks = {}
  for number, line in enumerate(file.read_bytes().splitlines(), 1):
    if not line:
      continue
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
      raise ValueError(
        f"{file}, line {number}: {line[:40]!r} is not a token in base64 and"
        " its rank; copy or download it again"
      ) from None
  single = sum(len(token) == 1 for token in ranks)
  if sorted(ranks.values()) != list(range(len(ranks))) or single != 256:
    raise ValueError(
      f"{file} has {len(ranks)} tokens, {single} of them single bytes, whose"
      " ranks must be 0, 1, 2, …, and all 256 bytes among them; copy or"
      " download it again"
    )
  return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
  """Returns every pair of tokens that make one, by its rank."""
  merges = []
  for token in ranks:
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    pairs = [(a, b) for a, b in pairs if a in ranks and b in ranks]
    merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
  return merges


def _special(file: pathlib.Path, first: int) -> list[str]:
  """Names of the tokens `first`, `first` + 1, …"""
  if not file.is_file():
    raise FileNotFoundError(
      f"{file.parent} has {RANKS} and no {_CONFIG}, which names its special"
      " tokens; copy or download the whole checkpoint"
    )
  try:
    raw: dict[str, Any] = json_text.read(file)
    named = {
      int(number): str(about["content"])
      for number, about in raw.get("added_tokens_decoder", {}).items()
    }
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(
      f"{file}: added_tokens_decoder must be an object of id -> {{'content':"
      " name}; copy or download it again"
    ) from None
  if named and min(named) < first:
    raise ValueError(
      f"{file} names token {min(named)}, which is one of the {first} of"
      f" {RANKS}; copy or download both again"
    )
  return [
    named.get(number, f"<|reserved_token_{number}|>")
    for number in range(first, max(named, default=first - 1) + 1)
  ]


def _pattern(directory: pathlib.Path) -> str:
  """`pat_str` of the last class that sets it in tokenization_*.py."""
  pattern = None
  files = sorted(directory.glob("tokenization_*.py"))
  for file in files:
    try:
      tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
      raise ValueError(
        f"{file} is not Python ({error}); copy or download it again"
      ) from None
    for node in ast.walk(tree):
      if isinstance(node, ast.ClassDef):
        for line in node.body:
          pattern = _assigned(line) or pattern
  if pattern is None:
    names = ", ".join(file.name for file in files) or "no tokenization_*.py"
    raise ValueError(
      f"{directory} has {RANKS}, and no class in {names} has a literal"
      f" {_PATTERN}, by which text is split; copy that file beside it, or"
      " convert the tokenizer to tokenizer.json"
    )
  return pattern


def _assigned(line: ast.stmt) -> str | None:
  """Returns the string that a line assigns: a literal, or joined ones."""
  if not isinstance(line, ast.Assign) or not any(
    isinstance(to, ast.Name) and to.id == _PATTERN for to in line.targets
  ):
    return None
  value = line.value
  try:
    if isinstance(value, ast.Call):
      joins = isinstance(value.func, ast.Attribute) and (
        value.func.attr == "join" and len(value.args) == 1
      )
      if not joins:
        return None
      by = ast.literal_eval(value.func.value)  # type: ignore[attr-defined]
      return str(by).join(ast.literal_eval(value.args[0]))
    literal = ast.literal_eval(value)
  except (ValueError, TypeError):
    return None
  return literal if isinstance(literal, str) else None


def _letters() -> dict[int, str]:
  """Returns the character by which a byte-level vocabulary spells each byte."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  letters = {byte: chr(byte) for byte in shown}
  unprintable = (byte for byte in range(256) if byte not in letters)
  return letters | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
