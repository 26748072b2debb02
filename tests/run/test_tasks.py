"""Training tasks in the configured order, drawn by a run's own sampler."""

import collections

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.run import tasks as run_tasks

FAMILIES = ("click-button", "enter-text")


def load(*overrides):
  return config_lib.load_config(
    [
      f"tasks=[{','.join(FAMILIES)}]",
      "task_source.order=curriculum",
      "learner.groups_per_step=4",
      *overrides,
    ]
  )


def drawn(sampler, rate_of, count):
  """(family, level) of `count` draws whose groups succeed at these rates."""
  collected = []
  for _ in range(count):
    task = next(sampler)
    level = task.params["difficulty"]
    collected.append((task.family, level))
    won = round(8 * rate_of(level))
    members = tuple(
      trajectory.Trajectory(
        trajectory_id=f"{task.task_id}-{len(collected)}-{i}",
        status=trajectory.TrajectoryStatus(
          "succeeded" if i < won else "failed"
        ),
      )
      for i in range(8)
    )
    group = trajectory.TrajectoryGroup("train-0", task.task_id, members)
    sampler.on_event(events.GroupFinished(group, "accepted"))
  return collected


def test_harder_tasks_come_as_easier_ones_are_solved():
  config, source = run_tasks.resolve(load("task_source.levels=[0,2]"))
  sampler = run_tasks.make_sampler(config, source)
  learning = drawn(sampler, {0: 0.5, 2: 0.0}.get, 120)
  solved = drawn(sampler, {0: 1.0, 2: 0.5}.get, 120)
  share = lambda draws: collections.Counter(level for _, level in draws)
  assert share(learning[40:])[0] > 3 * share(learning[40:])[2] > 0
  assert share(solved[40:])[2] > 3 * share(solved[40:])[0] > 0
  assert {family for family, _ in learning} == set(FAMILIES)


def test_without_levels_tasks_are_of_the_gyms_difficulty():
  config, source = run_tasks.resolve(load("gym.options.difficulty=1"))
  sampler = run_tasks.make_sampler(config, source)
  assert {next(sampler).params["difficulty"] for _ in range(20)} == {1}
  (first, *_) = run_tasks.eval_tasks(config, source)
  assert first.params["difficulty"] == 1


def test_evaluation_stays_at_the_gyms_difficulty():
  config, source = run_tasks.resolve(load("task_source.levels=[1,2]"))
  tasks = run_tasks.eval_tasks(config, source)
  assert {task.params["difficulty"] for task in tasks} == {0}


@pytest.mark.parametrize("overrides, words", [
    (["task_source.levels=[0,3]"], r"holds 3, .*levels \[0, 1, 2\]"),
    (["task_source.levels=[0,0]"], "has one twice"),
    (["task_source.levels=[1]", "task_source.order=in_turn"], "=curriculum"),
    (["task_source.levels=[1]", "task_source.source=jsonl",
      "task_source.path=x.jsonl"], "source=jsonl has a list"),
    (["task_source.levels=[1]", "gym=miniwob", "tasks=[click-test]"],
     "gym.name=miniwob has none"),
])  # fmt: skip
def test_levels_that_cannot_be_drawn_are_refused(overrides, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    load(*overrides)


def test_levels_need_a_gym():
  config = config_lib.load_config(
    [
      "policy=qwen3_text_tiny",
      "environment=gsm8k",
      "tasks=[]",
      "task_source.order=curriculum",
      "task_source.levels=[1]",
      "task_source.source=generated",
    ]
  )
  with pytest.raises(config_lib.ConfigError, match="environment.name=gsm8k"):
    run_tasks.resolve(config)
