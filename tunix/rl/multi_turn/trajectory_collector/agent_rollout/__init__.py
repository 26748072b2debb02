"""Trains on episodes that a rollout buffer service collects.

The trainer side of the rollout buffer's protocol: it starts a rollout, polls
for finished groups, turns them into samples and logs the service's statistics.
A training run calls `generate_agent_rollout`, or a function of the user's, with
`--rollout-function-path` (`buffer.function`).

Does not: generate anything (the service does), or import JAX.
"""

from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples

ClientError = client.ClientError
DataBuffer = samples.DataBuffer
Sample = samples.Sample
generate_agent_rollout = rollout.generate_agent_rollout
get_rollout_data = client.get_rollout_data
log_raw_info = rollout.log_raw_info
start_rollout = client.start_rollout
