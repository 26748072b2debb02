"""A headless Chromium, driven by Playwright, that notices what goes wrong."""

import contextlib
import os
import shutil
import time

import pytest

_PROGRAMS = (
  os.environ.get("TUNIX_CHROMIUM", "chromium-headless-shell"),
  "chromium-headless-shell",
  "chrome-headless-shell",
  "chromium",
  "chromium-browser",
  "google-chrome-stable",
  "google-chrome",
)
_WATCH = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) =>
  window.__violations.push(e.violatedDirective + " " + e.blockedURI));
"""


@contextlib.contextmanager
def browser():
  """Skips where there is none."""
  sync_api = pytest.importorskip("playwright.sync_api")
  # The small one, where there is a choice.
  path = next(filter(None, map(shutil.which, _PROGRAMS)), None)
  if path is None:
    pytest.skip(f"none of {', '.join(_PROGRAMS)} is installed")
  with sync_api.sync_playwright() as playwright:
    found = playwright.chromium.launch(
      executable_path=path,
      args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    )
    yield found
    found.close()


class Tab:
  """A page, and everything that it should not have done."""

  def __init__(self, context, url):
    self.page = context.new_page()
    self.page.set_default_timeout(20_000)
    self.url = url
    self.faults = []
    self.page.add_init_script(_WATCH)
    self.page.on("dialog", self._dialog)
    self.page.on("pageerror", lambda e: self.faults.append(f"error {e}"))
    self.page.on("console", self._console)
    self.page.on("request", self._request)

  def _dialog(self, dialog):
    self.faults.append(f"dialog {dialog.message}")
    dialog.dismiss()

  def _console(self, message):
    if message.type == "error" and "Failed to load resource" not in (
      message.text
    ):
      self.faults.append(f"console {message.text}")

  def _request(self, request):
    if not request.url.startswith((self.url, "data:", "blob:")):
      self.faults.append(f"request {request.url}")

  def go(self, path):
    answer = self.page.goto(self.url + path, wait_until="load")
    return answer.status

  def check(self):
    """Nothing but this server was asked, and no script was refused or ran."""
    self.faults += self.page.evaluate("window.__violations || []")
    assert not self.faults, self.faults


def faults_of(page, *rules):
  """axe-core's serious faults, if it is installed."""
  axe = pytest.importorskip("axe_playwright_python.sync_playwright")
  # By the protocol, as the page's own policy lets no foreign script in.
  page.evaluate(axe.Axe().axe_script)
  found = page.evaluate(
    "(rules) => axe.run(document, {resultTypes: ['violations'],"
    " ...(rules.length ? {runOnly: rules} : {})}).then((r) =>"
    " r.violations)",
    list(rules),
  )
  return [
    (f["id"], f["nodes"][0]["html"][:200], f["nodes"][0]["any"][:1])
    for f in found
    if f["impact"] in ("serious", "critical")
  ]


def wait_for(page, expression, arg=None, *, seconds=20.0, every=0.02):
  """Waits until an expression, or a function of `arg`, is true on the page.

  Playwright's own `wait_for_function` evaluates text within the page from its
  second look on, which the pages' policy refuses.
  """
  due = time.monotonic() + seconds
  while True:
    try:
      if page.evaluate(expression, arg):
        return
    except Exception as error:  # pylint: disable=broad-exception-caught
      if "Execution context was destroyed" not in str(error):
        raise  # Else between two documents.
    assert time.monotonic() < due, f"not within {seconds:g} s: {expression}"
    page.wait_for_timeout(1000 * every)


def ready(page, times=1):
  wait_for(
    page,
    "(n) => Number(document.getElementById('charts')?.dataset.ready) >= n",
    times,
  )
