"""Reports a full disk once, in one line.

Whatever writes meets it: the checkpoint, the queue's store, every observer,
each in its own words and threads. The first log record of it stays, in one
line; those after it are dropped while the run lives. A run that cannot go on
ends with one error that names the disk.

Does not: free anything, or watch how much is left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import pathlib
import shutil
from typing import Iterator

from tunix.rl.multi_turn import config as config_lib

_CODES = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = (
  "No space left on device",
  "Disk quota exceeded",
  "database or disk is full",
)


def is_full(error: object) -> bool:
  """Whether an exception, or what caused it, is a full disk."""
  visited: set[int] = set()
  while isinstance(error, BaseException) and id(error) not in visited:
    visited.add(id(error))
    if isinstance(error, OSError) and error.errno in _CODES:
      return True
    # Orbax and SQLite raise classes of their own.
    if any(text in str(error) for text in _TEXTS):
      return True
    error = error.__cause__ or error.__context__
  return False


def unwritable(
  directory: pathlib.Path, error: OSError
) -> config_lib.ConfigError:
  """Returns the refusal of a run directory that cannot be written."""
  if is_full(error):
    return config_lib.ConfigError([describe(directory)])
  return config_lib.ConfigError(
    [
      f"run directory {directory} cannot be written: {error.strerror}"
      f" ({error.filename}); choose another run.dir, or make it writable"
    ]
  )


def describe(directory: pathlib.Path) -> str:
  """One line for the user, of a run directory whose disk is full."""
  space = ""
  with contextlib.suppress(OSError):
    space = f", {shutil.disk_usage(directory).free >> 20} MiB are left"
  return (
    f"no space left on the disk of {directory}{space}; free some (or lower"
    " checkpoint.keep), then resume"
  )


@contextlib.contextmanager
def reported_once() -> Iterator[None]:
  """Lets one log record of a full disk reach the present handlers."""
  full_disk = _Filter()
  handlers = [*logging.root.handlers, logging.lastResort]
  for handler in filter(None, handlers):
    handler.addFilter(full_disk)
  try:
    yield
  finally:
    for handler in filter(None, handlers):
      handler.removeFilter(full_disk)


class _Filter(logging.Filter):
  def __init__(self):
    super().__init__()
    self._first: logging.LogRecord | None = None

  def filter(self, record: logging.LogRecord) -> bool:
    caught = record.exc_info[1] if record.exc_info else None
    arguments = record.args if isinstance(record.args, tuple) else ()
    if not (
      is_full(caught)
      or any(is_full(value) for value in arguments)
      or any(text in record.getMessage() for text in _TEXTS)
    ):
      return True
    self._first = self._first or record
    record.exc_info = record.exc_text = None
    return record is self._first
