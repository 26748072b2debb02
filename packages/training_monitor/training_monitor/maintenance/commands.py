"""The commands `export`, `import`, `prune` and `doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from typing import Callable, Iterator

import sqlalchemy as sa

from training_monitor.maintenance import doctor
from training_monitor.maintenance import pruning
from training_monitor.maintenance import run_files
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database

MaintenanceError = runs_lib.MaintenanceError
FilesOf = Callable[[str, str], pathlib.Path]


def add(commands: argparse._SubParsersAction) -> list[argparse.ArgumentParser]:
  """Adds the commands; each sets `call`, (args, files_of) -> exit status.

  Returns:
    Their parsers, for what all commands of the monitor have.
  """
  export = commands.add_parser("export", help="write a run into a file")
  export.add_argument("file", type=pathlib.Path, help="to be made, a .jsonl")
  export.add_argument("--run", required=True, help="name or id")
  export.add_argument("--no-screenshots", action="store_true")
  export.add_argument(
    "--force", action="store_true", help="replace a file that is there"
  )
  bring = commands.add_parser("import", help="take a run from such a file")
  bring.add_argument("file", type=pathlib.Path)
  prune = commands.add_parser(
    "prune",
    help="delete runs, and screenshots that no episode shows",
    description="Deletes the runs that all given criteria hold for, then"
    " screenshots that no observation shows. Runs under way and pinned"
    " baselines stay.",
  )
  prune.add_argument(
    "--older-than",
    type=_age,
    metavar="30d",
    help="not heard of for so long (m, h, d, w)",
  )
  prune.add_argument(
    "--dry-run", action="store_true", help="only list what would be deleted"
  )
  look = commands.add_parser(
    "doctor",
    help="find faults and their fixes",
    description="Exits with 1 if something is lost, damaged or about to be.",
  )
  look.add_argument(
    "--spool",
    type=pathlib.Path,
    action="append",
    default=[],
    help="a folder of spools to look into, monitor_spool beside the runs;"
    " may be repeated",
  )
  look.add_argument(
    "--deep", action="store_true", help="read every screenshot, too"
  )
  look.add_argument("--json", action="store_true", help="an object a line")
  prune.add_argument(
    "--run", action="append", default=[], help="name or id; may be repeated"
  )
  for one in (export, bring, prune):
    one.add_argument("--project", default="")
  parsers = [export, bring, prune, look]
  for one, call in zip(parsers, (_export, _import, _prune, _doctor)):
    one.set_defaults(call=call)
    one.add_argument(
      "--files",
      default="",
      help="folder of screenshots and videos (beside the SQLite file)",
    )
  return parsers


def _age(text: str) -> float:
  try:
    return pruning.seconds(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from None


@contextlib.contextmanager
def _opened(target: str, *, make: bool = False) -> Iterator[sa.Engine]:
  """Opens an upgraded database; `make` makes a missing one."""
  url = database.url_of(target)
  if url.get_backend_name() == "sqlite" and not make:
    if not database.file_of(url).exists():
      raise MaintenanceError(
        f"--database={target}: there is no such file; it is monitor.db beside"
        " the runs, or what the server was started with"
      )
  engine = database.connect(target)
  try:
    database.upgrade(engine)
    yield engine
  finally:
    engine.dispose()


def _export(args: argparse.Namespace, files_of: FilesOf) -> int:
  if args.file.exists() and not args.force:
    raise MaintenanceError(
      f"{args.file} is there already; give another name, or --force"
    )
  files = files_of(args.database, args.files)
  with _opened(args.database) as engine:
    written = run_files.export(
      engine,
      files,
      args.file,
      args.run,
      project=args.project,
      with_screenshots=not args.no_screenshots,
    )
  print(
    f"{args.file}: run {written.run}, {written.rows} rows,"
    f" {written.screenshots} screenshots,"
    f" {args.file.stat().st_size / 1e6:.1f} MB"
  )
  if written.missing:
    print(
      f"{len(written.missing)} screenshots are shown and not here, the first"
      f" {written.missing[0]}",
      file=sys.stderr,
    )
  return 0


def _import(args: argparse.Namespace, files_of: FilesOf) -> int:
  files = files_of(args.database, args.files)
  if not args.file.exists():
    raise MaintenanceError(f"{args.file}: there is no such file")
  with _opened(args.database, make=True) as engine:
    brought = run_files.import_(engine, files, args.file, project=args.project)
  if brought.rows:
    print(
      f"run {brought.run} imported: {brought.rows} rows,"
      f" {brought.screenshots} screenshots"
    )
  else:
    print(f"run {brought.run} is here already")
  return 0


def _prune(args: argparse.Namespace, files_of: FilesOf) -> int:
  criteria = pruning.Criteria(args.project, tuple(args.run), args.older_than)
  if not criteria.chooses and args.project:
    raise MaintenanceError(
      "prune: which runs? give --run or --older-than"
      " (--older-than 0m is every run that is not under way)"
    )
  files = files_of(args.database, args.files)
  with _opened(args.database) as engine:
    outcome = pruning.prune(engine, files, criteria, dry_run=args.dry_run)
  would = "would delete" if args.dry_run else "deleted"
  for run in outcome.runs:
    print(f"{would} run {run.name} ({run.project}, {run.status})")
  for run in outcome.active:
    print(f"left run {run.name}, which is {run.status}")
  for run in outcome.pinned:
    print(
      f"left run {run.name}, which is the baseline of {run.project}; unpin"
      " it first"
    )
  print(
    f"{would} {len(outcome.runs)} runs,"
    f" {'' if args.dry_run else f'{outcome.rows} rows, '}"
    f"{outcome.screenshots} screenshots ({outcome.bytes / 1e6:.1f} MB)"
  )
  return 0


def _doctor(args: argparse.Namespace, files_of: FilesOf) -> int:
  worst = doctor.OK
  for finding in doctor.examine(
    args.database,
    files_of(args.database, args.files),
    args.spool,
    deep=args.deep,
  ):
    if args.json:
      print(json.dumps(vars(finding)), flush=True)
    else:
      print(f"{finding.level:<8} {finding.subject}: {finding.text}", flush=True)
      if finding.advice:
        print(f"{'':9}→ {finding.advice}", flush=True)
    if finding.level == doctor.ERROR or worst == doctor.OK:
      worst = finding.level
  return int(worst == doctor.ERROR)
