"""Records a rollout at the Training Monitor."""

from training_monitor.client.http_rollout_recorder import HttpRolloutRecorder

__all__ = ["HttpRolloutRecorder"]
