"""`monitor export` and `monitor import`: a run as a file of JSON lines.

    {"run": "mine", "project": "default", "version": 1}
    {"training": {…}}                    batches of the ingest protocol, in an
    {"steps": [{…}, {…}]}                order in which parents come first
    {"annotations": [{…}]}               labels and notes
    {"screenshot": "<sha256>", "base64": "…"}
    {"sha256": "…"}                      of the lines before

Values are those of the columns: times in UTC, JSON as text. A client's own ids
name the rows and their parents, so that the client can continue the run
elsewhere.

Promises: a file is one moment of the database, and appears when it is whole. A
run is imported whole or not at all, and once however often; no row that is here
changes, except those of tasks. A damaged file is refused.

Does not carry: times at which rows were made, earlier statuses, the pin of a
baseline. A copy of the whole database has them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import pathlib
import re
from typing import Any, BinaryIO, Iterator

import orjson
import sqlalchemy as sa

from training_monitor.core import durable
from training_monitor.core import json_text
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import tables
from training_monitor.server import access
from training_monitor.server import annotations as annotations_lib
from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server import screenshots
from training_monitor.server import sql as sql_lib
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import apply
from training_monitor.server.batches import items
from training_monitor.server.batches import references

VERSION = 1
_BATCH = 500
_MAX_LINE = 64 << 20
_SHARED = ("task", "validator")
"""Kinds that belong to no run."""
_MADE = ("id", "created_at", "updated_at", "last_heartbeat")
"""Columns that an import makes anew."""
SHA_TEXT = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
RAW_FIELDS = ("screenshot_uri", "screen_before", "screen_after")

MaintenanceError = runs_lib.MaintenanceError
Row = dict[str, Any]


@dataclasses.dataclass
class RunFile:
  """A written or imported file.

  Attributes:
    run: Name of the run.
    rows: Number of its rows; 0 of a run that was here already.
    screenshots: Number of its screenshots.
    missing: Hashes of screenshots that its rows show and the file lacks.
  """

  run: str
  rows: int = 0
  screenshots: int = 0
  missing: list[str] = dataclasses.field(default_factory=list)


# --- export -------------------------------------------------------------------


def export(
  engine: sa.Engine,
  files: pathlib.Path,
  path: pathlib.Path,
  name: str,
  *,
  project: str = "",
  with_screenshots: bool = True,
) -> RunFile:
  """Writes a run into a file.

  Args:
    engine: Engine of the database.
    files: the server's folder of screenshots.
    path: Path of the file; an existing one is replaced.
    name: Name or id of the run.
    project: Project of the run; "" for any.
    with_screenshots: take them along.

  Raises:
    MaintenanceError: there is no such project or run.
    OSError: the disk's.
  """
  folder = screenshots.ScreenshotFiles(files / "screenshots")
  with runs_lib.reading(engine) as connection:
    (run,) = runs_lib.find(connection, project, (name,))
    result = RunFile(run.name)
    with _whole(path) as file:
      digest = hashlib.sha256()

      def put(line: Row) -> None:
        data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        digest.update(data)
        file.write(data)

      put({"run": run.name, "project": run.project, "version": VERSION})
      reader = _RunReader(connection, run)
      for kind in items.KINDS:
        for part in reader.parts(kind):
          put({kind.plural: part[0] if kind.name == "training" else part})
          result.rows += len(part)
      if noted := reader.annotations():
        put({"annotations": noted})
      for sha in sorted(reader.shas) if with_screenshots else ():
        if (image := _image(connection, folder, sha)) is None:
          result.missing.append(sha)
        else:
          put({"screenshot": sha, "base64": base64.b64encode(image).decode()})
          result.screenshots += 1
      put({"sha256": digest.hexdigest()})
  return result


@contextlib.contextmanager
def _whole(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a file that appears under its name when the block ends well."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f"{path.name}.part")
  try:
    with open(partial, "wb") as file:
      yield file
    durable.sync(partial)
    partial.replace(path)
    durable.sync(path.parent)
  finally:
    partial.unlink(missing_ok=True)


def _image(
  connection: sa.Connection, folder: screenshots.ScreenshotFiles, sha: str
) -> bytes | None:
  s = tables.screenshot
  kind = connection.scalar(sa.select(s.c.media_type).where(s.c.sha256 == sha))
  try:
    return None if kind is None else folder.path(sha, kind).read_bytes()
  except FileNotFoundError:
    return None


class _RunReader:
  """Reads a run's rows as items of the protocol.

  Attributes:
    shas: Hashes of the screenshots that the rows read so far refer to.
  """

  def __init__(self, connection: sa.Connection, run: runs_lib.StoredRun):
    self._connection = connection
    self._run = run
    self._names: dict[str, dict[int, str]] = {}
    """Kind -> id -> client id."""
    self.shas: set[str] = set()

  def parts(self, kind: items.ItemKind) -> Iterator[list[Row]]:
    """Yields the items of a kind, some at a time; parents' kinds come first."""
    t = tables.metadata.tables[kind.name]
    own = self._ids(kind.name)
    self._names[kind.name] = names = self._named(kind.name, own)
    rows = stream(
      self._connection, sa.select(t).where(t.c.id.in_(own)).order_by(t.c.id)
    )
    while part := list(itertools.islice(rows, _BATCH)):
      raw = self._raw(kind.name, [row["id"] for row in part])
      listed = []
      for row in part:
        id_ = row["id"]
        # A row that no client sent has no name: it gets one.
        name = names.setdefault(id_, f"{self._run.name}:{kind.name}:{id_}")
        for column, parent in kind.parents.items():
          if row[column] is not None:
            row[column] = self._names[parent].get(row[column])
        item = {
          c: v for c, v in row.items() if v is not None and c not in _MADE
        }
        listed.append({"client_id": name, **raw.get(id_, {}), **item})
        self.shas |= shown_by(row)
      yield listed

  def _ids(self, kind: str) -> sa.Select:
    r, v = tables.rollout, tables.validator
    tasks = sa.select(r.c.task_id).where(
      r.c.id.in_(runs_lib.ids("rollout", self._run.id))
    )
    if kind == "task":
      return tasks
    if kind == "validator":
      return sa.select(v.c.id).where(v.c.task_id.in_(tasks))
    return runs_lib.ids(kind, self._run.id)

  def _named(self, kind: str, own: sa.Select) -> dict[int, str]:
    c, owner = tables.client_ids, tables.training_project
    project = sa.select(owner.c.project_id).where(
      owner.c.training_id == self._run.id
    )
    query = sa.select(c.c.entity_id, c.c.client_id).where(
      c.c.project_id == project.scalar_subquery(),
      c.c.kind == kind,
      c.c.entity_id.in_(own),
    )
    return {id_: name for id_, name in self._connection.execute(query)}

  def _raw(self, kind: str, ids: list[int]) -> dict[int, Row]:
    """Maps an id to its raw values, and a training's tags."""
    raw, g = tables.raw_value, tables.training_tag
    by_id: dict[int, Row] = {}
    for row in self._connection.execute(
      sa.select(raw).where(raw.c.kind == kind, raw.c.entity_id.in_(ids))
    ):
      by_id.setdefault(row.entity_id, {})[row.field] = row.value
      self.shas |= shown_by({"field": row.field, "value": row.value})
    if kind == "training":
      tags = sa.select(g.c.tag).where(g.c.training_id == self._run.id)
      by_id.setdefault(self._run.id, {})["tags"] = list(
        self._connection.scalars(tags.order_by(g.c.tag))
      )
    return by_id

  def annotations(self) -> list[Row]:
    """Returns labels and notes, each with the name of its rollout."""
    n, r, t = tables.annotation, tables.rollout, tables.turn
    query = (
      sa.select(r.c.rollout_id, t.c.turn, n.c.label, n.c.note)
      .join(r, r.c.id == n.c.rollout_id)
      .outerjoin(t, t.c.id == n.c.turn_id)
      .where(r.c.id.in_(runs_lib.ids("rollout", self._run.id)))
      .order_by(n.c.id)
    )
    return list(stream(self._connection, query))


