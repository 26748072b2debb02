"""`monitor export`: writes runs into an archive.

Promises: the archive is one moment of the database, whatever changes
meanwhile; it appears when it is whole. Rows that a run refers to come with it;
screenshots that are not here are named in the manifest and left out.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any, Iterable, Iterator, TYPE_CHECKING

import sqlalchemy as sa
from tqdm import auto as tqdm_auto

from training_monitor.maintenance import archive
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import migrations
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import screenshots

if TYPE_CHECKING:
  import tqdm

_BATCH = 500
SHA_TEXT = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
RAW_FIELDS = ("screenshot_uri", "screen_before", "screen_after")


def export(
  engine: sa.Engine,
  files: pathlib.Path,
  path: pathlib.Path,
  *,
  project: str = "",
  names: tuple[str, ...] = (),
  with_screenshots: bool = True,
  quiet: bool = False,
) -> dict[str, Any]:
  """Writes an archive.

  Args:
    engine: Engine of the database.
    files: the server's folder of screenshots.
    path: Path of the archive; an existing file is replaced.
    project: only its runs; "" for all projects.
    names: only these runs, by name or id; none for all.
    with_screenshots: take them along.
    quiet: show no progress.

  Returns:
    The manifest.

  Raises:
    MaintenanceError: there is no such project or run, or none at all.
    OSError: the disk's.
  """
  folder = screenshots.ScreenshotFiles(files / "screenshots")
  with runs_lib.reading(engine) as connection:
    chosen = runs_lib.find(connection, project, names)
    if not chosen:
      raise runs_lib.MaintenanceError("there are no runs to export")
    with (
      archive.ArchiveWriter(path) as writer,
      tqdm_auto.tqdm(
        total=_count(connection, chosen),
        unit="row",
        disable=quiet,
        desc="exporting",
      ) as bar,
    ):
      shas: set[str] = set()
      manifest = {
        "schema": migrations.revision_of(connection),
        "runs": [
          {
            "id": run.id,
            "run_name": run.name,
            "project": run.project,
            "pinned": run.pinned,
            "rows": _write_run(connection, writer, run, shas, bar),
          }
          for run in chosen
        ],
      }
      _write_tasks(connection, writer, chosen, bar)
      manifest |= _write_screenshots(
        connection, writer, folder, shas if with_screenshots else set(), bar
      )
      writer.finish(manifest)
  return manifest


def _count(connection: sa.Connection, chosen: list[runs_lib.StoredRun]) -> int:
  return sum(
    connection.execute(
      sa.select(sa.func.count()).select_from(
        runs_lib.ids(kind, run.id).subquery()
      )
    ).scalar_one()
    for run in chosen
    for kind in runs_lib.OWN
  )


def stream(
  connection: sa.Connection, query: sa.Select
) -> Iterator[dict[str, Any]]:
  # An option of the statement: of the connection, it would be of all others.
  options = {"yield_per": _BATCH}
  for row in connection.execute(query, execution_options=options).mappings():
    yield dict(row)


def _write_run(
  connection: sa.Connection,
  writer: archive.ArchiveWriter,
  run: runs_lib.StoredRun,
  shas: set[str],
  bar: tqdm.tqdm,
) -> int:
  """Writes a run's tables; collects the screenshots that they refer to."""
  count = 0

  def put(table: str, rows: Iterable[dict[str, Any]]) -> None:
    nonlocal count
    count += writer.rows(archive.run_table(run.id, table), rows)

  def seen(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
      shas.update(references(row))
      bar.update()
      yield row

  for kind in runs_lib.OWN:
    t = tables.metadata.tables[kind]
    own = runs_lib.ids(kind, run.id)
    put(
      kind,
      seen(
        stream(connection, sa.select(t).where(t.c.id.in_(own)).order_by(t.c.id))
      ),
    )
  h, raw, c = tables.status_history, tables.raw_value, tables.client_ids
  owner = tables.training_project
  project = sa.select(owner.c.project_id).where(owner.c.training_id == run.id)

  def of_kinds(
    table: sa.Table, kinds: Iterable[str], kind: str, *more: Any
  ) -> Iterator[dict[str, Any]]:
    for name in kinds:
      query = sa.select(table).where(
        table.c[kind] == name,
        table.c.entity_id.in_(runs_lib.ids(name, run.id)),
        *more,
      )
      if "id" in table.c:
        query = query.order_by(table.c.id)
      yield from stream(connection, query)

  put("status_history", of_kinds(h, vocabulary.STATEFUL, "entity_type"))
  put("raw_value", seen(of_kinds(raw, runs_lib.OWN, "kind")))
  g = tables.training_tag
  put(
    "training_tag",
    stream(
      connection,
      sa.select(g).where(g.c.training_id == run.id).order_by(g.c.tag),
    ),
  )
  n = tables.annotation
  put(
    "annotation",
    stream(
      connection,
      sa.select(n)
      .where(n.c.rollout_id.in_(runs_lib.ids("rollout", run.id)))
      .order_by(n.c.id),
    ),
  )
  put(
    "client_id",
    of_kinds(
      c, runs_lib.OWN, "kind", c.c.project_id == project.scalar_subquery()
    ),
  )
  return count


def references(row: dict[str, Any]) -> set[str]:
  """Returns hashes of the screenshots that a row of any table refers to."""
  shas: set[str] = set()
  for name in ("screenshot_uri", "model_input_json"):
    if row.get(name):
      shas.update(SHA_TEXT.findall(row[name]))
  if row.get("field") in RAW_FIELDS:
    shas.update(SHA_TEXT.findall(row["value"]))
  return shas


def _write_tasks(
  connection: sa.Connection,
  writer: archive.ArchiveWriter,
  chosen: list[runs_lib.StoredRun],
  bar: tqdm.tqdm,
) -> None:
  t, v, r = tables.task, tables.validator, tables.rollout
  task_ids = sorted(
    {
      id_
      for run in chosen
      for id_ in connection.scalars(
        sa.select(r.c.task_id)
        .where(r.c.id.in_(runs_lib.ids("rollout", run.id)))
        .distinct()
      )
    }
  )

  def among(table: sa.Table, column: sa.Column) -> Iterator[dict[str, Any]]:
    for start in range(0, len(task_ids), _BATCH):
      part = task_ids[start : start + _BATCH]
      for row in stream(
        connection,
        sa.select(table).where(column.in_(part)).order_by(table.c.id),
      ):
        bar.update()
        yield row

  writer.rows("tasks.jsonl", among(t, t.c.id))
  writer.rows("validators.jsonl", among(v, v.c.task_id))


def _write_screenshots(
  connection: sa.Connection,
  writer: archive.ArchiveWriter,
  folder: screenshots.ScreenshotFiles,
  shas: set[str],
  bar: tqdm.tqdm,
) -> dict[str, Any]:
  s = tables.screenshot
  referenced = sorted(shas)
  stored: list[dict[str, Any]] = []
  for start in range(0, len(referenced), _BATCH):
    stored += stream(
      connection,
      sa.select(s).where(s.c.sha256.in_(referenced[start : start + _BATCH])),
    )
  bar.total += len(stored)
  written = []
  for row in stored:
    path = folder.path(row["sha256"], row["media_type"])
    try:
      writer.file(archive.screenshot(row["sha256"], path.suffix), path)
    except FileNotFoundError:
      continue
    written.append({"sha256": row["sha256"], "suffix": path.suffix})
    bar.update()
  here = {w["sha256"] for w in written}
  missing = [sha for sha in referenced if sha not in here]
  return {"screenshots": written, "missing": missing}
