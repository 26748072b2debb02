"""A few tasks of the desktop gym, for a first try."""

from tunix.rl.multi_turn.environments.task_sources.cua_task import CUATask

TASKS = tuple(
  CUATask(
    f"{family}-train-{index}",
    f"{family}-train-{index}",
    family.replace("-", " ").capitalize(),
    gym_id="desktop",
  )
  for family in ("click-button", "enter-text")
  for index in range(2)
)
