"""A desktop that breaks: one episode in five, in every way there is.

Registers the gym `faulty-desktop` and its tasks; name this module in
`run.imports`. What breaks is a function of the task's seed and of how many
episodes came before, so all kinds occur.
"""

from __future__ import annotations

import asyncio
import itertools
import threading

from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop

STAGES = ("reset", "step", "evaluate", "close")
KINDS = ("raise", "hang", "garbage")
FAULTS = tuple(itertools.product(STAGES, KINDS))

_lock = threading.Lock()
_episodes = itertools.count()
injected: list[tuple[str, str]] = []


class FaultyDesktop:
  """A DesktopGym of which every fifth instance breaks once."""

  def __init__(self, width: int = 128, height: int = 96):
    self._gym = desktop.DesktopGym(width, height)
    with _lock:
      number = next(_episodes)
    self._fault = None
    if number % 5 == 4:
      self._fault = FAULTS[number // 5 % len(FAULTS)]

  async def _maybe_break(self, stage: str):
    if self._fault is None or self._fault[0] != stage:
      return None
    fault, self._fault = self._fault, None
    with _lock:
      injected.append(fault)
    if fault[1] == "raise":
      raise RuntimeError(f"injected: {stage} broke")
    if fault[1] == "hang":
      await asyncio.sleep(3600)
    return "garbage"

  async def start(self, task: base.Task):
    broken = await self._maybe_break("reset")
    seen = await self._gym.start(task)
    return broken or seen

  async def act(self, action):
    broken = await self._maybe_break("step")
    seen = await self._gym.act(action)
    return broken or seen

  async def evaluate(self):
    broken = await self._maybe_break("evaluate")
    return broken or await self._gym.evaluate()

  async def close(self):
    await self._maybe_break("close")
    await self._gym.close()


if "faulty-desktop" not in gyms.names():
  gyms.register(
    "faulty-desktop",
    gyms.GymSpec(make=FaultyDesktop, tasks=desktop.DesktopTasks),
  )
