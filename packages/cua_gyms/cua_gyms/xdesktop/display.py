"""Connects to an X display: its picture, pointer and keyboard.

Pictures come through MIT-SHM into memory shared with the server, input goes
through XTEST, changes are heard of through DAMAGE. Nothing is started: no
process, no helper. `_connect` and `_send_fd` call libxcb itself: xcffib cannot
send descriptors, which sharing memory takes, and its `Connection(auth=…)` frees
the credentials before libxcb reads them.

Belongs to one thread at a time. Its calls wait for the server without a
deadline of their own: the caller has one, and ends the server when it passes,
upon which they raise `DesktopLost`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import os
import pathlib
import select
import socket
import struct
import time
from typing import Any, Callable, Iterable

import numpy as np

from cua_gyms.sandbox import sandbox_errors
from cua_gyms.xdesktop import keyboard as keyboards

try:
  import xcffib
  from xcffib import xproto
  import xcffib.damage
  import xcffib.shm
  import xcffib.xfixes
  import xcffib.xtest
except ImportError as error:
  raise ImportError(
    f"the xdesktop gym needs xcffib ({error}): pip install"
    " 'tunix-multi-turn[xdesktop]', and sudo make desktop"
  ) from None

COOKIE_NAME = b"MIT-MAGIC-COOKIE-1"
_PRESS, _RELEASE = 2, 3
_BUTTON_PRESS, _BUTTON_RELEASE, _MOTION = 4, 5, 6
BUTTONS = {"left": 1, "middle": 2, "right": 3, "back": 8, "forward": 9}
_DRAG_STEPS = 12
_DRAG_PAUSE_S = 0.012
# Time that programs need to learn that a key gives something else.
_REMAP_S = 0.05
# A hand holds a key, and takes its time between two: programs count on it.
_HOLD_S = 0.02
_TYPE_S = 0.003
# Two clicks nearer than this in time and place may pass for a double one: more
# than the 250 ms of etc/ and of xterm, and than any program's few pixels.
_APART_S = 0.28
_APART_PIXELS = 16
_MAX_PROPERTY = 1 << 16  # words
_GONE = (xproto.BadWindow, xproto.WindowError, xproto.DrawableError)


@dataclasses.dataclass(frozen=True)
class Window:
  """A window that the window manager manages.

  Attributes:
    title: Text of its title bar.
    window_class: WM_CLASS of its application.
    x, y, width, height: Rectangle in pixels, with its frame.
    states: Values of _NET_WM_STATE, e.g. "MAXIMIZED_VERT", "HIDDEN".
    active: Whether it has the keyboard.
  """

  title: str
  window_class: str
  x: int
  y: int
  width: int
  height: int
  states: frozenset[str] = frozenset()
  active: bool = False

  @property
  def maximized(self) -> bool:
    return {"MAXIMIZED_VERT", "MAXIMIZED_HORZ"} <= self.states

  @property
  def minimized(self) -> bool:
    return "HIDDEN" in self.states


def write_authority(path: pathlib.Path, cookie: bytes) -> None:
  """Writes the authority file that server and programs share."""

  def counted(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data

  wild = struct.pack(">H", 0xFFFF)
  entry = wild + b"".join(map(counted, (b"", b"", COOKIE_NAME, cookie)))
  path.write_bytes(entry)
  path.chmod(0o600)


Cursor = tuple[np.ndarray, np.ndarray, int, int]
"""(premultiplied RGB float32[h, w, 3], transparency, hot spot x, y)."""


class Display:
  """A connection to an X display; see the module docstring.

  Attributes:
    width, height: pixels.
  """

  def __init__(self, address: pathlib.Path, cookie: bytes):
    """`address`: the server's socket.

    Raises:
      OSError: no server answers there, yet.
      LaunchError: the server refuses, or lacks an extension.
    """
    self._shm: mmap.mmap | None = None
    self._pixels: np.ndarray | None = None
    self._connection: Any = None
    self._atoms: dict[str, int] = {}
    self._atom_names: dict[int, str] = {}
    self._cursor: Cursor | None = None
    self._damaged = False
    self._clicked = ("", 0, 0, 0.0)  # button, x, y, when it was over
    link = socket.socket(socket.AF_UNIX)
    try:
      link.settimeout(5.0)
      link.connect(str(address))
      link.settimeout(None)
    except OSError:
      link.close()
      raise
    try:
      # The connection owns the descriptor from here.
      self._connection = _connect(link.detach(), COOKIE_NAME, cookie)
      self._prepare()
    except (xcffib.XcffibException, KeyError) as error:
      self.close()
      raise sandbox_errors.LaunchError(
        f"the X server refuses: {error!r}"
      ) from None

  def _prepare(self) -> None:
    c = self._connection
    self._screen = c.setup.roots[0]
    self._root = self._screen.root
    self.width = self._screen.width_in_pixels
    self.height = self._screen.height_in_pixels
    self._xtest = c(xcffib.xtest.key)
    self._xfixes = c(xcffib.xfixes.key)
    self._shm_ext = c(xcffib.shm.key)
    self._damage_ext = c(xcffib.damage.key)
    self._xfixes.QueryVersion(4, 0).reply()
    self._damage_ext.QueryVersion(1, 1).reply()
    self._shm_ext.QueryVersion().reply()
    self._share()
    self._damage = c.generate_id()
    self._damage_ext.Create(
      self._damage, self._root, xcffib.damage.ReportLevel.NonEmpty
    )
    self._xfixes.SelectCursorInput(
      self._root, xcffib.xfixes.CursorNotifyMask.DisplayCursor
    )
    setup = c.setup
    count = setup.max_keycode - setup.min_keycode + 1
    mapping = c.core.GetKeyboardMapping(setup.min_keycode, count).reply()
    self.keyboard = keyboards.Keyboard(
      setup.min_keycode, mapping.keysyms_per_keycode, list(mapping.keysyms)
    )
    self._per_code = mapping.keysyms_per_keycode
    c.flush()

  def _share(self) -> None:
    """Gives the server memory to put pictures in."""
    c = self._connection
    size = self.width * self.height * 4
    memory = os.memfd_create("xdesktop-screenshot", os.MFD_CLOEXEC)
    try:
      os.ftruncate(memory, size)
      self._shm = mmap.mmap(memory, size)
      # Blue, green, red and a byte that means nothing.
      self._pixels = np.frombuffer(self._shm, np.uint8).reshape(
        self.height, self.width, 4
      )
      self._segment = c.generate_id()
      _send_fd(c, os.dup(memory))
      self._shm_ext.AttachFd(self._segment, False, is_checked=True).check()
    finally:
      os.close(memory)

  def close(self) -> None:
    """Leaves the display; idempotent."""
    if self._connection is not None:
      self._connection.disconnect()
      self._connection = None
    # Unmapped when the last picture of it is gone.
    self._pixels = self._shm = None

  def _lost(self, error: BaseException) -> sandbox_errors.DesktopLost:
    return sandbox_errors.DesktopLost(f"the X server has gone: {error!r}")

  # -- pictures --------------------------------------------------------------

  def screenshot(self, pointer: bool = True) -> np.ndarray:
    """Returns the screen's pixels now: uint8[height, width, 3].

    Args:
      pointer: draw the mouse pointer, which is no part of the picture in X.
    """
    shared = self._pixels
    if shared is None:
      raise sandbox_errors.DesktopLost("the display is closed")
    try:
      picture = self._shm_ext.GetImage(
          self._root, 0, 0, self.width, self.height, 0xFFFFFFFF,
          xproto.ImageFormat.ZPixmap, self._segment, 0,
      )  # fmt: skip
      where = self._connection.core.QueryPointer(self._root)
      picture.reply()
      at = where.reply()
      self._read_events()
      if pointer and self._cursor is None:
        self._cursor = self._load_cursor()
    except xcffib.XcffibException as error:
      raise self._lost(error) from None
    # A channel at a time is several times faster than all three.
    pixels = np.empty((self.height, self.width, 3), np.uint8)
    for channel in range(3):
      pixels[..., channel] = shared[..., 2 - channel]
    if pointer and self._cursor is not None:
      self._draw_cursor(pixels, self._cursor, at.root_x, at.root_y)
    return pixels

  def _load_cursor(self) -> Cursor:
    cursor = self._xfixes.GetCursorImage().reply()
    argb = np.array(list(cursor.cursor_image), np.uint32)
    argb = argb.reshape(cursor.height, cursor.width)
    parts = [(argb >> shift & 0xFF).astype(np.float32) for shift in (16, 8, 0)]
    clear = 1 - (argb >> 24).astype(np.float32) / 255
    return np.stack(parts, -1), clear[..., None], cursor.xhot, cursor.yhot

  def _draw_cursor(
    self, pixels: np.ndarray, cursor: Cursor, x: int, y: int
  ) -> None:
    color, clear, hot_x, hot_y = cursor
    cursor_x, cursor_y = x - hot_x, y - hot_y
    height, width = color.shape[:2]
    y0, y1 = max(cursor_y, 0), min(cursor_y + height, self.height)
    x0, x1 = max(cursor_x, 0), min(cursor_x + width, self.width)
    if y0 >= y1 or x0 >= x1:
      return
    part = np.s_[y0 - cursor_y : y1 - cursor_y, x0 - cursor_x : x1 - cursor_x]
    under = pixels[y0:y1, x0:x1].astype(np.float32)
    mixed = under * clear[part] + color[part]
    pixels[y0:y1, x0:x1] = np.clip(mixed + 0.5, 0, 255).astype(np.uint8)

  def changed(self, wait_s: float = 0.0) -> bool:
    """Whether anything was drawn since the last call; waits up to a limit."""
    try:
      self._read_events()
      if not self._damaged and wait_s > 0:
        fd = self._connection.get_file_descriptor()
        if select.select([fd], [], [], wait_s)[0]:
          self._read_events()
      if not self._damaged:
        return False
      self._damaged = False
      self._damage_ext.Subtract(self._damage, 0, 0)
      self._connection.flush()
    except xcffib.XcffibException as error:
      raise self._lost(error) from None
    return True

  def _read_events(self) -> list[Any]:
    """Takes the server's pending events; returns the rest of them."""
    unhandled: list[Any] = []
    while True:
      try:
        event = self._connection.poll_for_event()
      except xcffib.ConnectionException:
        raise
      except xcffib.XcffibException:
        continue  # Of a request about a window that has gone since.
      if event is None:
        return unhandled
      if isinstance(event, xcffib.damage.NotifyEvent):
        self._damaged = True
      elif isinstance(event, xcffib.xfixes.CursorNotifyEvent):
        self._cursor = None
      else:
        unhandled.append(event)

  # -- input -----------------------------------------------------------------

  def _fake(
    self, kind: int, detail: int, x: int = 0, y: int = 0, after_s: float = 0.0
  ) -> None:
    """Sends input; the server delays it by `after_s`, not this process."""
    self._xtest.FakeInput(
      kind, detail, round(1000 * after_s), self._root, x, y, 0
    )

  def _flush(self) -> None:
    """Waits until the server has taken all input."""
    try:
      self._connection.core.GetInputFocus().reply()
    except xcffib.XcffibException as error:
      raise self._lost(error) from None

  def move(self, x: int, y: int) -> None:
    self._fake(_MOTION, 0, x, y)
    self._flush()

  def pointer(self) -> tuple[int, int]:
    try:
      at = self._connection.core.QueryPointer(self._root).reply()
    except xcffib.XcffibException as error:
      raise self._lost(error) from None
    return at.root_x, at.root_y

  def click(
    self,
    x: int,
    y: int,
    button: str = "left",
    count: int = 1,
    modifiers: Iterable[str] = (),
  ) -> None:
    """Clicks `count` times, kept apart from clicks before and after.

    Raises:
      UnknownKey: the keyboard lacks one of the `modifiers`.
    """
    codes = [self.keyboard.key(name).code for name in modifiers]
    self._keep_apart(x, y, button)
    self._fake(_MOTION, 0, x, y)
    for code in codes:
      self._fake(_PRESS, code)
    for _ in range(count):
      self._fake(_BUTTON_PRESS, BUTTONS[button])
      self._fake(_BUTTON_RELEASE, BUTTONS[button])
    for code in reversed(codes):
      self._fake(_RELEASE, code)
    self._flush()
    self._clicked = (button, x, y, time.monotonic())

  def _keep_apart(self, x: int, y: int, button: str) -> None:
    """Waits until a press of the button cannot pass for a second click."""
    last, last_x, last_y, when = self._clicked
    if button == last and max(abs(x - last_x), abs(y - last_y)) < _APART_PIXELS:
      time.sleep(max(0.0, when + _APART_S - time.monotonic()))

  def press(self, x: int, y: int, seconds: float) -> None:
    """Holds the left button."""
    self._keep_apart(x, y, "left")
    self._fake(_MOTION, 0, x, y)
    self._fake(_BUTTON_PRESS, 1)
    self._fake(_BUTTON_RELEASE, 1, after_s=seconds)
    self._flush()
    self._clicked = ("left", x, y, time.monotonic())

  def drag(
    self, x: int, y: int, x2: int, y2: int, button: str = "left"
  ) -> None:
    """Drags in several motions, as programs expect of a hand."""
    self._keep_apart(x, y, button)
    self._fake(_MOTION, 0, x, y)
    self._fake(_BUTTON_PRESS, BUTTONS[button])
    for step in range(1, _DRAG_STEPS + 1):
      part = step / _DRAG_STEPS
      self._fake(
        _MOTION, 0, round(x + (x2 - x) * part), round(y + (y2 - y) * part)
      )
      self._flush()
      time.sleep(_DRAG_PAUSE_S)
    self._fake(_BUTTON_RELEASE, BUTTONS[button])
    self._flush()
    self._clicked = (button, x, y, time.monotonic())

  def scroll(self, x: int, y: int, right: int, down: int) -> None:
    """Turns the wheel by `right` and `down` notches."""
    self._fake(_MOTION, 0, x, y)
    for notches, more, less in ((down, 5, 4), (right, 7, 6)):
      button = more if notches > 0 else less
      for _ in range(abs(notches)):
        self._fake(_BUTTON_PRESS, button)
        self._fake(_BUTTON_RELEASE, button)
    self._flush()

  def chord(self, names: Iterable[str], seconds: float = 0.0) -> None:
    """Presses keys together; the last is released first.

    Raises:
      UnknownKey: the keyboard lacks a key; no key is pressed.
    """
    strokes = [self.keyboard.key(name) for name in names]
    codes = [stroke.code for stroke in strokes]
    if any(s.shift for s in strokes) and self.keyboard.shift not in codes:
      codes.insert(0, self.keyboard.shift)
    for code in codes:
      self._fake(_PRESS, code)
    # Not slept here: a key that is let go too late repeats.
    after_s = max(seconds, _HOLD_S)
    for code in reversed(codes):
      self._fake(_RELEASE, code, after_s=after_s)
      after_s = 0.0
    self._flush()

  def type(self, text: str, settle: Callable[[], Any] = lambda: None) -> None:
    """Types text; a line break is Enter.

    Args:
      text: any Unicode.
      settle: Function that returns when the programs have taken the text typed
        so far, which must be before keys give something else; called for long
        texts.

    Raises:
      UnknownKey: a control character; nothing is typed.
    """
    for number, batch in enumerate(self.keyboard.text(text)):
      if number:
        settle()
      borrowed = {s.code: s.keysym for s in batch if s.keysym}
      for code, keysym in borrowed.items():
        self._connection.core.ChangeKeyboardMapping(
          1, code, self._per_code, [keysym] * self._per_code
        )
      if borrowed:
        self._flush()
        time.sleep(_REMAP_S)
      shifted = False
      for stroke in batch:
        if stroke.shift != shifted:
          self._fake(_PRESS if stroke.shift else _RELEASE, self.keyboard.shift)
          shifted = stroke.shift
        self._fake(_PRESS, stroke.code)
        self._fake(_RELEASE, stroke.code)
        self._connection.flush()
        time.sleep(_TYPE_S)
      if shifted:
        self._fake(_RELEASE, self.keyboard.shift)
      self._flush()
      if borrowed:
        time.sleep(_REMAP_S)

  # -- windows ---------------------------------------------------------------

  def paint_root(self, color: int) -> None:
    """Gives the desktop one color, 0xRRGGBB."""
    self._connection.core.ChangeWindowAttributes(
      self._root, xproto.CW.BackPixel, [color]
    )
    self._connection.core.ClearArea(False, self._root, 0, 0, 0, 0)
    self._flush()

  def managed(self) -> bool:
    """Whether a window manager is ready for windows.

    It announces itself (_NET_SUPPORTING_WM_CHECK) long before: a window
    that opens in between may never be managed.
    """
    core = self._connection.core
    listed = self._atom("_NET_CLIENT_LIST")
    try:
      client_list = core.GetProperty(False, self._root, listed, 0, 0, 1).reply()
    except xcffib.XcffibException as error:
      raise self._lost(error) from None
    return bool(client_list.type)

  def windows(self) -> list[Window]:
    """Windows that the window manager manages, in the order they opened."""
    try:
      active = self._words(self._property(self._root, "_NET_ACTIVE_WINDOW"))
      listed = self._words(self._property(self._root, "_NET_CLIENT_LIST"))
      described = []
      for window in listed:
        try:
          described.append(self._describe(window, window in active))
        except _GONE:
          continue
      return described
    except xcffib.XcffibException as error:
      raise self._lost(error) from None

  def _describe(self, window: int, active: bool) -> Window:
    core = self._connection.core
    size = core.GetGeometry(window).reply()
    at = core.TranslateCoordinates(window, self._root, 0, 0).reply()
    frame = self._words(self._property(window, "_NET_FRAME_EXTENTS"))
    west, east, north, south = frame if len(frame) == 4 else (0, 0, 0, 0)
    names = bytes(self._property(window, "WM_CLASS")).split(b"\0")
    prefix = "_NET_WM_STATE_"
    states = [
      self._atom_name(atom)
      for atom in self._words(self._property(window, "_NET_WM_STATE"))
    ]
    return Window(
      title=bytes(self._property(window, "_NET_WM_NAME")).decode(
        "utf-8", errors="replace"
      ),
      window_class=(names + [b"", b""])[1].decode(errors="replace"),
      x=at.dst_x - west,
      y=at.dst_y - north,
      width=size.width + west + east,
      height=size.height + north + south,
      states=frozenset(s.removeprefix(prefix) for s in states),
      active=active,
    )

  def _property(self, window: int, name: str) -> Any:
    reply = self._connection.core.GetProperty(
      False, window, self._atom(name), 0, 0, _MAX_PROPERTY
    ).reply()
    return reply.value.buf() if reply.value_len else b""

  @staticmethod
  def _words(data: Any) -> tuple[int, ...]:
    data = bytes(data)
    return struct.unpack(f"={len(data) // 4}I", data[: len(data) // 4 * 4])

  def _atom(self, name: str) -> int:
    if name not in self._atoms:
      request = self._connection.core.InternAtom(False, len(name), name)
      self._atoms[name] = request.reply().atom
    return self._atoms[name]

  def _atom_name(self, atom: int) -> str:
    if atom not in self._atom_names:
      reply = self._connection.core.GetAtomName(atom).reply()
      self._atom_names[atom] = bytes(reply.name.buf()).decode(errors="replace")
    return self._atom_names[atom]


class _Auth(ctypes.Structure):
  _fields_ = [
    ("name_length", ctypes.c_int),
    ("name", ctypes.c_char_p),
    ("data_length", ctypes.c_int),
    ("data", ctypes.c_char_p),
  ]


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
  library = ctypes.CDLL("libxcb.so.1")
  library.xcb_connect_to_fd.argtypes = (ctypes.c_int, ctypes.POINTER(_Auth))
  library.xcb_connect_to_fd.restype = ctypes.c_void_p
  library.xcb_send_fd.argtypes = (ctypes.c_void_p, ctypes.c_int)
  library.xcb_send_fd.restype = None
  return library


def _connect(fd: int, name: bytes, data: bytes) -> xcffib.Connection:
  """Connects over the socket `fd`, which libxcb closes from then on.

  Args:
    fd: a connected stream socket.
    name, data: the credentials for the server.

  Raises:
    xcffib.ConnectionException: the server refused.
  """
  auth = _Auth(len(name), name, len(data), data)
  return xcffib.wrap(_library().xcb_connect_to_fd(fd, ctypes.byref(auth)))


def _send_fd(connection: Any, fd: int) -> None:
  """Sends `fd` with the next request; libxcb closes it then."""
  pointer = int(xcffib.ffi.cast("uintptr_t", connection._conn))  # pylint: disable=protected-access
  _library().xcb_send_fd(pointer, fd)
