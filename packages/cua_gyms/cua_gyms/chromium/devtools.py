"""Runs one headless Chromium process and sends it commands over a pipe.

`Chromium` speaks the DevTools protocol over the two pipes of
`--remote-debugging-pipe` (file descriptors 3 and 4 of the child, JSON messages
that end in NUL, flat sessions), on the event loop that launched it.

Promises:
* Every command has a deadline and ends: with its result, or with a
  `DevToolsError` that names the cause. The process dying, the pipe closing
  and a page crashing fail everything that waits for them, at once.
* Nothing stays behind: `close` (and the interpreter's exit) kill the whole
  process group and remove the profile directory. A browser whose owner was
  killed ends by itself when its pipe closes, and the next launch removes its
  directory.
* Launching does not fork the Python process (posix_spawn), so that threads and
  accelerator runtimes already running in it are safe.
* Nothing reaches the network: names do not resolve and every request goes to
  a proxy that is not there. Pages are read from files.

Does not restart anything and knows nothing about pages; see `browser`.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.core import json_text

EXECUTABLE_VARIABLE = "TUNIX_CHROMIUM"
NO_SANDBOX_VARIABLE = "TUNIX_CHROMIUM_NO_SANDBOX"
EXECUTABLES = (
  # Debian's command of that name is a shell that waits for this one.
  "/usr/lib/chromium/chromium-headless-shell",
  "chromium-headless-shell",
  "chrome-headless-shell",
  "chromium",
  "chromium-browser",
  "google-chrome-stable",
  "google-chrome",
)
PROFILE_PREFIX = "tunix-chromium-"
_ID = re.compile(rb'\{"id":([0-9]{1,15})\b')

_FLAGS = (
  "--headless",
  "--remote-debugging-pipe",
  "--no-first-run",
  "--no-default-browser-check",
  "--no-pings",
  "--mute-audio",
  "--hide-scrollbars",
  "--force-device-scale-factor=1",
  "--force-color-profile=srgb",
  "--font-render-hinting=none",
  "--lang=en-US",
  "--disable-gpu",
  "--disable-quic",
  "--disable-sync",
  "--disable-extensions",
  "--disable-breakpad",
  "--disable-crash-reporter",
  "--disable-client-side-phishing-detection",
  "--disable-component-update",
  "--disable-default-apps",
  "--disable-background-networking",
  "--disable-background-timer-throttling",
  "--disable-backgrounding-occluded-windows",
  "--disable-renderer-backgrounding",
  "--disable-back-forward-cache",
  "--disable-ipc-flooding-protection",
  "--disable-hang-monitor",
  "--disable-popup-blocking",
  "--disable-prompt-on-repost",
  "--disable-smooth-scrolling",
  "--disable-dev-shm-usage",
  # The same page gives the same pixels, whatever was drawn before.
  "--disable-partial-raster",
  "--disable-checker-imaging",
  "--disable-threaded-animation",
  "--disable-threaded-scrolling",
  "--disable-image-animation-resync",
  "--disable-new-content-rendering-timeout",
  "--password-store=basic",
  "--use-mock-keychain",
  # No network: names do not resolve, and all traffic, the loopback's too,
  # is sent to a proxy on a port where nothing listens.
  "--host-resolver-rules=MAP * ~NOTFOUND",
  "--proxy-server=http://127.0.0.1:9",
  "--proxy-bypass-list=<-loopback>",
  "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
  "--dns-prefetch-disable",
)
_FIRST_FREE_FD = 10  # Above 3 and 4, so that mapping onto them cannot clobber.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "FONTCONFIG_FILE")
_READ_BYTES = 1 << 18
_WATCH_S = 0.2


class DevToolsError(RuntimeError):
  """A browser command failed."""


class BrowserNotFound(DevToolsError):
  """There is no Chromium on this machine."""


class LaunchError(DevToolsError):
  """Chromium did not start."""


class BrowserDied(DevToolsError):
  """The browser process ended, or its pipe closed."""


class PageCrashed(DevToolsError):
  """The page's renderer crashed, or the page was closed behind our back."""


class CommandTimeout(DevToolsError, TimeoutError):
  """The browser did not answer within the deadline."""


class CommandFailed(DevToolsError):
  """The browser answered with an error, or the page's script threw."""


def find_browser(executable: str | None = None) -> str:
  """Path of a Chromium executable.

  Args:
    executable: Name or path; None means `$TUNIX_CHROMIUM`, else the first of
      `EXECUTABLES` that is installed.

  Raises:
    BrowserNotFound: there is none; the message, one line, names the fix.
  """
  chosen = executable or os.environ.get(EXECUTABLE_VARIABLE)
  for name in (chosen,) if chosen else EXECUTABLES:
    path = shutil.which(name)
    if path:
      return path
  if chosen:
    source = "executable" if executable else f"${EXECUTABLE_VARIABLE}"
    raise BrowserNotFound(f"{source} names {chosen!r}, which cannot be run")
  raise BrowserNotFound(
    "no Chromium found: run `make browser` (Debian: apt-get install"
    f" chromium-headless-shell) or set ${EXECUTABLE_VARIABLE} to one"
  )


