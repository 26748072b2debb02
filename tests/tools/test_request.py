"""Requests that use stateful tools, and their state machine."""

import asyncio
import logging

import pytest
import tool_fakes
from tunix.rl.multi_turn import trajectory_collector
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import tool_request_env
from tunix.rl.multi_turn.tools import gsm8k_tool
from tunix.rl.multi_turn.tools import request as request_lib
from tunix.rl.multi_turn.trajectory_collector import collect_settings

QWEN = tool_fakes.QWEN
RecordingTool = tool_fakes.RecordingTool
State = request_lib.RequestState
Status = trajectory.TrajectoryStatus
call = tool_fakes.call


class TestTransitions:
  @pytest.mark.parametrize("start", list(State))
  @pytest.mark.parametrize("end", list(State))
  def test_only_the_table_is_allowed(self, start, end):
    request = request_lib.ToolRequest([], state=start)
    if end in request_lib.TRANSITIONS[start]:
      request.move(end)
      assert request.state is end
    else:
      with pytest.raises(request_lib.IllegalTransitionError, match=start.value):
        request.move(end)
      assert request.state is start

  def test_ends_are_ends(self):
    assert not request_lib.TRANSITIONS[State.COMPLETED]
    assert not request_lib.TRANSITIONS[State.FAILED]
    assert State.TOOL_CALLING not in request_lib.TRANSITIONS[State.PENDING]


def scripted(*turns):
  """A model that says these texts, and records its prompts."""
  remaining = list(turns)
  prompts = []

  async def generate(messages):
    prompts.append(list(messages))
    return remaining.pop(0)

  generate.seen = prompts
  return generate


async def play(generate, *tools, row=None, max_turns=9, **options):
  """(request, trajectory): an episode, as a run's collector plays it."""
  env = tool_request_env.ToolRequestEnvironment(
    row or {"prompt": "q"}, {t.name: t for t in tools}, max_turns, **options
  )
  engine = trajectory_collector.TrajectoryCollectEngine(
    tool_agent.ToolAgent(parser_name="qwen", show_tools=False),
    env,
    generate,
    max_steps=max_turns,
    deadlines=collect_settings.Deadlines(model=20.0, close=5.0),
  )
  try:
    episode = await engine.collect()
  except asyncio.CancelledError:
    return env.request, None
  return env.request, episode


def run(generate, *tools, **options):
  return asyncio.run(play(generate, *tools, **options))


