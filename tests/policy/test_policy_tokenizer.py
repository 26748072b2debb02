"""The shipped tokenizer and its training."""

import unicodedata

import hypothesis
from hypothesis import strategies as st
import pytest
import tokenizers
import train_tokenizer
import transformers
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms.desktop import words
from tunix.rl.multi_turn.parser.tool_parser.grammars import computer_use
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files

DIRECTORY = policy_files.DATA / "tiny_vl"


@pytest.fixture(scope="module")
def tokenizer():
  return checkpoint.load_tokenizer("tiny_vl")


def ids(tokenizer, text):
  return tokenizer.encode(text, add_special_tokens=False).ids


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path):
  with pytest.raises(
    FileNotFoundError, match="no tokenizer.json; give the directory of"
  ):
    checkpoint.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
  "name, message",
  [
    ("Qwen/Qwen3-VL-4B-Instruct", "hf download Qwen/Qwen3-VL-4B-Instruct "),
    ("runs/none", "there is no such directory"),
    ("tiny_v1", "did you mean 'tiny_vl'"),
  ],
)
def test_a_name_that_is_no_policy_has_the_fix(name, message):
  with pytest.raises(FileNotFoundError, match=message):
    policy_files.resolve(name)


def test_shipped_tokenizer_keeps_its_promises(tokenizer):
  train_tokenizer.check(tokenizer)
  assert tokenizer.get_vocab_size() == train_tokenizer.VOCAB_SIZE


@hypothesis.given(st.text())
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_round_trips_up_to_nfc(tokenizer, text):
  got = tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False)
  assert got == unicodedata.normalize("NFC", text)


@hypothesis.given(st.integers(0, 10**9))
@hypothesis.settings(max_examples=100, deadline=None)
def test_numbers_are_cut_every_three_digits(tokenizer, number):
  start = tokenizer.token_to_id("0")
  text = str(number)
  pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
  if all(p == str(int(p)) for p in pieces):  # No leading zero inside.
    assert ids(tokenizer, text) == [start + int(p) for p in pieces]


Kind = gui_action.GuiActionKind


@pytest.mark.parametrize(
  "action, tokens",
  [
    (dict(kind=Kind.CLICK, x=9, y=90), 7),
    (dict(kind=Kind.CLICK, x=9, y=90, count=2), 7),
    (dict(kind=Kind.CLICK, x=9, y=90, button="right"), 7),
    (dict(kind=Kind.DRAG, x=9, y=9, x2=50, y2=60), 11),
    (dict(kind=Kind.SCROLL, x=9, y=9, dy=120), 9),
    (dict(kind=Kind.SCROLL, x=9, y=9, dy=-120), 9),
    (dict(kind=Kind.TYPE, text="dragon"), 5),
    (dict(kind=Kind.KEY, keys=("ctrl", "s")), 7),
    (dict(kind=Kind.ANSWER, text="17"), 5),
    (dict(kind=Kind.WAIT), 4),
  ],
)
def test_calls_as_the_parser_writes_them_are_short(tokenizer, action, tokens):
  text = computer_use.ComputerUseParser().format_gui_action(
    gui_action.GuiAction(**action), 224, 160
  )
  assert len(ids(tokenizer, text)) == tokens
  assert tokenizer.decode(ids(tokenizer, text)) == text


def test_a_word_to_type_is_one_token_in_the_call_and_in_the_instruction(
  tokenizer,
):
  for word in words.TYPING_WORDS:
    (piece,) = ids(tokenizer, word)
    assert piece in ids(tokenizer, f'Enter "{word}" as title.')


def test_transformers_loads_it_and_agrees(tokenizer):
  fast = transformers.AutoTokenizer.from_pretrained(str(DIRECTORY))
  assert len(fast) == tokenizer.get_vocab_size()
  assert fast.eos_token == "<|im_end|>"
  text = 'Click "OK" at [3, 999].<|im_end|>\n<tool_call>\n'
  assert fast.encode(text, add_special_tokens=False) == ids(tokenizer, text)
  assert fast.decode(ids(tokenizer, text)) == text


def test_training_is_deterministic_and_exact_in_size():
  corpus = train_tokenizer.corpus(seed=3)
  first, second = (
    train_tokenizer.train(corpus, vocab_size=1800) for _ in range(2)
  )
  assert first.to_str() == second.to_str()
  assert first.get_vocab_size() == 1800
  train_tokenizer.check(first)


def test_a_small_corpus_is_refused():
  with pytest.raises(ValueError, match="pieces"):
    train_tokenizer.train(["too little text"])


def test_check_refuses_a_tokenizer_that_cuts_numbers():
  plain = train_tokenizer._bare(
    tokenizers.models.BPE(
      vocab={c: i for i, c in enumerate("0123456789,Ġ")}, merges=[]
    )
  )
  with pytest.raises(ValueError, match="number 10"):
    train_tokenizer.check(plain)


def test_saved_tokenizer_loads_again(tokenizer, tmp_path):
  train_tokenizer.save(tokenizer, tmp_path)
  again = checkpoint.load_tokenizer(tmp_path)
  assert again.get_vocab() == tokenizer.get_vocab()
