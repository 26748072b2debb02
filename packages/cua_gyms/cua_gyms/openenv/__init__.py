"""Declares the `openenv` gym: an environment behind an OpenEnv server."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="OpenEnv servers, see docs/outside_gyms.md",
  make=f"{__name__}.openenv_gym:OpenEnvGym",
  operator_options=("actions", "base_url", "token_file"),
  tasks=f"{__name__}.openenv_tasks:server_tasks",
  set_by_run=spec.SIZE,
  lists_tasks=True,
  size_known_after_start=True,
  bounds={"success_at": (-1e9, 1e9)},
)
