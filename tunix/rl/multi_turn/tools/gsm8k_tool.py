"""Checks answers to a GSM8K problem, as a stateful tool.

`create(ground_truth=…)`, then `execute(id, {"answer": …})`: reward 1 when the
last number of the answer is the last number of the ground truth (so GSM8K's
"… #### 8" will do), else 0.
"""

from __future__ import annotations

from typing import Any, Mapping

from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.tools import stateful

GSM8K_SCHEMA: dict[str, Any] = {
  "type": "function",
  "function": {
    "name": "submit_answer",
    "description": "Submits the answer to the problem and checks it.",
    "parameters": {
      "type": "object",
      "properties": {
        "answer": {"type": "string", "description": "The number."}
      },
      "required": ["answer"],
    },
  },
}


class Gsm8kTool(stateful.InstanceTool):
  """See the module docstring."""

  def __init__(
    self,
    config: Mapping[str, Any] | None = None,
    tool_schema: Mapping[str, Any] | None = None,
  ):
    super().__init__(config, tool_schema or GSM8K_SCHEMA)

  async def create(
    self,
    instance_id: str | None = None,
    ground_truth: object = None,
    **kwargs: Any,
  ) -> str:
    if ground_truth is None:
      raise ValueError("Gsm8kTool.create needs ground_truth")
    return await super().create(
      instance_id, ground_truth=str(ground_truth), **kwargs
    )

  async def execute(
    self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
  ) -> tuple[str, float, dict[str, Any]]:
    state = self.state(instance_id)
    answer = str(parameters.get("answer", ""))
    reward = rewards.evaluate("numeric_match", state, answer).reward
    state["history"].append(answer)
    state["reward"] = reward
    text = "The answer is correct." if reward else "The answer is wrong."
    return text, reward, {"attempts": len(state["history"])}
