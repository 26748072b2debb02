"""Reads request bodies: bytes to a JSON object, the object to a pydantic model.

    class StartBody(bodies.Body):
      task_id: bodies.Text = ""

    asked = bodies.parse(StartBody, bodies.read_json(body, max_bytes), limits)

Promises: an error names the field by its exact path, its value and the values
that are accepted; a field that the model does not have is refused, with the
nearest one that it has; null is the same as leaving the field out. JSON objects
are read as the standard library reads them, only faster.

Does not copy strings: a body is some megabytes of screenshots.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from typing import Any, Callable, ClassVar, Mapping, TypeVar

import orjson
import pydantic
from pydantic_core import core_schema
from pydantic_core import PydanticCustomError
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry

from agent_services.serving import errors

B = TypeVar("B", bound="Body")

_SHOWN = 60  # Characters of a refused value.
# Values are counted first in bodies of this many bytes: smaller ones are parsed
# within 0.6 s, whatever they hold.
_COUNTED = 1 << 20
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # Or one of a whole pair.


def shown(value: object) -> str:
  """Returns a value for an error message, cut to one line."""
  if isinstance(value, (str, list)):
    value = value[: _SHOWN + 1]  # The rest would be cut off below.
  text = repr(value)
  return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def unsupported(name: str, value: object, nearest: str = "") -> errors.ApiError:
  hint = f"; did you mean {nearest}?" if nearest else ""
  return errors.invalid(
    name,
    f"{name}={shown(value)} is not supported by this server; leave"
    f" {name.rpartition('.')[2]} out{hint}",
    "unsupported_parameter",
  )


# --- JSON ---------------------------------------------------------------------


def read_json(
  body: bytes, max_bytes: int, max_values: int | None = None
) -> dict[str, Any]:
  """Parses a request's body.

  The result can be written again: its numbers are finite, its texts are whole
  characters. Integers beyond 64 bits are floats.

  Args:
    body: Bytes as received.
    max_bytes: Limit of the body's size.
    max_values: Limit of the number of values, counted by commas and brackets
      before parsing, as parsing blocks the event loop.

  Raises:
    ApiError: too large, or not a JSON object.
  """
  if len(body) > max_bytes:
    raise errors.ApiError(
      413,
      f"the body has more than {max_bytes:,} bytes; send fewer or smaller"
      " images",
      code="request_too_large",
    )
  if max_values is not None and len(body) > _COUNTED:
    if json_text.parts(body) > max_values:
      raise errors.ApiError(
        413,
        f"the body holds more than {max_values:,} values by its commas and"
        " brackets, more than any prompt that fits the context; send a"
        " shorter one",
        code="request_too_large",
      )
  try:
    try:
      value = orjson.loads(body)
    except orjson.JSONDecodeError:
      value = _read_other(body)
    json_text.check_depth(value)
  except (ValueError, RecursionError) as error:
    raise errors.invalid(
      None, f"the body is not JSON: {error}", "invalid_json"
    ) from None
  if not isinstance(value, dict):
    raise errors.invalid(None, "the body must be a JSON object", "invalid_json")
  return value


def write_json(value: object) -> bytes:
  """JSON text of a value. Numbers that are not finite become null.

  Raises:
    ValueError: half a surrogate pair.
  """
  try:
    return orjson.dumps(value)
  except orjson.JSONEncodeError:  # Integers of more than 64 bits.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _read_other(body: bytes) -> Any:
  """Parses bodies that only the standard library reads (UTF-16, byte order
  marks), or raises with the reason."""
  text = body.decode(json.detect_encoding(body))
  value = json.loads(text, parse_constant=_finite, parse_float=_finite)
  if _ESCAPED_HALF.search(text):
    _check_characters(value)
  return value


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text[:_SHOWN]} is not a finite number")
  return value


def _check_characters(body: object) -> None:
  """Refuses halves of surrogate pairs, naming the first field with one."""
  pending = [("", body)]
  while pending:
    where, value = pending.pop()
    if isinstance(value, str):
      _check_text(where, value)
    elif isinstance(value, list):
      inner = [(f"{where}[{i}]", one) for i, one in enumerate(value)]
      pending += reversed(inner)
    elif isinstance(value, dict):
      for name in value:
        _check_text(where or "the body", name)
      inner = [
        (f"{where}.{name}" if where else name, one)
        for name, one in value.items()
      ]
      pending += reversed(inner)


def _check_text(where: str, value: str) -> None:
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise errors.invalid(
      where,
      f"{where} holds half a surrogate pair at character {error.start}; send"
      " whole characters",
    ) from None


# --- models -------------------------------------------------------------------


class Body(pydantic.BaseModel):
  """Base of request bodies, and of the objects in them.

  Attributes:
    KEEPS_NULL: fields in which null is a value, hence refused or read as one.
  """

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False
  )
  KEEPS_NULL: ClassVar[frozenset[str]] = frozenset()
  _names: ClassVar[frozenset[str]] = frozenset()
  _required: ClassVar[frozenset[str]] = frozenset()
  _ignored: ClassVar[Mapping[str, Ignored]] = {}
  _nested: ClassVar[tuple[str, ...]] = ()

  @classmethod
  def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
    super().__pydantic_init_subclass__(**kwargs)
    names = {f.alias or name: f for name, f in cls.model_fields.items()}
    cls._names = frozenset(names)
    cls._required = frozenset(n for n, f in names.items() if f.is_required())
    cls._ignored = {
      name: one
      for name, field in cls.model_fields.items()
      for one in field.metadata
      if isinstance(one, Ignored)
    }
    cls._nested = tuple(n for n in cls.model_fields if n not in cls._ignored)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _check_names(cls, value: object) -> Any:
    if type(value) is not dict:
      raise refusal("must be an object")
    if None in value.values():
      value = {
        name: one
        for name, one in value.items()
        if one is not None or name in cls.KEEPS_NULL
      }
    names = value.keys()
    if not names <= cls._names or not cls._required <= names:
      cls._refuse_names(value)
    return value

  @classmethod
  def _refuse_names(cls, value: Mapping[str, Any]) -> None:
    if not value.keys() <= cls._names:
      name = next(n for n in value if n not in cls._names)
      nearest = registry.nearest(name[:99], cls._names)
      raise refusal("", "unsupported_parameter", field=name, nearest=nearest)
    for name, field in cls.model_fields.items():
      name = field.alias or name
      if name in cls._required and name not in value:
        raise refusal(_expected(field), field=name)


def _expected(field: Any) -> str:
  """Returns the values that a field accepts, in the words of its annotation."""
  for one in reversed(field.metadata):
    if text := getattr(one, "text", None):
      return text
  return "must be an object"


def refusal(
  text: str, code: str = "invalid_value", **context: Any
) -> PydanticCustomError:
  """Error for validators to raise; `field` names a field of the object."""
  return PydanticCustomError(code, "{text}", {"text": text, **context})  # type: ignore[arg-type]


def parse(model: type[B], body: Mapping[str, Any], context: object = None) -> B:
  """Validates a body.

  Args:
    model: Model of the body.
    body: JSON object from `read_json`.
    context: Value of `info.context` for validators; a `RequestLimits` where the
      model has fields bounded by one.

  Raises:
    ApiError: naming the first wrong field.
  """
  try:
    return model.model_validate(body, context=context)
  except pydantic.ValidationError as error:
    raise _as_api(error.errors(include_url=False)[0]) from None


def ignored(body: Body) -> tuple[str, ...]:
  """Returns the paths of the given fields that are accepted and change nothing.

  Items of a list share a path: `messages[].name`.
  """
  paths: dict[str, None] = {}
  _collect_ignored(body, "", paths)
  return tuple(paths)


def _collect_ignored(value: object, path: str, paths: dict[str, None]) -> None:
  if isinstance(value, list):
    if value and not isinstance(value[0], (str, int)):
      for one in value:
        _collect_ignored(one, f"{path}[]", paths)
  elif isinstance(value, Body):
    prefix = f"{path}." if path else ""
    sent = value.model_fields_set
    for name, field in value._ignored.items():
      if name in sent and not field.is_silent(getattr(value, name)):
        paths[prefix + name] = None
    for name in value._nested:
      if name in sent:
        _collect_ignored(getattr(value, name), prefix + name, paths)


def _as_api(problem: Mapping[str, Any]) -> errors.ApiError:
  context, value = problem.get("ctx", {}), problem["input"]
  where = _path(problem["loc"])
  if "field" in context:
    where = f"{where}.{context['field']}" if where else context["field"]
    value = value.get(context["field"])
  text = context.get("text") or problem["msg"]
  code = problem["type"]
  if code == "unsupported_parameter" and not context.get("text"):
    return unsupported(where, value, context.get("nearest", ""))
  return errors.invalid(where, f"{where} {text}, got {shown(value)}", code)


def _path(loc: tuple[str | int, ...]) -> str:
  """`messages[0].content` of a location. Tags of unions are in parentheses."""
  path = ""
  for step in loc:
    if isinstance(step, int):
      path += f"[{step}]"
    elif not step.startswith("("):
      path += f".{step}" if path else step
  return path


# --- bounds -------------------------------------------------------------------

_Core = core_schema.CoreSchema
_Json = pydantic.GetJsonSchemaHandler
BY_BODY: dict[str, pydantic.JsonValue] = {"x-boundedBy": "body"}
"""Marks, in a JSON schema, a text, a list or any value that only the size of
the whole body and the number of its values bound. Numbers never are."""
LIMIT = "x-limit"
"""In a JSON schema: the `RequestLimits` that is a number's or list's bound."""
MAX_NAME = 512


# --- annotations of fields ----------------------------------------------------
#
# Compared by identity: `Annotated` takes equal ones for the same, and 0, 0.0
# and False are equal.


@dataclasses.dataclass(frozen=True, eq=False)
class Must:
  """Reports any error of a value in one text, and under one code."""

  text: str
  code: str = "invalid_value"

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    return core_schema.custom_error_schema(
      handler(source),
      custom_error_type=self.code,
      custom_error_message="{text}",
      custom_error_context={"text": self.text},
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Range:
  """A number from `low` (not itself, where `above` is set) to `high`."""

  low: float
  high: float
  above: bool = False

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    bounds = {"gt" if self.above else "ge": self.low, "le": self.high}
    kind = "an integer" if source is int else "a number"
    bracket = "(" if self.above else "["
    text = f"must be {kind} in {bracket}{self.low}, {self.high}]"
    inner = handler(source) | bounds
    return Must(text).__get_pydantic_core_schema__(inner, lambda s: s)


@dataclasses.dataclass(frozen=True, eq=False)
class UpTo:
  """An integer from 1 to the request limit of that name."""

  limit: str
  text: ClassVar[str] = "must be an integer of at least 1"

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source, handler

    def check(value: Any, info: Any) -> int:
      most = getattr(info.context, self.limit)
      if type(value) is not int or not 1 <= value <= most:  # Nor a bool.
        raise refusal(f"must be an integer in [1, {most}]")
      return value

    return core_schema.with_info_plain_validator_function(check)

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    return {"type": "integer", "minimum": 1, LIMIT: self.limit}


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Neutral:
  """A feature of OpenAI's API that is not served: only the values that ask for
  nothing are accepted."""

  values: tuple[Any, ...]

  def __init__(self, *values: Any):
    object.__setattr__(self, "values", values)

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source, handler

    def check(value: object) -> Any:
      for one in self.values:  # `True == 1`: a flag is not a number.
        if value == one and isinstance(value, bool) == isinstance(one, bool):
          return value
      raise refusal("", "unsupported_parameter")

    return core_schema.no_info_plain_validator_function(check)

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    return {"enum": [*self.values]}


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Ignored:
  """A field of type `Any` that no sample depends on, whatever its value.

  Attributes:
    silent: values that ask for nothing; others are reported, see `ignored`.
  """

  silent: tuple[Any, ...]

  def __init__(self, *silent: Any):
    object.__setattr__(self, "silent", silent)

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    return {**handler(schema), **BY_BODY}

  def is_silent(self, value: object) -> bool:
    return value is None or value in self.silent


@dataclasses.dataclass(frozen=True, eq=False)
class ByField:
  """A union of models, distinguished by the literal in their field `field`.

  Attributes:
    field: Field of each model, annotated as a `Literal`.
    code: Code of the error for other values.
    implied: Returns the field's value where it is left out.
  """

  field: str
  code: str = "invalid_value"
  implied: Callable[[Mapping[str, Any]], Any] | None = None

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    models = {
      name: model
      for model in typing.get_args(source) or (source,)
      for name in _literals(model, self.field)
    }
    first = f"({next(iter(models))})"
    text = f"must be {', '.join(models)}"
    if len(models) > 1:
      text = f"must be one of {', '.join(models)}"

    def pick(value: object) -> str:
      if not isinstance(value, dict):
        return first  # Whose validator refuses it.
      name = value.get(self.field)
      if name is None and self.implied is not None:
        name = self.implied(value)
      return f"({name})"

    return core_schema.tagged_union_schema(
      {f"({n})": handler.generate_schema(m) for n, m in models.items()},
      pick,
      custom_error_type=self.code,
      custom_error_message="{text}",
      custom_error_context={"text": text, "field": self.field},
    )

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    json_schema = handler(schema)
    if "oneOf" in json_schema:
      json_schema["discriminator"] = {"propertyName": self.field}
    return json_schema


def _literals(hint: object, field: str) -> list[str]:
  """Returns the values of the models' `Literal` field."""
  if typing.get_origin(hint) is typing.Annotated:  # A nested union.
    hint = typing.get_args(hint)[0]
  return [
    name
    for model in typing.get_args(hint) or (hint,)
    for name in typing.get_args(typing.get_type_hints(model)[field])
  ]