class Chromium:
  """A running browser. Use it on the event loop that launched it.

  Attributes:
    pid: Id of the browser process, which leads its own session and group.
    profile: its user data directory; gone after `close`.
    death: None while it runs, else why it does not.
    on_death: called once, with the error, when it ends without `close`.
  """

  def __init__(self):
    """Use `launch`."""
    self.pid: int = 0
    self.profile: pathlib.Path | None = None
    self.death: DevToolsError | None = None
    self.on_death: Callable[[DevToolsError], None] | None = None
    self._loop = asyncio.get_running_loop()
    self._read_fd = self._write_fd = -1
    self._lock_fd = -1
    self._owner = os.getpid()
    self._exit: str | None = None
    self._watcher: asyncio.TimerHandle | None = None
    self._next_id = 0
    self._pending: dict[int, _Command] = {}
    self._listeners: dict[tuple[str | None, str], Callable[[Any], None]] = {}
    self._chunks: list[bytes] = []
    self._unsent = bytearray()

  @classmethod
  async def launch(
    cls,
    executable: str | None = None,
    *,
    extra_flags: tuple[str, ...] = (),
    deadline_s: float = 30.0,
  ) -> Chromium:
    """Starts a browser with a fresh profile and waits until it answers.

    Raises:
      BrowserNotFound: no browser is installed.
      LaunchError: the browser did not answer in `deadline_s`; the message has
        its last output.
    """
    path = find_browser(executable)
    sweep_profiles()
    self = cls()
    try:
      self._spawn(path, extra_flags)
      await self.call("Browser.getVersion", deadline_s=deadline_s)
    except (DevToolsError, OSError) as error:
      words = self._last_words()
      self.kill()
      raise LaunchError(f"{path} did not start: {error}{words}") from error
    except BaseException:
      self.kill()
      raise
    return self

  def _spawn(self, path: str, extra_flags: tuple[str, ...]) -> None:
    self.profile = pathlib.Path(tempfile.mkdtemp(prefix=PROFILE_PREFIX))
    _OPEN.add(self)
    # Held while this process lives; a process that can take it may sweep
    # the profile.
    self._lock_fd = os.open(self.profile / "owner.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    flags = [*_FLAGS, f"--user-data-dir={self.profile}", *extra_flags]
    if os.geteuid() == 0 or os.environ.get(NO_SANDBOX_VARIABLE) == "1":
      flags.append("--no-sandbox")
    child_read, self._write_fd = os.pipe()
    self._read_fd, child_write = os.pipe()
    ends = []
    try:
      for fd in (child_read, child_write):
        ends.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
      files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (
          os.POSIX_SPAWN_OPEN,
          2,
          str(self.profile / "stderr.txt"),
          os.O_CREAT | os.O_WRONLY,
          0o600,
        ),
        *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable_fds()),
        (os.POSIX_SPAWN_DUP2, ends[0], 3),
        (os.POSIX_SPAWN_DUP2, ends[1], 4),
      ]
      # A plain environment: no proxy, no display, no session bus to talk to.
      environment = {
        name: os.environ[name] for name in _KEPT if name in os.environ
      } | {"LANG": "C.UTF-8", "TZ": "UTC"}
      self.pid = os.posix_spawn(
        path,
        [path, *flags, "about:blank"],
        environment,
        file_actions=files,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM),
      )
    finally:
      for fd in (child_read, child_write, *ends):
        os.close(fd)
    for fd in (self._read_fd, self._write_fd):
      os.set_blocking(fd, False)
      try:  # Room for a whole screenshot, so that it is read in one go.
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
      except OSError:
        pass  # A limit for unprivileged users; only speed is lost.
    self._loop.add_reader(self._read_fd, self._on_readable)
    self._watch()

  def _watch(self) -> None:
    """Notices a killed browser: its helpers still hold the pipe open."""
    if self.death is not None:
      return
    how = self._exit_status(0)
    if how is not None:
      self._die(BrowserDied("the browser process ended"))
    else:
      self._watcher = self._loop.call_later(_WATCH_S, self._watch)

  # Commands and events.

  async def call(
    self,
    method: str,
    params: Mapping[str, Any] | None = None,
    session: str | None = None,
    deadline_s: float = 20.0,
  ) -> dict[str, Any]:
    """`post`, awaited."""
    return await self.post(method, params, session, deadline_s)

  def post(
    self,
    method: str,
    params: Mapping[str, Any] | None = None,
    session: str | None = None,
    deadline_s: float = 20.0,
  ) -> asyncio.Future:
    """Sends a command now; the future ends within `deadline_s` seconds.

    The browser handles one session's commands in the order they were sent, so
    several may be sent before the first is awaited.

    Raises (from the future):
      BrowserDied, PageCrashed, CommandTimeout, CommandFailed.
    """
    future = self._loop.create_future()
    if self.death is not None:
      future.set_exception(self.death)
      future.exception()  # Marked as seen, like those of `_settle`.
      return future
    self._next_id += 1
    timer = self._loop.call_later(
      deadline_s, self._expire, self._next_id, deadline_s
    )
    self._pending[self._next_id] = _Command(future, method, session, timer)
    self._send(self._next_id, method, params, session)
    return future

  def send(
    self,
    method: str,
    params: Mapping[str, Any] | None = None,
    session: str | None = None,
  ) -> None:
    """Sends a command without waiting for its outcome."""
    if self.death is None:
      self._next_id += 1
      self._send(self._next_id, method, params, session)

  def listen(
    self,
    session: str | None,
    method: str,
    callback: Callable[[Any], None] | None,
  ) -> None:
    """Calls `callback(params)` on an event; None stops that."""
    if callback is None:
      self._listeners.pop((session, method), None)
    else:
      self._listeners[session, method] = callback

  def fail_session(self, session: str, error: DevToolsError) -> None:
    """Ends the commands that wait for a session which is no more."""
    for number, command in list(self._pending.items()):
      if command.session == session:
        self._settle(number, error=error)

  def _send(self, number, method, params, session) -> None:
    message: dict[str, Any] = {"id": number, "method": method}
    if params:
      message["params"] = params
    if session is not None:
      message["sessionId"] = session
    data = json.dumps(message).encode() + b"\0"
    if self._unsent:
      self._unsent += data
      return
    try:
      written = os.write(self._write_fd, data)
    except BlockingIOError:
      written = 0
    except OSError as error:
      self._die(BrowserDied(f"the browser's pipe is closed: {error}"))
      return
    if written < len(data):
      self._unsent += data[written:]
      self._loop.add_writer(self._write_fd, self._on_writable)

  def _on_writable(self) -> None:
    try:
      written = os.write(self._write_fd, self._unsent)
    except BlockingIOError:
      return
    except OSError as error:
      self._die(BrowserDied(f"the browser's pipe is closed: {error}"))
      return
    del self._unsent[:written]
    if not self._unsent:
      self._loop.remove_writer(self._write_fd)

  def _on_readable(self) -> None:
    try:
      data = os.read(self._read_fd, _READ_BYTES)
    except BlockingIOError:
      return
    except OSError as error:
      self._die(BrowserDied(f"the browser's pipe broke: {error}"))
      return
    if not data:
      self._die(BrowserDied("the browser process ended"))
      return
    if b"\0" not in data:
      self._chunks.append(data)
      return
    self._chunks.append(data)
    *messages, tail = b"".join(self._chunks).split(b"\0")
    self._chunks = [tail] if tail else []
    for message in messages:
      try:
        parsed = json_text.parse(message)
      except ValueError as error:  # A page made the value that it holds.
        self._refuse(message, error)
      else:
        self._handle(parsed)

  def _refuse(self, message: bytes, error: ValueError) -> None:
    """Fails the command whose answer cannot be parsed; drops an event."""
    number = _ID.match(message)
    if number and int(number[1]) in self._pending:
      method = self._pending[int(number[1])].method
      self._settle(
        int(number[1]), error=CommandFailed(f"{method}: the answer: {error}")
      )

  def _handle(self, message: dict[str, Any]) -> None:
    number = message.get("id")
    if number is not None:
      error = message.get("error")
      if error is None:
        self._settle(number, result=message.get("result", {}))
      elif number in self._pending:
        method = self._pending[number].method
        text = f"{method}: {error.get('message', error)}"
        is_gone = "Session with given id not found" in text
        error_type = PageCrashed if is_gone else CommandFailed
        self._settle(number, error=error_type(text))
      return
    event = message.get("sessionId"), message["method"]
    callback = self._listeners.get(event)
    if callback is not None:
      callback(message.get("params", {}))

  def _settle(self, number, result=None, error=None) -> None:
    command = self._pending.pop(number, None)
    if command is None:
      return
    command.timer.cancel()
    if command.future.done():  # Its waiter was cancelled.
      return
    if error is None:
      command.future.set_result(result)
    else:
      command.future.set_exception(error)
      # Of several commands sent together only the first may be awaited.
      command.future.exception()

  def _expire(self, number: int, deadline_s: float) -> None:
    method = self._pending[number].method
    self._settle(
      number,
      error=CommandTimeout(
        f"{method} got no answer from the browser in {deadline_s:g} s"
      ),
    )

  # The end.

  def _die(self, error: DevToolsError) -> None:
    """The browser is gone: fail what waits, then clean up."""
    if self.death is not None:
      return
    how = self._exit_status(0.5)
    if how is not None:
      error = BrowserDied(f"{error} ({how}){self._last_words()}")
    self.death = error
    for number in list(self._pending):
      self._settle(number, error=error)
    self.kill()
    if self.on_death is not None:
      self.on_death(error)

  async def close(self, deadline_s: float = 5.0) -> None:
    """Ends the browser, politely first. Idempotent."""
    if self.death is None:
      self.on_death = None
      self.send("Browser.close")
      end = time.monotonic() + deadline_s
      while self._exit_status(0) is None and time.monotonic() < end:
        await asyncio.sleep(0.01)
    self.kill()

  def kill(self) -> None:
    """Ends the browser now and removes its profile. Idempotent, no loop."""
    if os.getpid() != self._owner:
      return  # A forked child inherited this object, not the browser.
    if self.death is None:
      self.death = BrowserDied("the browser was closed")
    for number in list(self._pending):
      self._settle(number, error=self.death)
    if self.pid:
      try:
        os.killpg(self.pid, signal.SIGKILL)
      except ProcessLookupError:
        pass
      self._exit_status(5.0)
    if self._watcher is not None:
      self._watcher.cancel()
    if self._loop is not None and not self._loop.is_closed():
      if self._read_fd >= 0:
        self._loop.remove_reader(self._read_fd)
        self._loop.remove_writer(self._write_fd)
    for name in ("_read_fd", "_write_fd"):
      fd = getattr(self, name)
      setattr(self, name, -1)
      if fd >= 0:
        os.close(fd)
    if self.profile is not None:
      _remove(self.profile)
    if self._lock_fd >= 0:
      os.close(self._lock_fd)
      self._lock_fd = -1
    _OPEN.discard(self)

  def _exit_status(self, wait_s: float) -> str | None:
    """Returns the process's end in words, or None while it runs."""
    end = time.monotonic() + wait_s
    while self._exit is None:
      try:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
      except ChildProcessError:  # Reaped elsewhere.
        self._exit = "it is gone"
        break
      if pid:
        code = os.waitstatus_to_exitcode(status)
        self._exit = f"exit status {code}"
        if code < 0:
          self._exit = f"killed by {signal.Signals(-code).name}"
      elif time.monotonic() >= end:
        break
      else:
        time.sleep(0.005)
    return self._exit

  def _last_words(self) -> str:
    """Returns the end of the browser's stderr, for error messages."""
    if self.profile is None:
      return ""
    try:
      text = (self.profile / "stderr.txt").read_text(errors="replace")
    except OSError:
      return ""
    text = " | ".join(text.strip().splitlines()[-3:])[-600:]
    hint = ""
    if "sandbox" in text.lower():
      hint = f" (in a container, set {NO_SANDBOX_VARIABLE}=1)"
    return f"; its output: {text}{hint}" if text else ""


