"""Rewards are checked where they enter; a bad one is an invalid episode."""

import asyncio

import collector_fakes as fakes
import pytest
from tunix.rl.multi_turn import rewards as rewards_lib
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import metrics

Status = trajectory_lib.TrajectoryStatus
HUGE = [
  (float("nan"), "must be a finite number, got nan"),
  (float("inf"), "must be a finite number, got inf"),
  (1e308, "larger than 1e+06; scale the rewards, or raise collect.max_rew"),
  (-1e7, "-1e+07 is larger than 1e+06"),
  (10**400, "one of 1329 bits"),
  ("1.0", "got str"),
  (None, "got NoneType"),
  ([1.0], "got list"),
]


def collect(env, reward=None, agent=None, **kwargs):
  recorder = fakes.Recorder()
  engine = tc.TrajectoryCollectEngine(
    agent or fakes.ListAgent(),
    env,
    fakes.say_x,
    reward,
    observers=recorder,
    max_reward=1e6,
    **kwargs,
  )
  return asyncio.run(engine.collect()), recorder.of(events.Fault)


def check(result, faults, stage, said):
  assert result.status is Status.ENV_ERROR
  (fault,) = faults
  assert (fault.stage, fault.kind) == (stage, "RewardError")
  assert said in fault.message and result.error.endswith(fault.message)
  assert abs(result.reward) <= 1e6
  assert all(abs(s.mc_return) <= 2e6 for s in result.steps)
  group = trajectory_lib.TrajectoryGroup("g", "t", [result])
  assert metrics.group_metrics([group])["refused_rewards"] == 1


@pytest.mark.parametrize("reward, said", HUGE)
def test_of_a_step(reward, said):
  check(*collect(fakes.ScriptEnv(rewards=(0.5, reward, 0.0))), "step", said)


@pytest.mark.parametrize("reward, said", HUGE)
def test_of_the_episode(reward, said):
  result, faults = collect(fakes.ScriptEnv(), lambda trajectory: reward)
  check(result, faults, "reward", said)
  assert result.reward == 1.0  # What the environment itself gave is kept.


def test_a_sum_that_grows_too_large():
  env = fakes.ScriptEnv(rewards=(7e5, 7e5, -7e5))
  check(*collect(env), "step", "1.4e+06 is larger than 1e+06")
  result, faults = collect(fakes.ScriptEnv(rewards=(7e5,)), lambda t: 7e5)
  check(result, faults, "reward", "1.4e+06")


def test_the_largest_reward_is_allowed():
  for sign in (1, -1):
    result, faults = collect(fakes.ScriptEnv(rewards=(sign * 1e6, 0.0)))
    assert not faults and result.status.is_policy_outcome
    assert result.reward == sign * 1e6


@pytest.mark.parametrize("value", [float("nan"), 1e308, "x", None])
def test_an_agent_that_rewrites_its_rewards(value):
  class Rewrites(fakes.ListAgent):
    def update_from_model(self, response):
      self.trajectory.steps.append(trajectory_lib.Step(model_response=response))
      return super().update_from_model(response)

    def update_from_env(self, observation, reward, done, info=None):
      super().update_from_env(observation, reward, done, info)
      if len(self.trajectory.steps) > 1:
        self.trajectory.steps[0].reward = value

  env = fakes.ScriptEnv(rewards=(0.25, 0.0, 0.0))
  result, faults = collect(env, agent=Rewrites())
  assert result.status is Status.ENV_ERROR
  assert [f.kind for f in faults][-1] == faults[-1].kind
  assert [s.reward for s in result.steps] == [0.25, 0.0, 0.0]
  trajectory_lib.TrajectoryGroup("g", "t", [result])


def test_a_world_of_bad_rewards_says_so_when_it_gives_up():
  collector = tc.GroupCollector(
    lambda task: (fakes.ListAgent(), fakes.ScriptEnv(rewards=(1e308,))),
    fakes.say_x,
    tc.CollectConfig(group_size=2, min_valid=1, max_requeues=0),
  )
  from tunix.rl.queue import group_queue  # pylint: disable=g-import-not-at-top

  queue = group_queue.GroupQueue(1)
  loop = tc.CollectLoop(
    collector, tc.TaskSampler([1]), queue, backoff=0, max_failed_groups=2
  )
  with pytest.raises(tc.CollectError, match=r"RewardError: .*max_reward"):
    asyncio.run(loop.run())


@pytest.mark.parametrize("bad", [1e400, 10**400, float("nan")])
def test_a_reward_output_is_finite(bad):
  with pytest.raises(ValueError, match="must be a finite number"):
    rewards_lib.RewardOutput(bad)
  with pytest.raises(ValueError, match="mine: a reward must be a finite"):
    rewards_lib.as_reward(bad, "mine")


def test_a_weighted_sum_that_overflows_names_its_reward():
  rewards_lib.register("vast")(lambda task, action: 1e308)
  try:
    total = rewards_lib.combine_rewards({"vast": 1e10})
    with pytest.raises(ValueError, match="must be a finite number, got inf"):
      rewards_lib.evaluate(total, {}, "x")
  finally:
    rewards_lib.unregister("vast")
