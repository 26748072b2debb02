"""The Qwen renderer against transformers' chat template, as properties."""

import functools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import train_tokenizer
import transformers
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import qwen


def num_image_tokens(width, height):
  return (width + height) % 7 + 1


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  tokenizer = train_tokenizer.train(train_tokenizer.corpus(), vocab_size=1800)
  train_tokenizer.save(tokenizer, path)
  return transformers.AutoTokenizer.from_pretrained(str(path))


@pytest.fixture(scope="module")
def renderer(reference):
  return qwen.QwenRenderer(reference, num_image_tokens)


SPECIAL = train_tokenizer.SPECIAL_TOKENS
# Text as it occurs: newlines where templates have them, markup, numbers.
PIECES = st.sampled_from([
    "\n", "\n\n", " ", "  \n", "Click", " the", '"OK"', "[512, 300]", "1, 2",
    "é", "e\u0301", "🙂", "<tool_call>", "</tool_call>", "user", "assistant\n",
    "<|", "|>", "\r\n", "\t",
])  # fmt: skip
TEXT = st.lists(PIECES | st.text(max_size=5), max_size=6).map("".join)
PLAIN = TEXT.filter(lambda text: not any(s in text for s in SPECIAL))
HOSTILE = st.lists(
  PIECES | st.sampled_from(SPECIAL), min_size=1, max_size=6
).map("".join)
IMAGES = st.builds(
  lambda digit, width, height: trajectory.ImageRef(
    format(digit, "x") * 64, width, height
  ),
  st.integers(0, 15),
  st.integers(1, 50),
  st.integers(1, 50),
)


def contents(text):
  part = st.builds(lambda t: {"type": "text", "text": t}, text) | st.builds(
    lambda i: {"type": "image", "image": i}, IMAGES
  )
  return text | st.lists(part, max_size=4)


ARGUMENTS = st.dictionaries(
  st.text("abc_", min_size=1, max_size=4),
  st.integers(-5, 999) | PLAIN | st.lists(st.integers(0, 999), max_size=2),
  max_size=3,
)
CALLS = st.lists(
  st.builds(
    lambda a: {
      "type": "function",
      "function": {"name": "computer_use", "arguments": a},
    },
    ARGUMENTS,
  ),
  max_size=2,
)


def message(text=PLAIN):
  return st.one_of(
    st.builds(
      lambda r, c: {"role": r, "content": c},
      st.sampled_from(["system", "user", "tool"]),
      contents(text),
    ),
    st.builds(
      lambda c, calls: {
        "role": "assistant",
        "content": c,
        **({"tool_calls": calls} if calls else {}),
      },
      text,
      CALLS,
    ),
    st.builds(
      lambda c: {"role": "user", "tool_call_id": "a", "content": c},
      contents(text),
    ),
  )


def expected(reference, messages, add_generation_prompt):
  """Ids of the template's text, placeholders expanded by hand."""
  plain = []
  for m in messages:
    if isinstance(m["content"], list):
      m = {
        **m,
        "content": [
          {"type": "image"} if p["type"] == "image" else p for p in m["content"]
        ],
      }
    plain.append(m)
  text = reference.apply_chat_template(
    plain, tokenize=False, add_generation_prompt=add_generation_prompt
  )
  images = [
    p["image"]
    for m in messages
    if isinstance(m["content"], list)
    for p in m["content"]
    if p["type"] == "image"
  ]
  pad = reference.convert_tokens_to_ids("<|image_pad|>")
  ids, spans = [], []
  for token in reference.encode(text, add_special_tokens=False):
    if token == pad:
      image = images[len(spans)]
      n = num_image_tokens(image.width, image.height)
      spans.append(trajectory.ImageSpan(image, len(ids), n))
      ids += [pad] * n
    else:
      ids.append(token)
  assert len(spans) == len(images)
  return ids, tuple(spans)


EXAMPLES = hypothesis.settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=[
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.filter_too_much,
  ],
)


@hypothesis.given(
  messages=st.lists(message(), min_size=1, max_size=5), prompt=st.booleans()
)
@EXAMPLES
def test_render_equals_the_chat_template(reference, renderer, messages, prompt):
  got = renderer.render(messages, add_generation_prompt=prompt)
  ids, spans = expected(reference, messages, prompt)
  assert got.tokens.tolist() == ids
  assert got.images == spans


def concatenate(*parts):
  tokens, spans = [], []
  for part in parts:
    spans += [s.shifted(len(tokens)) for s in part.images]
    tokens += part.tokens.tolist()
  return tokens, tuple(spans)


