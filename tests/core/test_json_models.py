"""JSON becomes models; errors name field, value and fix."""

import json
import tracemalloc
from typing import Annotated, Literal

import hypothesis
from hypothesis import strategies as st
import pydantic
import pytest
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.net import json_models


class Inner(json_models.Request):
  model_config = pydantic.ConfigDict(extra="forbid")

  share: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
  name: Annotated[str, pydantic.Field(max_length=3)] = ""


class Outer(json_models.Request):
  count: Annotated[int, pydantic.Field(gt=0)]
  flag: json_models.Flag = False
  shape: Literal["a", "b"] = "a"
  inner: Inner = Inner()
  more: dict[str, object] = {}


@pytest.mark.parametrize(
  "data, text",
  [
    ({}, "count is missing"),
    ({"count": None}, "count is missing"),
    ({"count": True}, "count must be a whole number, got True"),
    ({"count": 1.0}, "count must be a whole number, got 1.0"),
    ({"count": 0}, "count must be > 0, got 0"),
    ({"count": 1, "flag": "yes"}, "flag must be true or false, got 'yes'"),
    ({"count": 1, "shape": "c"}, "shape='c' must be one of a, b"),
    ({"count": 1, "inner": []}, "inner must be an object, got []"),
    ({"count": 1, "inner": {"share": 2}}, "inner.share must be <= 1, got 2"),
    (
      {"count": 1, "inner": {"share": float("inf")}},
      "inner.share must be finite, got inf",
    ),
    (
      {"count": 1, "inner": {"name": "long"}},
      "inner.name must have up to 3 characters, got 'long'",
    ),
    (
      {"count": 1, "inner": {"name": "\ud800"}},
      "inner.name must not hold half a surrogate pair, got '\\ud800'",
    ),
    ([], "the request must be an object, got []"),
  ],
)
def test_a_problem_names_the_field_and_its_value(data, text):
  with pytest.raises(ValueError) as caught:
    json_models.validate(Outer, data)
  assert str(caught.value) == text


def test_a_field_that_is_not_known_is_refused_with_those_that_are():
  with pytest.raises(ValueError) as caught:
    json_models.validate(Inner, {"sahre": 1}, "inner")
  assert str(caught.value) == "inner takes no 'sahre'; known: share, name"


def test_flags_may_be_text_and_null_means_not_given():
  model = json_models.validate(
    Outer, {"count": 3, "flag": "1", "inner": None, "more": {"a": None}}
  )
  assert model.flag is True
  assert model.inner == Inner()
  assert model.more == {"a": None}  # Of a free object nothing is dropped.


@pytest.mark.parametrize(
  "text, place",
  [
    (b'{"a": NaN}', "after '{\"a\": N'"),
    (b'{"a": "\\ud800"}', "ud800"),
    ("[1,\n 2 3]", "after ' 2 3'"),
    (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}"),
    ('{"a": [1, {"b": -1e400}]}', "a.1.b is larger than any float"),
    ("1e400", "the number is larger"),
    (b"[" * 10_000, "recursion"),
    (b"", "EOF"),
  ],
)
def test_what_is_no_json_is_refused_with_its_place(text, place):
  with pytest.raises(ValueError) as caught:
    json_models.parse(text)
  assert place in str(caught.value)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.binary(max_size=40) | st.text(max_size=40))
def test_every_text_is_a_value_that_can_be_written_or_a_value_error(text):
  try:
    value = json_models.parse(text)
  except ValueError:
    return
  json.dumps(value, ensure_ascii=False).encode()


def test_levels_of_a_value():
  for levels, value in ((0, 7), (1, [1, "a"]), (2, {"a": []}), (3, [[{}], 1])):
    assert not json_text.deeper(value, levels)
    assert levels == 0 or json_text.deeper(value, levels - 1)


@pytest.mark.parametrize(
  "text, place",
  [
    ("1e999", "the number"),
    ('{"a": [1, {"b": 1e999}]}', "a.1.b"),
    ("[1.5, -1e999]", "1"),
    ("[" * 150 + "1e999" + "]" * 150, "0.0.0"),
  ],
)
def test_a_number_that_no_float_holds_is_named(text, place):
  with pytest.raises(ValueError, match=f"{place}.* is larger than any float"):
    json_models.parse(text)
  assert json_models.infinite(json.loads(text)).startswith(place)


def test_a_deep_list_of_many_numbers_takes_no_memory_for_its_places():
  text = "[" * 190 + "1.5," * 100_000 + "1" + "]" * 190
  value = json.loads(text)
  tracemalloc.start()
  assert not json_models.infinite(value)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 1 << 20
