"""Items of trajectories: exact for this package's, strict with others'."""

import base64
import io
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences
from tunix.rl.multi_turn.trajectory_collector import records

_PLACEHOLDER, _BREAK = 7, 6
_STORE = images_lib.ImageStore()
_REFS = [_STORE.put(np.full((4, 6 + i, 3), 40 * i, np.uint8)) for i in range(3)]
_TEXT = st.text(max_size=8)


@st.composite
def sequences(draw):
  """Turns of a prompt, perhaps with an image, and sampled tokens."""
  tokens, mask, logprobs, versions, turns, spans = [], [], [], [], [], []
  entropies = [] if draw(st.booleans()) else None
  support = [] if draw(st.booleans()) else None
  for turn in range(draw(st.integers(1, 4))):
    prompt = draw(st.lists(st.integers(8, 99), min_size=1, max_size=3))
    if draw(st.booleans()):
      run = [_PLACEHOLDER] * draw(st.integers(1, 3))
      row = draw(st.sampled_from([0, len(run)]))
      if row:  # Rows with a break between each two.
        run += ([_BREAK] + run) * draw(st.integers(0, 2))
      spans.append(
        trajectory_lib.ImageSpan(
          draw(st.sampled_from(_REFS)), len(tokens), len(run), row
        )
      )
      prompt = run + prompt
    reply = draw(st.lists(st.integers(8, 99), max_size=4))
    tokens += prompt + reply
    mask += [False] * len(prompt) + [True] * len(reply)
    logprobs += [0.0] * len(prompt) + [
      draw(st.floats(-9, 0, width=32)) for _ in reply
    ]
    versions += [-1] * len(prompt) + [draw(st.integers(0, 9)) for _ in reply]
    turns += [turn] * (len(prompt) + len(reply))
    if entropies is not None:
      entropies += [0.0] * len(prompt) + [
        draw(st.floats(0, 3, width=32)) for _ in reply
      ]
    if support is not None:
      support += [[-1, -1]] * len(prompt) + [[t, 100] for t in reply]
  return trajectory_lib.TokenSequence(
    tokens, mask, logprobs, versions, turns, tuple(spans), entropies, support
  )


@st.composite
def episodes(draw, name):
  steps, history = [], []
  for _ in range(draw(st.integers(0, 3))):
    if draw(st.booleans()):
      history = history[-1:]  # A sliding window.
    history = history + [
      {
        "role": "user",
        "content": [
          {"type": "text", "text": draw(_TEXT)},
          {"type": "image", "image": draw(st.sampled_from(_REFS))},
        ],
      },
      {"role": "assistant", "content": draw(_TEXT)},
    ]
    steps.append(
      trajectory_lib.Step(
        chat_completions=history,
        action=trajectory_lib.Action([trajectory_lib.ToolCall("f", {})]),
        observation=draw(st.sampled_from(_REFS)),
        reward=draw(st.floats(-1, 1)),
        info={"$type": "odd", "n": draw(st.integers())},
      )
    )
  status = draw(
    st.sampled_from(
      [
        s
        for s in trajectory_lib.TrajectoryStatus
        if s is not trajectory_lib.TrajectoryStatus.RUNNING
      ]
    )
  )
  return trajectory_lib.Trajectory(
    task={"task_id": "t", "text": draw(_TEXT)},
    steps=steps,
    reward=draw(st.floats(-5, 5)),
    status=status,
    error=draw(st.none() | _TEXT),
    sequences=draw(st.lists(sequences(), max_size=2)),
    trajectory_id=name,
    metrics={"seconds": draw(st.floats(0, 9))},
    stale_tokens=draw(st.integers(0, 2)),
  )


@st.composite
def groups(draw):
  size = draw(st.integers(1, 3))
  return trajectory_lib.TrajectoryGroup(
    group_id="train-000003",
    task_id=draw(_TEXT),
    trajectories=tuple(
      draw(episodes(f"train-000003.{i}")) for i in range(size)
    ),
    start_version=draw(st.integers(0, 5)),
    attempt=draw(st.integers(0, 2)),
    peer_rewards=tuple(draw(st.lists(st.floats(-1, 1), max_size=2))),
    extra=draw(st.none() | episodes("train-000003.greedy")),
  )


