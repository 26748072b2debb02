"""Stateful tools, and one of them as a plain tool."""

import asyncio

import pytest
import tool_fakes
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.environments import tool_request_env
from tunix.rl.multi_turn.tools import stateful

QWEN = tool_fakes.QWEN
RecordingTool = tool_fakes.RecordingTool
call = tool_fakes.call
schema = tool_fakes.schema


class TestLifecycle:
  def test_create_execute_reward_release(self):
    async def main():
      tool = RecordingTool()
      instance = await tool.create()
      assert await tool.calc_reward(instance) == 0.0
      text, reward, metrics = await tool.execute(instance, {"query": "correct"})
      assert (text, reward, metrics) == (
        "Processed: correct",
        1.0,
        {"length": 7},
      )
      assert await tool.calc_reward(instance) == 1.0
      await tool.release(instance)
      await tool.release(instance)
      with pytest.raises(
        stateful.UnknownInstanceError, match="create it first"
      ):
        await tool.execute(instance, {})

    asyncio.run(main())

  def test_given_and_fresh_ids(self):
    async def main():
      tool = RecordingTool()
      assert await tool.create("mine") == "mine"
      assert len({await tool.create() for _ in range(10)}) == 10
      with pytest.raises(ValueError, match="exists already"):
        await tool.create("mine")

    asyncio.run(main())

  def test_instances_in_parallel_do_not_mix(self):
    async def main():
      tool = RecordingTool()
      a, b = await tool.create("a"), await tool.create("b")
      await asyncio.gather(
        *(tool.execute(a, {"query": f"correct {i}"}) for i in range(5)),
        *(tool.execute(b, {"query": f"wrong {i}"}) for i in range(5)),
      )
      assert await tool.calc_reward(a) == 1.0
      assert await tool.calc_reward(b) == 0.0
      assert all("correct" in q for q in tool.state(a)["history"])
      assert len(tool.state(b)["history"]) == 5

    asyncio.run(main())

  def test_schema_is_the_one_given(self):
    own_schema = schema("search")
    assert (
      stateful.InstanceTool.get_openai_tool_schema(
        type("T", (RecordingTool,), {})()
      )
      == own_schema
    )
    tool = RecordingTool()
    assert tool.get_openai_tool_schema() is tool.tool_schema
    prompt = QWEN.get_tool_prompt(
      [
        RecordingTool("search").get_openai_tool_schema(),
        RecordingTool("other").get_openai_tool_schema(),
      ]
    )
    assert '"search"' in prompt and '"other"' in prompt

  def test_abstract_tool_cannot_be_built_and_its_reward_is_zero(self):
    with pytest.raises(TypeError):
      stateful.BaseTool({}, {})  # pylint: disable=abstract-class-instantiated

    class Bare(stateful.BaseTool):
      async def create(self, instance_id=None, **kwargs):
        return instance_id or "x"

      async def execute(self, instance_id, parameters, **kwargs):
        return "", 0.0, {}

      async def release(self, instance_id, **kwargs):
        pass

    assert asyncio.run(Bare({}, {}).calc_reward("x")) == 0.0


