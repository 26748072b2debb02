"""Lists and names the tasks that a gym server offers.

A gym makes tasks without end (`TaskSet`), a list has an end: the catalogue
holds the first training and held-out tasks of each family, numbered "001",
"002", …. Beyond the list, `<family>@<split>:<index>:<seed>` names any task of
the set, so a run behind a server draws the same tasks as in-process.

Promises: a name leads to one task, or to none; the list never changes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, Iterator, Literal, Mapping, Sequence
import uuid

from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.task_sources import cua_task

from cua_gyms.gym_server import schemas
from cua_gyms.gym_server import validators

SHAPES = schemas.SHAPES
_NAMESPACE = uuid.UUID("4e1f5b0a-8f0e-5b55-9d0c-6f0b4b6c0a11")
_INSTANCE = re.compile(r"(.+)@(train|eval):([0-9]{1,15}):([0-9]{1,15})")


@settings_lib.settings
class ServedGym:
  """One gym of a server."""

  gym_id: str = settings_lib.setting(default="", doc="Name in addresses.")
  gym: str = settings_lib.setting(default="", doc="Registered name.")
  settings: dict[str, Any] = settings_lib.setting(
    default={},
    doc="Settings of the gym and of its task set, fixed for every execution,"
    " e.g. {width: 256, difficulty: 1}.",
  )
  families: tuple[str, ...] = settings_lib.setting(
    default=(), doc="Task families to offer; none given: all."
  )
  train_tasks: int = settings_lib.setting(
    default=16, doc="Training tasks of each family in the list.", ge=0
  )
  eval_tasks: int = settings_lib.setting(
    default=4, doc="Held-out tasks of each family in the list.", ge=0
  )
  seed: int = settings_lib.setting(
    default=0, doc="Seed of the list.", ge=0, lt=10**15
  )
  client_settings: tuple[str, ...] = settings_lib.setting(
    default=(), doc="Gym settings that a create may choose."
  )
  shape: schemas.Shape = settings_lib.setting(
    default="summary",
    doc="Of task lists, unless a request names another: flat has the long"
    " fields of each task, summary and meta leave them out.",
  )

  def problems(self) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.gym_id):
      yield (
        f"gym_id={self.gym_id!r} must be letters, digits, '.', '_' and '-',"
        " as it is part of an address"
      )
    if self.train_tasks + self.eval_tasks < 1:
      yield "train_tasks and eval_tasks are both 0: no task is left"


@dataclasses.dataclass(frozen=True)
class Entry:
  """A task of the list, with its names."""

  task: base.Task
  number: str
  name: str
  uid: str
  split: str

  def to_json(
    self, shape: str, full: bool, env: Mapping[str, Any]
  ) -> schemas.Task:
    """Returns the task, with all its names; long fields when `full`, or flat.

    `meta.displayName` is the name: clients compare an identifier with either.
    """
    task = self.task
    level = difficulty(task)
    title = self.name.replace("-", " ").capitalize()
    description = task.instruction or title
    data: schemas.Task = {
      "task_id": task.task_id,
      "id": task.task_id,
      "name": self.name,
      "task_name": self.name,
      "display_name": self.name,
      "number": self.number,
      "task_number": self.number,
      "seed_id": self.uid,
      "difficulty": level,
      "family": task.family,
      "split": self.split,
      "tags": [t for t in (task.family, self.split, level) if t],
      "max_turns": task.max_turns,
      "meta": {
        "id": self.uid,
        "number": self.number,
        "name": self.name,
        "displayName": self.name,
        "description": description,
      },
    }
    if not full and shape != "flat":
      return data
    return {
      **data,
      "description": description,
      "instruction": task.instruction,
      "env_config": {
        **env,
        "family": task.family,
        "seed": task.seed,
        "max_turns": task.max_turns,
        "params": dict(task.params),
      },
      "evaluation": {"validators": validators.specs(task)},
    }


def difficulty(task: base.Task) -> cua_task.Difficulty | Literal[""]:
  """Returns the task's level in genv's words; "" when its gym grades none.

  `params["difficulty"]` is "easy", "medium" or "hard", or a number: 0 is easy,
  1 medium, more is hard.
  """
  level = task.params.get("difficulty")
  if isinstance(level, int) and not isinstance(level, bool):
    level = cua_task.DIFFICULTIES[min(max(level, 0), 2)]
  return next((d for d in cua_task.DIFFICULTIES if d == level), "")


def _spelling(name: str) -> str:
  """Returns a name without case, and with dashes between its words."""
  return re.sub(r"[\s_-]+", "-", name.strip()).casefold()


class Catalog:
  """The tasks of one gym; does not change."""

  def __init__(self, spec: ServedGym):
    """Raises:

    ValueError: no such gym or family, or a gym without tasks.
    ImportError: the gym's package is missing.
    """
    self.spec = spec
    self._tasks = gyms.get(spec.gym, "operator").make_tasks(
      spec.families, spec.settings
    )
    self.families: tuple[str, ...] = tuple(
      spec.families or self._tasks.families()
    )
    self._check_settings()
    entries: list[Entry] = []
    counts = {"train": spec.train_tasks, "eval": spec.eval_tasks}
    for split, count in counts.items():
      for family in self.families:
        for index in range(count):
          entries.append(
            self._entry(
              self._make(family, split, index, spec.seed),
              split,
              f"{family}-{split}-{index}",
              f"{len(entries) + 1:03d}",
            )
          )
    self.entries: Sequence[Entry] = tuple(entries)
    # One look-up for each way to name a task exactly.
    self._exact: dict[str, Entry] = {}
    for key in ("name", "uid"):
      self._exact |= {getattr(e, key): e for e in entries}
    self._exact |= {e.task.task_id: e for e in entries}
    # Names as people write them: "Click button train 0".
    self._spelled: dict[str, Entry | None] = {}
    for e in entries:
      key = _spelling(e.name)
      self._spelled[key] = None if key in self._spelled else e

  def _check_settings(self) -> None:
    """Builds a gym, so that no client is the first to hear of a wrong value.

    Raises:
      ValueError: naming the setting.
    """
    spec, gym_spec = self.spec, gyms.get(self.spec.gym, "operator")
    options = gym_spec.options
    unknown = [name for name in spec.client_settings if name not in options]
    if unknown and options:
      raise ValueError(
        f"client_settings={unknown[0]!r} is no setting of gym {spec.gym!r};"
        f" known: {', '.join(options)}"
      )
    gym_spec.check_client_settings(spec.client_settings, "client_settings")
    gym_spec.check_screenshots(
      {**dict.fromkeys(spec.client_settings), **spec.settings}
    )
    for name in spec.client_settings:
      if gym_spec.unbounded(name):
        raise ValueError(
          f"client_settings={name!r} is a number without bounds; declare"
          f" them in the GymSpec of {spec.gym!r} (bounds), or leave it out"
        )
    settings = {**gym_spec.options_of(self.families[0]), **spec.settings}
    chosen = set(spec.client_settings) - set(settings)
    if any(
      options[name].default is inspect.Parameter.empty
      for name in chosen & options.keys()
    ):
      return  # Only a client's choice makes it whole.
    gym = gym_spec.make_gym(settings)
    size = (getattr(gym, "width", 0), getattr(gym, "height", 0))
    if problems := list(gym_spec.misfits(settings, *size)):
      raise ValueError("; ".join(problems))

  def _make(self, family: str, split: str, index: int, seed: int) -> base.Task:
    draw = self._tasks.train_task if split == "train" else self._tasks.eval_task
    return draw(family, index, seed)

  def _entry(
    self, task: base.Task, split: str, name: str, number: str
  ) -> Entry:
    validators.specs(task)  # Raises before a client plays a wrong one.
    uid = uuid.uuid5(_NAMESPACE, f"{self.spec.gym_id}/{task.task_id}")
    return Entry(task, number, name, str(uid), split)

  def find(self, identifier: str) -> Entry:
    """Returns the task of that id, name (in whatever case), number or instance.

    Raises:
      UnknownTaskError: no task, or several.
      ValueError: an impossible instance.
    """
    if (entry := self._exact.get(identifier)) is not None:
      return entry
    instance = _INSTANCE.fullmatch(identifier)
    if instance and instance[1] in self.families:
      family, split, index, seed = instance.groups()
      task = self._make(family, split, int(index), int(seed))
      return self._entry(task, split, identifier, "")
    if (entry := self._spelled.get(_spelling(identifier))) is not None:
      return entry
    return cua_task.resolve(
      identifier,
      self.entries,
      ids=lambda e: (e.task.task_id, e.uid),
      name=lambda e: e.name,
      number=lambda e: e.number,
    )

  def env(self) -> dict[str, Any]:
    """Returns the gym's own part of a task's `env_config`."""
    return {"gym": self.spec.gym, "gym_id": self.spec.gym_id}

  def list(
    self,
    shape: str,
    *,
    split: str | None = None,
    family: str = "",
    full: bool = False,
  ) -> list[schemas.Task]:
    """Lists tasks in one of `SHAPES`; None and "" choose all."""
    return [
      e.to_json(shape, full, self.env())
      for e in self.entries
      if (not split or e.split == split)
      and (not family or e.task.family == family)
    ]

  def describe(self) -> schemas.Gym:
    return {
      "gym": self.spec.gym,
      "gym_id": self.spec.gym_id,
      "families": list(self.families),
      "tasks": len(self.entries),
      "instances": "<family>@<train|eval>:<index>:<seed>",
      # Turns of a family's tasks, for clients that name instances.
      "max_turns": {
        f: next(e.task.max_turns for e in self.entries if e.task.family == f)
        for f in self.families
      },
      "client_settings": list(self.spec.client_settings),
    }
