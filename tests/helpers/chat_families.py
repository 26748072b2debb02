"""Tokenizers of model families and random conversations for their templates.

Set TUNIX_CHAT_TEMPLATES to a directory of published templates
(`<family>.jinja`) to test those in place of `chat_templates`.
"""

import dataclasses
import functools
import json
import os
import pathlib
import random

import chat_templates
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers
import train_tokenizer
import transformers
from transformers.models.smolvlm import processing_smolvlm
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import template


@dataclasses.dataclass(frozen=True)
class Family:
  """The tokenizer and the template of a family.

  Attributes:
    name: key of `chat_templates.TEMPLATES`.
    special, plain: added tokens that are special, and that are not.
    roles: variables of its template for special tokens.
    images, tools, results: whether it takes them.
    calls: tool calls a message may have.
    system: "first" or "any": where system messages may come.
    seen_results: results of tools may hold images.
    alternates: users and assistants must.
    sentencepiece: the tokenizer puts spaces before texts.
    options: variables of the template.
    reasons: answers begin with reasoning.
    template: key of `chat_templates.TEMPLATES`, if another one.
    rows: images are rows of placeholders with breaks between.
    tiles: images are tiles of placeholders; contents must be lists of parts.
  """

  name: str
  special: tuple[str, ...] = ()
  plain: tuple[str, ...] = ()
  roles: tuple[tuple[str, str], ...] = ()
  images: bool = False
  tools: bool = True
  results: bool = True
  calls: int = 2
  system: str = "any"
  seen_results: bool = True
  alternates: bool = False
  sentencepiece: bool = False
  options: tuple[tuple[str, object], ...] = ()
  reasons: bool = False
  template: str = ""
  rows: bool = False
  tiles: bool = False


_LLAMA = (
  "<|begin_of_text|>",
  "<|start_header_id|>",
  "<|end_header_id|>",
  "<|eot_id|>",
  "<|python_tag|>",
)
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>",
)  # fmt: skip
_SMOLVLM = (
  "<fake_token_around_image>",
  "<image>",
  "<end_of_utterance>",
  "<global-img>",
  "<row_1_col_1>",
  "<row_1_col_2>",
  "<row_2_col_1>",
  "<row_2_col_2>",
)
_TILES = {"tools": False, "results": False, "images": True, "tiles": True}
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5"),
        Family("qwen2_5_vl", images=True, tools=False, calls=0),
        Family("qwen3_vl", images=True, system="first"),
        Family("qwen3_vl_thinking", images=True, reasons=True),
        Family("qwen3", reasons=True),
        Family(
            "qwen3_off", options=(("enable_thinking", False),),
            template="qwen3",
        ),
        Family("qwen3_5", images=True, system="first", reasons=True),
        Family("qwen3_coder"),
        Family(
            "llama3", _LLAMA, roles=(("bos_token", _LLAMA[0]),), calls=1,
            options=(("date", "26 Jul 2024"),),
        ),
        Family(
            "mistral", _MISTRAL, system="first", sentencepiece=True,
            alternates=True,
            roles=(("bos_token", "<s>"), ("eos_token", "</s>")),
        ),
        Family(
            "pixtral",
            ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]",
             "[IMG_END]"),
            tools=False, results=False, calls=0, system="first",
            alternates=True, images=True, rows=True,
            roles=(("bos_token", "<s>"), ("eos_token", "</s>")),
        ),
        Family(
            "deepseek", (_BEGIN, _END), _DEEPSEEK,
            roles=(("bos_token", _BEGIN),), system="first",
        ),
        Family(
            "gemma", ("<bos>", "<start_of_turn>", "<end_of_turn>"),
            roles=(("bos_token", "<bos>"),), tools=False, results=False,
            calls=0, system="first", alternates=True, sentencepiece=True,
        ),
        Family(
            "gemma_vl",
            ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
             "<image_soft_token>", "<end_of_image>"),
            roles=(("bos_token", "<bos>"),), tools=False, results=False,
            calls=0, system="first", alternates=True, sentencepiece=True,
            images=True,
        ),
        Family("smolvlm", _SMOLVLM, calls=0, **_TILES),
        # Rows and columns of tiles are text to this tokenizer.
        Family(
            "idefics3", _SMOLVLM[:3], calls=0, template="smolvlm", **_TILES
        ),
        Family(
            "glm_v", _GLM, images=True, system="first", reasons=True,
            seen_results=False,
        ),
    )
}  # fmt: skip


def source(family):
  given = os.environ.get("TUNIX_CHAT_TEMPLATES")
  name = family.template or family.name
  file = pathlib.Path(given or ".") / f"{name}.jinja"
  if given and file.is_file():
    return file.read_text(encoding="utf-8")
  return chat_templates.TEMPLATES[name]


