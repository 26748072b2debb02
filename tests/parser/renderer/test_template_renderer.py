"""Renderers by chat templates against transformers, family by family."""

import importlib
import random
import sys

import chat_families
import numpy as np
from PIL import Image
import pytest
import transformers
import trials
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import guard as guard_lib
from tunix.rl.multi_turn.parser.renderer import template

FAMILIES = list(chat_families.FAMILIES.values())
BY_NAME = [pytest.param(family, id=family.name) for family in FAMILIES]
# All of 1,000 conversations a family in `make test-all`.
CONVERSATIONS = 1000 if trials.share() >= 1 else 30


def talks(family, words=chat_families.WORDS):
  for seed in range(CONVERSATIONS):
    yield chat_families.Talk(family, random.Random(seed), words)


@pytest.mark.parametrize("family", BY_NAME)
def test_random_conversations_render_as_transformers_renders_them(family):
  renderer = chat_families.renderer(family)
  for talk in talks(family):
    messages, tools = talk.history(), talk.tools()
    prompt = talk.random.random() < 0.8
    got = renderer.render(messages, prompt, tools=tools)
    ids, spans = chat_families.expected(family, messages, tools, prompt)
    assert got.tokens.tolist() == ids, messages
    assert got.images == spans


REASONING = ("reasoning before a user message",)
# A prompt ends in "Assistant:", and an answer in it begins with a space.
SPACED = tuple(
  f"{kind} before a {role} message"
  for kind in ("reasoning", "answers")
  for role in ("user", "tool")
)
REWRITES = {
  "qwen3_vl_thinking": REASONING,
  "qwen3": REASONING,
  "qwen3_5": REASONING,
  # The empty block of reasoning is in the prompt only.
  "qwen3_off": (
    *REASONING,
    "reasoning before a tool message",
    "answers before a user message",
    "answers before a tool message",
  ),
  "mistral": (
    "the system prompt before a user message",
    "tools before a user message",
  ),
  "pixtral": ("the system prompt before a user message",),
  "deepseek": (*REASONING, "reasoning before a tool message"),
  "glm_v": REASONING,
  "smolvlm": SPACED,
  "idefics3": SPACED,
}


@pytest.mark.parametrize("family", BY_NAME)
def test_what_a_template_rewrites_is_known(family):
  renderer = chat_families.renderer(family)
  assert renderer.rewrites == REWRITES.get(family.name, ())


@pytest.mark.parametrize("family", BY_NAME)
def test_bridges_extend_token_for_token(family):
  """prompt + sampled + bridge is the longer history's rendering, unless the
  template writes earlier turns anew; the bridge is the template's always."""
  renderer = chat_families.renderer(family)
  extended = rewritten = 0
  for talk in talks(family):
    history = talk.history(1)
    # Their system prompt moves to the last user.
    if family.name in ("mistral", "pixtral"):
      history = [m for m in history if m["role"] != "system"]
    answer = 'so "be" it' + talk.random.choice(["", "?", " 漢字", "\n  yes"])
    if family.reasons:
      answer = f"<think>\nhm, {talk.random.random()}\n</think>\n\n{answer}"
    new = talk.next_messages()
    prompt = renderer.render(history)
    start = prompt.tokens.tolist()
    last = renderer.render(
      [*history, {"role": "assistant", "content": answer}],
      add_generation_prompt=False,
    ).tokens.tolist()
    sampled = renderer.encode(answer).tolist()
    if last[: len(start)] == start:  # As the template writes it there.
      sampled = last[len(start) :]
      if renderer.end_of_turn_id in sampled:
        sampled = sampled[: sampled.index(renderer.end_of_turn_id)]
    bridge = renderer.bridge(new, last_sampled_is_eot=True)
    cut = renderer.bridge(new, last_sampled_is_eot=False)
    end = int(cut.tokens[0])
    assert end in renderer.stop_token_ids
    assert cut.tokens[1:].tolist() == bridge.tokens.tolist()
    sampled.append(end)
    text = renderer.decode(sampled)
    want = renderer.render(
      [*history, {"role": "assistant", "content": text}, *new]
    )
    assert want.tokens[-len(bridge) :].tolist() == bridge.tokens.tolist()
    if [*start, *sampled, *bridge.tokens] == want.tokens.tolist():
      extended += 1
      shift = len(start) + len(sampled)
      assert want.images == prompt.images + tuple(
        span.shifted(shift) for span in bridge.images
      )
    else:
      rewritten += 1
      has_user = any(message["role"] == "user" for message in new)
      before = "user" if has_user else "tool"
      assert any(
        r.endswith(f"before a {before} message") for r in renderer.rewrites
      ), (text, new)
  # Reasoning survives behind results of tools.
  most = CONVERSATIONS * (0.4 if family.reasons else 0.9)
  all_anew = family.tiles or family.name == "qwen3_off"
  assert extended >= (0 if all_anew else most / 4)
  if not renderer.rewrites:
    assert not rewritten


