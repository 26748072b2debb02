"""Declares the `genv` gym: a gym server, over genv's HTTP protocol."""

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  box="android",
  doc="a gym server, see docs/gym_server.md",
  make=f"{__name__}.genv_gym:GenvGym",
  operator_options=("base_url", "client", "token_file"),
  tasks=f"{__name__}.genv_tasks:server_tasks",
  set_by_run=spec.SIZE,
  lists_tasks=True,
  task_list=f"{__name__}.genv_tasks:list_tasks",
  starts_by_id=True,
)

__getattr__ = registry.lazy_attributes(
  __name__,
  genv_client=(
    "GenvCapacityError GenvClient GenvError GenvExecutionLostError"
    " GenvRequestError GenvUnavailableError GenvUnknownTaskError RETRIES"
    " Timeouts"
  ),
  execution=(
    "GenvExecutionContext evaluate_execution start_genv_execution"
    " terminate_execution"
  ),
  genv_gym="GenvGym",
  genv_tasks="GenvTasks",
)
