"""Environments of episodes, their gyms and task sources."""

from tunix.rl.multi_turn.environments.base_env import BaseEnv
from tunix.rl.multi_turn.environments.base_env import maybe_await
from tunix.rl.multi_turn.environments.base_env import SyncEnv
from tunix.rl.multi_turn.environments.cua_env import CUAEnv
from tunix.rl.multi_turn.environments.spec import register_env
from tunix.rl.multi_turn.environments.tool_environment import ToolEnvironment