HOSTILE = {
    family.name: (
        *family.special, *family.plain, "<|im_end|>", "<|im_start|>",
        "<|image_pad|>", "<|im_", "end|>", "<", "|im_end|>", "im_end|>", "|",
        "<s", ">", "[INST", "INST]", "</think>", "<think>", "\n", " ", "a",
        "\ue000", "<|image|>", "user",
    )
    for family in FAMILIES
}  # fmt: skip


def structure_of(renderer, tokens):
  return [t for t in tokens.tolist() if t in set(renderer._ids.values())]


@pytest.mark.parametrize("family", BY_NAME)
def test_text_never_becomes_a_token_of_the_structure(family):
  """The structural tokens are those of the same talk with harmless texts."""
  renderer = chat_families.renderer(family)
  harmless = tuple(f"w{number} " for number in range(10_000))
  for talk in talks(family, HOSTILE[family.name]):
    seed = talk.random.randrange(1 << 30)
    shown = []
    for words in (HOSTILE[family.name], harmless):
      same = chat_families.Talk(family, random.Random(seed), words)
      # One word each, so that both talks draw the same numbers.
      same.text = lambda least=0, same=same, words=words: "".join(
        words[same.random.randrange(1 << 20) % len(words)] for _ in range(3)
      )
      messages, tools = same.history(2), same.tools()
      for message in messages:
        if message["role"] == "assistant":
          message["content"] = "fine"  # A policy may write calls.
      prompt = renderer.render(messages, tools=tools)
      bridge = renderer.bridge([same.user()], last_sampled_is_eot=False)
      shown.append(
        (
          structure_of(renderer, prompt.tokens),
          structure_of(renderer, bridge.tokens),
        )
      )
    assert shown[0] == shown[1], messages


def test_a_covered_text_is_given_back_exactly():
  rng = random.Random(0)
  tokens = ["<|im_end|>", "<s>", "</s>", "[INST]"]
  guard = guard_lib.Guard(tokens, ["\n<", "["], ["[INST]"])
  words = [*tokens, "<", "[", "|im", "INST]", "s>", " ", "</think>", "\ue000"]
  for _ in range(500):
    text = "".join(rng.choices(words, k=rng.randint(0, 6)))
    for assistant in (False, True):
      assert guard.uncover(guard.cover(text, assistant)) == text
  assert "</think>" in guard.cover("<s></think>")
  assert guard.cover_all({"<s>": ["</s>", 1, None]}).keys() != {"<s>"}


def test_what_a_template_would_leave_out_is_refused():
  qwen3_vl = chat_families.renderer(chat_families.FAMILIES["qwen3_vl"])
  user = {"role": "user", "content": "x"}
  with pytest.raises(ValueError, match="message 1 is a system message"):
    qwen3_vl.render([user, {"role": "system", "content": "late"}])
  with pytest.raises(ValueError, match="message 0 is a system message"):
    qwen3_vl.bridge(
      [{"role": "system", "content": "late"}], last_sampled_is_eot=True
    )
  text_only = chat_families.renderer(chat_families.FAMILIES["qwen3"])
  talk = chat_families.Talk(
    chat_families.FAMILIES["qwen3_vl"], random.Random(0)
  )
  sighted = next(
    message
    for message in iter(talk.user, None)
    if any("image" in part for part in message["content"])
  )
  with pytest.raises(ValueError, match="message 1: an image"):
    text_only.render([user, sighted])
  with pytest.raises(ValueError, match="no JSON object"):
    text_only.render(
      [
        {
          "role": "assistant",
          "content": "",
          "tool_calls": [{"name": "f", "arguments": "[1"}],
        }
      ]
    )


