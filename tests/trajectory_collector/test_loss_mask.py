"""Loss masks of conversations, against transformers' own masks.

The reference renders with Jinja templates that mark what the assistant wrote,
`{% generation %}`: here as the families' published templates write it.
"""

import functools
import importlib.util
import itertools
import json
import os
import pathlib

import hypothesis
from hypothesis import strategies as st
import pytest
import transformers
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.trajectory_collector import loss_mask

CHECKPOINT = "qwen3_vl_tiny"
END = "<|im_end|>"
CHATML = """
{%- macro calls(m, text) -%}{%- for call in m.tool_calls or [] -%}
{%- if text or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}{%- endmacro -%}
{%- set first = messages[0] -%}
{%- set system = first.content if first.role == 'system' else DEFAULT -%}
{%- if tools -%}
{%- set own = first.role == 'system' -%}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system or own else '') -}}
{{- BEFORE -}}{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}
{%- endfor -%}{{- AFTER + '<|im_end|>\\n' -}}
{%- elif system or first.role == 'system' -%}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- set before = messages[loop.index0 - 1].role if loop.index0 else '' -%}
{%- set after = '' if loop.last else messages[loop.index0 + 1].role -%}
{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
THINK{{- m.content + calls(m, m.content) + '<|im_end|>' -}}
{%- endgeneration -%}{{- '\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if before != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if after != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif m.role == 'user' or loop.index0 -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}{%- endfor -%}"""
BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
AFTER = """
</tools>

For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
QWEN_SYSTEM = (
  "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)
THINK = (
  "{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n')"
  " + '\\n</think>\\n\\n' -}}"
)
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
    "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
]  # fmt: skip
DISTILL = """{{- '<｜begin▁of▁sentence｜>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- else -%}{{- '<｜Assistant｜>' -}}{%- generation -%}
{{- m.content + '<｜end▁of▁sentence｜>' -}}{%- endgeneration -%}{%- endif -%}
{%- endfor -%}"""


def tokenizer(template=None, extra=()):
  found = transformers.AutoTokenizer.from_pretrained(
    str(policy_files.resolve(CHECKPOINT))
  )
  if template is not None:
    found.chat_template = template
  found.add_tokens(list(extra))
  return found


def chatml(default, think=""):
  texts = {"DEFAULT": default, "BEFORE": BEFORE, "AFTER": AFTER}
  found = CHATML.replace("THINK", think)
  for name, text in texts.items():
    found = found.replace(name, json.dumps(text))
  return found


@pytest.fixture(scope="module")
def kinds():
  made = {
    "qwen": tokenizer(chatml(QWEN_SYSTEM)),
    "qwen3": tokenizer(chatml("", THINK)),
    "distill_qwen": tokenizer(DISTILL, DEEPSEEK),
  }
  return {k: (t, loss_mask.make(k, t)) for k, t in made.items()}


PIECES = st.sampled_from([
    "\n", "\n\n", " ", "Click", " the", "[512, 300]", "é", "🙂", "assistant\n",
    "<tool_call>", "<|", "user", "\t", "ok.", "def f():\n  return 1\n",
])  # fmt: skip
TEXT = (
  st.lists(PIECES | st.text(max_size=4), max_size=5)
  .map("".join)
  .filter(lambda t: "<|im_" not in t and "think>" not in t and "｜" not in t)
)
# One that a header's newline does not merge with in the reference.
REPLY = st.builds(lambda t: "x" + t, TEXT)
CALLS = st.lists(
  st.builds(
    lambda a: {
      "type": "function",
      "function": {"name": "click", "arguments": a},
    },
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 999) | TEXT),
  ),
  min_size=1,
  max_size=2,
)


def said(role, text):
  return text.map(lambda t: {"role": role, "content": t})


PLAIN_TURN = st.tuples(said("user", TEXT), said("assistant", REPLY))
REASONED_TURN = st.tuples(
  said("user", TEXT),
  st.builds(
    lambda c, r: {"role": "assistant", "content": c, "reasoning_content": r},
    REPLY,
    TEXT,
  ),
)
TOOL_TURN = st.tuples(
  st.builds(
    lambda c, calls: {"role": "assistant", "content": c, "tool_calls": calls},
    REPLY | st.just(""),
    CALLS,
  ),
  said("tool", TEXT),
  said("tool", TEXT),
)
SYSTEM = st.lists(said("system", TEXT), max_size=1)
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "click",
      "description": 'Clicks "é".',
      "parameters": {"type": "object", "properties": {}},
    },
  }
]


def conversations(*turns):
  return st.builds(
    lambda system, rest: system + [m for turn in rest for m in turn],
    SYSTEM,
    st.lists(st.one_of(*turns), min_size=1, max_size=4),
  )


def reference(found, messages, tools):
  made = found.apply_chat_template(
    messages,
    tools=tools,
    tokenize=True,
    return_dict=True,
    return_assistant_tokens_mask=True,
  )
  return made["input_ids"], made["assistant_masks"]


def trained(found, masked):
  return found.decode([t for t, m in zip(*masked) if m])


EXAMPLES = hypothesis.settings(
  max_examples=200, suppress_health_check=list(hypothesis.HealthCheck)
)


def same_as_the_template(kinds, kind, messages, tools):
  found, generator = kinds[kind]
  masked = loss_mask.masked_tokens(generator, messages, tools)
  ids, mask = reference(found, messages, tools)
  assert masked.token_ids == ids
  assert masked.loss_mask == mask
  first = mask.index(1)
  assert masked.response_length == len(mask) - first
  assert masked.response_mask == mask[first:]


@hypothesis.given(conversations(PLAIN_TURN, TOOL_TURN), st.booleans())
@EXAMPLES
def test_qwen_equals_the_template_and_its_mask(kinds, messages, tools):
  same_as_the_template(kinds, "qwen", messages, TOOLS if tools else None)


@hypothesis.given(
  conversations(PLAIN_TURN, REASONED_TURN, TOOL_TURN), st.booleans()
)
@EXAMPLES
def test_qwen3_keeps_the_reasoning_of_every_reply(kinds, messages, tools):
  same_as_the_template(kinds, "qwen3", messages, TOOLS if tools else None)


@hypothesis.given(conversations(PLAIN_TURN))
@EXAMPLES
def test_distill_qwen_equals_the_template_and_its_mask(kinds, messages):
  same_as_the_template(kinds, "distill_qwen", messages, None)


@pytest.mark.parametrize("checkpoint", [CHECKPOINT, "tiny_vl"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_shipped_checkpoints_own_template(checkpoint, tools):
  """The template without a default system message."""
  own = transformers.AutoTokenizer.from_pretrained(
    str(policy_files.resolve(checkpoint))
  )
  generator = loss_mask.make("qwen", own)
  user = {"role": "user", "content": "1 + 1 ="}
  reply = {"role": "assistant", "content": "2"}
  result = {"role": "tool", "content": "3"}
  call = {
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
  }
  calling = lambda text, *calls: {**reply, "content": text, "tool_calls": calls}
  systems = [[], *([{"role": "system", "content": t}] for t in ("", "Brief."))]
  for system, turns in itertools.product(
    systems,
    [
      [user, reply],
      [user, reply, user, reply],
      [user, calling("I call.", call), result, reply],
      [user, calling("", call, call), result, result, reply],
    ],
  ):
    messages = system + turns
    shown = own.apply_chat_template(messages, tools=tools, return_dict=True)
    got = generator.get_loss_mask(messages, tools)
    assert got[0] == shown["input_ids"], own.decode(got[0])


@pytest.mark.parametrize(
  "kind, end", [("qwen", END), ("distill_qwen", DEEPSEEK[1])]
)
@hypothesis.given(
  texts=st.lists(TEXT, min_size=1, max_size=3),
  hostile=st.lists(
    st.sampled_from([END, "<|im_start|>user\n", "<｜Assistant｜>", "\n"])
  ).map("".join),
)
@hypothesis.settings(parent=EXAMPLES, max_examples=100)
def test_trained_tokens_decode_to_the_replies(kinds, kind, end, texts, hostile):
  # Any reply, those that begin with newlines too; users may write anything.
  found, generator = kinds[kind]
  messages = []
  for text in texts:
    messages.append({"role": "user", "content": hostile})
    messages.append({"role": "assistant", "content": text})
  masked = loss_mask.masked_tokens(generator, messages)
  want = "".join(
    found.decode(found.encode(t, add_special_tokens=False)) + end for t in texts
  )
  assert trained(found, masked) == want
  number = found.convert_tokens_to_ids(end)
  spoken = 2 if kind == "qwen" else 1
  system = kind == "qwen"  # It has a turn, too.
  assert masked.token_ids.count(number) == spoken * len(texts) + system


@hypothesis.given(
  turns=st.lists(st.tuples(REPLY, st.booleans()), min_size=1, max_size=4)
)
@hypothesis.settings(parent=EXAMPLES, max_examples=40)
def test_a_flag_leaves_a_reply_out(kinds, turns):
  found, generator = kinds["qwen"]
  messages, plain = [], []
  for text, keep in turns:
    plain.append({"role": "assistant", "content": text})
    messages.append({**plain[-1], "step_loss_mask": int(keep)})
  masked = loss_mask.masked_tokens(generator, messages)
  assert masked.token_ids == generator.get_loss_mask(plain)[0]
  assert trained(found, masked) == "".join(
    found.decode(found.encode(text, add_special_tokens=False)) + END
    for text, keep in turns
    if keep
  )


@pytest.mark.parametrize("messages", [
    [], [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"},
     {"role": "assistant", "content": "b", "loss_mask": 0}],
])  # fmt: skip
@pytest.mark.parametrize("kind", ["qwen", "qwen3", "distill_qwen"])
def test_nothing_to_train_on_is_safe(kinds, kind, messages):
  generator = kinds[kind][1]
  masked = loss_mask.masked_tokens(generator, messages)
  assert len(masked.token_ids) == len(masked.loss_mask)
  assert (masked.response_length, masked.response_mask) == (0, [])
  assert generator.get_response_lengths([masked.loss_mask, [0, 1, 0], []]) == [
    0,
    2,
    0,
  ]


def test_a_reply_of_a_reasoning_server_gets_the_block_it_closes(kinds):
  found, generator = kinds["distill_qwen"]
  for message, want in (
    ({"content": "a b\n</think>\n\nc"}, "a b\n</think>\n\nc"),
    ({"content": "c", "reasoning_content": "a b\n"}, "a b\n</think>\n\nc"),
    ({"content": "<think>\na\n</think>c"}, "<think>\na\n</think>c"),
  ):
    masked = loss_mask.masked_tokens(
      generator,
      [{"role": "user", "content": "q"}, {"role": "assistant", **message}],
    )
    assert trained(found, masked) == want + DEEPSEEK[1]
    text = found.decode(masked.token_ids)
    assert text.count("<think>") == text.count("</think>") == 1


def test_distill_qwen_writes_calls_and_their_results(kinds):
  found, generator = kinds["distill_qwen"]
  call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
  masked = loss_mask.masked_tokens(
    generator,
    [
      {"role": "user", "content": "q"},
      {"role": "assistant", "content": None, "tool_calls": [call, call]},
      {"role": "tool", "content": "1"},
      {"role": "tool", "content": "2"},
      {"role": "assistant", "content": "3"},
    ],
  )
  one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" + (
    '{"a": 1}\n```<｜tool▁call▁end｜>'
  )
  calls = f"<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>"
  end = DEEPSEEK[1]
  assert trained(found, masked) == f"{calls}{end}3{end}"
  assert found.decode(masked.token_ids) == (
    f"<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>{calls}{end}"
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>1<｜tool▁output▁end｜>\n"
    "<｜tool▁output▁begin｜>2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    f"3{end}"
  )


class LastReplyOnly(loss_mask.MultiTurnLossMaskGenerator):
  """A user's own: trains on the last message, as text alone."""

  def get_loss_mask(self, messages):
    ids = [self._encode(m["content"]) for m in messages]
    mask = [0] * sum(map(len, ids[:-1])) + [1] * len(ids[-1])
    return [i for part in ids for i in part], mask


class Broken(LastReplyOnly):
  def get_loss_mask(self, messages):
    return [1, 2, 3], [0, 1]


def test_a_users_own_type_by_name_and_by_path(kinds):
  found = kinds["qwen"][0]
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "the"},
  ]
  loss_mask.LOSS_MASK_TYPES.register("custom_task", LastReplyOnly)
  try:
    for name in ("custom_task", f"{__name__}:LastReplyOnly"):
      masked = loss_mask.masked_tokens(loss_mask.make(name, found), messages)
      assert trained(found, masked) == "the"
      assert masked.response_length == sum(masked.loss_mask)
  finally:
    loss_mask.LOSS_MASK_TYPES.unregister("custom_task")
  with pytest.raises(ValueError, match="3 token ids and 2 mask values"):
    loss_mask.masked_tokens(Broken(found), messages)


