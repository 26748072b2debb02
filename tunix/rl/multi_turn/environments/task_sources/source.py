"""Reads lists of tasks (a gym's own, files, datasets), splits and filters them.

Promises: the same configuration and the same list give the same tasks in the
same order. A task's split depends on the whole list and the seed alone: names,
tags and limits choose within a split, so that no choice of them can bring a
held-out task into training.

The steps, in this order:

1. the list is read, its own order kept; two tasks of one id are refused;
2. the split: by `eval_names` or `eval_number_range` if given; else by the
   list's own field, if every task has it; else the list is shuffled by `seed`
   and cut at `int(len * train_ratio)`;
3. `names`, each resolved as `cua_task.resolve` does, but not among
   `eval_names`;
4. `tags`, any of them, whatever their case;
5. `limit` or `eval_limit`, a sample drawn by `seed`.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
from typing import Any, Callable, Iterable, Iterator, Literal, Mapping, Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.environments.task_sources import cua_task

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
CUATask = cua_task.CUATask
_FILES = ("jsonl", "huggingface")
_OF_LISTS = (
  "eval_names",
  "eval_number_range",
  "names",
  "tags",
  "limit",
  "eval_limit",
)
_NO_OPTIONS: Mapping[str, Any] = {}
_set = settings_lib.setting


@settings_lib.settings
class TaskSourceConfig:
  """The tasks that a run trains and is evaluated on, and their order."""

  families: tuple[str, ...] = _set(
    default=(),
    doc="Task families to train and evaluate on, each equally often. [] = all"
    " that the gym or the list has.",
  )
  source: Literal["generated", "gym", "jsonl", "huggingface"] = _set(
    default="generated",
    doc="generated: the gym makes them, without end. gym: the list of the gym"
    " server in gym.options. jsonl, huggingface: task_source.path.",
  )
  path: str = _set(
    default="",
    doc="A file with a JSON object a line; a dataset's directory or name.",
  )
  dataset_split: str = _set(default="train", doc="Of a dataset with several.")
  train_ratio: float = _set(
    default=0.8,
    doc="Share of a list that is for training, drawn by task_source.seed,"
    " unless the list has a split of its own.",
    gt=0,
    le=1,
  )
  eval_number_range: str = _set(
    default="",
    doc='Numbers of the tasks that are held out, e.g. "001-032". "" = by'
    " task_source.train_ratio.",
  )
  eval_names: tuple[str, ...] = _set(
    default=(),
    doc="Ids, names or numbers of a list's tasks that are held out. [] = by"
    " task_source.eval_number_range or train_ratio.",
  )
  names: tuple[str, ...] = _set(
    default=(), doc="Ids, names or numbers of a list's tasks. [] = all."
  )
  tags: tuple[str, ...] = _set(
    default=(), doc="Only tasks of a list with one of these tags. [] = all."
  )
  limit: int = _set(
    default=0, doc="Most training tasks of a list. 0 = all.", ge=0
  )
  eval_limit: int = _set(
    default=0, doc="Most held-out tasks of a list. 0 = all.", ge=0
  )
  seed: int = _set(default=42, doc="Of the split and the limits.", ge=0)
  order: Literal["in_turn", "curriculum"] = _set(
    default="in_turn",
    doc="in_turn: the families one after the other, a list shuffled anew each"
    " time. curriculum: tasks that are neither hopeless nor always solved are"
    " drawn more often; of a list each task, else each family by itself.",
  )
  levels: tuple[int, ...] = _set(
    default=(),
    doc="Difficulties that a curriculum trains on, each family at each by"
    " itself, so that harder tasks come as easier ones are solved; e.g."
    " [0,1,2] (desktop). Evaluation stays at gym.options.difficulty. [] ="
    " that one only.",
  )
  curriculum_floor: float = _set(
    default=0.1,
    doc="Least weight of a task in the curriculum; one that is solved half of"
    " the time has 1.",
    gt=0,
    le=1,
  )
  curriculum_decay: float = _set(
    default=0.7,
    doc="Share that a task's success rate keeps when a group of it comes in.",
    ge=0,
    le=0.999,
  )

  def problems(self) -> Iterator[str]:
    file = self.source in _FILES
    if file and not self.path:
      yield (
        f"path= is empty, and source={self.source} needs path to be a"
        f" {'file' if self.source == 'jsonl' else 'dataset'}"
      )
    if self.path and not file:
      yield (
        f"path={self.path} is not read with source={self.source}; set it to"
        " jsonl or huggingface"
      )
    for name in _OF_LISTS:
      if self.source == "generated" and getattr(self, name):
        yield (
          f"{name}={getattr(self, name)} chooses from a list, and"
          " source=generated has none; set it to gym, jsonl or huggingface"
        )
    if self.levels and self.order != "curriculum":
      yield (
        f"levels={list(self.levels)} are drawn by a curriculum, and"
        f" order={self.order}; set order=curriculum, or for one level"
        " gym.options.difficulty"
      )
    if self.levels and self.source != "generated":
      yield (
        f"levels={list(self.levels)} are of tasks that a gym makes, and"
        f" source={self.source} has a list; leave levels out"
      )
    for name in ("families", "names", "eval_names", "levels"):
      value = getattr(self, name)
      if len(set(value)) != len(value):
        yield f"{name}={list(value)} has one twice; name each once"
    if self.eval_names and self.eval_number_range:
      yield (
        f"eval_names={list(self.eval_names)} and eval_number_range="
        f"{self.eval_number_range!r} both say what is held out; give one"
      )
    try:
      number_range(self.eval_number_range)
    except ValueError as error:
      yield str(error)


def number_range(text: str) -> range | None:
  """ "001-032" as the numbers 1 to 32; "7" is that one; "" is None.

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


