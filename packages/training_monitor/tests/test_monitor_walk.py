"""A real training run walked through in Chromium, while it goes on and after.

`train monitor.embedded=true`, as a user starts it; every kind of link of its
dashboard is followed as long as it trains. What is left in the database is
then served anew, with its links: `LINKS` of each kind.
"""

import collections
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse

import chromium
import httpx
import pytest

small_runs = pytest.importorskip(
  "small_runs", reason="needs the framework, which trains"
)

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1800)]
RUN = (
  *small_runs.SMALL,
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "steps=100000",
  "eval.every=3",
  "monitor.embedded=true",
  "monitor.close_timeout_s=120",
)
PAGES = 1
"""Pages of a kind to visit while the run goes on, and again after it."""
LINKS = 8
"""Links of a kind to fetch after the run."""
# Links in a picture have no text as their href.
ADDRESSES = """found => found.map(e => new URL(
    e.getAttribute('href') ?? e.getAttribute('src'), location).href)"""


class Walker:
  """A tab that follows links and remembers every answer that is none."""

  def __init__(self, context, url):
    self.tab = chromium.Tab(context, url)
    self.tab.page.set_default_timeout(120_000)  # A trainer has the machine.
    self.url = url
    self.bad = []
    self.links = set()
    self.tab.page.on("response", self._response)

  def _response(self, response):
    if response.status >= 400 and response.url.startswith(self.url):
      self.bad.append((response.status, response.url))

  def follow(self, most, until):
    """Breadth first from the runs list; pages of a kind a few times.

    A kind is a path with one of its parameters, not with every set of them,
    of which there are a hundred times as many.

    Args:
      most: pages of a kind.
      until: () -> bool, whether to stop before all is seen.
    """
    waiting, queued = collections.deque(["/"]), {"/"}
    visits = collections.Counter()
    while waiting and not until():
      path = waiting.popleft()
      kinds = kinds_of(path)
      if all(visits[kind] >= most for kind in kinds):
        continue
      visits.update(kinds)
      assert self.tab.go(path) == 200, path
      page = self.tab.page
      assert page.locator("main").inner_text().strip(), path
      self.check(path)
      for link in page.eval_on_selector_all(
        "a[href]:not([download])", ADDRESSES
      ):
        link = link.removeprefix(self.url).partition("#")[0]
        if link.startswith("/") and link not in queued:
          queued.add(link)
          # Screenshots and the API answer with no page.
          if not link.startswith(("/api/", "/openapi")):
            waiting.append(link)
      self.links |= set(
        page.eval_on_selector_all("a[href], img[src]", ADDRESSES)
      )
    return visits

  def check(self, path):
    assert not self.bad, (path, self.bad)
    self.tab.check()


def kinds_of(link):
  """A link's path without its numbers, with each of its parameters' names."""
  path, _, query = link.partition("?")
  path = re.sub(r"\d+", "0", path)
  names = sorted(urllib.parse.parse_qs(query, keep_blank_values=True))
  return [f"{path}?{name}" for name in names] or [path]


@contextlib.contextmanager
def started(*command, **options):
  """A process that ends with the block, and the lines that it says."""
  process = subprocess.Popen(
    [sys.executable, "-m", *command],
    stdin=subprocess.PIPE,
    text=True,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    **options,
  )
  lines = []

  def read(stream):
    for line in stream:
      lines.append(line)

  stream = process.stdout if process.stderr is None else process.stderr
  reader = threading.Thread(target=read, args=(stream,), daemon=True)
  reader.start()
  try:
    yield process, lines
  finally:
    process.stdin.close()
    try:
      process.wait(60)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait(30)
    reader.join(10)


def yielding(process):
  """Lets others have the processors first: it is looked at, not timed."""
  for thread in os.listdir(f"/proc/{process.pid}/task"):
    with contextlib.suppress(ProcessLookupError):  # Over in the meantime.
      os.setpriority(os.PRIO_PROCESS, int(thread), 15)


