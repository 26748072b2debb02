"""Base classes of tool parsers: one model family's text of tool calls.

A parser knows both directions, text to `ToolCall`s and `ToolCall`s to text, and
the prompt that explains the format. A GUI parser also knows its coordinate
convention and turns calls into `GuiAction`s in pixels and back.

Promises: for any text, parsing returns or raises `ToolParseError`, nothing
else, and the error carries the position of the fault. Lenient parsing (the
default) returns every well-formed call and reports the others in
`ParseResult.failures`; strict parsing raises at the first.

Does not: look at tools, run anything, or touch the prompt it made.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
import json
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory

ToolsSchema = str | Sequence[Mapping[str, Any]] | None
"""OpenAI tool schemas: a list of dicts, or the text to show as it is."""


class ToolParseError(ValueError):
  """The text holds a malformed tool call, or is not text.

  Attributes:
    position: offset in characters, from the start of the text, of what is
      wrong; None where there is no text.
  """

  def __init__(self, message: str, position: int | None = None):
    super().__init__(message)
    self.position = position


class GuiActionError(ToolParseError):
  """A well-formed call that is not a GUI action: unknown name, bad argument."""


class UnknownActionError(GuiActionError):
  """No tool, or no action of it, has the call's name."""


@dataclasses.dataclass(frozen=True)
class Resizing:
  """The size at which a model sees a screenshot.

  Attributes:
    factor: pixels of which both sides become multiples.
    min_pixels, max_pixels: bounds of the area.
  """

  factor: int
  min_pixels: int
  max_pixels: int


QWEN2_5_VL = Resizing(28, 4 * 28**2, 16384 * 28**2)
QWEN3_VL = Resizing(32, 64 * 32**2, 16384 * 32**2)


@dataclasses.dataclass(frozen=True)
class ParseResult:
  """A model response, taken apart.

  Attributes:
    calls: well-formed tool calls in order.
    thought: reasoning: the contents of `<think>` and the text before the
      first call.
    answer: the text without reasoning tags and calls, when there is no call.
    errors: one message for each malformed call, in order.
    failures: the same as exceptions, with their positions. Of errors and
      failures, one is given and the other derived.
    positions: offset in the text at which each of `calls` begins; () where the
      parser does not tell.
    first_call: Offset of the first call, well-formed or not; None where there
      is none, or the parser does not tell.
  """

  calls: tuple[trajectory.ToolCall, ...] = ()
  thought: str = ""
  answer: str = ""
  errors: tuple[str, ...] = ()
  failures: tuple[ToolParseError, ...] = ()
  positions: tuple[int, ...] = ()
  first_call: int | None = None

  def __post_init__(self):
    if self.failures:
      errors = tuple(str(failure) for failure in self.failures)
      object.__setattr__(self, "errors", errors)
    else:
      failures = tuple(ToolParseError(error) for error in self.errors)
      object.__setattr__(self, "failures", failures)


class ToolParser(abc.ABC):
  """One model family's tool-call format. Stateless and thread-safe.

  A subclass implements `get_tool_prompt`, and `parse_result` or `parse`. One
  without `format` reads calls and writes none: demonstrations cannot be played
  with it.

  Attributes:
    call_end: text that closes every call; "" if calls have no end of their own.
    compact: whether it has a short tool prompt of its own.
    coordinates: "relative" to the sides (0 to 999 or 1000), "unit" (0 to 1) or
      "absolute" (pixels of the screenshot); "" for a grammar without positions.
    resizing: how the model's processor resizes a screenshot; None where it is
      not published.
    by_element: Whether the grammar can name the elements of a tree by id.
  """

  call_end = ""
  compact = False
  coordinates = ""
  resizing: Resizing | None = None
  by_element = False

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    """Tool schemas of the format itself ([] for a general one)."""
    return []

  def __new__(cls, *args: Any, **kwargs: Any) -> ToolParser:
    del args, kwargs
    if (
      cls.parse is ToolParser.parse
      and cls.parse_result is ToolParser.parse_result
    ):
      raise TypeError(f"{cls.__name__} must implement parse_result, or parse")
    return super().__new__(cls)

  def parse_result(self, model_response: str) -> ParseResult:
    """Takes a response apart; malformed calls are reported, not raised.

    Here by `parse`: a ValueError of it is one malformed call, and the thought
    is empty.

    Raises:
      ToolParseError: `model_response` is not a str.
    """
    text = require_text(model_response)
    try:
      calls = tuple(self.parse(text))
    except ToolParseError as error:
      return ParseResult(answer=text, failures=(error,))
    except ValueError as error:
      return ParseResult(answer=text, errors=(f"malformed tool call: {error}",))
    return ParseResult(calls, answer="" if calls else text)

  @abc.abstractmethod
  def get_tool_prompt(self, tools_schema: ToolsSchema = None) -> str:
    """Returns the part of the system prompt that shows tools and the call
    format.

    Args:
      tools_schema: OpenAI tool schemas, or their text; None for
        `default_tools`.
    """

  def for_tools(self, tools_schema: ToolsSchema) -> ToolParser:
    """Returns a parser that reads arguments as these tools declare them.

    Returns itself where the format states the types of its values.

    Args:
      tools_schema: OpenAI tool schemas.

    Raises:
      ValueError: A schema names no function.
    """
    del tools_schema
    return self

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    """Returns the text that parses back to `calls`.

    Raises:
      NotImplementedError: The parser writes no calls.
    """
    del calls, thought
    raise NotImplementedError(
      f"{type(self).__name__} has no format(calls, thought), which writes"
      " the calls of demonstrations; add it, or set warm_start.steps=0"
    )

  @property
  def writes(self) -> bool:
    """Whether the parser has a `format` of its own."""
    return type(self).format is not ToolParser.format

  def parse(
    self, model_response: str, strict: bool = False
  ) -> list[trajectory.ToolCall]:
    """Tool calls in order; [] when there is none.

    Args:
      model_response: the model's text.
      strict: raise at a malformed call rather than leave it out.

    Raises:
      ToolParseError: not a str; or, when strict, a malformed call.
    """
    result = self.parse_result(model_response)
    if strict and result.failures:
      raise result.failures[0]
    return list(result.calls)

  def parse_tool_outputs(self, model_response: str) -> dict[str, Any]:
    """Outputs quoted in the text, by position; {} when the format has none."""
    del model_response
    return {}


