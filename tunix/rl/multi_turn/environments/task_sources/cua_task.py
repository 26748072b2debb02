"""Reads computer-use tasks from task lists, in any of their shapes.

Gym servers, files and datasets describe tasks in three shapes: `{task_id,
name}`; `{meta: {id, number, name, displayName, description}}`; and flat
`{task_number, task_name, display_name, tags, instruction, description,
env_config, evaluation, seed_id}`. `CUATask.from_row` reads them all.

`resolve` finds a task by its exact id, then name, then number, then the number
that the identifier begins with. It never guesses: an identifier that matches no
task, or two tasks equally well, is an error.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args, Iterable, Literal, Mapping, Sequence, TypeVar

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)
DEFAULT_FAMILY = "tasks"
"""Family of tasks that name none, and have neither tag nor category."""


class UnknownTaskError(LookupError):
  """No task, or more than one, has that name."""

  # LookupError's subclasses print their message in quotes otherwise.
  def __str__(self) -> str:
    return str(self.args[0]) if self.args else ""


@dataclasses.dataclass(frozen=True)
class CUATask:
  """One task of a list.

  Attributes:
    id: unique in its list.
    name: short, for people.
    description: the goal, or notes on it.
    difficulty, category: Words of the source's vocabularies, "" for none.
    max_steps: turns an episode may take; None when not given.
    validation_type: how success is decided, "" when not given.
    validation_query, expected_result: Arguments of that decision.
    tags: Labels for filters.
    prerequisites: conditions before the start.
    genv_identifier: the task's name at a gym server; "" = the id.
    instruction: the text for the policy; "" = the description.
    number: Number in its written form ("011"), "" for none.
    family: the unit that success is reported by.
    split: "train" or "eval" when the list has a split, else "".
    genv_task_data: the row as it came.
    gym_id, gym_base_url: Server that has it, "" for none.
    seed, params: Fields of the gym's `Task`.
  """

  id: str
  name: str = ""
  description: str = ""
  difficulty: str = ""
  category: str = ""
  max_steps: int | None = None
  validation_type: str = ""
  validation_query: str = ""
  expected_result: Any = None
  tags: tuple[str, ...] = ()
  prerequisites: tuple[str, ...] = ()
  genv_identifier: str = ""
  instruction: str = ""
  number: str = ""
  family: str = ""
  split: str = ""
  genv_task_data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  gym_id: str = ""
  gym_base_url: str = ""
  seed: int = 0
  params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def identifier(self) -> str:
    return self.genv_identifier or self.id

  @property
  def is_summary(self) -> bool:
    """Whether fields are missing that the server's full task has."""
    data = self.genv_task_data
    return not any(
      data.get(k) for k in ("description", "env_config", "evaluation")
    )

  def to_task(self) -> base.Task:
    """Returns the task in the gym's form."""
    params = dict(self.params)
    if self.gym_id or self.genv_identifier:
      params["genv"] = {"identifier": self.identifier, "gym_id": self.gym_id}
    return base.Task(
      task_id=self.id,
      family=self.family or DEFAULT_FAMILY,
      instruction=self.instruction or self.description,
      seed=self.seed,
      max_turns=self.max_steps,
      params=params,
    )

  def to_row(self) -> dict[str, Any]:
    """Returns a dataset's row: flat, the same keys for every task."""
    return {
      "task_id": self.id,
      "name": self.name,
      "description": self.description,
      "instruction": self.instruction or self.description,
      "task_number": self.number,
      "tags": list(self.tags),
      "gym_base_url": self.gym_base_url,
      "gym_id": self.gym_id,
      "difficulty": self.difficulty,
      "category": self.category,
      "family": self.family,
      "max_steps": self.max_steps,
      "genv_identifier": self.genv_identifier,
      "seed": self.seed,
      "params": dict(self.params),
    }

  def to_record(self) -> dict[str, Any]:
    """Returns the row with the fields that decide success."""
    return {
      **self.to_row(),
      "split": self.split,
      "prerequisites": list(self.prerequisites),
      "validation_type": self.validation_type,
      "validation_query": self.validation_query,
      "expected_result": self.expected_result,
    }

  @classmethod
  def from_row(
    cls,
    row: object,
    *,
    where: str = "task",
    gym_id: str = "",
    gym_base_url: str = "",
  ) -> CUATask:
    """Reads a row of any shape.

    Args:
      row: a mapping.
      where: Name of the row in error messages, e.g. "tasks.jsonl, line 3".
      gym_id, gym_base_url: Server that the row came from.

    Raises:
      ValueError: naming the field, its value and what it may be.
    """
    if not isinstance(row, Mapping):
      raise ValueError(f"{where} must be an object, got {type(row).__name__}")
    if isinstance(row.get("tasks"), (list, tuple)):
      raise ValueError(
        f"{where} holds 'tasks', a list: one row is one task, and a group is"
        " made by playing it collect.group_size times; write a row for each"
      )
    meta = row.get("meta")
    flat: dict[str, Any] = dict(row)
    if isinstance(meta, Mapping):
      flat = {**{k: v for k, v in row.items() if k != "meta"}, **meta}
    read = _Reader(flat, where)
    name = read.text("name", "task_name", "display_name", "displayName")
    number = read.text("number", "task_number")
    identity = read.text("task_id", "id", "seed_id") or name or number
    if not identity:
      raise ValueError(
        f"{where} names no task; give it 'task_id' (or 'id', meta.id,"
        " 'task_name' or 'task_number')"
      )
    tags = read.texts("tags")
    category = read.text("category")
    config = flat.get("env_config")
    config = config if isinstance(config, Mapping) else {}
    split = read.text("split")
    if split not in ("", "train", "eval"):
      raise ValueError(
        f"{where}: split={split!r} must be train or eval, or left out"
      )
    params = flat.get("params", config.get("params"))
    if isinstance(params, str):  # Datasets have one type a column.
      try:
        params = json_text.parse(params)
      except ValueError:
        pass
    if params is None:
      params = {}
    if not isinstance(params, Mapping):
      raise ValueError(f"{where}: params must be an object, got {params!r}")
    return cls(
      id=identity,
      name=name or identity,
      description=read.text("description"),
      difficulty=read.text("difficulty"),
      category=category,
      max_steps=read.count(
        "max_steps", "max_turns", default=config.get("max_turns")
      ),
      validation_type=read.text("validation_type"),
      validation_query=read.text("validation_query"),
      expected_result=flat.get("expected_result"),
      tags=tags,
      prerequisites=read.texts("prerequisites"),
      genv_identifier=read.text("genv_identifier"),
      instruction=read.text("instruction"),
      number=number,
      family=(
        read.text("family")
        or str(config.get("family") or "")
        or (tags[0] if tags else "")
        or category
        or DEFAULT_FAMILY
      ),
      split=split,
      genv_task_data=dict(row),
      gym_id=read.text("gym_id") or gym_id,
      gym_base_url=read.text("gym_base_url") or gym_base_url,
      seed=read.count("seed", at_least=0, default=_whole(config.get("seed")))
      or 0,
      params=dict(params),
    )

  @classmethod
  def from_fields(cls, row: object, *, where: str = "task") -> CUATask:
    """Returns a row whose fields an environment without a gym reads itself.

    All of the row is kept as `params`. Its id is `task_id`, `id` or
    `extra_info.index`, else its place in the list.

    Raises:
      ValueError: naming the field, its value and what it may be.
    """
    if not isinstance(row, Mapping):
      raise ValueError(f"{where} must be an object, got {type(row).__name__}")
    read = _Reader(row, where)
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    index = extra.get("index")
    place = where.rpartition(" ")[2]
    split = read.text("split")
    if split not in ("", "train", "eval"):
      raise ValueError(
        f"{where}: split={split!r} must be train or eval, or left out"
      )
    return cls(
      id=read.text("task_id", "id") or str(place if index is None else index),
      max_steps=read.count("max_steps", "max_turns"),
      tags=read.texts("tags"),
      family=read.text("family", "data_source") or DEFAULT_FAMILY,
      instruction=read.text("question", "instruction"),
      split=split,
      genv_task_data=dict(row),
      seed=read.count("seed", at_least=0) or 0,
      params=dict(row),
    )