CHATML = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
LOOP = "{%- for m in messages %}" + CHATML + "{%- endfor %}"
PROMPT = (
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
  "source, why",
  [
    ("{%- for", "no Jinja"),
    ("{{- raise_exception('never') }}", "refuses a conversation"),
    (LOOP.replace("<|im_end|>", "###") + PROMPT, "without a token"),
    (LOOP + PROMPT + "{{- messages | length }}", "different tokens behind"),
    (
      LOOP.replace("m.content", "('' if m.role == 'assistant' else m.content)")
      + PROMPT,
      "leaves out an assistant",
    ),
  ],
)
def test_a_template_that_no_conversation_can_continue_is_refused(source, why):
  tokenizer = chat_families.tokenizer(chat_families.FAMILIES["qwen3"])
  with pytest.raises(ValueError, match=why):
    template.TemplateRenderer(
      tokenizer.backend_tokenizer,
      chat_families.image_tokens,
      chat_template.ChatTemplate(source),
    )


@pytest.mark.parametrize(
  "name, options, ending",
  [
    ("qwen3", {}, "assistant\n"),
    ("qwen3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    ("qwen3_vl", {}, "assistant\n"),
    ("qwen3_vl_thinking", {}, "assistant\n<think>\n"),
    ("qwen3_5", {}, "assistant\n<think>\n"),
    (
      "qwen3_5",
      {"enable_thinking": False},
      "assistant\n<think>\n\n</think>\n\n",
    ),
  ],
)
def test_how_a_family_asks_for_reasoning(name, options, ending):
  family = chat_families.FAMILIES[name]
  renderer = template.TemplateRenderer(
    chat_families.tokenizer(family).backend_tokenizer,
    chat_families.image_tokens,
    chat_template.ChatTemplate(chat_families.source(family), {}, options),
  )
  messages = [{"role": "user", "content": "hi"}]
  text = renderer.decode(renderer.render(messages).tokens)
  assert text.endswith("<|im_start|>" + ending)
  bridge = renderer.bridge(messages, last_sampled_is_eot=True)
  assert renderer.decode(bridge.tokens).endswith("<|im_start|>" + ending)


def test_reasoning_stays_while_tools_answer_and_goes_with_the_next_question():
  family = chat_families.FAMILIES["qwen3_vl_thinking"]
  renderer = chat_families.renderer(family)
  messages = [{"role": "user", "content": "go"}]
  prompt = renderer.render(messages)
  text = "hm\n</think>\n\nnow"
  sampled = [*renderer.encode(text), renderer.end_of_turn_id]
  answer = {"role": "assistant", "content": text}
  for role, stays in (("tool", True), ("user", False)):
    new = [{"role": role, "content": "done"}]
    bridge = renderer.bridge(new, last_sampled_is_eot=True)
    tokens = [*prompt.tokens, *sampled, *bridge.tokens]
    want = renderer.render([*messages, answer, *new]).tokens.tolist()
    assert (tokens == want) is stays
    assert "hm" in renderer.decode(tokens)  # The sampled tokens, in any case.


def test_the_default_system_prompt_is_the_templates():
  family = chat_families.FAMILIES["qwen2_5_vl"]
  renderer = chat_families.renderer(family)
  user = {"role": "user", "content": "hi"}
  text = lambda *m: renderer.decode(renderer.render(list(m)).tokens)
  assert text(user).startswith(
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
  )
  own = text({"role": "system", "content": "Be brief."}, user)
  assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_frames_of_images_are_those_of_transformers_processor():
  """Gemma 3's own processor, images and all, on several turns."""
  family = chat_families.FAMILIES["gemma_vl"]
  fast_tokenizer = chat_families.tokenizer(family)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=fast_tokenizer.backend_tokenizer,
    bos_token="<bos>",
    extra_special_tokens={
      "image_token": "<image_soft_token>",
      "boi_token": "<start_of_image>",
      "eoi_token": "<end_of_image>",
    },
  )
  count = 5
  processor = transformers.Gemma3Processor(
    transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28}),
    tokenizer,
    chat_template=chat_families.source(family),
    image_seq_length=count,
  )
  renderer = chat_families.renderer(family).counting(lambda w, h: count)
  checked = 0
  for seed in range(20):
    messages = chat_families.Talk(family, random.Random(seed)).history()
    plain, pictures = [], []
    for message in messages:
      parts = message["content"]
      if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
      pictures += [p["image"] for p in parts if p["type"] == "image"]
      plain.append(
        {
          **message,
          "content": [
            {"type": "image"} if part["type"] == "image" else part
            for part in parts
          ],
        }
      )
    text = processor.apply_chat_template(
      plain, tokenize=False, add_generation_prompt=True
    )
    shown = [Image.new("RGB", (28, 28)) for _ in pictures]
    ids = processor(text=text, images=shown or None, add_special_tokens=False)[
      "input_ids"
    ]
    ids = ids[0] if isinstance(ids[0], (list, tuple)) else ids
    got = renderer.render(messages)
    assert got.tokens.tolist() == list(ids), messages
    assert [span.image for span in got.images] == pictures
    for span in got.images:
      run = got.tokens[span.offset : span.offset + span.num_tokens]
      assert span.num_tokens == count
      assert set(run.tolist()) == {renderer.image_token_id}
    checked += len(pictures)
  assert checked > 20


