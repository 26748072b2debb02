"""Plays one `ToolRequest` an episode: stateful tools with instances of its own.

The instances are created before the first turn and released once at the end,
whatever happens in between; the calls of a turn run at once; the episode's
reward is the sum of the tools' `calc_reward`, or with `tool_rewards="turn"`
each turn's is the sum of its calls'. `tools.request` has the states.

Promises: a failing call is an output for the policy; a failing creation or
`calc_reward` raises, since no reward is known then.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Mapping

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.tools import request as request_lib
from tunix.rl.multi_turn.tools import stateful
from tunix.rl.multi_turn.tools import tool_base as tools_base

State = request_lib.RequestState
FinishReason = request_lib.FinishReason


class ToolRequestEnvironment(base_env.BaseEnv):
  """See the module docstring.

  Attributes:
    request: Request of the running or last episode; None before the first
      reset.
  """

  action_grammar = "tool"

  def __init__(
    self,
    task: Mapping[str, Any],
    tool_map: Mapping[str, stateful.StatefulToolAdapter | stateful.BaseTool],
    max_steps: int = 10,
    *,
    tool_timeout: float | None = 30.0,
    tool_rewards: Literal["episode", "turn"] = "episode",
  ):
    """Args:

      task: a row with `prompt` or `question`, and for each tool its keyword
        arguments in `tools_kwargs` or `extra_info.tools_kwargs`; see
        `ToolRequest.from_row`.
      tool_map: name -> stateful tool.
      max_steps: turns an episode may take.
      tool_timeout: seconds for each tool method.
      tool_rewards: tools reward the episode, or the turn of each call.

    Raises:
      ValueError: naming the argument.
    """
    if max_steps < 1:
      raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    if tool_rewards not in ("episode", "turn"):
      raise ValueError(
        f"tool_rewards must be episode or turn, got {tool_rewards!r}"
      )
    self._per_turn = tool_rewards == "turn"
    self._tools: dict[str, stateful.BaseTool] = {}
    for name, tool in tool_map.items():
      if isinstance(tool, stateful.StatefulToolAdapter):
        tool = tool.tool
      if not isinstance(tool, stateful.BaseTool):
        raise ValueError(
          f"tool {name!r} is not a stateful tool, so it has no instance for"
          " an episode; use it with environment=tool"
        )
      self._tools[name] = tool
    row = dict(task)
    row.setdefault("prompt", row.get("question"))
    if "tools_kwargs" in row:
      extra = {**(row.get("extra_info") or {})}
      row["extra_info"] = {"tools_kwargs": row["tools_kwargs"], **extra}
    self._row = row
    self._max_steps = max_steps
    self._timeout = tool_timeout
    self._held: request_lib.RequestTools | None = None
    self._steps = 0
    self.request: request_lib.ToolRequest | None = None

  async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    await self.close()
    request = request_lib.ToolRequest.from_row(self._row, self._tools)
    self._held = request_lib.RequestTools(request, self._tools, self._timeout)
    self.request, self._steps = request, 0
    question = "\n".join(str(m["content"]) for m in request.messages)
    await self._held.create()
    request.move(State.RUNNING)
    return {"question": question}, {"task": self._row}

  async def step(self, action: object) -> base_env.StepResult:
    """Runs the calls of a turn; a plain text ends the episode.

    Raises:
      RuntimeError: no episode is running, or a tool's reward is not known.
      ValueError: no such action.
    """
    request, tools = self.request, self._held
    if request is None or tools is None or request.state is not State.RUNNING:
      raise RuntimeError("no episode is running; call reset first")
    if not isinstance(action, str) and hasattr(action, "action"):
      action = action.action
    self._steps += 1
    last = self._steps >= self._max_steps
    if isinstance(action, str):
      request.messages.append({"role": "assistant", "content": action})
      more = {"answer": action}
      return await self._finish(request, tools, FinishReason.STOP, more)
    calls = tools_base.normalize_calls(action)
    if not calls and not last:
      return {"text": "Error: no tool call and no answer."}, 0.0, False, {}
    texts: dict[str, str] = {}
    done_before = len(request.call_rewards)
    if calls:
      request.move(State.TOOL_CALLING)
      texts = await tools.execute(calls)
    rewards = request.call_rewards[done_before:]
    info: dict[str, Any] = {
      "tool_calls": len(calls),
      "tool_errors": len(calls) - len(rewards),
    }
    if last:
      info["status"] = trajectory.TrajectoryStatus.MAX_TURNS.value
      return await self._finish(request, tools, FinishReason.LENGTH, info)
    request.move(State.RUNNING)
    reward = math.fsum(rewards) if self._per_turn else 0.0
    return {"tool_outputs": texts}, reward, False, info

  async def _finish(
    self,
    request: request_lib.ToolRequest,
    tools: request_lib.RequestTools,
    reason: FinishReason,
    more: dict[str, Any],
  ) -> base_env.StepResult:
    rewards = await tools.calc_rewards()
    self._held = None
    await tools.release()
    request.finalize(rewards, reason)
    if request.error is not None:
      raise RuntimeError(f"the tools' reward is not known: {request.error}")
    total = sum(rewards.values())
    if self._per_turn:  # The earlier turns have theirs.
      ran = more.get("tool_calls", 0) - more.get("tool_errors", 0)
      total = math.fsum(request.call_rewards[len(request.call_rewards) - ran :])
    info = {
      "finish_reason": reason.value,
      "tool_rewards": rewards,
      "call_rewards": list(request.call_rewards),
      "success": sum(rewards.values()) > 0,
      **more,
    }
    return {}, total, True, info

  async def close(self) -> None:
    """Releases the instances of an episode that was broken off; idempotent."""
    request, tools = self.request, self._held
    self._held = None
    if request is None or tools is None:
      return
    await tools.release()
    request.error = request.error or "the episode was broken off"
    request.finalize({}, None)
