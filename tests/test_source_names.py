"""Names of the first source document import and have the shapes it gives."""

import asyncio
import copy
import dataclasses
import importlib
import inspect
import json
import pathlib
import pickle
import re

import pytest

ROOM = "tunix.rl.multi_turn"
PATHS = {
    # As the document writes them -> where they are, and names in them.
    "tunix/rl/queue/data_queue.py": ("tunix.rl.queue.data_queue",
                                     "AbstractDataQueue"),
    "tunix/rl/multi_turn/": (ROOM, "TrajectoryCollector"),
    "agents/": (f"{ROOM}.agents", "BaseAgent ToolAgent"),
    "environments/": (f"{ROOM}.environments", "BaseEnv ToolEnvironment"),
    "parser/tool_parser/": (f"{ROOM}.parser.tool_parser",
                            "ToolParser get_tool_parser _PARSER_REGISTRY"),
    "tools/": (f"{ROOM}.tools", "BaseTool ToolCall ToolManager ToolOutput"),
    "rewards/": (f"{ROOM}.rewards",
                 "RewardOutput _REGISTRY get_reward_fn register"),
    "TrajectoryCollector/": (f"{ROOM}.TrajectoryCollector",
                             "TrajectoryCollectEngine"),
    "prompts/": (f"{ROOM}.prompts", "get_prompt register_prompt"),
    # The tools that hold a part of their environment, and its environments.
    "rl_task/tools/base_tool.py": (f"{ROOM}.tools.base_tool",
                                   "BaseTool OpenAIFunctionToolSchema"),
    "rl_task/tools/gsm8k_tool.py": (f"{ROOM}.tools.gsm8k_tool", "Gsm8kTool"),
    "rl_task/envs/base_env.py": (f"{ROOM}.environments.text_env", "BaseEnv"),
    "rl_task/envs/gsm8k_env.py": (f"{ROOM}.environments.gsm8k_env", "Gsm8kEnv"),
    # §3.6: "execution".
    "execution": (f"{ROOM}.trajectory_collector.episode",
                  "TrajectoryCollectEngine"),
}  # fmt: skip


def found(path):
  module, _, name = path.rpartition(":")
  return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_of_the_document_has_its_module_and_names(path):
  module, names = PATHS[path]
  loaded = importlib.import_module(module)
  for name in names.split():
    assert hasattr(loaded, name), name


def test_the_collecting_room_has_two_names_and_one_content():
  package = importlib.import_module(ROOM)
  room = importlib.import_module(f"{ROOM}.trajectory_collector")
  alias = importlib.import_module(f"{ROOM}.TrajectoryCollector")
  assert package.TrajectoryCollector is alias
  assert pathlib.Path(alias.__path__[0]).name == "TrajectoryCollector"
  for name, value in vars(room).items():
    if not name.startswith("_"):
      assert getattr(alias, name) is value, name


@pytest.mark.parametrize(
  "path, fields",
  [
    (
      "core.trajectory:Step",
      "chat_completions thought action observation model_response reward done"
      " mc_return",
    ),
    ("core.trajectory:Trajectory", "task steps reward"),
    ("tools:ToolCall", "name arguments"),
    ("tools:ToolOutput", "name output error metadata"),
    ("rewards:RewardOutput", "reward metadata"),
  ],
)
def test_data_have_the_documents_fields_in_its_order(path, fields):
  names = [f.name for f in dataclasses.fields(found(f"{ROOM}.{path}"))]
  assert [name for name in names if name in fields.split()] == fields.split()


@pytest.mark.parametrize("path, members, abstract", [
    ("agents:BaseAgent",
     "chat_completions trajectory update_from_env update_from_model reset",
     "update_from_env update_from_model reset"),
    ("environments:BaseEnv", "reset step from_dict", "reset step"),
    ("parser.tool_parser:ToolParser",
     "parse get_tool_prompt parse_tool_outputs", "get_tool_prompt"),
    ("tools:BaseTool", "json forward async_forward", "json"),
    ("tools:ToolManager", "json run execute_calls", ""),
    ("tools.stateful:BaseTool",
     "get_openai_tool_schema create execute calc_reward release",
     "create execute release"),
    ("environments.text_env:BaseEnv", "reset step", "reset step"),
    ("environments.gsm8k_env:Gsm8kEnv", "reset step _get_obs", ""),
    ("agents:ToolAgent", "tool_manager tool_parser _messages _trajectory", ""),
    ("trajectory_collector:TrajectoryCollectEngine", "collect", ""),
])  # fmt: skip
def test_classes_have_the_documents_members(path, members, abstract):
  cls = found(f"{ROOM}.{path}")
  owner = cls() if path == "agents:ToolAgent" else cls
  for name in members.split():
    assert hasattr(owner, name), name
  assert set(abstract.split()) <= set(getattr(cls, "__abstractmethods__", ()))


@pytest.mark.parametrize(
  "path, parameters",
  [
    ("agents:ToolAgent", "system_prompt parser_name tool_map"),
    ("environments:ToolEnvironment", "task tool_map reward_fn max_steps=10"),
    ("tools:BaseTool", "name description"),
    ("tools:ToolManager", "tool_map"),
    (
      "trajectory_collector:TrajectoryCollectEngine",
      "agent env model_call final_reward_fn max_steps=10 gamma=1.0"
      " timeout=30.0",
    ),
    ("tools.stateful:BaseTool", "config tool_schema"),
    ("environments.gsm8k_env:Gsm8kEnv", "tool sample"),
  ],
)
def test_constructors_take_the_documents_arguments_in_its_order(
  path, parameters
):
  signature = inspect.signature(found(f"{ROOM}.{path}")).parameters
  for (name, parameter), result in zip(signature.items(), parameters.split()):
    expected, _, default = result.partition("=")
    assert name == expected
    assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    assert not default or repr(parameter.default) == default


