"""An episode of a desktop is watched in a browser while it runs."""

import statistics
import time

import chromium
import numpy as np
import pytest
from trainer_core import events
from trainer_core import images as images_lib
from trainer_core import trajectory as trajectory_lib
from training_monitor.client import event_log

TURNS, W, H = 12, 1920, 1080
NAME = "train-000001.0"
_SEEN = """(n) => document.querySelectorAll('#filmstrip a').length >= n
    && document.getElementById('turn').dataset.number == n"""


def screens(store):
  rng = np.random.default_rng(0)
  screen = np.full((H, W, 3), 230, np.uint8)
  refs = []
  for _ in range(TURNS + 1):
    screen = screen.copy()
    x, y = rng.integers(0, W - 300), rng.integers(0, H - 200)
    screen[y : y + 200, x : x + 300] = rng.integers(0, 255, 3)
    refs.append(store.put(screen))
  return refs


def turn(refs, n):
  message = {"role": "user", "content": [{"type": "image", "image": refs[n]}]}
  return trajectory_lib.Step(
    chat_completions=[message],
    model_response=f"response {n + 1}",
    thought=f"thought {n + 1}",
    observation={"screenshot": refs[n + 1]},
    reward=0.0,
    done=False,
    info={"gui_actions": [{"kind": "click", "x": 900.0 + n, "y": 500.0}]},
  )


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_desktop_episode_is_watched_turn_by_turn(lite, tmp_path, context):
  store = images_lib.ImageStore()
  refs = screens(store)
  log = event_log.EventLog(
    event_log.RunSpec(
      url=lite.url,
      training_id="T",
      training={"model_name": "m"},
      spool_dir=str(tmp_path / "spool"),
      name="t",
    ),
    images=store,
  )
  common = dict(group_id="train-000001", task_id="t")
  log.on_event(events.RunStarted("run", {}))
  log.on_event(events.EpisodeStarted(NAME, **common))
  assert log.drain(60)
  (rollout,) = lite.rows("rollout")
  tab = chromium.Tab(context, lite.url)
  # From before its first turn.
  assert tab.go(f"/rollouts/{rollout['id']}") == 200
  chromium.wait_for(
    tab.page, "document.getElementById('live').textContent == 'live'"
  )
  late = []
  for n in range(TURNS):
    time.sleep(0.3)  # A turn takes as long at least.
    began = time.perf_counter()
    log.on_event(
      events.TurnFinished(NAME, n, {"model": 0.5, "env": 0.1}, turn(refs, n))
    )
    chromium.wait_for(tab.page, _SEEN, n + 1)
    late.append(time.perf_counter() - began)
  print(f"shown after {statistics.median(late):.2f} s, {max(late):.2f} at most")
  # 0.3 s where nothing else runs.
  assert statistics.median(late) < 2.0
  page = tab.page
  assert f"thought {TURNS}" in page.locator("#turn").inner_text()
  # Read afterwards: at real size, by a link that others can be sent.
  page.click("text=real size")
  page.wait_for_selector("#turn.real")
  image = page.locator(".screen img").first
  chromium.wait_for(page, "document.querySelector('.screen img').complete")
  box = image.bounding_box()
  assert (round(box["width"]), round(box["height"])) == (W, H)
  dot = page.locator(".screen .overlay .act .dot").bounding_box()
  x = 900 + TURNS - 1
  assert dot["x"] + dot["width"] / 2 - box["x"] == pytest.approx(x, abs=1)
  assert dot["y"] + dot["height"] / 2 - box["y"] == pytest.approx(500, abs=1)
  width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
  assert width <= 0
  # Around the action, before and after it.
  crops = page.locator(".crop")
  assert crops.count() == 2
  box = crops.first.bounding_box()
  dot = crops.first.locator(".act .dot").bounding_box()
  middle = dot["x"] + dot["width"] / 2 - box["x"] - box["width"] / 2
  assert abs(middle) < 2
  # A thumbnail has the screen's proportions.
  thumb = page.locator("#filmstrip img").first
  thumb.scroll_into_view_if_needed()
  chromium.wait_for(
    page, "document.querySelector('#filmstrip img').naturalWidth > 0"
  )
  box = thumb.bounding_box()
  assert box["width"] / box["height"] == pytest.approx(W / H, rel=0.03)
  page.click("#filmstrip a >> nth=2")
  page.wait_for_selector('#turn[data-number="3"]')
  assert "size=real" in page.url
  page.click("text=Follow the newest turn")
  page.wait_for_selector(f'#turn[data-number="{TURNS}"]')
  assert not chromium.faults_of(page)
  tab.check()
  assert log.close()
