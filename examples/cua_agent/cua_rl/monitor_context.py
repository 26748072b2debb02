"""The training, step and evaluation that are recorded."""

from training_monitor.client.monitor_context import clear_monitor_context
from training_monitor.client.monitor_context import get_eval_id
from training_monitor.client.monitor_context import get_ingest_client
from training_monitor.client.monitor_context import get_step_id
from training_monitor.client.monitor_context import get_training_id
from training_monitor.client.monitor_context import set_eval_id
from training_monitor.client.monitor_context import set_ingest_client
from training_monitor.client.monitor_context import set_step_id
from training_monitor.client.monitor_context import set_training_id

__all__ = [
  "clear_monitor_context",
  "get_eval_id",
  "get_ingest_client",
  "get_step_id",
  "get_training_id",
  "set_eval_id",
  "set_ingest_client",
  "set_step_id",
  "set_training_id",
]
