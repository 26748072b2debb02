"""A stateful tool that remembers, for the tests of what uses one."""

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.tools import stateful

QWEN = tool_parser.make_tool_parser("qwen")


def schema(name):
  return {"type": "function", "function": {"name": name, "description": "d"}}


class RecordingTool(stateful.InstanceTool):
  """Remembers every method call with its keyword arguments."""

  def __init__(self, name="search", log=None):
    super().__init__({}, schema(name))
    self.log = [] if log is None else log

  async def create(self, instance_id=None, **kwargs):
    self.log.append(("create", self.name, kwargs))
    return await super().create(instance_id, **kwargs)

  async def execute(self, instance_id, parameters, **kwargs):
    self.log.append(("execute", self.name, parameters, kwargs))
    state = self.state(instance_id)
    query = parameters.get("query", "")
    state["history"].append(query)
    if "boom" in query:
      raise RuntimeError("boom")
    state["reward"] = 1.0 if "correct" in query else 0.0
    return f"Processed: {query}", state["reward"], {"length": len(query)}

  async def calc_reward(self, instance_id, **kwargs):
    self.log.append(("calc_reward", self.name, kwargs))
    return await super().calc_reward(instance_id)

  async def release(self, instance_id, **kwargs):
    self.log.append(("release", self.name, kwargs))
    await super().release(instance_id)

  def count(self, method):
    return sum(entry[0] == method for entry in self.log)


def call(name="search", **arguments):
  return trajectory.ToolCall(name, arguments)
