"""Tools and the manager that runs a turn's calls."""

import asyncio
import threading

import numpy as np
import pytest
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import environment_settings
from tunix.rl.multi_turn.environments import spec
from tunix.rl.multi_turn.tools import calculator
from tunix.rl.multi_turn.tools import tool_registry

ToolCall = trajectory.ToolCall
ToolOutput = trajectory.ToolOutput


def schema(name, required=()):
  return {
    "type": "function",
    "function": {
      "name": name,
      "parameters": {"type": "object", "required": list(required)},
    },
  }


class SyncTool(tools.BaseTool):
  """Says what it got.

  This paragraph is not for the policy.
  """

  @property
  def json(self):
    return schema(self.name, ["text"])

  def forward(self, text):
    return ToolOutput(self.name, f"sync {text}")


class AsyncTool(SyncTool):
  """Says what it got, later."""

  forward = tools.BaseTool.forward

  async def async_forward(self, text):
    await asyncio.sleep(0)
    return ToolOutput(self.name, f"async {text}")


class RaisingTool(SyncTool):
  def forward(self, text):
    raise RuntimeError(f"no {text}")


class HangingTool(SyncTool):
  gate = threading.Event()

  def forward(self, text):
    self.gate.wait()


class HangingAsyncTool(AsyncTool):
  async def async_forward(self, text):
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def open_gate():
  HangingTool.gate.clear()
  yield
  HangingTool.gate.set()


MAP = {"s": SyncTool, "a": AsyncTool, "bad": RaisingTool}


def calls(*names):
  return [ToolCall(name, {"text": str(i)}) for i, name in enumerate(names)]


def run_all_ways(manager, batch):
  """The four ways of running, which must agree; returns the result."""
  results = [
    manager.execute_calls(batch, parallel=True),
    manager.execute_calls(batch, parallel=False),
    asyncio.run(manager.execute_calls_async(batch, parallel=True)),
    asyncio.run(manager.execute_calls_async(batch, parallel=False)),
  ]
  for result in results[1:]:
    assert list(result.items()) == list(results[0].items())
  return results[0]


class TestBaseTool:
  @pytest.mark.parametrize(
    "cls, word", [(SyncTool, "sync"), (AsyncTool, "async")]
  )
  def test_one_implementation_serves_both_callers(self, cls, word):
    tool = cls("t", "d")
    assert str(tool.forward(text="x")) == f"{word} x"
    assert str(asyncio.run(tool.async_forward(text="x"))) == f"{word} x"

    async def inside_a_loop():
      return tool.forward(text="x")

    assert str(asyncio.run(inside_a_loop())) == f"{word} x"

  def test_a_tool_may_have_any_argument(self):
    class Waits(tools.BaseTool):
      json = schema("waits")

      def forward(self, seconds, what, pool, fn, tool_name):
        return f"{seconds} {what} {pool} {fn} {tool_name}"

    class WaitsLater(tools.BaseTool):
      json = schema("waits")

      async def async_forward(self, **kwargs):
        return Waits.forward(self, **kwargs)

    arguments = dict(seconds=2, what="w", pool="p", fn="f", tool_name="n")
    for cls in (Waits, WaitsLater):
      tool = cls("waits", "")
      manager = tools.ToolManager({"waits": tool})

      async def inside_a_loop(tool=tool, manager=manager):
        return (
          tool.forward(**arguments),
          await tool.async_forward(**arguments),
          await manager.run_async("waits", **arguments),
        )

      errors = [
        tool.forward(**arguments),
        manager.run("waits", **arguments),
        *asyncio.run(inside_a_loop()),
      ]
      assert [str(s) for s in errors] == ["2 w p f n"] * 5

  def test_abstract_tool_cannot_be_built(self):
    with pytest.raises(TypeError):
      tools.BaseTool("t", "d")  # pylint: disable=abstract-class-instantiated

  def test_tool_that_does_nothing_cannot_be_built(self):
    class Empty(tools.BaseTool):
      json = schema("e")

    with pytest.raises(TypeError, match="forward or async_forward"):
      Empty("e", "d")

  def test_name_and_description(self):
    tool = SyncTool("t", "d")
    assert (tool.name, tool.description) == ("t", "d")
    with pytest.raises(ValueError, match="non-empty"):
      SyncTool("", "d")


