"""A taskset of the package verifiers 0.4, for tests/environments.

Imported in the environment that `make verifiers4` makes.
"""

import verifiers.v1 as vf

SYSTEM = "Count."


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
  """One tool, served in a process of its own."""

  TOOL_PREFIX = None  # Else its name is adder_add.

  @vf.tool
  async def add(self, a: int, b: int) -> str:
    """Adds two numbers."""
    return f"sum {a + b}"


class Settings(vf.TaskConfig):
  """`kind`: A fault, "chat" without a tool, or "" with one."""

  kind: str = ""
  tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Counting(vf.Task[vf.TaskData, vf.State, Settings]):
  """Rewards an answer that read the sum of the tool."""

  @vf.reward
  async def has_sum(self, trace: vf.Trace) -> float:
    kind = self.config.kind
    if kind == "raises":
      raise ValueError("no such answer")
    if kind == "nan":
      return float("nan")
    if kind == "chat":  # The longer, the better.
      return len(str(trace.messages[-1].content or "")) / 100
    results = [m for m in trace.messages if m.role == "tool"]
    return float(bool(results) and "sum" in str(results[-1].content))

  @classmethod
  def toolsets(cls, config):
    return [] if config.kind else [Adder(config.tools)]


class CountingTasksetConfig(vf.TasksetConfig):
  task: Settings = Settings()


class CountingTaskset(vf.Taskset[Counting, CountingTasksetConfig]):
  def load(self):
    print("a taskset may print")
    for i in range(10):
      yield Counting(
        vf.TaskData(prompt=f"count to {i}", system_prompt=SYSTEM),
        self.config.task,
      )


__all__ = ["CountingTaskset"]

if __name__ == "__main__":  # verifiers starts the tool's server so.
  Adder.run()
