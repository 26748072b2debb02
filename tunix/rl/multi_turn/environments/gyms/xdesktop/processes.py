"""Reads /proc: the processes of a room, and their activity."""

from __future__ import annotations

import os
import signal


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
    wanted = os.readlink(f"/proc/{init_pid}/ns/pid")
  except OSError:
    return []
  found = []
  for name in os.listdir("/proc"):
    if name.isdigit():
      try:
        if os.readlink(f"/proc/{name}/ns/pid") == wanted:
          found.append(int(name))
      except OSError:
        pass  # Ended, or of another user.
  return found


def marked(mark: bytes) -> list[int]:
  """Processes that have `mark`, NAME=value, in their environment."""
  found = []
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      try:
        with open(f"/proc/{entry}/environ", "rb") as file:
          if mark in file.read().split(b"\0"):
            found.append(int(entry))
      except OSError:
        pass
  return found


def is_zombie(pid: int) -> bool:
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
  except OSError:
    return True
