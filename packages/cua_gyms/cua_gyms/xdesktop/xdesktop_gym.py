"""Plays tasks on a real Linux desktop: the `xdesktop` gym.

`XDesktopGym` makes a new desktop for each episode (display, home, processes)
and ends it with the episode. Programs are real and take their time, so each
action is followed by a wait, with a limit, until nothing is drawn and no
program works. Pictures of equal states are equal, except where programs show
the time or a place.

Positions outside the screenshot are clamped to its edge (`info["clamped"]`),
and an action that does nothing reports why in `info["ignored"]`. Failures of
the desktop are `sandbox_errors.DesktopError`s: the episode is lost, the next
`start` gets a fresh one. A call that misses its deadline ends the desktop.

Does not enforce `max_turns` (the collector does).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any, Callable, Iterator, Mapping, TypeVar

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency

from cua_gyms.sandbox import rooms
from cua_gyms.sandbox import sandbox_errors
from cua_gyms.xdesktop import desktop as desktops
from cua_gyms.xdesktop import families
from cua_gyms.xdesktop import families_editor  # noqa: F401
from cua_gyms.xdesktop import families_files  # noqa: F401
from cua_gyms.xdesktop import families_system  # noqa: F401
from cua_gyms.xdesktop import keyboard
from cua_gyms.xdesktop import programs
from cua_gyms.xdesktop import state as state_lib

_LOG = logging.getLogger(__name__)
_Kind = gui_action.GuiActionKind
T = TypeVar("T")
MIN_SCREEN = (800, 600)
MAX_SCREEN = (4096, 4096)
_MAX_WAIT_S = 60.0
_LONG_PRESS_S = 1.0
_CLOSE_S = 10.0
_DESCRIBE_S = 30.0
# Pixels of scrolling that stand for one notch of the wheel.
_PIXELS_A_NOTCH = 40
_ENDS = (_Kind.ANSWER, _Kind.TERMINATE)


def unusable(
  options: Mapping[str, Any], width: int, height: int
) -> Iterator[str]:
  """Yields the reason that this machine cannot isolate desktops as asked.

  Nothing where their programs are missing: `start` names those first.
  """
  del width, height
  if programs.missing():
    return
  try:
    rooms.resolve_isolation(options.get("isolation", "auto"))
  except (sandbox_errors.IsolationUnavailable, ValueError) as error:
    yield f"gym.options.{error}"


class XDesktopGym:
  """One desktop at a time; `start` may be called again after an episode.

  Attributes:
    width, height: Size of the screenshots in pixels.
    task: Task of the episode, None without one.
    observation: The newest observation, None before the first.
    desktop: Desktop of the episode, None before the first and after an error.
  """

  def __init__(
    self,
    width: int = 1024,
    height: int = 768,
    *,
    zoom: int = 0,
    isolation: str = "auto",
    directory: str | None = None,
    disk_mb: int = 256,
    max_processes: int = 512,
    settle_s: float = 0.04,
    settle_limit_s: float = 3.0,
    launch_s: float = 20.0,
    call_s: float = 60.0,
    pointer: bool = True,
  ):
    """Args:

      width, height: Size of the screenshots in pixels.
      zoom: Factor by which the screen is larger than a screenshot, which is
        reduced from it; 0 for the smallest that gives a screen of 800x600.
      isolation: "auto" or "namespaces"; or "processes", which lets the policy
        read and write what this user can; see `sandbox`.
      directory: Directory for the files of desktops, None for the machine's own
        place for temporary files.
      disk_mb: Size of all files of a desktop in namespaces, in MiB; they lie in
        memory.
      max_processes: Most processes and threads of a desktop in namespaces.
      settle_s: Seconds without any change after which an action is over.
      settle_limit_s: Seconds after which an action is over in any case.
      launch_s: Seconds that each program may take to come up.
      call_s: deadline of each call; that of `start` is longer by `launch_s`
        for each program.
      pointer: whether screenshots show the mouse pointer.

    Raises:
      ValueError: naming the setting.
    """
    for name, seconds in {
      "settle_s": settle_s,
      "settle_limit_s": settle_limit_s,
      "launch_s": launch_s,
      "call_s": call_s,
    }.items():
      if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name}={seconds!r} must be > 0 seconds")
    if isolation not in rooms.ISOLATIONS:
      raise ValueError(
        f"isolation={isolation!r} must be one of {', '.join(rooms.ISOLATIONS)}"
      )
    if disk_mb < 16 or max_processes < 64:
      raise ValueError(
        f"disk_mb={disk_mb} must be >= 16 MiB and"
        f" max_processes={max_processes} >= 64"
      )
    if width < 1 or height < 1 or zoom < 0:
      raise ValueError(
        f"width={width}, height={height} must be >= 1 and zoom={zoom} >= 0"
      )
    least = max(-(-MIN_SCREEN[0] // width), -(-MIN_SCREEN[1] // height))
    zoom = zoom or least
    if zoom < least:
      raise ValueError(
        f"width={width}, height={height}, zoom={zoom}: the screen would be"
        f" {width * zoom}x{height * zoom}, and a desktop needs"
        f" {MIN_SCREEN[0]}x{MIN_SCREEN[1]}; set zoom={least}, or 0"
      )
    if width * zoom > MAX_SCREEN[0] or height * zoom > MAX_SCREEN[1]:
      raise ValueError(
        f"width={width}, height={height}, zoom={zoom}: a screen has at most"
        f" {MAX_SCREEN[0]}x{MAX_SCREEN[1]} pixels"
      )
    self.width, self.height = int(width), int(height)
    self.task: base.Task | None = None
    self.observation: base.Observation | None = None
    self.desktop: desktops.Desktop | None = None
    self._zoom = int(zoom)
    self._isolation = isolation
    self._directory = directory
    self._limits = rooms.Limits(disk=disk_mb << 20, processes=max_processes)
    self._settle_s = settle_s
    self._settle_limit_s = settle_limit_s
    self._launch_s = launch_s
    self._call_s = call_s
    self._pointer = pointer
    self._instance: families.Instance | None = None
    self._oracle: Iterator[gui_action.GuiAction] | None = None
    self._answer = ""
    self._last: gui_action.GuiAction | None = None
    self._over = False
    self._turns = 0
    self._stuck: concurrency.StuckCall | None = None

  # -- the protocol ------------------------------------------------------------

  async def start(self, task: base.Task) -> base.Observation:
    """Starts a fresh desktop and prepares it for the task.

    Raises:
      ValueError: unknown family (gives the nearest).
      DesktopError: see `sandbox_errors`; nothing of the desktop is left.
      DeadlineExceeded.
    """
    instance = families.instance(task.family, task.seed)
    await self.close()
    seconds = self._call_s + self._launch_s * (2 + len(instance.opens))
    try:
      await self._call("start", self._begin, instance, seconds=seconds)
      self.task, self._instance = task, instance
      self._oracle = None
      self._answer, self._last = "", None
      self._turns, self._over = 0, False
      shot = await self._call("screenshot", self._shoot)
    except BaseException:
      await self._discard()
      raise
    return self._observe(
      shot, instance.instruction, turn=0, isolation=self._running.room.isolation
    )

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Carries out one action; after the end nothing changes any more.

    Raises:
      RuntimeError: no episode is running.
      DesktopError, DeadlineExceeded: the episode is lost.
    """
    if self.task is None or self.desktop is None or self.observation is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if self._over:
      return self._observe(
        self.observation.pixels, ignored="the episode is over"
      )
    info: dict[str, Any] = {}
    self._turns += 1
    try:
      ignored = _impossible(action)
      if not ignored:
        self._last = action
        if action.kind in _ENDS:
          self._over = True
          self._answer = action.text or self._answer
        else:
          if action.kind is _Kind.WAIT:
            await asyncio.sleep(_seconds(action, 1.0))
          ignored = await self._call(
            action.kind.value,
            self._perform,
            action,
            info,
            seconds=self._call_s + _seconds(action, 0.0),
          )
      if ignored:
        info["ignored"] = ignored
      shot = await self._call("screenshot", self._shoot)
    except BaseException:
      # Failed or cancelled half-way: the state of the desktop is unknown.
      await self._discard()
      raise
    return self._observe(shot, turn=self._turns, **info)

  async def evaluate(self) -> base.Evaluation:
    """Scores 1 if the task's check passes on the state, else 0.

    Raises:
      RuntimeError: no episode.
      DesktopError, DeadlineExceeded: the episode is lost.
    """
    if self._instance is None or self.desktop is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    state = state_lib.State(self.desktop, self._answer, self._last)
    try:
      wrong = await self._call("evaluate", self._instance.check, state)
    except BaseException:
      await self._discard()
      raise
    details: dict[str, Any] = {"turns": self._turns}
    if wrong:
      details["reason"] = wrong
    if self._answer:
      details["answer"] = self._answer
    return base.Evaluation(float(not wrong), not wrong, details)

  async def close(self) -> None:
    """Ends the desktop and removes its files. Idempotent.

    Raises:
      DesktopError: something outlived the deadline.
    """
    desktop = self._forget()
    if desktop is None:
      return
    stuck = self._stuck
    if stuck is not None and not stuck.returned:
      # That call still holds the display; it ends with its server.
      desktop.kill()
      later = threading.Thread(target=_close_late, args=(desktop,), daemon=True)
      stuck.then(later.start)
      return
    await concurrency.acall(
      desktop.close, _CLOSE_S, seconds=_CLOSE_S + 5, what="xdesktop close"
    )

  # -- for oracles -------------------------------------------------------------

  @property
  def over(self) -> bool:
    return self.task is None or self._over

  def oracle(self) -> Iterator[gui_action.GuiAction]:
    """The episode's one script of right actions, see `hand`.

    Raises:
      RuntimeError: no episode is running.
    """
    if self._instance is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if self._oracle is None:
      self._oracle = self._instance.oracle(self._shown, self._zoom)
    return self._oracle

  def _shown(self) -> np.ndarray:
    if self.observation is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return self.observation.pixels

  def window_at(self, x: float, y: float) -> str | None:
    """Reads the title of the topmost window at a screenshot's pixel; blocks.

    Raises:
      DesktopLost.
    """
    display = self._running.display
    x, y = self._point(x, y, {})
    under = [
      w
      for w in display.windows()
      if not w.minimized
      and w.x <= x < w.x + w.width
      and w.y <= y < w.y + w.height
    ]
    # The window with the keyboard is on top; else the youngest one.
    under.sort(key=lambda w: w.active)
    return under[-1].title if under else None

  # -- inside ------------------------------------------------------------------

  @property
  def _running(self) -> desktops.Desktop:
    if self.desktop is None:
      raise sandbox_errors.DesktopLost("there is no desktop")
    return self.desktop

  async def _call(
    self,
    what: str,
    fn: Callable[..., T],
    *args: Any,
    seconds: float | None = None,
  ) -> T:
    """Runs blocking work in a thread; ends the desktop at the deadline."""

    def note(stuck: concurrency.StuckCall) -> None:
      self._stuck = stuck
      if self.desktop is not None:
        self.desktop.kill()  # Which makes the call return.

    return await concurrency.acall(
      fn,
      *args,
      seconds=seconds or self._call_s,
      what=f"xdesktop {what}",
      on_stuck=note,
    )

  def _begin(self, instance: families.Instance) -> None:
    desktop = desktops.Desktop(
      self.width * self._zoom,
      self.height * self._zoom,
      isolation=self._isolation,
      directory=self._directory,
      limits=self._limits,
      launch_s=self._launch_s,
    )
    self.desktop = desktop  # So that it can be ended while it comes up.
    desktop.start()
    families.furnish(desktop, instance)
    self._settled()

  def _shoot(self) -> np.ndarray:
    return self._reduced(self._running.display.screenshot(self._pointer))

  def _reduced(self, pixels: np.ndarray) -> np.ndarray:
    if self._zoom == 1:
      return pixels
    return np.asarray(Image.fromarray(pixels).reduce(self._zoom))

  def _observe(
    self, shot: np.ndarray, instruction: str = "", **info: Any
  ) -> base.Observation:
    self.observation = base.Observation(
      shot, instruction, done=self._over, info=info
    )
    return self.observation

  def _forget(self) -> desktops.Desktop | None:
    desktop, self.desktop = self.desktop, None
    self.task = self._instance = self._oracle = None
    return desktop

  async def _discard(self) -> None:
    """`close` after an error, which is the one to be heard of."""
    try:
      await self.close()
    except sandbox_errors.DesktopError as error:
      _LOG.warning("%s", error)

  def _perform(self, action: gui_action.GuiAction, info: dict[str, Any]) -> str:
    """Carries out `action`; returns the reason if it did nothing, else ""."""
    desktop = self._running
    display = desktop.display
    kind = action.kind
    if action.x is None or action.y is None:
      x, y = display.pointer()
    else:
      x, y = self._point(action.x, action.y, info)
    x2 = y2 = 0
    if action.x2 is not None and action.y2 is not None:
      x2, y2 = self._point(action.x2, action.y2, info)
    try:
      if kind is _Kind.CLICK:
        display.click(x, y, action.button, action.count, action.keys)
      elif kind is _Kind.MOVE:
        display.move(x, y)
      elif kind in (_Kind.DRAG, _Kind.SWIPE):
        display.drag(x, y, x2, y2, action.button)
      elif kind is _Kind.LONG_PRESS:
        display.press(x, y, _seconds(action, _LONG_PRESS_S))
      elif kind is _Kind.SCROLL:
        display.scroll(x, y, self._notches(action.dx), self._notches(action.dy))
      elif kind is _Kind.TYPE:
        display.type(action.text or "", self._settled)
      elif kind is _Kind.KEY:
        display.chord(action.keys, _seconds(action, 0.0))
      elif kind is _Kind.SYSTEM_BUTTON and action.text == "enter":
        display.chord(("enter",))
      elif kind is _Kind.OPEN_APP:
        desktop.launch(action.text or "")
      elif kind is _Kind.SYSTEM_BUTTON:
        return f"a desktop has no button {action.text!r}"
    except (keyboard.UnknownKey, ValueError) as error:
      return str(error)
    if not self._settled():
      info["unsettled"] = True
    return ""

  def _settled(self) -> bool:
    return self._running.settle(self._settle_s, self._settle_limit_s)

  def _notches(self, pixels: float) -> int:
    """Returns the notches of the wheel for `pixels` of scrolling."""
    notches = round(pixels * self._zoom / _PIXELS_A_NOTCH)
    return notches or int(math.copysign(1, pixels)) if pixels else 0

  def _point(self, x: float, y: float, info: dict[str, Any]) -> tuple[int, int]:
    """Converts a point of the screenshot to one of the screen."""
    inside = (
      min(max(x, 0.0), self.width - 1.0),
      min(max(y, 0.0), self.height - 1.0),
    )
    if inside != (x, y):
      info["clamped"] = True
    half = self._zoom // 2
    return (
      int(inside[0] * self._zoom) + half,
      int(inside[1] * self._zoom) + half,
    )