@dataclasses.dataclass(frozen=True, eq=False)
class ByShape:
  """A union of a text, a list and an object, distinguished by JSON type."""

  text: str

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    return core_schema.tagged_union_schema(
      {
        f"({_shape(one)})": handler.generate_schema(one)
        for one in typing.get_args(source)
      },
      lambda value: f"({type(value).__name__})",
      custom_error_type="invalid_value",
      custom_error_message="{text}",
      custom_error_context={"text": self.text},
    )


def _shape(hint: object) -> str:
  """Returns the Python type of a JSON value that an annotation describes."""
  if typing.get_origin(hint) is typing.Annotated:
    hint = typing.get_args(hint)[0]
  origin = typing.get_origin(hint) or hint
  if origin in (str, typing.Literal):
    return "str"
  return "list" if origin is list else "dict"


@dataclasses.dataclass(frozen=True, eq=False)
class Items:
  """A list of `least` to `most` items; its first wrong item is reported."""

  text: str
  least: int = 0
  most: int | None = None

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    def check(value: object) -> Any:
      if not isinstance(value, list) or len(value) < self.least:
        raise refusal(self.text)
      return value

    inner = handler(source) | {"fail_fast": True, "min_length": self.least}
    if self.most is not None:
      inner["max_length"] = self.most
    return core_schema.no_info_before_validator_function(check, inner)

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    return handler(schema) | (BY_BODY if self.most is None else {})


