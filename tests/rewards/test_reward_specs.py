"""Rewards with options, of turns and of episodes, up to the learner."""

import asyncio
import pathlib
import sys

import collector_fakes as fakes
from cua_gyms.sandbox import python_tool
import documented_code
import numpy as np
import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import tool_request_env
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import examples
from tunix.rl.multi_turn.reporting import metrics
from tunix.rl.multi_turn.rewards import specs
from tunix.rl.multi_turn.tools import mcp_tools

Status = trajectory.TrajectoryStatus
TASK = {"question": "What is 3 * 9?", "ground_truth": "27"}
RIGHT = (
  '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*9"}}'
  "\n</tool_call>"
)
WRONG = RIGHT.replace("3*9", "3*")
BROKEN = '<tool_call>\n{"name": "calculator", "arguments": '


def play(spec, *texts, options=None, **kwargs):
  """The trajectory of an episode in which the policy writes `texts`."""
  plan = rewards.plan(spec)
  tool_map = {"calculator": tools.CalculatorTool}
  reward = None if plan.environment == "score" else plan.environment
  env = environments.ToolEnvironment(
    TASK, tool_map, reward, max_steps=len(texts), **(options or {})
  )
  agent = agents.ToolAgent("", "qwen", tool_map)
  replies = iter(texts)
  engine = tc.TrajectoryCollectEngine(
    agent,
    env,
    lambda messages: next(replies),
    plan.episode,
    max_steps=len(texts),
    **kwargs,
  )
  return asyncio.run(engine.collect())


def parts_of(episode):
  """The parts by name; each has a weight, too."""
  parts = episode.steps[-1].info["final_reward"]["parts"]
  return {
    name: {key: value for key, value in part.items() if key != "weight"}
    for name, part in parts.items()
    if isinstance(part["weight"], float)
  }


def turns_of(episode):
  return [step.reward for step in episode.steps]


