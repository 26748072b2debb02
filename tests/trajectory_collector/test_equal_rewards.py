"""Episodes of equal rewards, told apart by rounding alone: from the collector
to whatever compares rewards."""

import asyncio
import dataclasses

from agent_services.rollout_buffer import rules
import collector_fakes as fakes
import loop_cases as cases
import numpy as np
import pytest
from training_monitor.dashboard.views import step_page
from training_monitor.dashboard.views import task_pages
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.batches import examples
from tunix.rl.multi_turn.reporting import episode_tally
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import watchdog
from tunix.rl.queue import group_queue

EVEN = ((0.1, 0.2), (0.3, 0.0), (0.2, 0.1), (0.0, 0.3))
CANCELLED = ((0.1, 0.2, -0.3), (0.0, 0.0, 0.0), (0.3, -0.1, -0.2), (0.0,))
VARIED = ((1e-9,), (0.0,), (1e-9,), (0.0,))
# Turns of equal episodes differ, and these learn from turns.
OF_EPISODES = (
    "grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "gpg", "remax",
    "reinforce_pp_baseline", "gdpo",
)  # fmt: skip


def collected(*groups):
  """Groups with these turn rewards, by the collecting loop and its queue."""

  def pair(task):
    return fakes.ListAgent(), fakes.ScriptEnv(next(rewards[task]))

  rewards = {str(i): iter(members) for i, members in enumerate(groups)}
  queue = group_queue.GroupQueue(len(groups), order="admission")
  recorder = fakes.Recorder()
  loop = tc.CollectLoop(
    cases.make_collector(pair=pair, observers=recorder, concurrency=1),
    tc.TaskSampler(list(rewards), shuffle=False, epochs=1),
    queue,
  )
  asyncio.run(loop.run())
  assert recorder.of(events.Fault) == []
  groups = queue.get_batch(timeout=0)
  for episode in (t for group in groups for t in group):
    # The whole reward as the one part of it, as gdpo needs.
    part = {"reward": episode.reward, "weight": 1.0}
    episode.steps[-1].info["reward_metadata"] = {"score": part}
  return [dataclasses.replace(g, extra=g.trajectories[0]) for g in groups]


def test_rounding_reaches_the_learner():
  """No sum of the turns' rewards mends it; see `reward_equality`."""
  (group,) = collected(EVEN)
  assert sorted({t.reward for t in group}) == [0.3, 0.1 + 0.2]


@pytest.mark.parametrize("std_eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", OF_EPISODES)
def test_equal_episodes_have_no_advantage(name, std_eps):
  groups = collected(EVEN, CANCELLED)
  options = advantages.AdvantageOptions(std_eps=std_eps, pass_k=2)
  estimator = advantages.ESTIMATORS.get(name)
  batches, stats = examples.from_groups(groups, estimator, options)
  for values in stats.advantages.values():
    assert not np.any(values)
  assert stats.zero_groups == 2
  assert not any(e.has_gradient for group in batches for e in group)
  # Beside one with a gradient, too; gpg scales by the groups that have one.
  groups = collected(EVEN, VARIED)
  _, stats = examples.from_groups(groups, estimator, options)
  assert stats.zero_groups == 1
  one, two = (
    [stats.advantages[t.trajectory_id] for t in group] for group in groups
  )
  assert not np.any(one) and np.any(two)
  if name == "gpg":
    assert np.array(two)[0] == pytest.approx(2 * 0.5e-9)


@pytest.mark.parametrize(
  "name", ["reinforce_pp", "turn_returns", "gigpo", "hgpo"]
)
def test_equal_turns_have_no_advantage(name):
  """Each episode is one turn, whose reward was added up in the environment."""
  rewards = [(sum(turns),) for turns in EVEN]
  (group,) = collected(rewards)
  assert len({t.reward for t in group}) == 2
  _, stats = examples.from_groups(
    [group],
    advantages.ESTIMATORS.get(name),
    advantages.AdvantageOptions(std_eps=0.0),
  )
  assert not any(np.any(v) for v in stats.advantages.values())
  # Of the first turn, all returns are equal; gigpo and hgpo compare them.
  (group,) = collected(EVEN)
  for by_state in ("gigpo", "hgpo"):
    _, stats = examples.from_groups(
      [group],
      advantages.ESTIMATORS.get(by_state),
      advantages.AdvantageOptions(std_eps=0.0),
    )
    assert not any(v[0] for v in stats.advantages.values())
    assert any(v[1] for v in stats.advantages.values())


