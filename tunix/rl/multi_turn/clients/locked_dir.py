"""A folder of one run's own in a directory that runs share.

A file beside it is locked for as long as its run lives, and names the machine.
The lock is the kernel's: it ends with the process, however that ends. So a
later run on the same machine can tell which folders nobody owns any more, and
delete them.

Promises: what a living run owns is not deleted, nor another machine's folder
(file systems differ in whether they tell its locks), nor anything that does not
look like such a folder.

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

try:
  import fcntl
except ImportError:
  fcntl = None

_OWNER = re.compile(r"\.(\d{8}-\d{6}-\d+-[0-9a-f]{6})\.owner")


class RunFolder:
  """See the module docstring. `release` it when the run has ended.

  Attributes:
    path: of the folder; `make` makes it.
    name: of the folder, in the directory.
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
    """The folder, there and owned.

    Raises:
      OSError: the disk's.
    """
    self._directory.mkdir(parents=True, exist_ok=True)
    if self._held is None and fcntl is not None:
      held = os.open(self._owner, os.O_RDWR | os.O_CREAT, 0o644)
      try:
        # Who it is of is written once it is locked: one that says nothing yet
        # is nobody's to delete.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        who = {"machine": socket.gethostname(), "process": os.getpid()}
        os.pwrite(held, json.dumps(who).encode(), 0)
      except OSError:  # A file system without locks: the folder stays.
        os.close(held)
      else:
        self._held = held
    self.path.mkdir(exist_ok=True)
    return self.path

  def release(self) -> None:
    """The run has ended: the next may delete the folder. Idempotent."""
    if self._held is not None:
      if not self.path.exists():  # Nothing was written, or all went wrong.
        self._owner.unlink(missing_ok=True)
      os.close(self._held)
      self._held = None

  def delete_ended(self) -> list[str]:
    """Deletes folders of ended runs of this machine; returns their names."""
    deleted = []
    for other in sorted(self._directory.glob(".*.owner")):
      found = _OWNER.fullmatch(other.name)
      if found and found[1] != self.name and _delete_if_ended(other, found[1]):
        deleted.append(found[1])
    return deleted


def _delete_if_ended(owner: pathlib.Path, name: str) -> bool:
  if fcntl is None:
    return False
  try:
    held = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
  except OSError:  # Gone by now, or not ours to write to.
    return False
  try:
    who = json.loads(os.pread(held, 4096, 0))
    if who["machine"] != socket.gethostname():
      return False
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = owner.with_name(name)
    if folder.exists():
      shutil.rmtree(folder)
    owner.unlink()  # Last: what fails to go is tried again by the next run.
    return True
  except (OSError, KeyError, TypeError, ValueError):  # It lives, or says else.
    return False
  finally:
    os.close(held)
