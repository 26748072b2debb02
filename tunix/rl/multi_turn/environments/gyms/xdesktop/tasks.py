"""Makes the tasks of the `xdesktop` gym, training and held-out ones."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.gyms.xdesktop import families as known

# Instance seeds: training below, evaluation from here up to twice this.
EVAL_SEEDS_FROM = 1_000_000_000


class XDesktopTasks:
  """Makes tasks: `xdesktop/<family>/<seed>`.

  Seeds below `EVAL_SEEDS_FROM` are for training and those from it up to twice
  it for evaluation: `train_task` and `eval_task` never return the same seed.
  (Families with few instances may still ask for the same thing.)
  """

  def __init__(self, families: tuple[str, ...] | list[str] | None = None):
    """Args:

      families: those to offer, None for all.

    Raises:
      ValueError: no such family; gives the nearest.
    """
    names = tuple(families) if families else known.names()
    for name in names:
      known.get(name)
    self._families = names

  def families(self) -> tuple[str, ...]:
    return self._families

  def task(self, family: str, seed: int) -> base.Task:
    """The instance that a family and a seed stand for.

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
        instruction=known.instance(family, seed).instruction,
        seed=seed,
        max_turns=known.get(family).max_turns,
    )

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """The `index`-th training instance of the run with this `seed`.

    Instance seeds are drawn from [0, EVAL_SEEDS_FROM) by hashing.
    """
    number = seeds.train_seed(family, index, seed, EVAL_SEEDS_FROM)
    return self.task(family, number)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """The `index`-th held-out instance; see `seeds`.

    Instance seeds lie in [EVAL_SEEDS_FROM, 2 * EVAL_SEEDS_FROM).
    """
    number = seeds.eval_seed(family, index, seed, EVAL_SEEDS_FROM)
    return self.task(family, number)
