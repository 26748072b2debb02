"""Reads and writes the archive file of exported runs.

    manifest.json                      its content
    tasks.jsonl, validators.jsonl      those that the runs refer to
    runs/<id>/<table>.jsonl            a row a line, by the columns' names;
                                       training_tag among them
    screenshots/<aa>/<sha256>.<kind>   as the server keeps them

A ZIP file: `unzip -p run.zip 'runs/*/rollout.jsonl'` works with any tool.
Times are ISO 8601 in UTC; columns that hold JSON hold it as text, to the byte.

Promises: the file appears under its name when it is whole and on the disk; a
table that differs from the manifest raises while it is read. Holds no
more than a row in memory.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import os
import pathlib
from typing import Any, Iterable, Iterator, Mapping
import zipfile
import zlib

import orjson

from training_monitor.core import json_text
from training_monitor.maintenance import runs as runs_lib

FORMAT = "tunix-monitor-archive"
VERSION = 1
_MANIFEST = "manifest.json"
_MAX_LINE = 64 << 20
_MAX_MANIFEST = 256 << 20

MaintenanceError = runs_lib.MaintenanceError
Row = dict[str, Any]
_BROKEN = (
  KeyError,
  ValueError,
  EOFError,
  OSError,
  zipfile.BadZipFile,
  zlib.error,
)
"""Errors of reading a damaged archive."""


class ArchiveWriter:
  """Makes an archive. A context manager: a failure leaves no file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    self._members: dict[str, dict[str, Any]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    self._zip = zipfile.ZipFile(
      self._partial, "w", zipfile.ZIP_DEFLATED, compresslevel=4
    )

  def __enter__(self) -> ArchiveWriter:
    return self

  def rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes a table; returns how many rows it has."""
    digest, count = hashlib.sha256(), 0
    info = zipfile.ZipInfo(name, _now())
    info.compress_type = zipfile.ZIP_DEFLATED
    with self._zip.open(info, "w", force_zip64=True) as member:
      for row in rows:
        line = orjson.dumps(_plain(row), option=orjson.OPT_APPEND_NEWLINE)
        digest.update(line)
        member.write(line)
        count += 1
    self._members[name] = {"rows": count, "sha256": digest.hexdigest()}
    return count

  def file(self, name: str, source: pathlib.Path) -> None:
    """Copies a file, which is compressed already."""
    self._zip.write(source, name, zipfile.ZIP_STORED)

  def finish(self, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest, and lets the file appear."""
    complete = {
      "format": FORMAT,
      "version": VERSION,
      **manifest,
      "tables": self._members,
    }
    self._zip.writestr(
      _MANIFEST, orjson.dumps(complete, option=orjson.OPT_INDENT_2)
    )
    self._zip.close()
    with open(self._partial, "rb") as file:
      os.fsync(file.fileno())
    self._partial.replace(self._path)
    handle = os.open(self._path.parent, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)

  def __exit__(self, kind, error, trace) -> None:
    try:
      self._zip.close()
    except (OSError, ValueError):
      if kind is None:
        raise
    finally:
      self._partial.unlink(missing_ok=True)


class ArchiveReader:
  """Reads an archive. A context manager.

  Attributes:
    manifest: its content.
  """

  def __init__(self, path: pathlib.Path):
    """Opens the archive at `path`.

    Raises:
      MaintenanceError: The file is no archive, or of a later version.
    """
    self._path = path
    try:
      self._zip = zipfile.ZipFile(path)
    except FileNotFoundError:
      raise MaintenanceError(f"{path}: there is no such file") from None
    except (OSError, zipfile.BadZipFile) as error:
      raise MaintenanceError(
        f"{path} is not a whole archive ({error}); export it again"
      ) from None
    try:
      self.manifest = self._read_manifest()
    except BaseException:
      self._zip.close()
      raise

  def _read_manifest(self) -> dict[str, Any]:
    try:
      if self._zip.getinfo(_MANIFEST).file_size > _MAX_MANIFEST:
        raise ValueError("its manifest is too long")
      manifest = json_text.check_depth(orjson.loads(self._zip.read(_MANIFEST)))
      if manifest["format"] != FORMAT:
        raise ValueError(f"format is {manifest['format']!r}")
      for key in ("runs", "tables", "screenshots"):
        manifest[key]  # pylint: disable=pointless-statement
    except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
      raise MaintenanceError(
        f"{self._path} is not an archive of the monitor ({error}); give a"
        " file that `monitor export` made"
      ) from None
    if manifest["version"] != VERSION:
      raise MaintenanceError(
        f"{self._path} has version {manifest['version']} of the format, and"
        f" this program reads {VERSION}; use the program that wrote it"
      )
    return manifest

  def rows(self, name: str) -> Iterator[Row]:
    """Yields the rows of a table.

    Raises:
      MaintenanceError: it differs from the manifest; after the last row,
        so trust none before that.
    """
    listed = self.manifest["tables"].get(name)
    if listed is None:
      return
    digest, count = hashlib.sha256(), 0
    try:
      member = self._zip.open(name)
      assert isinstance(member, io.BufferedIOBase)
      with member, io.BufferedReader(member) as lines:
        while line := lines.readline(_MAX_LINE):
          digest.update(line)
          count += 1
          yield json_text.check_depth(orjson.loads(line))
    except _BROKEN as error:
      raise self._damaged(name, error) from None
    if (count, digest.hexdigest()) != (listed["rows"], listed["sha256"]):
      raise self._damaged(name, "its hash is another one")

  def file(self, name: str, most: int) -> bytes:
    """Returns a file's bytes.

    Raises:
      MaintenanceError: it is damaged, missing or longer than `most`.
    """
    try:
      if self._zip.getinfo(name).file_size > most:
        raise ValueError(f"it is longer than {most} bytes")
      return self._zip.read(name)
    except _BROKEN as error:
      raise self._damaged(name, error) from None

  def _damaged(self, name: str, why: object) -> MaintenanceError:
    return MaintenanceError(
      f"{self._path}: {name} is damaged ({why}); copy or export the file again"
    )

  def __enter__(self) -> ArchiveReader:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._zip.close()


def run_table(run: int, table: str) -> str:
  """Returns the name of a run's table in an archive."""
  return f"runs/{run}/{table}.jsonl"


def screenshot(sha: str, suffix: str) -> str:
  """Returns the name of a screenshot in an archive."""
  return f"screenshots/{sha[:2]}/{sha}{suffix}"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
  return {
    str(k): v.isoformat(" ", "microseconds")
    if isinstance(v, datetime.datetime)
    else v
    for k, v in row.items()
  }


def _now() -> tuple[int, int, int, int, int, int]:
  return datetime.datetime.now(datetime.timezone.utc).timetuple()[:6]
