"""Returns an episode's next right action, and phrases for objects on it.

The scripts are in the families. A script continues from where it left the
episode: it must play the episode from the start, and cannot undo the mistakes
of another policy.
"""

from __future__ import annotations

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms.xdesktop import gym as gym_lib

_SECONDS = 30.0


async def oracle_action(
    gym: gym_lib.XDesktopGym,
) -> gui_action.GuiAction | None:
  """The next right action in the gym's episode; None when it is over.

  Raises:
    RuntimeError: no episode is running.
    hand.Unsolvable: the screenshot does not show its target.
  """
  if gym.over:
    if gym.task is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return None
  return next(gym.oracle(), None)


async def describe(
    gym: gym_lib.XDesktopGym, x: float, y: float
) -> str | None:
  """The name of the object at a pixel; None when it has none.

  Raises:
    RuntimeError: no episode is running.
    DesktopLost.
  """
  if gym.desktop is None:
    raise RuntimeError("no episode is running; call start(task) first")
  found = await concurrency.acall(
      gym.window_at, x, y, seconds=_SECONDS, what="xdesktop describe"
  )
  return None if found is None else f"the window {found!r}"
