"""Reads /proc, and bounds how many processes and threads a room has.

The kernel counts an ordinary user's processes by RLIMIT_NPROC, for each
namespace by itself. It does not count root's, so a room that root makes has a
control group with `pids.max`.

Promises: a group is removed once its room has ended.

Does not: bound memory or processor time.
"""

from __future__ import annotations

import functools
import os
import pathlib
import secrets
import signal
import time


def kill(pid: int) -> None:
  try:
    os.kill(pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass


def members(init_pid: int | None) -> list[int]:
  """Processes in the namespace whose first process has that pid."""
  if init_pid is None:
    return []
  try:
    namespace = os.readlink(f"/proc/{init_pid}/ns/pid")
  except OSError:
    return []
  pids = []
  for name in os.listdir("/proc"):
    if name.isdigit():
      try:
        if os.readlink(f"/proc/{name}/ns/pid") == namespace:
          pids.append(int(name))
      except OSError:
        pass  # Ended, or of another user.
  return pids


def marked(mark: bytes) -> list[int]:
  """Processes that have `mark`, NAME=value, in their environment."""
  pids = []
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      try:
        with open(f"/proc/{entry}/environ", "rb") as file:
          if mark in file.read().split(b"\0"):
            pids.append(int(entry))
      except OSError:
        pass
  return pids


def is_zombie(pid: int) -> bool:
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
  except OSError:
    return True


_GROUPS = pathlib.Path("/sys/fs/cgroup")


@functools.lru_cache(maxsize=None)
def unbounded() -> str:
  """Reason that a room's processes cannot be bounded here; "" if they can."""
  if os.geteuid() != 0:
    return ""
  name = f"tunix-xdesktop-try-{secrets.token_hex(8)}"
  try:
    path = make_group(name, 1)
  except OSError as error:
    return (
      "root's processes are bounded by a control group only, and none can be"
      f" made ({error}); run as another user"
    )
  remove_group(path.name)
  return ""


def make_group(name: str, most: int) -> pathlib.Path:
  """Makes a control group of at most `most` processes and threads.

  Raises:
    OSError: there is no controller, or no leave to use it.
  """
  path = _parent() / name
  path.mkdir()
  try:
    (path / "pids.max").write_text(str(most))
  except OSError:
    path.rmdir()
    raise
  return path


def remove_group(name: str, due: float = 0.0) -> None:
  """Removes a group whose processes have ended, or end by `time.monotonic()`.

  One that is still in use then stays.
  """
  while True:
    try:
      (_parent() / name).rmdir()
      return
    except FileNotFoundError:
      return
    except OSError:
      if time.monotonic() > due:
        return
    time.sleep(0.005)


def joining(group: pathlib.Path, command: list[str]) -> list[str]:
  """`command`, of which the first act is to join the group."""
  text = 'echo $$ > "$0" && exec "$@"'
  return ["sh", "-c", text, str(group / "cgroup.procs"), *command]


def _parent() -> pathlib.Path:
  """Returns the directory of groups: of version 1 of control groups, or 2."""
  first = _GROUPS / "pids"
  if first.is_dir():
    return first
  controllers = (_GROUPS / "cgroup.subtree_control").read_text().split()
  if "pids" not in controllers:
    raise OSError(f"{_GROUPS} has no controller of processes (pids)")
  return _GROUPS