def image_tokens(width, height):
  return (width + height) % 7 + 1


def image_tiles(width, height):
  """(rows, columns, placeholders of a tile)."""
  rows = height % 3
  return rows, rows and width % 3 + 1, 3


def image_rows(width, height):
  """(rows, placeholders of a row)."""
  return height % 3 + 1, width % 4 + 1


@functools.cache
def _bytes():
  return tokenizers.Tokenizer.from_file(
    str(
      pathlib.Path(__file__).parents[2]
      / "tunix/rl/multi_turn/policy/data/tiny_vl/tokenizer.json"
    )
  )


@functools.cache
def _pieces():
  """A byte-fallback BPE over text with marked spaces, as SentencePiece's."""
  learned = tokenizers.Tokenizer(models.BPE())
  learned.pre_tokenizer = pre_tokenizers.Metaspace(
    prepend_scheme="first", split=False
  )
  learned.train_from_iterator(
    list(train_tokenizer.corpus())[:300],
    trainers.BpeTrainer(vocab_size=900, show_progress=False),
  )
  model = json.loads(learned.to_str())["model"]
  fixed = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
  made = tokenizers.Tokenizer(
    models.BPE(
      vocab={piece: i for i, piece in enumerate([*fixed, *model["vocab"]])},
      merges=[tuple(merge) for merge in model["merges"]],
      byte_fallback=True,
      unk_token="<unk>",
      fuse_unk=True,
    )
  )
  made.pre_tokenizer = learned.pre_tokenizer
  made.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return made


@functools.cache
def tokenizer(family):
  """transformers' tokenizer of a family, with its template."""
  begun = _pieces() if family.sentencepiece else _bytes()
  made = tokenizers.Tokenizer.from_str(begun.to_str())
  made.add_special_tokens(
    [
      tokenizers.AddedToken(t, normalized=False, special=True)
      for t in family.special
    ]
  )
  made.add_tokens(
    [
      tokenizers.AddedToken(t, normalized=False, special=False)
      for t in family.plain
    ]
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=made,
    clean_up_tokenization_spaces=False,
    chat_template=source(family),
    **dict(family.roles),
  )


@functools.cache
def renderer(family):
  return template.TemplateRenderer(
    tokenizer(family).backend_tokenizer,
    image_tiles
    if family.tiles
    else image_rows
    if family.rows
    else image_tokens,
    chat_template.ChatTemplate(
      source(family), dict(family.roles), dict(family.options)
    ),
  )


# --- conversations ------------------------------------------------------------

WORDS = (
    "\n", "\n\n", " ", "  \n", "Click", " the", '"OK"', "[512, 300]", "1, 2",
    "é", "e\u0301", "🙂", "user", "assistant\n", "<|", "|>", "\r\n", "\t", "[",
    "<", "</", "im_end", "<b>", "漢字", "\\n", "'",
)  # fmt: skip


