"""Gym servers on the loopback interface, and gyms that misbehave in them."""

import asyncio
import contextlib
import dataclasses
import threading
import time

from cua_gyms import genv
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import executions
from cua_gyms.gym_server import gym_app
import numpy as np
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import http_server as serving_lib
from tunix.rl.multi_turn.net import request_bodies

FAMILIES = ("click-button", "enter-text")


class NaughtyGym:
  """Does what its task's family says; counts those that are open."""

  open_now = 0
  closed = 0
  starts = 0
  closed_while_busy = 0

  def __init__(self, **settings):
    self._settings = settings
    self._open = False
    self._busy = False

  async def start(self, task):
    type(self).starts += 1
    self._family = task.family
    if task.family == "fail-start":
      raise RuntimeError("no screen")
    if task.family == "slow-start":
      await asyncio.sleep(0.3)
    if task.family == "hang-start":
      await asyncio.sleep(3600)
    type(self).open_now += 1
    self._open = True
    return self._show()

  def act(self, action):
    if self._family == "fail-step":
      raise ValueError("the window is gone")
    if self._family == "hang-step":
      time.sleep(4.0)
    if self._family == "garbage-step":
      return "garbage"
    if self._family == "tree-step":
      return dataclasses.replace(self._show(), axtree="[1] button")
    if self._family == "stubborn-step":
      return self._will_not_be_cancelled()
    return self._show()

  async def _will_not_be_cancelled(self):
    self._busy = True
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0.05)
    self._busy = False
    return self._show()

  async def evaluate(self):
    if self._family == "nan-score":
      return base.Evaluation(float("nan"), False)
    return base.Evaluation(0.25, False, {"array": np.zeros(3)})

  async def close(self):
    type(self).closed_while_busy += self._busy
    if self._family == "fail-close":
      raise RuntimeError("will not close")
    if self._open:
      type(self).open_now -= 1
      type(self).closed += 1
      self._open = False

  def _show(self):
    return base.Observation(np.zeros((32, 48, 3), np.uint8))


class NaughtyTasks:
  """Any family there may be."""

  def __init__(self, families):
    self._families = families

  def families(self):
    return self._families

  def train_task(self, family, index, seed=0):
    params = {}
    if family == "answers":
      params["validators"] = [
        {"type": "state", "weight": 1},
        {"id": "said", "type": "answer", "weight": 3, "expected": "blue"},
      ]
    return base.Task(
      f"naughty/{family}/{index}", family, seed=index, params=params
    )

  eval_task = lambda self, family, index, seed=0: self.train_task(
    family, 1000 + index, seed
  )


def naughty(*families):
  return catalog.ServedGym(
    gym_id="naughty",
    gym="naughty",
    families=families,
    train_tasks=2,
    eval_tasks=0,
  )


def desktop(**changes):
  return catalog.ServedGym(
    **{"gym_id": "desktop", "gym": "desktop", "families": FAMILIES, **changes}
  )


@contextlib.contextmanager
def serving(
  *specs, token="", connections=request_bodies.ConnectionLimits(), **limits
):
  """(url, app) of a server with these gyms."""
  app = gym_app.App(
    specs or (desktop(),),
    limits=executions.ExecutionLimits(**limits),
    token=token,
  )
  with serving_lib.LoopbackServer(app.asgi, limits=connections) as server:
    yield server.url, app


def gym(url, gym_id="desktop", **settings):
  return genv.GenvGym(url, gym_id, **settings)


def instance(family, index, split="train", seed=0):
  """The task of the desktop that the server knows by this name."""
  return base.Task(
    f"{family}@{split}:{index}:{seed}",
    family,
    params={"genv": {"identifier": f"{family}@{split}:{index}:{seed}"}},
  )


async def until(condition, seconds=20.0):
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.01)


def threads():
  return sum(t.name.startswith("tunix") for t in threading.enumerate())


if "naughty" not in gyms.names():
  gyms.register("naughty", gyms.GymSpec(make=NaughtyGym, tasks=NaughtyTasks))
