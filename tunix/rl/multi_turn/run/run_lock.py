"""Gives one process a run directory at a time.

`run.lock` in the directory is locked by `flock` while the run lives, and names
the holder: host, process and time. The kernel releases the lock with the
process, however it ends; children that were forked do not keep it.

Does not: guard against a process on another host where the file system keeps
its locks to one host (some network file systems do).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import socket
import time
from typing import Any, IO
import weakref

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import json_text

try:
  import fcntl
except ImportError:  # Windows.
  fcntl = None  # type: ignore[assignment]

_LOG = logging.getLogger(__name__)
NAME = "run.lock"
_NAMED_WITHIN_S = 1.0  # Of locking it.
_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
  """A held lock; `close` it when the run has ended."""

  def __init__(self, directory: pathlib.Path):
    """Locks an existing directory.

    On a file system without locks it warns, and locks nothing.

    Raises:
      ConfigError: another process holds it; names that one.
      OSError: the disk's.
    """
    path = directory / NAME
    self._file: Any = open(path, "a+", encoding="utf-8")
    try:
      _lock(self._file.fileno())
    except BlockingIOError:
      problem = _conflict(directory, self._file)
      self._file.close()
      raise config_lib.ConfigError([problem]) from None
    except OSError as error:
      _LOG.warning(
        "%s is on a file system without locks (%s): nothing keeps a second"
        " process from writing to this run; start it once only",
        directory,
        error.strerror or error,
      )
    self._write(
      {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
      }
    )
    _held_locks.add(self)

  def close(self) -> None:
    """Lets another process have the directory. Idempotent."""
    if not self._file.closed:
      try:
        self._write(None)
      except OSError:  # A full disk; the name means nothing without the lock.
        pass
      self.forget()

  def forget(self) -> None:
    """Closes the file; a forked child does, so that it keeps no lock."""
    try:
      self._file.close()
    except OSError:  # What could not be written to a full disk.
      pass

  def _write(self, holder: dict[str, Any] | None) -> None:
    # The file stays: to delete it would leave a process that has it open with
    # the lock of a file that no other process finds.
    self._file.truncate(0)
    if holder is not None:
      self._file.write(json.dumps(holder) + "\n")
      self._file.flush()


def conflict(directory: pathlib.Path) -> str:
  """The refusal where another process holds the directory, else ""."""
  try:
    file = open(directory / NAME, encoding="utf-8")
  except OSError:
    return ""
  with file:
    try:
      _lock(file.fileno())
    except BlockingIOError:
      return _conflict(directory, file)
    except OSError:
      return ""  # Without locks; the run itself warns.
  return ""


def _forget_all() -> None:
  for lock in tuple(_held_locks):
    lock.forget()


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget_all)


def _lock(handle: int) -> None:
  """Raises BlockingIOError where it is held, OSError where it cannot be."""
  if fcntl is None:
    raise OSError(errno.ENOSYS, "this system has no flock")
  fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _conflict(directory: pathlib.Path, file: IO[str]) -> str:
  holder, end = "another process", "end it"
  lock = _holder(file)
  if lock is not None:
    holder = f"process {lock['pid']} on {lock['host']} since {lock['since']}"
    end = f"end it on {lock['host']} (kill -INT {lock['pid']})"
  return (
    f"{directory} is in use by {holder}: wait until that run has ended, or"
    f" {end}, then start again; a run of its own needs another run.name"
  )


def _holder(file: IO[str]) -> dict[str, Any] | None:
  """The holder that a lock's file names; it may be about to write its name."""
  due = time.monotonic() + _NAMED_WITHIN_S
  while True:
    try:
      file.seek(0)
      holder = json_text.parse(file.read())
      if {"pid", "host", "since"} <= holder.keys():
        return holder
    except (OSError, ValueError, AttributeError):
      pass
    if time.monotonic() > due:
      return None
    time.sleep(0.02)
