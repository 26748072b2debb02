"""The probe tells an engine that stands still from one that rounds."""

import numpy as np
import pytest
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.core import policy_client

TOKENS = 16
ROUNDING = 0.02
"""Of log-probs in bfloat16, in nats; another one for other weights."""


class Versions:
  """An engine and a policy with log-probs that drift, each rounded apart."""

  def __init__(self, seed, step, rounding=ROUNDING):
    self.rng = np.random.default_rng(seed)
    self.step, self.rounding = step, rounding
    self.true = self.rng.uniform(-4.0, -1.0, TOKENS)
    self.new_version()
    self.load()

  def new_version(self):
    self.true = self.true + self.rng.normal(0, self.step, TOKENS)
    self.policy = self.rounded()

  def load(self):
    self.engine = self.rounded()

  def rounded(self):
    noise = self.rng.normal(0, self.rounding, TOKENS)
    return (self.true + noise).astype(np.float32)

  async def generate(self, prompt, sampling, *, session):
    del prompt, sampling, session
    return policy_client.Completion(
      np.arange(TOKENS, dtype=np.int32),
      self.engine,
      np.zeros(TOKENS, np.int32),
      policy_client.FinishReason.LENGTH,
    )

  async def release(self, session):
    del session

  async def aclose(self):
    pass


def probe_of(versions, tolerance):
  prompt = policy_client.TokenPrompt(np.arange(4, dtype=np.int32), ())
  return hand_over_probe.Probe(
    lambda: versions, [prompt], lambda *_: [versions.policy], tolerance
  )


@pytest.mark.parametrize("step", [0.0, 0.002, 0.01])
def test_rounding_is_no_fault(step):
  versions = Versions(0, step)
  probe = probe_of(versions, 0.1)
  probe.check(None)
  for _ in range(1000):
    versions.new_version()
    versions.load()
    probe.check(None)


@pytest.mark.parametrize(
  "step, rounding, tolerance, most",
  [
    (0.002, ROUNDING, 0.1, 400),
    (0.01, ROUNDING, 0.1, 20),
    (1e-5, 1e-6, 1e-3, 1),
    (0.02, 1e-6, 1e-3, 1),
  ],
)
def test_an_engine_that_stands_still_is_found_out(
  step, rounding, tolerance, most
):
  """At once where the step exceeds rounding, else as soon as steps add up."""
  for seed in range(100):
    versions = Versions(seed, step, rounding)
    probe = probe_of(versions, tolerance)
    probe.check(None)
    with pytest.raises(hand_over_probe.ProbeMismatch):
      for _ in range(most):
        versions.new_version()
        probe.check(None)


def test_the_same_weights_again_are_no_fault():
  versions = Versions(0, 0.0)
  probe = probe_of(versions, 0.1)
  for _ in range(3):
    probe.check(None)
