"""Tokenizers of ranks, held to byte pair encoding as tiktoken does it."""

import base64
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.policy.checkpoints import policy_files

# What stands in OpenCUA's place: classes of which the last one's holds.
CODE = '''
raise RuntimeError("a checkpoint's code must not run")
class Old:
  pat_str = "."
class New(Old):
  pat_str = "|".join([r"""[\\p{Han}]+""", r"""\\p{L}+""", r"""\\p{N}{1,3}""",
                      r""" ?[^\\s\\p{L}\\p{N}]+""", r"""\\s+"""])
'''
WORDS = ["click", "clack", "ick", "la", "li", "ck", "aa", "aaa", "aaaa", "中文",
         "12", "123", "文", "é"]  # fmt: skip
NAMES = {0: "[BOS]", 2: "<|im_end|>", 5: "<|media_placeholder|>"}


def vocabulary():
  """All bytes, and tokens that grow from others in a random order."""
  rng = np.random.default_rng(0)
  ranks = {bytes([i]): n for n, i in enumerate(rng.permutation(256).tolist())}
  parts = {
    word.encode()[i:j]
    for word in WORDS
    for i in range(8)
    for j in range(i + 2, 13)
  } - {b""}
  for token in sorted(sorted(parts), key=lambda t: (len(t), rng.random())):
    if len(token) > 1 and rng.random() < 0.8:
      ranks[token] = len(ranks)
  return ranks


RANKS = vocabulary()


def directory(tmp_path, code=CODE, names=NAMES):
  lines = [
    f"{base64.b64encode(token).decode()} {rank}"
    for token, rank in RANKS.items()
  ]
  (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps(
      {
        "added_tokens_decoder": {
          str(len(RANKS) + i): {"content": name} for i, name in names.items()
        }
      }
    )
  )
  (tmp_path / "tokenization_own.py").write_text(code)
  return tmp_path


def merged(piece):
  """tiktoken's encoding of a piece, by its definition."""
  if piece in RANKS:
    return [RANKS[piece]]
  parts = [piece[i : i + 1] for i in range(len(piece))]
  while True:
    pairs = [
      (RANKS[a + b], i)
      for i, (a, b) in enumerate(zip(parts, parts[1:]))
      if a + b in RANKS
    ]
    if not pairs:
      return [RANKS[part] for part in parts]
    _, i = min(pairs)
    parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer(tmp_path_factory):
  return policy_files.load_tokenizer(
    directory(tmp_path_factory.mktemp("ranks"))
  )


@given(st.lists(st.sampled_from("aclik"), min_size=1, max_size=24).map("".join))
@settings(max_examples=300, deadline=None)
def test_letters_are_joined_as_tiktoken_joins_them(tokenizer, word):
  got = tokenizer.encode(word, add_special_tokens=False).ids
  assert got == merged(word.encode())
  assert tokenizer.decode(got) == word


def test_text_is_split_by_the_checkpoints_pattern(tokenizer):
  pieces = ["clickclack中文", "123", "12", " !?", " ", "aaaaaaé"]
  got = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
  # "\s+" and " ?[^\s…]+" both begin with a space; Han are letters, too.
  assert got == [i for piece in pieces for i in merged(piece.encode())]


def test_special_tokens_have_their_ids_and_gaps_are_reserved(tokenizer):
  first = len(RANKS)
  for number, name in NAMES.items():
    assert tokenizer.token_to_id(name) == first + number
  assert tokenizer.token_to_id(f"<|reserved_token_{first + 1}|>") == first + 1
  assert tokenizer.get_vocab_size() == first + 6
  ids = tokenizer.encode("la<|im_end|>", add_special_tokens=False).ids
  assert ids == [*merged(b"la"), first + 2]


def test_a_copy_has_a_tokenizer_json_that_encodes_alike(tokenizer, tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  for folder in (source, out):
    folder.mkdir()
  policy_files.copy_tokenizer(directory(source), out)
  again = policy_files.load_tokenizer(out)
  text = "click 123 中文<|im_end|>"
  assert again.encode(text).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize(
  "damage, message",
  [
    (dict(code="class A:\n  pat_str = input()\n"), "a literal pat_str"),
    (dict(code="class A:\n  x = 1\n"), "tokenization_own.py has a literal"),
    (dict(code="class A(:\n"), "is not Python"),
    (dict(names={-3: "x"}), "names token .* which is one of the"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_directory_is_named(damage, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    policy_files.load_tokenizer(directory(tmp_path, **damage))


def test_a_damaged_line_is_named(tmp_path):
  file = directory(tmp_path) / "tiktoken.model"
  file.write_text(file.read_text() + "!!! 12\n")
  with pytest.raises(ValueError, match="not a token in base64 and its rank"):
    policy_files.load_tokenizer(tmp_path)
