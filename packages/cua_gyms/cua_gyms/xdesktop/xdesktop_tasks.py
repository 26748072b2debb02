"""Makes the tasks of the `xdesktop` gym, training and held-out ones."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

from cua_gyms.xdesktop import families as families_lib
from cua_gyms.xdesktop import families_editor  # noqa: F401
from cua_gyms.xdesktop import families_files  # noqa: F401
from cua_gyms.xdesktop import families_system  # noqa: F401

EVAL_SEEDS_FROM = seeds.EVAL_SEEDS_FROM


class XDesktopTasks(seeds.SeededTasks):
  """Makes tasks: `xdesktop/<family>/<seed>`.

  Families with few instances may ask for the same thing in training and in
  evaluation.
  """

  def __init__(self, families: tuple[str, ...] | list[str] | None = None):
    """Args:

      families: Families to offer, None for all.

    Raises:
      ValueError: no such family; gives the nearest.
    """
    names = tuple(families) if families else families_lib.names()
    for name in names:
      families_lib.get(name)
    self._families = names

  def task(self, family: str, seed: int) -> base.Task:
    """Returns the instance that a family and a seed stand for.

    Raises:
      ValueError: no such family, or a seed out of range.
    """
    if not 0 <= seed < 2 * EVAL_SEEDS_FROM:
      raise ValueError(
        f"seed must be in [0, {2 * EVAL_SEEDS_FROM}), got {seed}"
      )
    return base.Task(
      task_id=f"xdesktop/{family}/{seed}",
      family=family,
      instruction=families_lib.instance(family, seed).instruction,
      seed=seed,
      max_turns=families_lib.get(family).max_turns,
    )
