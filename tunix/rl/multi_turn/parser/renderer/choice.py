"""Chooses the renderer of a policy.

`auto` renders by the checkpoint's own chat template. Where that gives what
`QwenRenderer` gives, as for the policies of this project, the latter is taken:
it is several times faster.

Does not read files: see `policy.checkpoints.policy_files.chat_template`.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import tokenizers
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import base_renderer
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.parser.renderer import template as template_lib

AnyRenderer = qwen.QwenRenderer | template_lib.TemplateRenderer
KINDS = ("auto", "qwen", "template")

_IMAGE = trajectory.ImageRef("0" * 64, 64, 64)
_TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "f",
      "description": "é <b>",
      "parameters": {"type": "object", "properties": {"a": {}}},
    },
  }
]
_CALLS = [
  {"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}},
  {"type": "function", "function": {"name": "g", "arguments": {}}},
]
_SYSTEM = {"role": "system", "content": " be brief\n"}
_USER = {"role": "user", "content": "\nhello "}
_SAID = {"role": "assistant", "content": " yes\n"}
_THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": _CALLS}
_CALLED_TOO = {"role": "assistant", "content": "so", "tool_calls": _CALLS}
_RESULT = {"role": "tool", "content": "<tool_response>1"}
_SEEN = {
  "role": "user",
  "content": [
    {"type": "image", "image": _IMAGE},
    {"type": "text", "text": "look"},
  ],
}
_SEEN_BY_TOOL = {**_SEEN, "role": "tool"}

_PROBES: Mapping[str, tuple[Sequence[Mapping[str, Any]], bool]] = {
  "a user message": ([_USER], False),
  "a system message": ([_SYSTEM, _USER], False),
  "an earlier answer": ([_USER, _SAID, _USER], False),
  "earlier reasoning": ([_USER, _THOUGHT, _USER], False),
  "reasoning before a result": ([_USER, _THOUGHT, _RESULT], False),
  "tool calls": ([_USER, _CALLED, _RESULT, _RESULT], False),
  "words before tool calls": ([_USER, _CALLED_TOO, _RESULT, _USER], False),
  "a screenshot": ([_SYSTEM, _SEEN, _SAID, _SEEN], False),
  "a screenshot of a tool": ([_USER, _SAID, _SEEN_BY_TOOL], False),
  "a later system message": ([_USER, _SAID, _SYSTEM, _USER], False),
  "tools": ([_USER], True),
  "tools and a system message": ([_SYSTEM, _USER], True),
}


def difference(
  one: base_renderer.TokenRenderer, other: base_renderer.TokenRenderer
) -> str:
  """Returns the first conversation that two renderers of a tokenizer render
  unequally.

  Returns:
    Its name and both texts from where they differ; "" for none.
  """
  # Whatever sizes of screenshots the policy takes.
  both: list[Any] = [one.counting(_two), other.counting(_two)]
  for name, (messages, tools) in _PROBES.items():
    options = {"tools": _TOOLS} if tools else {}
    shown = []
    for renderer in both:
      try:
        tokens = renderer.render(messages, **options).tokens.tolist()
        shown.append((tokens, ""))
      except ValueError as error:
        shown.append(([], f"refused: {error}"))
    (a, why), (b, why_not) = shown
    if a != b or bool(why) != bool(why_not):
      at = next(
        (i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))
      )
      begin = max(0, at - 2)
      texts = [
        reason or repr(one.decode(tokens[begin : begin + 12]))
        for tokens, reason in shown
      ]
      return f"{name}: {texts[0]} and {texts[1]}"
  return ""


def _two(width: int, height: int) -> int:
  del width, height
  return 2


def make_renderer(
  tokenizer: tokenizers.Tokenizer,
  num_image_tokens: Callable[[int, int], int],
  template: chat_template.ChatTemplate | None,
  kind: str = "auto",
) -> AnyRenderer:
  """Returns the renderer of a policy.

  Args:
    tokenizer: A `tokenizers.Tokenizer`.
    num_image_tokens: The policy's `Processor.num_image_tokens`.
    template: Template of the checkpoint; None where it has none.
    kind: "auto", "template" (the checkpoint's, or an error) or "qwen" (ChatML,
      whatever the checkpoint's template says).

  Raises:
    ValueError: naming what the template or the tokenizer lacks.
  """
  if kind not in KINDS:
    raise ValueError(f"must be one of {', '.join(KINDS)}; got {kind!r}")
  if kind == "template" and template is None:
    raise ValueError(
      "the policy has no chat template; put its chat_template.jinja beside"
      " its tokenizer.json, or choose auto"
    )
  lacking = [t for t in qwen.CHAT_TOKENS if tokenizer.token_to_id(t) is None]
  if template is None and lacking:
    raise ValueError(
      "the policy has no chat template, and its tokenizer no token"
      f" {lacking[0]!r} for ChatML; put the chat_template.jinja of its"
      " instruction-tuned model beside its tokenizer.json"
    )
  if kind == "qwen" or template is None:
    return qwen.QwenRenderer(tokenizer, num_image_tokens)
  try:
    own = template_lib.TemplateRenderer(tokenizer, num_image_tokens, template)
  except ValueError as error:
    raise ValueError(
      f"{error}; choose qwen to have ChatML in its place, which is not what"
      " the checkpoint was trained on"
    ) from None
  if kind == "auto" and not lacking:
    fast = qwen.QwenRenderer(tokenizer, num_image_tokens)
    if not difference(fast, own):
      return fast
  return own


def takes_options(renderer: base_renderer.TokenRenderer) -> bool:
  """Whether a template with options renders, and names each of them."""
  if not isinstance(renderer, template_lib.TemplateRenderer):
    return False
  template = renderer.template
  return set(template.options) <= template.variables()


def described(renderer: base_renderer.TokenRenderer) -> str:
  """Returns the renderer in words, for reports."""
  if not renderer.rewrites:
    return renderer.format_name
  return (
    f"{renderer.format_name}, which rewrites"
    f" {'; '.join(renderer.rewrites)} (sampled tokens stay)"
  )
