"""Declares the `grounding` gym: one click on a named thing, judged by its box.

Tells whether a checkpoint, its processor and its grammar mean the same pixels.
Targets are drawn by the embedded desktop at several sizes of screen, or read
from a local copy of ScreenSpot, ScreenSpot-v2 or ScreenSpot-Pro.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec


def _check(
  options: Mapping[str, Any], width: int, height: int
) -> Iterator[str]:
  from cua_gyms.grounding import targets  # pylint: disable=g-import-not-at-top

  yield from targets.screen_problems(options, width, height)


GYM = spec.GymSpec(
  doc="one click on a named thing, to try a checkpoint",
  make=f"{__name__}.grounding_gym:GroundingGym",
  operator_options=("path",),
  tasks=f"{__name__}.grounding_gym:GroundingTasks",
  preset={
    "gym.width": 1920,
    "gym.height": 1080,
    "eval.episodes_per_task": 0,
    "eval.modes": ("greedy",),
  },
  oracle=f"{__name__}.grounding_gym:oracle_action",
  describe=f"{__name__}.grounding_gym:describe",
  set_by_run=spec.SIZE,
  check=_check,
  lists_tasks=True,
  digest=f"{__name__}.accuracy:digest",
  bounds={"count": (0, 100_000)},
)

__getattr__ = registry.lazy_attributes(
  __name__,
  grounding_gym="GroundingGym GroundingTasks oracle_action describe",
  targets="Target",
)
