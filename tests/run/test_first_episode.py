"""A wrong part of the user's own is refused before anything is compiled."""

import json

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.run import addresses
from tunix.rl.multi_turn.run import models

HERE = f"{__name__}:"


class Gym:
  def start(self, task):
    del task
    return self._show()

  def act(self, action):
    del action
    return self._show()

  def evaluate(self):
    return base.Evaluation(score=0.0, success=False)

  def close(self):
    pass

  def _show(self):
    return base.Observation(screenshot=np.zeros((96, 128, 3), np.uint8))


class Tasks:
  def train_task(self, family, index, seed):
    return self._task(family, f"{seed}-{2 * index}")

  def eval_task(self, family, index, seed):
    return self._task(family, f"{seed}-{2 * index + 1}")

  def _task(self, family, name):
    return base.Task(f"{family}/{name}", family, "Click.")


class StartsWithoutTask(Gym):
  def start(self):
    return self._show()


class StartsWithPixels(Gym):
  def start(self, task):
    return np.zeros((96, 128, 3), np.uint8)


class ActsWithNothing(Gym):
  def act(self, action):
    return None


class ShowsTrees(Gym):
  width, height = 128, 96

  async def start(self, task):
    return self._show()

  async def close(self):
    pass

  def _show(self):
    return base.Observation(None, axtree="[1] button 'OK'")


class EvaluatesToNumber(Gym):
  def evaluate(self):
    return 1.0


class EvaluateRaises(Gym):
  def evaluate(self):
    return self.nothing


class EvaluatesTheAnswer(Gym):
  def evaluate(self):
    return base.Evaluation(score=float({}["answer"]), success=False)


class FindsNothing(Gym):
  def act(self, action):
    raise RuntimeError("nothing is in the middle of the screen")


class StartsLate(Gym):
  def start(self, task):
    raise ConnectionError("503 from the pool")


class Waits(Gym):
  async def start(self, task):
    raise AssertionError("played in a trial")


class RefusesClicks(Gym):
  def act(self, action):
    raise ValueError("keys only")


class TakesNoSeed(Tasks):
  def train_task(self, family, index):
    return self._task(family, index)


class ReturnsMapping(Tasks):
  def train_task(self, family, index, seed):
    return {"task_id": "a"}


class TaskWithData(Tasks):
  def _task(self, family, name):
    return base.Task(name, family, data={"a": 1})


class NoHeldOutTask(Tasks):
  def eval_task(self, family, index, seed):
    raise KeyError(index)


class CannotBeMade(Tasks):
  def __init__(self):
    self.nothing.append(1)


def spec(gym=Gym, tasks=Tasks):
  return environments.gyms.GymSpec(make=gym, tasks=tasks)


GOOD = spec()
SPECS = {
    part.__name__: spec(part)
    for part in (
        StartsWithoutTask, StartsWithPixels, ActsWithNothing,
        EvaluatesToNumber, EvaluateRaises, EvaluatesTheAnswer, RefusesClicks,
        FindsNothing, StartsLate, Waits,
    )
} | {
    part.__name__: spec(tasks=part)
    for part in (
        TakesNoSeed, ReturnsMapping, TaskWithData, NoHeldOutTask, CannotBeMade,
    )
} | {
    "ShowsTrees": environments.gyms.GymSpec(
        make=ShowsTrees, tasks=Tasks, size_known_after_start=True
    )
}  # fmt: skip
globals().update({f"SPEC_{name}": one for name, one in SPECS.items()})


def one_argument(task):
  return float(bool(task))


def returns_text(task, answer, info):
  del task, answer, info
  return "good"


def raises(task, answer, info):
  del answer, info
  return task.nothing


def needs_two_turns(task, answer, info):
  del task, answer
  return float([info][1])


def wrong_turns(task, step):
  return [task, step]


class Echo(environments.BaseEnv):
  def __init__(self, word):
    self.word = word

  def reset(self):
    return {"question": self.word}, {}

  def step(self, action):
    del action
    return {}, 1.0, True, {}


class ResetsToObservation(Echo):
  def reset(self):
    return {"question": self.word}


class StepsToPair(Echo):
  def step(self, action):
    return {}, 1.0


def refusal(tmp_path, monkeypatch, *settings):
  """The error of a run with these settings, before a policy is loaded."""

  def loaded(*args, **kwargs):
    raise AssertionError("accepted: the policy is loaded")

  monkeypatch.setattr(models, "make_policy", loaded)
  with pytest.raises(config_lib.ConfigError) as refused:
    small_runs.make_run(tmp_path, *settings)
  (problem,) = refused.value.problems
  assert "\n" not in problem
  return problem