def _equal(a, b):
  assert a.to_json() == b.to_json()
  for x, y in zip(a, b, strict=True):
    assert x == y


@given(groups(), st.randoms())
@settings(deadline=None, max_examples=60)
def test_a_group_comes_back_from_its_items_as_it_was(group, random):
  items = records.write_group(group, _STORE, timestamp=1.0)
  random.shuffle(items)
  text = json.dumps(items, allow_nan=False)
  elsewhere = images_lib.ImageStore()
  back = records.read_group(json.loads(text), elsewhere)
  _equal(back, group)
  for ref in records.refs_of([json.loads(text)]).values():
    assert np.array_equal(elsewhere.get(ref), _STORE.get(ref))


@given(sequences())
@settings(deadline=None, max_examples=60)
def test_null_stands_for_what_was_not_sampled_never_zero(sequence):
  written = recorded_sequences.write(sequence)
  for name in ("logprobs", "versions"):
    assert [v is None for v in written[name]] == list(~sequence.loss_mask)


def _item(**changes):
  return {
    "uid": "u1",
    "instance_id": "math_1",
    "messages": [
      {"role": "user", "content": "1+1"},
      {"role": "assistant", "content": "2"},
    ],
    "reward": 0.5,
    "extra_info": {"timestamp": 3.0, "finish_reason": "stop"},
  } | changes


@pytest.mark.parametrize("key", records.REQUIRED)
def test_each_required_key_is_demanded_by_name(key):
  item = _item()
  del item[key]
  with pytest.raises(ValueError, match=f"{key} is missing"):
    records.read(item)


@pytest.mark.parametrize(
  "changes, problem",
  [
    ({"instance_id": ""}, "instance_id='' must be a text"),
    ({"instance_id": 1.5}, "instance_id=1.5 must be a text"),
    ({"uid": None}, "uid=None must be a text"),
    ({"messages": "hello"}, "messages='hello' must be a list"),
    ({"messages": [{"content": "x"}]}, "with a text 'role'"),
    ({"reward": "1"}, "reward='1' must be a finite number"),
    ({"reward": float("nan")}, "reward: .*finite"),
    ({"reward": None}, "reward=None must be a finite number"),
    ({"raw_reward": float("inf")}, "raw_reward: .*finite"),
    ({"extra_info": []}, r"extra_info=\[\] must be an object"),
    ({"tokens": [1, 2]}, "lacks loss_mask"),
    ({"tokens": [1], "loss_mask": [0, 1]}, "2 entries for 1 tokens"),
    ({"tokens": [1], "loss_mask": [2]}, "0 or 1"),
    ({"tokens": [-1], "loss_mask": [0]}, "ids >= 0"),
    ({"tokens": ["a"], "loss_mask": [0]}, "flat list of numbers"),
    ({"tokens": [[1]], "loss_mask": [0]}, "flat list of numbers"),
    ({"tokens": [1.5], "loss_mask": [0]}, "whole ones"),
    (
      {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0, "x"]},
      "numbers or nulls",
    ),
    (
      {"tokens": [1, 2], "loss_mask": [0, 1], "versions": [0, 1.5]},
      "numbers or nulls",
    ),
    (
      {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0, 0.5]},
      "logprobs must be <= 0",
    ),
    (
      {"tokens": [1, 2], "loss_mask": [0, 1], "images": [{"sha256": "a" * 64}]},
      "each needs sha256, width",
    ),
    ({"sequences": {}}, "sequences must be a list"),
    ({"sequences": [3]}, r"sequences\[0\] must be an object"),
  ],
)
def test_a_wrong_field_is_named_with_its_value(changes, problem):
  with pytest.raises(ValueError, match=problem):
    records.read(_item(**changes))


def test_a_number_is_as_good_an_id_as_text():
  assert records.read(_item(instance_id=17)).instance_id == "17"


