"""`monitor doctor`: finds faults of a monitor, and their fixes.

Checks the database, the folder of screenshots, the clients' spools, the disk
and the clock.

Does not: change anything.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import sqlite3
from typing import Callable, Iterator, Sequence

import orjson
import sqlalchemy as sa

from training_monitor.client import spool as spool_lib
from training_monitor.maintenance import exporting
from training_monitor.maintenance import pruning
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import migrations
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.schema import vocabulary
from training_monitor.server import screenshots
from training_monitor.server import thumbnails
from training_monitor.server.batches import items

OK, WARNING, ERROR = "ok", "warning", "error"
_SILENT_S = 3600.0
_AHEAD_S = 300.0
_LITTLE_SPACE = 1 << 30
_NO_SPACE = 64 << 20
_LARGE_WAL = 256 << 20
_OLD_TRASH_S = 3600.0
_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "lustre", "ceph")
_SHOWN = 3
_LATELY_DAYS = 7


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
  if lite:
    yield from _sqlite_file(database.file_of(url))
  engine = database.connect(target)
  try:
    checks: list[Callable[[], Iterator[Finding]]] = [
      lambda: _schema(engine),
      lambda: _integrity(engine),
      lambda: _loose_ends(engine),
      lambda: _runs(engine),
      lambda: _clock(engine),
      lambda: _screenshots(engine, files / "screenshots", deep),
      lambda: _thumbnails(engine, files),
      lambda: _clients(engine),
    ]
    for check in checks:
      level = OK
      try:
        for finding in check():
          level = finding.level if finding.level == ERROR else level
          yield finding
      except (sa.exc.DBAPIError, sqlite3.Error) as error:
        level = ERROR
        reason = getattr(error, "orig", None) or error
        yield Finding(
          ERROR,
          "database",
          f"it cannot be read: {reason}",
          "see that the file or server is there and yours to read; if it is"
          " damaged, restore a backup or an export, or try: sqlite3 FILE"
          " .recover",
        )
      if level == ERROR and check in checks[: 2 if lite else 1]:
        return  # The rest would only repeat it.
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


def _sqlite_file(path: pathlib.Path) -> Iterator[Finding]:
  kind = _filesystem(path)
  if kind.startswith(_NETWORK):
    yield Finding(
      ERROR,
      "database",
      f"{path} is on a network file system ({kind})",
      "SQLite's WAL is not safe there: move it to a local disk, or use"
      " PostgreSQL",
    )
  wal = path.with_name(f"{path.name}-wal")
  size = wal.stat().st_size if wal.exists() else 0
  if size > _LARGE_WAL:
    yield Finding(
      WARNING,
      "database",
      f"{wal} has {size >> 20} MiB",
      "a reader that never ends holds it: end long exports and other"
      " programs that have the file open",
    )


def _filesystem(path: pathlib.Path) -> str:
  """Returns the kind of file system that a file is on; "" if unknown."""
  try:
    mounts = pathlib.Path("/proc/self/mounts").read_text(errors="replace")
  except OSError:
    return ""
  best, kind = "", ""
  for line in mounts.splitlines():
    _, point, name, *_ = line.split()
    point = point.encode().decode("unicode_escape")
    if path.is_relative_to(point) and len(point) >= len(best):
      best, kind = point, name
  return kind


def _schema(engine: sa.Engine) -> Iterator[Finding]:
  schemas = migrations.REVISIONS
  with runs_lib.reading(engine) as connection:
    revision = migrations.revision_of(connection)
    if revision is None:
      yield Finding(
        ERROR,
        "schema",
        "it has none: it is not a database of the monitor",
        "give another --database",
      )
      return
    if revision == schemas[0]:
      yield Finding(OK, "schema", f"{revision}, the present one")
    elif revision in schemas:
      yield Finding(
        ERROR,
        "schema",
        f"{revision}, an older one; the present one is {schemas[0]}",
        "start the server once: it upgrades",
      )
      return
    else:
      yield Finding(
        ERROR,
        "schema",
        f"{revision}, which this version does not know",
        "use the newer version that wrote it",
      )
      return
    if not database.triggers_are_current(connection):
      yield Finding(
        WARNING,
        "schema",
        "its triggers are of another version",
        "start the server once: it replaces them",
      )
    if not text_index.ready(connection):
      yield Finding(
        WARNING,
        "search",
        "there is no index of words: a search reads every turn",
        "start the server once, with a SQLite that has FTS5",
      )


def _integrity(engine: sa.Engine) -> Iterator[Finding]:
  if engine.dialect.name != "sqlite":
    with runs_lib.reading(engine) as connection:
      version = connection.exec_driver_sql("SHOW server_version").scalar()
      off = [
        name
        for name in ("fsync", "full_page_writes", "synchronous_commit")
        if connection.exec_driver_sql(f"SHOW {name}").scalar() == "off"
      ]
    yield Finding(OK, "integrity", f"PostgreSQL {version} keeps its own")
    if off:
      yield Finding(
        ERROR,
        "integrity",
        f"{', '.join(off)} is off",
        "what the monitor acknowledged can be gone after a power loss: turn"
        " it on in postgresql.conf",
      )
    return
  with runs_lib.reading(engine) as connection:
    ask = lambda what: connection.exec_driver_sql(f"PRAGMA {what}").fetchall()
    damaged = [row[0] for row in ask("integrity_check(10)")]
    if damaged != ["ok"]:
      yield Finding(
        ERROR,
        "integrity",
        f"the file is damaged: {damaged[0]}",
        "stop the server, keep a copy, and restore a backup or an export, or"
        " try: sqlite3 FILE .recover",
      )
      return
    loose = ask("foreign_key_check")
    if loose:
      yield Finding(
        ERROR,
        "integrity",
        f"{len(loose)} rows refer to missing rows, the first in {loose[0][0]}",
        "a program wrote with foreign keys off: delete these rows",
      )
    mode = ask("journal_mode")[0][0]
    if mode != "wal":
      yield Finding(
        ERROR,
        "integrity",
        f"the journal is {mode}, not WAL",
        "start the server once; if it stays so, the disk does not support"
        " shared memory: move the file to a local disk",
      )
    elif not loose:
      yield Finding(
        OK,
        "integrity",
        f"of the file and of all references (SQLite {sqlite3.sqlite_version})",
      )


def _loose_ends(engine: sa.Engine) -> Iterator[Finding]:
  """Finds rows that no foreign key protects."""
  counts: dict[str, int] = {}

  def count(what: str, query: sa.Select) -> None:
    number = connection.execute(query).scalar_one()
    if number:
      counts[what] = counts.get(what, 0) + number

  with runs_lib.reading(engine) as connection:
    t, owner = tables.training, tables.training_project
    count(
      "runs of no project",
      sa.select(sa.func.count())
      .where(~sa.exists().where(owner.c.training_id == t.c.id))
      .select_from(t),
    )
    for kind in items.BY_NAME:
      e = tables.metadata.tables[kind]
      for what, table, own in (
        ("names", tables.client_ids, tables.client_ids.c.kind == kind),
        ("raw values", tables.raw_value, tables.raw_value.c.kind == kind),
        (
          "histories",
          tables.status_history,
          tables.status_history.c.entity_type == kind,
        ),
      ):
        if what == "histories" and kind not in vocabulary.STATEFUL:
          continue
        missing = ~sa.exists().where(e.c.id == table.c.entity_id)
        if kind == "environment":
          waiting = tables.pending_environment
          missing &= ~sa.exists().where(waiting.c.id == table.c.entity_id)
        count(
          f"{what} of what is gone",
          sa.select(sa.func.count()).where(own, missing).select_from(table),
        )
  for what, number in counts.items():
    yield Finding(
      WARNING,
      "rows",
      f"{number} {what}",
      "left by raw SQL or by a prune that was interrupted: prune again",
    )
  if not counts:
    yield Finding(OK, "rows", "everything belongs to something")


def _runs(engine: sa.Engine) -> Iterator[Finding]:
  with runs_lib.reading(engine) as connection:
    runs = runs_lib.find(connection)
  silent = [
    run
    for run in runs
    if run.status in runs_lib.ACTIVE
    and (database.now() - run.last_sign).total_seconds() > _SILENT_S
  ]
  for run in silent[:_SHOWN]:
    hours = (database.now() - run.last_sign).total_seconds() / 3600
    yield Finding(
      WARNING,
      "runs",
      f"{run.name} is {run.status} and silent for {hours:.1f} h",
      "its process or network died: resume it, or look into its spool",
    )
  if len(silent) > _SHOWN:
    yield Finding(
      WARNING, "runs", f"and {len(silent) - _SHOWN} more are silent"
    )
  if not silent:
    active = sum(run.status in runs_lib.ACTIVE for run in runs)
    pinned = [f"{r.name} ({r.project})" for r in runs if r.pinned]
    baselines = f"; baselines: {', '.join(pinned)}" if pinned else ""
    yield Finding(
      OK, "runs", f"{len(runs)}, of which {active} under way{baselines}"
    )


def _clock(engine: sa.Engine) -> Iterator[Finding]:
  with runs_lib.reading(engine) as connection:
    h = tables.status_history
    newest = connection.execute(sa.select(sa.func.max(h.c.changed_at))).scalar()
    server_time = None
    if engine.dialect.name == "postgresql":
      server_time = connection.exec_driver_sql(
        "SELECT clock_timestamp() AT TIME ZONE 'UTC'"
      ).scalar()
  now = database.now()
  ahead_s = (newest - now).total_seconds() if newest else 0.0
  apart = abs((server_time - now).total_seconds()) if server_time else 0.0
  if ahead_s > _AHEAD_S:
    yield Finding(
      WARNING,
      "clock",
      f"something happened {ahead_s / 3600:.1f} h from now: this clock was"
      " set back, or the server's is ahead",
      "set the clock (timedatectl); order is kept by ids, ages are wrong"
      " until then",
    )
  if apart > 5:
    yield Finding(
      WARNING,
      "clock",
      f"the database's clock is {apart:.0f} s away",
      "synchronise both machines (NTP)",
    )
  if ahead_s <= _AHEAD_S and apart <= 5:
    yield Finding(OK, "clock", "nothing is in the future")


# --- screenshots --------------------------------------------------------------


def _screenshots(
  engine: sa.Engine, directory: pathlib.Path, deep: bool
) -> Iterator[Finding]:
  folder = screenshots.ScreenshotFiles(directory)
  s, o = tables.screenshot, tables.obs
  with runs_lib.reading(engine) as connection:
    rows = {row.sha256: row for row in connection.execute(sa.select(s))}
    shown: set[str] = set()
    uris = sa.select(o.c.screenshot_uri).where(
      o.c.screenshot_uri.like("sha256:%")
    )
    for one in exporting.stream(connection, uris.distinct()):
      shown.add(one["screenshot_uri"].removeprefix("sha256:"))
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
  now = database.now().replace(tzinfo=datetime.timezone.utc).timestamp()
  stray = [
    path
    for path in directory.glob("??/*")
    if (path.name[:64] not in rows or path.suffix in (".part", ".pruned"))
    and now - path.stat().st_mtime > _OLD_TRASH_S
  ]
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
        "restore the folder from a backup, or import an export of these"
        " runs: what is missing comes with it",
      )
  if stray:
    yield Finding(
      WARNING,
      "screenshots",
      f"{len(stray)} files that no row knows",
      "monitor prune removes them",
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
  if not (lost or short or wrong or stray or absent):
    yield Finding(
      OK,
      "screenshots",
      f"{len(rows)}, each with its file{' and its hash' if deep else ''}",
    )


# --- clients ------------------------------------------------------------------


def _thumbnails(engine: sa.Engine, files: pathlib.Path) -> Iterator[Finding]:
  stray = pruning.stray_thumbnails(engine, files)
  if stray:
    yield Finding(
      WARNING,
      "thumbnails",
      f"{len(stray)} of screenshots that are gone, the first {stray[0].name}",
      "monitor prune removes them",
    )
  else:
    count = sum(1 for _ in (files / thumbnails.FOLDER).glob("??/*.webp"))
    yield Finding(OK, "thumbnails", f"{count}, each of a screenshot")


def _clients(engine: sa.Engine) -> Iterator[Finding]:
  """Counters of the clients that sent lately."""
  d = tables.delivery
  with runs_lib.reading(engine) as connection:
    lately = database.now() - datetime.timedelta(days=_LATELY_DAYS)
    rows = connection.execute(
      sa.select(d.c.spool, d.c.health_json).where(d.c.updated_at > lately)
    ).fetchall()
  for name, text in rows:
    health = _object(text)
    bad = {
      k: v
      for k, v in health.items()
      if k.startswith(("dropped", "dead", "damaged"))
      and isinstance(v, int)
      and v
    }
    if bad:
      yield Finding(
        WARNING,
        "clients",
        f"{name[:12]}: {', '.join(f'{k} {v}' for k, v in bad.items())}",
        "raise monitor.spool_mb, or see the log of that run",
      )


def _object(text: str | None) -> dict:
  try:
    value = orjson.loads(text or "{}")
  except orjson.JSONDecodeError:
    return {}
  return value if isinstance(value, dict) else {}


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
