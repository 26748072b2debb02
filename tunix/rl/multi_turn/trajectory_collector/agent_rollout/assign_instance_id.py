"""Gives each line of a task file an instance id.

    m=tunix.rl.multi_turn.trajectory_collector.agent_rollout
    python -m $m.assign_instance_id --input_path tasks.jsonl

writes tasks_processed.jsonl, or --output_path; --task_type begins the ids.

Promises: ids are unique; a row's own id stays; blank lines are left out;
a line that is no object is refused with its number; the output is replaced in
one step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Iterable, Iterator, Sequence

from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text

ID = "instance_id"


def rows_of(lines: Iterable[str], where: str) -> Iterator[tuple[int, Any]]:
  """(number of the line, its object) of every line that is not blank.

  Raises:
    ValueError: a line that is no JSON object, or an id that is no text or
      whole number.
  """
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json_text.parse(line)
    except ValueError as error:
      raise ValueError(f"{where}, line {number}: no JSON: {error}") from None
    if not isinstance(row, dict):
      raise ValueError(f"{where}, line {number}: no JSON object")
    instance_id = row.get(ID)
    if instance_id is not None and (
      isinstance(instance_id, bool)
      or not isinstance(instance_id, (str, int))
      or instance_id == ""
    ):
      raise ValueError(
        f"{where}, line {number}: instance_id={instance_id!r} must be text"
        " or a whole number"
      )
    yield number, row


def assign(
  lines: Iterable[str], task_type: str, where: str = "the input"
) -> list[dict[str, Any]]:
  """Rows with ids: `{task_type}_{n}` for the n-th, or the next that is free.

  Raises:
    ValueError: see `rows_of`; or two rows that bring the same id.
  """
  rows = list(rows_of(lines, where))
  counts: dict[str, int] = {}
  for number, row in rows:
    if row.get(ID) is None:
      continue
    name = str(row[ID])
    if name in counts:
      raise ValueError(
        f"{where}, line {number}: instance_id={name} is that of line"
        f" {counts[name]} too; make one of them another"
      )
    counts[name] = number
  out, following = [], 0
  for place, (number, row) in enumerate(rows):
    if row.get(ID) is None:
      following = max(following, place)
      while f"{task_type}_{following}" in counts:
        following += 1
      name = f"{task_type}_{following}"
      counts[name] = number
      row = {**row, ID: name}
    out.append(row)
  return out


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="assign_instance_id", description=(__doc__ or "").partition("\n")[0]
  )
  parser.add_argument("--input_path", required=True, type=pathlib.Path)
  parser.add_argument("--task_type", default="math")
  parser.add_argument("--output_path", type=pathlib.Path)
  args = parser.parse_args(argv)
  source = args.input_path
  default_target = source.with_name(f"{source.stem}_processed.jsonl")
  target = args.output_path or default_target
  try:
    with source.open(encoding="utf-8") as file:
      rows = assign(file, args.task_type, str(source))
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    durable.write_text(target, text)
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  print(f"{len(rows)} tasks in {target}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