def _whole(value: object) -> int:
  return value if isinstance(value, int) and value > 0 else 0


class _Reader:
  """Fields of a row under their names, checked."""

  def __init__(self, data: Mapping[str, Any], where: str):
    self._data = data
    self._where = where

  def text(self, *names: str) -> str:
    for name in names:
      value = self._data.get(name)
      if value is None or value == "":
        continue
      if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # Numbers are written both ways.
      if not isinstance(value, str):
        raise ValueError(
          f"{self._where}: {name} must be a string, got {value!r}"
        )
      return value
    return ""

  def texts(self, name: str) -> tuple[str, ...]:
    value = self._data.get(name)
    if value is None:
      return ()
    if not isinstance(value, (list, tuple)) or not all(
      isinstance(v, str) for v in value
    ):
      raise ValueError(
        f"{self._where}: {name} must be a list of strings, got {value!r}"
      )
    return tuple(value)

  def count(
    self, *names: str, default: int | None = None, at_least: int = 1
  ) -> int | None:
    for name in names:
      value = self._data.get(name)
      if value is None:
        continue
      if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (value < at_least)
      ):
        raise ValueError(
          f"{self._where}: {name} must be a whole number >= {at_least}, got"
          f" {value!r}"
        )
      return value
    return default


T = TypeVar("T")