def stream(connection: sa.Connection, query: sa.Select) -> Iterator[Row]:
  """Yields the rows of a query, of which few are in memory; times as text."""
  # An option of the statement: of the connection, it would be of all others.
  options = {"yield_per": _BATCH}
  for row in connection.execute(query, execution_options=options).mappings():
    yield {
      str(k): v.isoformat(" ", "microseconds")
      if isinstance(v, datetime.datetime)
      else v
      for k, v in row.items()
    }


def shown_by(row: Row) -> set[str]:
  """Returns hashes of the screenshots that a row of any table refers to."""
  shas: set[str] = set()
  for name in ("screenshot_uri", "model_input_json"):
    if row.get(name):
      shas.update(SHA_TEXT.findall(row[name]))
  if row.get("field") in RAW_FIELDS:
    shas.update(SHA_TEXT.findall(row["value"]))
  return shas


# --- import -------------------------------------------------------------------


def import_(
  engine: sa.Engine,
  files: pathlib.Path,
  path: pathlib.Path,
  *,
  project: str = "",
) -> RunFile:
  """Reads a file into a database.

  Args:
    engine: Engine of the upgraded database.
    files: the server's folder of screenshots.
    path: Path of the file.
    project: Project of the imported run; "" keeps the file's.

  Raises:
    MaintenanceError: it is damaged, of another version, or has something that
      is another run's here.
    ValueError: `project` is not a valid project name.
    OSError: the disk's.
  """
  number = 0
  with open(path, "rb") as file, runs_lib.writing(engine) as connection:
    sql = sql_lib.Sql(connection)
    importer = _Importer(connection, sql, files)
    try:
      while line := file.readline(_MAX_LINE):
        number += 1
        if not importer.take(line, project):
          break
    except (ValueError, TypeError, KeyError, errors.ApiError) as error:
      reason = getattr(error, "message", None) or error
      raise MaintenanceError(
        f"{path}, line {number}: {reason}; give a whole file that `monitor"
        " export` made"
      ) from None
    if not importer.finished:
      raise MaintenanceError(f"{path} is not whole; export it again")
    sql.close()
  return importer.result


