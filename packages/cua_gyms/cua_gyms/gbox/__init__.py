"""Declares the `gbox` gym: one gbox.ai machine per episode."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="machines of gbox",
  make=f"{__name__}.gbox_gym:GboxGym",
  operator_options=("base_url", "evaluator"),
  size_known_after_start=True,
  needs=f"{__name__}.gbox_gym:needs",
)
