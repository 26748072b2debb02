"""A gym that starts once, for the trial before a run, and never again."""

import itertools

import numpy as np
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn.environments.gyms import base

_starts = itertools.count()


def mend():
  """Lets the next start succeed."""
  global _starts
  _starts = itertools.count()


class BreakingGym:
  def start(self, task):
    del task
    if next(_starts):
      raise OSError("no screen")
    return base.Observation(screenshot=np.zeros((96, 128, 3), np.uint8))

  def act(self, action):
    raise NotImplementedError(action.kind)

  def evaluate(self):
    return base.Evaluation(score=0.0, success=False)

  def close(self):
    pass


class ThreeTasks:
  """Three to train on, and any number held out."""

  def train_task(self, family, index, seed):
    if index == 3:
      raise StopIteration
    return base.Task(f"{family}/{seed}/{index}", family, "Click.")

  def eval_task(self, family, index, seed):
    return base.Task(f"{family}/{seed}/eval-{index}", family, "Click.")


GYM = environments.gyms.GymSpec(make=BreakingGym, tasks=ThreeTasks)
