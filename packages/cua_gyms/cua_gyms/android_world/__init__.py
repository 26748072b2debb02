"""Declares the `android_world` gym: phones behind an AndroidWorld server."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  box="android",
  doc="phones of AndroidWorld, see docs/outside_gyms.md",
  make=f"{__name__}.android_world_gym:AndroidWorldGym",
  operator_options=("machines",),
  tasks=f"{__name__}.android_world_tasks:server_tasks",
  set_by_run=spec.SIZE,
  lists_tasks=True,
  size_known_after_start=True,
  bounds={"combinations": (0, 1000), "suite_seed": (0, 2**32 - 1)},
)
