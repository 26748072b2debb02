"""Names the parts of a policy that the settings leave unchanged."""

from __future__ import annotations

from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.policy import base


def modules(
  model: base.Policy, config: config_lib.LearnerConfig
) -> tuple[str, ...]:
  """Submodules that `learner.freeze_vision` leaves out; () without it.

  Raises:
    ValueError: it has no vision tower to freeze.
  """
  if not config.freeze_vision:
    return ()
  names = tuple(base.optional(model, "vision_modules"))
  if not names:
    raise ValueError(
      f"freeze_vision=True, but {type(model).__name__} names no"
      " vision_modules; set learner.freeze_vision=false"
    )
  return names
