"""The `miniwob` gym: real MiniWoB++ pages in one shared headless Chromium.

`MiniWobGym` implements the gym protocol on the event loop, without threads:
each gym has a tab, many gyms share a browser. The same task and the same
actions give the same screenshots, whatever the time between them: each action
is followed by a fixed span of the page's virtual time, so a task's timers,
animations and time limits count actions, not seconds.

Positions outside the screenshot are clamped to its edge, as a real pointer is
(`info["clamped"]`), and an action that does nothing says why in
`info["ignored"]`. Failures of the browser are `devtools.DevToolsError`s: the
episode is lost, the next `start` gets a fresh tab or browser.

Does not enforce `max_turns` (the collector does). Tasks without a page, such
as those on live sites, are not offered.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping

from tunix.rl.multi_turn import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms.miniwob import browser as browser_lib
from tunix.rl.multi_turn.environments.gyms.miniwob import devtools
from tunix.rl.multi_turn.environments.gyms.miniwob import keys as keys_lib
from tunix.rl.multi_turn.environments.gyms.miniwob import page as page_lib
from tunix.rl.multi_turn.environments.gyms.miniwob import tasks as tasks_lib

_Kind = gui_action.GuiActionKind
_SETTINGS = (
    "reward", "time_limit", "seconds_per_action", "quick_restart",
    "final_screenshot", "page_deadline_s",
)  # pyformat: disable
_MAX_WAIT_S = 60.0
# After these the page may still have to hear that something was scrolled.
_SCROLLING = frozenset({_Kind.SCROLL, _Kind.KEY, _Kind.DRAG, _Kind.SWIPE})
_LONG_PRESS_S = 1.0


class MiniWobGym:
  """One MiniWoB++ page; `start` may be called again after an episode.

  Attributes:
    width, height: of the screenshots in pixels, always 160 x 210.
    task: of the episode, None before the first.
    page: its tab, None before the first episode and after an error. What
      reads it (oracles, tests) must not act on it.
  """

  width, height = page_lib.WIDTH, page_lib.HEIGHT

  def __init__(
      self,
      *,
      reward: str = "raw",
      time_limit: bool = False,
      seconds_per_action: float = 0.5,
      quick_restart: bool = True,
      final_screenshot: bool = True,
      page_deadline_s: float = 120.0,
      browser: browser_lib.Browser | None = None,
  ):
    """Args:

      reward: "raw", the page's verdict, or "timed", the page's verdict made
        smaller by the page time it took; this needs `time_limit`.
      time_limit: keep the page's own limit, mostly 10 s of its time, after
        which the episode ends with -1.
      seconds_per_action: page time that passes after each action.
      quick_restart: do not load the page anew when the next task is of the
        same family and its page is known to show the same pixels either way
        (`tasks.QUICK_FAMILIES`): several times faster. False loads it always.
      final_screenshot: whether the observation that ends an episode shows the
        page as it is then; without, it repeats the last one, which saves a
        frame.
      page_deadline_s: how long to wait for a free tab.
      browser: to use instead of the event loop's shared one.
    """
    if reward not in ("raw", "timed"):
      raise ValueError(f"reward must be 'raw' or 'timed', got {reward!r}")
    if reward == "timed" and not time_limit:
      raise ValueError(
          "reward='timed' needs time_limit=True: it falls with the time left"
      )
    if not 0 <= seconds_per_action <= _MAX_WAIT_S:
      raise ValueError(
          f"seconds_per_action must be in [0, {_MAX_WAIT_S:g}], got"
          f" {seconds_per_action}"
      )
    self.task: base.Task | None = None
    self.page: page_lib.WobPage | None = None
    self._reward = reward
    self._time_limit = time_limit
    self._step_ms = 1000.0 * seconds_per_action
    self._quick = quick_restart
    self._final = final_screenshot
    self._page_deadline_s = page_deadline_s
    self._given_browser = browser
    self._browser: browser_lib.Browser | None = None
    self._shot: page_lib.Shot | None = None
    self._ended_by: str | None = None
    self._answer: str | None = None
    self._turns = 0

  @classmethod
  def from_dict(cls, config: Mapping[str, Any]) -> MiniWobGym:
    """Builds it from the settings of `__init__` that are JSON values."""
    return cls(
        **base.known_only(config, _SETTINGS, "miniwob gym settings")
    )

  async def start(self, task: base.Task) -> base.Observation:
    """Starts an instance; the observation carries the page's instruction.

    Raises:
      ValueError: unknown family (gives the nearest) or data mode.
      PagesNotFound, BrowserNotFound: with what to install.
      DevToolsError: the browser failed, twice.
    """
    url = tasks_lib.page_url(task.family)
    mode = task.params.get("data_mode", "default")
    if mode not in tasks_lib.DATA_MODES:
      raise ValueError(
          f"task {task.task_id!r}: data_mode must be one of"
          f" {', '.join(tasks_lib.DATA_MODES)}; got {mode!r}"
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
    return base.Observation(
        shot.pixels, goal, done=shot.done, info={"turn": 0}
    )

  async def _begin(self, url: str, task: base.Task):
    if self.page is not None and self.page.dead is not None:
      self._discard()
    if self.page is None:
      self._browser = self._given_browser or browser_lib.shared_browser()
      self.page = await self._browser.acquire(self._page_deadline_s)
    try:
      return await self.page.start(
          url,
          task.seed,
          data_mode=task.params.get("data_mode", "default"),
          time_limit=self._time_limit,
          images=tasks_lib.images(task.family),
          reload=not (self._quick and task.family in tasks_lib.QUICK_FAMILIES),
      )
    except BaseException:
      self._discard()
      raise

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Carries out one action; after the end nothing changes any more.

    Raises:
      RuntimeError: no episode is running.
      DevToolsError: the browser failed; the episode is lost.
    """
    if self.task is None or self._shot is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if self.over:
      return self._observe({"ignored": "the episode is over"})
    info: dict[str, Any] = {}
    page = self.page
    if page is None or page.dead is not None:
      error = page.dead if page else devtools.PageCrashed("the page is gone")
      self._discard()
      raise error
    try:
      self._turns += 1
      ignored = await self._perform(page, action, info)
      if ignored:
        info["ignored"] = ignored
      if self._ended_by is None:
        self._shot = await self._look(page, action.kind in _SCROLLING)
    except BaseException:
      # Cancelled or failed half-way: nobody knows what the page is doing.
      self._discard()
      raise
    return self._observe(info)

  async def _look(self, page: page_lib.WobPage, settle: bool) -> page_lib.Shot:
    """The page after the time of one action."""
    if self._final:
      return await page.shot(self._step_ms, settle)
    state = await page.advance(self._step_ms, settle)
    if not state.done:
      return await page.shot()
    return dataclasses.replace(state, pixels=self._shot.pixels)

  async def evaluate(self) -> base.Evaluation:
    """The page's verdict so far; an undecided episode scores 0.

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
    if self.page is not None:
      page, self.page = self.page, None
      self._browser.release(page)
    self.task = self._shot = None

  def _discard(self) -> None:
    """Gives back a tab that must not be used again, and ends the episode."""
    self.task = self._shot = None
    if self.page is not None:
      page, self.page = self.page, None
      self._browser.release(page, reuse=False)

  @property
  def over(self) -> bool:
    """Whether the episode has ended, or there is none."""
    ended = self._shot is None or self._shot.done
    return ended or self._ended_by is not None

  def _observe(self, info: Mapping[str, Any]) -> base.Observation:
    return base.Observation(
        self._shot.pixels,
        done=self.over,
        info={"turn": self._turns, **info},
    )

  async def _perform(
      self,
      page: page_lib.WobPage,
      action: gui_action.GuiAction,
      info: dict[str, Any],
  ) -> str:
    """Carries out `action`; returns why nothing was done, or ""."""
    kind = action.kind
    numbers = (action.x, action.y, action.x2, action.y2, action.dx, action.dy,
               action.duration)  # pyformat: disable
    for number in numbers:
      if number is not None and not math.isfinite(number):
        return f"a position, distance or duration is {number}"
    seconds = action.duration
    if seconds is not None:
      seconds = min(max(seconds, 0.0), _MAX_WAIT_S)
    x, y = page.pointer
    if action.x is not None and action.y is not None:
      x, y = self._clamp(action.x, action.y, info)
    if action.x2 is not None and action.y2 is not None:
      x2, y2 = self._clamp(action.x2, action.y2, info)
    try:
      if kind is _Kind.CLICK:
        held = keys_lib.modifier_bits(action.keys)
        await page.click(x, y, action.button, action.count, held)
      elif kind is _Kind.MOVE:
        await page.move(x, y)
      elif kind is _Kind.DRAG:
        await page.drag(x, y, x2, y2, action.button)
      elif kind is _Kind.SWIPE:
        await page.drag(x, y, x2, y2)
      elif kind is _Kind.LONG_PRESS:
        held_s = _LONG_PRESS_S if seconds is None else seconds
        await page.press(x, y, 1000 * held_s)
      elif kind is _Kind.SCROLL:
        await page.scroll(x, y, action.dx, action.dy)
      elif kind is _Kind.TYPE:
        await page.type_text(action.text)
      elif kind is _Kind.KEY:
        await page.press_keys(action.keys, 1000 * (seconds or 0.0))
      elif kind is _Kind.SYSTEM_BUTTON and action.text == "enter":
        await page.press_keys(("enter",))
      elif kind is _Kind.WAIT:
        await page.advance(1000 * (1.0 if seconds is None else seconds))
      elif kind in (_Kind.ANSWER, _Kind.TERMINATE):
        self._ended_by = kind.value
        self._answer = action.text
      elif kind is not _Kind.SCREENSHOT:
        what = f"{kind.value} {action.text!r}" if action.text else kind.value
        return f"a web page has no {what}"
    except keys_lib.UnknownKey as error:
      return str(error)
    return ""

  def _clamp(self, x: float, y: float, info) -> tuple[float, float]:
    inside = (
        min(max(x, 0.0), self.width - 1.0),
        min(max(y, 0.0), self.height - 1.0),
    )
    if not (0 <= x < self.width and 0 <= y < self.height):
      info["clamped"] = True
    return inside