@hypothesis.given(
  history=st.lists(message(), min_size=1, max_size=3),
  answer=PLAIN,
  new=st.lists(
    message().filter(lambda m: m["role"] in ("user", "tool")),
    min_size=1,
    max_size=3,
  ),
  cut=st.booleans(),
)
@EXAMPLES
def test_prompt_and_sampled_and_bridge_equal_the_rendered_history(
  renderer, history, answer, new, cut
):
  prompt = renderer.render(history)
  longer = [*history, {"role": "assistant", "content": answer}, *new]
  want = renderer.render(longer)
  # What a policy would sample to say `answer` as the template writes it. The
  # header's newline and an answer's own may merge in the template; such an
  # answer is not canonical.
  begin = renderer.render(
    [*history, {"role": "assistant", "content": answer}],
    add_generation_prompt=False,
  )
  hypothesis.assume(
    begin.tokens[: len(prompt)].tolist() == prompt.tokens.tolist()
  )
  sampled = begin.tokens[len(prompt) : -1]
  assert sampled[-1] == renderer.end_of_turn_id
  if cut:  # The sampler hit its limit before the end-of-turn token.
    sampled = sampled[:-1]
  bridge = renderer.bridge(new, last_sampled_is_eot=not cut)

  class Sampled:
    tokens, images = sampled, ()

  tokens, spans = concatenate(prompt, Sampled, bridge)
  assert tokens == want.tokens.tolist()
  assert spans == want.images


@hypothesis.given(messages=st.lists(message(HOSTILE), min_size=1, max_size=4))
@EXAMPLES
def test_text_never_becomes_a_special_token(reference, renderer, messages):
  prompt = renderer.render(messages, add_generation_prompt=False)
  special = [
    t
    for t in prompt.tokens.tolist()
    if t in set(reference.convert_tokens_to_ids(list(SPECIAL)))
  ]
  turns = 0
  previous = None
  for m in messages:
    turns += not (m["role"] == "tool" and previous == "tool")
    previous = m["role"]
  token = functools.partial(reference.convert_tokens_to_ids)
  assert special.count(token("<|im_start|>")) == turns
  assert special.count(token("<|im_end|>")) == turns
  pads = sum(s.num_tokens for s in prompt.images)
  assert special.count(renderer.image_token_id) == pads
  assert len(special) == 2 * turns + pads + 2 * len(prompt.images)


@hypothesis.given(text=HOSTILE)
@EXAMPLES
def test_decode_inverts_encode(renderer, text):
  import unicodedata  # pylint: disable=g-import-not-at-top

  ids = renderer.encode(text)
  want = unicodedata.normalize("NFC", text)
  assert renderer.decode(ids) == want
  assert renderer.decode([*ids, renderer.end_of_turn_id]) == want


def test_decode_shows_markup_and_stray_special_tokens(reference, renderer):
  text = "<tool_call>\n{}\n</tool_call><|im_start|>x"
  ids = reference.encode(text, add_special_tokens=False)
  assert renderer.decode([*ids, renderer.end_of_turn_id]) == text
  # Only the final end of turn is left out.
  end = renderer.end_of_turn_id
  assert renderer.decode([end, end]) == "<|im_end|>"


def test_the_given_tokenizer_is_not_changed(reference, renderer):
  assert not reference.backend_tokenizer.encode_special_tokens
  assert reference.encode("<|im_end|>", add_special_tokens=False) == [
    renderer.end_of_turn_id
  ]


@pytest.mark.parametrize(
  "bad, error",
  [
    ({"role": "robot", "content": "x"}, "robot"),
    ({"role": "user", "content": 3}, "int"),
    ({"role": "user", "content": [{"type": "video"}]}, "video"),
    ({"role": "user", "content": ["x"]}, "None"),
    (
      {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
      "ImageRef",
    ),
    ({"role": "assistant", "content": "", "tool_calls": [{}]}, "name"),
  ],
)
def test_bad_messages_are_refused_by_index(renderer, bad, error):
  with pytest.raises(ValueError, match=f"message 1.*{error}"):
    renderer.render([{"role": "user", "content": "fine"}, bad])


def test_a_tokenizer_without_chat_tokens_is_refused():
  bare = train_tokenizer._bare(train_tokenizer.models.BPE())
  with pytest.raises(ValueError, match="im_start"):
    qwen.QwenRenderer(bare, num_image_tokens)


def test_tool_calls_may_be_tool_call_objects(renderer):
  call = trajectory.ToolCall("f", {"a": [1, 2]})
  as_dict = {"name": "f", "arguments": {"a": [1, 2]}}
  first, second = (
    renderer.render([{"role": "assistant", "content": None, "tool_calls": [c]}])
    for c in (call, as_dict)
  )
  np.testing.assert_array_equal(first.tokens, second.tokens)
  assert '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}' in (
    renderer.decode(first.tokens)
  )
