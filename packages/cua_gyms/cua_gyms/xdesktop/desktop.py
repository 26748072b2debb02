"""Runs a real Linux desktop: an X server, a window manager, applications.

Each desktop is made for one episode, in a `rooms.Room` of its own, and ends
with it. Its methods block, each with a deadline of its own but for those that
wait for the X server; `kill`, from any thread, ends those too.
"""

from __future__ import annotations

import importlib.resources
import os
import pathlib
import re
import secrets
import tempfile
import time
from typing import Callable, TypeVar

from cua_gyms.sandbox import rooms
from cua_gyms.sandbox import sandbox_errors
from cua_gyms.xdesktop import display as displays
from cua_gyms.xdesktop import programs

T = TypeVar("T")
_POLL_S = 0.01
_BACKGROUND = 0x4F6F62
_THEME = pathlib.PurePosixPath("share/themes/xdesktop/openbox-3/themerc")
# Below this many nanoseconds between two looks, a program did nothing.
_IDLE_NS = 400_000
# A Unix socket's address, less what we append to the directory.
_MAX_DIRECTORY = 60


class Desktop:
  """An X server with its programs, for one episode."""

  def __init__(
    self,
    width: int,
    height: int,
    *,
    isolation: str = "auto",
    directory: str | os.PathLike[str] | None = None,
    limits: rooms.Limits = rooms.Limits(),
    launch_s: float = 20.0,
  ):
    """Starts nothing yet.

    Args:
      width, height: Size of the screen in pixels.
      isolation: See `sandbox`.
      directory: Directory of its files, None for the machine's own.
      limits: Limits of each program.
      launch_s: Seconds that each program may take to come up.

    Raises:
      ProgramsNotFound, ValueError.
    """
    programs.require()
    parent = os.fsencode(directory or tempfile.gettempdir())
    if len(parent) > _MAX_DIRECTORY:
      raise ValueError(
        f"directory={os.fsdecode(parent)!r} is too long for a socket's"
        f" address; name one of at most {_MAX_DIRECTORY} bytes"
      )
    self._size = (width, height)
    self._isolation = isolation
    self._directory = directory
    self._limits = limits
    self._launch_s = launch_s
    self._opened = 0
    self._number: int | None = None
    self._socket = ""  # Which one the number had then.
    self._room: rooms.Room | None = None
    self._display: displays.Display | None = None
    self._ended = False

  def start(self) -> None:
    """Starts the X server and the window manager; once.

    Raises:
      IsolationUnavailable, LaunchError, DesktopLost, ValueError: nothing is
        left then.
    """
    try:
      self._room = rooms.Room(
        isolation=self._isolation,
        directory=self._directory,
        limits=self._limits,
        deadline_s=self._launch_s,
      )
      if self._ended:  # Killed before there was anything to kill.
        raise sandbox_errors.DesktopLost(
          "the desktop was ended before it came up"
        )
      self._configure()
      self._start_server(*self._size)
      self._start_manager()
    except BaseException:
      self.close()
      raise

  @property
  def room(self) -> rooms.Room:
    """The room its programs run in. Raises DesktopLost: none yet."""
    if self._room is None:
      raise sandbox_errors.DesktopLost("the desktop has not been started")
    return self._room

  @property
  def display(self) -> displays.Display:
    """Screen, pointer and keyboard. Raises DesktopLost after the end."""
    if self._display is None:
      raise sandbox_errors.DesktopLost("the desktop has been closed")
    return self._display

  @property
  def alive(self) -> bool:
    return self._room is not None and self._room.alive

  # -- applications ----------------------------------------------------------

  def open(self, name: str, *arguments: str) -> displays.Window:
    """Opens an application and waits for its window.

    Args:
      name: see `programs.APPS`.
      *arguments: Arguments of its command, e.g. a file.

    Raises:
      ValueError: no such application.
      AppNotShown: no window came; the message has the program's output.
      DesktopLost.
    """
    app = programs.app(name)
    before = self._count(app)
    self._opened += 1
    log = f"{app.command[0]}-{self._opened}.log"
    self._run((*app.command, *arguments), log)

    def shown() -> bool:
      return self._count(app) > before

    if not self._within(self._launch_s, shown):
      raise sandbox_errors.AppNotShown(
        f"{app.title} ({app.command[0]}) showed no window in"
        f" {self._launch_s:g} s; its output:"
        f" {self.room.log(log) or 'nothing'}"
      )
    return [
      w for w in self.display.windows() if w.window_class == app.window_class
    ][-1]

  def launch(self, name: str) -> None:
    """Starts an application and does not wait for it.

    Raises:
      ValueError: no such application.
    """
    app = programs.app(name)
    self._opened += 1
    self._run(app.command, f"{app.command[0]}-{self._opened}.log")

  def _count(self, app: programs.App) -> int:
    return sum(
      w.window_class == app.window_class for w in self.display.windows()
    )

  def settle(self, quiet_s: float, limit_s: float) -> bool:
    """Waits until nothing is drawn, and no program works, for `quiet_s`.

    Returns:
      False: the desktop was not at rest after `limit_s`.
    """
    began = since = time.monotonic()
    spent, _ = self.room.activity()
    while True:
      drawn = self.display.changed(min(_POLL_S, quiet_s))
      now = time.monotonic()
      before = spent
      spent, running = self.room.activity()
      if drawn or running or spent - before > _IDLE_NS:
        since = now
      if now - since >= quiet_s:
        return True
      if now - began >= limit_s:
        return False
      time.sleep(min(_POLL_S, quiet_s) / 2)

  # -- the end ---------------------------------------------------------------

  def kill(self) -> None:
    """Ends all its programs at once; `close` has yet to be called."""
    self._ended = True
    if self._room is not None:
      self._room.kill()

  def close(self, deadline_s: float = 10.0) -> None:
    """Ends everything and leaves nothing behind. Idempotent.

    Raises:
      DesktopError: something outlived the deadline.
    """
    self.kill()
    if self._display is not None:
      self._display.close()
      self._display = None
    try:
      if self._room is not None:
        self._room.close(deadline_s)
    finally:
      if self._number is not None:
        rooms.free_display(self._number, self._socket)
        self._number = None

  # -- building --------------------------------------------------------------

  def _configure(self) -> None:
    source = importlib.resources.files(__package__) / "etc"
    etc = self.room.etc
    items = "\n".join(
      f'    <item label="{app.title}"><action name="Execute"><command>'
      f"{' '.join(app.command)}</command></action></item>"
      for app in programs.APPS.values()
    )
    for name, target in {
      "rc.xml": "rc.xml",
      "menu.xml": "menu.xml",
      "gtk-settings.ini": "gtk-3.0/settings.ini",
      # Its status bar shows how much of the machine's disk is free.
      "pcmanfm.conf": "pcmanfm/default/pcmanfm.conf",
      "themerc.txt": str(_THEME),
    }.items():
      text = (source / name).read_text(encoding="utf-8")
      text = text.replace("@ETC@", self.room.inside_etc)
      text = text.replace("@ITEMS@", items)
      (etc / target).parent.mkdir(parents=True, exist_ok=True)
      (etc / target).write_text(text, encoding="utf-8")
    self._cookie = bytes(secrets.choice(range(0x41, 0x5B)) for _ in range(32))
    displays.write_authority(self.room.tmp / ".Xauthority", self._cookie)

  def _run(self, command: tuple[str, ...], log: str) -> None:
    self.room.run(command, log=log, display=f":{self._number or 0}")

  def _start_server(self, width: int, height: int) -> None:
    private = self.room.isolation == "namespaces"
    number = (":0",) if private else ("-displayfd", "1")
    self.room.run(
        ("Xvfb", *number, "-screen", "0", f"{width}x{height}x24", "-noreset",
         "-nolisten", "tcp", "-auth", f"{self.room.inside_tmp}/.Xauthority"),
        log="Xvfb.log",
    )  # fmt: skip
    address = self.room.tmp / ".X11-unix" / "X0"
    if not private:
      self._number = int(self._await(self._display_number, "Xvfb"))
      address = rooms.SOCKETS / f"X{self._number}"
      self._socket = rooms.socket_identity(self._number)
      # For the process that finds this room without its owner.
      (self.room.path / "display").write_text(f"{self._number} {self._socket}")

    def connect() -> displays.Display | None:
      try:
        return displays.Display(address, self._cookie)
      except OSError:
        return None

    display = self._await(connect, "Xvfb")
    self._display = display
    display.paint_root(_BACKGROUND)

  def _display_number(self) -> str:
    match = re.search(r"^(\d+)$", self.room.log("Xvfb.log"), re.MULTILINE)
    return match[1] if match else ""

  def _start_manager(self) -> None:
    self._run(
      (
        "openbox",
        "--sm-disable",
        "--config-file",
        f"{self.room.inside_etc}/rc.xml",
      ),
      "openbox.log",
    )
    self._await(self.display.managed, "openbox")

  def _await(self, look: Callable[[], T | None], what: str) -> T:
    result = self._within(self._launch_s, look)
    if not result:
      raise sandbox_errors.LaunchError(
        f"{what} did not come up in {self._launch_s:g} s; its output:"
        f" {self.room.log(what + '.log') or 'nothing'}; of its supervisor,"
        f" {self.room.last_words()}"
      )
    return result

  def _within(self, seconds: float, look: Callable[[], T | None]) -> T | None:
    """Waits until `look` finds something, and returns that."""
    due = time.monotonic() + seconds
    while True:
      result = look()
      if result or time.monotonic() >= due:
        return result
      if not self.room.alive:
        raise sandbox_errors.DesktopLost(
          f"the desktop ended while it came up; {self.room.last_words()}"
        )
      time.sleep(_POLL_S)
