"""Parses the parameters of a URL's query into typed models.

    class StepsQuery(query.PageQuery):
      after: query.Id | None = None

    steps = StepsQuery.read(request.query_params)

Promises: an error names every wrong parameter with its value and the values
that it takes (400); unknown parameters are ignored. The OpenAPI document has
the same models.

Does not: ask the database.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
import typing
from typing import Annotated, Any, Callable, ClassVar, Literal, Mapping

import pydantic
from pydantic_core import core_schema
from starlette import datastructures
import typing_extensions

from training_monitor.core import run_tags as tags_lib
from training_monitor.net import bounds
from training_monitor.schema import vocabulary
from training_monitor.server import errors

MAX_ID = bounds.LARGEST
MAX_LIMIT = 500
_MAX_SEARCH = 200


def is_id(text: str) -> bool:
  """Returns whether a text is the number of a row."""
  try:
    bounds.whole(text, "")
  except ValueError:
    return False
  return True


# --- types of parameters ------------------------------------------------------
# The validator that reads text is the last of a type's metadata: it runs first.


def _whole(text: str) -> int:
  if isinstance(text, str) and is_id(text):
    return int(text)
  raise ValueError(f"give a number in [0, {MAX_ID}]")


def _finite(text: str) -> float:
  try:
    number = float(text) if text.isascii() else math.nan
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    raise ValueError("give a number")
  return number


def _flag(text: str) -> bool:
  if text not in ("0", "1"):
    raise ValueError("give 0 or 1")
  return text == "1"


def _search(text: str) -> str:
  return text.replace("\0", "")[:_MAX_SEARCH].strip()


def _cursor(text: str) -> int | None:
  if not text:
    return None
  try:
    padded = text + "=" * (-len(text) % 4)
    position = int(base64.urlsafe_b64decode(padded.encode("ascii")))
  except (ValueError, binascii.Error, UnicodeEncodeError):
    position = None
  if position is None or not -(1 << 63) <= position < 1 << 63:
    raise ValueError("give the `next` of the page before")
  return position


def cursor_of(key: object) -> str:
  """Returns the `next` of a page whose last row has this key."""
  return base64.urlsafe_b64encode(str(key).encode()).decode().rstrip("=")


def textual(parse: Callable[[Any], Any]) -> Any:
  """Returns metadata of a parameter that a client sends as text."""
  return (
    pydantic.BeforeValidator(parse),
    pydantic.WithJsonSchema({"type": "string", "maxLength": bounds.MAX_PATH}),
  )


Id = Annotated[
  int, pydantic.Field(ge=0, le=MAX_ID), pydantic.BeforeValidator(_whole)
]
"""The number of a row, or of a step or page."""
Real = Annotated[float, pydantic.BeforeValidator(_finite)]
Flag = Annotated[
  bool,
  pydantic.BeforeValidator(_flag),
  pydantic.WithJsonSchema({"type": "integer", "enum": [0, 1]}),
]
Search = Annotated[str, pydantic.BeforeValidator(_search)]
"""Words; too many and NUL are cut, not refused."""
Tags = Annotated[
  tuple[str, ...],
  pydantic.BeforeValidator(tags_lib.clean_all),
  pydantic.WithJsonSchema(
    {
      "type": "array",
      "maxItems": tags_lib.MOST,
      "items": {
        "type": "string",
        "minLength": 1,
        "maxLength": tags_lib.LONGEST,
      },
    }
  ),
]
Order = Literal["up", "down"]
_Text = Annotated[str, pydantic.Field(max_length=bounds.MAX_PATH)]


def _label(value: object) -> str:
  try:
    return tags_lib.clean(value)
  except ValueError as error:
    raise ValueError(str(error).replace("a tag has", "a label has")) from None


def _note(value: object) -> str:
  if not isinstance(value, str):
    raise ValueError(f"give text, not a {type(value).__name__}")
  note = value.replace("\0", "\u2400").replace("\r\n", "\n").strip()
  if not 0 < len(note) <= vocabulary.LONGEST_NOTE:
    raise ValueError(
      f"a note has 1 to {vocabulary.LONGEST_NOTE} characters, not {len(note)}"
    )
  return note


Label = Annotated[
  str,
  pydantic.BeforeValidator(_label),
  pydantic.WithJsonSchema(
    {"type": "string", "minLength": 1, "maxLength": tags_lib.LONGEST}
  ),
]
"""What a person calls a turn or a rollout; checked as a tag is."""
Note = Annotated[
  str,
  pydantic.BeforeValidator(_note),
  pydantic.WithJsonSchema(
    {"type": "string", "minLength": 1, "maxLength": vocabulary.LONGEST_NOTE}
  ),
]


class one_of:  # pylint: disable=invalid-name
  """Marks a text that is one of some words."""

  def __init__(self, words: typing.Iterable[str]):
    self._words = list(words)

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source, handler
    return core_schema.literal_schema(self._words)


def outcome_key(word: str) -> Any:
  """The key of an outcome that is given by the label that pages show it with.

  A page labels the outcome `failure` "failed", so both are understood.
  """
  return {"failed": "failure", "succeeded": "success"}.get(word, word)


# --- models -------------------------------------------------------------------


class Query(pydantic.BaseModel):
  """Parameters of a request. A tuple takes every value of its name."""

  model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
  blank_is_absent: ClassVar[bool] = False
  """Whether `name=` counts as no value, as a form sends its empty fields."""

  @classmethod
  def read(cls, params: datastructures.QueryParams) -> typing_extensions.Self:
    """Parses a URL's query.

    Raises:
      ApiError: 400, with every wrong parameter.
    """
    parameters: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
      name = field.alias or name
      values = params.getlist(name)
      if cls.blank_is_absent:
        values = [value for value in values if value]
      if not values:
        continue
      several = typing.get_origin(field.annotation) is tuple
      parameters[name] = values if several else values[-1]
    try:
      return cls.model_validate(parameters)
    except pydantic.ValidationError as error:
      raise refusal(cls, error) from None

  @classmethod
  @functools.cache
  def parameters(cls) -> dict[str, dict[str, Any]]:
    """Returns JSON Schema of each parameter by its name; not to be changed."""
    properties = cls.model_json_schema(mode="validation")["properties"]
    return {name: _plain_schema(schema) for name, schema in properties.items()}


class PageQuery(Query):
  """Parameters of a page of the dashboard."""

  blank_is_absent: ClassVar[bool] = True


def refusal(
  model: type[pydantic.BaseModel], error: pydantic.ValidationError
) -> errors.ApiError:
  """Returns the error of a model that refuses its values: 400."""
  faults = []
  for detail in error.errors(include_url=False):
    name = str(detail["loc"][0]) if detail["loc"] else "body"
    faults.append(
      errors.fault(name, detail["input"], _message(model, name, detail))
    )
  return errors.wrong(faults)


def _message(
  model: type[pydantic.BaseModel], name: str, detail: Mapping[str, Any]
) -> str:
  kind, context = detail["type"], detail.get("ctx", {})
  if kind == "value_error":
    return str(context["error"])
  if kind == "literal_error":
    words = context["expected"].replace("'", "")
    return f"give {'one of ' if ',' in words else ''}{words}"
  if kind in ("greater_than_equal", "less_than_equal"):
    schema = model.model_json_schema()["properties"][name]
    return f"give {schema['minimum']} to {schema['maximum']}"
  return detail["msg"][0].lower() + detail["msg"][1:]


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
  """Returns the schema without titles, and without None for absent values."""
  plain = {k: v for k, v in schema.items() if k != "title"}
  for branch in plain.pop("anyOf", ()):
    if branch.get("type") != "null":
      plain |= branch
  if plain.get("default", 0) is None:
    del plain["default"]
  return plain


# --- of the API ---------------------------------------------------------------


class ListQuery(Query):
  """A page of a list: at most `limit` rows behind `after`."""

  limit: Annotated[
    int, pydantic.Field(ge=1, le=MAX_LIMIT), pydantic.BeforeValidator(_whole)
  ] = 50
  after: Annotated[int | None, *textual(_cursor)] = None


class TrainingsQuery(ListQuery):
  """Trainings with a status and every `tag`."""

  status: Annotated[str, one_of(vocabulary.STATUSES["training"])] | None = None
  tag: Tags = ()


class RolloutsQuery(ListQuery):
  """Rollouts; each parameter that is given narrows the list."""

  training_id: Id | None = None
  step_id: Id | None = None
  eval_id: Id | None = None
  baseline_id: Id | None = None
  task_id: Id | None = None
  batch: Id | None = None
  group: Id | None = None
  status: Annotated[str, one_of(vocabulary.STATUSES["rollout"])] | None = None
  success: Flag | None = None
  label: Label | None = None


class CurvesQuery(Query):
  """Metrics of the steps `first` to `last`, in at most `points` points.

  Attributes:
    names: separated by commas; one that ends in / is a prefix.
  """

  names: _Text = ""
  first: Id | None = None
  last: Id | None = None
  points: Annotated[
    int, pydantic.Field(ge=2, le=10_000), pydantic.BeforeValidator(_whole)
  ] = 1200


class EventsQuery(Query):
  """Changes behind number `after`, of all trainings or one."""

  training_id: Id | None = None
  after: Id | None = None


class VideoQuery(Query):
  path: _Text = ""


class TagChange(pydantic.BaseModel):
  """The body of a change of a training's tags."""

  model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

  add: Tags = ()
  remove: Tags = ()


def _turn(value: object) -> int | None:
  if value is not None and (type(value) is not int or not 0 <= value <= MAX_ID):
    raise ValueError("give the number of a turn")
  return value


class Annotation(pydantic.BaseModel):
  """The body of a request that labels a rollout or one of its turns.

  Attributes:
    turn: number of the turn; None for the rollout.
    label: Label to add; None for none.
    note: Note to add; None for none.
  """

  model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

  turn: Annotated[int | None, pydantic.BeforeValidator(_turn)] = None
  label: Label | None = None
  note: Note | None = None
