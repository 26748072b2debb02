"""Collects episodes and groups of them, and feeds the queue."""

from tunix.rl.multi_turn.net.concurrency import CallRunner
from tunix.rl.multi_turn.net.worker_pool import WorkerPool
from tunix.rl.multi_turn.trajectory_collector.collect_loop import CollectError
from tunix.rl.multi_turn.trajectory_collector.collect_loop import CollectLoop
from tunix.rl.multi_turn.trajectory_collector.collect_loop import TaskSampler
from tunix.rl.multi_turn.trajectory_collector.collect_settings import (
  CollectConfig,
)
from tunix.rl.multi_turn.trajectory_collector.collect_settings import Deadlines
from tunix.rl.multi_turn.trajectory_collector.episode import (
  TrajectoryCollectEngine,
)
from tunix.rl.multi_turn.trajectory_collector.groups import GroupCollector
from tunix.rl.multi_turn.trajectory_collector.model_calls import derive_seed
from tunix.rl.multi_turn.trajectory_collector.model_calls import PolicyModel
from tunix.rl.multi_turn.trajectory_collector.sequence_builder import (
  SequenceBuilder,
)

TrajectoryCollector = TrajectoryCollectEngine
"""The source document's name for the collecting layer."""
