"""Plays any web page in headless Chromium, walled in: the `browser` gym.

An episode starts at an address of an allow-list and is judged by a function
of the user's. Each has a tab in a browser context of its own (no cookie,
storage or cache of another), whose connections all go through a proxy that
lets the start page's host and the `hosts` of the settings through, and nothing
else: no other host, no file, no web socket, redirect, worker or window
elsewhere, and no UDP.

    gym = WebGym(
        start_urls=["http://127.0.0.1:8000/shop"],
        evaluator=lambda page, task, answer: "Thank you" in page.text,
    )

A page's time is real: screenshots of pages that move by themselves are not the
same twice. Failures of the browser, and of the site at the start, are
`devtools.DevToolsError`s: the episode is lost, the next `start` gets a fresh
tab.

Does not enforce `max_turns` (the collector does), and does not undo what
actions did on the site: give each episode its own instance by the seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency

from cua_gyms.browser import browser_tasks
from cua_gyms.browser import hosts as hosts_lib
from cua_gyms.browser import page as page_lib
from cua_gyms.browser import socks
from cua_gyms.chromium import actions
from cua_gyms.chromium import axtree
from cua_gyms.chromium import devtools
from cua_gyms.chromium import pool

# Still no name is resolved by the browser; the proxies' address is none.
_FLAGS = ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",)
_SIDES = (64, 4096)
_MAX_TEXT = 1 << 20  # Characters of a page that an evaluator is given.
_STATE = (
  "[location.href, document.title,"
  f" (document.body ? document.body.innerText : '').slice(0, {_MAX_TEXT}),"
  f" document.documentElement.outerHTML.slice(0, {_MAX_TEXT})]"
)
_META = (
  "(e => e ? e.content : '')(document.querySelector('meta[name=instruction]'))"
)

Evaluator = Callable[["PageState", base.Task, str], Any]
"""(page, task, answer) -> an Evaluation, a bool or a number in [0, 1]; sync,
in a thread, or async."""


@dataclasses.dataclass(frozen=True)
class PageState:
  """The page as an evaluator sees it.

  Attributes:
    url, title: Address and title of the document.
    text: The visible text, `innerText`.
    html: The current document. Both hold up to a million characters.
  """

  url: str
  title: str
  text: str
  html: str
  _tab: page_lib.WebTab = dataclasses.field(repr=False)

  async def evaluate(self, expression: str) -> Any:
    """Returns the JSON value of a JavaScript expression; for async evaluators.

    Raises:
      CommandFailed: the script raised; the message holds its exception.
    """
    return await self._tab.evaluate(expression)


class Browser(pool.Browser[page_lib.WebTab]):
  """A pool of tabs with sites; see `chromium.pool`."""

  def __init__(self, **settings: Any):
    super().__init__(page_lib.WebTab, flags=_FLAGS, **settings)


shared_browser = pool.Shared(Browser)
"""(pages=None) -> the running event loop's browser, with default settings but
for the tabs that it allows at least."""


class WebGym:
  """One page of a site; `start` may be called again after an episode.

  Attributes:
    width, height: Size of the screenshots in pixels.
    observation: Parts of the page that observations show.
    tree: the page as a tree, None where observations show none.
    task: Task of the episode, None before the first.
    page: its tab, None where there is none.
    answer: the policy's answer, "" for none.
  """

  def __init__(
    self,
    *,
    evaluator: str | Evaluator | Mapping[str, str | Evaluator],
    start_urls: Sequence[str] = (),
    hosts: Sequence[str] = (),
    pages: str | Mapping[str, Any] | None = None,
    width: int = 1280,
    height: int = 720,
    scale: float = 1.0,
    settle_s: float = 3.0,
    load_s: float = 30.0,
    accept_dialogs: bool = True,
    end_on_success: bool = False,
    timeout_s: float = 30.0,
    page_deadline_s: float = 120.0,
    observation: str = "screenshot",
    tree_characters: int = axtree.LIMIT,
    max_pages: int | None = None,
    browser: Browser | None = None,
  ):
    """Args:

      evaluator: judges an episode, see `Evaluator`; or "package.module:name"
        of it; or one for each task family.
      start_urls: addresses that episodes may start at and below; () for those
        of `pages`. A query is not compared.
      hosts: Hosts that pages may talk to besides the start page's own, e.g.
        "cdn.test", "*.shop.test", "api.test:8443".
      pages: Pages of the task set (see `tasks.WebTasks`), to start at them.
      width, height: Size of the screenshots in pixels.
      scale: Pixels for each CSS pixel.
      settle_s: Seconds that an action may keep the page busy before the
        screenshot is taken in any case.
      load_s: The same for the start page.
      accept_dialogs: whether a page's questions are answered yes or no.
      end_on_success: ask the evaluator after each action, and end the episode
        when the task is solved.
      timeout_s: deadline of the evaluator, and of commands to the browser.
      page_deadline_s: Seconds to wait for a free tab.
      observation: "screenshot", "axtree", the accessibility tree without a
        picture, or "both".
      tree_characters: Most characters of a tree; what is beyond is left out.
      max_pages: Number of gyms used at once, each of which holds a tab for an
        episode; the shared browser allows that number of tabs. None: 32.
      browser: Browser to use instead of the event loop's shared one.

    Raises:
      ValueError: names the setting, its value and the values allowed.
    """
    self._judges = _judges(evaluator)
    axtree.check(observation, tree_characters)
    self.observation = observation
    self.tree: axtree.PageTree | None = None
    self._tree_characters = tree_characters
    if isinstance(start_urls, str) or isinstance(hosts, str):
      raise ValueError(
        f"start_urls={start_urls!r} and hosts={hosts!r} must be lists"
      )
    if not start_urls and pages is not None:
      start_urls = browser_tasks.start_urls(pages)
    if not start_urls:
      raise ValueError(
        "start_urls is empty: list the addresses that episodes may start at,"
        " e.g. start_urls=[http://127.0.0.1:8000/]"
      )
    for url in start_urls:
      try:
        hosts_lib.split(url)
      except ValueError as error:
        raise ValueError(f"start_urls: {error}") from None
    self._start_urls = tuple(start_urls)
    self._hosts = hosts_lib.Hosts(hosts)
    if not (_is_number(scale) and 0.5 <= scale <= 8):
      raise ValueError(f"scale={scale!r} must be in [0.5, 8]")
    for name, side in (("width", width), ("height", height)):
      if not (_is_number(side) and _SIDES[0] <= side <= _SIDES[1]):
        raise ValueError(
          f"{name}={side!r} must be in [{_SIDES[0]}, {_SIDES[1]}]"
        )
    for name, seconds in (
      ("settle_s", settle_s),
      ("load_s", load_s),
      ("timeout_s", timeout_s),
      ("page_deadline_s", page_deadline_s),
    ):
      if not (_is_number(seconds) and 0 < seconds <= 600):
        raise ValueError(f"{name}={seconds!r} must be in (0, 600] seconds")
    self.scale = float(scale)
    # Whole CSS pixels, so that the picture is as large as was asked for.
    self._view = round(width / scale), round(height / scale)
    self.width, self.height = (round(side * scale) for side in self._view)
    if (self.width, self.height) != (width, height):
      raise ValueError(
        f"width={width}, height={height} are no multiples of scale={scale:g};"
        f" e.g. {self.width}x{self.height} are"
      )
    self._settle_s, self._load_s = settle_s, load_s
    self._accept = bool(accept_dialogs)
    self._end_on_success = bool(end_on_success)
    self._timeout_s = timeout_s
    self._page_deadline_s = page_deadline_s
    self._max_pages = pool.check_pages(max_pages)
    self._given_browser = browser
    self._browser: pool.Browser[page_lib.WebTab] | None = None
    self._proxy: socks.FilteringProxy | None = None
    self._pixels: np.ndarray | None = None
    self._over = False
    self._turns = 0
    self.task: base.Task | None = None
    self.page: page_lib.WebTab | None = None
    self.answer = ""

  async def start(self, task: base.Task) -> base.Observation:
    """Opens the page of `task.params["url"]` in a fresh browser context.

    Raises:
      ValueError: no address, one that is not allowed, or no evaluator for it.
      PageUnreachable: the site does not answer, or with an error.
      DevToolsError: the browser failed.
    """
    url = task.params.get("url")
    if not url:
      raise ValueError(f"task {task.task_id!r} has no params.url to start at")
    if not hosts_lib.may_start(url, self._start_urls):
      raise ValueError(
        f"task {task.task_id!r}: url={url!r} is not below any of"
        f" start_urls={list(self._start_urls)}; add it there if it may be"
        " opened"
      )
    self._judge(task)
    self._discard()
    try:
      page = await self._open(url)
    except (devtools.BrowserDied, devtools.PageCrashed):
      # Nothing is lost yet, and the next tab is a fresh one.
      page = await self._open(url)
    try:
      instruction = "" if task.instruction else await page.evaluate(_META)
      self.tree = None
      if self.observation != "screenshot":
        self.tree = axtree.PageTree(page, *self._view, self._tree_characters)
      await self._look(page)
    except BaseException:
      self._discard()
      raise
    self.task, self._turns, self._over, self.answer = task, 0, False, ""
    return self._observe(page, {}, instruction=instruction)

  async def _open(self, url: str) -> page_lib.WebTab:
    hosts = self._hosts.including(url)
    browser = self._given_browser or shared_browser(self._max_pages)
    self._browser = browser
    self._proxy = socks.FilteringProxy(hosts)
    try:
      await self._proxy.open()
      self.page = await browser.acquire(
        self._page_deadline_s,
        context={
          "proxyServer": f"socks5://127.0.0.1:{self._proxy.port}",
          "proxyBypassList": "<-loopback>",  # Not even the loopback.
        },
        settings={
          "width": self._view[0],
          "height": self._view[1],
          "scale": self.scale,
          "hosts": hosts,
          "proxy": self._proxy,
          "accept_dialogs": self._accept,
        },
      )
      await self.page.goto(url, self._load_s)
      return self.page
    except BaseException:
      self._discard()
      raise

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Carries out one action; after the end nothing changes any more.

    Raises:
      RuntimeError: no episode is running.
      DevToolsError: the browser failed; the episode is lost.
    """
    if self.task is None or self.page is None:
      raise RuntimeError("no episode is running; call start(task) first")
    page = self.page
    if self._over:
      return self._observe(page, {"ignored": "the episode is over"})
    try:
      if page.dead is not None:
        raise page.dead
      self._turns += 1
      outcome = await actions.perform(
        page, action, self.width, self.height, self.scale, self.tree
      )
      info: dict[str, Any] = outcome.info()
      if action.kind in actions.ENDS and not outcome.ignored:
        self._over, self.answer = True, action.text or ""
      elif not await page.settle(self._settle_s):
        info["busy"] = True
      await self._look(page)
      if self._end_on_success and not self._over:
        self._over = (await self.evaluate()).success
    except BaseException:
      # Cancelled or failed half-way: the state of the page is unknown.
      self._discard()
      raise
    if self._proxy is not None and self._proxy.blocked:
      info["blocked"] = dict(self._proxy.blocked)
    return self._observe(page, info)

  async def _look(self, page: page_lib.WebTab) -> None:
    """Takes what observations show of the page."""
    if self.observation != "axtree":
      self._pixels = await page.screenshot()
    if self.tree is not None:
      await self.tree.look()

  async def evaluate(self) -> base.Evaluation:
    """Returns the evaluator's verdict on the current page.

    Raises:
      RuntimeError: no episode is running.
      TypeError: the evaluator gave something that is not a verdict.
    """
    if self.task is None or self.page is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    url, title, text, html = await self.page.evaluate(_STATE)
    state = PageState(url, title, text, html, self.page)
    verdict = await concurrency.acall(
      self._judge(self.task),
      state,
      self.task,
      self.answer,
      seconds=self._timeout_s,
      what="the evaluator",
    )
    return base.as_evaluation(verdict, url=state.url, turns=self._turns)

  async def close(self) -> None:
    """Closes the tab, its context and its proxy. Idempotent."""
    self._discard()

  def _discard(self) -> None:
    self.task = None
    page, self.page = self.page, None
    if page is not None and self._browser is not None:
      self._browser.release(page, reuse=False)
    if self._proxy is not None:
      self._proxy.close()
      self._proxy = None

  def _judge(self, task: base.Task) -> Evaluator:
    evaluator = self._judges.get(task.family, self._judges.get(""))
    if evaluator is None:
      raise ValueError(
        f"task {task.task_id!r}: there is no evaluator for family"
        f" {task.family!r}; there are for {', '.join(self._judges)}"
      )
    return evaluator

  def _observe(
    self, page: page_lib.WebTab, info: Mapping[str, Any], instruction: str = ""
  ) -> base.Observation:
    notes = page.notes()
    if self.tree is not None:
      notes = [note for note in (axtree.error_of(info), *notes) if note]
    return base.Observation(
      self._pixels,
      instruction=instruction,
      text="\n".join(notes),
      done=self._over,
      info={"turn": self._turns, "url": page.url, **info},
      axtree=self.tree.text if self.tree is not None else "",
    )


def _is_number(value: object) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _judges(setting: object) -> dict[str, Evaluator]:
  """Family -> evaluator, "" for all others."""
  named = setting if isinstance(setting, Mapping) else {"": setting}
  evaluators = {}
  for family, one in named.items():
    where = f"evaluator of {family!r}" if family else "evaluator"
    if isinstance(one, str):
      try:
        one = registry.import_path(one)
      except (ImportError, ValueError) as error:
        raise ValueError(f"{where}={one!r}: {error}") from None
    if not callable(one):
      raise ValueError(
        f"{where}={one!r} must be a function (page, task, answer) or"
        " 'package.module:function'"
      )
    evaluators[family] = one
  return evaluators