@dataclasses.dataclass
class Talk:
  """Random messages of a family; `words` are what texts are made of."""

  family: Family
  random: random.Random
  words: tuple[str, ...] = WORDS

  def text(self, least=0):
    count = self.random.randint(least, 5)
    return "".join(self.random.choice(self.words) for _ in range(count))

  def content(self, images=True):
    images = images and self.family.images
    if not images or self.random.random() < 0.4:
      return self.text()
    parts = []
    for _ in range(self.random.randint(1, 3)):
      if self.random.random() < 0.5:
        digit = self.random.randrange(16)
        image = trajectory.ImageRef(
          format(digit, "x") * 64,
          self.random.randint(1, 50),
          self.random.randint(1, 50),
        )
        parts.append({"type": "image", "image": image})
      else:
        parts.append({"type": "text", "text": self.text()})
    return parts

  def arguments(self):
    made = {}
    for _ in range(self.random.randint(0, 3)):
      key = "".join(self.random.choices("abc_", k=self.random.randint(1, 4)))
      made[key] = self.random.choice(
        [7, "x", self.text(), [1, 2], {"b": self.text()}, None, True, 0.5]
      )
    return made

  def system(self):
    return {"role": "system", "content": self.text()}

  def user(self):
    return {"role": "user", "content": self.content()}

  def assistant(self, thought=True):
    text = self.text()
    if thought and self.random.random() < 0.3:
      text = f"<think>\n{self.text()}\n</think>\n\n{text}"
    made = {"role": "assistant", "content": text}
    if self.family.calls and self.random.random() < 0.4:
      made["tool_calls"] = [
        {
          "type": "function",
          "id": f"call{number}{self.random.randint(1000, 9999)}",
          "function": {"name": "do_it", "arguments": self.arguments()},
        }
        for number in range(self.random.randint(1, self.family.calls))
      ]
    return made

  def results(self, message):
    return [
      {
        "role": "tool",
        "content": self.content(self.family.seen_results),
        "tool_call_id": call["id"],
      }
      for call in message.get("tool_calls", ())
    ]

  def next_messages(self):
    """Texts that may follow an answer without calls."""
    if self.family.alternates or self.random.random() < 0.7:
      return [self.user()]
    if self.family.system == "any" and self.random.random() < 0.2:
      return [self.system(), self.user()]
    if self.family.results:
      result = {"role": "tool", "tool_call_id": "call12345"}
      return [
        {**result, "content": self.content(self.family.seen_results)}
        for _ in range(self.random.randint(1, 2))
      ]
    return [self.user()]

  def history(self, turns=3):
    """Messages that end where an assistant answers."""
    found = [self.system()] if self.random.random() < 0.5 else []
    found.append(self.user())
    for _ in range(self.random.randint(0, turns)):
      said = self.assistant()
      found.append(said)
      if self.family.results and said.get("tool_calls"):
        found += self.results(said)
        if not self.family.alternates and self.random.random() < 0.5:
          found.append(self.user())
      else:
        found.append(self.user())
    return found

  def tools(self):
    if not self.family.tools or self.random.random() < 0.5:
      return None
    properties = {
      "".join(self.random.choices("abc_", k=3)): {
        "type": "string",
        "description": self.text(),
      }
      for _ in range(self.random.randint(0, 2))
    }
    return [
      {
        "type": "function",
        "function": {
          "name": f"f{number}",
          "description": self.text(),
          "parameters": {"type": "object", "properties": properties},
        },
      }
      for number in range(self.random.randint(1, 2))
    ]


def expected(family, messages, tools=None, add_generation_prompt=True):
  """(ids, spans) by transformers, placeholders expanded by hand."""
  plain, images = [], []
  for message in messages:
    content = message["content"]
    if isinstance(content, list):
      images += [p["image"] for p in content if p["type"] == "image"]
      content = [
        {"type": "image"} if part["type"] == "image" else part
        for part in content
      ]
    elif family.tiles:
      content = [{"type": "text", "text": content}]
    plain.append({**message, "content": content})
  made = tokenizer(family)
  text = made.apply_chat_template(
    plain,
    tools=tools,
    tokenize=False,
    add_generation_prompt=add_generation_prompt,
    **dict(family.options),
  )
  placeholders = [*template.PLACEHOLDERS, "<image_soft_token>"]
  if family.name == "gemma_vl":  # As Gemma3Processor, of one vision token.
    text = text.replace(
      "<start_of_image>",
      "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    )
  if family.tiles:
    return _tiled(made, text, images)
  if family.rows:
    text = text.replace("[IMG]", "[IMG][IMG_END]")
    placeholders.append("[IMG]")
  pads = [made.convert_tokens_to_ids(t) for t in placeholders]
  ids, spans = [], []
  for token in made.encode(text, add_special_tokens=False):
    if token in pads and token != made.unk_token_id:
      image, row = images[len(spans)], 0
      run = [token] * image_tokens(image.width, image.height)
      if family.rows:
        rows, row = image_rows(image.width, image.height)
        line = "[IMG]" * row
        run = made.convert_tokens_to_ids(
          made.tokenize("[IMG_BREAK]".join([line] * rows))
        )
      spans.append(trajectory.ImageSpan(image, len(ids), len(run), row))
      ids += run
    else:
      ids.append(token)
  assert len(spans) == len(images)
  return ids, tuple(spans)


def _tiled(encoder, text, images):
  """As SmolVLM's processor writes images."""
  sizes = [image_tiles(image.width, image.height) for image in images]
  first, *later = text.split("<image>")
  assert len(later) == len(images)
  for size, behind in zip(sizes, later):
    first += (
      processing_smolvlm.get_image_prompt_string(
        *size, "<fake_token_around_image>", "<image>", "<global-img>"
      )
      + behind
    )
  ids = encoder.encode(first, add_special_tokens=False)
  at = np.flatnonzero(np.array(ids) == encoder.convert_tokens_to_ids("<image>"))
  spans = []
  for image, (rows, columns, count) in zip(images, sizes):
    own, at = np.split(at, [(rows * columns + 1) * count])
    spans.append(
      trajectory.ImageSpan(image, int(own[0]), int(own[-1] - own[0]) + 1, count)
    )
  return ids, tuple(spans)
