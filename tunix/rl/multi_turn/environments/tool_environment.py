"""Implements tasks that are solved by tool calls and an answer.

An episode ends when the policy answers (a plain text action), calls `finish`,
or has used its steps; then, and only then, the reward function judges the
answer. Until then the turn's tool calls are run and their outputs returned.

Rules:
- In a turn with a `finish` call the other calls are not run.
- The last step's calls are not run either; the answer is then empty.
- A tool that fails or hangs is an output for the policy; a reward function
  that fails or hangs raises, since no reward is known.
- `finish` ends the episode also when it is in the tool map; there it is only
  shown, with a schema of its own, and never run.
- Each environment has its own copy of every `EpisodeTool`. The end of an
  episode adds their `calc_reward` to the reward and releases them; an episode
  that is broken off has them released by `close` or by the next one's first
  step. With `tool_rewards="turn"` the reward of each call is its turn's
  instead, and `calc_reward` is not asked for.
- Images that a tool returns are stored where there is a `screenshot_tool`, and
  reach the policy as `tool_images`; without one a line in their place.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Callable, Literal, Mapping

import numpy as np
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.tools import manager
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.tools import stateful
from tunix.rl.multi_turn.tools import tool_base as tools_base

_QUESTION_KEYS = ("question", "instruction", "prompt")
_FINISH = "finish"


class ToolEnvironment(base_env.BaseEnv):
  """See the module docstring.

  Attributes:
    task: Mapping with a `question` (or `instruction`, `prompt`), and the fields
      that the reward function needs.
    tool_manager: runs the tools.
    reward_fn: function or registered name, see `rewards`; None rewards 0.
    max_steps: turns an episode may take.
    step_count: turns taken.
  """

  def __init__(
    self,
    task: Mapping[str, Any] | str,
    tool_map: Mapping[str, Any] | None = None,
    reward_fn: Callable[..., Any] | str | None = None,
    max_steps: int = 10,
    *,
    tool_timeout: float | None = 30.0,
    reward_timeout: float | None = 30.0,
    parallel: bool = True,
    tool_rewards: Literal["episode", "turn"] = "episode",
    screenshot_tool: screenshot.ScreenshotTool | None = None,
  ):
    """Args:

      task: see the class; a str is the question.
      tool_map: name -> tool class or tool.
      reward_fn: see the class.
      max_steps: >= 1.
      tool_timeout: seconds a tool call may take, and a stateful tool's
        release.
      reward_timeout: seconds the reward function may take, and a stateful
        tool's `calc_reward`.
      parallel: run a turn's calls at once.
      tool_rewards: stateful tools reward the episode (`calc_reward`), or the
        turn of each call (`execute`).
      screenshot_tool: stores the images that tools return, in a size that the
        policy takes.

    Raises:
      ValueError: naming the argument.
    """
    if tool_rewards not in ("episode", "turn"):
      raise ValueError(
        f"tool_rewards must be episode or turn, got {tool_rewards!r}"
      )
    if isinstance(task, str):
      task = {"question": task}
    if not any(key in task for key in _QUESTION_KEYS):
      raise ValueError(
        f"a task needs one of {', '.join(_QUESTION_KEYS)}; got"
        f" {', '.join(map(str, task)) or 'nothing'}"
      )
    if max_steps < 1:
      raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    if isinstance(reward_fn, str):
      reward_fn = rewards.get_reward_fn(reward_fn, "operator")
    self.task = dict(task)
    for name, seconds in (
      ("tool_timeout", tool_timeout),
      ("reward_timeout", reward_timeout),
    ):
      if seconds is not None and not seconds > 0:
        raise ValueError(
          f"environment.options.{name}={seconds} must be > 0 seconds, or null"
          " for no deadline"
        )
    self.tool_manager = manager.ToolManager(tool_map, timeout=tool_timeout)
    self.reward_fn = reward_fn
    self.max_steps = max_steps
    self.step_count = 0
    self._reward_timeout = reward_timeout
    self._parallel = parallel
    self._per_turn = tool_rewards == "turn"
    self._screenshots = screenshot_tool
    self._calls: list[dict[str, Any]] = []
    self._done = False
    self._retired: list[stateful.EpisodeTool] = []
    self._renew_adapters()

  def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    self._retired += self._adapters.values()
    self._renew_adapters()
    self.step_count = 0
    self._calls = []
    self._done = False
    question = next(self.task[k] for k in _QUESTION_KEYS if k in self.task)
    return {"question": question}, {"task": self.task}

  async def step(self, action: object) -> base_env.StepResult:
    """Runs the calls of a turn, or judges the answer.

    Args:
      action: an Action, ToolCalls, dicts, or a str, which is the answer.

    Raises:
      RuntimeError: the episode is over.
      ValueError: no such action.
    """
    if self._done:
      raise RuntimeError("the episode is over; call reset first")
    if self._retired:
      await self._release()
    if not isinstance(action, str) and hasattr(action, "action"):
      action = action.action
    if isinstance(action, str):
      self.step_count += 1
      return await self._finish(action, {})
    calls = tools_base.normalize_calls(action)
    self.step_count += 1
    for call in calls:
      if call.name == _FINISH:
        return await self._finish(_answer(call), {})
    if self.step_count >= self.max_steps:
      status = trajectory.TrajectoryStatus.MAX_TURNS.value
      return await self._finish("", {"status": status})
    if not calls:
      return {"text": "Error: no tool call and no answer."}, 0.0, False, {}
    outputs = await self.tool_manager.outputs_async(calls, self._parallel)
    texts = {call_id: str(output) for call_id, output in outputs.items()}
    for call in calls:
      self._calls.append(
        {
          "name": call.name,
          "arguments": call.arguments,
          "output": texts[call.call_id],
          "error": outputs[call.call_id].is_error,
        }
      )
    failed = sum(output.is_error for output in outputs.values())
    info: dict[str, Any] = {"tool_calls": len(calls), "tool_errors": failed}
    refused = [
      kind
      for output in outputs.values()
      if (kind := output.metadata.get("error_type")) in trajectory.INVALID_KINDS
    ]
    if refused:
      info["invalid_kinds"] = refused
    reward = 0.0
    if self._per_turn:
      reward = math.fsum(
        rewards.as_reward(
          output.metadata.get("reward", 0.0), f"tool {output.name!r}"
        ).reward
        for output in outputs.values()
      )
    observation: dict[str, Any] = {"tool_outputs": texts}
    if images := await self._images(outputs, texts):
      observation["tool_images"] = images
    return observation, reward, False, info

  async def _images(
    self, outputs: Mapping[str, trajectory.ToolOutput], texts: dict[str, str]
  ) -> dict[str, list[trajectory.ImageRef]]:
    """Stored images of each call that returned any; notes go to `texts`."""
    stored: dict[str, list[trajectory.ImageRef]] = {}
    for call_id, output in outputs.items():
      images = list(output.metadata.get("images", ()))
      if isinstance(output.metadata.get("image"), trajectory.ImageRef):
        images.append(output.metadata["image"])
      refs = []
      for image in images:
        if isinstance(image, trajectory.ImageRef):
          refs.append(image)
        elif isinstance(image, np.ndarray) and self._screenshots is not None:
          shot = await concurrency.acall(self._screenshots.capture, image)
          refs.append(shot.image)
        else:
          texts[call_id] += "\n(an image, which is not shown here)"
      if refs:
        stored[call_id] = refs
    return stored

  async def _finish(
    self, answer: str, info: dict[str, Any]
  ) -> base_env.StepResult:
    self._done = True
    reward = rewards.RewardOutput(0.0)
    try:
      if self.reward_fn is not None:
        reward = await rewards.evaluate_async(
          self.reward_fn,
          self.task,
          answer,
          {"tool_calls": self._calls, "step_count": self.step_count, **info},
          timeout=self._reward_timeout,
        )
      tool_rewards = {} if self._per_turn else await self._tool_rewards()
    finally:
      self._retired += self._adapters.values()
      await self._release()
    total = reward.reward + sum(tool_rewards.values())
    success = reward.metadata.get("success")
    if not isinstance(success, (bool, int, float)):  # Or a sum's part.
      success = total > 0
    info = {
      "answer": answer,
      "success": bool(success),
      "reward_metadata": reward.metadata,
      **info,
    }
    if tool_rewards:
      info["tool_rewards"] = tool_rewards
    return {}, total, True, info

  async def close(self) -> None:
    """Releases the stateful tools' instances; idempotent."""
    self._retired += self._adapters.values()
    await self._release()

  def _renew_adapters(self) -> None:
    shared: dict[Any, Any] = {}
    self._adapters = {
      name: tool.fresh(shared)
      for name, tool in self.tool_manager.tools.items()
      if isinstance(tool, stateful.EpisodeTool)
    }
    self.tool_manager.tools.update(self._adapters)

  async def _tool_rewards(self) -> dict[str, float]:
    """Reward that each stateful tool returns for its instance."""
    values = await asyncio.gather(
      *(
        concurrency.with_deadline(
          adapter.calc_reward(), self._reward_timeout, f"{name}.calc_reward"
        )
        for name, adapter in self._adapters.items()
      )
    )
    return {n: float(value) for n, value in zip(self._adapters, values)}

  async def _release(self) -> None:
    retired, self._retired = self._retired, []
    # The manager sets the deadline of everything that its tools do.
    await stateful.release_all(
      [(adapter.name, adapter.release) for adapter in retired],
      self.tool_manager.timeout,
    )


def _answer(call: trajectory.ToolCall) -> str:
  """Returns the text that a finish call carries."""
  for key in ("response", "answer", "text"):
    if key in call.arguments:
      value = call.arguments[key]
      return value if isinstance(value, str) else json.dumps(value)
  return json.dumps(call.arguments) if call.arguments else ""
