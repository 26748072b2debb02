"""Places the processes of a run in its directory, and keeps their number.

Group k of process i of n has the number `k * n + i` in the run, and so do its
task and its seeds; each process has a queue of its own. So a run resumes with
as many processes as it was begun with; another number is refused.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.net import peers as peers_lib

PARTS = "processes"
"""Subdirectory of a run that holds those of its processes, but the first's."""
QUEUE = "queue.db"
"""Name of the queue's file in each process's directory."""
_FILE = "layout.json"


def directory_of(directory: pathlib.Path, index: int) -> pathlib.Path:
  """The part of a run's directory that belongs to a process."""
  return directory / PARTS / str(index) if index else directory


def read(directory: pathlib.Path) -> int:
  """Number of the processes that a run was begun with.

  Raises:
    ConfigError: its file is damaged.
  """
  file = directory / PARTS / _FILE
  try:
    return int(json_text.read(file)["processes"])
  except FileNotFoundError:
    return 1
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise config_lib.ConfigError(
      [f"{file} cannot be read: {error!r}; restore it from a copy"]
    ) from None


def claim(directory: pathlib.Path, count: int, resuming: bool) -> None:
  """Records a new run's number of processes; by process 0 alone.

  Raises:
    ConfigError: The run that is resumed was begun with another number.
    OSError: The directory cannot be written.
  """
  if resuming and (before := read(directory)) != count:
    raise config_lib.ConfigError(
      [
        f"{directory} is a run of {before} processes and this one has {count}:"
        f" each has a queue and tasks of its own; resume with {before}"
      ]
    )
  if count > 1 and not resuming:
    file = directory / PARTS / _FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(file, json.dumps({"processes": count}))


def own_extras(
  extras: Mapping[str, Any], processes: peers_lib.Peers
) -> dict[str, Any]:
  """The part of a checkpoint's extras that belongs to this process."""
  parts = extras.get(loop_lib.PROCESSES) or [extras]
  return {**extras, **parts[processes.index]}
