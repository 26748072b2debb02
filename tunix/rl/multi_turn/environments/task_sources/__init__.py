"""Where tasks come from: gym servers, files, datasets; and in which order."""

from tunix.rl.multi_turn.environments.task_sources.cua_task import CUATask
from tunix.rl.multi_turn.environments.task_sources.cua_task import resolve
from tunix.rl.multi_turn.environments.task_sources.cua_task import UnknownTaskError
