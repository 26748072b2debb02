"""A gym in which a click on the left half of the screen is right.

Its oracle clicks on either half: a policy that was cloned from it solves half
of the tasks, and learns the rest in a few steps.
"""

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import spec


class Gym:
  """Two turns: any first action, and the click that decides."""

  def __init__(self, width: int, height: int):
    self._width, self._height = width, height

  def _seen(self, **options):
    rng = np.random.default_rng((self.task.seed, self.turns))
    shape = (self._height, self._width, 3)
    return base.Observation(rng.integers(0, 256, shape, np.uint8), **options)

  def start(self, task):
    self.task, self.turns, self.left = task, 0, False
    return self._seen()

  def act(self, action):
    self.turns += 1
    self.left = action.x is not None and action.x < self._width / 2
    return self._seen(done=self.turns == 2)

  def evaluate(self):
    return base.Evaluation(float(self.left), self.left)

  def close(self):
    pass


class Tasks:
  def families(self):
    return ("left",)

  def train_task(self, family, index, seed=0):
    return base.Task(f"{family}/{index}", family, "Click left.", seed=index)

  def eval_task(self, family, index, seed=0):
    return self.train_task(family, 10**6 + index)


def oracle(gym):
  if gym.turns == 2:
    return None
  x = (gym.task.seed * 7 // 3 + gym.turns) % 2 * 32 + 16
  return gui_action.GuiAction(gui_action.GuiActionKind.CLICK, x=x, y=24)


GYM = spec.GymSpec(
  make=Gym,
  tasks=Tasks,
  lists_tasks=True,
  set_by_run=spec.SIZE,
  oracle=oracle,
  describe=lambda gym, x, y: None,
  runs_inline=True,
)
