"""Plays real MiniWoB++ pages in one shared headless Chromium.

`MiniWobGym` implements the gym protocol on the event loop, without threads:
each gym has a tab, many gyms share a browser. The same task and the same
actions give the same screenshots, whatever the time between them: each action
is followed by a fixed span of the page's virtual time, so a task's timers,
animations and time limits count actions, not seconds.

Positions outside the screenshot are clamped to its edge, as a real pointer is
(`info["clamped"]`), and an action that does nothing reports why in
`info["ignored"]`. Failures of the browser are `devtools.DevToolsError`s: the
episode is lost, the next `start` gets a fresh tab or browser.

Does not enforce `max_turns` (the collector does). Tasks without a page, such
as those on live sites, are not offered.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

from cua_gyms.chromium import actions
from cua_gyms.chromium import axtree
from cua_gyms.chromium import devtools
from cua_gyms.chromium import pool
from cua_gyms.miniwob import catalogue
from cua_gyms.miniwob import miniwob_tasks
from cua_gyms.miniwob import page as page_lib

_Kind = gui_action.GuiActionKind
# After these the page may still have to hear that something was scrolled.
_SCROLLING = frozenset({_Kind.SCROLL, _Kind.KEY, _Kind.DRAG, _Kind.SWIPE})

# Screenshots beyond this many pixels a side are no use and cost memory.
_MAX_SIDE = 4096

# Tabs that wait, for each in use. With nine families in turn, 16 at once, a
# step takes 56 ms of CPU without, 42 with two (bench_miniwob --in-turn).
_SPARE_TABS = 2


class Browser(pool.Browser[page_lib.WobPage]):
  """A pool of tabs with MiniWoB++ pages; see `chromium.pool`."""

  def __init__(self, *, spare: int = _SPARE_TABS, **settings: Any):
    super().__init__(page_lib.WobPage, spare=spare, **settings)


shared_browser = pool.Shared(Browser)
"""(pages=None) -> the running event loop's browser, with default settings but
for the tabs that it allows at least."""


class MiniWobGym:
  """One MiniWoB++ page; `start` may be called again after an episode.

  Attributes:
    width, height: Size of the screenshots in pixels.
    scale: Their pixels for each CSS pixel of the page.
    observation: Parts of the page that observations show.
    goal: Instruction of the episode, "" before the first.
    tree: the page as a tree, None where observations show none.
    task: Task of the episode, None before the first.
    page: its tab, None before the first episode and after an error. What
      reads it (oracles, tests) must not act on it.
  """

  def __init__(
    self,
    *,
    width: int | None = None,
    height: int | None = None,
    scale: float = 1.0,
    reward: str = "raw",
    time_limit: bool = False,
    seconds_per_action: float = 0.5,
    quick_restart: bool = True,
    final_screenshot: bool = True,
    observation: str = "screenshot",
    tree_characters: int = axtree.LIMIT,
    page_deadline_s: float = 120.0,
    max_pages: int | None = None,
    browser: Browser | None = None,
  ):
    """Args:

    width, height: Size of the screenshots in pixels; None for the task's
      area, 160 x 210 CSS pixels. Larger ones show the page around it, which
      lies in the top left corner.
    scale: pixels for each CSS pixel: 2 draws all twice as large.
    reward: "raw", the page's verdict, or "timed", the page's verdict made
      smaller by the page time it took; this needs `time_limit`.
    time_limit: keep the page's own limit, mostly 10 s of its time, after
      which the episode ends with -1.
    seconds_per_action: page time that passes after each action.
    quick_restart: do not load the page anew when the next task is of the
      same family and its page is known to show the same pixels either way
      (`catalogue.QUICK_FAMILIES`): several times faster. False loads it
      always.
    final_screenshot: Whether the observation that ends an episode shows the
      final page; without, it repeats the last screenshot, which saves a
      frame.
    observation: "screenshot", "axtree", the accessibility tree without a
      picture, or "both".
    tree_characters: Most characters of a tree; what is beyond is left out.
    page_deadline_s: Seconds to wait for a free tab.
    max_pages: Number of gyms used at once, each of which holds a tab for an
      episode; the shared browser allows that number of tabs. None: 32.
    browser: Browser to use instead of the event loop's shared one.
    """
    if not 0.5 <= scale <= 8:
      raise ValueError(f"scale={scale!r} must be in [0.5, 8]")
    self.scale = float(scale)
    self.width = self._side("width", width, page_lib.WIDTH)
    self.height = self._side("height", height, page_lib.HEIGHT)
    if reward not in ("raw", "timed"):
      raise ValueError(f"reward must be 'raw' or 'timed', got {reward!r}")
    if reward == "timed" and not time_limit:
      raise ValueError(
        "reward='timed' needs time_limit=True: it falls with the time left"
      )
    if not 0 <= seconds_per_action <= actions.MAX_WAIT_S:
      raise ValueError(
        f"seconds_per_action must be in [0, {actions.MAX_WAIT_S:g}], got"
        f" {seconds_per_action}"
      )
    axtree.check(observation, tree_characters)
    self.observation = observation
    self.goal = ""
    self.tree: axtree.PageTree | None = None
    self._tree_characters = tree_characters
    self.task: base.Task | None = None
    self.page: page_lib.WobPage | None = None
    self._reward = reward
    self._time_limit = time_limit
    self._step_ms = 1000.0 * seconds_per_action
    self._quick = quick_restart
    self._final = final_screenshot
    self._page_deadline_s = page_deadline_s
    self._max_pages = pool.check_pages(max_pages)
    self._given_browser = browser
    self._browser: pool.Browser[page_lib.WobPage] | None = None
    self._shot: page_lib.Shot | None = None
    self._ended_by: str | None = None
    self._answer: str | None = None
    self._turns = 0

  def _side(self, name: str, side: int | None, least: int) -> int:
    smallest = round(least * self.scale)
    if side is None:
      return smallest
    if not smallest <= side <= _MAX_SIDE:
      raise ValueError(
        f"{name}={side!r} must be in [{smallest}, {_MAX_SIDE}]: the task's"
        f" area is {page_lib.WIDTH}x{page_lib.HEIGHT}, at"
        f" scale={self.scale:g}"
      )
    return int(side)

  async def start(self, task: base.Task) -> base.Observation:
    """Starts an instance; the observation carries the page's instruction.

    Raises:
      ValueError: unknown family (gives the nearest) or data mode.
      PagesNotFound, BrowserNotFound: a part is not installed.
      DevToolsError: the browser failed, twice.
    """
    url = miniwob_tasks.page_url(task.family)
    mode = task.params.get("data_mode", "default")
    if mode not in miniwob_tasks.DATA_MODES:
      raise ValueError(
        f"task {task.task_id!r}: data_mode must be one of"
        f" {', '.join(miniwob_tasks.DATA_MODES)}; got {mode!r}"
      )
    self.task = self._shot = None
    try:
      shot, goal = await self._begin(url, task)
    except (devtools.BrowserDied, devtools.PageCrashed):
      # Nothing is lost yet, and the next tab is a fresh one.
      shot, goal = await self._begin(url, task)
    self.task = task
    self._shot = shot
    self._ended_by = self._answer = None
    self._turns = 0
    self.goal = goal
    return base.Observation(
      shot.pixels,
      goal,
      done=shot.done,
      info={"turn": 0},
      axtree=self.tree.text if self.tree is not None else "",
    )

  async def _begin(self, url: str, task: base.Task):
    if self.page is not None and (self.page.dead or self.page.worn):
      self._discard()
    if self.page is None:
      browser = self._given_browser or shared_browser(self._max_pages)
      self._browser = browser
      self.page = await browser.acquire(
        self._page_deadline_s, prefer=lambda page: page.url == url
      )
    page = self.page
    view = self.width / self.scale, self.height / self.scale, self.scale
    try:
      if (page.width, page.height, page.scale) != view:
        await page.show(*view)
      begun = await page.start(
        url,
        task.seed,
        data_mode=task.params.get("data_mode", "default"),
        time_limit=self._time_limit,
        images=miniwob_tasks.images(task.family),
        reload=not (self._quick and task.family in catalogue.QUICK_FAMILIES),
        pixels=self._sees_pixels,
      )
      self.tree = None
      if self.observation != "screenshot":
        self.tree = axtree.PageTree(
          page, page.width, page.height, self._tree_characters
        )
        await self.tree.look()
      return begun
    except BaseException:
      self._discard()
      raise

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Carries out one action; after the end nothing changes any more.

    Raises:
      RuntimeError: no episode is running.
      DevToolsError: the browser failed; the episode is lost.
    """
    page, shot = self.page, self._shot
    if page is None or shot is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if self.over:
      return self._observe(shot, {"ignored": "the episode is over"})
    if (error := page.dead) is not None:
      self._discard()
      raise error
    try:
      self._turns += 1
      outcome = await actions.perform(
        page, action, self.width, self.height, self.scale, self.tree
      )
      info = outcome.info()
      if action.kind in actions.ENDS and not outcome.ignored:
        self._ended_by, self._answer = action.kind.value, action.text
      else:
        settle = action.kind in _SCROLLING or (
          self.tree is not None and self.tree.scrolled
        )
        self._shot = shot = await self._look(page, shot, settle)
        if self.tree is not None and not shot.done:
          await self.tree.look()
    except BaseException:
      # Cancelled or failed half-way: the state of the page is unknown.
      self._discard()
      raise
    return self._observe(shot, info)

  async def _look(
    self, page: page_lib.WobPage, before: page_lib.Shot, settle: bool
  ) -> page_lib.Shot:
    """Returns the page after the time of one action."""
    if not self._sees_pixels:
      return await page.advance(self._step_ms, settle)
    if self._final:
      return await page.shot(self._step_ms, settle)
    state = await page.advance(self._step_ms, settle)
    if not state.done:
      return await page.shot()
    return dataclasses.replace(state, pixels=before.pixels)

  async def evaluate(self) -> base.Evaluation:
    """Returns the page's verdict so far; an undecided episode scores 0.

    The score is in [-1, 1] (pages punish mistakes); success is above 0.
    """
    if self.task is None or self._shot is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    shot = self._shot
    score = shot.raw_reward if self._reward == "raw" else shot.timed_reward
    details = {
      "decided": shot.done,
      "turns": self._turns,
      "raw_reward": shot.raw_reward,
      "timed_reward": shot.timed_reward,
      "reason": shot.reason,
      "page_ms": shot.page_ms,
    }
    if self._answer is not None:
      details["answer"] = self._answer
    if not shot.done:
      score = 0.0
    return base.Evaluation(score, shot.done and shot.raw_reward > 0, details)

  async def close(self) -> None:
    """Gives the tab back. Idempotent."""
    self._end(reuse=True)

  def _discard(self) -> None:
    """Gives back a tab that must not be used again, and ends the episode."""
    self._end(reuse=False)

  def _end(self, reuse: bool) -> None:
    self.task = self._shot = None
    page, self.page = self.page, None
    if page is not None and self._browser is not None:
      self._browser.release(page, reuse=reuse and not page.worn)

  @property
  def _sees_pixels(self) -> bool:
    return self.observation != "axtree"

  @property
  def over(self) -> bool:
    """Whether the episode has ended, or there is none."""
    ended = self._shot is None or self._shot.done
    return ended or self._ended_by is not None

  def _observe(
    self, shot: page_lib.Shot, info: Mapping[str, Any]
  ) -> base.Observation:
    return base.Observation(
      shot.pixels,
      text=axtree.error_of(info) if self.tree is not None else "",
      done=self.over,
      info={"turn": self._turns, **info},
      axtree=self.tree.text if self.tree is not None else "",
    )