class TestRequest:
  def test_two_turn_dialogue_ends_with_stop(self):
    tool = RecordingTool()
    request, episode = run(
      scripted(QWEN.format([call(query="correct")]), "done"), tool
    )
    assert request.state is State.COMPLETED
    assert request.finish_reason is request_lib.FinishReason.STOP
    assert request.rewards == {"search": 1.0}
    assert request.call_rewards == [1.0]
    assert episode.reward == 1.0 and episode.status is Status.SUCCEEDED
    assert [e[0] for e in tool.log] == [
      "create",
      "execute",
      "calc_reward",
      "release",
    ]

  def test_tools_are_created_before_the_first_generation(self):
    log = []
    tool = RecordingTool(log=log)

    async def generate(messages):
      log.append(("generate",))
      return "done"

    run(generate, tool)
    assert [e[0] for e in log[:2]] == ["create", "generate"]

  def test_turns_are_bounded(self):
    again = QWEN.format([call(query="again")])
    request, episode = run(scripted(*[again] * 9), RecordingTool(), max_turns=3)
    assert request.finish_reason is request_lib.FinishReason.LENGTH
    assert request.state is State.COMPLETED and episode.num_turns == 3

  def test_calls_of_a_turn_run_at_once_and_keep_their_order(self):
    class Meeting(RecordingTool):
      arrived = 0

      async def execute(self, instance_id, parameters, **kwargs):
        self.arrived += 1
        while self.arrived < 3:
          await asyncio.sleep(0.001)
        # The first to be called is the last to answer.
        await asyncio.sleep(0.01 * (3 - parameters["n"]))
        return str(parameters["n"]), 0.0, {}

    calls = QWEN.format([call(n=i) for i in range(3)])
    generate = scripted(calls, "ok")
    request, _ = run(generate, Meeting(), tool_timeout=10.0)
    assert outputs(request) == ["0", "1", "2"]
    read = [m["content"] for m in generate.seen[1][-3:]]
    assert read == [f"Tool returned result: {i}" for i in range(3)]

  def test_failing_and_unknown_tools_are_messages(self):
    text = QWEN.format(
      [call(query="boom"), call("serch"), call(query="correct")]
    )
    request, _ = run(scripted(text, "ok"), RecordingTool())
    boom, unknown, fine = outputs(request)
    assert boom == "Error: RuntimeError: boom"
    assert "did you mean 'search'" in unknown
    assert fine == "Processed: correct"
    assert request.state is State.COMPLETED

  def test_model_failure_fails_the_request_and_releases_once(self):
    async def generate(messages):
      raise ConnectionError("gone")

    tools = RecordingTool("one"), RecordingTool("two")
    request, episode = run(generate, *tools)
    assert request.state is State.FAILED
    assert episode.status is Status.MODEL_ERROR and "gone" in episode.error
    assert [t.count("release") for t in tools] == [1, 1]

  def test_failed_creation_releases_what_was_created(self):
    class Broken(RecordingTool):
      async def create(self, instance_id=None, **kwargs):
        raise OSError("no disk")

    good, broken = RecordingTool("good"), Broken("broken")
    generate = scripted()
    request, episode = run(generate, good, broken)
    assert request.state is State.FAILED
    assert episode.status is Status.ENV_ERROR and "no disk" in episode.error
    assert (good.count("release"), broken.count("release")) == (1, 0)
    assert not generate.seen

  def test_hung_tool_ends_at_its_deadline(self):
    async def hang(*unused, **unused_kwargs):
      await asyncio.Event().wait()

    tool = RecordingTool()
    tool.execute = hang
    request, _ = run(
      scripted(QWEN.format([call(query="x")]), "ok"), tool, tool_timeout=0.05
    )
    assert request.state is State.COMPLETED
    assert "did not finish" in outputs(request)[0]

  def test_cancelled_request_releases_and_is_failed(self):
    tool = RecordingTool()

    async def main():
      started = asyncio.Event()

      async def generate(messages):
        started.set()
        await asyncio.Event().wait()

      task = asyncio.create_task(play(generate, tool))
      await started.wait()
      task.cancel()
      return await task

    request, _ = asyncio.run(main())
    assert request.state is State.FAILED and tool.count("release") == 1
    assert not tool._instances  # pylint: disable=protected-access

  def test_cancelled_among_the_rewards_releases_everything(self):
    judging = asyncio.Event()

    class SlowToJudge(RecordingTool):
      async def calc_reward(self, instance_id, **kwargs):
        judging.set()
        await asyncio.sleep(60)

      async def release(self, instance_id, **kwargs):
        await asyncio.sleep(0.01)
        await super().release(instance_id, **kwargs)

    tools = [SlowToJudge(name) for name in ("one", "two")]

    async def main():
      task = asyncio.create_task(play(scripted("done"), *tools))
      await asyncio.wait_for(judging.wait(), 20)
      task.cancel()
      return await task

    request, _ = asyncio.run(main())
    assert request.state is State.FAILED and request.rewards == {}
    for tool in tools:
      assert tool.count("release") == 1
      assert not tool._instances  # pylint: disable=protected-access

  def test_hung_release_ends_at_its_deadline_and_the_others_go_on(self, caplog):
    class Clings(RecordingTool):
      async def release(self, instance_id, **kwargs):
        await asyncio.Event().wait()

    good = RecordingTool("good")
    with caplog.at_level(logging.WARNING):
      request, _ = run(
        scripted("done"), Clings("clings"), good, tool_timeout=0.05
      )
    assert request.state is State.COMPLETED and good.count("release") == 1
    assert "clings.release did not finish" in caplog.text

  def test_creation_that_times_out_behind_its_instance_is_released(self):
    class HalfMade(RecordingTool):
      async def create(self, instance_id=None, **kwargs):
        await super().create(instance_id, **kwargs)
        await asyncio.sleep(60)

    tool = HalfMade()
    request, episode = run(scripted(), tool, tool_timeout=0.05)
    assert request.state is State.FAILED and "search.create" in episode.error
    assert tool.count("release") == 1
    assert not tool._instances  # pylint: disable=protected-access