def test_every_estimator_is_tried_here():
  tried = {*OF_EPISODES, "reinforce_pp", "turn_returns", "gigpo", "hgpo"}
  no_comparison = {"none", "reward", "filtered"}
  # Documentation tests of the same process register estimators of their own.
  ours = {
    name: estimator
    for name in advantages.ESTIMATORS.names()
    if (estimator := advantages.ESTIMATORS.get(name))
    and estimator.__module__.startswith("tunix.")
  }
  names = {
    name
    for name, estimator in ours.items()
    if not isinstance(estimator, gae.TokenEstimator)
  }
  # A second name of an estimator is no other one.
  functions = {advantages.ESTIMATORS.get(name) for name in tried}
  untried = {n for n in names if advantages.ESTIMATORS.get(n) not in functions}
  assert tried <= names and untried == no_comparison


def test_a_bound_is_reached_up_to_rounding():
  (group,) = collected(((0.1, 0.7), (0.8, 0.0), (0.7, 0.0), (0.79,)))
  assert [t.reward for t in group][0] < 0.8
  _, stats = examples.from_groups(
    [group],
    advantages.ESTIMATORS.get("filtered"),
    advantages.AdvantageOptions(filter_reward=0.8),
  )
  assert [v[0] for v in stats.advantages.values()] == [1, 1, 0, 0]


def test_an_episode_of_rounding_alone_is_no_success():
  (group,) = collected(CANCELLED)
  assert {t.status for t in group} == {trajectory.TrajectoryStatus.FAILED}
  assert [t.reward for t in group] == [0.0] * 4


@pytest.mark.parametrize(
  "rewards, varies", [(EVEN, False), (CANCELLED, False), (VARIED, True)]
)
def test_all_that_compare_rewards_agree(rewards, varies):
  (group,) = collected(rewards)
  assert group.varies == varies
  readings = episode_tally.readings(episode_tally.of_groups([group]))
  assert readings["informative_groups"] == varies
  assert (readings["reward_std"] > 0) == varies
  _, stats = examples.from_groups(
    [group], advantages.grpo, advantages.AdvantageOptions()
  )
  assert (stats.reward_std > 0) == varies
  totals = [t.reward for t in group]
  sizes = rules.GroupRules(group_size=4)
  assert rules.is_valid_group(totals, sizes) == (varies, True)
  items = [{"uid": str(i), "reward": r} for i, r in enumerate(totals)]
  _, items = rules.normalize_group_data(("g", items))
  assert any(item["reward"] for item in items) == varies
  rows = [
    {
      "group": 0,
      "task_id": 1,
      "description": "",
      "app_name": "",
      "task_name": "",
      "status": "completed",
      "reward": reward,
      "task_success": False,
    }
    for reward in totals
  ]
  (shown,) = step_page.grouped(rows)
  assert shown["has_gradient"] == varies
  tries = [
    {"source_type": "step", "valid": True, "step_id": 1, **row} for row in rows
  ]
  assert task_pages._mixed(tries) == (int(varies), 1)
  metrics = stats.metrics() | {"success_rate": 0.5}
  judge = watchdog.Rules(
    reporting_settings.WatchdogConfig(no_gradient_updates=1)
  )
  assert bool(judge.step(metrics)) != varies


def test_a_part_of_a_group_is_compared_with_its_peers():
  (group,) = collected(EVEN)
  part = dataclasses.replace(
    group,
    trajectories=group.trajectories[:2],
    peer_rewards=tuple(t.reward for t in group.trajectories[2:]),
  )
  assert not part.varies
  assert dataclasses.replace(part, peer_rewards=(1.0,)).varies
