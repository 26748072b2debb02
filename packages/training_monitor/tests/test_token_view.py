"""A turn's token view: its tokens, and measures that are missing."""

import pytest
from training_monitor.dashboard import token_text
from training_monitor.dashboard import token_view

IDS = [1200, 1300, 1201]


def rollout(**changes):
  return {
    "source_type": "step",
    "batch": None,
    "advantage": None,
    "model_path": "tiny_vl@3",
    "summary_json": {},
    **changes,
  }


def turn(number=1, logprobs=None, raw=None, **metrics):
  action = {"tokens": IDS, "logprobs": logprobs, "raw": {}}
  return {
    "turn": number,
    "actions": [action],
    "metrics": metrics,
    "raw": raw or {},
  }


@pytest.fixture(scope="module", name="view")
def _view():
  return token_view.TokenView(token_text.TokenTexts()).of


def test_what_nobody_recorded_is_said_and_never_zero(view):
  shown = view(rollout(), turn(), "entropy")
  assert dict(shown["heats"]) == {
    "probability": "not recorded",
    "log-prob": "not recorded",
    "entropy": "not recorded",
    "advantage": "not recorded",
    "loss mask": "no update yet",
    "policy version": "not recorded",
  }
  assert shown["heat"] == "" and shown["sampled"] == 3
  assert all(t["known"] == {} and t["shade"] is None for t in shown["tokens"])
  shown = view(rollout(), turn(entropies=None, logprobs=[-1.0] * 3), "entropy")
  assert shown["heat"] == "probability"  # The first that can be shown.
  assert dict(shown["heats"])["entropy"] == "not recorded"


def test_entropies_of_another_number_are_not_believed(view):
  for bad in ([0.5], "0.5", [0.5, None, 0.5], {"a": 1}, 7):
    shown = view(rollout(), turn(entropies=bad), "entropy")
    assert dict(shown["heats"])["entropy"] == "not recorded"


def test_entropy_is_shaded_from_zero_up(view):
  shown = view(rollout(), turn(entropies=[0.0, 1.0, 2.0]), "entropy")
  assert [t["shade"] for t in shown["tokens"]] == [0, 4, 8]
  assert [t["known"]["entropy"] for t in shown["tokens"]] == [0.0, 1.0, 2.0]
  # All alike is not all high: 0 is where the scale begins.
  shown = view(rollout(), turn(entropies=[0.0] * 3), "entropy")
  assert [t["shade"] for t in shown["tokens"]] == [0, 0, 0]


def test_each_turn_has_its_own_advantage(view):
  row = rollout(advantage=0.5, summary_json={"advantages": [-1.0, 2.0]})
  for number, value in ((1, -1.0), (2, 2.0), (3, 0.5)):
    shown = view(row, turn(number), "advantage")
    assert {t["known"]["advantage"] for t in shown["tokens"]} == {value}


@pytest.mark.parametrize(
  "left_out, marks, words",
  [
    (["", "too_long"], ("in", "out"), "learner.row_length"),
    (["low_entropy", ""], ("out", "in"), "algorithm.entropy_share"),
    (["invalid", "invalid"], ("out", "out"), "infrastructure"),
    ("group_dropped", ("out", "out"), "group was dropped"),
    (["", "<b>"], ("in", "out"), "<b>"),  # The template escapes it.
  ],
)
def test_the_mask_is_the_learners_turn_by_turn(view, left_out, marks, words):
  row = rollout(batch=4, summary_json={"left_out": left_out})
  for number, mark in enumerate(marks, 1):
    shown = view(row, turn(number), "loss mask")
    assert [t["mark"] for t in shown["tokens"]] == [mark] * 3
    assert {t["known"]["loss mask"] for t in shown["tokens"]} == {
      float(mark == "in")
    }
    (kind,) = shown["legend"]
    assert kind["count"] == 3 and kind["mark"] == mark
    assert (words in kind["name"]) == (mark == "out")


def test_measurements_are_never_trained_on(view):
  for kind in ("eval", "baseline"):
    shown = view(rollout(source_type=kind), turn(), "loss mask")
    assert {t["mark"] for t in shown["tokens"]} == {"out"}
    assert "no update learns from it" in shown["legend"][0]["name"]


def test_what_was_added_to_the_prompt_stands_before(view):
  row = rollout(summary_json={"left_out": [""]})
  recorded = turn(
    logprobs=[-1.0] * 3, prompt_tokens=[[7, 1], [9, 3], [5, 48], [6, -2]]
  )
  shown = view(row, recorded, "loss mask")
  prompt = [t for t in shown["tokens"] if t["mark"] == "prompt"]
  assert [(t["id"], t["times"]) for t in prompt] == [
    (7, 1),
    (9, 1),
    (9, 1),
    (9, 1),
    (5, 48),
  ]
  assert shown["tokens"][: len(prompt)] == prompt and shown["sampled"] == 3
  assert [(k["mark"], k["count"]) for k in shown["legend"]] == [
    ("in", 3),
    ("prompt", 52),
  ]
  # Other heats are of sampled tokens alone.
  assert len(view(row, recorded, "probability")["tokens"]) == 3
  for bad in ("x", [[1]], [["a", 2]], 7, {"a": 1}):
    shown = view(row, turn(prompt_tokens=bad), "loss mask")
    assert len(shown["tokens"]) == 3
