"""Declares the settings of a run's environments and of the gym in them.

Does not load anything; imports no gym and no JAX.
"""

from __future__ import annotations

from typing import Any, Literal, Mapping

from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.net import bounds

setting = settings.setting


@settings.settings
class EnvironmentConfig:
  """The environment that an episode's actions act on."""

  name: str = setting(
    default="cua",
    doc="cua: a computer, see gym. tool: questions answered with tools."
    " gsm8k: arithmetic problems answered in text. tool_request: stateful"
    " tools with an instance an episode. verifiers: one of the package"
    " verifiers, see docs/outside_gyms.md. Or package.module:Class, a"
    " BaseEnv or an environment of tunix.rl.agentic.",
    registry="tunix.rl.multi_turn.environments.spec:ENVIRONMENTS",
  )
  max_turns: int = setting(
    default=8, doc="Turns an episode may take; a task's own limit wins.", ge=1
  )
  reward: str | dict[str, Any] = setting(
    default="score",
    doc="What an episode is rewarded with. score: the environment's own"
    " reward. success: 1 when the environment calls the task solved, else"
    " 0. A registered reward function, or package.module:function. Or a"
    " mapping of these to weights, e.g. '{success: 1, my_module:brevity:"
    " 0.1}', or to a weight and the reward's own options, e.g."
    " '{numeric_match: {tolerance: 0.01}, format: {weight: 0.1, per: turn}}';"
    " the parts are logged. docs/rewards.md lists them.",
    registry="tunix.rl.multi_turn.rewards.reward_registry:REWARDS",
  )
  options: dict[str, Any] = setting(
    default={},
    doc="The class's own keyword arguments, e.g."
    " environment.options.tools=[calculator] (tool).",
  )


TREE_PRESET: Mapping[str, Any] = {
  "agent.parser": "browsergym",
  "agent.system_prompt": "",
  "engine.context_length": 2048,
  "learner.row_length": 2048,
}
"""Defaults where gym.observation is axtree or both."""


@settings.settings
class GymConfig:
  """The gym that environment=cua acts on, and the screen that it shows."""

  name: str = setting(
    default="desktop",
    doc="A registered gym, or package.module:OBJECT of your own: a GymSpec"
    " or a gym class.",
    registry="tunix.rl.multi_turn.environments.gyms.gym_registry:GYMS",
  )
  width: int = setting(
    default=128,
    doc="Screenshot width. Pages of miniwob need 160x210 or more.",
    unit="px",
    ge=16,
    le=bounds.MAX_SIDE,
  )
  height: int = setting(
    default=96, doc="Screenshot height.", unit="px", ge=16, le=bounds.MAX_SIDE
  )
  observation: Literal["screenshot", "axtree", "both"] = setting(
    default="screenshot",
    doc="What the policy sees of the screen. axtree: the accessibility tree"
    " of a web page (miniwob, browser), as text, for policies without images;"
    " actions name its elements by id (agent.parser=browsergym, the default"
    " then, with 2048 tokens of context). both: the screenshot and the tree."
    " See docs/web.md.",
  )
  options: dict[str, Any] = setting(
    default={},
    doc="The gym's own settings, e.g. gym.options.difficulty=1 (desktop) or"
    " gym.options.seconds_per_action=0.2 (miniwob).",
  )
