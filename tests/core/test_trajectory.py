"""Trajectories as JSON: what goes in comes back."""

import json

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import trajectory as trajectory_lib

KEYS = st.sampled_from(["$type", "value", "items", "a"])
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.text()
  | KEYS
  | st.sampled_from(["dict", "float", "Action", "ImageRef", "ndarray"])
  | st.floats(allow_nan=False),
  lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
  max_leaves=12,
)


@given(VALUES)
def test_any_json_value_comes_back(value):
  """Also one that looks like what a typed value is written as."""
  written = json.loads(json.dumps(trajectory_lib.encode(value)))
  assert trajectory_lib.decode(written) == value


@pytest.mark.parametrize(
  "arguments",
  [
    {"$type": "x"},
    {"$type": None},
    {"$type": "ImageRef", "at": [{"$type": "float", "value": "1"}]},
    {"$type": "dict", "items": []},
  ],
)
def test_whatever_the_policy_writes_into_a_call_can_be_loaded(arguments):
  ref = trajectory_lib.ImageRef("0" * 64, 2, 1)
  call = trajectory_lib.ToolCall("f", {**arguments, "image": ref}, "1")
  step = trajectory_lib.Step(
    action=trajectory_lib.Action([call]), info={"seen": arguments}
  )
  before = trajectory_lib.Trajectory(task={"q": arguments}, steps=[step])
  after = trajectory_lib.Trajectory.from_json(
    json.loads(json.dumps(before.to_json()))
  )
  assert after.steps[0].action.tool_calls == [call]
  assert after.steps[0].info == {"seen": arguments}
  assert after.task == {"q": arguments}


def test_an_unknown_type_is_refused():
  with pytest.raises(ValueError, match="unknown"):
    trajectory_lib.decode({"$type": "x"})


@pytest.mark.parametrize(
  "array",
  [
    np.array([1.5, np.nan, -np.inf], np.float32),
    np.array([[True, False]]),
    np.array(["a", "bc"]),
    np.array([], np.int64),
  ],
)
def test_arrays_come_back(array):
  text = json.dumps(trajectory_lib.encode(array), allow_nan=False)
  back = trajectory_lib.decode(json.loads(text))
  assert back.dtype == array.dtype
  np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
  "array", [np.array([object()]), np.array([b"x"]), np.array([1j])]
)
def test_arrays_that_json_cannot_hold_are_refused(array):
  with pytest.raises(TypeError, match="dtype"):
    trajectory_lib.encode(array)


@pytest.mark.parametrize(
  "data, dtype",
  [([300], "uint8"), (["a"], "S4000000000"), ([1], "O"), ([1], "nonsense")],
)
def test_arrays_that_were_not_encoded_are_refused(data, dtype):
  with pytest.raises((ValueError, TypeError), match="dtype|data type"):
    trajectory_lib.decode({"$type": "ndarray", "data": data, "dtype": dtype})


def test_a_text_array_is_no_wider_than_its_texts():
  array = trajectory_lib.decode(
    {"$type": "ndarray", "data": ["ab"], "dtype": "<U500000000"}
  )
  assert array.dtype == "<U2" and array.tolist() == ["ab"]
