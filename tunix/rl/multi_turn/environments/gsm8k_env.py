"""Implements GSM8K as an environment of one step, around a stateful tool.

`Gsm8kEnv` is of the text family; `Gsm8kEnvironment` is the same as an ordinary
environment, built from a config.
"""

from __future__ import annotations

from typing import Any, Mapping

from tunix.rl.multi_turn.environments import text_env
from tunix.rl.multi_turn.tools import gsm8k_tool
from tunix.rl.multi_turn.tools import stateful


class Gsm8kEnv(text_env.BaseEnv):
  """One problem; the first answer ends the episode."""

  def __init__(self, tool: stateful.BaseTool, sample: Mapping[str, Any]):
    """Args:

    tool: Tool that judges the answer.
    sample: Mapping with `question` and `answer`.
    """
    for key in ("question", "answer"):
      if key not in sample:
        raise ValueError(f"a GSM8K sample needs {key!r}")
    self.tool = tool
    self.sample = dict(sample)
    self.instance_id: str | None = None
    self.turns: list[tuple[str, str]] = []
    self.done = False

  async def reset(self) -> str:
    await self.close()
    self.turns = [("user", self.sample["question"])]
    self.instance_id = await self.tool.create(
      ground_truth=self.sample["answer"]
    )
    self.done = False
    return self._get_obs()

  async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
    if self.instance_id is None or self.done:
      raise RuntimeError("the episode is over; call reset first")
    self.turns.append(("assistant", action))
    result, reward, info = await self.tool.execute(
      self.instance_id, parameters={"answer": action}
    )
    self.turns.append(("tool", result))
    self.done = True
    return "", reward, True, {**info, "success": reward > 0}

  def _get_obs(self) -> str:
    return text_env.transcript(self.turns)

  async def close(self) -> None:
    instance_id, self.instance_id = self.instance_id, None
    if instance_id is not None:
      await self.tool.release(instance_id)


class Gsm8kEnvironment(text_env.TextEnvAdapter):
  """`Gsm8kEnv` for the engine: `from_dict({"question": …, "answer": …})`."""

  def __init__(
    self, question: str, answer: object, tool: stateful.BaseTool | None = None
  ):
    super().__init__(
      Gsm8kEnv(
        tool or gsm8k_tool.Gsm8kTool(), {"question": question, "answer": answer}
      ),
      max_steps=1,
    )
    self.task = {"question": question, "answer": answer}

  async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    observation, info = await super().reset()
    return observation, {**info, "task": self.task}
