"""Finds tool calls in a model's text: the loop that the formats share.

A format is a subclass of `ScanningParser` with a pattern of where a call may
begin and a `read_block` that reads it. `JsonCallsParser` is that for calls that
are JSON objects: such a format is a few class attributes.

Rules of lenient parsing:
- A call is read from where it begins to where it ends by its own grammar, so
  marks inside its strings mean nothing.
- A malformed call is reported with its position, and reading resumes behind it.
- Reasoning ends at `</think>` (or `</thinking>`): calls before it do not
  count. A response that begins with `<think>` and never ends it has no call.

Does not: know any tool.
"""

from __future__ import annotations

import abc
import json
import math
import re
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base

MAX_FAILURES = 32
"""Malformed calls of a response that are reported; reading ends there."""

_SPACE = re.compile(r"\s*")
_MAX_QUOTE = 80
_THINK = re.compile(r"\s*<(think|thinking)>")
_THOUGHT_ENDS = r"</think(?:ing)?>"
_THOUGHT_END = re.compile(_THOUGHT_ENDS)


class ScanningParser(base.ToolParser):
  """See the module docstring.

  Attributes:
    opening: pattern of the text at which a call may begin.
    resuming: pattern of where reading goes on after a malformed call: behind
      the match, or at it where `opening` or the end of reasoning matches there.
      None for the next `opening`.
    resumes_at_fault: reading goes on behind the fault rather than behind the
      beginning of the malformed call, whose parts would be read as calls.
    noise: pattern of marks around calls that belong to neither thought nor
      answer, None for none.
  """

  opening: re.Pattern[str]
  resuming: re.Pattern[str] | None = None
  resumes_at_fault = False
  noise: re.Pattern[str] | None = None

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    if "opening" in vars(cls):
      cls._mark_pattern = re.compile(
        f"(?P<thought_ends>{_THOUGHT_ENDS})|(?:{cls.opening.pattern})",
        cls.opening.flags,
      )

  _mark_pattern: re.Pattern[str]

  @abc.abstractmethod
  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    """Returns (calls, where they end) of the block that `opening` matches at
    `start`.

    No calls: the match was ordinary text, up to the returned offset.

    Raises:
      ToolParseError: malformed; with its position.
    """

  def parse_result(self, model_response: str) -> base.ParseResult:
    text = base.require_text(model_response)
    calls: list[trajectory.ToolCall] = []
    failures: list[base.ToolParseError] = []
    positions: list[int] = []
    thoughts: list[str] = []
    position = 0
    visible = 0  # Where the text outside reasoning begins.
    first_call = -1
    if (think := _THINK.match(text)) is not None:
      closed = _THOUGHT_END.search(text, think.end())
      if closed is None:
        return base.ParseResult(
          thought=text[think.end() :].strip(),
          failures=(
            base.ToolParseError(
              f"<{think.group(1)}> is never closed", think.start(1) - 1
            ),
          ),
        )
      thoughts.append(text[think.end() : closed.start()])
      position = visible = closed.end()
    while (mark := self._mark_pattern.search(text, position)) is not None:
      if mark.group("thought_ends"):
        # The template opened <think> in the prompt: all this was reasoning.
        thoughts.append(text[visible : mark.start()])
        calls.clear()
        failures.clear()
        positions.clear()
        first_call = -1
        position = visible = mark.end()
        continue
      start = mark.start()
      block: Sequence[Any]
      try:
        block, end = self.read_block(text, start)
        calls.extend(block)
        positions.extend([start] * len(block))
      except base.ToolParseError as error:
        if error.position is None:
          error.position = start
        failures.append(error)
        block = [error]
        behind = mark.end()
        if self.resumes_at_fault:
          behind = max(behind, error.position)
        end = self._resume(text, behind)
        if len(failures) == MAX_FAILURES:
          end = len(text)
      if block and first_call < 0:
        first_call = start
      position = max(end, start + 1)
    if first_call < 0:
      answer = self._without_noise(text[visible:])
    else:
      thoughts.append(text[visible:first_call])
      answer = ""
    thought = "\n".join(
      t for t in (self._without_noise(t) for t in thoughts) if t
    )
    return base.ParseResult(
      tuple(calls),
      thought,
      answer,
      failures=tuple(failures),
      positions=tuple(positions),
      first_call=first_call if first_call >= 0 else None,
    )

  def _resume(self, text: str, position: int) -> int:
    """Offset to resume at after a malformed block opened before `position`."""
    pattern = self.resuming or self._mark_pattern
    match = pattern.search(text, position)
    if match is None:
      return len(text)
    if self._mark_pattern.match(text, match.start()):
      return match.start()
    return match.end()

  def _without_noise(self, text: str) -> str:
    if self.noise is not None:
      text = self.noise.sub("", text)
    return text.strip()


