"""Messages to and from gyms in worker processes."""

from cua_gyms import workers
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.text()
  | st.floats(allow_nan=False),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)


def told(value):
  message = {"number": 7, "error": None}
  again, got = workers.decode_message(workers.encode_message(message, value))
  assert again == message
  return got


@given(
  JSON, st.dictionaries(st.text(), JSON), st.floats(allow_nan=False), st.text()
)
def test_what_is_sent_arrives(value, mapping, number, text):
  assert told(value) == value
  task = base.Task("a/1", "a", text, 1 << 60, 3, mapping)
  assert told(task) == task
  evaluation = base.Evaluation(number, True, mapping)
  assert told(evaluation) == evaluation
  action = gui_action.GuiAction("type", text=text)
  assert told(action) == action


@given(
  st.tuples(st.integers(0, 5), st.integers(0, 5)),
  st.text(),
  st.booleans(),
  st.dictionaries(st.text(), JSON),
)
def test_a_screenshot_arrives_as_it_is(size, text, ended, info):
  pixels = np.random.default_rng(size).integers(
    0, 256, (*size, 3), dtype=np.uint8
  )
  got = told(base.Observation(pixels[:, ::-1], text, text, ended, info))
  assert got.screenshot.dtype == np.uint8
  np.testing.assert_array_equal(got.screenshot, pixels[:, ::-1])
  assert (got.instruction, got.text, got.done) == (text, text, ended)
  assert got.info == info


@pytest.mark.parametrize("pixels", [None, np.ones((2, 3, 3), np.uint8)])
def test_a_tree_arrives_with_and_without_a_screenshot(pixels):
  got = told(base.Observation(pixels, "Go.", axtree="RootWebArea 'é'"))
  np.testing.assert_array_equal(got.screenshot, pixels)
  assert (got.instruction, got.axtree) == ("Go.", "RootWebArea 'é'")


def test_numbers_of_numpy_are_numbers():
  info = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True)}
  got = told(base.Observation(np.zeros((1, 1, 3), np.uint8), info=info))
  assert got.info == {"a": 0.5, "b": [0, 1, 2], "c": True}


def test_what_has_no_json_is_refused_by_its_type():
  with pytest.raises(TypeError, match="object .*has no JSON"):
    told({"x": object()})


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"\0\0\0\x02{}",
    b"\0\0\0\xff{",
    b"\x80\x04N.",
    workers.encode_message({}, {})[:-1],
    workers.encode_message({}).replace(b'"json"', b'"exec"'),
    workers.encode_message({}).replace(b'"json"', b'"task"'),
    workers.encode_message({}, base.Observation(np.zeros((2, 2, 3), "u1")))[
      :-1
    ],
  ],
)
def test_what_is_no_message_is_refused(data):
  with pytest.raises(ValueError):
    workers.decode_message(data)
