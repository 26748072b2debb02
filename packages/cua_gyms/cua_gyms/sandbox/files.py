"""Reads files that programs of a desktop may have written or replaced.

Promises: no link is followed, wherever it leads.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import stat

_MAX_READ = 1 << 20


def read_text(directory: pathlib.Path, name: str, default: str) -> str:
  """Returns a file, at most 1 MiB of it; `default` when there is none."""
  path = real_path(directory, name)
  if path is None or not stat.S_ISREG(path.lstat().st_mode):
    return default
  # It may have been exchanged since: still no link, and no waiting.
  fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  with open(fd, "rb") as file:
    return file.read(_MAX_READ).decode("utf-8", errors="replace")


def real_path(directory: pathlib.Path, name: str) -> pathlib.Path | None:
  """`directory`/`name` if it exists without a link on the way, else None."""
  path = directory
  for part in pathlib.PurePosixPath(name).parts:
    path = path / part
    try:
      mode = path.lstat().st_mode
    except OSError:
      return None
    if stat.S_ISLNK(mode) or part == "..":
      return None
  return path


def remove(path: pathlib.Path) -> None:
  """Removes a directory, also one whose modes forbid it."""

  def allow(function, name, error):
    del function, error
    try:
      os.chmod(os.path.dirname(name), 0o700)
      if os.path.isdir(name) and not os.path.islink(name):
        os.chmod(name, 0o700)
        shutil.rmtree(name, ignore_errors=True)
      else:
        os.unlink(name)
    except OSError:
      pass

  shutil.rmtree(path, onerror=allow)
