"""Deals a run anew when it resumes with another number of processes.

Group k of process i of n has the number `k * n + i` in the run, and so do its
task and its seeds. A number belongs to process `number % m` of m: stored
groups, unfinished tasks, acknowledgements and counts move there, and tasks
continue behind the first number that no process had begun.

Promises: a kill while groups move leaves the old layout or the new one whole.
No group is trained on twice, and none that was accepted is lost.

Does not: move trajectories or images, which stay where they were written; deal
a curriculum, whose draws depend on what each process has seen, or parts of
groups, whose numbers in a queue are not their groups'.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import sqlite3
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.queue import group_store

PARTS = "processes"
"""Subdirectory of a run that holds those of its processes, but the first's."""
_FILE = "layout.json"
_COLLECT, _COUNTS, _NEXT = "collect", "counts", "next_index"


@dataclasses.dataclass(frozen=True)
class Layout:
  """Places of the processes' queues.

  Attributes:
    processes: Number of processes with a queue.
    generation: how often they were dealt anew.
  """

  processes: int = 1
  generation: int = 0

  @property
  def queue(self) -> str:
    """Name of the queue's file in each process's directory."""
    return f"queue-{self.generation}.db" if self.generation else "queue.db"

  def files(self, directory: pathlib.Path) -> list[pathlib.Path]:
    return [
      directory_of(directory, i) / self.queue for i in range(self.processes)
    ]


def directory_of(directory: pathlib.Path, index: int) -> pathlib.Path:
  """The part of a run's directory that belongs to a process."""
  return directory / PARTS / str(index) if index else directory


def read(directory: pathlib.Path) -> Layout:
  """The layout of a run's directory.

  Raises:
    ConfigError: its file is damaged.
  """
  file = directory / PARTS / _FILE
  try:
    return Layout(**json_text.read(file))
  except FileNotFoundError:
    folders = (directory / PARTS).glob("*")
    numbers = [int(p.name) for p in folders if p.name.isdigit()]
    return Layout(1 + max(numbers, default=0))
  except (OSError, ValueError, TypeError) as error:
    raise config_lib.ConfigError(
      [f"{file} cannot be read: {error}; restore it from a copy"]
    ) from None


def adopt(directory: pathlib.Path, count: int) -> Layout:
  """Makes a run's directory one of `count` processes; by process 0 alone.

  Raises:
    ConfigError: a queue's file cannot be read or written.
    OSError: the directory cannot be written.
  """
  old = read(directory)
  if old.processes == count:
    new = old
  else:
    new = Layout(count, old.generation + 1)
    targets = new.files(directory)
    for file in targets:
      file.parent.mkdir(parents=True, exist_ok=True)
    try:
      if any(file.exists() for file in old.files(directory)):
        group_store.redeal(old.files(directory), targets)
    except sqlite3.Error as error:
      raise config_lib.ConfigError(
        [
          f"the queues of {old.processes} processes in {directory} cannot be"
          f" dealt to {count}: {error}; resume with {old.processes}, or restore"
          " them from a copy"
        ]
      ) from None
    for file in targets:
      if file.exists():
        durable.sync(file)
        durable.sync(file.parent)
  file = directory / PARTS / _FILE
  if count > 1 or new != old or file.exists():
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(file, json.dumps(dataclasses.asdict(new)))
  if new != old:
    for leftover in old.files(directory):
      for suffix in ("", "-wal", "-shm"):
        leftover.with_name(leftover.name + suffix).unlink(missing_ok=True)
  return new


def check(
  directory: pathlib.Path, count: int, config: config_lib.TrainConfig
) -> None:
  """Refuses queues that cannot be dealt to `count` processes.

  Call it before `adopt`, which deals them.

  Raises:
    ConfigError: naming the setting; or the layout's file is damaged.
  """
  old = read(directory)
  if old.processes == count or not (why := _undealable(config)):
    return
  if any(file.exists() for file in old.files(directory)):
    raise config_lib.ConfigError(
      [
        f"{directory} has the queues of {old.processes} processes and this run"
        f" has {count}: {why}; resume with {old.processes}"
      ]
    )