@pytest.mark.parametrize(
    "written, seconds",
    [(12.5, 12.5), ("1764000000.25", 1764000000.25), (7, 7.0), (None, 0.0),
     ("2026-01-01T00:00:00", 0.0), ("", 0.0), ([1], 0.0), ("nan", 0.0),
     (10**400, 0.0)],
)  # fmt: skip
def test_a_timestamp_is_a_number_or_its_text_and_else_unknown(written, seconds):
  record = records.read(_item(extra_info={"timestamp": written}))
  assert record.timestamp == seconds
  assert records.read(_item(extra_info={})).timestamp == 0.0


def test_what_was_not_recorded_is_refused_or_flagged_but_never_zero():
  record = records.read(
    _item(
      tokens=[1, 2, 3, 4],
      loss_mask=[0, 1, 0, 1],
      logprobs=[None, -0.5, None, None],
    )
  )
  (sequence,) = record.sequences
  assert not sequence.has_logprobs and not sequence.has_versions
  assert np.isnan(sequence.logprobs[3]) and sequence.versions[1] == -1
  with pytest.raises(ValueError, match="uid='u1'.*no recorded log-prob"):
    record.trajectory(version=4)
  with pytest.raises(ValueError, match="no recorded version"):
    record.trajectory(placeholder_logprobs=True)
  episode = record.trajectory(version=4, placeholder_logprobs=True)
  assert episode.metrics == {"logprobs_missing": 1, "versions_missing": 1}
  assert episode.versions == (4, 4)


def test_an_item_of_elsewhere_in_its_short_form_is_one_sequence_of_turns():
  record = records.read(
    _item(
      tokens=[5, 1, 2, 6, 3],
      loss_mask=[0, 1, 1, 0, 1],
      logprobs=[None, -1.0, -2.0, None, -3.0],
      versions=[None, 2, 2, None, 3],
    )
  )
  episode = record.trajectory()
  (sequence,) = episode.sequences
  assert sequence.logprobs.tolist() == [0, -1, -2, 0, -3]
  assert sequence.versions.tolist() == [-1, 2, 2, -1, 3]
  assert sequence.turn_ids.tolist() == [0, 0, 0, 1, 1]
  assert not episode.metrics and episode.trajectory_id == "u1"
  assert [s.model_response for s in episode.steps] == ["2"]
  assert episode.steps[0].reward == 0.5


@pytest.mark.parametrize(
  "changes, status",
  [
    ({}, "succeeded"),
    ({"reward": 0}, "failed"),
    ({"reward": -0.2, "raw_reward": 0.4}, "succeeded"),
    ({"extra_info": {"finish_reason": "length"}}, "context_limit"),
    ({"extra_info": {"status": "env_error"}}, "env_error"),
    ({"extra_info": {"status": "running"}}, "succeeded"),
  ],
)
def test_the_status_of_an_item_of_elsewhere(changes, status):
  episode = records.read(_item(**changes)).trajectory()
  assert episode.status.value == status
  assert episode.metrics.get("raw_reward") == changes.get("raw_reward")


def test_padded_copies_of_a_member_get_names_of_their_own():
  found = [records.read(_item()), records.read(_item())]
  group = records.group_of(found, [r.trajectory() for r in found])
  assert [t.trajectory_id for t in group] == ["u1", "u1#2"]
  assert group.group_id == group.task_id == "math_1"


def test_another_image_under_a_hash_is_refused():
  file = io.BytesIO()
  Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(file, "PNG")
  picture = base64.b64encode(file.getvalue()).decode()
  for text, problem in (
    (picture, "is another image"),
    ("%%", "not base64"),
    (base64.b64encode(b"x").decode(), "no image"),
  ):
    with pytest.raises(ValueError, match=problem):
      records.read_images({"images": {"0" * 64: text}}, images_lib.ImageStore())


def test_items_of_several_instances_are_no_group():
  found = [records.read(_item()), records.read(_item(instance_id="b"))]
  with pytest.raises(ValueError, match="one instance_id"):
    records.group_of(found, [r.trajectory() for r in found])