@pytest.mark.parametrize(
  "name, words",
  [
    ("StartsWithoutTask", ["start() takes 1 positional argument"]),
    ("StartsWithPixels", ["must return an Observation, got ndarray"]),
    ("ActsWithNothing", ["ActsWithNothing.act", "Observation, got NoneType"]),
    ("EvaluatesToNumber", ["evaluate must return an Evaluation, got float"]),
    ("EvaluateRaises", ["no attribute 'nothing'", "test_first_episode.py"]),
    ("TakesNoSeed", ["TakesNoSeed.train_task('t', 0, 0)", "takes 3"]),
    ("ReturnsMapping", ["must return a gyms.base.Task, got a dict"]),
    ("TaskWithData", ["'data'; a Task has task_id, family", "params takes"]),
    ("NoHeldOutTask", ["NoHeldOutTask.eval_task", "KeyError: 0", "line"]),
    ("CannotBeMade", ["no attribute 'nothing'"]),
  ],
)
def test_a_gym_or_its_tasks(tmp_path, monkeypatch, name, words):
  problem = refusal(
    tmp_path, monkeypatch, f"gym={HERE}SPEC_{name}", "tasks=[t]"
  )
  if name != "CannotBeMade":
    assert f"gym.name={HERE}SPEC_{name}" in problem
  for word in words:
    assert word in problem


@pytest.mark.parametrize(
  "name, words",
  [
    ("one_argument", ["one_argument() takes 1 positional argument but 2"]),
    ("returns_text", ["'returns_text'", "finite number, got 'good'"]),
    ("raises", ["no attribute 'nothing'", "test_first_episode.py, line"]),
    ("wrong_turns", ["wrong_turns", "finite number"]),
  ],
)
@pytest.mark.parametrize("gym", ["desktop", "own"])
def test_a_reward(tmp_path, monkeypatch, name, words, gym):
  own = [f"gym={HERE}GOOD", "tasks=[t]"] if gym == "own" else []
  problem = refusal(tmp_path, monkeypatch, f"reward={HERE}{name}", *own)
  for word in [f"environment.reward={HERE}{name} fails in a trial", *words]:
    assert word in problem


@pytest.mark.parametrize(
  "name, words",
  [
    ("ResetsToObservation", "reset() must return (observation, info), got"),
    ("StepsToPair", "step() must return (observation, reward, done, info)"),
  ],
)
def test_an_environment(tmp_path, monkeypatch, name, words):
  rows = tmp_path / "words.jsonl"
  rows.write_text(
    "".join(
      json.dumps({"task_id": f"t{i}", "word": "w"}) + "\n" for i in range(9)
    )
  )
  settings = (
    "task_source.source=jsonl",
    f"task_source.path={rows}",
    "tasks=[]",
    "agent.parser=qwen",
    "agent.on_parse_error=answer",
    "policy=qwen3_text_tiny",
  )
  problem = refusal(
    tmp_path, monkeypatch, f"environment={HERE}{name}", *settings
  )
  assert f"environment.name={HERE}{name} fails in a trial of task" in problem
  assert words in problem
  with pytest.raises(AssertionError, match="accepted"):
    refusal(tmp_path, monkeypatch, f"environment={HERE}Echo", *settings)
  rows.write_text(rows.read_text().replace("word", "wrod"))
  problem = refusal(tmp_path, monkeypatch, f"environment={HERE}Echo", *settings)
  assert "Echo needs 'word', which task t" in problem


@pytest.mark.parametrize(
  "settings, words",
  [
    (["gym=GOOD"], ""),
    (["gym=SPEC_Waits"], ""),
    (["gym=SPEC_RefusesClicks"], "keys only"),
    (["gym=SPEC_FindsNothing"], "nothing is in the middle"),
    (["gym=SPEC_EvaluatesTheAnswer"], "KeyError: 'answer'"),
    (["gym=SPEC_StartsLate"], "503 from the pool"),
    (["gym=SPEC_ShowsTrees"], ""),
    (["gym=GOOD", "reward=needs_two_turns"], "list index out of range"),
  ],
)
def test_what_may_pass_or_is_due_to_the_trial_is_a_warning(
  tmp_path, monkeypatch, caplog, settings, words
):
  settings = [text.replace("=", f"={HERE}") for text in settings]
  with pytest.raises(AssertionError, match="accepted"):
    refusal(tmp_path, monkeypatch, *settings, "tasks=[t]")
  assert ("fails in a trial" in caplog.text) == bool(words)
  assert words in caplog.text


def test_a_dry_run_takes_a_gym_by_its_path(tmp_path):
  config = config_lib.load_config(
    [f"run.dir={tmp_path}", f"gym={HERE}GOOD", "tasks=[t]", "run.dry_run=true"]
  )
  assert not addresses.addresses(config)


def test_every_task_of_tasks_without_end_is_none(tmp_path, monkeypatch):
  problem = refusal(tmp_path, monkeypatch, "eval.episodes_per_task=0")
  assert "eval.episodes_per_task=0 is every task of a list" in problem
  assert "task_source.source=generated makes tasks without end" in problem
