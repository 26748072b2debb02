"""An agent that calls a tool in its first turn, whatever the policy writes."""

from tunix.rl.multi_turn.agents import ToolAgent
from tunix.rl.multi_turn.core import trajectory


class CallingAgent(ToolAgent):
  """Its first turn calls `tool` with `arguments`; a later one answers."""

  def __init__(
      self, system_prompt="", parser_name="qwen", tool_map=None, *,
      on_parse_error="answer", tool: str = "add", arguments: dict | None = None,
  ):  # fmt: skip
    super().__init__(
      system_prompt, parser_name, tool_map, on_parse_error=on_parse_error
    )
    self._call = (tool, arguments or {})

  def update_from_model(self, response):
    action = super().update_from_model(response)
    if len(self.trajectory.steps) > 1:
      return action
    action = trajectory.Action([trajectory.ToolCall(*self._call)])
    self.trajectory.steps[-1].action = action
    return action
