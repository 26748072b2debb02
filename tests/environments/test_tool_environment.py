"""Tool environments: who ends an episode, who is rewarded, and for what."""

import asyncio
import threading

import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import gsm8k_env
from tunix.rl.multi_turn.environments import text_env
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.tools import gsm8k_tool
from tunix.rl.multi_turn.tools import stateful

TASK = {"question": "1+1=?", "ground_truth": "2"}
TOOLS = {"calculator": tools.CalculatorTool}
QWEN = tool_parser.make_tool_parser("qwen")


def make(**kwargs):
  kwargs.setdefault("reward_fn", "exact_match")
  return environments.ToolEnvironment(TASK, TOOLS, **kwargs)


def add(text="1+1"):
  return trajectory.ToolCall("calculator", {"expression": text})


def finish(**arguments):
  return trajectory.ToolCall("finish", arguments)


def run(env, *actions):
  """Resets, steps, closes; returns (reset result, step results)."""
  with environments.SyncEnv(env, timeout=20.0) as sync:
    return sync.reset(), [sync.step(action) for action in actions]


class TestBaseEnv:
  def test_is_abstract(self):
    with pytest.raises(TypeError):
      environments.BaseEnv()  # pylint: disable=abstract-class-instantiated

  def test_from_dict_builds_by_type_and_keeps_the_config(self):
    config = {"type": "tool", "task": TASK, "tool_map": TOOLS, "max_steps": 3}
    copy = dict(config)
    env = environments.BaseEnv.from_dict(config)
    assert isinstance(env, environments.ToolEnvironment)
    assert (env.task, env.max_steps) == (TASK, 3)
    assert config == copy

  def test_from_dict_of_a_class(self):
    env = environments.ToolEnvironment.from_dict({"task": TASK})
    assert env.task == TASK

  def test_from_dict_names_what_is_wrong(self):
    with pytest.raises(ValueError, match="needs 'type', one of.*tool"):
      environments.BaseEnv.from_dict({})
    with pytest.raises(ValueError, match="did you mean 'tool'"):
      environments.BaseEnv.from_dict({"type": "tols"})
    with pytest.raises(TypeError, match="colour"):
      environments.BaseEnv.from_dict(
        {"type": "tool", "task": TASK, "colour": 1}
      )

  def test_environments_can_be_registered(self):
    class Mine(environments.BaseEnv):
      def __init__(self, n):
        self.n = n

      def reset(self):
        return "start", {}

      def step(self, action):
        return action, 1.0, True, {}

    environments.register_env("mine", Mine)
    try:
      env = environments.BaseEnv.from_dict({"type": "mine", "n": 4})
      assert env.n == 4
      assert run(env, "go") == (("start", {}), [("go", 1.0, True, {})])
    finally:
      environments.spec.ENVIRONMENTS.unregister("mine")


class TestSyncEnv:
  def test_calls_share_one_event_loop(self):
    class Loops(environments.BaseEnv):
      loops = set()

      async def reset(self):
        self.loops.add(asyncio.get_running_loop())
        return "", {}

      async def step(self, action):
        self.loops.add(asyncio.get_running_loop())
        return "", 0.0, False, {}

      async def close(self):
        self.loops.add(asyncio.get_running_loop())

    run(Loops(), 1, 2)
    assert len(Loops.loops) == 1

  def test_hung_step_ends_at_its_deadline(self):
    class Hangs(environments.BaseEnv):
      def reset(self):
        return "", {}

      async def step(self, action):
        await asyncio.Event().wait()

    sync = environments.SyncEnv(Hangs(), timeout=0.05)
    with pytest.raises(concurrency.DeadlineExceeded, match="Hangs.step"):
      sync.step(1)
    sync.close()


