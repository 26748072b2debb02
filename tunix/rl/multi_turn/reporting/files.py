"""Reads and writes the observers' files: atomic JSON, tolerant JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
from typing import Any, Callable, Iterator, Mapping

import numpy as np
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text

_LOG = logging.getLogger(__name__)


def plain(value: object) -> Any:
  """`value` as strict JSON: numpy as numbers, non-finite ones as null."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple, set, frozenset)):
    return [plain(v) for v in value]
  if isinstance(value, np.ndarray):
    return plain(value.tolist())
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, os.PathLike):
    return str(value)
  if hasattr(value, "__float__"):  # A scalar on a device.
    return plain(float(value))
  return str(value)


def write_json(
  path: pathlib.Path, data: object, *, durably: bool = True
) -> None:
  """Replaces `path` in one step: a reader sees the old file or the new one.

  Args:
    path: the file; its directory is made.
    data: see `plain`.
    durably: return once it is on the disk.

  Raises:
    OSError: the disk's; the old file is as it was.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(plain(data), indent=2, ensure_ascii=False)
  durable.write_bytes(path, (text + "\n").encode("utf-8"), durably)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in `path`; {} when it is missing or broken."""
  try:
    data = json_text.read(path)
  except (OSError, ValueError):
    return {}
  return data if isinstance(data, dict) else {}


def read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The objects of a JSON-lines file; a torn last line is passed over."""
  if not path.exists():
    return
  with path.open("r", encoding="utf-8", errors="replace") as file:
    for line in file:
      try:
        data = json_text.parse(line)
      except ValueError:
        continue
      if isinstance(data, dict):
        yield data


def rewrite_lines(
  path: pathlib.Path, keep: Callable[[dict[str, Any]], bool]
) -> int:
  """Drops the lines whose object `keep` refuses, in one step.

  A line that a kill or the disk has damaged, so that it is no JSON object, is
  dropped as well, and counted in the log.

  Returns:
    How many lines were kept.

  Raises:
    OSError: the disk's; the old file is as it was.
  """
  remaining = damaged = 0
  partial = path.with_name(f"{path.name}.part")
  try:
    with (
      path.open("r", encoding="utf-8", errors="replace") as old,
      partial.open("w", encoding="utf-8") as new,
    ):
      for line in old:
        try:
          data = json_text.parse(line)
        except ValueError:
          data = None
        if not isinstance(data, dict):
          damaged += bool(line.strip())
        elif keep(data):
          new.write(line if line.endswith("\n") else line + "\n")
          remaining += 1
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  if damaged:
    _LOG.warning(
      "%s: %d lines are no JSON objects and were left out; the %d others stay",
      path,
      damaged,
      remaining,
    )
  return remaining
