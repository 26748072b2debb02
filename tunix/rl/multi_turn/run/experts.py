"""Plays a task as its gym's oracle does, in the policy's own words if it can.

In each turn the policy samples first. A reply that does what the oracle would
do (the same action on the same thing) stays, with its own log-probs; any other
is replaced by the oracle's action in the policy's grammar, with log-prob 0, for
which the learner puts its own (`learner.batches.replay.with_experts`). So an
expert's episode is as near to the policy as it can be.

After BEPA, arXiv:2601.05787, which aligns recorded episodes with the policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, cast

import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.trajectory_collector import model_calls

Kind = gui_action.GuiActionKind


@dataclasses.dataclass(frozen=True)
class ExpertModel:
  """A policy that an oracle corrects.

  Attributes:
    model: the policy.
    oracle: gives the right actions.
    grid: see `demonstrations.Demonstrator`.
  """

  model: model_calls.PolicyModel
  oracle: gyms.Oracle
  grid: tuple[int, int] | None = None

  def new_session_for(
    self, agent: Any, env: Any, name: str, seed: int | None
  ) -> model_calls.TokenSession:
    """Returns the conversation of an episode of a `CUAEnv`."""
    client = _Corrected(self, agent, env)
    return model_calls.TokenSession(
      dataclasses.replace(self.model, client=client), name, seed
    )


class _Corrected:
  """The client of one episode."""

  def __init__(self, expert: ExpertModel, agent: Any, env: Any):
    self._expert = expert
    self._client = expert.model.client
    self._agent = agent
    self._env = env
    self.release = self._client.release
    self.open_session = getattr(self._client, "open_session", lambda name: None)

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
  ) -> policy_client.Completion:
    """Samples a reply and corrects it.

    Raises:
      LookupError: The oracle cannot solve the task.
    """
    own = await self._client.generate(prompt, sampling, session=session)
    if getattr(self._agent, "is_summarizing", False):
      return own
    right = await demonstrations.right_action(self._expert.oracle, self._env)
    if await self._does(own, right):
      return own
    text = await demonstrations.written(
      self._expert.oracle,
      self._env,
      self._agent.tool_parser,
      right,
      self._expert.grid,
    )
    tokens = demonstrations.completion_ids(
      cast(choice.AnyRenderer, self._expert.model.renderer), text
    )
    return policy_client.Completion(
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      versions=np.full(len(tokens), own.versions.max(), np.int32),
      finish_reason=policy_client.FinishReason.STOP,
    )

  async def _does(
    self, own: policy_client.Completion, right: gui_action.GuiAction
  ) -> bool:
    """Returns whether a reply does what the oracle would do."""
    if own.finish_reason is not policy_client.FinishReason.STOP:
      return False
    text = self._expert.model.renderer.decode(own.tokens[:-1].tolist())
    try:
      actions = self._agent.tool_parser.parse_gui_actions(text, *self._env.size)
    except tool_parser.ToolParseError:
      return False
    if len(actions) != 1:
      return False
    (action,) = actions
    action = action.scaled(*self._env.scale)
    oracle, env = self._expert.oracle, self._env
    if Kind.CLICK is action.kind is right.kind:
      name = await demonstrations.named(oracle, env, action)
      if name and name == await demonstrations.named(oracle, env, right):
        action = dataclasses.replace(action, x=right.x, y=right.y)
    return action == right


def model_for(
  config: config_lib.TrainConfig,
  make_model: Callable[[], model_calls.PolicyModel],
) -> ExpertModel | None:
  """Returns the expert that `collect.expert_share` asks for; None without."""
  if not config.collect.expert_share:
    return None
  oracle = gyms.get(config.gym.name, "operator").load_oracle(
    config.gym.observation
  )
  return ExpertModel(make_model(), oracle, demonstrations.POINT_GRID)
