"""Where tasks come from: gym servers, files, datasets; and in which order."""

# The first is imported by the gym servers' client, which the others need.
from tunix.rl.multi_turn.environments.task_sources.cua_task import CUATask
from tunix.rl.multi_turn.environments.task_sources.cua_task import resolve
from tunix.rl.multi_turn.environments.task_sources.cua_task import (
    UnknownTaskError,
)

_LAZY = {
    "CurriculumSampler": "curriculum",
    "GenvTasks": "listed",
    "ListedTasks": "listed",
    "TaskBatches": "source",
    "TaskSourceConfig": "source",
    "load_tasks_from_config": "source",
    "load_tasks_from_multiple_sources": "source",
    "to_dataset": "source",
}

__all__ = ["CUATask", "UnknownTaskError", "resolve", *sorted(_LAZY)]


def __getattr__(name):
  if name in _LAZY:
    import importlib  # pylint: disable=g-import-not-at-top

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
