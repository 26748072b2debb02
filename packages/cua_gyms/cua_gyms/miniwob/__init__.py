"""Declares the `miniwob` gym: real MiniWoB++ pages in one headless Chromium.

Many episodes run in it in parallel, each in a tab of its own.
"""

import math
from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec

PAGE_SIZE = (160, 210)
"""Width and height of a task's area, in CSS pixels."""


def _check(
  options: Mapping[str, Any], width: int, height: int
) -> Iterator[str]:
  scale = options.get("scale", 1)
  least = tuple(math.ceil(scale * side) for side in PAGE_SIZE)
  if width < least[0] or height < least[1]:
    yield (
      f"gym.width={width}, gym.height={height}: the pages of miniwob need at"
      f" least {PAGE_SIZE[0]}x{PAGE_SIZE[1]}, at gym.options.scale={scale:g}"
      f" {least[0]}x{least[1]}"
    )


GYM = spec.GymSpec(
  doc="web pages in headless Chromium",
  make=f"{__name__}.miniwob_gym:MiniWobGym",
  operator_options=("browser",),
  tasks=f"{__name__}.miniwob_tasks:MiniWobTasks",
  preset={
    "task_source.families": ("click-test-2", "click-dialog", "focus-text"),
    "gym.width": PAGE_SIZE[0],
    "gym.height": PAGE_SIZE[1],
    # The pages' own reward punishes every wrong click with -1.
    "environment.reward": "success",
    "learner.steps": 220,
    "learner.learning_rate": 5e-4,
    "learner.schedule": "cosine",
    "collect.concurrency": 24,
    "engine.slots": 24,
  },
  cloning_preset={
    "warm_start.steps": 16,
    "warm_start.batch_size": 32,
    "warm_start.learning_rate": 5e-4,
    "warm_start.demonstrations": 512,
  },
  oracle=f"{__name__}.oracle:oracle_action",
  describe=f"{__name__}.oracle:describe",
  oracle_families=f"{__name__}.oracle:ORACLE_FAMILIES",
  tree_oracle=f"{__name__}.tree_oracle:ORACLE",
  # Each episode holds a tab of the browser.
  set_by_run={
    **spec.SIZE,
    "max_pages": "concurrency",
    "observation": "observation",
  },
  check=_check,
  bounds={"seconds_per_action": (0, 60)},
  needs=f"{__name__}.miniwob_tasks:needs",
  close_shared=f"{__name__}.miniwob_gym:shared_browser.close",
)

__getattr__ = registry.lazy_attributes(
  __name__,
  miniwob_gym="Browser MiniWobGym shared_browser",
  oracle="ORACLE_FAMILIES describe oracle_action",
  miniwob_tasks="MiniWobTasks families",
)