class GuiActionParser(ToolParser):
  """A tool parser whose calls are actions on a screenshot.

  Attributes:
    screen: (width, height) of the screenshots, for the prompt of a grammar
      that states it; None while it is unknown.
    observation: "screenshot", "axtree" or "both": what the policy sees.
  """

  screen: tuple[int, int] | None = None
  observation: str = "screenshot"

  def seeing(
    self, observation: str, screen: tuple[int, int] | None = None
  ) -> GuiActionParser:
    """Returns a copy for a policy that sees such a screen; itself if equal."""
    screen = screen or self.screen
    if (observation, screen) == (self.observation, self.screen):
      return self
    parser = copy.copy(self)
    parser.observation, parser.screen = observation, screen
    return parser

  @abc.abstractmethod
  def to_gui_action(
    self, call: trajectory.ToolCall, width: int, height: int
  ) -> gui_action.GuiAction:
    """Returns the action in pixels of a screenshot of width x height pixels.

    Raises:
      GuiActionError: unknown action, missing or bad argument, coordinate
        outside the screenshot; or the call stands for several actions. The
        message is written for the policy.
    """

  def to_gui_actions(
    self, call: trajectory.ToolCall, width: int, height: int
  ) -> list[gui_action.GuiAction]:
    """Returns the actions of a call that may stand for several ("click, then
    type").

    Raises:
      GuiActionError: See `to_gui_action`.
    """
    return [self.to_gui_action(call, width, height)]

  def parse_gui_actions(
    self, model_response: str, width: int, height: int
  ) -> list[gui_action.GuiAction]:
    """Returns the actions of a response, in order; [] when it has no call.

    Raises:
      ToolParseError: the first malformed call, or the first call that is no
        action, with its position.
    """
    result = self.parse_result(model_response)
    if result.failures:
      raise result.failures[0]
    actions = []
    for call, position in itertools.zip_longest(result.calls, result.positions):
      try:
        actions.extend(self.to_gui_actions(call, width, height))
      except ToolParseError as error:
        error.position = position
        raise
    return actions

  @abc.abstractmethod
  def format_gui_action(
    self,
    action: gui_action.GuiAction,
    width: int,
    height: int,
    thought: str | None = None,
    grid: tuple[int, int] | None = None,
  ) -> str:
    """Returns the canonical text of an action, as an oracle writes it.

    `to_gui_actions` of its parse gives the action back within the rounding of
    the format's coordinates.

    Args:
      action: Action in pixels of the screenshot.
      width, height: Size of the screenshot in pixels.
      thought: Reasoning before the action.
      grid: (columns, rows); each coordinate becomes the centre of its bin, so
        that a small policy has few values to learn.

    Raises:
      GuiActionError: the format cannot express the action.
    """


def require_text(model_response: object) -> str:
  """Returns the argument if it is a str, else raises ToolParseError."""
  if not isinstance(model_response, str):
    raise ToolParseError(
      f"a model response must be a str, got {type(model_response).__name__}"
    )
  return model_response


def with_thought(thought: str | None, *blocks: str) -> str:
  """Returns the thought, if there is one, and the calls' blocks, one a line."""
  return "\n".join((thought, *blocks) if thought else blocks)


def as_schemas(tools_schema: ToolsSchema) -> list[dict[str, Any]]:
  """Tool schemas as a list of dicts.

  Raises:
    ValueError: not JSON, or not a list of objects.
  """
  if tools_schema is None:
    return []
  if isinstance(tools_schema, str):
    try:
      tools_schema = json_text.parse(tools_schema)
    except ValueError as error:
      raise ValueError(f"tools_schema is not JSON: {error}") from error
  single = isinstance(tools_schema, Mapping)
  listed: Any = [tools_schema] if single else tools_schema
  schemas = [dict(schema) for schema in listed]
  for schema in schemas:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or "name" not in function:
      raise ValueError(f"a tool schema needs a function name: {schema!r}")
  return schemas


def schema_lines(tools_schema: ToolsSchema) -> str:
  """Returns one tool schema a line, as JSON; a str is passed through."""
  if isinstance(tools_schema, str):
    return tools_schema
  return "\n".join(
    json.dumps(schema, ensure_ascii=False)
    for schema in as_schemas(tools_schema)
  )


def signature_lines(tools_schema: ToolsSchema) -> str:
  """Returns one tool a line, as `name(parameter: type, optional?: a|b)`."""
  lines = []
  for schema in as_schemas(tools_schema):
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {}
    required = set(parameters.get("required", ()))
    parts = []
    for name, spec in (parameters.get("properties") or {}).items():
      kind = "|".join(map(str, spec.get("enum", ()))) or spec.get("type", "")
      mark = "" if name in required else "?"
      parts.append(f"{name}{mark}: {kind}" if kind else f"{name}{mark}")
    lines.append(f"{function['name']}({', '.join(parts)})")
  return "\n".join(lines)