def test_registries_know_the_documents_names():
  parser = found(f"{ROOM}.parser.tool_parser:get_tool_parser")("qwen")
  assert parser.__name__ == "QwenToolParser"
  states = found(f"{ROOM}.tools.request:RequestState").__members__
  assert list(states) == [
    "PENDING",
    "RUNNING",
    "TOOL_CALLING",
    "COMPLETED",
    "FAILED",
  ]
  queue = found("tunix.rl.queue.data_queue:AbstractDataQueue")
  for name in ("put", "get", "qsize", "close"):
    assert hasattr(queue, name)


def test_registries_are_dicts_under_the_documents_names():
  parsers = found(f"{ROOM}.parser.tool_parser:_PARSER_REGISTRY")
  assert parsers["qwen"].__name__ == "QwenToolParser"
  rewards = found(f"{ROOM}.rewards:_REGISTRY")
  register = found(f"{ROOM}.rewards:register")
  output = found(f"{ROOM}.rewards:RewardOutput")

  @register("of_a_test")
  def reward(task, action):
    return output(float(action == task["answer"]), {})

  try:
    assert rewards["of_a_test"] is reward and "of_a_test" in [*rewards]
  finally:
    del rewards["of_a_test"]
  with pytest.raises(KeyError):
    rewards["of_a_test"]
  parsers["mine"] = parsers["qwen"]  # Dicts are written to.
  try:
    get = found(f"{ROOM}.parser.tool_parser:get_tool_parser")
    assert get("mine") is parsers["qwen"]
  finally:
    del parsers["mine"]


class Angles(found(f"{ROOM}.parser.tool_parser:ToolParser")):
  """A parser of the two methods that the document has: <<name 1 2>>."""

  def parse(self, model_response):
    call = found(f"{ROOM}.tools:ToolCall")
    calls = []
    for name, tail in re.findall(r"<<(\w+) ?([^>]*)>>", model_response):
      numbers = [int(word) for word in tail.split()]
      calls.append(call(name, dict(zip("ab", numbers))))
    return calls

  def get_tool_prompt(self, tools_schema):
    return f"Write <<name a b>>. Tools: {tools_schema}"


class Adds(found(f"{ROOM}.tools:BaseTool")):
  """Adds."""

  def __init__(self, name="add", description="Adds."):
    super().__init__(name, description)

  @property
  def json(self):
    return {"type": "function", "function": {"name": "add", "parameters": {}}}

  def forward(self, a, b):
    return found(f"{ROOM}.tools:ToolOutput")("add", a + b)


async def test_a_parser_with_the_documents_two_methods_plays_an_episode():
  replies = iter(["First <<add 2 3>>", "then <<add 2 x>>", "5"])
  agent = found(f"{ROOM}.agents:ToolAgent")(
    "You add.", Angles, {"add": Adds}, on_parse_error="retry"
  )
  assert "Write <<name a b>>" in agent._messages[0]["content"]
  assert "add" in agent._messages[0]["content"]
  env = found(f"{ROOM}.environments:ToolEnvironment")(
    {"question": "2 + 3?"}, {"add": Adds}, lambda task, action: 1.0
  )
  engine = found(f"{ROOM}.TrajectoryCollector:TrajectoryCollectEngine")(
    agent, env, lambda messages: next(replies), None, max_steps=3
  )
  episode = await engine.collect()
  assert [s.action.tool_calls for s in episode.steps[1:]] == [[], []]
  first, second, _ = episode.steps
  assert first.observation["tool_outputs"] == {
    first.action.tool_calls[0].call_id: "5"
  }
  assert "invalid literal for int()" in second.info["parse_errors"][0]
  tool_parser = found(f"{ROOM}.parser.tool_parser:ToolParser")
  with pytest.raises(TypeError, match="must implement parse_result, or parse"):
    type("Mute", (tool_parser,), {"get_tool_prompt": Angles.get_tool_prompt})()


def test_a_tool_schema_has_attributes_and_is_a_dict():
  schema_type = found(f"{ROOM}.tools.base_tool:OpenAIFunctionToolSchema")
  function = {
    "name": "get_weather",
    "parameters": {"properties": {"city": {"type": "string"}}},
  }
  schema = schema_type(type="function", function=function)
  assert schema == schema_type({"type": "function", "function": function})
  assert schema.type == "function" and schema.function.name == "get_weather"
  assert schema.function.parameters.properties.city["type"] == "string"
  assert schema["function"]["name"] == "get_weather"
  assert json.loads(json.dumps(schema)) == {
    "type": "function",
    "function": function,
  }
  assert copy.deepcopy(schema) == pickle.loads(pickle.dumps(schema)) == schema
  with pytest.raises(AttributeError, match="'description'"):
    _ = schema.function.description
  with pytest.raises(ValueError, match="function="):
    schema_type(type="function", function={})


@pytest.mark.slow
def test_the_documents_own_program_runs():
  schema_type = found(f"{ROOM}.tools.stateful:OpenAIFunctionToolSchema")
  tool_schema = schema_type(
    type="function",
    function={"name": "gsm8k", "description": "", "parameters": {}},
  )
  tool = found(f"{ROOM}.tools.gsm8k_tool:Gsm8kTool")(
    config={}, tool_schema=tool_schema
  )
  assert tool.get_openai_tool_schema() is tool_schema
  env = found(f"{ROOM}.environments.gsm8k_env:Gsm8kEnv")(
    tool, {"question": "abcdefg#############", "answer": "8"}
  )

  async def test():
    observation = await env.reset()
    _, reward, over, _ = await env.step("8")
    return observation, reward, over

  assert asyncio.run(test()) == ("user: abcdefg#############", 1.0, True)