class TestToolEnvironment:
  def test_reset_gives_the_question_and_not_the_truth(self):
    (observation, info), _ = run(make())
    assert observation == {"question": "1+1=?"}
    assert info["task"] == TASK

  def test_tools_run_until_the_answer(self):
    env = make()
    call = add()
    _, (first, second) = run(env, [call], "2")
    assert first == (
      {"tool_outputs": {call.call_id: "2"}},
      0.0,
      False,
      {"tool_calls": 1, "tool_errors": 0},
    )
    observation, reward, ended, info = second
    assert (observation, reward, ended) == ({}, 1.0, True)
    assert info["success"] and info["answer"] == "2"
    assert env.step_count == 2

  @pytest.mark.parametrize(
    "action",
    [
      [finish(response="2")],
      finish(answer="2"),
      trajectory.Action([finish(response=2)]),
      {"name": "finish", "arguments": {"response": "2"}},
      [{"function": {"name": "finish", "arguments": '{"response": "2"}'}}],
      trajectory.Action("2"),
      "2",
    ],
  )
  def test_finish_and_answer_in_every_shape(self, action):
    _, ((_, reward, ended, info),) = run(make(), action)
    assert (reward, ended, info["answer"]) == (1.0, True, "2")

  def test_finish_in_the_tool_map_ends_the_episode_too(self):
    class Finish(tools.CalculatorTool):
      def forward(self, **unused):
        raise AssertionError("finish is not to be run")

    env = environments.ToolEnvironment(
      TASK, {**TOOLS, "finish": Finish}, "exact_match"
    )
    _, ((_, reward, ended, info),) = run(env, [finish(response="2")])
    assert (reward, ended, info["answer"]) == (1.0, True, "2")

  def test_beside_finish_no_tool_is_run(self):
    ran = []

    class Spy(tools.CalculatorTool):
      def forward(self, expression):
        ran.append(expression)

    env = environments.ToolEnvironment(TASK, {"calculator": Spy}, "exact_match")
    run(env, [add(), finish(response="2")])
    assert not ran

  def test_last_step_ends_with_a_reward_and_runs_no_tool(self):
    answers = []

    def reward_fn(task, action, info):
      answers.append((action, [c["output"] for c in info["tool_calls"]]))
      return 0.25

    env = make(max_steps=2, reward_fn=reward_fn)
    _, (first, last) = run(env, [add()], [add("5")])
    assert not first[2]
    assert last[1:3] == (0.25, True)
    assert last[3]["status"] == "max_turns"
    assert answers == [("", ["2"])]

  def test_default_is_ten_steps(self):
    _, results = run(make(), *[[add()]] * 10)
    assert [r[2] for r in results] == [False] * 9 + [True]

  def test_failing_tools_are_observations(self):
    call = trajectory.ToolCall("nope", {})
    _, ((observation, _, ended, info),) = run(make(), [call, add("1/0")])
    assert not ended and info["tool_errors"] == 2
    assert "unknown tool 'nope'" in observation["tool_outputs"][call.call_id]

  def test_no_call_at_all_is_told(self):
    _, ((observation, reward, ended, _),) = run(make(), [])
    assert "no tool call" in observation["text"] and not ended and reward == 0

  @pytest.mark.parametrize(
    "fn",
    [lambda task, action: 0.5, lambda task, action: rewards.RewardOutput(0.5)],
  )
  def test_reward_functions_of_both_kinds(self, fn):
    async def later(task, action):
      return fn(task, action)

    for reward_fn in (fn, later):
      _, ((_, reward, _, _),) = run(make(reward_fn=reward_fn), "x")
      assert reward == 0.5 and type(reward) is float

  def test_no_reward_function_rewards_zero(self):
    _, ((_, reward, ended, _),) = run(make(reward_fn=None), "2")
    assert (reward, ended) == (0.0, True)

  def test_failing_reward_is_the_environments_failure(self):
    def broken(task, action):
      raise KeyError("no label")

    async def hangs(task, action):
      await asyncio.Event().wait()

    with pytest.raises(KeyError, match="no label"):
      run(make(reward_fn=broken), "2")
    with pytest.raises(concurrency.DeadlineExceeded):
      run(make(reward_fn=hangs, reward_timeout=0.05), "2")

  def test_step_after_the_end_is_refused_and_reset_starts_again(self):
    env = make()
    with environments.SyncEnv(env) as sync:
      sync.reset()
      sync.step("2")
      with pytest.raises(RuntimeError, match="call reset first"):
        sync.step("2")
      sync.reset()
      assert env.step_count == 0 and sync.step("2")[1] == 1.0

  @pytest.mark.parametrize(
    "kwargs, reason",
    [
      ({"max_steps": 0}, "max_steps"),
      ({"reward_fn": "exact_macth"}, "did you mean 'exact_match'"),
    ],
  )
  def test_bad_settings_are_refused(self, kwargs, reason):
    with pytest.raises(ValueError, match=reason):
      make(**kwargs)
    with pytest.raises(ValueError, match="needs one of question"):
      environments.ToolEnvironment({"q": 1})

  def test_agent_and_environment_solve_a_task(self):
    agent, env = agents.ToolAgent("", "qwen", TOOLS), make()
    script = [QWEN.format([add()], thought="I add."), "2"]

    async def episode():
      observation, info = env.reset()
      agent.update_from_env(observation, 0.0, False, info)
      for text in script:
        action = agent.update_from_model(text)
        observation, reward, ended, info = await env.step(action)
        agent.update_from_env(observation, reward, ended, info)
      return reward, ended

    assert asyncio.run(episode()) == (1.0, True)
    assert agent.chat_completions[3]["content"] == "Tool returned result: 2"
    assert agent.trajectory.task == TASK


class Counter(stateful.InstanceTool):
  """Worth a point a call; notes what becomes of its instances."""

  def __init__(self):
    super().__init__({}, {"type": "function", "function": {"name": "count"}})
    self.released = []

  @property
  def open(self):
    return len(self._instances)

  async def execute(self, instance_id, parameters, **kwargs):
    self.state(instance_id)["reward"] += 1.0
    return "counted", 0.0, {}

  async def release(self, instance_id, **kwargs):
    self.released.append(instance_id)
    await super().release(instance_id)