class _Importer:
  """Applies the lines of a file, in the transaction that is open.

  Attributes:
    result: Counts of what was imported.
    finished: Whether the run is whole, or was here before.
  """

  def __init__(
    self, connection: sa.Connection, sql: sql_lib.Sql, files: pathlib.Path
  ):
    self._connection = connection
    self._sql = sql
    self._folder = screenshots.ScreenshotFiles(files / "screenshots")
    self._transaction = apply.Transaction(
      sql, references.CommittedIds(), writer_lib.now()
    )
    self._digest = hashlib.sha256()
    self._project = 0
    self.result = RunFile("")
    self.finished = False

  def take(self, line: bytes, project: str) -> bool:
    """Applies a line; returns whether others follow.

    Raises:
      ValueError, TypeError, KeyError, ApiError: it is wrong.
    """
    data = json_text.check_depth(orjson.loads(line))
    if not self._project:
      if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}; this reads {VERSION}")
      self.result.run = data["run"]
      self._project = access.project_id(
        self._connection, project or data["project"]
      )
    elif "sha256" in data:
      if data["sha256"] != self._digest.hexdigest():
        raise ValueError("the lines before it have another hash")
      self._transaction.finish()
      self.finished = True
    elif "screenshot" in data:
      stored = self._folder.store(
        screenshots.check_sha(data["screenshot"]),
        base64.b64decode(data["base64"], validate=True),
      )
      self._sql.many(screenshots.UPSERT, [(*stored, self._transaction.now)])
      self.result.screenshots += 1
    elif "annotations" in data:
      for one in data["annotations"]:
        rollout = one.pop("rollout_id")
        ((id_,),) = self._sql.rows(
          "SELECT id FROM rollout WHERE rollout_id = ?", (rollout,)
        )
        annotation = query_lib.Annotation.model_validate(one)
        annotations_lib.add(self._transaction, self._project, id_, annotation)
    else:
      self._apply(items.read(line))
    self._digest.update(line)
    return not self.finished

  def _apply(self, batch: items.IngestBatch) -> None:
    for kind, listed in batch.items.items():
      self.result.rows += len(listed)
      present = kind not in _SHARED and self._known(kind, listed)
      if present and kind == "training":
        self.result.rows, self.finished = 0, True
        return
      if present:
        raise ValueError(
          f"another run here has the same {kind}s: prune that first, or import"
          " into another project or database"
        )
    reply = self._transaction.apply(batch, self._project)
    for left_out in reply.get("ignored", ()):
      if left_out.get("kept") == "nothing":
        raise ValueError(f"{left_out['field']}: {left_out['message']}")

  def _known(self, kind: str, listed: list[items.Item]) -> bool:
    """Returns whether something here is one of the items."""
    rows = self._sql.among(
      # The name of a deleted row means nothing.
      f'SELECT 1 FROM monitor_client_id c JOIN "{kind}" t ON t.id = c.entity_id'
      " WHERE c.project_id = ? AND c.kind = ? AND c.client_id {among}",
      (self._project, kind),
      [item.client_id for item in listed],
    )
    if kind == "rollout":
      rows += self._sql.among(
        "SELECT 1 FROM rollout WHERE rollout_id {among}",
        (),
        [item.values["rollout_id"] for item in listed],
      )
    return bool(rows)
