"""Text that is streamed while its tokens are sampled."""

import json

from agent_services.serving import answers
from agent_services.serving.endpoints import streams
import hypothesis
from hypothesis import strategies as st
import numpy as np
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint


class Letters:
  """A decoder whose tokens are the bytes of characters."""

  end = 0

  def bytes(self, token):
    return bytes([token])


def test_streamed_text_never_has_to_be_taken_back():
  text = "one STOP-less STO, a STOP and more"
  stream = answers.TextStream(Letters(), ["STOP."])
  streamed = "".join(stream.feed([ord(c)]) for c in text)
  assert streamed + stream.rest(text) == text
  assert text.startswith(streamed)
  for strings, end in ((["STOP "], text.index("STOP a")), (["e S"], 2)):
    for size in (1, 2, 5, len(text)):
      stream = answers.TextStream(Letters(), strings)
      streamed = ""
      for i in range(0, len(text), size):
        streamed += stream.feed(text[i : i + size].encode())
        assert text[:end].startswith(streamed) or end == text.find("STOP a")
      want = text[: answers.first_of(text, strings)]
      assert streamed == want and stream.rest(want) == ""


def test_streamed_text_is_the_whole_text_wherever_tokens_split_it():
  _, _, tokenizer = checkpoint.create_policy("nano", screen=(32, 32))
  renderer = qwen.QwenRenderer(tokenizer, lambda width, height: 1)
  end = renderer.end_of_turn_id
  decoder = answers.TokenDecoder(renderer.decode, tokenizer, end)
  rng = np.random.default_rng(0)
  sequences = [
    t for t in range(tokenizer.get_vocab_size()) if t not in decoder.special
  ]
  bytes_ = [t for t in sequences if len(decoder.bytes(t)) == 1]
  ids = renderer.encode("é ☃ 漢字 🙂 e\u0301 \ufffd").tolist()
  special = sorted(decoder.special)
  for i in range(300):
    kind = (sequences, bytes_, bytes_ + special, [end, *bytes_[:3]])[i % 4]
    tokens = rng.choice(kind, int(rng.integers(1, 40))).tolist() + ids
    tokens = rng.permutation(tokens).tolist() if i % 3 else tokens
    tokens += [[], [end], [end, end]][i % 3]
    stream = answers.TextStream(decoder)
    streamed, at = "", 0
    text = renderer.decode(tokens)
    while at < len(tokens):
      size = int(rng.integers(1, 4))
      streamed += stream.feed(tokens[at : at + size])
      at += size
      assert text.startswith(streamed), (tokens, streamed)
    assert streamed + stream.rest(text) == text
    assert len(text) - len(streamed) <= len("<|im_end|>") + 1


def test_a_long_stream_looks_at_each_token_once():
  lookups = []

  class Counting(Letters):
    def bytes(self, token):
      lookups.append(token)
      return super().bytes(token)

  stream = answers.TextStream(Counting(), ["never"])
  for i in range(5000):
    stream.feed([97 + i % 20])
    assert len(stream._held) < len("never")
  assert len(lookups) == 5000


@hypothesis.given(
  st.text(st.sampled_from('a"\\\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é😀'))
)
def test_an_event_is_one_line_to_every_client(text):
  """Also to those that read lines as Unicode has them."""
  fields = {"type": "x.delta", "delta": text}
  event = streams.encode(fields).decode()
  assert event.endswith("\n\n")
  name, data = event.splitlines()[:2]
  assert len(event.splitlines()) == 3
  assert name == "event: x.delta"
  assert json.loads(data.removeprefix("data: ")) == fields
