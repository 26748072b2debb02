"""A gym that does nothing: what is measured of a server is the server's.

Imported by the gym server (`--import`), which then knows a gym "blank".
"""

import numpy as np
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base

WIDTH, HEIGHT = 128, 96


class BlankGym:
  """Shows the same screen after every action."""

  runs_inline = True

  def __init__(self):
    self._seen = base.Observation(
      np.zeros((HEIGHT, WIDTH, 3), np.uint8), instruction="Wait."
    )

  async def start(self, task):
    del task
    return self._seen

  async def act(self, action):
    del action
    return self._seen

  async def evaluate(self):
    return base.Evaluation(0.0, False)

  async def close(self):
    pass


class BlankTasks:
  def __init__(self, families=None):
    del families

  def families(self):
    return ("blank",)

  def train_task(self, family, index, seed=0):
    return base.Task(f"blank/{index}", family, seed=index)

  def eval_task(self, family, index, seed=0):
    return base.Task(f"blank/eval/{index}", family, seed=index)


gyms.register("blank", gyms.GymSpec(make=BlankGym, tasks=BlankTasks))
