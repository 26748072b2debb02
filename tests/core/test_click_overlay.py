"""Actions drawn over a screenshot: by the report, the dashboard, exports."""

import re

import pytest
from tunix.rl.multi_turn.core import click_overlay
from tunix.rl.multi_turn.core import gui_action

W, H = 400, 200
Kind = gui_action.GuiActionKind


def drawn(*actions, scale=1.0):
  gestures = [click_overlay.gesture(a["kind"], a) for a in actions]
  return click_overlay.marks(gestures, W, H, scale)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_action_with_a_place_has_a_mark_there(kind):
  required, _ = gui_action.fields_of(kind)
  arguments = {"x": 40.0, "y": 60.0, "x2": 90.0, "y2": 80.0}
  action = {"kind": kind.value} | {
    name: arguments.get(name, "text") for name in required
  }
  marks = drawn(action)
  if {"x", "y"} <= required:
    assert marks[0].ring == (40.0, 60.0)
  if {"x2", "y2"} <= required:
    assert marks[0].head[1] == (90.0, 80.0)
  if kind is Kind.SCROLL:  # In the middle, when it has no place.
    assert marks[0].ring == (W / 2, H / 2)
  elif not required & arguments.keys():
    assert not marks


@pytest.mark.parametrize(
  "arguments, at, to",
  [
    ({"x": 1, "y": 2}, (1, 2), None),
    ({"point": [3, 4]}, (3, 4), None),
    ({"coordinate": [0, 0, 10, 20]}, (5, 10), None),  # A box.
    ({"start": [1, 1], "end": [5, 6]}, (1, 1), (5, 6)),
    ({"x2": 5, "y2": 6}, None, (5, 6)),
    ({"x": "1", "y": 2}, None, None),
    ({}, None, None),
    ({"point": ["a", "b"]}, None, None),
  ],
)
def test_arguments_of_other_grammars_are_read(arguments, at, to):
  gesture = click_overlay.gesture("drag", arguments)
  assert (gesture.at, gesture.to) == (at, to)


def test_labels_name_button_count_and_typed_text():
  gesture = click_overlay.gesture("click", {"button": "right", "count": 2})
  assert gesture.label == "double right click"
  assert click_overlay.gesture("key", {"keys": ["ctrl", "c"]}).text == "ctrl+c"
  scroll = click_overlay.gesture("scroll", {"dy": 40, "dx": -3})
  assert scroll.label == "scroll down 40 left 3"
  assert click_overlay.gesture("type", {"text": "farm"}).caption == (
    "type “farm”"
  )


@pytest.mark.parametrize(
  "kind, arguments, label, shapes",
  [
    ("click", {}, "click", 1),
    ("click", {"count": 2}, "double click", 2),
    ("double_click", {}, "double click", 2),
    ("click", {"count": 3}, "triple click", 3),
    ("right_click", {}, "right click", 1),
    ("click", {"button": "right"}, "right click", 1),
    ("long_press", {}, "long press", 1),
  ],
)
def test_clicks_of_each_kind_are_named_and_drawn_unlike(
  kind, arguments, label, shapes
):
  arguments = {"x": 100, "y": 90, **arguments}
  (mark,) = drawn({"kind": kind, **arguments})
  assert click_overlay.gesture(kind, arguments).label == label
  svg = click_overlay.svg([mark], W, H)
  shape = "rect" if "right" in label else "circle"
  rings = re.findall(rf'<{shape} class="ring( held)?"', svg)
  assert len(rings) == 2 * shapes  # Each with a light edge.
  assert all(rings) == ("long" in label)
  radii = [float(v) for v in re.findall(r'class="ring" [^>]*r="([\d.]+)"', svg)]
  assert len(set(radii)) == (shapes if "double" in label else len(set(radii)))


def test_a_scroll_points_to_the_content_that_comes_into_view():
  (mark,) = drawn({"kind": "scroll", "x": 100, "y": 50, "dx": 0, "dy": 5000})
  assert mark.line[0] == (100, 50)
  assert mark.line[1] == (100, pytest.approx(50 + H / 3))  # Inside the screen.


def test_several_are_numbered_and_one_is_not():
  click = {"kind": "click", "x": 1, "y": 2}
  assert [m.number for m in drawn(click)] == [0]
  marks = drawn(click, {"kind": "wait"}, click)
  assert [m.number for m in marks] == [1, 3]
  svg = click_overlay.svg(marks, W, H)
  assert re.findall(r">(\d)</text>", svg) == ["1", "3"]


def test_the_drawing_is_in_the_screenshots_pixels_and_has_no_style():
  svg = click_overlay.svg(
    drawn({"kind": "drag", "x": 50, "y": 50, "x2": 150, "y2": 90}), W, H
  )
  assert f'viewBox="0 0 {W} {H}"' in svg and "M50.0 50.0L150.0 90.0" in svg
  assert svg.count('class="rim"') == svg.count('class="act"') == 1
  assert "style" not in svg


def test_a_smaller_picture_has_larger_marks():
  click = {"kind": "click", "x": 1, "y": 2}
  assert drawn(click, scale=2.0)[0].radius == 2 * drawn(click)[0].radius
