"""Isolates the programs of one desktop in a room of their own.

Each room has a home, a /tmp and configuration, removed at close, and a
directory of its own below `directory`. `isolation` decides what else separates
its programs:

- "namespaces": bubblewrap gives them their own users, processes, network (with
  no way out), IPC and host name, no capabilities, no way to more namespaces,
  and a file system of which only their home, /tmp and /dev/shm can be written,
  in memory and of a bounded size, and from which nothing else of the machine's
  can be read but programs and fonts. Their number is bounded.
- "processes": a process group, a home on the disk and limits of each program
  only. They see the machine's files and network as any program of the user
  does, and can fill the disk. To be asked for by name.

Promises: nothing is inherited from the environment of this process; every
program has limits; `close` ends all of them, also those that left the process
group, within its deadline, and removes the directory. A room whose owner was
killed ends by itself, and its directory is removed when the next one is made.

Does not: bound the memory of the room as a whole, but of its files; that takes
a container around it.
"""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import functools
import json
import logging
import os
import pathlib
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import Mapping, Sequence
import weakref

from cua_gyms.sandbox import files
from cua_gyms.sandbox import processes
from cua_gyms.sandbox import sandbox_errors

_LOG = logging.getLogger(__name__)
ISOLATIONS = ("auto", "namespaces", "processes")
SEARCH = "/usr/local/bin:/usr/bin:/bin"
"""Directories in which programs are found, whatever the caller's own PATH."""
PREFIX = "tunix-xdesktop-"
MARK = "TUNIX_XDESKTOP"
"""In the environment of each of a room's programs: the room's name."""

# Reads commands a line, starts each in the background, and ends all of them
# when its owner has gone. `kill 0` reaches the process group; in a namespace,
# the end of this shell is the end of everything.
_SUPERVISOR = (
  'echo ready; while IFS= read -r line; do eval "$line" & done; kill -KILL 0'
)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of each program of a room (setrlimit), and of a whole namespace.

  Attributes:
    memory: bytes of address space of a program.
    files: open files of a program.
    file_size: bytes of a file that a program writes.
    processes: and threads, of a namespace.
    disk: bytes of all files that can be written, of a namespace.
  """

  memory: int = 4 << 30
  files: int = 1024
  file_size: int = 64 << 20
  processes: int = 512
  disk: int = 256 << 20

  def mounts(self) -> dict[str, int]:
    """Bytes of each place that can be written; together at most `disk`."""
    eighth = self.disk // 8
    return {"/home/user": 6 * eighth, "/tmp": eighth, "/dev/shm": eighth}


@functools.lru_cache(maxsize=None)
def no_namespaces() -> str:
  """Reason that rooms cannot have namespaces here; "" if they can."""
  bwrap = shutil.which("bwrap", path=SEARCH)
  if bwrap is None:
    return "bubblewrap is not installed (sudo make desktop)"
  try:
    tried = subprocess.run(
        [bwrap, *_NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc",
         "--dev", "/dev", "--perms", "0700", "--size", "65536", "--tmpfs",
         "/tmp", "true"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False,
    )  # fmt: skip
  except (OSError, subprocess.TimeoutExpired) as error:
    return f"bwrap could not be tried: {error}"
  output = tried.stderr.decode(errors="replace").strip()
  if tried.returncode != 0:
    return output or f"exit {tried.returncode}"
  return processes.unbounded()


_READY = "ready\n"
"""What the supervisor says first."""
_OF_BWRAP = 4
"""Processes that bubblewrap, and the way into the group, add to a room's."""
_NAMESPACES = (
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net",
    "--unshare-uts", "--unshare-cgroup-try", "--disable-userns",
    "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000",
    "--hostname", "desktop", "--new-session",
)  # fmt: skip
# Of /etc, only what programs need to be drawn and found.
_ETC = (
    "fonts", "X11", "xdg", "gtk-2.0", "gtk-3.0", "alternatives", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
)  # fmt: skip


