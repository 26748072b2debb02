"""Task lists."""

from tunix.rl.multi_turn.environments.task_sources.source import (
  load_tasks_from_config,
)
from tunix.rl.multi_turn.environments.task_sources.source import (
  load_tasks_from_multiple_sources,
)
from tunix.rl.multi_turn.environments.task_sources.source import (
  TaskSourceConfig,
)

__all__ = [
  "load_tasks_from_config",
  "load_tasks_from_multiple_sources",
  "TaskSourceConfig",
]
