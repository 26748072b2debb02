"""Declares the `computer` gym: any object with `screenshot()` and `act()`."""

from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="any object with screenshot() and act()",
  make=f"{__name__}.computer_gym:ComputerGym",
  operator_options=("computer", "evaluator", "options"),
  size_known_after_start=True,
)