class JsonCallsParser(ScanningParser):
  """Calls that are JSON objects, each between two marks or by itself.

  Attributes:
    before: literal marks of which one stands before the JSON; () for none,
      then a call is any object with the keys of one.
    after: literal marks of which one stands behind it, may be missing at the
      end of the text; () for none.
    name_key, arguments_keys: of the object that is a call. No arguments_keys:
      the object's other keys are the arguments.
    prompt: the tool prompt, with {tools} where the schemas go.
  """

  opening = re.compile(r"\{\s*\"")
  resumes_at_fault = True
  before: tuple[str, ...] = ()
  after: tuple[str, ...] = ()
  name_key = "name"
  arguments_keys: tuple[str, ...] = ("arguments", "parameters")
  prompt = "{tools}"

  def __init_subclass__(cls, **kwargs: Any):
    if vars(cls).get("before"):
      cls.resumes_at_fault = False
      cls.opening = re.compile("|".join(map(re.escape, cls.before)))
    super().__init_subclass__(**kwargs)

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    if tools_schema is None:
      tools_schema = self.default_tools
    return self.prompt.replace("{tools}", base.schema_lines(tools_schema))

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    return base.with_thought(
      thought, *((self.format_calls(calls),) if calls else ())
    )

  def format_calls(self, calls: Sequence[trajectory.ToolCall]) -> str:
    """Returns the text of one or more calls."""
    before = self.before[0] if self.before else ""
    after = self.after[0] if self.after else ""
    return "\n".join(
      before + compact_json(self.to_object(call)) + after for call in calls
    )

  def to_object(self, call: trajectory.ToolCall) -> dict[str, Any]:
    """Returns the JSON object of a call."""
    if not self.arguments_keys:
      return {self.name_key: call.name, **call.arguments}
    return {self.name_key: call.name, self.arguments_keys[0]: call.arguments}

  def calls_of(
    self, value: object, position: int
  ) -> Sequence[trajectory.ToolCall] | None:
    """Returns the calls that a JSON value holds; None when it is not about
    calls.

    Raises:
      ToolParseError: it is, and malformed.
    """
    if not self.before and not self._is_call(value):
      return None
    values = value if isinstance(value, list) else [value]
    return [
      call_from_object(v, position, self.name_key, self.arguments_keys)
      for v in values
    ]

  def _is_call(self, value: object) -> bool:
    return (
      isinstance(value, dict)
      and self.name_key in value
      and (
        not self.arguments_keys
        or any(key in value for key in self.arguments_keys)
      )
    )

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    where = start
    for mark in self.before:
      if text.startswith(mark, start):
        where = skip_space(text, start + len(mark))
        break
    value, end = read_json(text, where)
    calls = self.calls_of(value, where)
    if calls is None:
      return (), end
    tail = skip_space(text, end)
    for mark in self.after:
      if text.startswith(mark, tail):
        return calls, tail + len(mark)
    if not self.after or tail == len(text):
      return calls, end
    if self._mark_pattern.match(text, tail):
      return calls, tail
    raise base.ToolParseError(
      f"expected {self.after[0]} after the call, found {quote(text, tail)}",
      tail,
    )


