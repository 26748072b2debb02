"""Chat templates of model families, their tokenizers and random conversations.

The templates are written here after the formats that the families publish, at
the width that tests need; set TUNIX_CHAT_TEMPLATES to a directory of published
ones (`<family>.jinja`) to test those in their place.
"""

import dataclasses
import functools
import json
import os
import pathlib
import random

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers
import transformers
from tunix.rl.multi_turn.commands import train_tokenizer
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import template
from tunix.rl.multi_turn.parser.tool_parser import qwen as qwen_parser

_JSON_BEFORE, _JSON_AFTER = (
    json.dumps(words)
    for words in qwen_parser.QwenToolParser()
    .get_tool_prompt("$")
    .split("\n$\n")
)
_SCHEMAS = (
    "{{- " + _JSON_BEFORE + " }}{%- for t in tools %}{{- '\\n' + (t | tojson)"
    " }}{%- endfor %}{{- '\\n' + " + _JSON_AFTER + " + '<|im_end|>\\n' }}"
)
_JSON_CALL = """\
{%- set f = call.function or call %}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}
{{- '}\\n</tool_call>' }}"""
_XML_CALL = """\
{%- set f = call.function or call %}
{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}
{%- for key, value in f.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- (value | tojson) if value is mapping or (value is sequence and value is \
not string) else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}"""
_PARTS = """\
{%- macro show(content) %}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
"""
_TEXT = "{%- macro show(content) %}{{- content }}{%- endmacro %}\n"
_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}{%- endif %}"""
_TURN = "{{- '<|im_start|>' + message.role + '\\n' }}"
# Index of the last message that a user wrote, results of tools aside.
_LAST_QUERY = """\
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
{%- if ns.open and m.role == 'user' %}{%- set c = show(m.content)%TRIM% %}
{%- if not (c.startswith('<tool_response>') and \
c.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = messages | length - loop.index %}
{%- endif %}{%- endif %}
{%- endfor %}"""


def _chatml(parts, system, later_system, thinking, call, ending, trim=""):
  """ChatML in one of Qwen's variants.

  `system`: the part that shows tools and the first system message.
  """
  reasoning = """\
{%- set said = namespace(content=content, thought='') %}
{%- if message.reasoning_content is string %}
{%- set said.thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set said.thought = content.split('</think>')[0].rstrip('\\n')\
.split('<think>')[-1].lstrip('\\n') %}
{%- set said.content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}"""
  if thinking == "always":  # Qwen3.5
    reasoning += """
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + said.thought | trim + '\\n</think>\\n\\n' }}{%- endif %}"""
  else:
    reasoning += """
{%- if loop.index0 > ns.last and (loop.last or said.thought) %}
{{- '<think>\\n' + said.thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- set said.content = said.content.lstrip('\\n') %}{%- endif %}"""
  if not thinking:
    reasoning = "{%- set said = namespace(content=content) %}"
  gap = (
      "{{- ('\\n\\n' if said.content | trim else '') if loop.first else '\\n'"
      " }}"
      if thinking == "always"
      else "{{- '\\n' if said.content or not loop.first else '' }}"
  )
  late = "" if later_system else " and message.role != 'system'"
  return (
      parts
      + system
      + (_LAST_QUERY.replace("%TRIM%", trim) if thinking else "")
      + "{%- for message in messages %}"
      "{%- set content = show(message.content)"
      + trim
      + " %}{%- if message.role == 'system' and loop.first %}"
      "{%- elif message.role == 'tool' %}"
      + _RESULT.replace("show(message.content)", "content")
      + "{%- elif message.role == 'assistant' %}"
      + _TURN
      + reasoning
      + "{{- said.content }}{%- for call in message.tool_calls or [] %}"
      + gap
      + call
      + "{%- endfor %}{{- '<|im_end|>\\n' }}"
      "{%- elif true"
      + late
      + " %}"
      + _TURN
      + "{{- content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
      "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
      + ending
      + "{%- endif %}"
  )


def _system(default="", tools=_SCHEMAS, trim=""):
  """The first system message, tools behind it."""
  with_default = (
      "{%- else %}{{- " + json.dumps(default + "\n\n") + " }}"
      if default
      else ""
  )
  plain = (
      "{%- elif not first %}{{- '<|im_start|>system\\n' + "
      + json.dumps(default)
      + " + '<|im_end|>\\n' }}"
      if default
      else ""
  )
  return (
      "{%- set first = messages[0].role == 'system' %}"
      "{%- if tools %}{{- '<|im_start|>system\\n' }}"
      "{%- if first %}{{- show(messages[0].content) + '\\n\\n' }}"
      + with_default
      + "{%- endif %}"
      + tools
      + plain
      + "{%- elif first %}"
      "{{- '<|im_start|>system\\n' + show(messages[0].content)"
      + trim
      + " + '<|im_end|>\\n' }}{%- endif %}"
  )


_XML_SYSTEM = """\
{%- set first = messages[0].role == 'system' %}
{%- if tools %}{{- '<|im_start|>system\\nYou may call:\\n<tools>' }}
{%- for t in tools %}{{- '\\n' + (t | tojson) }}{%- endfor %}
{{- '\\n</tools>' }}
{%- if first and show(messages[0].content) | trim %}
{{- '\\n\\n' + show(messages[0].content) | trim }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif first %}
{{- '<|im_start|>system\\n' + show(messages[0].content) | trim + '<|im_end|>\\n' \
}}{%- endif %}"""
_MAYBE_EMPTY = """\
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
_OPEN = "{{- '<think>\\n' }}"
_ALTERNATE = """\
{%- for m in said %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"""

TEMPLATES = {
    "qwen2_5": _chatml(
        _TEXT, _system("You are Qwen. You help."), True, "", _JSON_CALL, ""
    ),
    "qwen2_5_vl": _PARTS
    + """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) }}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "qwen3_vl": _chatml(_PARTS, _system(), False, "", _JSON_CALL, ""),
    "qwen3_vl_thinking": _chatml(
        _PARTS, _system(), True, "last", _JSON_CALL, _OPEN
    ),
    "qwen3": _chatml(
        _TEXT, _system(), True, "last", _JSON_CALL, _MAYBE_EMPTY
    ),
    "qwen3_5": _chatml(
        _PARTS,
        _XML_SYSTEM,
        False,
        "always",
        _XML_CALL,
        _MAYBE_EMPTY.replace("{%- endif", "{%- else %}" + _OPEN + "{%- endif"),
        trim=" | trim",
    ),
    "qwen3_coder": """\
{%- for message in messages %}
{%- if loop.first and (tools or message.role == 'system') %}
{{- '<|im_start|>system\\n' }}
{{- message.content if message.role == 'system' else 'You use tools.' }}
{%- if tools %}{{- '\\n\\n<tools>' }}{%- for t in tools %}
{{- '\\n<function>\\n<name>' ~ t.function.name ~ '</name>' }}
{%- for key in t.function.parameters.properties or {} %}
{{- '\\n<' ~ key ~ '>' ~ (t.function.parameters.properties[key] | tojson) \
~ '</' ~ key ~ '>' }}{%- endfor %}
{{- '\\n</function>' }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}
{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content | trim %}
{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
{%- for call in message.tool_calls %}{{- '\\n' }}"""
    + _XML_CALL
    + """{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "llama3": """\
{{- bos_token }}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDate: ' + date }}
{%- if messages[0].role == 'system' %}
{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in said %}
{%- if m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('one call at a time') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{{- '<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}
{{- 'Functions, called as {"name": name, "parameters": {}}:\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "mistral": """\
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- set asked = said | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in said %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system + '\\n\\n' if system and loop.last else '') }}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have 9') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('no such role') }}
{%- endif %}
{%- endfor %}""",
    "deepseek": """\
{%- set ns = namespace(asked=false, tool=false) %}
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}
{{- ('\\n\\n' if not loop.first else '') + m.content }}{%- endfor %}
{%- if tools %}{{- '\\n\\n## Tools\\n' + tools | tojson }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<｜User｜>' + m.content }}
{%- set ns.asked = true %}{%- set ns.tool = false %}
{%- elif m.role == 'assistant' %}
{%- if ns.asked %}{{- '<｜Assistant｜></think>' }}{%- endif %}
{{- m.content.split('</think>', 1)[-1] }}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- set ns.asked = false %}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- set ns.asked = false %}{%- set ns.tool = true %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}
{{- '<｜Assistant｜></think>' }}{%- endif %}""",
    "gemma": """\
{{- bos_token }}
{%- set system = messages[0].role == 'system' %}
{%- set said = messages[1:] if system else messages %}"""
    + _ALTERNATE
    + """
{%- for m in said %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- messages[0].content + '\\n\\n' if system and loop.first else '' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    "glm_v": """\
{{- '[gMASK]<sop>' }}
{%- macro show(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}
{{- '<|begin_of_image|><|image|><|end_of_image|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}{{- '<|system|>\\n# Tools\\n' + tools | tojson }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set c = show(m.content) %}
{%- set thought = '' %}
{%- if '</think>' in c %}
{%- set thought = c.split('</think>')[0].split('<think>')[-1] | trim %}
{%- set c = c.split('</think>')[-1] %}{%- endif %}
{{- '<|assistant|>\\n<think>' }}
{{- (thought if loop.index0 > ns.last else '') + '</think>' }}
{{- '\\n' + c | trim if c | trim else '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments | items %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + show(m.content) + '\\n</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + show(m.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}""",
}


