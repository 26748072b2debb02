"""The report of a run: what it shows, that it is safe, that it survives."""

import html.parser
import json
import re
import shutil

import hypothesis
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
import synthetic_run
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import run_data
from tunix.rl.multi_turn.reporting import svg

EVIL = "<script>alert('x')</script><img src=http://evil/ onerror=go()>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("runs") / "demo"
  synthetic_run.write(directory, steps=24, limit=40, says=EVIL)
  return directory


class _Page(html.parser.HTMLParser):
  """Tags, attributes and text; fails on tags that are not closed."""

  _VOID = ("meta", "br", "image", "line", "circle", "rect", "polyline", "path")

  def __init__(self):
    super().__init__()
    self.open, self.tags, self.links, self.text = [], [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    for name, value in attrs:
      assert not name.startswith("on"), f"handler {name} in <{tag}>"
      if name in ("href", "src", "xlink:href"):
        self.links.append(value)
    if tag not in self._VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in self._VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def parse(page: str) -> _Page:
  parsed = _Page()
  parsed.feed(page)
  assert not parsed.open
  return parsed


def test_the_page_stands_alone_and_nothing_a_model_wrote_is_markup(run_dir):
  page = report.render(run_data.load(run_dir))
  parsed = parse(page)
  assert "script" not in parsed.tags and "img" not in parsed.tags
  assert parsed.links and all(
    link.startswith("data:image/") for link in parsed.links
  )
  assert "url(" not in page and "@import" not in page
  text = " ".join(parsed.text)
  assert "<script>alert('x')</script>" in text  # Shown, as text.
  assert "drag-<b>file</b>" in text


def test_it_shows_the_figures_of_the_run(run_dir):
  text = " ".join(parse(report.render(run_data.load(run_dir))).text)
  assert "0.875" in text and "before GRPO (warm_start)" in text
  assert "0.425 [0.340, 0.514]" in re.sub(r"\s+", " ", text)
  for name in ("initial", "step_12", "entropy", "step/EnvStepError"):
    assert name in text


def test_the_clicked_points_are_drawn_in_the_screenshots_pixels(run_dir):
  page = report.render(run_data.load(run_dir))
  assert f'viewBox="0 0 {synthetic_run.W} {synthetic_run.H}"' in page
  assert 'cx="40.0" cy="60.0"' in page
  assert "M50.0 50.0L150.0 90.0" in page  # The drag of a third turn.


def test_failures_and_successes_of_a_family_are_told_together(run_dir):
  episodes = run_data.load(run_dir).episodes
  stories = run_data.choose_episodes(episodes, 6)
  assert len(stories) == 3
  for early, late in stories:
    assert early.family == late.family
    assert early.success != late.success and early.time <= late.time
  assert [len(s) for s in run_data.choose_episodes(episodes, 3)] == [2]
  assert not run_data.choose_episodes(episodes, 0)


def test_the_command_writes_the_page_and_nothing_else(run_dir, capsys):
  assert report.main([str(run_dir)]) == 0
  assert "report.html" in capsys.readouterr().out
  assert (run_dir / "report.html").stat().st_size < 2_000_000
  assert not list(run_dir.glob("*.part"))


def test_an_unfinished_torn_run_still_has_a_report(run_dir, tmp_path):
  run = tmp_path / "torn"
  shutil.copytree(run_dir, run)
  shutil.rmtree(run / "images")
  (run / "summary.json").write_text('{"run_name": "torn", "ev')
  for name in ("metrics.jsonl", "trajectories.jsonl"):
    text = (run / name).read_text()
    (run / name).write_text(text[: len(text) * 2 // 3])
  page = report.build_report(run)
  assert "screenshot not kept" in page.read_text()


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
  (tmp_path / "summary.json").write_text(json.dumps({"run_name": "new"}))
  page = report.build_report(tmp_path)
  assert "<h1>new</h1>" in page.read_text()


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
  assert report.main([str(tmp_path)]) == 1
  assert "is not a run directory" in capsys.readouterr().err
  assert report.main([]) == 2


def test_a_large_screenshot_is_shrunk_in_the_page(tmp_path):
  pixels = np.random.default_rng(0).integers(
    0, 255, (1080, 1920, 3), dtype=np.uint8
  )
  ref = trajectory_lib.ImageRef(images_lib.hash_pixels(pixels), 1920, 1080)
  (tmp_path / "images").mkdir()
  Image.fromarray(pixels).save(tmp_path / "images" / f"{ref.sha256}.png")
  run = run_data.RunDirectory(tmp_path, {}, (), (), "")
  uri = report.data_uri(run, run_data.Frame(ref, (), "", "", ""), 960)
  assert uri.startswith("data:image/jpeg") and len(uri) < 1_500_000


# --- parts --------------------------------------------------------------------


def test_smoothing_is_a_mean_and_unbiased_from_the_start():
  assert run_data.smooth([1.0, 5.0], 1) == [1.0, 5.0]
  assert run_data.smooth([3.0] * 50, 10) == pytest.approx([3.0] * 50)
  out = run_data.smooth([0.0] * 50 + [1.0] * 50, 9)
  assert out[49] == 0 and out[58] == pytest.approx(1 - 0.8**9, rel=1e-4)
  assert out[-1] > 0.99


@pytest.mark.parametrize(
  "low, high, expected",
  [
    (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (0, 60, [0, 20, 40, 60]),
    (-3, 7, [-2, 0, 2, 4, 6]),
    (5, 5, [5]),
  ],
)
def test_ticks_are_round_numbers_inside(low, high, expected):
  assert svg.ticks(low, high) == pytest.approx(expected)


@hypothesis.given(
  st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10)
)
def test_an_axis_has_two_ticks_at_least_and_few(low, span, count):
  ticks = svg.ticks(low, low + span, count)
  assert 2 <= len(ticks) <= max(count, 6) + 1
  assert ticks == sorted(set(ticks))
  slack = span * 1e-6 + abs(low) * 1e-9
  assert all(low - slack <= tick <= low + span + slack for tick in ticks)


def test_a_fault_of_a_turn_is_named_once():
  step = trajectory_lib.Step(
    info={"parse_errors": ["no call"], "invalid_actions": ["no call", "b"]}
  )
  trajectory = trajectory_lib.Trajectory(steps=[step])
  assert run_data.frames_of(trajectory)[0].note == "no call; b"


def test_steps_are_whole():
  assert svg.ticks(0, 5, 8, integers=True) == [0, 1, 2, 3, 4, 5]
  assert svg.ticks(0.5, 1.5, 8, integers=True) == [1]
  line = svg.Line("a", [1.0, 2.0], [0.0, 1.0], [0.0, 1.0])
  drawn = svg.line_chart([line], y_range=(10.0, 20.0))
  assert "1.5</text>" not in drawn and ">2</text>" in drawn


@pytest.mark.parametrize(
  "value, text",
  [
    (0, "0"),
    (0.25, "0.25"),
    (1234, "1234"),
    (20, "20"),
    (1e-4, "1.0e-4"),
    (123456, "1.2e5"),
    (-0.5, "-0.5"),
  ],
)
def test_numbers_are_short(value, text):
  assert svg.number(value) == text


@pytest.mark.parametrize(
  "action, text",
  [
    ({"kind": "click", "x": 3.0, "y": 4.0}, "click (3, 4)"),
    ({"kind": "click", "x": 1, "y": 2, "count": 2}, "double click (1, 2)"),
    (
      {"kind": "click", "x": 1, "y": 2, "button": "right"},
      "right click (1, 2)",
    ),
    ({"kind": "drag", "x2": 5, "y2": 6}, "drag to (5, 6)"),
    ({"kind": "scroll", "x": 1, "y": 1, "dy": 40}, "scroll (1, 1) by (0, 40)"),
    ({"kind": "key", "keys": ["ctrl", "c"]}, "key ctrl+c"),
    ({"kind": "type", "text": ""}, "type “”"),
    ({"kind": "terminate", "success": False}, "terminate failure"),
  ],
)
def test_actions_in_words(action, text):
  assert run_data.describe_action(action) == text


def test_charts_of_nothing_are_empty_and_of_one_point_are_drawn():
  assert svg.line_chart([]) == ""
  assert svg.interval_bars([], []) == ""
  one = svg.line_chart([svg.Line("x", [3.0], [0.5], [0.5])])
  assert "<circle" in one and "nan" not in one
