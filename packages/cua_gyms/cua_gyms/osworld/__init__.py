"""Declares the `osworld` gym: machines that run OSWorld's server."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="machines of OSWorld, see docs/outside_gyms.md",
  make=f"{__name__}.osworld_gym:OSWorldGym",
  operator_options=("machines", "python", "reset", "tasks_dir", "upload_root"),
  tasks=f"{__name__}.osworld_tasks:file_tasks",
  set_by_run=spec.SIZE,
  lists_tasks=True,
  size_known_after_start=True,
  bounds={"scroll_px": (0, 10_000)},
)
