"""`monitor doctor`: finds faults of a monitor, and their fixes.

Checks the disk, the database, the folder of screenshots and spools.

Does not: change anything.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sqlite3
from typing import Iterator, Sequence

import sqlalchemy as sa

from training_monitor.client import spool as spool_lib
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import migrations
from training_monitor.schema import tables
from training_monitor.server import screenshots

OK, WARNING, ERROR = "ok", "warning", "error"
_LITTLE_SPACE = 1 << 30
_NO_SPACE = 64 << 20
_RESTORE = (
  "stop the server, keep a copy, and restore a backup, or try: sqlite3 FILE"
  " .recover"
)


@dataclasses.dataclass(frozen=True)
class Finding:
  """One thing that was looked at.

  Attributes:
    level: OK, WARNING (something to know of) or ERROR (something is lost,
      damaged or about to be).
    subject: the checked part.
    text: the finding.
    advice: the fix; "" when there is none.
  """

  level: str
  subject: str
  text: str
  advice: str = ""


def examine(
  target: str,
  files: pathlib.Path,
  spools: Sequence[pathlib.Path] = (),
  *,
  deep: bool = False,
) -> Iterator[Finding]:
  """Runs every check, the likeliest root cause first.

  Args:
    target: Path or URL of the database.
    files: the server's folder.
    spools: folders of spools.
    deep: read every screenshot, too.
  """
  url = database.url_of(target)
  lite = url.get_backend_name() == "sqlite"
  if lite and not database.file_of(url).exists():
    yield Finding(
      ERROR,
      "database",
      f"there is no file {url.database}",
      "give --database; a server makes it when it starts",
    )
    return
  yield from _disk({database.file_of(url).parent, files} if lite else {files})
  engine = database.connect(target)
  try:
    with runs_lib.reading(engine) as connection:
      for check in (
        lambda: _schema(connection),
        lambda: _integrity(connection),
        lambda: _screenshots(connection, files / "screenshots", deep),
      ):
        findings = list(check())
        yield from findings
        if any(one.level == ERROR for one in findings):
          break  # The rest would only repeat it.
  except (sa.exc.DBAPIError, sqlite3.Error) as error:
    reason = getattr(error, "orig", None) or error
    yield Finding(ERROR, "database", f"it cannot be read: {reason}", _RESTORE)
  finally:
    engine.dispose()
  for folder in spools:
    yield from _spools(folder)


# --- the database -------------------------------------------------------------


def _disk(folders: set[pathlib.Path]) -> Iterator[Finding]:
  for folder in sorted(folders):
    there = folder.absolute()
    while not there.exists():
      there = there.parent
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    text = f"{free / (1 << 30):.1f} GiB free at {folder}"
    advice = "make room, or: monitor prune --older-than 30d"
    if free < _NO_SPACE or not status.f_favail:
      yield Finding(ERROR, "disk", text, advice)
    elif free < _LITTLE_SPACE:
      yield Finding(WARNING, "disk", text, advice)
    else:
      yield Finding(OK, "disk", text)
    if not os.access(there, os.W_OK):
      yield Finding(
        ERROR,
        "disk",
        f"{there} cannot be written by this user",
        "give it to the user that runs the server",
      )


def _schema(connection: sa.Connection) -> Iterator[Finding]:
  revision = migrations.revision_of(connection)
  if revision == migrations.REVISION:
    yield Finding(OK, "schema", f"{revision}, the present one")
  elif revision is None:
    yield Finding(
      ERROR,
      "schema",
      "it has none: it is not a database of the monitor",
      "give another --database",
    )
  else:
    yield Finding(
      ERROR,
      "schema",
      f"{revision}, which this version does not know",
      "use the version that wrote it",
    )


def _integrity(connection: sa.Connection) -> Iterator[Finding]:
  if connection.dialect.name != "sqlite":
    yield Finding(OK, "integrity", "PostgreSQL keeps its own")
    return
  ask = lambda what: connection.exec_driver_sql(f"PRAGMA {what}").fetchall()
  damaged = [row[0] for row in ask("integrity_check(10)")]
  loose = ask("foreign_key_check")
  if damaged != ["ok"]:
    yield Finding(
      ERROR, "integrity", f"the file is damaged: {damaged[0]}", _RESTORE
    )
  elif loose:
    yield Finding(
      ERROR,
      "integrity",
      f"{len(loose)} rows refer to missing rows, the first in {loose[0][0]}",
      "a program wrote with foreign keys off: delete these rows",
    )
  else:
    yield Finding(OK, "integrity", "of the file and of all references")


# --- screenshots --------------------------------------------------------------


def _screenshots(
  connection: sa.Connection, directory: pathlib.Path, deep: bool
) -> Iterator[Finding]:
  folder = screenshots.ScreenshotFiles(directory)
  s, o = tables.screenshot, tables.obs
  rows = {row.sha256: row for row in connection.execute(sa.select(s))}
  uris = sa.select(o.c.screenshot_uri).where(
    o.c.screenshot_uri.like("sha256:%")
  )
  shown = {
    uri.removeprefix("sha256:") for uri in connection.scalars(uris.distinct())
  }
  lost, short, wrong = [], [], []
  for sha, row in rows.items():
    path = folder.path(sha, row.media_type)
    try:
      size = path.stat().st_size
    except OSError:
      lost.append(sha)
      continue
    if size != row.num_bytes:
      short.append(sha)
    elif deep:
      problem = screenshots.problem(sha, path.read_bytes())
      if problem:
        wrong.append(sha)
  for what, shas in (
    ("have no file", lost),
    ("have a file of another size", short),
    ("have a file of other content", wrong),
  ):
    if shas:
      yield Finding(
        ERROR,
        "screenshots",
        f"{len(shas)} of {len(rows)} {what}, the first {shas[0]}",
        "restore the folder from a backup",
      )
  absent = len(shown - set(rows))
  if absent:
    yield Finding(
      WARNING,
      "screenshots",
      f"{absent} are shown and not here",
      "they wait in a spool, or were dropped as it was full, or"
      " monitor.images was false",
    )
  if not (lost or short or wrong or absent):
    yield Finding(
      OK,
      "screenshots",
      f"{len(rows)}, each with its file{' and its hash' if deep else ''}",
    )


# --- spools ------------------------------------------------------------------


def _spools(folder: pathlib.Path) -> Iterator[Finding]:
  if not folder.is_dir():
    yield Finding(
      WARNING,
      "spool",
      f"there is no folder {folder}",
      "it is monitor_spool beside the runs, where a run has had a monitor",
    )
    return
  spools = sorted(folder.glob(f"*{spool_lib.SUFFIX}"))
  for path in spools:
    yield from _spool(path)
  for path in sorted(folder.glob(f"*{spool_lib.DAMAGED}")):
    yield Finding(
      ERROR,
      "spool",
      f"{path.name} was put aside, as it is damaged",
      "what it held is lost, unless header.json comes from a backup; else"
      " delete it",
    )
  if not spools:
    yield Finding(OK, "spool", f"nothing waits in {folder}")


def _spool(path: pathlib.Path) -> Iterator[Finding]:
  try:
    contents = spool_lib.contents(path)
  except (OSError, ValueError) as error:
    yield Finding(
      ERROR,
      "spool",
      f"{path.name} cannot be read: {error}",
      "what it holds may be lost; the next run from that folder puts it aside",
    )
    return
  owned = spool_lib.is_owned(path)
  text = (
    f"{path.name}, {'in use' if owned else 'without an owner'}, for"
    f" {contents.target}: {contents.records} records and"
    f" {contents.images} screenshots wait"
  )
  if contents.dead:
    reason = contents.dead[0][2]
    yield Finding(
      ERROR,
      "spool",
      f"{text}; {len(contents.dead)} records were refused ({reason})",
      "the server does not take them: upgrade it, or delete the folder once"
      " they are of no use",
    )
  elif (contents.records or contents.images) and not owned:
    yield Finding(
      WARNING,
      "spool",
      text,
      "the next run from that folder, for that server, delivers them",
    )
  else:
    yield Finding(OK, "spool", text)