_ACCOUNTS = {
  "passwd": "user:x:1000:1000:User:/home/user:/bin/sh\n",
  "group": "user:x:1000:\n",
  "nsswitch.conf": "passwd: files\ngroup: files\n",
}


def resolve_isolation(isolation: str) -> str:
  """Returns "namespaces" or "processes" for a setting on this machine.

  "auto" is "namespaces": less isolation must be named.

  Raises:
    ValueError: no such isolation.
    IsolationUnavailable: this machine has no namespaces.
  """
  if isolation not in ISOLATIONS:
    raise ValueError(
      f"isolation must be one of {', '.join(ISOLATIONS)}; got {isolation!r}"
    )
  if isolation == "processes":
    return isolation
  if not (why := no_namespaces()):
    return "namespaces"
  raise sandbox_errors.IsolationUnavailable(
    f"isolation={isolation!r}: namespaces cannot be had here: {why}. Allow"
    " them; or, in a container that holds nothing else, set"
    " isolation='processes', with which the policy reads and writes what this"
    " user can"
  )


class Room:
  """A directory and the isolated programs in it. Thread-safe.

  Attributes:
    isolation: "namespaces" or "processes".
    path: its directory.
    home, tmp, etc: Its directories as this process sees them; etc is
      configuration that its programs cannot change. All three are kept after
      the programs have ended, until `close`.
    inside_home, inside_tmp, inside_etc: The same as its programs see them.
  """

  def __init__(
    self,
    *,
    isolation: str = "auto",
    directory: str | os.PathLike[str] | None = None,
    limits: Limits = Limits(),
    deadline_s: float = 20.0,
  ):
    """Raises:

    ValueError: `directory` cannot hold it, or no such isolation.
    IsolationUnavailable, LaunchError.
    """
    self.isolation = resolve_isolation(isolation)
    parent = pathlib.Path(directory or tempfile.gettempdir()).absolute()
    _sweep(parent)
    try:
      path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError as error:
      raise ValueError(
        f"directory={str(parent)!r} cannot hold a desktop: {error}; name one"
        " that can be written"
      ) from None
    self.path = pathlib.Path(path)
    self.home, self.tmp = self.path / "home", self.path / "tmp"
    self.etc = self.path / "etc"
    self._lock = threading.Lock()
    self._name = f"{self.path.name}-{secrets.token_hex(8)}"
    self._mark = f"{MARK}={self._name}".encode()
    self._closed = False
    self._found: list[str] = []
    self._looked_at = float("-inf")
    self._init_pid: int | None = None
    self._mounts: list[int] = []
    self._group: pathlib.Path | None = None
    self._process: subprocess.Popen[bytes] | None = None
    self._own = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(self._own, fcntl.LOCK_EX)
    try:
      self._furnish()
      self._start(limits, deadline_s)
      self._own_pids = frozenset(self.pids())
      self._make_places()
    except BaseException:
      self.close()
      raise
    _ROOMS.add(self)

  # -- inside ----------------------------------------------------------------

  @property
  def inside_home(self) -> str:
    return "/home/user" if self.isolation == "namespaces" else str(self.home)

  @property
  def inside_tmp(self) -> str:
    return "/tmp" if self.isolation == "namespaces" else str(self.tmp)

  @property
  def inside_etc(self) -> str:
    return "/etc/xdesktop" if self.isolation == "namespaces" else str(self.etc)

  def run(self, command: Sequence[str], *, log: str, display: str = "") -> None:
    """Starts a program in the room; its output goes to the file tmp/`log`.

    Raises:
      ValueError: the command holds a line break.
      DesktopLost: the room has ended.
    """
    if display:
      command = ("env", f"DISPLAY={display}", *command)
    line = " ".join(shlex.quote(part) for part in command)
    if "\n" in line:
      raise ValueError(f"a command holds a line break: {command!r}")
    target = shlex.quote(f"{self.inside_tmp}/{log}")
    text = f"exec {line} </dev/null >{target} 2>&1\n"
    with self._lock:
      process = self._process
      if not self.alive or process is None or process.stdin is None:
        raise sandbox_errors.DesktopLost(
          f"the desktop has ended; {self.last_words()}"
        )
      try:
        os.write(process.stdin.fileno(), text.encode())
      except OSError as error:
        raise sandbox_errors.DesktopLost(
          f"the desktop has ended: {error}"
        ) from None

  @property
  def alive(self) -> bool:
    return (
      not self._closed
      and self._process is not None
      and self._process.poll() is None
    )

  def log(self, name: str) -> str:
    """Returns the end of a program's output."""
    return files.read_text(self.tmp, name, "")[-500:].strip()

  def last_words(self) -> str:
    """Output of the room's supervisor, for error messages."""
    output = files.read_text(self.path, "log", "")
    output = output.replace(_READY, "", 1)[-500:].strip()
    return f"its output: {output}" if output else "it printed nothing"

  def pids(self) -> list[int]:
    """Process ids of the room's programs, as this process sees them."""
    if self.isolation == "namespaces":
      return processes.members(self._init_pid)
    return processes.marked(self._mark)

  def _living(self) -> list[int]:
    return [pid for pid in self.pids() if not processes.is_zombie(pid)]

  def activity(self, without: str = "Xvfb") -> tuple[int, bool]:
    """Returns the work of the programs: (nanoseconds on a CPU or waiting for
    one, whether a program runs now).

    Args:
      without: the name of a program that does not count.
    """
    total, running = 0, False
    for directory in self._proc():
      try:
        with open(f"{directory}/stat", "rb") as file:
          head, _, fields = file.read().rpartition(b")")
        if head.endswith(b"(" + without.encode()):
          continue
        with open(f"{directory}/schedstat", "rb") as file:
          ran, waited, _ = file.read().split()
      except (OSError, ValueError):
        continue  # Ended since.
      total += int(ran) + int(waited)
      running = running or fields.split(None, 1)[0] in (b"R", b"D")
    return total, running

  def _proc(self) -> list[str]:
    """Returns the /proc/<pid> of each program."""
    if self.isolation == "namespaces":
      inside = f"/proc/{self._init_pid}/root/proc"
      try:
        names = os.listdir(inside)
      except OSError:
        return []
      return [f"{inside}/{name}" for name in names if name.isdigit()]
    # To look for them costs more than to watch them.
    if time.monotonic() - self._looked_at > 0.25:
      self._found = [f"/proc/{pid}" for pid in processes.marked(self._mark)]
      self._looked_at = time.monotonic()
    return self._found

  # -- outside ---------------------------------------------------------------

  def kill(self) -> None:
    """Kills every program; does not wait."""
    if self._init_pid is not None:
      # The first of a namespace takes all of it along, and bubblewrap, which
      # waits for it, ends when the last of them has.
      processes.kill(self._init_pid)
      return
    process = self._process
    if process is not None and process.poll() is None:
      try:
        os.killpg(process.pid, signal.SIGKILL)
      except (ProcessLookupError, PermissionError):
        pass
    for pid in processes.marked(self._mark):
      processes.kill(pid)

  def end_programs(self, deadline_s: float = 2.0) -> bool:
    """Kills every program that was started by `run`, and waits for its end.

    Returns:
      Whether all have ended by the deadline; False if they keep starting
      others.
    """
    due = time.monotonic() + deadline_s
    while started := set(self._living()) - self._own_pids:
      if time.monotonic() > due:
        return False
      for pid in started:
        processes.kill(pid)
      time.sleep(0.001)
    return True

  def close(self, deadline_s: float = 10.0) -> None:
    """Ends every program and removes the directory. Idempotent.

    Raises:
      DesktopError: something outlived the deadline.
    """
    with self._lock:
      if self._closed:
        return
      self._closed = True
    due = time.monotonic() + deadline_s
    survivors: list[int] = []
    try:
      self._end(due)
      while (survivors := self._living()) and time.monotonic() < due:
        self.kill()
        time.sleep(0.005)
    finally:
      _ROOMS.discard(self)
      for fd in self._mounts:
        os.close(fd)
      if self._group is not None:
        processes.remove_group(self._group.name, due)
      files.remove(self.path)
      os.close(self._own)
    if survivors or self.path.exists():
      raise sandbox_errors.DesktopError(
        f"a desktop did not end within {deadline_s:g} s: processes"
        f" {survivors}, directory {self.path}"
      )

  def _end(self, due: float) -> None:
    self.kill()
    process = self._process
    if process is None:
      return
    if process.stdin is not None:
      process.stdin.close()
    try:
      process.wait(max(0.1, (due - time.monotonic()) / 2))
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait(max(0.1, due - time.monotonic()))

  # -- building --------------------------------------------------------------

  def _furnish(self) -> None:
    self.etc.mkdir(mode=0o700)
    if self.isolation == "processes":
      for path in (self.home, self.tmp):
        path.mkdir(mode=0o700)
    for name, text in _ACCOUNTS.items():
      (self.etc / name).write_text(text)

  def _make_places(self) -> None:
    (self.tmp / ".X11-unix").mkdir()
    (self.tmp / ".X11-unix").chmod(0o1777)
    # The calculator makes its directory, not the one above it.
    (self.home / ".config").mkdir(mode=0o700)

  def environment(self) -> dict[str, str]:
    """Environment variables of the room's programs."""
    home, tmp = self.inside_home, self.inside_tmp
    return {
      MARK: self._name,
      "HOME": home,
      "LANG": "C.UTF-8",
      "LOGNAME": "user",
      "PATH": SEARCH,
      "SHELL": "/bin/sh",
      "TMPDIR": tmp,
      "TZ": "UTC",
      "USER": "user",
      "XAUTHORITY": f"{tmp}/.Xauthority",
      "XDG_CONFIG_DIRS": f"{self.inside_etc}:/etc/xdg",
      "XDG_DATA_DIRS": f"{self.inside_etc}/share:/usr/local/share:/usr/share",
      "XDG_RUNTIME_DIR": tmp,
      # Settings in a file of the home: there is no bus, no accessibility.
      "GSETTINGS_BACKEND": "keyfile",
      "GTK_USE_PORTAL": "0",
      "NO_AT_BRIDGE": "1",
    }

  def _start(self, limits: Limits, deadline_s: float) -> None:
    env = self.environment()
    limited = [
      shutil.which("prlimit", path=SEARCH) or "prlimit",
      "--core=0",
      f"--as={limits.memory}",
      f"--nofile={limits.files}",
      f"--fsize={limits.file_size}",
    ]
    if self.isolation == "namespaces":
      # Elsewhere the limit would count every process of the user.
      limited.append(f"--nproc={limits.processes}")
    limited += ["sh", "-c", _SUPERVISOR]
    read_end, write_end = os.pipe()
    fds: tuple[int, ...] = ()
    command = limited
    if self.isolation == "namespaces":
      command = [*self._bwrap(env, write_end, limits), *limited]
      fds = (write_end,)
      if os.geteuid() == 0:
        most = limits.processes + _OF_BWRAP
        self._group = processes.make_group(self.path.name, most)
        command = processes.joining(self._group, command)
    try:
      with open(self.path / "log", "wb") as log:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env,
            cwd=self.path, start_new_session=True, pass_fds=fds,
        )  # fmt: skip
      os.close(write_end)
      write_end = -1
      if fds:
        began = time.monotonic()
        self._init_pid = self._child_pid(read_end, deadline_s)
        self._open_mounts(began, deadline_s)
    except OSError as error:
      raise sandbox_errors.LaunchError(
        f"no program can be started: {error}"
      ) from None
    finally:
      os.close(read_end)
      if write_end >= 0:
        os.close(write_end)

  def _child_pid(self, info_fd: int, deadline_s: float) -> int:
    due = time.monotonic() + deadline_s
    message = b""
    while b"}" not in message:
      seconds = due - time.monotonic()
      ready = seconds > 0 and select.select([info_fd], [], [], seconds)[0]
      part = os.read(info_fd, 4096) if ready else b""
      if not part:
        raise sandbox_errors.LaunchError(
          f"bubblewrap did not come up in {deadline_s:g} s; {self.last_words()}"
        )
      message += part
    return int(json.loads(message)["child-pid"])

  def _open_mounts(self, began: float, deadline_s: float) -> None:
    """Opens the places in memory: paths by which this process sees them.

    A path through /proc/<pid> would be another process's once this one ended.

    Raises:
      LaunchError: the namespace did not come up.
    """
    while _READY not in files.read_text(self.path, "log", ""):
      late = time.monotonic() > began + deadline_s
      if late or not self.alive:
        what = f"did not come up in {deadline_s:g} s" if late else "ended"
        raise sandbox_errors.LaunchError(
          f"bubblewrap {what}; {self.last_words()}"
        )
      time.sleep(0.001)
    places = []
    for name in (self.inside_home, self.inside_tmp):
      fd = os.open(
        f"/proc/{self._init_pid}/root{name}", os.O_PATH | os.O_DIRECTORY
      )
      self._mounts.append(fd)
      places.append(pathlib.Path(f"/proc/self/fd/{fd}"))
    self.home, self.tmp = places

  def _bwrap(
    self, env: Mapping[str, str], info_fd: int, limits: Limits
  ) -> list[str]:
    command = [
        shutil.which("bwrap", path=SEARCH) or "bwrap", *_NAMESPACES,
        "--info-fd", str(info_fd), "--clearenv",
        "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev",
    ]  # fmt: skip
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
      root = pathlib.Path("/", name)
      if root.is_symlink():
        command += ["--symlink", os.readlink(root), str(root)]
      elif root.is_dir():
        command += ["--ro-bind", str(root), str(root)]
    for name in _ETC:
      command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in _ACCOUNTS:
      command += ["--ro-bind", str(self.etc / name), f"/etc/{name}"]
    command += ["--ro-bind", str(self.etc), self.inside_etc]
    cache = "/var/cache/fontconfig"
    command += ["--ro-bind-try", cache, cache]
    for place, size in limits.mounts().items():
      command += ["--perms", "0700", "--size", str(size), "--tmpfs", place]
    # Last: the root that holds these mounts, which has no size of its own.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--chdir", "/home/user"]
    for name, value in env.items():
      command += ["--setenv", name, value]
    return command


