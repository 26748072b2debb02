"""The watchdog's verdicts on the readings of a real learner that breaks."""

import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import watchdog


def found(metrics, **config):
  """(step, rule) of each finding; the cases' log-probs are no sampler's."""
  rules = watchdog.Rules(
    reporting_settings.WatchdogConfig(gap_limit=0, **config)
  )
  return [
    (number, finding.rule)
    for number, m in enumerate(metrics, 1)
    for finding in rules.step(m)
  ]


def test_gradients_that_are_not_finite_are_seen(case):
  """Readings of a real learner with a broken parameter."""
  learner = case.learner()
  groups = case.groups()
  readings = [learner.update(groups)]
  params = learner.arrays()["params"]
  good = params["norm"]
  params["norm"] = jax.device_put(
    np.full(good.shape, np.nan, np.float32), good.sharding
  )
  readings += [learner.update(groups) for _ in range(3)]
  assert found(readings) == [(4, "nan")]
  assert found(readings, nan_updates=2) == [(3, "nan")]
  assert not found(readings, nan_updates=0)


@pytest.mark.slow
def test_a_gradient_that_explodes_is_seen(case):
  """The same learner gets rewards a thousand times larger."""
  learner = case.learner(advantage="dr_grpo", learning_rate=1e-6)
  readings = [learner.update(case.groups()) for _ in range(3)]
  large = [
    case.group([1000.0 * r for r in case.rng.random(3)], f"l{i}")
    for i in range(2)
  ]
  readings.append(learner.update(large))
  assert found(readings, window=3) == [(4, "gradient")]


@pytest.mark.slow
def test_tasks_never_solved_are_seen_with_a_value_head_too(case):
  """Its errors are advantages, and no sign that anything can be learned."""
  learner = case.learner(advantage="gae", skip_zero_advantage=False)
  failed = lambda: [case.group([0.0, 0.0], f"g{i}") for i in range(2)]
  readings = [learner.update(failed()) for _ in range(2)]
  assert readings[1]["optimizer_steps"] == 2
  assert found(readings, no_gradient_updates=2) == [(2, "unsolved")]
  readings.append(learner.update([case.group([1.0, 0.0], "h")]))
  assert not found(readings[1:], no_gradient_updates=2)