class TestToolManager:
  def test_schemas_of_all_tools_in_order(self):
    manager = tools.ToolManager(MAP)
    assert [s["function"]["name"] for s in manager.json] == ["s", "a", "bad"]

  def test_classes_are_built_with_name_and_docstring(self):
    tool = tools.ToolManager(MAP).tools["s"]
    assert (tool.name, tool.description) == ("s", "Says what it got.")

  def test_ready_tools_are_taken_as_they_are(self):
    tool = SyncTool("x", "d")
    assert tools.ToolManager({"y": tool}).tools["y"] is tool

  def test_what_the_policy_is_shown_is_what_it_can_call(self):
    tool = tools.CalculatorTool()
    manager = tools.ToolManager({"sum": tool, "other": tool})
    assert [s["function"]["name"] for s in manager.json] == ["sum", "other"]
    for shown in manager.json:
      assert (
        shown["function"]["parameters"] == tool.json["function"]["parameters"]
      )
      name = shown["function"]["name"]
      assert str(manager.run(name, expression="1+1")) == "2"
    assert manager.run("calculator", expression="1").is_error

  def test_what_is_no_tool_is_refused(self):
    with pytest.raises(TypeError, match="'x' must be a BaseTool"):
      tools.ToolManager({"x": dict})
    with pytest.raises(ValueError, match="timeout"):
      tools.ToolManager(MAP, timeout=0)

  def test_run_one(self):
    manager = tools.ToolManager(MAP)
    assert str(manager.run("s", text="1")) == "sync 1"
    assert str(asyncio.run(manager.run_async("a", text="1"))) == "async 1"

  def test_every_way_of_running_agrees_and_keeps_the_order_of_the_calls(self):
    batch = calls("a", "s", "bad", "s", "nope", "a")
    result = run_all_ways(tools.ToolManager(MAP), batch)
    assert list(result) == [c.call_id for c in batch]
    texts = list(result.values())
    assert texts[:4] == [
      "async 0",
      "sync 1",
      "Error: RuntimeError: no 2",
      "sync 3",
    ]
    assert "unknown tool 'nope'" in texts[4]
    assert texts[5] == "async 5"

  def test_order_is_that_of_the_calls_and_not_of_completion(self):
    first_may_go = threading.Event()

    class First(SyncTool):
      def forward(self, text):
        assert first_may_go.wait(10)
        return "first"

    class Second(SyncTool):
      def forward(self, text):
        first_may_go.set()
        return "second"

    batch = calls("one", "two")
    result = tools.ToolManager({"one": First, "two": Second}).execute_calls(
      batch
    )
    assert list(result.values()) == ["first", "second"]

  @pytest.mark.parametrize("cls", [SyncTool, AsyncTool])
  def test_parallel_calls_run_at_once(self, cls):
    # Three calls that wait for each other can only end together.
    barrier = threading.Barrier(3, timeout=10)
    arrived = []

    class Meeting(cls):
      if cls is SyncTool:

        def forward(self, text):
          barrier.wait()
          return "met"

      else:

        async def async_forward(self, text):
          arrived.append(text)
          while len(arrived) < 3:
            await asyncio.sleep(0.001)
          return "met"

    manager = tools.ToolManager({"m": Meeting})
    batch = calls("m", "m", "m")
    result = asyncio.run(manager.execute_calls_async(batch))
    assert list(result.values()) == ["met"] * 3

  def test_repeated_ids_are_made_unique(self):
    batch = [ToolCall("s", {"text": str(i)}, call_id="same") for i in range(3)]
    result = run_all_ways(tools.ToolManager(MAP), batch)
    assert list(result) == ["same", "same#2", "same#3"]
    assert list(result.values()) == ["sync 0", "sync 1", "sync 2"]

  @pytest.mark.parametrize("hang", [HangingTool, HangingAsyncTool])
  def test_hung_tool_is_an_error_and_the_others_go_on(self, hang):
    manager = tools.ToolManager({**MAP, "hang": hang}, timeout=0.1)
    texts = list(run_all_ways(manager, calls("hang", "s")).values())
    assert texts == ["Error: tool 'hang' did not finish within 0.1 s", "sync 1"]

  def test_missing_argument_is_told(self):
    manager = tools.ToolManager(MAP)
    assert str(manager.run("s")) == "Error: missing argument text"
    assert "unexpected keyword" in str(manager.run("s", text="1", more=2))

  @pytest.mark.parametrize(
    "value, text",
    [
      ("plain", "plain"),
      (3, "3"),
      (True, "true"),
      (None, ""),
      ({"a": [1]}, '{"a": [1]}'),
      (object(), "Error: tool 's' returned what cannot be shown"),
    ],
  )
  def test_any_return_value_becomes_text(self, value, text):
    class Odd(SyncTool):
      def forward(self, text):
        return value

    manager = tools.ToolManager({"s": Odd})
    assert manager.execute_calls(calls("s")).popitem()[1].startswith(text)

  def test_openai_dicts_are_calls(self):
    batch = [
      {"id": "1", "function": {"name": "s", "arguments": '{"text": "x"}'}},
      {"name": "s", "arguments": {"text": "y"}},
    ]
    result = tools.ToolManager(MAP).execute_calls(batch)
    assert list(result.values()) == ["sync x", "sync y"] and "1" in result

  @pytest.mark.parametrize(
    "bad",
    [
      3,
      "text",
      [3],
      [{"arguments": {}}],
      [{"name": "s", "arguments": "{"}],
      [{"name": "s", "arguments": [1]}],
    ],
  )
  def test_what_is_no_call_is_refused(self, bad):
    with pytest.raises(ValueError):
      tools.ToolManager(MAP).execute_calls(bad)