def load_tasks_from_config(
  config: TaskSourceConfig,
  split: Split | None = None,
  *,
  gym: str = "genv",
  options: Mapping[str, Any] = _NO_OPTIONS,
) -> list[CUATask]:
  """Returns the tasks of a list; see the module docstring. Blocks.

  Args:
    config: Settings whose source is not "generated".
    split: "train" or "eval"; None for both.
    gym: Name of the gym whose list is read, for source="gym".
    options: Options of that gym, e.g. base_url, gym_id, token_file.

  Raises:
    ValueError: a row that is not a task, or nothing is left.
    UnknownTaskError: a name that no task, or several, have.
    GenvError: the server's list cannot be read.
    OSError: the file cannot be read.
  """
  return select(read(config, gym, options), config, split)


def load_tasks_from_multiple_sources(
  sources: Iterable[
    TaskSourceConfig | tuple[TaskSourceConfig, Mapping[str, Any]]
  ],
  split: Split | None = None,
  *,
  gym: str = "genv",
) -> list[CUATask]:
  """Returns the tasks of several lists, one after the other.

  A task that two lists have (the same id of the same server) is taken from the
  first.

  Args:
    sources: configurations, one with source="gym" in a pair with its gym's
      options.
    split, gym: See `load_tasks_from_config`.

  Raises:
    ValueError: two servers or files have different tasks of one id; and as
      `load_tasks_from_config`.
  """
  tasks_by_id: dict[str, CUATask] = {}
  for item in sources:
    config, options = item if isinstance(item, tuple) else (item, _NO_OPTIONS)
    tasks = load_tasks_from_config(config, split, gym=gym, options=options)
    for task in tasks:
      other = tasks_by_id.setdefault(task.id, task)
      if (other.gym_base_url, other.gym_id) != (task.gym_base_url, task.gym_id):
        raise ValueError(
          f"two sources have a task {task.id!r}:"
          f" {_place(other)} and {_place(task)}; leave it out of one, by"
          " names or tags"
        )
  return list(tasks_by_id.values())


def _place(task: CUATask) -> str:
  return f"{task.gym_base_url or 'a file'} ({task.gym_id or 'no gym'})"


# --- reading ------------------------------------------------------------------


def read(
  config: TaskSourceConfig,
  gym: str = "genv",
  options: Mapping[str, Any] = _NO_OPTIONS,
  as_task: Callable[..., CUATask] = CUATask.from_row,
) -> list[CUATask]:
  """Returns every task of the list, in its order; see `load_tasks_from_config`.

  `as_task` reads a row of a file or dataset: `CUATask.from_row` for a gym,
  `CUATask.from_fields` for an environment without one.
  """
  if config.source == "gym":
    tasks = list(gyms.get(gym, "operator").list_tasks(options))
  elif config.source == "jsonl":
    rows = _jsonl(config.path)
    tasks = [as_task(row, where=where) for where, row in rows]
  elif config.source == "huggingface":
    rows = _dataset(config)
    tasks = [as_task(row, where=where) for where, row in rows]
  else:
    raise ValueError(
      f"source={config.source} is not a list; set it to gym, jsonl or"
      " huggingface"
    )
  positions: dict[str, int] = {}
  for i, task in enumerate(tasks, 1):
    if task.id in positions:
      raise ValueError(
        f"{_name(config, tasks)}: tasks {positions[task.id]} and {i} have one"
        f" id, {task.id!r}; an id stands for one task"
      )
    positions[task.id] = i
  return tasks


