"""Holds the system prompts by name, as templates.

A template is text; `insert_tools` puts the tool parser's prompt in the place of
`$tools_prompt`.
"""

from __future__ import annotations

from tunix.rl.multi_turn.core import registry

TOOLS_FIELD = "$tools_prompt"

_PROMPTS: registry.Registry[str] = registry.Registry(
  "system prompt", paths=False
)
_PROMPT_TEXTS: dict[str, str] = {
  "tool": """You solve tasks with the help of tools. Call tools until you \
know the answer, then give it in plain text without a call.

$tools_prompt""",
  "math": """You solve mathematical problems. Think first, use the tools for \
every calculation, and give the final number alone in plain text.

$tools_prompt""",
  "desktop": """You operate a computer for the user. After every action you \
see a new screenshot. Look at it, write one short sentence about what to do \
next, then make one tool call.

- Aim at the middle of what you click, press or drag.
- Look whether your last action had its effect before you go on.
- When the task is done, or when it cannot be done, call the terminate action.

$tools_prompt""",
  "desktop_compact": """You see a computer's screen. Do what the user asks, \
one tool call each turn.
$tools_prompt""",
  "assistant": """You are a helpful assistant.

$tools_prompt""",
  "qwen3_vl_computer_use": """$tools_prompt

# Response format

Answer each step in this order:
1) Action: one short imperative sentence about what to do in the UI.
2) One <tool_call>...</tool_call> block that holds the JSON alone.

Write nothing else. To finish, call action=terminate.""",
  "qwen3_vl_mobile_use": """$tools_prompt

# Response format

Answer each step in this order:
1) Thought: one sentence about the next move.
2) Action: one short imperative sentence about what to do in the UI.
3) One <tool_call>...</tool_call> block that holds the JSON alone.

Write nothing else. To finish, call action=terminate.""",
  "ui_tars": """You are a GUI agent. You get a task and your earlier \
actions, with screenshots, and make the next action of the task.

$tools_prompt

## Note
- Use English in `Thought`.
- In `Thought`, plan briefly and end with one sentence that names the next \
action and its target.""",
  "mobile": """You operate a phone for the user. After every action you see \
a new screenshot. Write one short sentence about what to do next, then make \
one tool call. When the task is done, or when it cannot be done, call the \
terminate action.

$tools_prompt""",
}


def register_prompt(name: str, template: str) -> None:
  """Adds a template.

  Raises:
    ValueError: the name is taken, or the template is not text.
  """
  if not isinstance(template, str):
    raise ValueError(
      f"prompt {name!r} must be a str, got {type(template).__name__}"
    )
  _PROMPTS.register(name, template)


def get_prompt(name: str) -> str:
  """Returns the template of that name.

  Raises:
    ValueError: unknown; the message names the nearest one.
  """
  return _PROMPTS.get(name)


def prompt_names() -> tuple[str, ...]:
  return _PROMPTS.names()


def insert_tools(text: str, tools_prompt: str) -> str:
  """`text` with the tool prompt at its mark, or else at the end."""
  if TOOLS_FIELD in text:
    return text.replace(TOOLS_FIELD, tools_prompt).strip()
  return "\n\n".join(part for part in (text, tools_prompt) if part)


for _name, _text in _PROMPT_TEXTS.items():
  register_prompt(_name, _text)
