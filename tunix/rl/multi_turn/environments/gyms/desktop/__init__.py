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
from tunix.rl.multi_turn.environments.gyms.desktop.gym import oracle_action
from tunix.rl.multi_turn.environments.gyms.desktop.gym import QUICKSTART_FAMILIES

register_envs()
