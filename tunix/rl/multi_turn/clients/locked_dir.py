"""Gives a run a folder of its own in a directory that runs share.

A file beside the folder names the machine, and is locked while its run lives.
The kernel releases the lock with the process, however that ends, so a later run
on the same machine can find folders without an owner, and delete them.

Promises: a living run's folder is never deleted, nor another machine's (some
file systems do not show its locks), nor anything that does not look like such a
folder.

Where there are no such locks (Windows), nothing is deleted.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import time

from tunix.rl.multi_turn.core import json_text

try:
  import fcntl
except ImportError:
  fcntl = None  # type: ignore[assignment]  # On Windows.

_OWNER = re.compile(r"\.(\d{8}-\d{6}-\d+-[0-9a-f]{6})\.owner")


class LockedDir:
  """A run's folder and its lock; `release` it when the run has ended.

  Attributes:
    path: Path of the folder; `make` creates it.
    name: Name of the folder in the directory.
  """

  def __init__(self, directory: pathlib.Path):
    """`directory` is shared with other runs, also of other machines."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    self._directory = directory
    self.name = f"{stamp}-{os.getpid()}-{secrets.token_hex(3)}"
    self.path = directory / self.name
    self._owner = directory / f".{self.name}.owner"
    self._held: int | None = None

  def make(self) -> pathlib.Path:
    """Creates and locks the folder.

    Raises:
      OSError: The disk refuses the folder.
    """
    self._directory.mkdir(parents=True, exist_ok=True)
    if self._held is None and fcntl is not None:
      descriptor = os.open(self._owner, os.O_RDWR | os.O_CREAT, 0o644)
      try:
        # Written after locking: no run deletes a folder whose owner file is
        # still empty.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        who = {"machine": socket.gethostname(), "process": os.getpid()}
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
      except OSError:  # A file system without locks: the folder stays.
        os.close(descriptor)
      else:
        self._held = descriptor
    self.path.mkdir(exist_ok=True)
    return self.path

  def release(self) -> None:
    """Unlocks the folder, which a later run may then delete. Idempotent."""
    if self._held is not None:
      if not self.path.exists():  # Nothing was written.
        self._owner.unlink(missing_ok=True)
      os.close(self._held)
      self._held = None

  def delete_ended(self) -> list[str]:
    """Deletes folders of ended runs of this machine; returns their names."""
    deleted = []
    for other in sorted(self._directory.glob(".*.owner")):
      match = _OWNER.fullmatch(other.name)
      if match and match[1] != self.name and _delete_if_ended(other, match[1]):
        deleted.append(match[1])
    return deleted


def _delete_if_ended(owner: pathlib.Path, name: str) -> bool:
  if fcntl is None:
    return False
  try:
    descriptor = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
  except OSError:  # Deleted meanwhile, or of another user.
    return False
  try:
    who = json_text.parse(os.pread(descriptor, 4096, 0))
    if who["machine"] != socket.gethostname():
      return False
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = owner.with_name(name)
    if folder.exists():
      shutil.rmtree(folder)
    owner.unlink()  # Last: if anything stays, the next run tries again.
    return True
  except (OSError, KeyError, TypeError, ValueError):  # Locked, or unreadable.
    return False
  finally:
    os.close(descriptor)