def outputs(request):
  return [m["content"] for m in request.messages if m["role"] == "tool"]


ROW = {
  "prompt": [{"role": "user", "content": "q"}],
  "data_source": "outer",
  "extra_info": {
    "tools_kwargs": {
      "search": {
        "create_kwargs": {"a": 1},
        "execute_kwargs": {"b": 2},
        "calc_reward_kwargs": {"c": 3},
        "release_kwargs": {"d": 4},
      }
    },
    "need_tools_kwargs": True,
    "index": 123,
    "data_source": "my_dataset",
  },
}


class TestRow:
  def test_each_kind_of_kwargs_reaches_its_method(self):
    tool = RecordingTool()
    text = QWEN.format([call(query="x")])
    request, _ = run(scripted(text, "ok"), tool, row=ROW)
    assert (request.index, request.data_source) == (123, "my_dataset")
    assert [(e[0], e[-1]) for e in tool.log] == [
      ("create", {"a": 1}),
      ("execute", {"b": 2}),
      ("calc_reward", {"c": 3}),
      ("release", {"d": 4}),
    ]

  def test_data_source_may_stand_outside(self):
    row = {"prompt": "q", "data_source": "outer"}
    request = request_lib.ToolRequest.from_row(row)
    assert request.data_source == "outer"
    assert request.messages == [{"role": "user", "content": "q"}]

  def test_needed_but_absent_kwargs_are_warned_of(self, caplog):
    row = {"prompt": "q", "extra_info": {"need_tools_kwargs": True, "index": 7}}
    with caplog.at_level(logging.WARNING):
      request_lib.ToolRequest.from_row(row)
    assert "row 7" in caplog.text and "needs tools_kwargs" in caplog.text

  @pytest.mark.parametrize(
    "kwargs, reason",
    [
      ({"serch": {}}, "did you mean 'search'"),
      ({"search": {"exec_kwargs": {}}}, "did you mean 'execute_kwargs'"),
      ({"search": {"execute_kwargs": 3}}, "must be a mapping"),
    ],
  )
  def test_bad_kwargs_are_refused(self, kwargs, reason):
    row = {"prompt": "q", "extra_info": {"tools_kwargs": kwargs}}
    with pytest.raises(ValueError, match=reason):
      request_lib.ToolRequest.from_row(row, ["search"])

  def test_row_without_a_prompt_is_refused(self):
    with pytest.raises(ValueError, match="needs 'prompt'"):
      request_lib.ToolRequest.from_row({})


class TestGsm8kTool:
  @pytest.mark.parametrize(
    "truth, answer, reward",
    [
      ("8", "8", 1.0),
      ("so 3 + 5 = 8\n#### 8", "It is 8.", 1.0),
      ("1,000", "$1000.00", 1.0),
      ("8", "9", 0.0),
      ("8", "", 0.0),
    ],
  )
  def test_reward(self, truth, answer, reward):
    async def main():
      tool = gsm8k_tool.Gsm8kTool()
      instance = await tool.create(ground_truth=truth)
      _, got, _ = await tool.execute(instance, {"answer": answer})
      assert got == await tool.calc_reward(instance) == reward

    asyncio.run(main())

  def test_needs_the_ground_truth(self):
    with pytest.raises(ValueError, match="ground_truth"):
      asyncio.run(gsm8k_tool.Gsm8kTool().create())