class TestPlan:
  def test_a_name_or_answers_only_need_no_collector(self):
    plan = rewards.plan("exact_match")
    assert plan == rewards.RewardPlan(rewards.get_reward_fn("exact_match"))
    assert rewards.plan("success").environment == "success"
    assert rewards.plan({"success": 1, "exact_match": 0.5}).episode is None

  def test_options_of_answers(self):
    fn = rewards.plan({"numeric_match": {"tolerance": 0.1}}).environment
    assert rewards.evaluate(fn, TASK, "26").reward == 1.0
    assert rewards.evaluate(fn, TASK, "23").reward == 0.0
    fn = rewards.plan({"exact_match": {"ignore_case": True}}).environment
    assert rewards.evaluate(fn, {"answer": "Yes"}, " yes ").reward == 1.0

  @pytest.mark.parametrize(
    "spec, says",
    [
      ({"numeric_match": {"tolerence": 1}}, "did you mean 'tolerance'"),
      ({"numeric_match": {"tolerance": "x"}}, "tolerance='x'.*float"),
      ({"exact_match": {"weight": "much"}}, "weight"),
      ({"exact_match": True}, "numbers as weights"),
      ({"exact_match": float("nan")}, "finite"),
      ({"exact_match": {"per": "turn"}}, "no single turn"),
      ({"format": {"per": "trun"}}, "did you mean 'turn'"),
      ({}, "no part"),
      ({"formt": 1}, "did you mean 'format'"),
      ({"format": {"pattern": "("}}, r"format: pattern='\('.*regular exp"),
      ({"length_penalty": {"limit": -4}}, "limit=-4 must be >= 0"),
      ({"length_penalty": {"ramp": 0}}, "ramp=0 must be >= 1"),
      ({"repetition_penalty": {"n": 0}}, "n=0 must be >= 1"),
      ({"numeric_match": {"tolerance": -1}}, "tolerance=-1 must be >= 0"),
      (
        {
          "llm_judge": {
            "base_url": "http://j/v1",
            "model": "m",
            "temperature": -1,
          }
        },
        "temperature=-1 must be",
      ),
      (
        {
          "llm_judge": {
            "base_url": "http://j/v1",
            "model": "m",
            "highest": float("inf"),
          }
        },
        "highest=inf",
      ),
    ],
  )
  def test_what_is_wrong_is_named(self, spec, says):
    with pytest.raises(ValueError, match=says):
      rewards.plan(spec)

  def test_a_users_function_may_have_its_options_checked(self):
    def check(most=8):
      if most < 1:
        raise ValueError(f"most={most} must be >= 1")

    @rewards.register("checked_of_ours")
    @rewards.checked(check)
    def short(task, step, *, most: int = 8):
      return float(len(step.model_response) <= most)

    try:
      with pytest.raises(ValueError, match="checked_of_ours: most=0 must be"):
        rewards.plan({"checked_of_ours": {"most": 0}})
      assert rewards.plan({"checked_of_ours": {"most": 1}}).episode
      assert short({}, trajectory.Step(model_response="ab"), most=1) == 0.0
    finally:
      rewards.unregister("checked_of_ours")

  def test_math_names_its_extra(self, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tunix-multi-turn\[math\]"):
      rewards.plan("math")


class TestTurns:
  def test_turn_rewards_change_that_turns_step(self):
    episode = play(
      {"numeric_match": 1, "tool_success": {"weight": 0.5, "per": "turn"}},
      RIGHT,
      WRONG,
      RIGHT,
      "27",
      gamma=0.5,
    )
    assert turns_of(episode) == [0.5, 0.0, 0.5, 1.0]
    assert episode.reward == 2.0 and episode.status is Status.SUCCEEDED
    assert [s.mc_return for s in episode.steps] == [0.75, 0.5, 1.0, 1.0]
    assert parts_of(episode)["tool_success"] == {
      "reward": 2.0,
      "turns": [1.0, 0.0, 1.0, 0.0],
    }

  def test_the_mean_is_the_episodes(self):
    episode = play(
      {"numeric_match": 1, "tool_success": 0.5}, RIGHT, WRONG, "27"
    )
    # Of the turns with calls.
    assert turns_of(episode) == [0.0, 0.0, 1.25]

  def test_turn_rewards_reach_the_advantages(self):
    """The same outcome, another turn that failed: another advantage there."""
    spec = {"numeric_match": 1, "tool_success": {"per": "turn"}}
    members = [play(spec, RIGHT, WRONG, "27"), play(spec, WRONG, RIGHT, "27")]
    for member in members:
      member.sequences = [
        trajectory.TokenSequence(
          [1, 2, 3, 4],
          [False, True, True, True],
          [0, -1, -1, -1],
          [-1, 0, 0, 0],
          [0, 0, 1, 2],
        )
      ]
    group = trajectory.TrajectoryGroup("g", "t", tuple(members))
    assert list(group.valid) == members
    assert members[0].reward == members[1].reward == 2.0
    rows, stats = examples.from_groups(
      [group], advantages.turn_returns, advantages.AdvantageOptions()
    )
    first, second = (stats.advantages[m.trajectory_id] for m in members)
    assert first[0] == second[0]  # Returns 2 both.
    assert first[1] < second[1]  # It failed here, the other did not.
    np.testing.assert_array_equal(rows[0][0].advantages[1:], first)
    outcome, _ = examples.from_groups(
      [group], advantages.grpo, advantages.AdvantageOptions()
    )
    assert not any(e.has_gradient for e in outcome[0])

  def test_format(self):
    spec = {"score": 1, "format": {"pattern": "</tool_call>|^\\d+$"}}
    episode = play(spec, RIGHT, BROKEN, options={})
    assert parts_of(episode)["format"]["turns"] == [1.0, 0.0]
    assert parts_of(episode)["score"] == {"reward": 0.0}
    assert play(spec, RIGHT, "27").reward == 1.0
    assert play(spec, RIGHT, "It is 27").reward == 0.5

  def test_a_pattern_that_takes_for_ever_is_an_error(self):
    step = trajectory.Step(model_response="a" * 5000 + "!")
    with pytest.raises(ValueError, match="took longer"):
      rewards.get_reward_fn("format")({}, step, pattern=r"(a|aa)+$")
    with pytest.raises(ValueError, match="not a regular expression"):
      rewards.get_reward_fn("format")({}, step, pattern="(")

  def test_length_and_repetition(self):
    length = rewards.get_reward_fn("length_penalty")
    repeated = rewards.get_reward_fn("repetition_penalty")

    def of(fn, text, **options):
      return fn({}, trajectory.Step(model_response=text), **options)

    assert [of(length, "x" * n, limit=10, ramp=20) for n in (10, 15, 99)] == [
      0.0,
      -0.25,
      -1.0,
    ]
    assert of(repeated, "a b c d e f") == 0.0
    assert of(repeated, "a b " * 50) < -0.9
    assert of(repeated, "字字字字字字", n=2, unit="characters") == -0.8
    assert of(repeated, "short") == 0.0
    with pytest.raises(ValueError, match="n >= 1"):
      of(repeated, "x", n=0)
    with pytest.raises(ValueError, match="ramp"):
      of(length, "x", ramp=0)

  def test_stateful_tools_reward_turns(self):
    class Guess(tools.InstanceTool):
      async def execute(self, instance_id, parameters, **kwargs):
        self.state(instance_id)["reward"] = 5.0
        return "ok", float(parameters["x"]), {}

    schema = {"name": "guess", "parameters": {}}
    actions = [
      [trajectory.ToolCall("guess", {"x": x}) for x in xs]
      for xs in ((1, 2), (4,))
    ]
    for kind, want in (("turn", [3.0, 4.0, 0.0]), ("episode", [0, 0, 5.0])):
      tool = tools.StatefulToolAdapter(Guess({}, schema))
      env = environments.ToolEnvironment(
        TASK, {"guess": tool}, tool_rewards=kind
      )
      with environments.SyncEnv(env, timeout=20.0) as sync:
        sync.reset()
        assert [sync.step(a)[1] for a in (*actions, "done")] == want
      requested = tool_request_env.ToolRequestEnvironment(
        TASK, {"guess": tool}, tool_rewards=kind
      )
      with environments.SyncEnv(requested, timeout=20.0) as sync:
        sync.reset()
        assert [sync.step(a)[1] for a in (*actions, "done")] == want


class TestEpisodes:
  def test_a_users_episode_reward_with_turns_of_its_own(self):
    @rewards.register("credit")
    async def credit(task, action, trajectory, *, first: float = 1.0):
      assert task["ground_truth"] == "27" and action == "27"
      assert len(trajectory.steps) == 2
      metadata = {"why": "x", "reward": "no", "weight": None}
      return rewards.EpisodeOutput(3.0, metadata, (first,))

    try:
      episode = play({"credit": {"weight": 2, "first": 0.5}}, RIGHT, "27")
    finally:
      rewards.unregister("credit")
    assert turns_of(episode) == [1.0, 5.0]
    assert parts_of(episode)["credit"] == {"reward": 3.0, "why": "x"}
    logged = episode.steps[-1].info["final_reward"]["parts"]["credit"]
    assert logged["weight"] == 2.0

  def test_none_is_left_out_and_not_logged(self):
    plan = specs.EpisodeReward(
      [specs.Part("judge", lambda task, action, trajectory: None, "episode")]
    )
    out = asyncio.run(plan(trajectory.Trajectory(), TASK, "x"))
    assert out.reward == 0.0 and out.metadata == {"parts": {}}

  def test_an_error_ends_the_episode_not_the_run(self):
    def broken(task, action, trajectory):
      raise RuntimeError("boom")

    reward = specs.EpisodeReward([specs.Part("broken", broken, "episode")])
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(), fakes.ScriptEnv((1.0,)), fakes.say_x, reward
    )
    episode = asyncio.run(engine.collect())
    assert episode.status is Status.ENV_ERROR
    assert "RewardError" in episode.error and "boom" in episode.error

  def test_the_environments_verdict_is_kept(self):
    """The engine ends the episode: the environment evaluates, then the sum."""

    class Env(fakes.ScriptEnv):
      async def evaluate(self):
        return rewards.RewardOutput(0.5, {"success": True})

    plan = rewards.plan({"score": 1, "length_penalty": {"limit": 0, "ramp": 1}})
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(),
      Env((0.0, 0.0, 0.0)),
      fakes.say_x,
      plan.episode,
      max_steps=1,
    )
    episode = asyncio.run(engine.collect())
    assert episode.reward == -0.5 and episode.status is Status.SUCCEEDED
    assert parts_of(episode)["score"] == {"reward": 0.5}

  def test_parts_are_logged(self):
    episode = play({"numeric_match": 1, "tool_success": 0.5}, RIGHT, "27")
    group = trajectory.TrajectoryGroup("g", "t", (episode,))
    logged = metrics.group_metrics([group])
    assert logged["reward_part/tool_success"] == 1.0
    assert logged["reward_part/numeric_match"] == 1.0


