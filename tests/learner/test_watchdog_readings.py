"""What the watchdog makes of the readings of a real learner that breaks."""

import jax
import numpy as np
from tunix.rl.multi_turn.reporting import settings
from tunix.rl.multi_turn.reporting import watchdog


def found(metrics, **config):
  """(step, rule) of each finding."""
  rules = watchdog.Rules(settings.WatchdogConfig(**config))
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
