"""Shares a browser among the gyms of an event loop: a pool of tabs.

`Browser` starts Chromium when the first tab is asked for, starts another when
that one has died, and lends tabs, each in a browser context of its own.

Promises:
* At most `max_pages` tabs are lent; a further `acquire` waits, and raises a
  typed error when the wait exceeds its deadline. With `spare`, more than these
  may wait to be lent again, so that one which shows the page that is wanted is
  among them: loading a page costs several times what starting it again does.
* A crash of a tab ends that tab alone; a death of the browser ends its tabs,
  and the next `acquire` starts a new one, at most `max_launches` times in
  `launch_window_s`.
* When no tab is lent for `idle_s` the browser is closed, and it is at the
  latest when the interpreter exits.

Does not retry a tab's work: the error names the lost tab.
"""

from __future__ import annotations

import asyncio
import collections
import time
from typing import Any, Callable, Generic, Mapping, TypeVar
import weakref

from cua_gyms.chromium import devtools
from cua_gyms.chromium import tab as tab_lib

T = TypeVar("T", bound=tab_lib.Tab)

_MOST_SPARE = 64
"""Tabs that wait besides those in use, however many these are."""


class NoFreePage(devtools.DevToolsError, TimeoutError):
  """All tabs were in use for too long."""


def check_pages(max_pages: Any) -> Any:
  """Returns `max_pages` if it is a number of tabs or None.

  Raises:
    ValueError: `max_pages` is neither.
  """
  is_whole = isinstance(max_pages, int) and not isinstance(max_pages, bool)
  if max_pages is not None and not (is_whole and max_pages >= 1):
    raise ValueError(f"max_pages={max_pages!r} must be a whole number >= 1")
  return max_pages


