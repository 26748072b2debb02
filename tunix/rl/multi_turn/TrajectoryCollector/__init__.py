"""The room `trajectory_collector` by its name in the source document."""

from tunix.rl.multi_turn.trajectory_collector import *  # noqa: F403