def own_extras(
  extras: Mapping[str, Any],
  processes: peers_lib.Peers,
  config: config_lib.TrainConfig,
) -> dict[str, Any]:
  """The part of a checkpoint's extras that belongs to this process.

  Args:
    extras: Extras of a checkpoint by any number of processes.
    processes: Processes that resume from it.
    config: Settings of the run.

  Raises:
    ConfigError: The parts cannot be dealt to this number of processes.
  """
  parts = extras.get(loop_lib.PROCESSES) or [extras]
  if len(parts) == processes.count:
    return {**extras, **parts[processes.index]}
  if why := _undealable(config):
    raise config_lib.ConfigError(
      [
        f"the checkpoint is of {len(parts)} processes and this run has"
        f" {processes.count}: {why}; resume with {len(parts)}"
      ]
    )
  return {**extras, **_deal(parts, processes.index, processes.count)}


def _undealable(config: config_lib.TrainConfig) -> str:
  if config.task_source.order == "curriculum":
    return (
      "task_source.order=curriculum draws each process's tasks by what that"
      " process has seen"
    )
  if config.collect.parts > 1:
    return (
      f"collect.part_size={config.collect.part_size} queues each part of a"
      " group under a number of its own, and its parts would be dealt to"
      " different processes"
    )
  if not config.queue.path and not config.lockstep:
    return (
      'with queue.path="" nothing records which groups were trained on out'
      " of their order"
    )
  return ""


def _deal(
  parts: Sequence[Mapping[str, Any]], index: int, count: int
) -> dict[str, Any]:
  """The extras of process `index` of `count`, from those of each before."""
  of = len(parts)
  states = [part[_COLLECT] for part in parts]
  # All smaller numbers were begun by the process that had them.
  frontier = min(s[_NEXT] * of + i for i, s in enumerate(states))
  unfinished = []
  for i, state in enumerate(states):
    for item in state["unfinished"]:
      number = -1 if item["index"] is None else item["index"] * of + i
      # Those behind the frontier are drawn again.
      if 0 <= number < frontier and number % count == index:
        unfinished.append({**item, "index": number // count})
  begun = max(0, -((index - frontier) // count))
  consumed = [
    number // count
    for i, part in enumerate(parts)
    for number in (k * of + i for k in part.get(loop_lib.CONSUMED, ()))
    if number % count == index
  ]
  return {
    _COLLECT: {
      "sampler": _sampler(states[0]["sampler"], of, begun, index, count),
      _NEXT: begun,
      "unfinished": sorted(unfinished, key=lambda item: item["index"]),
    },
    _COUNTS: _counts([part.get(_COUNTS) or {} for part in parts], index, count),
    loop_lib.CONSUMED: sorted(consumed),
  }


def _sampler(
  state: Mapping[str, Any], of: int, begun: int, index: int, count: int
) -> dict[str, Any]:
  """A sampler's state after `begun` draws by process `index` of `count`.

  See `tasks.TrainTasks` and `tasks.DealtTasks`.
  """
  inner = dict(state if of == 1 else state["sampler"])
  if count == 1:
    return {**inner, "position": begun}
  position = (begun - 1) * count + index + 1 if begun else 0
  return {"begun": bool(begun), "sampler": {**inner, "position": position}}


def _counts(
  parts: Sequence[Mapping[str, Any]], index: int, count: int
) -> dict[str, Any]:
  """Counts of training: those of a group lie with the process that has it."""
  accepted = {}
  for part in parts:
    for group, counts in (part.get("accepted") or {}).items():
      number = group.rpartition("-")[2]
      owner = int(number) % count if number.isdigit() else 0
      if owner == index:
        accepted[group] = counts
  settled: dict[str, collections.Counter[str]] = {}
  for part in parts if index == 0 else ():
    for kind, counts in (part.get("settled") or {}).items():
      settled.setdefault(kind, collections.Counter()).update(counts)
  return {
    "settled": {kind: dict(counts) for kind, counts in settled.items()},
    "accepted": accepted,
  }
