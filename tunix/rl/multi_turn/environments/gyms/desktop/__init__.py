"""Declares the embedded desktop: a deterministic GUI, its tasks, its oracle.

`desktop.env` is the same as a `gymnasium.Env`, `desktop.flat` that in arrays.
"""

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="drawn by this package, needs nothing",
  make=f"{__name__}.desktop_gym:DesktopGym",
  tasks=f"{__name__}.desktop_gym:DesktopTasks",
  levels=(0, 1, 2),
  preset={
    "task_source.families": (
      "click-button",
      "close-dialog",
      "enter-text",
      "open-icon",
    ),
    # Nine in ten held-out tasks succeed after some 25 to 30.
    "learner.steps": 50,
  },
  # Of the first update of the default run.
  batch_preset={"learner.patches": 512, "learner.targets": 608},
  oracle=f"{__name__}.desktop_gym:oracle_action",
  describe=f"{__name__}.desktop_gym:DesktopGym.describe",
  summarize=f"{__name__}.desktop_gym:DesktopGym.summarize",
  set_by_run=spec.SIZE,
  bounds={"time_decay": (0, 1)},
  runs_inline=True,
)

__getattr__ = registry.lazy_attributes(
  __name__,
  desktop_gym=(
    "DesktopGym DesktopTasks EVAL_SEEDS_FROM QUICKSTART_FAMILIES families"
    " oracle_action"
  ),
  env="DesktopEnv register_envs",
  flat="FlatDesktop make_flat",
)