_PIXTRAL = "transformers.models.pixtral"


def test_rows_of_images_are_those_of_transformers_processor(monkeypatch):
  """Pixtral's own processor, images and all, on several turns."""
  pil = importlib.import_module(f"{_PIXTRAL}.image_processing_pil_pixtral")
  # It imports one function of the module for torchvision; this one has it.
  monkeypatch.setitem(sys.modules, pil.__name__.replace("_pil_", "_"), pil)
  processing = importlib.import_module(f"{_PIXTRAL}.processing_pixtral")
  family = chat_families.FAMILIES["pixtral"]
  processor = processing.PixtralProcessor(
    pil.PixtralImageProcessorPil(
      size={"longest_edge": 40}, patch_size={"height": 4, "width": 4}
    ),
    chat_families.tokenizer(family),
    patch_size=4,
    spatial_merge_size=2,
    chat_template=chat_families.source(family),
  )

  def rows(width, height):
    size = pil.get_resize_output_image_size(
      np.zeros((height + 4, width + 4, 3)), (40, 40), (8, 8)
    )
    return size[0] // 8, size[1] // 8

  renderer = chat_families.renderer(family).counting(rows)
  checked = 0
  for talk in talks(family):
    messages = talk.history()
    plain, pictures = [], []
    for message in messages:
      parts = message["content"]
      if not isinstance(parts, str):
        pictures += [p["image"] for p in parts if p["type"] == "image"]
        parts = [
          {"type": "image"} if part["type"] == "image" else part
          for part in parts
        ]
      plain.append({**message, "content": parts})
    text = processor.apply_chat_template(
      plain, tokenize=False, add_generation_prompt=True
    )
    shown = [  # Sides of 3 or less would be taken for channels.
      Image.new("RGB", (p.width + 4, p.height + 4)) for p in pictures
    ]
    ids = processor(
      text=[text], images=shown or None, add_special_tokens=False
    )["input_ids"]
    ids = [int(token) for token in ids[0]]
    got = renderer.render(messages)
    assert got.tokens.tolist() == ids, messages
    assert [span.image for span in got.images] == pictures
    assert renderer.prompt_of_tokens(ids, pictures).images == got.images
    checked += sum(span.num_tokens > span.row for span in got.images)
  assert checked > 10


def test_rows_are_refused_where_a_policy_takes_one_run():
  family = chat_families.FAMILIES["pixtral"]
  renderer = chat_families.renderer(family).counting(lambda w, h: 4)
  assert len(renderer.render([{"role": "user", "content": "hi"}]))
  image = trajectory.ImageRef("0" * 64, 8, 8)
  parts = [{"type": "image", "image": image}]
  with pytest.raises(ValueError, match="rows of '.IMG.' with '.IMG_BREAK.'"):
    renderer.render([{"role": "user", "content": parts}])
