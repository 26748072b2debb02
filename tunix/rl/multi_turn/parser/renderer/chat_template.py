"""A checkpoint's own chat template: messages to text, by Jinja.

Promises: the text that transformers' `apply_chat_template` gives for the same
template, variables and messages. The template runs in Jinja's sandbox.

Does not tokenise, guard text against special tokens, or read files.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, Iterator, Mapping, Sequence

import jinja2
from jinja2 import ext
from jinja2 import meta
from jinja2 import nodes
from jinja2 import sandbox


class TemplateError(ValueError):
  """The template is no Jinja, or refuses what it is given."""


class _Generation(ext.Extension):
  """Tag `{% generation %}`, which marks an assistant's text and renders it."""

  tags = {"generation"}

  def parse(self, parser: Any) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(
  value: object,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _now
  return environment


class ChatTemplate:
  """A template with the variables that it is rendered with; thread-safe."""

  def __init__(
    self,
    source: str,
    special_tokens: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
  ):
    """Args:

      source: Text of the Jinja template.
      special_tokens: Special tokens of the tokenizer's configuration,
        "bos_token" and so on.
      options: Further variables, e.g. {"enable_thinking": False}.

    Raises:
      TemplateError: `source` is no Jinja.
    """
    self.source = source
    self.options = dict(options or {})
    self._variables = {**(special_tokens or {}), **self.options}
    self._environment = _environment()
    try:
      self._template = self._environment.from_string(source)
    except jinja2.TemplateError as error:
      raise TemplateError(f"the chat template is no Jinja: {error}") from None

  def text(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
  ) -> str:
    """Returns the text of a conversation.

    Args:
      messages: Messages in the form that the template takes.
      tools: OpenAI schemas.
      add_generation_prompt: Whether the text ends where an assistant answers.
      options: Variables in place of the template's own.

    Raises:
      TemplateError: the template refuses it, or fails on it.
    """
    try:
      return self._template.render(
        messages=messages,
        tools=list(tools) if tools else None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{**self._variables, **(options or {})},
      )
    except (
      ArithmeticError,
      AttributeError,
      LookupError,
      RecursionError,
      TypeError,
      ValueError,
      jinja2.TemplateError,
    ) as error:
      raise TemplateError(
        f"the chat template refuses the messages: {error}"
      ) from error

  def variables(self) -> set[str]:
    """Returns the names that the template reads and does not set itself."""
    return meta.find_undeclared_variables(self._environment.parse(self.source))

  def literals(self) -> Iterator[str]:
    """Texts that the template itself may write."""
    tree = self._environment.parse(self.source)
    for data in tree.find_all(nodes.TemplateData):
      yield data.data
    for constant in tree.find_all(nodes.Const):
      if isinstance(constant.value, str):
        yield constant.value