class _Command:
  """A command on its way."""

  __slots__ = ("future", "method", "session", "timer")

  def __init__(self, future, method, session, timer):
    self.future = future
    self.method = method
    self.session = session
    self.timer = timer


_OPEN: set[Chromium] = set()


@atexit.register
def _kill_all() -> None:
  for browser in list(_OPEN):
    browser.kill()


def _inheritable_fds() -> list[int]:
  """Descriptors >= 3 of this process that a child would inherit."""
  descriptors = []
  for name in os.listdir("/proc/self/fd"):
    fd = int(name)
    try:
      if fd >= 3 and os.get_inheritable(fd):
        descriptors.append(fd)
    except OSError:
      pass  # The listing's own descriptor.
  return descriptors


def _remove(directory: pathlib.Path) -> None:
  # A dying helper process may still write into it for a moment.
  for attempt in range(50):
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
      return
    time.sleep(0.01 * (attempt < 49))


def sweep_profiles() -> int:
  """Removes profiles whose owner was killed; returns how many."""
  removed = 0
  for lock in pathlib.Path(tempfile.gettempdir()).glob(
    f"{PROFILE_PREFIX}*/owner.lock"
  ):
    try:
      fd = os.open(lock, os.O_RDWR)
    except OSError:
      continue
    try:
      fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      shutil.rmtree(lock.parent, ignore_errors=True)
      removed += 1
    except OSError:
      pass  # Its owner lives.
    finally:
      os.close(fd)
  return removed
