"""Trains on episodes that a rollout buffer service collects.

The trainer side of the rollout buffer's protocol: it starts a rollout, polls
for finished groups, turns them into samples and logs the service's statistics.
A training run calls `generate_agent_rollout`, or a function of the user's, with
`--rollout-function-path` (`buffer.function`).

Does not: generate anything (the service does), or import JAX.
"""

from tunix.rl.multi_turn.trajectory_collector.agent_rollout.client import (
  ClientError,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.client import (
  get_rollout_data,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.client import (
  start_rollout,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.rollout import (
  generate_agent_rollout,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.rollout import (
  log_raw_info,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.samples import (
  DataBuffer,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout.samples import (
  Sample,
)

__all__ = [
  "ClientError",
  "DataBuffer",
  "Sample",
  "generate_agent_rollout",
  "get_rollout_data",
  "log_raw_info",
  "start_rollout",
]