class TestCalculator:
  @pytest.mark.parametrize(
    "expression, value",
    [
      ("1 + 1", "2"),
      ("(2 + 3) * 4", "20"),
      ("7 / 2", "3.5"),
      ("8 / 2", "4"),
      ("2 ** 10", "1024"),
      ("-3 % 5", "2"),
      ("7 // 2", "3"),
      ("6 × 7 − 2 ÷ 1", "40"),
    ],
  )
  def test_value(self, expression, value):
    assert str(calculator.CalculatorTool().forward(expression)) == value

  @pytest.mark.parametrize(
    "expression",
    [
      "1 / 0",
      "9 ** 9 ** 9 ** 9",
      "2 ** -9999999",
      "1e308 * 10",
      "(-1) ** 0.5",
      "__import__('os')",
      "a + 1",
      "[1]",
      "'x' * 9",
      "1 +",
      "",
      "(" * 5000,
      "1" * 2000,
      "True + 1",
      "lambda: 1",
      "1 if 2 else 3",
    ],
  )
  def test_what_is_not_arithmetic_is_an_error(self, expression):
    output = calculator.CalculatorTool().forward(expression)
    assert output.is_error and output.output is None

  def test_through_the_manager(self):
    manager = tools.ToolManager({"calculator": tools.CalculatorTool})
    assert str(manager.run("calculator", expression="2+2")) == "4"


class TestScreenshotTool:
  def test_stores_once_by_content(self):
    store = images.ImageStore()
    tool = tools.ScreenshotTool(store)
    pixels = np.full((12, 20, 3), 7, np.uint8)
    shots = [tool.capture(pixels) for _ in range(3)]
    assert len(store) == 1 and shots[0] == shots[2]
    assert shots[0].scale == (1.0, 1.0)
    np.testing.assert_array_equal(store.get(shots[0].image), pixels)

  def test_resizes_before_storing_and_knows_the_way_back(self):
    store = images.ImageStore()
    tool = tools.ScreenshotTool(store, size=(10, 8))
    shot = tool.capture(np.zeros((16, 40, 3), np.uint8))
    assert (shot.image.width, shot.image.height) == (10, 8)
    assert store.get(shot.image).shape == (8, 10, 3)
    assert shot.scale == (4.0, 2.0)

  @pytest.mark.parametrize(
    "size, kwargs, expected",
    [
      ((1522, 1022), dict(factor=28), (1512, 1008)),  # 36.5 rounds to even.
      ((1920, 1080), dict(factor=32), (1920, 1088)),
      ((10, 10), dict(factor=28), (28, 28)),
      ((224, 160), {}, (224, 160)),
    ],
  )
  def test_sizes_are_multiples(self, size, kwargs, expected):
    assert tools.fit_size(*size, **kwargs) == expected

  @pytest.mark.parametrize("size", [(4000, 3000), (333, 999), (50, 40)])
  def test_area_is_kept_within_limits(self, size):
    width, height = tools.fit_size(
      *size, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28
    )
    assert width % 28 == 0 and height % 28 == 0
    assert 56 * 56 <= width * height <= 1280 * 28 * 28

  @pytest.mark.parametrize(
    "pixels",
    [
      np.zeros((4, 4), np.uint8),
      np.zeros((4, 4, 4), np.uint8),
      np.zeros((4, 4, 3), np.float32),
      "png",
      None,
    ],
  )
  def test_what_is_no_screenshot_is_refused(self, pixels):
    tool = tools.ScreenshotTool(images.ImageStore())
    with pytest.raises(ValueError, match=r"uint8\[H, W, 3\]"):
      tool.capture(pixels)

  def test_is_a_tool(self):
    store = images.ImageStore()
    tool = tools.ScreenshotTool(
      store, source=lambda: np.zeros((4, 6, 3), np.uint8)
    )
    output = tools.ToolManager({"screenshot": tool}).run("screenshot")
    assert output.metadata["image"] in store


@pytest.mark.parametrize(
  "tools, words",
  [
    (5, "environment.options.tools=5 must be a list of names"),
    (["calculatr"], "environment.options.tools: .*did you mean 'calculator'"),
    (["no_such.module:Tool"], "environment.options.tools: .*no_such"),
    ([5], "environment.options.tools: 5 must be a name"),
    ({"calculator": 5}, "environment.options.tools.calculator=5"),
  ],
)
def test_wrong_names_of_tools_are_refused_by_their_setting(tools, words):
  with pytest.raises((ImportError, ValueError), match=words):
    tool_registry.ToolSet(tools)


def test_the_option_tools_is_known_where_a_wrong_one_is_refused():
  config = environment_settings.EnvironmentConfig(
    name="tool", options={"toolz": 1}
  )
  with pytest.raises(ValueError, match="did you mean 'tools'"):
    spec.Builder(config, reward="score")