class Browser(Generic[T]):
  """A Chromium process and its tabs; see the module docstring.

  Belongs to the event loop that uses it first.

  Attributes:
    max_pages: tabs lent at most.
    crashes: tabs lost to a crash so far.
    launches: browsers started so far.
    lent: tabs in use now.
  """

  def __init__(
    self,
    tab: type[T],
    *,
    max_pages: int = 32,
    spare: int = 0,
    executable: str | None = None,
    deadline_s: float = 60.0,
    idle_s: float = 30.0,
    max_launches: int = 8,
    launch_window_s: float = 60.0,
    flags: tuple[str, ...] = (),
  ):
    """Args:

    tab: the kind of tab that is lent.
    max_pages: tabs that may be lent at once; about 20 MB each.
    spare: tabs that may wait besides, for each of the most that were lent
      at once, 64 in all; about 10 MB each. They are opened when none that
      waits is what the caller prefers.
    executable: Chromium to run, None to look for one.
    deadline_s: Deadline of each command to a tab, in seconds.
    idle_s: Seconds that a browser without lent tabs stays up.
    max_launches: starts allowed within `launch_window_s`, so that a browser
      that always dies does not start for ever.
    launch_window_s: seconds.
    flags: Flags of Chromium, besides those of `devtools`.
    """
    check_pages(max_pages)
    if spare < 0:
      raise ValueError(f"spare must be >= 0, got {spare}")
    if max_launches < 1:
      raise ValueError(f"max_launches must be >= 1, got {max_launches}")
    self.max_pages = max_pages
    self.launches = 0
    self.crashes = 0
    self._tab = tab
    self._spare = spare
    self.lent = 0
    self._most_lent = 0
    self._opening = 0
    self._executable = executable
    self._deadline_s = deadline_s
    self._idle_s = idle_s
    self._max_launches = max_launches
    self._launch_window_s = launch_window_s
    self._flags = flags
    self._launched_at: collections.deque[float] = collections.deque()
    self._chromium: devtools.Chromium | None = None
    self._launching = asyncio.Lock()
    self._free = asyncio.Semaphore(max_pages)
    self._idle: list[T] = []
    self._pages: dict[str, T] = {}  # by target
    self._contexts: dict[str, str] = {}  # context -> its one target
    self._timer: asyncio.TimerHandle | None = None
    self._closing: asyncio.Task | None = None

  def allow(self, pages: int) -> None:
    """Raises `max_pages` to `pages`, if it is less."""
    for _ in range(pages - self.max_pages):
      self._free.release()
    self.max_pages = max(self.max_pages, pages)

  @property
  def pid(self) -> int | None:
    """Id of the running browser process; None when there is none."""
    if self._chromium is None or self._chromium.death is not None:
      return None
    return self._chromium.pid

  async def acquire(
    self,
    deadline_s: float = 120.0,
    *,
    context: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    prefer: Callable[[T], bool] | None = None,
  ) -> T:
    """Lends a tab to the caller alone, who gives it back with `release`.

    Args:
      deadline_s: Seconds to wait for a free one.
      context: Parameters of the browser context, e.g. its proxy. With them, or
        with `settings`, the tab is always a new one.
      settings: Settings that the tab is opened with.
      prefer: tab -> whether an idle tab suits best. When none does, a spare
        tab is opened; else the oldest idle tab of the most frequent page is
        taken.

    Raises:
      NoFreePage: no tab became free in `deadline_s` seconds.
      BrowserNotFound, LaunchError, BrowserDied, PageCrashed, CommandTimeout.
    """
    try:
      await asyncio.wait_for(self._free.acquire(), deadline_s)
    except asyncio.TimeoutError:
      raise NoFreePage(
        f"all {self.max_pages} pages were in use for {deadline_s:g} s; close"
        " gyms that are not needed, or raise max_pages"
      ) from None
    try:
      self._stop_timer()
      page = None
      while self._idle and page is None:
        best = self._choose(prefer)
        if best is None:
          break
        page = self._idle.pop(best)
        if context or settings or page.dead is not None:
          # Not what is wanted, and max_pages counts those that wait, too.
          self._forget(page)
          page.close()
          page = None
      page = page or await self._open_page(context or {}, settings)
    except BaseException:
      self._free.release()
      self._start_timer()
      raise
    self.lent += 1
    self._most_lent = max(self._most_lent, self.lent)
    return page

  def _choose(self, prefer: Callable[[T], bool] | None) -> int | None:
    """Returns the idle tab to lend; None to open a spare one."""
    if prefer is None:
      return 0
    for index, page in enumerate(self._idle):
      if prefer(page):
        return index
    room = self._most_lent + min(self._spare * self._most_lent, _MOST_SPARE)
    if len(self._pages) + self._opening < room:
      return None
    # Of what there is most: when families come round in turn, the one that has
    # waited longest is the one that is wanted next.
    shown = collections.Counter(page.url for page in self._idle)
    most = max(shown.values())
    return next(
      i for i, page in enumerate(self._idle) if shown[page.url] == most
    )

  def release(self, page: T, *, reuse: bool = True) -> None:
    """Takes a tab back; one that is dead or of unknown state is closed."""
    self.lent -= 1
    self._free.release()
    if reuse and page.dead is None and page.chromium is self._chromium:
      self._idle.append(page)
    else:
      self._forget(page)
      page.close()
    self._start_timer()

  async def close(self) -> None:
    """Ends the browser and all its tabs. It may be used again afterwards."""
    self._stop_timer()
    chromium, self._chromium = self._chromium, None
    if chromium is not None:
      self._drop_pages(devtools.BrowserDied("the browser was closed"))
      await chromium.close()

  def kill(self) -> None:
    """Kills the browser after its event loop has closed."""
    chromium, self._chromium = self._chromium, None
    self._idle.clear()
    self._pages.clear()
    self._contexts.clear()
    if chromium is not None:
      chromium.kill()

  async def _open_page(self, options, settings) -> T:
    self._opening += 1
    try:
      return await self._open(options, settings)
    finally:
      self._opening -= 1

  async def _open(self, options, settings) -> T:
    chromium = await self._running()
    created = await chromium.call(
      "Target.createBrowserContext",
      {"disposeOnDetach": True, **options},
      deadline_s=self._deadline_s,
    )
    context = created["browserContextId"]
    self._contexts[context] = ""
    chromium.send(
      "Browser.setDownloadBehavior",
      {"behavior": "deny", "browserContextId": context},
    )
    try:
      page = await self._tab.open(chromium, context, self._deadline_s, settings)
    except BaseException:
      self._contexts.pop(context, None)
      chromium.send(
        "Target.disposeBrowserContext", {"browserContextId": context}
      )
      raise
    self._pages[page.target] = page
    return page

  async def _running(self) -> devtools.Chromium:
    async with self._launching:
      if self._chromium is not None and self._chromium.death is None:
        return self._chromium
      now = time.monotonic()
      recent = self._launched_at
      while recent and now - recent[0] > self._launch_window_s:
        recent.popleft()
      if len(recent) >= self._max_launches:
        raise devtools.LaunchError(
          f"the browser was started {len(recent)} times in"
          f" {self._launch_window_s:g} s and died each time; not starting it"
          " again for now"
        )
      recent.append(now)
      self.launches += 1
      chromium = await devtools.Chromium.launch(
        self._executable, extra_flags=self._flags
      )
      try:
        chromium.listen(None, "Target.targetCreated", self._on_created)
        chromium.listen(None, "Target.targetCrashed", self._on_crashed)
        chromium.listen(None, "Target.targetDestroyed", self._on_destroyed)
        await chromium.call("Target.setDiscoverTargets", {"discover": True})
        await chromium.call("Browser.setDownloadBehavior", {"behavior": "deny"})
      except BaseException:
        chromium.kill()  # Half set up: unusable.
        raise
      chromium.on_death = self._drop_pages
      self._chromium = chromium
      return chromium

  def _on_created(self, params) -> None:
    info = params["targetInfo"]
    own = self._contexts.get(info.get("browserContextId"))
    if own is None or info["type"] != "page":
      return
    if not own:  # The one that we asked for.
      self._contexts[info["browserContextId"]] = info["targetId"]
    elif own != info["targetId"] and self._chromium is not None:
      self._chromium.send("Target.closeTarget", {"targetId": info["targetId"]})
      if own in self._pages:
        self._pages[own].on_popup(info["targetId"])

  def _on_crashed(self, params) -> None:
    self._lose(params["targetId"], "the page's renderer crashed")

  def _on_destroyed(self, params) -> None:
    self._lose(params["targetId"], "the page was closed by the browser")

  def _lose(self, target: str, why: str) -> None:
    page = self._pages.get(target)
    if page is not None:
      self.crashes += 1
      self._forget(page)
      page.fail(devtools.PageCrashed(f"{why} while it showed {page.url}"))

  def _forget(self, page: T) -> None:
    self._pages.pop(page.target, None)
    self._contexts.pop(page.context, None)

  def _drop_pages(self, error: devtools.DevToolsError) -> None:
    pages = list(self._pages.values())
    self._pages.clear()
    self._contexts.clear()
    self._idle.clear()
    for page in pages:
      page.fail(error)

  def _stop_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _start_timer(self) -> None:
    self._stop_timer()
    if self.lent == 0 and self._chromium is not None:
      loop = asyncio.get_running_loop()
      self._timer = loop.call_later(self._idle_s, self._close_idle)

  def _close_idle(self) -> None:
    self._timer = None
    if self.lent == 0:
      self._closing = asyncio.ensure_future(self.close())


class Shared(Generic[T]):
  """One browser for each event loop, made at the first call."""

  def __init__(self, make: Callable[[], Browser[T]]):
    self._make = make
    self._browsers: weakref.WeakKeyDictionary[
      asyncio.AbstractEventLoop, Browser[T]
    ] = weakref.WeakKeyDictionary()

  def __call__(self, pages: int | None = None) -> Browser[T]:
    """The running loop's browser; those of closed loops are killed.

    Args:
      pages: raises the browser's limit of tabs to this.
    """
    for loop, browser in list(self._browsers.items()):
      if loop.is_closed():
        del self._browsers[loop]
        browser.kill()
    loop = asyncio.get_running_loop()
    if loop not in self._browsers:
      self._browsers[loop] = self._make()
    browser = self._browsers[loop]
    browser.allow(pages or 0)
    return browser

  async def close(self) -> None:
    """Closes the running loop's browser, if it has one."""
    browser = self._browsers.get(asyncio.get_running_loop())
    if browser is not None:
      await browser.close()
