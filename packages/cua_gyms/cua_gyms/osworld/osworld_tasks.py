"""Makes a task set of OSWorld's task files.

`gym.options.tasks_dir` is a directory `<domain>/<id>.json`, OSWorld's
`evaluation_examples/examples`. Families are the domains. Every fifth task of a
domain, by the hash of its id, is held out. Tasks that a machine's server alone
cannot set up or judge are refused, or left out with `unsupported: skip`.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
from typing import Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

from cua_gyms.osworld import osworld_gym as osworld

_LOG = logging.getLogger(__name__)
_ON_UNSUPPORTED = ("refuse", "skip")


def read_task(path: pathlib.Path) -> base.Task:
  """Returns the task of one file.

  Raises:
    ValueError: no task of OSWorld.
  """
  try:
    data = json_text.read(path)
  except ValueError as error:
    raise ValueError(f"{path}: no JSON: {error}") from None
  for name in ("id", "instruction", "evaluator"):
    if not isinstance(data, dict) or not data.get(name):
      raise ValueError(f"{path}: {name!r} is missing; is that an OSWorld task?")
  return base.Task(
    f"osworld/{path.parent.name}/{data['id']}",
    path.parent.name,
    str(data["instruction"]),
    params={"osworld": data},
  )


def file_tasks(
  families: Sequence[str] | None = None,
  *,
  tasks_dir: str = "",
  unsupported: str = "refuse",
) -> seeds.IndexedTasks:
  """Returns the tasks of a directory.

  Args:
    families: domains to offer, none or () for all.
    tasks_dir: the directory, see the module docstring.
    unsupported: "refuse" or "skip" tasks that cannot be played.

  Raises:
    ValueError: no directory, a file that is not a task, a task that cannot be
      played (with `unsupported: refuse`), or a domain without tasks.
  """
  root = pathlib.Path(tasks_dir).expanduser()
  if not tasks_dir or not root.is_dir():
    raise ValueError(
      f"gym.options.tasks_dir={tasks_dir!r} must be a"
      " directory <domain>/<id>.json, as OSWorld's"
      " evaluation_examples/examples"
    )
  if unsupported not in _ON_UNSUPPORTED:
    raise ValueError(
      f"gym.options.unsupported={unsupported!r} must be one of"
      f" {', '.join(_ON_UNSUPPORTED)}"
    )
  train: dict[str, list[base.Task]] = {}
  held_out: dict[str, list[base.Task]] = {}
  skipped = 0
  for path in sorted(root.glob("*/*.json")):
    if families and path.parent.name not in families:
      continue
    task = read_task(path)
    try:
      osworld.check_task(task.params["osworld"])
    except ValueError as error:
      if unsupported == "refuse":
        raise ValueError(
          f"{path}: {error}; gym.options.unsupported=skip leaves such tasks out"
        ) from None
      skipped += 1
      continue
    digest = hashlib.sha256(task.task_id.encode()).digest()
    into = held_out if digest[0] % 5 == 0 else train
    into.setdefault(task.family, []).append(task)
  if skipped:
    _LOG.warning("%d tasks of %s cannot be played here", skipped, root)
  task_set = seeds.IndexedTasks(train, held_out)
  for family in families or task_set.families() or ("",):
    if family not in task_set.families():
      wrong = registry.unknown_name("domain", family, task_set.families())
      raise ValueError(
        f"{root}: {wrong}; a domain needs tasks to train on and tasks that"
        " are held out"
      )
  return task_set