def url_of(process, lines, seconds=300):
  """The URL that a line tells."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    for line in lines:
      if match := re.search(r"http://[\w.:]+", line):
        return match[0]
    assert process.poll() is None, "".join(lines)
    time.sleep(0.1)
  raise AssertionError("no URL was told: " + "".join(lines))


def test_a_run_is_walked_through_live_and_after(tmp_path):
  runs = tmp_path / "runs"
  with chromium.browser() as browser:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    with started(
      "tunix.rl.multi_turn.train",
      f"run.dir={runs}",
      "name=walked",
      *RUN,
      stderr=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
    ) as (process, lines):
      walker = Walker(context, url_of(process, lines))
      page = walker.tab.page
      # Until there is a step, then without loading the page again.
      while True:
        assert walker.tab.go("/") == 200
        if page.locator("a[href^='/runs/']").count():
          break
        assert process.poll() is None, "".join(lines)
        page.wait_for_timeout(200)
      walker.tab.go(
        page.locator("a[href^='/runs/']").first.get_attribute("href")
      )
      chromium.wait_for(
        page,
        "/step [1-9]/.test(document.querySelector('main').innerText)",
        seconds=400,
      )
      yielding(process)
      visits = walker.follow(PAGES, lambda: process.poll() is not None)
      assert process.poll() is None, "".join(lines)
      assert sum(visits.values()) > 20
      walker.check("the last page")
      page.close()
      process.send_signal(signal.SIGINT)  # It has walked for long enough.
      assert process.wait(600) == 130, "".join(lines)
    with started(
      "tunix.rl.multi_turn.monitor",
      "serve",
      "--port",
      "0",
      "--until-eof",
      "--database",
      str(runs / "monitor.db"),
      stdout=subprocess.PIPE,
    ) as (process, lines):
      walker = Walker(context, url_of(process, lines))
      walker.follow(PAGES, lambda: False)
      with httpx.Client(
        base_url=walker.url, timeout=60, verify=False
      ) as client:
        fetched = collections.Counter()
        for link in sorted(walker.links):
          path = link.removeprefix(walker.url)
          kinds = kinds_of(re.sub(r"[0-9a-f]{32,}", "0", path))  # A picture's.
          if all(fetched[kind] >= LINKS for kind in kinds):
            continue
          fetched.update(kinds)
          answer = client.get(link)
          if "nothing to animate" in answer.text:
            continue  # Its screenshots were cut off with the run.
          assert answer.status_code == 200, (answer.status_code, link)
      tokens_are_known(walker, runs / "monitor.db")
      walker.check("the last page")
    context.close()


def tokens_are_known(walker, database):
  """Every token of the last update has each of its measures."""
  with contextlib.closing(sqlite3.connect(database)) as connection:
    rows = connection.execute(
      "SELECT r.id, r.batch, t.metrics_json, a.tokens FROM rollout r"
      " JOIN turn t ON t.rollout_id = r.id JOIN action a ON a.turn_id = t.id"
      " WHERE a.tokens IS NOT NULL AND r.source_type = 'step' AND t.turn = 1"
    ).fetchall()
  assert rows
  for _, _, metrics, tokens in rows:
    metrics, tokens = json.loads(metrics), json.loads(tokens)
    assert len(metrics["entropies"]) == len(tokens)
    assert all(e >= 0 for e in metrics["entropies"])
    assert metrics["prompt_tokens"]
  learned = max((r for r in rows if r[1]), key=lambda r: r[1])
  page = walker.tab.page
  for heat in ("entropy", "loss mask"):
    path = f"/rollouts/{learned[0]}?turn=1&heat={urllib.parse.quote(heat)}"
    assert walker.tab.go(path) == 200
    current = page.locator('.choice a[aria-current="true"]').all_inner_texts()
    assert heat in current
    page.locator(".tokens").wait_for(state="visible")
  text = page.locator(".tokens").inner_text()
  assert "<|im_start|>" in text and "×" in text
