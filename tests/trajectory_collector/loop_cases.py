"""Collectors whose episodes sample from their seeds, and a learner for them."""

import asyncio
import random

import collector_fakes as fakes
import numpy as np
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import policy_client


class SeededClient:
  """Samples letters from the request's seed, at its own pace."""

  def __init__(self, version=0, jitter=0.0):
    self.version = version
    self.jitter = jitter
    self.rng = random.Random()
    self.active = self.peak = 0

  async def generate(self, prompt, sampling, *, session):
    self.active += 1
    self.peak = max(self.peak, self.active)
    await asyncio.sleep(self.rng.random() * self.jitter)
    self.active -= 1
    rng = np.random.default_rng(sampling.seed)
    tokens = [*rng.integers(75, 100, size=4).tolist(), fakes.EOT]
    return policy_client.Completion(
      np.array(tokens),
      np.full(5, -1.0),
      np.full(5, self.version),
      policy_client.FinishReason.STOP,
    )

  async def release(self, session):
    pass


def model_of(client):
  return tc.PolicyModel(client, fakes.CharRenderer())


def good_pair(task):
  return fakes.ListAgent(), fakes.ScriptEnv((0.0, 1.0))


def make_collector(client=None, pair=good_pair, **kwargs):
  names = ("observers", "seed", "split")
  facts = {name: kwargs.pop(name) for name in names if name in kwargs}
  return tc.GroupCollector(
    pair,
    model_of(client or SeededClient()),
    tc.CollectConfig(**{"group_size": 4, "min_valid": 2, **kwargs}),
    **facts,
  )


def learn(queue, client, steps):
  """A synchronous learner."""
  batches = []
  for step in range(steps):
    batches.append(queue.get_batch(timeout=30))
    client.version = step + 1
    queue.set_version(step + 1)
  return batches
