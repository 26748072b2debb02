"""`monitor import`: reads an archive into a database.

Promises: a run is imported whole or not at all, and once however often: one
that is here already is left, or replaced where the archive has a later state
of it. A row keeps its id where the id is free; a row whose id is taken gets a
new one, and everything that refers to it follows. Nothing that is
here is lost, and nothing damaged comes in: every table and every screenshot is
checked against its hash. A run that is replaced keeps the tags that it has
here; a project that has a pinned baseline keeps that.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from typing import Any, Iterator, Mapping, TYPE_CHECKING

import sqlalchemy as sa
from tqdm import auto as tqdm_auto

from training_monitor.maintenance import archive
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import migrations
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import access
from training_monitor.server import errors
from training_monitor.server import screenshots
from training_monitor.server import sql
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import items

if TYPE_CHECKING:
  import tqdm

_BATCH = 500
_MAX_SCREENSHOT = 32 << 20

MaintenanceError = runs_lib.MaintenanceError
Row = dict[str, Any]


@dataclasses.dataclass
class ImportResult:
  """Result of an import.

  Attributes:
    imported, replaced, present: Names of runs that came in, took the place of
      an earlier state, or were here already.
    rows: Number of rows written.
    renumbered: Number of written rows that got a new id.
    screenshots: Number of new screenshots.
  """

  imported: list[str] = dataclasses.field(default_factory=list)
  replaced: list[str] = dataclasses.field(default_factory=list)
  present: list[str] = dataclasses.field(default_factory=list)
  rows: int = 0
  renumbered: int = 0
  screenshots: int = 0


def import_(
  engine: sa.Engine,
  files: pathlib.Path,
  path: pathlib.Path,
  *,
  project: str = "",
  quiet: bool = False,
) -> ImportResult:
  """Reads an archive into a database.

  Args:
    engine: Engine of the upgraded database.
    files: the server's folder of screenshots.
    path: Path of the archive.
    project: Project of the imported runs; "" keeps the archive's projects.
    quiet: show no progress.

  Raises:
    MaintenanceError: it is damaged, of another version, or has something that
      is another run's here.
    ValueError: `project` is not a valid project name.
    OSError: the disk's.
  """
  outcome = ImportResult()
  with archive.ArchiveReader(path) as reader:
    schema = reader.manifest.get("schema")
    if schema not in migrations.REVISIONS:
      raise MaintenanceError(
        f"{path} has schema {schema}, and this program knows"
        f" {', '.join(sorted(migrations.REVISIONS))}; use the version that"
        " wrote it"
      )
    runs = reader.manifest["runs"]
    total = sum(t["rows"] for t in reader.manifest["tables"].values())
    total += len(reader.manifest["screenshots"])
    with tqdm_auto.tqdm(
      total=total, unit="row", disable=quiet, desc="importing"
    ) as bar:
      _bring_screenshots(engine, reader, files, outcome, bar)
      for run in runs:
        _RunImport(engine, reader, run, project, outcome, bar).make()
  return outcome


def _bring_screenshots(
  engine: sa.Engine,
  reader: archive.ArchiveReader,
  files: pathlib.Path,
  outcome: ImportResult,
  bar: tqdm.tqdm,
) -> None:
  """Imports the screenshots, before the rows that refer to them."""
  folder = screenshots.ScreenshotFiles(files / "screenshots")
  s = tables.screenshot
  listed = reader.manifest["screenshots"]
  for start in range(0, len(listed), 100):
    part = {w["sha256"]: w["suffix"] for w in listed[start : start + 100]}
    with runs_lib.reading(engine) as connection:
      here = {
        row.sha256: folder.path(row.sha256, row.media_type)
        for row in connection.execute(
          sa.select(s).where(s.c.sha256.in_(list(part)))
        )
      }
    rows = []
    for sha, suffix in part.items():
      bar.update()
      if sha in here and here[sha].exists():
        continue
      name = archive.screenshot(sha, suffix)
      data = reader.file(name, _MAX_SCREENSHOT)
      try:
        screenshots.check_sha(sha)
        stored = folder.store(sha, data)
      except errors.ApiError as error:
        raise MaintenanceError(f"{name}: {error.message}") from None
      rows.append((*stored, writer_lib.now()))
    fresh = [row for row in rows if row[0] not in here]
    if fresh:
      with runs_lib.writing(engine) as connection:
        sql.Sql(connection).many(screenshots.UPSERT, fresh)
    outcome.screenshots += len(rows)


class _RunImport:
  """One run's way into the database."""

  def __init__(
    self,
    engine: sa.Engine,
    reader: archive.ArchiveReader,
    run: Mapping[str, Any],
    project: str,
    outcome: ImportResult,
    bar: tqdm.tqdm,
  ):
    self._engine = engine
    self._reader = reader
    self._run = run
    self._project_name = project or run["project"]
    self._outcome = outcome
    self._bar = bar
    self._ids: dict[str, dict[int, int]] = {}
    """Kind -> id in the archive -> id here, where that is another one."""
    self._next: dict[str, int] = {}
    """Kind -> the last id that was given anew."""
    self._rows = self._renumbered = 0
    self._renamed: str | None = None

  def make(self) -> None:
    name = self._run["run_name"]
    with runs_lib.writing(self._engine) as connection:
      self._connection = connection
      self._sql = sql.Sql(connection)
      (training,) = self._rows_of("training")
      here = self._here(training)
      marks: tuple[list[Row], bool] = [], False
      noted: list[Row] = []
      if here is not None:
        id_, updated = here
        if updated >= training["updated_at"]:
          self._outcome.present.append(name)
          self._bar.update(self._run["rows"])
          return
        marks = self._marks_of(id_)
        noted = self._annotations_of(id_)
        runs_lib.delete_whole(connection, id_)
        runs_lib.forget_names(connection)
      self._project = access.project_id(connection, self._project_name)
      training["run_name"] = self._free_name(training["run_name"])
      self._bring_tasks()
      for kind in runs_lib.OWN:
        self._bring(kind, [training] if kind == "training" else None)
      self._bring_history()
      self._bring_names()
      connection.execute(
        sa.insert(tables.training_project).values(
          training_id=self._mapped("training", training["id"]),
          project_id=self._project,
        )
      )
      self._bring_marks(*marks)
      self._bring_annotations(noted)
      connection.execute(
        sa.insert(tables.change).values(
          training_id=self._mapped("training", training["id"]),
          kind="training",
          entity_id=self._mapped("training", training["id"]),
          changed_at=database.now(),
        )
      )
      self._advance_sequences()
      self._sql.close()
    (self._outcome.imported if here is None else self._outcome.replaced).append(
      name
    )
    self._outcome.rows += self._rows
    self._outcome.renumbered += self._renumbered

  # --- existing rows ----------------------------------------------------------

  def _here(self, training: Row) -> tuple[int, datetime.datetime] | None:
    """Returns (id, last change) of this run in this database.

    A run is the same one if it was made at the same moment under the same
    name; its name here may have got a number.
    """
    t, owner, p, raw = (
      tables.training,
      tables.training_project,
      tables.project,
      tables.raw_value,
    )
    rows = self._connection.execute(
      sa.select(t.c.id, t.c.run_name, t.c.updated_at)
      .join(owner, owner.c.training_id == t.c.id)
      .join(p, p.c.id == owner.c.project_id)
      .where(
        p.c.name == self._project_name, t.c.created_at == training["created_at"]
      )
    ).fetchall()
    names = {training["run_name"], self._raw_name()}
    for row in rows:
      other_names = set(
        self._connection.scalars(
          sa.select(raw.c.value).where(
            raw.c.kind == "training",
            raw.c.entity_id == row.id,
            raw.c.field == "run_name",
          )
        )
      )
      if names & ({row.run_name} | other_names):
        return row.id, row.updated_at
    return None

  def _raw_name(self) -> str:
    """Returns the client's name of the run, if the database has another."""
    for row in self._reader.rows(
      archive.run_table(self._run["id"], "raw_value")
    ):
      if (row["kind"], row["field"]) == ("training", "run_name"):
        return row["value"]
    return self._run["run_name"]

  def _free_name(self, name: str) -> str:
    """Returns the run's name, with a number if another run has it."""
    t, free, number = tables.training, name, 1
    while self._connection.execute(
      sa.select(t.c.id).where(t.c.run_name == free)
    ).first():
      number += 1
      free = f"{name}-{number}"
    self._renamed = name if free != name else None
    return free

  # --- rows -------------------------------------------------------------------

  def _rows_of(self, table: str) -> Iterator[Row]:
    yield from _typed(
      self._reader.rows(archive.run_table(self._run["id"], table)),
      tables.metadata.tables[table],
      table,
    )

  def _mapped(self, kind: str, id_: int | None) -> int | None:
    return None if id_ is None else self._ids.get(kind, {}).get(id_, id_)

  @property
  def _training(self) -> int:
    id_ = self._run["id"]
    return self._ids.get("training", {}).get(id_, id_)

  def _bring_tasks(self) -> None:
    """Imports tasks and validators; a task whose name exists is left alone."""
    t, v = tables.task, tables.validator
    fresh = []
    for row in _typed(self._reader.rows("tasks.jsonl"), t, "task"):
      if self._is_new("task", row, t.c.task_id == row["task_id"]):
        fresh.append(row)
    self._bring("task", fresh)
    fresh = []
    for row in _typed(self._reader.rows("validators.jsonl"), v, "validator"):
      row["task_id"] = self._mapped("task", row["task_id"])
      same = (
        v.c[name].is_not_distinct_from(row[name])
        for name in row
        if name not in ("id", "created_at")
      )
      if self._is_new("validator", row, *same):
        fresh.append(row)
    self._bring("validator", fresh, parents=False)

  def _is_new(self, kind: str, row: Row, *same: sa.ColumnElement[bool]) -> bool:
    """Looks for a row that is the `same`, whose id `row` then gets."""
    query = sa.select(tables.metadata.tables[kind].c.id).where(*same)
    here = self._connection.execute(query).scalar()
    if here is not None:
      self._ids.setdefault(kind, {})[row["id"]] = here
    return here is None

  def _bring(
    self, kind: str, rows: list[Row] | None = None, parents: bool = True
  ) -> None:
    """Writes rows of a table, under ids that are free."""
    table = tables.metadata.tables[kind]
    refers = items.BY_NAME[kind].parents if parents else {}
    part: list[Row] = []
    for row in rows if rows is not None else self._rows_of(kind):
      for column, parent in refers.items():
        row[column] = self._mapped(parent, row[column])
      part.append(row)
      if len(part) == _BATCH:
        self._write(kind, table, part)
        part = []
    self._write(kind, table, part)

  def _write(self, kind: str, table: sa.Table, part: list[Row]) -> None:
    if not part:
      return
    old = [row["id"] for row in part]
    used_ids = set(
      self._connection.scalars(sa.select(table.c.id).where(table.c.id.in_(old)))
    )
    if kind == "environment":
      waiting = tables.pending_environment
      used_ids |= set(
        self._connection.scalars(
          sa.select(waiting.c.id).where(waiting.c.id.in_(old))
        )
      )
    if used_ids:
      self._renumber(kind, part, used_ids)
    try:
      self._connection.execute(sa.insert(table), part)
    except sa.exc.IntegrityError as error:
      raise MaintenanceError(
        f"run {self._run['run_name']}: its {kind} rows cannot be here"
        f" ({str(error.orig).splitlines()[0]}); perhaps another run here has"
        " the same episodes: prune that first, or import into another"
        " database"
      ) from None
    self._rows += len(part)
    self._bar.update(len(part))

  def _renumber(self, kind: str, part: list[Row], used_ids: set[int]) -> None:
    """Gives new ids to rows whose ids are taken.

    The new ids are beyond every id of the archive, so that no later row
    collides with them.
    """
    if kind not in self._next:
      high = max((row["id"] for row in self._all(kind)), default=0)
      self._raise_sequence(kind, high)
    fresh = iter(self._sql.next_ids(kind, len(used_ids), self._next))
    for row in part:
      if row["id"] in used_ids:
        new = next(fresh)
        self._ids.setdefault(kind, {})[row["id"]] = new
        row["id"] = new
        self._renumbered += 1

  def _all(self, kind: str) -> Iterator[Row]:
    shared = {"task": "tasks.jsonl", "validator": "validators.jsonl"}
    return self._reader.rows(
      shared.get(kind) or archive.run_table(self._run["id"], kind)
    )

  def _raise_sequence(self, kind: str, least: int) -> None:
    """Makes later ids greater than `least`."""
    self._next[kind] = least
    if self._sql.sqlite:
      rows = self._sql.rows(
        "SELECT seq FROM sqlite_sequence WHERE name = ?", (kind,)
      )
      self._next[kind] = max(least, rows[0][0] if rows else 0)
    else:
      self._sql.rows(
        f"SELECT setval('{kind}_id_seq', GREATEST(?, (SELECT last_value FROM"
        f" {kind}_id_seq)))",
        (max(least, 1),),
      )

  def _advance_sequences(self) -> None:
    """Advances PostgreSQL's sequences past the imported ids."""
    if self._sql.sqlite:
      return
    for kind in (*items.BY_NAME, "status_history"):
      self._sql.rows(
        f"SELECT setval('{kind}_id_seq', GREATEST((SELECT COALESCE(max(id),"
        f' 1) FROM "{kind}"), (SELECT last_value FROM {kind}_id_seq)))'
      )

  # --- rows beside the entities ----------------------------------------------

  def _bring_history(self) -> None:
    """Replaces the history that triggers just wrote by the archive's."""
    h = tables.status_history
    for kind in vocabulary.STATEFUL:
      training = self._training
      self._connection.execute(
        sa.delete(h).where(
          h.c.entity_type == kind,
          h.c.entity_id.in_(runs_lib.ids(kind, training)),
        )
      )
    part: list[Row] = []
    for row in self._rows_of("status_history"):
      row["entity_id"] = self._mapped(row["entity_type"], row["entity_id"])
      part.append(row)
      if len(part) == _BATCH:
        self._write("status_history", h, part)
        part = []
    self._write("status_history", h, part)

  def _bring_names(self) -> None:
    """Imports client ids, and raw values beyond the columns."""
    training = self._training
    raw = list(self._named("raw_value"))
    values = [(r["kind"], r["entity_id"], r["field"], r["value"]) for r in raw]
    if self._renamed is not None and not any(
      v[::2] == ("training", "run_name") for v in values
    ):
      values.append(("training", training, "run_name", self._renamed))
    self._sql.many(
      sql.upsert(
        "monitor_raw_value", ("kind", "entity_id", "field"), ("value",)
      ),
      values,
    )
    names = [
      (self._project, r["kind"], r["client_id"], r["entity_id"])
      for r in self._named("client_id")
    ]
    # Tasks are named by their own id.
    t, r = tables.task, tables.rollout
    own = sa.select(r.c.task_id).where(
      r.c.id.in_(runs_lib.ids("rollout", training))
    )
    names += [
      (self._project, "task", row.task_id, row.id)
      for row in self._connection.execute(
        sa.select(t.c.id, t.c.task_id).where(t.c.id.in_(own))
      )
    ]
    # A name with another meaning here keeps it.
    self._sql.many(
      "INSERT INTO monitor_client_id (project_id, kind, client_id, entity_id)"
      " VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
      names,
    )

  def _marks_of(self, training: int) -> tuple[list[Row], bool]:
    """Returns (tags, whether it is pinned) of a run that is here."""
    g, pin = tables.training_tag, tables.pinned_baseline
    tags = self._connection.execute(
      sa.select(g).where(g.c.training_id == training)
    ).mappings()
    pinned = self._connection.execute(
      sa.select(pin.c.project_id).where(pin.c.training_id == training)
    ).first()
    return [dict(row) for row in tags], pinned is not None

  def _bring_marks(self, tags: list[Row], pinned: bool) -> None:
    """Merges the archive's tags with those of the present run."""
    g, pin = tables.training_tag, tables.pinned_baseline
    training = self._training
    brought = list(
      _typed(
        self._reader.rows(archive.run_table(self._run["id"], "training_tag")),
        g,
        "training_tag",
      )
    )
    by_tag = {row["tag"]: row for row in [*tags, *brought]}
    for row in by_tag.values():
      row["training_id"] = training
    if by_tag:
      self._connection.execute(sa.insert(g), list(by_tag.values()))
    self._bar.update(len(brought))
    if not pinned and not self._run.get("pinned"):
      return
    if (
      self._connection.execute(
        sa.select(pin.c.training_id).where(pin.c.project_id == self._project)
      ).first()
      is None
    ):
      self._connection.execute(
        sa.insert(pin).values(
          project_id=self._project,
          training_id=training,
          pinned_at=database.now(),
        )
      )

  def _annotations_of(self, training: int) -> list[Row]:
    """Returns labels and notes of a present run by their rollout's name."""
    n, r, t = tables.annotation, tables.rollout, tables.turn
    return [
      dict(row)
      for row in self._connection.execute(
        sa.select(
          n.c.label,
          n.c.note,
          n.c.created_at,
          r.c.rollout_id.label("name"),
          t.c.turn,
        )
        .join(r, r.c.id == n.c.rollout_id)
        .outerjoin(t, t.c.id == n.c.turn_id)
        .where(r.c.id.in_(runs_lib.ids("rollout", training)))
        .order_by(n.c.id)
      ).mappings()
    ]

  def _bring_annotations(self, noted: list[Row]) -> None:
    """Merges the archive's labels and notes with those of the present run."""
    n, r, t = tables.annotation, tables.rollout, tables.turn
    merged: dict[tuple[Any, ...], Row] = {}
    for row in _typed(
      self._reader.rows(archive.run_table(self._run["id"], "annotation")),
      n,
      "annotation",
    ):
      del row["id"]
      for kind in ("rollout", "turn"):
        row[f"{kind}_id"] = self._mapped(kind, row[f"{kind}_id"])
      merged[row["rollout_id"], row["turn_id"], row["label"], row["note"]] = row
      self._bar.update()
    for row in noted:
      where = self._connection.execute(
        sa.select(r.c.id, t.c.id.label("turn_id"))
        .outerjoin(
          t, sa.and_(t.c.rollout_id == r.c.id, t.c.turn == row["turn"])
        )
        .where(r.c.rollout_id == row["name"])
      ).one_or_none()
      if where is None or (row["turn"] is not None and where.turn_id is None):
        continue  # The later state has no such episode or turn.
      key = (where.id, where.turn_id, row["label"], row["note"])
      merged.setdefault(
        key,
        {
          "rollout_id": where.id,
          "turn_id": where.turn_id,
          "label": row["label"],
          "note": row["note"],
          "created_at": row["created_at"],
        },
      )
    if merged:
      self._connection.execute(sa.insert(n), list(merged.values()))
      self._rows += len(merged)

  def _named(self, table: str) -> Iterator[Row]:
    for row in self._reader.rows(archive.run_table(self._run["id"], table)):
      row["entity_id"] = self._mapped(row["kind"], row["entity_id"])
      self._bar.update()
      yield row


def _typed(rows: Iterator[Row], table: sa.Table, name: str) -> Iterator[Row]:
  """Yields the rows with times parsed.

  Raises:
    MaintenanceError: A row has a column that the table lacks.
  """
  times = {c.name for c in table.c if isinstance(c.type, sa.TIMESTAMP)}
  names = [c.name for c in table.c]
  columns = set(names)
  for row in rows:
    if not isinstance(row, dict) or not row.keys() <= columns:
      wrong = sorted(set(row) - columns)[0] if isinstance(row, dict) else row
      raise MaintenanceError(
        f"{name}: there is no column {str(wrong)[:80]!r}; the archive is of"
        " another version"
      )
    typed: Row = {column: row.get(column) for column in names}
    for column in times:
      if typed[column] is not None:
        typed[column] = datetime.datetime.fromisoformat(typed[column])
    yield typed