@dataclasses.dataclass(frozen=True, eq=False)
class TokenIds:
  """A list of token ids, as a tuple.

  Attributes:
    most: Ids, at most; None: as many as fit the context.
  """

  most: int | None = None

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source, handler
    return core_schema.with_info_plain_validator_function(
      lambda value, info: self._read(str(info.field_name), value, info.context)
    )

  def _read(self, name: str, value: Any, limits: Any) -> tuple[int, ...]:
    if self.most is None:
      return token_ids(name, value, limits.prompt_tokens)
    if isinstance(value, list) and len(value) > self.most:
      raise refusal(f"must be a list of at most {self.most} token ids")
    return token_ids(name, value)

  def __get_pydantic_json_schema__(self, schema: _Core, handler: _Json) -> Any:
    if self.most is None:
      return TOKEN_IDS_SCHEMA
    items = TOKEN_IDS_SCHEMA["items"]
    return {"type": "array", "items": items, "maxItems": self.most}


TOKEN_IDS_SCHEMA: dict[str, Any] = {
  "type": "array",
  "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
  LIMIT: "prompt_tokens",
}


def token_ids(
  where: str, value: Any, most: int | None = None
) -> tuple[int, ...]:
  """Checks a list of token ids, as far as possible without a vocabulary.

  Args:
    where: Name of the field.
    value: Value of the field.
    most: Number of ids that fit the context; a longer list is refused before
      any of its ids is read.
  """
  if most is not None and isinstance(value, list) and len(value) > most:
    raise errors.invalid(
      where,
      f"This model's maximum context length is {most} tokens, the {where}"
      f" has {len(value)}; shorten the {where}",
      "context_length_exceeded",
    )
  # A bool is an int, too. Set and extrema are fast on long lists.
  good = isinstance(value, list) and (
    not value
    or set(map(type, value)) == {int}
    and 0 <= min(value)
    and max(value) < 2**31
  )
  if not good:
    raise errors.invalid(
      where, f"{where} must be a list of token ids, got {shown(value)}"
    )
  return tuple(value)


class Spoken(typing.Protocol):
  """A message's body."""

  @property
  def role(self) -> str: ...

  @property
  def content(self) -> Any: ...


_Bounded = pydantic.Field(json_schema_extra=BY_BODY)
Text = typing.Annotated[
  str,
  pydantic.StringConstraints(min_length=1),
  Must("must be a string, not empty"),
  _Bounded,
]
AnyText = typing.Annotated[str, Must("must be a string"), _Bounded]
JsonText = typing.Annotated[str, Must("must be JSON text"), _Bounded]
Name = typing.Annotated[
  str,
  pydantic.StringConstraints(min_length=1, max_length=MAX_NAME),
  Must(f"must be a string of 1 to {MAX_NAME} characters"),
]
Flag = typing.Annotated[bool, Must("must be true or false")]
Object = typing.Annotated[dict[str, Any], Must("must be an object"), _Bounded]
Unread = typing.Annotated[Any, _Bounded]
"""A value that the client alone reads."""
