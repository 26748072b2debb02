"""Faults of one process of a run, for `run.imports`.

`$POD_FAULT` chooses: `update` raises in the second optimizer step, where the
other processes are in a program of all devices; `gym` holds every action of a
gym while the file `$POD_STUCK` exists.
"""

import asyncio
import os

from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.learner import learner


def fail_in_update():
  real, made = learner.Learner._step, []  # pylint: disable=protected-access

  def step(self, minibatch):
    made.append(1)
    if len(made) == 2:
      raise MemoryError("RESOURCE_EXHAUSTED: no room for this test")
    return real(self, minibatch)

  learner.Learner._step = step  # pylint: disable=protected-access


def hold_gym():
  real = cua_env.CUAEnv.step

  async def step(self, action):
    while os.path.exists(os.environ["POD_STUCK"]):
      await asyncio.sleep(0.05)
    return await real(self, action)

  cua_env.CUAEnv.step = step


_FAULTS = {"": lambda: None, "update": fail_in_update, "gym": hold_gym}
_FAULTS[os.environ.get("POD_FAULT", "")]()
