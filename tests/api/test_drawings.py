"""A notebook draws the package's values by IPython's formatters."""

from __future__ import annotations

import dataclasses
import html
import io
import subprocess
import sys
import textwrap

from IPython.core import formatters as ipython
import numpy as np
from PIL import Image
import pytest
import tunix.rl.multi_turn as mt
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base


@pytest.fixture
def shown():
  """value -> what a notebook gets of it, by MIME type."""
  formatter = ipython.DisplayFormatter()
  formatter.active_types = list(formatter.format_types)
  mt._draw_in(formatter.formatters)
  return lambda value: formatter.format(value)[0]


@pytest.fixture(scope="module")
def episode():
  return mt.play("oracle", "enter-text", gym="desktop")


def pixels_of(png: bytes) -> np.ndarray:
  return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_a_trajectory_is_a_film(shown, episode):
  trajectory = episode.trajectory
  drawn = shown(trajectory)
  assert drawn["text/html"].count("data:image") == trajectory.num_turns + 1
  assert "succeeded" in drawn["text/html"]
  assert len(drawn["text/plain"]) < 200 and "\n" not in drawn["text/plain"]


def test_an_episode_of_texts_shows_what_was_said(shown):
  """No screen was ever there, so none is missing."""
  step = trajectory_lib.Step(
    chat_completions=[
      {"role": "system", "content": "Be short."},
      {"role": "user", "content": "Say <sun> twice."},
      {"role": "assistant", "content": "sun sun"},
    ],
    model_response="sun sun",
  )
  drawn = shown(trajectory_lib.Trajectory(steps=[step]))["text/html"]
  assert "not kept" not in drawn
  escaped = html.escape(html.escape("Say <sun> twice."))
  assert drawn.count(escaped) == 2  # As the task, and as what was answered.
  assert "sun sun" in drawn and "reward 0, 1 turn&lt;" in drawn


def test_a_step_shows_its_screen(shown, episode):
  drawn = shown(episode.trajectory.steps[0])
  assert drawn["text/html"].count("data:image") == 1
  assert "click (" in drawn["text/html"]


def test_a_reference_is_its_picture_through_its_store(shown):
  store = images_lib.ImageStore()
  pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
  ref = store.put(pixels)
  drawn = shown(ref)
  assert "text/html" not in drawn
  np.testing.assert_array_equal(pixels_of(drawn["image/png"]), pixels)
  del store
  absent = shown(ref)
  assert "image/png" not in absent and "no store" in absent["text/html"]


def test_a_reference_of_a_run_that_was_read_is_its_picture(shown, episode):
  (part, _) = episode.trajectory.steps[0].chat_completions[0]["content"]
  np.testing.assert_array_equal(
    pixels_of(shown(part["image"])["image/png"]),
    np.asarray(episode.screenshot(0)),
  )


def test_an_observation_is_its_screen(shown):
  screen = base.Observation(np.full((6, 8, 3), 7, np.uint8), text="<b>Hi</b>")
  drawn = shown(screen)
  pixels = pixels_of(drawn["image/png"])
  np.testing.assert_array_equal(pixels, screen.screenshot)
  assert "&lt;b&gt;Hi" in drawn["text/html"]
  assert drawn["text/plain"] == "Observation(8x6, '<b>Hi</b>')"


def test_an_observation_without_a_screen_is_its_tree(shown):
  drawn = shown(base.Observation(None, axtree="[1] button '<OK>'"))
  assert "image/png" not in drawn and "<img" not in drawn["text/html"]
  assert "[1] button &#x27;&lt;OK&gt;&#x27;" in drawn["text/html"]
  both = base.Observation(np.zeros((6, 8, 3), np.uint8), axtree="[1] link")
  html = shown(both)["text/html"]
  assert "<img" in html and "[1] link" in html


def test_a_task_and_a_verdict_are_tables(shown):
  task = base.Task("a/1", "a", "Press <OK>", params={"url": "x" * 5000})
  html = shown(task)["text/html"]
  assert "Press &lt;OK&gt;" in html and len(html) < 2000
  verdict = shown(base.Evaluation(0.5, False, {"hits": 3}))["text/html"]
  assert "hits" in verdict and "0.5" in verdict


def test_a_task_of_ones_own_class_is_drawn_too(shown):
  @dataclasses.dataclass(frozen=True)
  class Mine(base.Task):
    pass

  assert "Do it" in shown(Mine("a/1", "a", "Do it"))["text/html"]


LONG = "x" * 100_000


@pytest.mark.parametrize(
  "value",
  [
    trajectory_lib.Step(model_response=LONG, info={"a": LONG}),
    trajectory_lib.Step(action=[trajectory_lib.ToolCall("a", {"b": LONG})]),
    trajectory_lib.Trajectory(
      steps=[trajectory_lib.Step(model_response=LONG)],
      error=LONG,
      trajectory_id=LONG,
    ),
    trajectory_lib.TrajectoryGroup(
      LONG,
      LONG,
      [
        trajectory_lib.Trajectory(status=trajectory_lib.TrajectoryStatus.FAILED)
      ],
    ),
    trajectory_lib.TokenSequence(
      np.zeros(9999),
      np.zeros(9999),
      np.zeros(9999),
      np.full(9999, -1),
      np.zeros(9999),
    ),
    base.Task(LONG, LONG, LONG, params={"a": LONG}),
    base.Observation(np.zeros((9, 9, 3), np.uint8), text=LONG),
    images_lib.ImageStore().put(np.zeros((9, 9, 3), np.uint8)),
  ],
)
def test_a_repr_is_one_short_line(value):
  assert len(repr(value)) < 400 and "\n" not in repr(value)


@pytest.mark.slow
def test_importing_the_package_draws_and_imports_nothing():
  program = """
    import sys
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.display_formatter.active_types = ["text/plain", "text/html"]
    import tunix_multi_turn
    tunix_multi_turn.light()
    before = set(sys.modules)
    import tunix.rl.multi_turn
    new = {m for m in set(sys.modules) - before if "multi_turn." in m}
    assert new == {"tunix.rl.multi_turn.moved_rooms"}, new
    from tunix.rl.multi_turn.environments.gyms import base
    found, _ = shell.display_formatter.format(base.Task("a/1", "a", "Do it"))
    print("Do it" in found["text/html"], "jax" in sys.modules)
  """
  process = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert process.stdout.strip() == "True False", process.stderr