class CustomTask(loss_mask.MultiTurnLossMaskGenerator):
  """A task's format beside the others, as the protocol's document has it."""

  def get_custom_task_mask(self, messages):
    ids = self.tokenizer(messages[-1]["content"])["input_ids"]
    return ids, [1] * len(ids)

  def get_loss_mask(self, messages):
    if self.tokenizer_type == "custom_task":
      return self.get_custom_task_mask(messages)
    return super().get_loss_mask(messages)


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "distill_qwen"])
def test_a_generator_is_made_with_a_tokenizer_and_a_type(kinds, kind):
  tokenizer, generator = kinds[kind]
  messages = [USER, {"role": "assistant", "content": "the lamp"}]
  want = generator.get_loss_mask(messages)
  for cls in (loss_mask.MultiTurnLossMaskGenerator, CustomTask):
    other = cls(tokenizer, tokenizer_type=kind)
    assert other.get_loss_mask(messages) == want
    length = len(want[1]) - want[1].index(1)
    assert other.get_response_lengths([want[1]]) == [length]


def test_a_subclass_adds_a_type_to_the_others(kinds):
  tokenizer = kinds["qwen"][0]
  messages = [USER, {"role": "assistant", "content": "the lamp"}]
  want = tokenizer("the lamp")["input_ids"]
  assert CustomTask(tokenizer, "custom_task").get_loss_mask(messages)[0] == want
  loss_mask.LOSS_MASK_TYPES.register("custom_task", CustomTask)
  try:
    generator = loss_mask.make("custom_task", tokenizer)
    masked = loss_mask.masked_tokens(generator, messages)
    assert masked == (want, [1] * len(want))
  finally:
    loss_mask.LOSS_MASK_TYPES.unregister("custom_task")
  with pytest.raises(ValueError, match="unknown loss mask type 'custom'"):
    CustomTask(tokenizer, "custom").get_loss_mask(messages)


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_the_newline_after_the_end_is_trained_where_it_is_chosen(kinds, kind):
  tokenizer, generator = kinds[kind]
  messages = [
    USER,
    {"role": "assistant", "content": "the"},
    {**USER, "content": "b"},
    {"role": "assistant", "content": "lamp"},
  ]
  ids, mask = generator.get_loss_mask(messages)
  other = loss_mask.make(f"{kind}_newline", tokenizer)
  newline_ids, newline_mask = other.get_loss_mask(messages)
  assert newline_ids == ids
  more = [i for i, (a, b) in enumerate(zip(mask, newline_mask)) if a != b]
  assert [tokenizer.decode([ids[i]]) for i in more] == ["\n", "\n"]
  assert [tokenizer.decode([ids[i - 1]]) for i in more] == [END, END]