# -- processes -----------------------------------------------------------------

_ROOMS: weakref.WeakSet[Room] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  for room in list(_ROOMS):
    try:
      room.close(2.0)
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("a desktop did not end")


# -- displays ------------------------------------------------------------------

SOCKETS = pathlib.Path("/tmp/.X11-unix")
"""Of displays outside of namespaces."""


def socket_identity(number: int) -> str:
  """Identity of a display's socket: each server's differs; "" for none."""
  try:
    status = (SOCKETS / f"X{number}").lstat()
  except OSError:
    return ""
  return f"{status.st_ino}-{status.st_mtime_ns}"


def free_display(number: int, identity: str) -> None:
  """Removes a killed server's socket, unless another server owns it now."""
  if identity and socket_identity(number) == identity:
    (SOCKETS / f"X{number}").unlink(missing_ok=True)


# -- rooms without owners ------------------------------------------------------

_SWEPT: set[pathlib.Path] = set()


def _sweep(parent: pathlib.Path) -> None:
  """Removes the rooms below `parent` whose owners were killed; once."""
  if parent in _SWEPT:
    return
  _SWEPT.add(parent)
  for path in parent.glob(f"{PREFIX}*"):
    try:
      status = path.lstat()
      # A young one may not have been locked yet.
      young = time.time() - status.st_mtime < 60
      if status.st_uid != os.getuid() or path.is_symlink() or young:
        continue
      owner = os.open(path / "owner", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
      continue
    try:
      fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      continue  # In use.
    finally:
      os.close(owner)
    if os.geteuid() == 0 and not no_namespaces():
      processes.remove_group(path.name)
    display = files.read_text(path, "display", "").split()
    if len(display) == 2 and display[0].isdigit():
      free_display(int(display[0]), display[1])
    files.remove(path)
