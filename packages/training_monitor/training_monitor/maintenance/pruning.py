"""`monitor prune`: deletes runs, and screenshots that no episode refers to.

Promises: a run that is under way stays, and so does a pinned baseline; a
screenshot that another episode refers to stays, and so does one that a client
is sending. `dry_run` lists what would be deleted, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import re
import time
from typing import Iterable

import sqlalchemy as sa

from training_monitor.maintenance import run_files
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.server import screenshots
from training_monitor.server import thumbnails

_BATCH = 500
_GRACE_S = 3600.0
_TRASH = ".pruned"
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

MaintenanceError = runs_lib.MaintenanceError


@dataclasses.dataclass(frozen=True)
class Criteria:
  """Selects the runs to delete: those that meet every criterion.

  Attributes:
    project: Project of the runs; "" for any.
    names: Names or ids of the runs; none for any.
    older_than_s: not heard of for this long, seconds; None for any.
  """

  project: str = ""
  names: tuple[str, ...] = ()
  older_than_s: float | None = None

  @property
  def chooses(self) -> bool:
    """Whether it names any runs at all."""
    return bool(self.names) or self.older_than_s is not None


@dataclasses.dataclass
class PruneResult:
  """Rows and files deleted, or to be deleted.

  Attributes:
    runs: Runs that were chosen.
    active: Runs that stay because they are under way.
    pinned: Runs that stay because they are baselines.
    rows: Number of deleted rows.
    screenshots: Number of deleted screenshots.
    bytes: Size of the deleted files.
  """

  runs: list[runs_lib.StoredRun] = dataclasses.field(default_factory=list)
  active: list[runs_lib.StoredRun] = dataclasses.field(default_factory=list)
  pinned: list[runs_lib.StoredRun] = dataclasses.field(default_factory=list)
  rows: int = 0
  screenshots: int = 0
  bytes: int = 0


def seconds(text: str) -> float:
  """Returns seconds of "90m", "12h", "30d" or "8w".

  Raises:
    ValueError: another form.
  """
  match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
  if not match:
    raise ValueError(f"{text!r}: give a number and m, h, d or w, such as 30d")
  return float(match[1]) * _UNITS[match[2]]


def choose(
  engine: sa.Engine, criteria: Criteria, now: datetime.datetime | None = None
) -> tuple[
  list[runs_lib.StoredRun], list[runs_lib.StoredRun], list[runs_lib.StoredRun]
]:
  """Returns (chosen runs, runs under way, pinned runs).

  Raises:
    MaintenanceError: there is no such project or run.
  """
  now = now or database.now()
  with runs_lib.reading(engine) as connection:
    candidates = runs_lib.find(connection, criteria.project, criteria.names)
  age = lambda run: (now - run.last_sign).total_seconds()
  if criteria.older_than_s is not None:
    candidates = [run for run in candidates if age(run) > criteria.older_than_s]
  # A clock that went back makes an age negative: under way, then.
  active = [
    r for r in candidates if r.status in runs_lib.ACTIVE and age(r) < _GRACE_S
  ]
  candidates = [run for run in candidates if run not in active]
  pinned = [run for run in candidates if run.pinned]
  return [run for run in candidates if not run.pinned], active, pinned


def prune(
  engine: sa.Engine,
  files: pathlib.Path,
  criteria: Criteria,
  *,
  dry_run: bool = False,
  grace_s: float = _GRACE_S,
) -> PruneResult:
  """Takes runs and screenshots away.

  Args:
    engine: Engine of the database.
    files: the server's folder.
    criteria: Choice of runs; criteria without a choice leave all of them.
    dry_run: only count. Screenshots are counted as they would be
      without these runs.
    grace_s: screenshots younger than this stay, as what shows them may be on
      its way.

  Raises:
    MaintenanceError: there is no such project or run, or the space cannot be
      given back.
  """
  outcome = PruneResult()
  if criteria.chooses:
    outcome.runs, outcome.active, outcome.pinned = choose(engine, criteria)
  deleted = [run.id for run in outcome.runs]
  if not dry_run:
    for run in outcome.runs:
      outcome.rows += runs_lib.delete(engine, run.id)
    with runs_lib.writing(engine) as connection:  # Also those of raw SQL.
      runs_lib.forget_names(connection)
  _prune_screenshots(
    engine, files, outcome, deleted if dry_run else [], dry_run, grace_s
  )
  if not dry_run and (outcome.rows or outcome.screenshots):
    _vacuum(engine)
  return outcome


# --- screenshots --------------------------------------------------------------


def _shown(
  connection: sa.Connection,
  shas: set[str],
  after: int = 0,
  without: Iterable[int] = (),
) -> tuple[set[str], int]:
  """Returns the hashes that rows refer to, and the last observation read."""
  o, raw = tables.obs, tables.raw_value
  query = sa.select(o.c.id, o.c.screenshot_uri, o.c.model_input_json).where(
    o.c.id > after
  )
  for run in without:
    query = query.where(o.c.id.not_in(runs_lib.ids("obs", run)))
  shown: set[str] = set()
  last = after
  for row in run_files.stream(connection, query.order_by(o.c.id)):
    last = row["id"]
    shown |= run_files.shown_by(row) & shas
  values = sa.select(raw.c.field, raw.c.value).where(
    raw.c.field.in_(run_files.RAW_FIELDS)
  )
  for value in run_files.stream(connection, values):
    shown |= run_files.shown_by(value) & shas
  return shown, last


def _prune_screenshots(
  engine: sa.Engine,
  files: pathlib.Path,
  outcome: PruneResult,
  without: list[int],
  dry_run: bool,
  grace_s: float,
) -> None:
  folder = screenshots.ScreenshotFiles(files / "screenshots")
  small = thumbnails.Thumbnails(files / thumbnails.FOLDER)
  s = tables.screenshot
  _empty_trash(engine, files / "screenshots", dry_run)
  before = database.now() - datetime.timedelta(seconds=grace_s)
  with runs_lib.reading(engine) as connection:
    rows = {
      row.sha256: row
      for row in connection.execute(
        sa.select(s).where(s.c.created_at <= before)
      )
    }
    shown, last = _shown(connection, set(rows), without=without)
  unshown = sorted(set(rows) - shown)
  outcome.screenshots = len(unshown)
  outcome.bytes = sum(rows[sha].num_bytes for sha in unshown)
  if dry_run:
    return
  for start in range(0, len(unshown), _BATCH):
    part = unshown[start : start + _BATCH]
    moved: list[pathlib.Path] = []
    try:
      with runs_lib.writing(engine) as connection:
        # While no other program writes: has an episode shown one meanwhile?
        again, _ = _shown(connection, set(part), after=last)
        # Or is a client about to show one?
        again |= set(part).difference(
          connection.scalars(
            sa.select(s.c.sha256).where(
              s.c.sha256.in_(part), s.c.created_at <= before
            )
          )
        )
        for sha in again:
          outcome.screenshots -= 1
          outcome.bytes -= rows[sha].num_bytes
        part = [sha for sha in part if sha not in again]
        connection.execute(sa.delete(s).where(s.c.sha256.in_(part)))
        # Out of the way before others see that the row is gone: a client may
        # bring the same screenshot the next moment.
        for sha in part:
          path = folder.path(sha, rows[sha].media_type)
          trash = path.with_name(path.name + _TRASH)
          try:
            path.replace(trash)
          except FileNotFoundError:
            continue
          moved.append(trash)
    except BaseException:
      for trash in moved:
        trash.replace(trash.with_name(trash.name.removesuffix(_TRASH)))
      raise
    for trash in moved:
      trash.unlink(missing_ok=True)
    for sha in part:
      small.path(sha).unlink(missing_ok=True)


def _empty_trash(
  engine: sa.Engine, directory: pathlib.Path, dry_run: bool
) -> None:
  """Remains of a killed prune, and files without a row.

  A file whose row is still there goes back; the others go.
  """
  if dry_run:
    return
  s = tables.screenshot
  old = time.time() - _GRACE_S
  with runs_lib.reading(engine) as connection:
    stored = set(connection.scalars(sa.select(s.c.sha256)))
  for path in directory.glob("??/*"):
    sha = path.name[:64]
    try:
      if path.suffix == _TRASH:
        back = path.with_name(path.name.removesuffix(_TRASH))
        if sha in stored and not back.exists():
          path.replace(back)
        else:
          path.unlink()
      elif path.stat().st_mtime < old and (
        sha not in stored or path.suffix == ".part"
      ):
        path.unlink()
    except FileNotFoundError:
      continue  # Another prune was faster.


# --- space --------------------------------------------------------------------


def _vacuum(engine: sa.Engine) -> None:
  if engine.dialect.name == "sqlite":
    with runs_lib.writing(engine) as writing:
      text_index.rebuild(writing)  # It never leaves anything out by itself.
  # Not SQLAlchemy's transactions: neither database vacuums inside of one.
  connection = engine.raw_connection()
  try:
    driver = connection.driver_connection
    assert driver is not None
    if engine.dialect.name == "postgresql":
      driver.autocommit = True
      driver.execute("SET statement_timeout = 0")
    driver.execute("VACUUM")
  except database.driver_of(engine).OperationalError as error:
    raise MaintenanceError(
      f"pruned, but the space could not be given back ({error}); it is"
      " reused anyway, or prune again while no server runs"
    ) from None
  finally:
    connection.invalidate()  # It has settings that others do not want.
    connection.close()
