"""ReMax: a greedy episode beside each group, which nothing is trained on."""

import dataclasses

import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.queue import group_store

STATUS = trajectory.TrajectoryStatus


def with_greedy(case, rewards, greedy, name="g"):
  group = case.group(rewards, name)
  greedy_episode = case.group([greedy], name).trajectories[0]
  return dataclasses.replace(group, extra=greedy_episode)


def test_the_advantage_is_the_reward_less_the_greedy_ones():
  group = advantages.GroupRewards(
    np.array([1.0, 0.25]), (np.zeros(2), np.zeros(3)), greedy=0.75
  )
  first, second = advantages.of_step(
    advantages.remax, [group], advantages.AdvantageOptions()
  )[0]
  assert first.tolist() == [0.25] * 2 and second.tolist() == [-0.5] * 3
  alone = dataclasses.replace(group, greedy=None)
  with pytest.raises(ValueError, match="greedy"):
    advantages.of_step(advantages.remax, [alone], advantages.AdvantageOptions())


def test_the_greedy_episode_is_a_baseline_and_no_sample(case):
  """Gradient and readings are those of groups without it."""
  learner = case.learner(advantage="remax", objective="policy_gradient")
  group = with_greedy(case, [1.0, 0.0, 1.0], 0.5)
  metrics = learner.update([group])
  assert metrics["episodes"] == metrics["valid_episodes"] == 3
  assert metrics["reward_mean"] == pytest.approx(2 / 3)
  trained = {m.trajectory_id for m in group}
  assert set(learner.advantages) == set(learner.left_out) == trained
  for member in group:
    want = member.reward - 0.5
    assert np.all(learner.advantages[member.trajectory_id] == want)
  # Equal rewards that differ from the greedy one's have a gradient.
  equal = with_greedy(case, [1.0, 1.0], 0.0)
  assert learner.update([equal])["zero_advantage_groups"] == 0
  same = with_greedy(case, [1.0, 1.0], 1.0)
  assert learner.update([same])["zero_advantage_groups"] == 1


def test_a_group_keeps_its_baseline_in_json_and_in_the_store(case, tmp_path):
  group = with_greedy(case, [1.0, 0.0], 0.5)
  again = trajectory.TrajectoryGroup.from_json(group.to_json())
  assert again.extra == group.extra and len(again) == 2
  assert "greedy" not in case.group([1.0]).to_json()
  store = group_store.SqliteGroupStore(tmp_path / "q.db", images=case.store)
  store.append(0, group)
  ((_, loaded),) = store.load()
  assert loaded.extra.reward == 0.5
  store.close()
  with pytest.raises(ValueError, match="unfinished"):
    dataclasses.replace(
      group, extra=dataclasses.replace(group.extra, status=STATUS.RUNNING)
    )


def test_the_preset_asks_the_collector_for_it(monkeypatch):
  from tunix.rl.multi_turn.run import episodes

  collected = {}

  def collector(*args, **kwargs):
    collected.update(kwargs, model=args[1])

  monkeypatch.setattr(episodes.groups, "GroupCollector", collector)

  class Renderer:
    stop_token_ids = (1,)

  class Episodes:
    episode_reward = None

  for name, mode, is_greedy in (
    ("remax", "train", True),
    ("grpo", "train", False),
    ("remax", "sampled", False),
  ):
    config = config_lib.load_config(["name=x", f"algorithm={name}"])
    episodes.make_collector(
      config, Episodes(), None, Renderer(), observers=None, mode=mode
    )
    assert (collected["greedy_call"] is not None) == is_greedy
    assert collected["model"].sampling.temperature == 1
    if is_greedy:
      assert collected["greedy_call"].sampling.temperature == 0
