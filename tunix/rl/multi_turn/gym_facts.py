"""What a run has to know of each gym beside its name: a row a gym.

`of(name)` gives it; a gym that users register is like `GymFacts()`. Imports no
gym and no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.environments.gyms import miniwob

_SIZE = {"width": "gym.width", "height": "gym.height"}
MINIWOB_SIZE = (160, 210)
# Each episode holds a tab of the browser.
_TABS = {**_SIZE, "max_pages": "collect.concurrency"}
_none = lambda: dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GymFacts:
  """See the module docstring.

  Attributes:
    preset: configuration that is the default where this gym is chosen; files
      and overrides win over it.
    cloning_preset: more of it, for a gym that the embedded policy has never
      seen, where that starts the run and the oracle knows every task.
    oracle: whether a script solves its tasks.
    oracle_families: those that it solves, where these are not all.
    levels: whether `gym.options.difficulty` may be set.
    lists_tasks: whether it, or its server, says which tasks there are.
    own_keys: settings that have a key of the configuration, which the rest of
      the run reads; the two must not differ.
    started_to_see: whether its screen is known once it has started only.
  """

  preset: Mapping[str, Any] = _none()
  cloning_preset: Mapping[str, Any] = _none()
  oracle: bool = False
  oracle_families: tuple[str, ...] = ()
  levels: bool = False
  lists_tasks: bool = False
  own_keys: Mapping[str, str] = _none()
  started_to_see: bool = False

  @property
  def sized(self) -> bool:
    """Whether it is told gym.width and gym.height."""
    return "width" in self.own_keys


_OTHERS = GymFacts(lists_tasks=True, own_keys=_SIZE, started_to_see=True)

GYMS: dict[str, GymFacts] = {
    "desktop": GymFacts(
        preset={
            "task_source.families": (
                "click-button", "close-dialog", "enter-text", "open-icon",
            ),
            "learner.schedule": "cosine",
        },
        oracle=True,
        levels=True,
        own_keys=_SIZE,
    ),  # pyformat: disable
    "miniwob": GymFacts(
        preset={
            "task_source.families": ("click-test-2", "click-dialog", "focus-text"),
            "gym.width": MINIWOB_SIZE[0],
            "gym.height": MINIWOB_SIZE[1],
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
        oracle=True,
        oracle_families=tuple(miniwob.ORACLE_FAMILIES),
        own_keys=_TABS,
    ),
    "browser": GymFacts(
        preset={"gym.width": 640, "gym.height": 480},
        lists_tasks=True,
        own_keys=_TABS,
    ),
    "xdesktop": GymFacts(
        preset={
            "task_source.families": ("window-close", "window-maximize", "window-minimize"),
            # A quarter of a screen of 1024x768, each way: four of them fit.
            "gym.width": 256,
            "gym.height": 192,
            "environment.max_turns": 4,
            "engine.context_length": 1024,
            "learner.row_length": 1024,
            # A desktop is some processes and 100 MB, and takes a second to
            # start.
            "collect.concurrency": 8,
            "engine.slots": 8,
            "collect.deadlines.reset": 120.0,
            "collect.deadlines.step": 60.0,
        },
        oracle=True,
        own_keys=_SIZE,
    ),
    "gymnasium": GymFacts(
        own_keys={"env": "task_source.families", "size": "gym.width and gym.height"}
    ),
    "genv": GymFacts(lists_tasks=True, own_keys=_SIZE),
    "openenv": _OTHERS,
    "osworld": _OTHERS,
    "android_world": _OTHERS,
    "gbox": GymFacts(started_to_see=True),
    "computer": GymFacts(started_to_see=True),
}
_UNKNOWN = GymFacts(levels=True)  # Whoever wrote it may have them.


def of(name: str) -> GymFacts:
  """The row of a gym."""
  return GYMS.get(name, _UNKNOWN)