class TestAdapter:
  def test_stateful_tool_as_a_plain_one(self):
    async def main():
      tool = RecordingTool()
      adapter = stateful.StatefulToolAdapter(
        tool, {"create_kwargs": {"city": "Brno"}}
      )
      manager = tools.ToolManager({"search": adapter})
      assert manager.json == [schema("search")]
      assert await adapter.calc_reward() == 0.0
      for query in ("wrong", "correct"):
        output = await manager.run_async("search", query=query)
      assert str(output) == "Processed: correct"
      assert output.metadata["reward"] == 1.0
      assert tool.count("create") == 1 and tool.log[0][2] == {"city": "Brno"}
      assert await adapter.calc_reward() == 1.0
      await adapter.release()
      await adapter.release()
      assert tool.count("release") == 1

    asyncio.run(main())

  def test_calls_that_come_together_share_one_instance(self):
    class Slow(RecordingTool):
      async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0.02)
        return await super().create(instance_id, **kwargs)

      async def execute(self, instance_id, parameters, **kwargs):
        self.state(instance_id)["reward"] += 1
        return "ok", 1.0, {}

    calls = [call() for _ in range(3)]

    def together(manager):
      asyncio.run(manager.outputs_async(calls))

    # Without an event loop each call has a thread, and a loop, of its own.
    for run_calls in (together, lambda manager: manager.outputs(calls)):
      tool = Slow()
      adapter = stateful.StatefulToolAdapter(tool)
      run_calls(tools.ToolManager({"search": adapter}))
      assert tool.count("create") == 1
      assert asyncio.run(adapter.calc_reward()) == 3.0
      asyncio.run(adapter.release())
      assert not tool._instances  # pylint: disable=protected-access

  def test_fresh_copies_share_nothing(self):
    async def main():
      tool = RecordingTool()
      adapter = stateful.StatefulToolAdapter(tool)
      await adapter.async_forward(query="correct")
      other = adapter.fresh()
      assert await other.calc_reward() == 0.0
      await other.async_forward(query="wrong")
      await other.release()
      assert await adapter.calc_reward() == 1.0
      await adapter.release()
      assert not tool._instances  # pylint: disable=protected-access

    asyncio.run(main())

  def test_failed_creation_is_told_to_all_and_tried_again(self):
    class Flaky(RecordingTool):
      async def create(self, instance_id=None, **kwargs):
        if not self.count("create"):
          self.log.append(("create", self.name, kwargs))
          await asyncio.sleep(0)
          raise OSError("no disk")
        return await super().create(instance_id, **kwargs)

    async def main():
      tool = Flaky()
      adapter = stateful.StatefulToolAdapter(tool)
      manager = tools.ToolManager({"search": adapter})
      outputs = await manager.outputs_async([call(), call()])
      assert [o.error for o in outputs.values()] == ["OSError: no disk"] * 2
      assert not (await manager.run_async("search", query="x")).is_error
      await adapter.release()
      assert tool.count("release") == 1

    asyncio.run(main())

  @pytest.mark.parametrize("stubborn", [False, True])
  def test_creation_cut_short_is_released(self, stubborn):
    class HalfMade(RecordingTool):
      async def create(self, instance_id=None, **kwargs):
        if not stubborn:
          await super().create(instance_id, **kwargs)
        try:
          await asyncio.sleep(60)
        except asyncio.CancelledError:
          if not stubborn:
            raise
          await asyncio.sleep(0.02)
        return await super().create(instance_id, **kwargs)

    async def main():
      tool = HalfMade()
      adapter = stateful.StatefulToolAdapter(tool)
      manager = tools.ToolManager({"search": adapter}, timeout=0.2)
      outputs = await manager.outputs_async([call(), call()])
      assert all(output.is_error for output in outputs.values())
      await adapter.release()
      await asyncio.sleep(0.05)
      for _ in range(1000):  # What is stubborn comes later, and goes.
        if tool.count("create") == 1 and not tool._instances:  # pylint: disable=protected-access
          break
        await asyncio.sleep(0.01)
      assert tool.count("create") == 1
      assert not tool._instances  # pylint: disable=protected-access

    asyncio.run(main())

  def test_is_shown_under_its_own_name(self):
    adapter = stateful.StatefulToolAdapter(RecordingTool(), name="look")
    assert adapter.json == schema("look")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tool", "tool_request"])
def test_a_thousand_episodes_at_once_do_not_mix(kind):
  """Each environment's instance sees its own calls, in order, and is freed."""
  tool = RecordingTool("search")
  adapter = stateful.StatefulToolAdapter(tool)
  most = 0

  async def play(i):
    nonlocal most
    task = {"question": "q", "n": i}
    if kind == "tool":
      env = environments.ToolEnvironment(task, {"search": adapter})
    else:
      env = tool_request_env.ToolRequestEnvironment(task, {"search": tool})
    result = env.reset()
    if asyncio.iscoroutine(result):
      await result
    right = i % 3 == 0
    for turn in range(3):
      query = f"{i}/{turn}" + (" correct" if right and turn == 2 else "")
      calls = [call(query=query), call(query=f"{query}!")]
      observation, _, _, info = await env.step(calls)
      assert list(observation["tool_outputs"].values()) == [
        f"Processed: {query}",
        f"Processed: {query}!",
      ]
      assert info["tool_errors"] == 0
      most = max(most, len(tool._instances))  # pylint: disable=protected-access
      await asyncio.sleep(0)
    states = list(tool._instances.values())  # pylint: disable=protected-access
    of_this = [s for s in states if f"{i}/0" in s["history"]]
    (state,) = of_this
    assert [q.split("/")[0] for q in state["history"]] == [str(i)] * 6
    _, reward, ended, _ = await env.step("done")
    assert ended and reward == float(right)

  async def main():
    await asyncio.gather(*(play(i) for i in range(1000)))

  asyncio.run(main())
  assert most >= 900  # They did run at once.
  assert not tool._instances  # pylint: disable=protected-access
  assert tool.count("create") == tool.count("release") == 1000
