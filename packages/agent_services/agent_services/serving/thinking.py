"""Chooses the renderer of a prompt whose request switches reasoning.

A request asks by `chat_template_kwargs`, `reasoning_effort`, `reasoning` or
Anthropic's `thinking`; the switch is a variable of the policy's chat template.

Promises: a field that changes no prompt of the policy is reported as ignored,
one that does is not; answers of a session continue one another's tokens
wherever the template writes the same messages before them.

Does not read a policy's reasoning out of its answers: that is text.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Iterator

from tunix.rl.multi_turn.parser.renderer import choice

from agent_services.serving import errors
from agent_services.serving import requests

_SWITCHES = ("enable_thinking", "thinking")  # Of Qwen and GLM; of DeepSeek.
_EFFORT = "reasoning_effort"


@dataclasses.dataclass(frozen=True, eq=False)
class Rendering:
  """Rendering of a request's messages to tokens.

  Attributes:
    renderer: Renderer of the policy's chat template with the request's
      variables.
    apart: Text that distinguishes conversations which the variables write
      differently; "" where only the end of a prompt differs.
    acting: Fields that changed the prompt.
  """

  renderer: Any
  apart: str = ""
  acting: frozenset[str] = frozenset()


class Renderings:
  """The renderings of one policy, each made once. One event loop."""

  def __init__(self, renderer: choice.AnyRenderer):
    self._plain = Rendering(renderer)
    # Bounded: fields hold switches and levels only.
    self._made: dict[Any, Rendering] = {}

  @property
  def renderer(self) -> Any:
    return self._plain.renderer

  def of(self, request: requests.SamplingRequest) -> Rendering:
    """Returns the rendering that a request asks for.

    Raises:
      ApiError: naming the field that this policy cannot follow.
    """
    thinking = request.thinking
    if not request.template_options and thinking is None:
      return self._plain
    key = thinking, tuple(sorted(request.template_options.items()))
    if key not in self._made:
      self._made[key] = self._make(request)
    return self._made[key]

  def _make(self, request: requests.SamplingRequest) -> Rendering:
    own = self.renderer
    options: dict[str, Any] = {}
    fields: set[str] = set()
    for name, value, field in _asked(request):
      if own.changed_by({name: value}):
        options[name] = value
        fields.add(field)
      else:  # As the server has it.
        options.pop(name, None)
    if not options:
      self._check_needed(request.thinking)
      return self._plain
    try:
      renderer = own.with_options(options)
    except ValueError as error:
      field = min(fields)
      raise errors.invalid(
        field,
        f"{field}: this policy's chat template cannot be used so: {error};"
        f" leave {field} out",
        "unsupported_parameter",
      ) from None
    apart = ""
    if not own.writes_alike(renderer):
      apart = json.dumps(options, sort_keys=True)
    return Rendering(renderer, apart, frozenset(fields))

  def _check_needed(self, thinking: requests.Thinking | None) -> None:
    """Refuses to ask a policy for reasoning that never reasons."""
    if thinking is None or not thinking.needed or self.renderer.answer_prefix:
      return
    if any(self.renderer.changed_by({name: False}) for name in _SWITCHES):
      return  # It is switched on.
    raise errors.invalid(
      thinking.field,
      f"{thinking.field} is not supported by this policy, whose chat template"
      f" has no switch for reasoning; leave {thinking.field} out",
      "unsupported_parameter",
    )


def _asked(request: requests.SamplingRequest) -> Iterator[tuple[str, Any, str]]:
  """Yields (variable, value, field) of each, the most exact last."""
  thinking = request.thinking
  if thinking is not None:
    if thinking.on is not None:
      for name in _SWITCHES:
        yield name, thinking.on, thinking.field
    if thinking.effort is not None:
      yield _EFFORT, thinking.effort, thinking.field
  for name, value in request.template_options.items():
    yield name, value, f"chat_template_kwargs.{name}"