def _seconds(action: gui_action.GuiAction, default: float) -> float:
  duration = default if action.duration is None else action.duration
  return min(max(duration, 0.0), _MAX_WAIT_S)


def _impossible(action: gui_action.GuiAction) -> str:
  for name in ("x", "y", "x2", "y2", "dx", "dy", "duration"):
    number = getattr(action, name)
    if number is not None and not math.isfinite(number):
      return f"{name} is {number}"
  return ""


def _close_late(desktop: desktops.Desktop) -> None:
  try:
    desktop.close(_CLOSE_S)
  except Exception:  # pylint: disable=broad-except
    _LOG.exception("a desktop did not end")


async def oracle_action(gym: XDesktopGym) -> gui_action.GuiAction | None:
  """Returns the next right action in the gym's episode; None when it is over.

  Raises:
    RuntimeError: no episode is running.
    hand.Unsolvable: the screenshot does not show its target.
  """
  if gym.over:
    if gym.task is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return None
  return next(gym.oracle(), None)


async def describe(gym: XDesktopGym, x: float, y: float) -> str | None:
  """Returns the name of the object at a pixel; None when it has none.

  Raises:
    RuntimeError: no episode is running.
    DesktopLost.
  """
  if gym.desktop is None:
    raise RuntimeError("no episode is running; call start(task) first")
  title = await concurrency.acall(
    gym.window_at, x, y, seconds=_DESCRIBE_S, what="xdesktop describe"
  )
  return None if title is None else f"the window {title!r}"