def _jsonl(path: str) -> Iterable[tuple[str, Any]]:
  with open(pathlib.Path(path).expanduser(), encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      where = f"{path}, line {number}"
      try:
        yield where, json_text.parse(line)
      except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _dataset(config: TaskSourceConfig) -> Iterable[tuple[str, Any]]:
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
      "source=huggingface needs the package datasets; pip install"
      " 'tunix-multi-turn[hub]', or use jsonl"
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


def _name(config: TaskSourceConfig, tasks: Sequence[CUATask]) -> str:
  if config.path or not tasks:
    return config.path or "the gym's list"
  return f"{tasks[0].gym_base_url} ({tasks[0].gym_id})"


# --- choosing -----------------------------------------------------------------


def select(
  tasks: Sequence[CUATask], config: TaskSourceConfig, split: Split | None = None
) -> list[CUATask]:
  """Splits and filters `tasks`: steps 2 to 5 of the module docstring.

  `split` None keeps both splits.

  Raises:
    ValueError: an unknown split, or no task is left.
    UnknownTaskError: a name that matches no task, or several.
  """
  if split not in (None, *SPLITS):
    raise ValueError(f"split={split!r} must be train, eval or None")
  chosen = list(range(len(tasks)))
  if split is not None:
    chosen = sorted(_split(tasks, config)[split])
  if config.names and not (split == "eval" and config.eval_names):
    ids = {cua_task.resolve(n, tasks).id for n in config.names}
    chosen = [i for i in chosen if tasks[i].id in ids]
  if config.tags:
    tags = {t.lower() for t in config.tags}
    chosen = [i for i in chosen if tags & {t.lower() for t in tasks[i].tags}]
  limit = config.eval_limit if split == "eval" else config.limit
  if limit and limit < len(chosen):
    drawn = random.Random(f"{config.seed}/limit").sample(chosen, limit)
    chosen = sorted(drawn)
  if not chosen:
    raise ValueError(
      f"{_name(config, tasks)}: none of {len(tasks)} tasks is left by"
      f" split={split}, train_ratio={config.train_ratio},"
      f" eval_names={list(config.eval_names)},"
      f" eval_number_range={config.eval_number_range!r},"
      f" names={list(config.names)}, tags={list(config.tags)}"
    )
  return [tasks[i] for i in chosen]


def _split(
  tasks: Sequence[CUATask], config: TaskSourceConfig
) -> Mapping[str, set[int]]:
  """Positions of the training and the held-out tasks."""
  everything = set(range(len(tasks)))
  if config.eval_names:
    ids = {cua_task.resolve(name, tasks).id for name in config.eval_names}
    eval_tasks = {i for i in everything if tasks[i].id in ids}
    return {"train": everything - eval_tasks, "eval": eval_tasks}
  numbers = number_range(config.eval_number_range)
  if numbers is not None:
    held_out = {
      i
      for i in everything
      if re.fullmatch(r"[0-9]{1,9}", tasks[i].number)
      and int(tasks[i].number) in numbers
    }
    return {"train": everything - held_out, "eval": held_out}
  if tasks and all(t.split for t in tasks):
    held_out = {i for i in everything if tasks[i].split == "eval"}
    return {"train": everything - held_out, "eval": held_out}
  order = list(everything)
  random.Random(config.seed).shuffle(order)
  cut = int(len(order) * config.train_ratio)
  return {"train": set(order[:cut]), "eval": set(order[cut:])}


def file_as_family(families: Sequence[str]) -> str:
  """Returns the fault of a file that is named as a family; "" without one."""
  for family in families:
    if family.endswith(".jsonl"):
      return (
        f"unknown task family {family!r}; a file of tasks is"
        f" task_source.source=jsonl task_source.path={family}"
      )
  return ""


# --- for trainers that read datasets ------------------------------------------


def to_dataset(tasks: Sequence[CUATask]) -> Any:
  """Returns a `datasets.Dataset` with a row a task; `params` is JSON text.

  Raises:
    ImportError: datasets is not installed.
  """
  import datasets  # pylint: disable=g-import-not-at-top

  rows = [t.to_row() for t in tasks]
  return datasets.Dataset.from_list(
    [
      {**row, "params": json.dumps(row["params"], sort_keys=True)}
      for row in rows
    ]
  )


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
      [task] * self._size for task in self._tasks[first : first + self._groups]
    ]