ROOT = pathlib.Path(__file__).resolve().parents[2]
SLIME = os.environ.get("TUNIX_SLIME", "")
GENERATORS = [
    pytest.param(
        path,
        marks=[
            pytest.mark.peer(name),
            pytest.mark.skipif(not path.is_file(), reason=reason),
        ],
        id=name,
    )
    for name, path, reason in (
        ("miles", next(ROOT.glob(
            ".venv-miles/lib/*/site-packages/miles/utils/mask_utils.py"
        ), ROOT / "none"), "needs the package miles-rl: make miles"),
        ("slime", pathlib.Path(SLIME, "slime/utils/mask_utils.py"),
         "set TUNIX_SLIME to a checkout of slime"),
    )
]  # fmt: skip


@functools.cache
def both_generators(path, kind):
  """The generator in one of slime's files and this package's of its type."""
  template = {"qwen": chatml(QWEN_SYSTEM), "qwen3": chatml("", THINK)}[kind]
  words = tokenizer(
    template + "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
  )
  spec = importlib.util.spec_from_file_location("mask_utils", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  peer = module.MultiTurnLossMaskGenerator(words, kind)
  return peer, loss_mask.make(f"{kind}_newline", words)


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATORS)
@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
@hypothesis.given(messages=conversations(PLAIN_TURN))
@EXAMPLES
def test_masks_are_those_of_slimes_own_generator(path, kind, messages):
  """Also as its fork miles has it, which is on the package index."""
  peer, generator = both_generators(path, kind)
  ids, mask = peer.get_loss_mask(messages)
  assert tuple(generator.get_loss_mask(messages)) == (ids, mask)


