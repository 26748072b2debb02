"""Declares the `xdesktop` gym: a real Linux desktop on Xvfb.

Each episode has its own display, home and processes.
"""

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="a real Linux desktop on Xvfb, see docs/xdesktop.md",
  make=f"{__name__}.xdesktop_gym:XDesktopGym",
  operator_options=("directory", "isolation", "disk_mb", "max_processes"),
  tasks=f"{__name__}.xdesktop_tasks:XDesktopTasks",
  preset={
    "task_source.families": (
      "window-close",
      "window-maximize",
      "window-minimize",
    ),
    # A quarter of a screen of 1024x768, each way: four of them fit.
    "gym.width": 256,
    "gym.height": 192,
    "environment.max_turns": 4,
    "engine.context_length": 1024,
    "learner.row_length": 1024,
    # A desktop is some processes and 100 MB, and takes a second to start.
    "collect.concurrency": 8,
    "engine.slots": 8,
    "collect.deadlines.reset": 120.0,
    "collect.deadlines.step": 60.0,
  },
  oracle=f"{__name__}.xdesktop_gym:oracle_action",
  describe=f"{__name__}.xdesktop_gym:describe",
  set_by_run=spec.SIZE,
  check=f"{__name__}.xdesktop_gym:unusable",
  bounds={"zoom": (0, 8), "disk_mb": (1, 1024), "max_processes": (16, 1024)},
  needs=f"{__name__}.programs:needs",
)

__getattr__ = registry.lazy_attributes(
  __name__,
  xdesktop_gym="XDesktopGym describe oracle_action",
  programs="missing",
  xdesktop_tasks="XDesktopTasks",
)
