"""Chat templates of model families, written here after the formats that the
families publish, at the width that tests need."""

import json

from tunix.rl.multi_turn.parser.tool_parser.formats import qwen as qwen_parser

_JSON_BEFORE, _JSON_AFTER = (
  json.dumps(words)
  for words in qwen_parser.QwenToolParser().get_tool_prompt("$").split("\n$\n")
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
    "{{- ('\\n\\n' if said.content | trim else '') if loop.first else '\\n' }}"
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
    "{%- else %}{{- " + json.dumps(default + "\n\n") + " }}" if default else ""
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
{{- '<|im_start|>system\\n' + show(messages[0].content) | trim }}
{{- '<|im_end|>\\n' }}{%- endif %}"""
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
  "qwen3": _chatml(_TEXT, _system(), True, "last", _JSON_CALL, _MAYBE_EMPTY),
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
  "pixtral": """\
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for m in said %}
{%- if m.role == 'user' %}
{{- '[INST]' + (system + '\\n\\n' if system and loop.last else '') }}
{%- if m.content is string %}{{- m.content }}
{%- else %}
{%- for part in m.content %}
{{- '[IMG]' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '[/INST]' }}
{%- elif m.role == 'assistant' %}
{{- m.content + eos_token }}
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
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' }}
{{- messages[0].content + '\\n\\n' if system and loop.first else '' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
  "gemma_vl": """\
{{- bos_token }}
{%- macro show(content) %}
{%- if content is string %}{{- content | trim }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<start_of_image>' }}
{%- else %}{{- part.text | trim }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set system = messages[0].role == 'system' %}
{%- set said = messages[1:] if system else messages %}"""
  + _ALTERNATE
  + """
{%- for m in said %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' }}
{{- show(messages[0].content) + '\\n\\n' if system and loop.first else '' }}
{{- show(m.content) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
  "smolvlm": """\
{{- '<|im_start|>' }}
{%- for m in messages %}
{{- m.role | capitalize }}
{{- ':' if m.content[0].type == 'image' else ': ' }}
{%- for part in m.content %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif part.type == 'image' %}{{- '<image>' }}{%- endif %}
{%- endfor %}
{{- '<end_of_utterance>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}""",
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
