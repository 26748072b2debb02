"""A run's page that is open from before its first step to after its end."""

import chromium
import pytest
from trainer_core import events

recorded_run = pytest.importorskip(
  "recorded_run", reason="needs the framework, whose desktop is played"
)
run_monitor = pytest.importorskip("tunix.rl.multi_turn.run.monitor")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_SIGN = "(word) => document.getElementById('live').textContent == word"
_CHARTS = """(n) => document.querySelectorAll('#charts .chart canvas').length
    >= n && document.getElementById('tiles').innerText.includes('success')"""


def titles(page):
  return page.locator("#charts .chart").evaluate_all(
    "(all) => all.map((figure) => figure.dataset.key)"
  )


def test_charts_appear_in_place_and_the_end_is_said(tmp_path, context):
  server = run_monitor.EmbeddedServer(tmp_path / "monitor.db")
  try:
    recorder = recorded_run.Recorder(server.url, tmp_path / "spool", steps=2)
    recorder.tell(events.RunStarted("early", {}))
    recorder.flush()
    tab = chromium.Tab(context, server.url)
    page = tab.page
    assert tab.go("/runs/1") == 200
    chromium.wait_for(page, _SIGN, "live")
    assert titles(page) == [] and not page.locator("#latest").count()
    recorder.measure("initial", 0, 1.0)
    for step in (1, 2):
      recorder.step(step)
    recorder.flush()
    chromium.wait_for(page, _CHARTS, 4)
    page.wait_for_selector("#latest .card")
    page.wait_for_selector("#groups .card")
    keys = titles(page)
    # In the order and with the sections of a page that is opened now.
    other = chromium.Tab(context, server.url)
    assert other.go("/runs/1") == 200
    chromium.ready(other.page)
    outline = """() => [...document.getElementById('charts').children].map(
        (child) => child.dataset.key ?? child.textContent)"""
    assert page.evaluate(outline) == other.page.evaluate(outline)
    assert len(keys) == len(set(keys)) >= 4
    other.page.close()
    recorder.close()
  finally:
    server.close()
  chromium.wait_for(page, _SIGN, "run over")
  head = page.locator("#run-head").inner_text()
  assert "completed" in head and "step 2" in head
  assert "on" not in page.locator("#live").get_attribute("class").split()
  tab.check()
  page.close()


def test_a_finished_run_is_not_live_and_nothing_of_it_waits(
  lite, tmp_path, context
):
  recorder = recorded_run.Recorder(lite.url, tmp_path / "spool", steps=1)
  recorder.tell(events.RunStarted("done", {}))
  recorder.step(1)
  recorder.close()
  (client,) = lite.get("/api/v1/clients")["items"]
  assert not client["health_json"].get("pending")
  tab = chromium.Tab(context, lite.url)
  assert tab.go("/runs/1/health") == 200
  chromium.wait_for(tab.page, _SIGN, "run over")
  chromium.wait_for(
    tab.page, "!document.getElementById('live').classList.contains('on')"
  )
  tab.check()
  tab.page.close()
