"""The simulator of asynchrony: closed forms, and the bound under every rule."""

import collections
import dataclasses
import itertools
import math
import pathlib
import statistics
import sys

import pytest
import trials

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import async_loop  # noqa: E402  pylint: disable=g-import-not-at-top
import simulate_async as sim  # noqa: E402

EVEN = sim.Costs(sigma=0.0, env_share=0.0)


def rules(max_staleness, **changes):
  queue = dataclasses.replace(
    sim.Rules().queue, max_staleness=max_staleness, **changes
  )
  return sim.Rules(queue)


def test_synchronous_training_waits_for_each_batch():
  costs = dataclasses.replace(EVEN, learn_s=0.5, sync_s=0.25)
  found = sim.simulate(costs, rules(0), steps=20, warm=2)
  # An episode of 1 s, an update of 0.5 s, the weights' 0.25 s.
  assert found["rate"] == pytest.approx(0.5 / 1.75)
  assert found["idle"]["slots"] == pytest.approx(0.75 / 1.75)
  assert (found["tokens"], found["oldest"]) == (pytest.approx(1), 0)


def test_a_learner_that_is_slower_than_the_engine_never_waits():
  costs = dataclasses.replace(EVEN, learn_s=4.0)
  found = sim.simulate(costs, rules(2), steps=20, warm=5)
  assert found["rate"] == pytest.approx(1)


def test_a_half_full_engine_decodes_faster():
  # 32 of 64 requests at 1 + 1 * 32 / 63 times the speed of all 64.
  costs = dataclasses.replace(EVEN, empty_speed=2.0, learn_s=1.0)
  found = sim.simulate(
    costs, dataclasses.replace(rules(0), groups_per_step=4), 10, 2
  )
  episode = 1 / (1 + 32 / 63)
  assert found["rate"] == pytest.approx(1 / (1 + episode))


@pytest.mark.parametrize("max_staleness", trials.by_default([1], [1, 2]))
@pytest.mark.parametrize("name", list(sim.named_rules(1)))
def test_no_rule_trains_on_older_tokens(name, max_staleness):
  """Simulated, and in the real loops, for episodes that sleep."""
  given = sim.named_rules(max_staleness)[name]
  costs = sim.Costs(slots=16, concurrency=16, turns=2)
  given = dataclasses.replace(given, groups_per_step=2)
  found = sim.simulate(costs, given, steps=30, warm=5)
  assert found["oldest"] <= max_staleness
  assert sum(found["staleness"].values()) == pytest.approx(1, abs=0.01)
  real, measured = async_loop.play(costs, given, 4, 1, unit=0.02)
  assert real["oldest"] <= max_staleness
  assert 0 < real["tokens"] and measured["learn_s"] >= costs.learn_s


def test_late_groups_make_room_in_the_simulation_too():
  """A straggler holds the learner up, unless another starts in its place."""

  class Straggler(sim.Simulation):
    def _next_draw(self):
      seconds = 1000.0 if self._started == 0 else 1.0
      return sim.Draw(self._started, seconds, (seconds,))

  costs = sim.Costs(env_share=0.0, slots=8, concurrency=8, learn_s=1.0)
  one = dataclasses.replace(rules(1), groups_per_step=2, group_size=1)
  late = dataclasses.replace(
    one, queue=dataclasses.replace(one.queue, admission="recent")
  )
  # Of two an update, one is always the straggler.
  held = Straggler(costs, one).run(steps=40, warm=10)["rate"]
  free = Straggler(costs, late).run(steps=40, warm=10)["rate"]
  assert held < 0.75 and free == pytest.approx(1, abs=0.02)


def test_tasks_come_again_and_share_their_part_of_the_variance():
  costs = sim.Costs(sigma=1.0, task_share=0.6, tasks=500)
  draws = list(itertools.islice(sim.draw_groups(costs, rules(1), 0), 1500))
  dealt = collections.Counter(draw.task for draw in draws)
  assert set(dealt.values()) == {3} and len(dealt) == 500
  of_task = [math.log(draw.typical_s) for draw in draws]
  of_all = [math.log(s) for draw in draws for s in draw.seconds]
  assert statistics.pvariance(of_task) == pytest.approx(0.6)
  assert statistics.pvariance(of_all) == pytest.approx(1, abs=0.05)
  assert statistics.mean(of_all) == pytest.approx(-0.5, abs=0.05)