class TestGuiState:
  INFO = {
    "evaluation": {
      "score": 0.0,
      "details": {"form": {"name": "Ada"}, "rows": ["a", "b"]},
    }
  }

  def score(self, task=None, **options):
    fn = rewards.get_reward_fn("gui_state")
    return fn(task or {}, "", self.INFO, **options)

  def test_paths_of_the_final_state(self):
    right = {"form.name": "Ada", "rows.1": "b"}
    assert self.score(expect=right).reward == 1.0
    half = {**right, "rows.1": "c"}
    assert self.score(expect=half).reward == 0.0
    out = self.score(expect=half, partial=True)
    assert out.reward == 0.5 and out.metadata == {"wrong": ["rows.1"]}
    assert self.score(expect={"form.age": None}).reward == 0.0

  def test_the_tasks_own_goes_first(self):
    task = {"expect_state": {"form.name": "Bob"}}
    assert self.score(task, expect={"form.name": "Ada"}).reward == 0.0
    params = {"params": {"expect_state": {"form.name": "Ada"}}}
    assert self.score(params).reward == 1.0

  def test_errors(self):
    with pytest.raises(ValueError, match="expects nothing"):
      self.score()
    with pytest.raises(ValueError, match="evaluates a state"):
      rewards.get_reward_fn("gui_state")({}, "", {}, expect={"a": 1})


