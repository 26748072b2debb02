"""Task sources: lists of tasks, and the order in which tasks are drawn."""

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.task_sources.cua_task import CUATask
from tunix.rl.multi_turn.environments.task_sources.cua_task import resolve
from tunix.rl.multi_turn.environments.task_sources.cua_task import (
  UnknownTaskError,
)

__getattr__ = registry.lazy_attributes(
  __name__,
  curriculum="CurriculumSampler",
  listed="ListedTasks",
  source=(
    "TaskBatches TaskSourceConfig load_tasks_from_config"
    " load_tasks_from_multiple_sources to_dataset"
  ),
)
