"""Lists of tasks from gym servers, files and datasets, split and filtered.

Promises: the same configuration and the same list give the same tasks in the
same order. A task's split depends on the whole list and the seed alone: names,
tags and limits choose within a split, so that no choice of them can bring a
held-out task into training.

The steps, in this order:

1. the list is read, its own order kept; two tasks of one id are refused;
2. the split: by `eval_number_range` if given; else as the list itself says, if
   it does for every task; else the list is shuffled by `seed` and cut at
   `int(len * train_ratio)`;
3. `task_names`, each resolved as `cua_task.resolve` does;
4. `tags`, any of them, whatever their case;
5. `limit`, a sample drawn by `seed`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import re
from typing import Any, Iterable, Mapping, Sequence

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.environments.gyms.genv import client as genv_client
from tunix.rl.multi_turn.environments.gyms.genv import gym as genv_gym
from tunix.rl.multi_turn.environments.task_sources import cua_task

SOURCE_TYPES = ("gym", "jsonl", "huggingface")
SPLITS = ("train", "eval")
CUATask = cua_task.CUATask


@dataclasses.dataclass(frozen=True)
class TaskSourceConfig:
  """Where tasks come from, and which of them.

  Attributes:
    source_type: "gym", a server's list; "jsonl", a file with a row a line;
      "huggingface", a dataset saved to a directory, or its name.
    gym_base_url, gym_id: of the server; for the other types, recorded in
      tasks that name none.
    train_ratio: share of the tasks that are for training.
    split_type: "train", "eval", or None for both.
    task_names: ids, names or numbers; None for all.
    limit: at most so many; None for all.
    eval_number_range: "001-032", numbers of the held-out tasks; None splits
      by ratio.
    tags: None for all.
    seed: of the split and of the limit's sample.
    path: file, directory or dataset's name.
    dataset_split: of a dataset with several, e.g. "train".
    token_file: holds the server's token; else $TUNIX_GYM_TOKEN does.
    timeout_s: deadline of reading the list, tries included.
  """

  source_type: str = "gym"
  gym_base_url: str = genv_client.DEFAULT_BASE_URL
  gym_id: str = "desktop"
  train_ratio: float = 0.8
  split_type: str | None = None
  task_names: Sequence[str] | None = None
  limit: int | None = None
  eval_number_range: str | None = None
  tags: Sequence[str] | None = None
  seed: int = 42
  path: str = ""
  dataset_split: str = "train"
  token_file: str = ""
  timeout_s: float = 120.0

  def __post_init__(self):
    if self.source_type not in SOURCE_TYPES:
      raise ValueError(
          f"source_type={self.source_type!r} must be one of"
          f" {', '.join(SOURCE_TYPES)}"
      )
    if self.split_type not in (None, *SPLITS):
      raise ValueError(
          f"split_type={self.split_type!r} must be train, eval or None"
      )
    if not 0 <= self.train_ratio <= 1:
      raise ValueError(f"train_ratio={self.train_ratio} must be in [0, 1]")
    if self.limit is not None and self.limit < 1:
      raise ValueError(f"limit={self.limit} must be >= 1, or None for all")
    if self.source_type != "gym" and not self.path:
      raise ValueError(
          f"source_type={self.source_type} needs path, a"
          f" {'file' if self.source_type == 'jsonl' else 'dataset'}"
      )
    for name in ("task_names", "tags"):
      value = getattr(self, name)
      if isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a list of strings")
    number_range(self.eval_number_range)


def number_range(text: str | None) -> range | None:
  """"001-032" as the numbers 1 to 32; "7" is that one; None stays None.

  Raises:
    ValueError: not of that form, or its end comes before its beginning.
  """
  if not text:
    return None
  match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", text)
  first = int(match[1]) if match else 0
  last = int(match[2] or match[1]) if match else -1
  if last < first:
    raise ValueError(
        f"eval_number_range={text!r} must be two numbers with a dash, the"
        " smaller first, e.g. 001-032"
    )
  return range(first, last + 1)


def load_tasks_from_config(config: TaskSourceConfig) -> list[CUATask]:
  """The tasks; see the module docstring. Blocks.

  Raises:
    ValueError: a row that is no task, or nothing is left.
    UnknownTaskError: a name that no task, or several, have.
    GenvError: the server's list cannot be had.
    OSError: the file cannot be read.
  """
  return select(read_all(config), config)


def load_tasks_from_multiple_sources(
    configs: Iterable[TaskSourceConfig],
) -> list[CUATask]:
  """The tasks of several sources, one after the other.

  A task that two sources have (the same id of the same server) is taken from
  the first.

  Raises:
    ValueError: two servers or files have different tasks of one id; and as
      `load_tasks_from_config`.
  """
  found: dict[str, CUATask] = {}
  for config in configs:
    for task in load_tasks_from_config(config):
      other = found.setdefault(task.id, task)
      if (other.gym_base_url, other.gym_id) != (task.gym_base_url, task.gym_id):
        raise ValueError(
            f"two sources have a task {task.id!r}:"
            f" {_place(other)} and {_place(task)}; leave it out of one, by"
            " task_names or tags"
        )
  return list(found.values())


def _place(task: CUATask) -> str:
  return f"{task.gym_base_url or 'a file'} ({task.gym_id or 'no gym'})"


# --- reading ------------------------------------------------------------------


def read_all(config: TaskSourceConfig) -> list[CUATask]:
  """Every task of the source, in its order; see `load_tasks_from_config`."""
  if config.source_type == "gym":
    tasks = concurrency.call(
        _read_server, config, seconds=config.timeout_s + 10.0,
        what=f"the task list of {config.gym_base_url}",
    )  # pyformat: disable
  elif config.source_type == "jsonl":
    tasks = _from_rows(_jsonl(config.path), config)
  else:
    tasks = _from_rows(_dataset(config), config)
  seen: dict[str, int] = {}
  for i, task in enumerate(tasks, 1):
    if task.id in seen:
      raise ValueError(
          f"{_name(config)}: tasks {seen[task.id]} and {i} have one id,"
          f" {task.id!r}; an id stands for one task"
      )
    seen[task.id] = i
  return tasks


async def _read_server(config: TaskSourceConfig) -> list[CUATask]:
  client = genv_client.GenvClient(
      config.gym_base_url,
      config.gym_id,
      token=genv_gym.read_token(config.token_file),
      timeouts=genv_client.Timeouts(tasks=config.timeout_s),
  )
  try:
    return await concurrency.with_deadline(
        # Later than that of a single call, which says more.
        client.list_tasks(full=True), config.timeout_s + 2.0,
        f"the task list of {config.gym_base_url}",
    )  # pyformat: disable
  finally:
    await client.aclose()


def _jsonl(path: str) -> Iterable[tuple[str, Any]]:
  with open(pathlib.Path(path).expanduser(), encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      where = f"{path}, line {number}"
      try:
        yield where, json.loads(line)
      except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None


def _dataset(config: TaskSourceConfig) -> Iterable[tuple[str, Any]]:
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
        "source_type=huggingface needs the datasets package; pip install"
        " datasets, or use jsonl"
    ) from error
  path = pathlib.Path(config.path).expanduser()
  if path.is_dir():
    rows = datasets.load_from_disk(str(path))
    if isinstance(rows, datasets.DatasetDict):
      if config.dataset_split not in rows:
        raise ValueError(
            f"dataset_split={config.dataset_split!r}: {path} has"
            f" {', '.join(rows)}"
        )
      rows = rows[config.dataset_split]
  else:
    rows = datasets.load_dataset(config.path, split=config.dataset_split)
  for number, row in enumerate(rows, 1):
    yield f"{config.path}, row {number}", row


def _from_rows(
    rows: Iterable[tuple[str, Any]], config: TaskSourceConfig
) -> list[CUATask]:
  return [CUATask.from_row(row, where=where) for where, row in rows]


def _name(config: TaskSourceConfig) -> str:
  return config.path or f"{config.gym_base_url} ({config.gym_id})"


# --- choosing -----------------------------------------------------------------


def select(
    tasks: Sequence[CUATask], config: TaskSourceConfig
) -> list[CUATask]:
  """Steps 2 to 5 of the module docstring.

  Raises:
    ValueError: nothing is left.
    UnknownTaskError: a name that no task, or several, have.
  """
  chosen = list(range(len(tasks)))
  if config.split_type is not None:
    chosen = sorted(_split(tasks, config)[config.split_type])
  if config.task_names is not None:
    wanted = {cua_task.resolve(n, tasks).id for n in config.task_names}
    chosen = [i for i in chosen if tasks[i].id in wanted]
  if config.tags is not None:
    tags = {t.lower() for t in config.tags}
    chosen = [
        i for i in chosen if tags & {t.lower() for t in tasks[i].tags}
    ]
  if config.limit is not None and config.limit < len(chosen):
    drawn = random.Random(f"{config.seed}/limit").sample(chosen, config.limit)
    chosen = sorted(drawn)
  if not chosen:
    raise ValueError(
        f"{_name(config)}: none of {len(tasks)} tasks is left by"
        f" split_type={config.split_type}, train_ratio={config.train_ratio},"
        f" eval_number_range={config.eval_number_range},"
        f" task_names={config.task_names}, tags={config.tags}"
    )
  return [tasks[i] for i in chosen]


def _split(
    tasks: Sequence[CUATask], config: TaskSourceConfig
) -> Mapping[str, set[int]]:
  """Positions of the training and the held-out tasks."""
  everything = set(range(len(tasks)))
  numbers = number_range(config.eval_number_range)
  if numbers is not None:
    held = {
        i for i in everything
        if re.fullmatch(r"[0-9]{1,9}", tasks[i].number)
        and int(tasks[i].number) in numbers
    }  # pyformat: disable
    return {"train": everything - held, "eval": held}
  if tasks and all(t.split for t in tasks):
    held = {i for i in everything if tasks[i].split == "eval"}
    return {"train": everything - held, "eval": held}
  order = list(everything)
  random.Random(config.seed).shuffle(order)
  cut = int(len(order) * config.train_ratio)
  return {"train": set(order[:cut]), "eval": set(order[cut:])}


# --- for trainers that read datasets ------------------------------------------


def to_dataset(tasks: Sequence[CUATask]) -> Any:
  """A `datasets.Dataset` with a row a task; `params` is JSON text.

  Raises:
    ImportError: datasets is not installed.
  """
  import datasets  # pylint: disable=g-import-not-at-top

  rows = [t.to_row() for t in tasks]
  return datasets.Dataset.from_list([
      {**row, "params": json.dumps(row["params"], sort_keys=True)}
      for row in rows
  ])


class TaskBatches:
  """Batches of groups, each group one task several times.

  `batches[i]` is a list of up to `groups_per_batch` groups; the last batch may
  have fewer. Beyond it there is an IndexError.
  """

  def __init__(
      self, tasks: Sequence[CUATask], groups_per_batch: int, group_size: int
  ):
    if groups_per_batch < 1 or group_size < 1:
      raise ValueError(
          "groups_per_batch and group_size must be >= 1, got"
          f" {groups_per_batch} and {group_size}"
      )
    self._tasks = tuple(tasks)
    self._groups = groups_per_batch
    self._size = group_size

  def __len__(self) -> int:
    return -(-len(self._tasks) // self._groups)

  def __getitem__(self, index: int) -> list[list[CUATask]]:
    if not 0 <= index < len(self):
      raise IndexError(f"batch {index} of {len(self)}")
    first = index * self._groups
    return [
        [task] * self._size
        for task in self._tasks[first : first + self._groups]
    ]
