"""The embedded desktop: a deterministic GUI, its tasks and their oracle.

Importing it makes `gymnasium.make("TunixDesktop/<family>-v0")` work.
"""

from tunix.rl.multi_turn.environments.gyms.desktop import words
from tunix.rl.multi_turn.environments.gyms.desktop.env import DesktopEnv
from tunix.rl.multi_turn.environments.gyms.desktop.env import register_envs
from tunix.rl.multi_turn.environments.gyms.desktop.gym import DesktopGym
from tunix.rl.multi_turn.environments.gyms.desktop.gym import DesktopTasks
from tunix.rl.multi_turn.environments.gyms.desktop.gym import EVAL_SEEDS_FROM
from tunix.rl.multi_turn.environments.gyms.desktop.gym import families
from tunix.rl.multi_turn.environments.gyms.desktop.gym import instruction_corpus  # noqa: E501
from tunix.rl.multi_turn.environments.gyms.desktop.gym import oracle_action
from tunix.rl.multi_turn.environments.gyms.desktop.gym import (
    QUICKSTART_FAMILIES,  # noqa: E501
)

__all__ = (
    "DesktopEnv", "DesktopGym", "DesktopTasks", "EVAL_SEEDS_FROM",
    "QUICKSTART_FAMILIES", "families", "instruction_corpus", "oracle_action",
    "register_envs", "words",
)  # pyformat: disable

register_envs()