class TestStatefulTools:
  COUNT = trajectory.ToolCall("count", {})

  def make(self, tool, **kwargs):
    kwargs.setdefault("reward_fn", "exact_match")
    adapter = tool
    if isinstance(tool, stateful.BaseTool):
      adapter = stateful.StatefulToolAdapter(tool)
    return environments.ToolEnvironment(TASK, {"count": adapter}, **kwargs)

  def test_the_end_adds_their_reward_and_releases_them(self):
    tool = Counter()
    with environments.SyncEnv(self.make(tool), timeout=20.0) as env:
      for _ in range(2):
        env.reset()
        env.step([self.COUNT, trajectory.ToolCall("count", {})])
        assert tool.open == 1
        _, reward, ended, info = env.step("2")
        assert (reward, ended, info["success"]) == (3.0, True, True)
        assert info["tool_rewards"] == {"count": 2.0}
        assert tool.open == 0
    assert len(tool.released) == 2

  def test_alone_they_are_the_reward(self):
    _, (_, (_, reward, _, info)) = run(
      self.make(Counter(), reward_fn=None), [self.COUNT], "x"
    )
    assert reward == 1.0 and info["success"]

  def test_close_releases_a_broken_off_episode(self):
    tool = Counter()
    run(self.make(tool), [self.COUNT])
    assert (tool.open, len(tool.released)) == (0, 1)

  def test_reset_begins_with_a_new_instance(self):
    tool = Counter()
    with environments.SyncEnv(self.make(tool), timeout=20.0) as env:
      env.reset()
      env.step([self.COUNT])
      env.reset()
      env.step([self.COUNT])
      assert tool.open == 1
      assert env.step("x")[1] == 1.0
    assert (tool.open, len(tool.released)) == (0, 2)

  def test_environments_that_share_a_tool_map_share_no_instance(self):
    tool = Counter()
    adapter = stateful.StatefulToolAdapter(tool)
    first, second = self.make(adapter), self.make(adapter)

    async def main():
      for env in (first, second):
        env.reset()
        await env.step([self.COUNT])
      assert tool.open == 2
      assert [(await e.step("2"))[1] for e in (first, second)] == [2.0, 2.0]

    asyncio.run(main())
    assert tool.open == 0

  def test_failing_reward_still_releases(self):
    class Broken(Counter):
      async def calc_reward(self, instance_id, **kwargs):
        raise KeyError("no label")

    tool = Broken()
    with pytest.raises(KeyError, match="no label"):
      run(self.make(tool), [self.COUNT], "2")
    assert len(tool.released) == 1

  def test_hung_release_has_a_deadline(self):
    class Clings(Counter):
      async def release(self, instance_id, **kwargs):
        await asyncio.Event().wait()

    _, results = run(self.make(Clings(), tool_timeout=0.05), [self.COUNT], "2")
    assert results[1][1] == 2.0


class TestGsm8k:
  SAMPLE = {"question": "3 apples and 5 more?", "answer": "3+5=8\n#### 8"}

  def test_one_step_and_its_reward(self):
    async def main():
      tool = gsm8k_tool.Gsm8kTool()
      env = gsm8k_env.Gsm8kEnv(tool, self.SAMPLE)
      assert await env.reset() == "user: 3 apples and 5 more?"
      observation, reward, ended, info = await env.step("8")
      assert (observation, reward, ended) == ("", 1.0, True) and info["success"]
      with pytest.raises(RuntimeError, match="call reset first"):
        await env.step("8")
      await env.reset()
      assert (await env.step("9"))[1] == 0.0
      await env.close()
      await env.close()
      assert not tool._instances  # pylint: disable=protected-access

    asyncio.run(main())

  def test_abstract_text_env_cannot_be_built(self):
    with pytest.raises(TypeError):
      text_env.BaseEnv()  # pylint: disable=abstract-class-instantiated

  def test_sync_ones_do_not_block_the_loop(self):
    free = threading.Event()

    class Slow:
      def reset(self):
        assert free.wait(30)
        return "user: hello"

    async def main():
      reset = asyncio.ensure_future(text_env.TextEnvAdapter(Slow()).reset())
      await asyncio.sleep(0)
      free.set()
      return await reset

    assert asyncio.run(main())[0] == {"question": "user: hello"}

  def test_as_an_ordinary_environment(self):
    env = environments.BaseEnv.from_dict({"type": "gsm8k", **self.SAMPLE})
    (observation, info), (result,) = run(env, trajectory.Action("It is 8."))
    assert observation == {"question": "user: 3 apples and 5 more?"}
    assert info["task"]["answer"] == self.SAMPLE["answer"]
    assert result[1:3] == (1.0, True)

  def test_incomplete_sample_is_refused(self):
    with pytest.raises(ValueError, match="needs 'answer'"):
      gsm8k_env.Gsm8kEnv(gsm8k_tool.Gsm8kTool(), {"question": "?"})


@pytest.mark.parametrize("option", ["tool_timeout", "reward_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_that_cannot_be_is_named(option, seconds):
  with pytest.raises(ValueError, match=f"environment.options.{option}="):
    environments.ToolEnvironment({"question": "?"}, {}, **{option: seconds})