def skip_space(text: str, position: int) -> int:
  """Offset of the next character that is no space."""
  return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def end_of_block(
  text: str, position: int, close: Sequence[str], opening: str, expected: str
) -> int:
  """Returns where a block ends whose last call ends at `position`.

  Args:
    text: A response.
    position: Offset behind the last call.
    close: Marks that close a block. They may be missing at the end of the text
      and before another block.
    opening: Mark that opens another block.
    expected: What the error names.

  Raises:
    ToolParseError: Other text follows the call.
  """
  tail = skip_space(text, position)
  for mark in close:
    if text.startswith(mark, tail):
      return tail + len(mark)
  if tail == len(text) or text.startswith(opening, tail):
    return tail
  raise base.ToolParseError(
    f"expected {expected}, found {quote(text, tail)}", tail
  )


def quote(text: str, position: int) -> str:
  """Returns the text at `position`, shortened for an error message."""
  if position >= len(text):
    return "the end of the text"
  return repr(text[position : position + _MAX_QUOTE])


def compact_json(value: object) -> str:
  return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> float:
  raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is out of range")
  return value


_DECODER = json.JSONDecoder(
  parse_constant=_refuse_constant, parse_float=_finite
)


def read_json(text: str, start: int) -> tuple[Any, int]:
  """Returns (value, where it ends) of the JSON that begins at `start`.

  Raises:
    ToolParseError: it is not JSON, or holds NaN, an infinity, or a character
      that cannot be encoded.
  """
  try:
    value, end = _DECODER.raw_decode(text, start)
    json_text.check_depth(value)
    if "\\u" in text[start:end] or "\\U" in text[start:end]:
      # An escape may make a lone surrogate, which nothing can encode later.
      compact_json(value).encode()
  except (ValueError, RecursionError) as error:
    raise base.ToolParseError(
      f"bad JSON in a tool call: {getattr(error, 'msg', error)}, near"
      f" {quote(text, start)}",
      getattr(error, "pos", start),
    ) from None
  return value, end


def call_from_object(
  value: object,
  position: int,
  name_key: str = "name",
  arguments_keys: Sequence[str] = ("arguments", "parameters"),
) -> trajectory.ToolCall:
  """Returns the call of a JSON object.

  Raises:
    ToolParseError: no such object.
  """
  if not isinstance(value, Mapping):
    raise base.ToolParseError(
      f"a call must be a JSON object, got {type(value).__name__}", position
    )
  name = value.get(name_key)
  if not isinstance(name, str) or not name:
    raise base.ToolParseError(
      f'a call needs a "{name_key}" string, got {str(name)[:_MAX_QUOTE]!r}',
      position,
    )
  if not arguments_keys:
    return trajectory.ToolCall(
      name, {k: v for k, v in value.items() if k != name_key}
    )
  arguments = next((value[k] for k in arguments_keys if k in value), None)
  return trajectory.ToolCall(
    name, as_arguments(arguments, name, position, arguments_keys[0])
  )


def as_arguments(
  arguments: object, name: str, position: int, key: str = "arguments"
) -> dict[str, Any]:
  """Returns the arguments of a call as a dict; also from JSON in a str, or
  None.

  Raises:
    ToolParseError: anything else.
  """
  if isinstance(arguments, str):
    # OpenAI's doubly encoded form, which some fine-tunes write as well.
    try:
      arguments, end = read_json(inner := arguments.strip(), 0)
    except base.ToolParseError as error:
      raise base.ToolParseError(str(error), position) from None
    if end != len(inner):
      raise base.ToolParseError(
        f'"{key}" of {name!r} hold text after the JSON: {quote(inner, end)}',
        position,
      )
  if arguments is None:
    arguments = {}
  if not isinstance(arguments, dict):
    raise base.ToolParseError(
      f'"{key}" of {name!r} must be an object, got {type(arguments).__name__}',
      position,
    )
  return arguments