@dataclasses.dataclass(frozen=True)
class Family:
  """What a family's tokenizer and template have.

  Attributes:
    name: key of TEMPLATES.
    special, plain: added tokens that are special, and that are not.
    roles: variables of its template for special tokens.
    images, tools, results: whether it takes them.
    calls: tool calls a message may have.
    system: "first" or "any": where system messages may come.
    alternates: users and assistants must.
    sentencepiece: the tokenizer puts spaces before texts.
    options: variables of the template.
    reasons: answers begin with reasoning.
    template: key of TEMPLATES, if another one.
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
  alternates: bool = False
  sentencepiece: bool = False
  options: tuple[tuple[str, object], ...] = ()
  reasons: bool = False
  template: str = ""


_LLAMA = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>",
)  # pyformat: disable
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # pyformat: disable
_DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # pyformat: disable
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>",
)  # pyformat: disable
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
        Family("glm_v", _GLM, images=True, system="first", reasons=True),
    )
}  # pyformat: disable


def source(family):
  given = os.environ.get("TUNIX_CHAT_TEMPLATES")
  name = family.template or family.name
  file = pathlib.Path(given or ".") / f"{name}.jinja"
  if given and file.is_file():
    return file.read_text(encoding="utf-8")
  return TEMPLATES[name]


def image_tokens(width, height):
  return (width + height) % 7 + 1


@functools.cache
def _bytes():
  return train_tokenizer.train(train_tokenizer.corpus(), vocab_size=2000)


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
  made.decoder = decoders.Sequence([
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
  ])
  return made


@functools.cache
def tokenizer(family):
  """transformers' tokenizer of a family, with its template."""
  begun = _pieces() if family.sentencepiece else _bytes()
  made = tokenizers.Tokenizer.from_str(begun.to_str())
  made.add_special_tokens([
      tokenizers.AddedToken(t, normalized=False, special=True)
      for t in family.special
  ])
  made.add_tokens([
      tokenizers.AddedToken(t, normalized=False, special=False)
      for t in family.plain
  ])
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
      image_tokens,
      chat_template.ChatTemplate(
          source(family), dict(family.roles), dict(family.options)
      ),
  )


