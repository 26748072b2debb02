"""One task of a list, in any of its shapes."""

from tunix.rl.multi_turn.environments.task_sources.cua_task import CUATask
from tunix.rl.multi_turn.environments.task_sources.cua_task import resolve
from tunix.rl.multi_turn.environments.task_sources.cua_task import (
  UnknownTaskError,
)

__all__ = ["CUATask", "resolve", "UnknownTaskError"]