def rows_of(data: object, key: str = "tasks") -> Sequence[Any]:
  """Returns the rows of a reply: a bare list, or an object with one.

  Raises:
    ValueError: neither.
  """
  if isinstance(data, Mapping) and isinstance(data.get(key), list):
    return data[key]
  if isinstance(data, list):
    return data
  raise ValueError(
    f"a task list must be a list or an object with {key!r}, got"
    f" {type(data).__name__}"
  )


def resolve(
  identifier: str,
  tasks: Iterable[T],
  *,
  ids=lambda task: (task.id, task.genv_identifier),
  name=lambda task: task.name,
  number=lambda task: task.number,
) -> T:
  """Returns the task with that name; see the module docstring.

  Args:
    identifier: Id, name or number ("11" is "011"), or an id or name behind its
      number ("011-open-settings").
    tasks: Tasks to search.
    ids, name, number: Functions that return these of a task.

  Raises:
    UnknownTaskError: no task has that name, and the message names the nearest
      one; or several tasks have it.
  """
  tasks = list(tasks)
  identifier = str(identifier)
  leading = re.match(r"[0-9]+", identifier)
  prefix = int(leading.group()) if leading and len(leading.group()) < 12 else -1

  def number_of(task: T) -> int:
    text = number(task) or ""
    return int(text) if re.fullmatch(r"[0-9]{1,11}", text) else -2

  rules = [
    lambda t: identifier and identifier in ids(t),
    lambda t: identifier and identifier == name(t),
    lambda t: (
      leading is not None
      and leading.group() == identifier
      and number_of(t) == prefix
    ),
    lambda t: leading is not None and number_of(t) == prefix,
  ]
  for rule in rules:
    matches = [t for t in tasks if rule(t)]
    if len(matches) == 1:
      return matches[0]
    if matches:
      some = ", ".join(str(ids(t)[0]) for t in matches[:4])
      raise UnknownTaskError(
        f"{len(matches)} tasks are called {identifier!r}: {some}; use an id"
      )
  identifiers = [n for t in tasks for n in (*ids(t), name(t)) if n]
  hint = registry.did_you_mean(identifier, identifiers)
  raise UnknownTaskError(
    f"no task is called {identifier!r}{hint or '.'} There are {len(tasks)}"
    " tasks; their list has ids, names and numbers"
  )