@pytest.fixture(scope="module")
def math_reward():
  pytest.importorskip("math_verify")
  return rewards.plan({"math": {"deadline_s": 20.0}}).environment


class TestMath:
  @pytest.fixture(name="fn")
  def fixture_fn(self, math_reward):
    return math_reward

  @pytest.mark.parametrize(
    "truth, answer, reward",
    [
      ("1/2", "0.5", 1.0),
      (r"\frac{1}{2}", r"so the answer is \boxed{\frac{2}{4}}", 1.0),
      ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
      ("12", "It is 13.", 0.0),
      ("5", "no number", 0.0),
      ("5", "", 0.0),
    ],
  )
  def test_answers(self, fn, truth, answer, reward):
    assert rewards.evaluate(fn, {"answer": truth}, answer).reward == reward

  def test_no_truth(self, fn):
    with pytest.raises(ValueError, match="mathematics"):
      rewards.evaluate(fn, {"answer": "?"}, "1")

  @pytest.mark.slow
  def test_an_answer_that_never_ends(self):
    pytest.importorskip("math_verify")
    from tunix.rl.multi_turn.rewards import math_answers

    fn = math_answers.MathReward(deadline_s=3.0, workers=1)
    hard = rewards.evaluate(fn, {"answer": "3"}, "$9^{9^{9^{9^9}}}$")
    assert hard.reward == 0.0 and hard.metadata == {"timed_out": True}
    assert fn({"answer": "3"}, "3").metadata["read_as"] == "3"

  def test_a_process_that_ended_is_started_again(self):
    pytest.importorskip("math_verify")
    from tunix.rl.multi_turn.rewards import math_answers

    worker = math_answers.Worker(2 << 30)
    request = {"truth": "3", "answer": "3", "precision": 6, "strict": True}
    assert worker.ask(request, 20.0)["equal"]
    worker._process.kill()  # pylint: disable=protected-access
    worker._process.wait(10)  # pylint: disable=protected-access
    assert worker.ask(request, 20.0)["equal"]
    worker.close()


def test_the_page_names_every_reward_and_option():
  page = (pathlib.Path(__file__).parents[2] / "docs/rewards.md").read_text()
  own = [n for n in rewards.reward_names() if _is_ours(n)]
  assert len(own) >= 13
  for name in own:
    assert f"| `{name}` |" in page
    for option in specs.options_of(rewards.get_reward_fn(name)).options:
      assert f"`{option}`" in page, f"{name}.{option}"
  for kind in (mcp_tools.McpTools, python_tool.PythonLimits):
    for option in specs.options_of(kind).options:
      assert f"`{option}`" in page, f"{kind.__name__}.{option}"


def _is_ours(name):
  module = rewards.get_reward_fn(name).__module__
  return module.startswith("tunix.rl.multi_turn.rewards.")


def test_the_pages_code_runs():
  try:
    documented_code.run("docs/rewards.md")
    episode = play(
      {"few_turns": {"most": 4}, "thoughtful": {"per": "turn"}}, RIGHT, "27"
    )
    assert turns_of(episode) == [0.0, 0.5]
  finally:
    for name in ("few_turns", "thoughtful"):
      rewards.unregister(name)