# --- conversations ------------------------------------------------------------

WORDS = (
    "\n", "\n\n", " ", "  \n", "Click", " the", '"OK"', "[512, 300]", "1, 2",
    "é", "e\u0301", "🙂", "user", "assistant\n", "<|", "|>", "\r\n", "\t", "[",
    "<", "</", "im_end", "<b>", "漢字", "\\n", "'",
)  # pyformat: disable


@dataclasses.dataclass
class Talk:
  """Random messages of a family; `words` are what texts are made of."""

  family: Family
  random: random.Random
  words: tuple[str, ...] = WORDS

  def text(self, least=0):
    count = self.random.randint(least, 5)
    return "".join(self.random.choice(self.words) for _ in range(count))

  def content(self):
    if not self.family.images or self.random.random() < 0.4:
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
        {"role": "tool", "content": self.content(), "tool_call_id": call["id"]}
        for call in message.get("tool_calls", ())
    ]

  def next_messages(self):
    """What may come behind an answer without calls."""
    if self.family.alternates or self.random.random() < 0.7:
      return [self.user()]
    if self.family.system == "any" and self.random.random() < 0.2:
      return [self.system(), self.user()]
    if self.family.results:
      result = {"role": "tool", "tool_call_id": "call12345"}
      return [
          {**result, "content": self.content()}
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
        if self.random.random() < 0.5:
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
    plain.append({**message, "content": content})
  made = tokenizer(family)
  text = made.apply_chat_template(
      plain,
      tools=tools,
      tokenize=False,
      add_generation_prompt=add_generation_prompt,
      **dict(family.options),
  )
  pads = [made.convert_tokens_to_ids(t) for t in template.PLACEHOLDERS]
  ids, spans = [], []
  for token in made.encode(text, add_special_tokens=False):
    if token in pads and token != made.unk_token_id:
      image = images[len(spans)]
      count = image_tokens(image.width, image.height)
      spans.append(trajectory.ImageSpan(image, len(ids), count))
      ids += [token] * count
    else:
      ids.append(token)
  assert len(spans) == len(images)
  return ids, tuple(spans)
