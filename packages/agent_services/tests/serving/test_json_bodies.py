"""Requests' bodies are read as the standard library reads them, only faster."""

import json

from agent_services.serving import bodies
from agent_services.serving import errors
import hypothesis
from hypothesis import strategies
import pytest

MANY = 1 << 30
SCALARS = (
  strategies.none()
  | strategies.booleans()
  | strategies.integers(-(2**63), 2**64 - 1)
  | strategies.floats(allow_nan=False, allow_infinity=False)
  | strategies.text()
)
VALUES = strategies.recursive(
  SCALARS,
  lambda inner: (
    strategies.lists(inner, max_size=4)
    | strategies.dictionaries(strategies.text(), inner, max_size=4)
  ),
  max_leaves=12,
)


def read(body, **limits):
  return bodies.read_json(body, MANY, **limits)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
  strategies.dictionaries(strategies.text(), VALUES, max_size=4),
  strategies.booleans(),
  strategies.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]),
)
def test_every_object_is_read_and_written_as_it_is(value, ascii_, encoding):
  body = json.dumps(value, ensure_ascii=ascii_).encode(encoding)
  result = read(body)
  assert result == value
  # `1 == 1.0 == True`, but not to who reads a seed.
  assert json.dumps(result) == json.dumps(value)
  assert json.loads(bodies.write_json(value)) == value


@pytest.mark.parametrize("levels", (250, 900, 2000, 200_000))
def test_what_is_nested_too_deep_to_be_written_is_refused(levels):
  for start in (b"", b"\xef\xbb\xbf"):  # Of the standard library's reader.
    deep = start + b'{"a": ' + b"[" * levels + b"]" * levels + b"}"
    with pytest.raises(errors.ApiError, match="not JSON: .*(nested|recurs)"):
      read(deep)


def test_what_only_the_standard_library_reads_is_read():
  pair = json.dumps({"a": "\U0001f642"})
  assert "\\ud83d" in pair and read(pair.encode()) == {"a": "\U0001f642"}


@pytest.mark.parametrize(
  "body, words",
  [
    (b'{"a": NaN}', "NaN is not a finite number"),
    (b'{"a": -Infinity}', "-Infinity is not a finite number"),
    (b'{"a": 1e999}', "1e999 is not a finite number"),
    (b'{"a": "\\ud800"}', "a holds half a surrogate pair"),
    (b'{"a": [{"b": "\\udc00"}]}', r"a\[0\].b holds half"),
    (b'{"a": 1', "not JSON"),
    (b'{"a": "\xff"}', "not JSON"),
    (b'{"a": "\n"}', "not JSON"),
    (b"", "not JSON"),
    (b"[1]", "must be a JSON object"),
    (b'{"a": ' + b"[" * 200_000, "not JSON"),
  ],
)
def test_what_is_wrong_is_said(body, words):
  with pytest.raises(errors.ApiError, match=words) as refused:
    read(body)
  assert refused.value.status == 400


def test_too_many_values_are_refused_before_they_are_parsed(monkeypatch):
  monkeypatch.setattr(bodies, "_COUNTED", 0)
  ids = b'{"prompt": [%s]}' % b",".join([b"1"] * 1001)
  # 1000 commas and two brackets.
  assert len(read(ids, max_values=1002)["prompt"]) == 1001
  more = b'{"prompt": [%s]}' % b",".join([b"1"] * 1002)
  deep = b'{"prompt": [%s]}' % b",".join([b"[" * 100 + b"]" * 100] * 11)
  monkeypatch.setattr(bodies.orjson, "loads", None)
  for body in (more, deep):
    with pytest.raises(errors.ApiError, match="than 1,002 values") as refused:
      read(body, max_values=1002)
    assert refused.value.status == 413
  with pytest.raises(errors.ApiError, match="more than 10 bytes"):
    bodies.read_json(more, 10)


def test_too_many_tokens_are_refused_before_any_is_looked_at():
  class Counting(int):
    """Its type says that it was looked at."""

  words = "length is 2 tokens, the prompt has 3"
  with pytest.raises(errors.ApiError, match=words) as refusal:
    bodies.token_ids("prompt", [Counting(1)] * 3, 2)
  assert refusal.value.code == "context_length_exceeded"
  assert bodies.token_ids("prompt", [1, 2], 2) == (1, 2)
  with pytest.raises(errors.ApiError, match="list of token ids"):
    bodies.token_ids("prompt", [Counting(1)] * 2, 2)
