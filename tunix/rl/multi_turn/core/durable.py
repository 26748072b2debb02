"""Writes files and directories that are whole or absent, even after a crash.

A resumed run trusts what these functions wrote: the content is on the disk
before its name is. A directory written by `new_directory` holds the SHA-256 of
each of its files in `SHA256SUMS`, in the format of `sha256sum`, so that `check`
can tell a damaged copy from a whole one.

Promises: a process killed at any instant, or a power loss, leaves the old
content or the new one under the final name. An error leaves the old one and no
temporary file.

Does not: lock. Two writers of one name must be kept apart by the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import pathlib
import shutil
import sys
import threading
from typing import Iterator

SUMS = "SHA256SUMS"
_OLD, _NEW = ".old", ".new"
_CHUNK = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync(path: pathlib.Path) -> None:
  """Returns once a file's content, or a directory's list, is on the disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def sync_tree(directory: pathlib.Path) -> None:
  """`sync` of every file and directory below, and of `directory`."""
  for folder, _, names in os.walk(directory, topdown=False):
    for name in names:
      path = pathlib.Path(folder, name)
      if not path.is_symlink():
        sync(path)
    sync(pathlib.Path(folder))


def write_bytes(path: pathlib.Path, data: bytes, durably: bool = True) -> None:
  """Replaces a file in one step.

  Args:
    path: the file.
    data: its new content.
    durably: False does not wait for the disk: a kill does no harm then, a
      power loss may.

  Raises:
    OSError: the disk's; the old file is as it was.
  """
  partial = path.with_name(f"{path.name}.{threading.get_ident()}.part")
  try:
    with partial.open("wb") as file:
      file.write(data)
      file.flush()
      if durably:
        os.fsync(file.fileno())
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  if durably:
    sync(path.parent)


def write_text(path: pathlib.Path, text: str) -> None:
  """`write_bytes` of UTF-8."""
  write_bytes(path, text.encode("utf-8"))


@contextlib.contextmanager
def new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Replaces a directory in one step.

  Args:
    path: The directory; absent, or replaced with its whole content.

  Yields:
    An empty directory beside it, to be filled. At the end of the block it takes
    the place of `path`; after an exception it is deleted.

  Raises:
    OSError: the disk's.
  """
  path = path.absolute()
  path.parent.mkdir(parents=True, exist_ok=True)
  recover(path)
  fresh, old = _beside(path, _NEW), _beside(path, _OLD)
  shutil.rmtree(fresh, ignore_errors=True)
  fresh.mkdir()
  try:
    yield fresh
    _write_sums(fresh)
    sync_tree(fresh)
    if not path.exists():
      fresh.rename(path)
    elif not _exchange(fresh, path):
      path.rename(old)
      fresh.rename(path)
  except BaseException:
    recover(path)
    raise
  sync(path.parent)
  recover(path)


def recover(path: pathlib.Path) -> None:
  """Undoes a `new_directory` of `path` that was killed; deletes its leftovers.

  Where two directories cannot be exchanged in one step, `path` is absent for
  an instant; a kill in it is undone here.
  """
  old = _beside(path, _OLD)
  if old.is_dir() and not path.exists():
    old.rename(path)
  shutil.rmtree(old, ignore_errors=True)
  shutil.rmtree(_beside(path, _NEW), ignore_errors=True)


def check(directory: pathlib.Path) -> None:
  """Refuses a directory that is not as `new_directory` left it; reads it all.

  Hidden files do not matter.

  Raises:
    FileNotFoundError: it has no `SHA256SUMS`, or lacks a file listed there.
    ValueError: a file has changed or was added, or the list was cut.
  """
  sums = directory / SUMS
  if not sums.is_file():
    raise FileNotFoundError(f"{directory} has no {SUMS}")
  listed = set()
  for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
    digest, _, name = line.partition("  ")
    file = directory / name
    if not name or len(digest) != 64:
      raise ValueError(f"{sums} has a line that is none of sha256sum: {line!r}")
    if not file.is_file():
      raise FileNotFoundError(f"{file} is missing, which {sums} lists")
    if _digest(file) != digest:
      raise ValueError(f"{file} or {sums} has changed since it was written")
    listed.add(file)
  for file in sorted(_files(directory) - listed - {sums}):
    if not file.name.startswith("."):
      raise ValueError(f"{file} is not listed in {sums}: cut, or added later")


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
  return path.with_name(f".{path.name}{suffix}")


def _files(directory: pathlib.Path) -> set[pathlib.Path]:
  return {p for p in directory.rglob("*") if p.is_file()}


def _write_sums(directory: pathlib.Path) -> None:
  lines = [
    f"{_digest(f)}  {f.relative_to(directory).as_posix()}\n"
    for f in sorted(_files(directory))
  ]
  (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def _digest(file: pathlib.Path) -> str:
  digest = hashlib.sha256()
  with file.open("rb") as opened:
    while chunk := opened.read(_CHUNK):
      digest.update(chunk)
  return digest.hexdigest()


def _exchange(one: pathlib.Path, other: pathlib.Path) -> bool:
  """Swaps two names in one step; False where the system cannot."""
  if sys.platform != "linux":
    return False
  renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
  if renameat2 is None:
    return False
  status = renameat2(
    _AT_FDCWD,
    os.fsencode(one),
    _AT_FDCWD,
    os.fsencode(other),
    ctypes.c_uint(_RENAME_EXCHANGE),
  )
  if status == 0:
    return True
  code = ctypes.get_errno()
  if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
    return False
  raise OSError(code, os.strerror(code), str(other))
