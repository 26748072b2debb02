"""Declares the `gymnasium` gym: any `gymnasium.Env` that renders frames."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="any gymnasium.Env that renders rgb_array",
  make=f"{__name__}.gymnasium_gym:GymnasiumGym",
  operator_options=("adapter", "env", "env_kwargs"),
  tasks=f"{__name__}.gymnasium_gym:FamilyTasks",
  # A family is an environment.
  set_by_run={"env": "family", "size": "size"},
  family_options=f"{__name__}.gymnasium_gym:default_settings",
  bounds={"success_return": (-1e9, 1e9)},
)
