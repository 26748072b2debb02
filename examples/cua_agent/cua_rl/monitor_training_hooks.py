"""Records steps, baselines and evaluations."""

from training_monitor.client.monitor_training_hooks import (
  create_baseline_via_monitor,
)
from training_monitor.client.monitor_training_hooks import (
  create_eval_via_monitor,
)
from training_monitor.client.monitor_training_hooks import (
  record_step_after_rollout,
)
from training_monitor.client.monitor_training_hooks import (
  record_step_after_training,
)
from training_monitor.client.monitor_training_hooks import (
  record_step_before_rollout,
)
from training_monitor.client.monitor_training_hooks import (
  record_step_before_training,
)
from training_monitor.client.monitor_training_hooks import step_name

__all__ = [
  "create_baseline_via_monitor",
  "create_eval_via_monitor",
  "record_step_after_rollout",
  "record_step_after_training",
  "record_step_before_rollout",
  "record_step_before_training",
  "step_name",
]