def test_an_unknown_type_is_refused_with_the_known_ones(kinds):
  with pytest.raises(ValueError) as refused:
    loss_mask.make("qwen2", kinds["qwen"][0])
  for name in ("qwen2", "distill_qwen", "qwen", "qwen3"):
    assert name in str(refused.value)


def test_a_tokenizer_of_another_family_is_refused(kinds):
  with pytest.raises(ValueError, match="<｜User｜>.*qwen"):
    loss_mask.make("distill_qwen", kinds["qwen"][0])


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize("messages, kind, names", [
    ("hi", "qwen", "list of messages"),
    ([USER, "hi"], "qwen", "message 1 .*object"),
    ([{"role": "robot", "content": ""}], "qwen", "message 0 .*'robot'.*user"),
    ([{**USER, "content": 5}], "qwen", "message 0: content .*int"),
    ([{**USER, "content": [{"type": "image_url"}]}], "qwen", "'image_url'"),
    ([{**USER, "step_loss_mask": "no"}], "qwen", "step_loss_mask .*'no'"),
    ([{**USER, "step_loss_mask": 1, "loss_mask": 0}], "qwen", "contradict"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "qwen",
     "message 0: a tool call needs a name"),
    ([{"role": "assistant", "reasoning_content": "a"}], "qwen", "use qwen3"),
    ([{"role": "system"}, {"role": "system"}], "distill_qwen", "second system"),
])  # fmt: skip
def test_what_is_no_conversation_is_refused(kinds, messages, kind, names):
  with pytest.raises(ValueError, match=names):
    loss_mask.masked_tokens(kinds[kind][1], messages)


def test_tools_without_a_place_are_refused(kinds):
  with pytest.raises(ValueError, match="tools: 1 given.*system message"):
    loss_mask.masked_tokens(kinds["distill_qwen"][1], [USER], TOOLS)
