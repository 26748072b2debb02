"""The workflow of `train`: episodes recorded at the Training Monitor.

The class is `agent_services.cua_workflow.CUAAgentWorkflow` with a
recorder. An episode belongs to the training, and to the step, evaluation or
baseline of the moment it starts: those of `monitor_context` where the trainer
is this process, else those of the arguments, as in AReaL's rollout workers.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Mapping
import uuid

from agent_services import cua_workflow
from tunix.rl.multi_turn.net import http

from .cua_rl import http_rollout_recorder
from .cua_rl import ingest_client
from .cua_rl import monitor_context
from .cua_rl import monitor_training_hooks


class CUAAgentWorkflow(cua_workflow.CUAAgentWorkflow):
  """See the module docstring."""

  def __init__(self, *args: Any, monitor_base_url: str = "", **options: Any):
    """Takes the arguments of its base, and one more.

    Args:
      monitor_base_url: Address of the Training Monitor, for a process without
        a client in `monitor_context`; its token is $TUNIX_MONITOR_TOKEN.
    """
    super().__init__(*args, **options)
    if monitor_base_url:
      http.address(
        monitor_base_url, "monitor_base_url", "http://127.0.0.1:8080"
      )
    self._monitor_url = monitor_base_url

  def recorder(self, data: Mapping[str, Any]) -> Any:
    """Returns the recorder of an episode that starts now; None without one."""
    del data
    client = monitor_context.get_ingest_client()
    if client is None and self._monitor_url:
      client = _client(self._monitor_url)
    place = dict(self.place)
    training = monitor_context.get_training_id() or place["training_id"]
    if client is None or training is None:
      return None
    source, step = "step", None
    if place["eval_id"] is not None:
      source = "eval"
    elif place["baseline_id"] is not None:
      source = "baseline"
    else:
      step = monitor_context.get_step_id() or place["step_id"]
      if step is None and place["global_step"] is not None:
        step = monitor_training_hooks.step_name(training, place["global_step"])
    return http_rollout_recorder.HttpRolloutRecorder(
        client, uuid.uuid4().hex, training, source, "", step_id=step,
        eval_id=place["eval_id"], baseline_id=place["baseline_id"],
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _client(url: str) -> ingest_client.IngestClient:
  """Returns the process's client of a Training Monitor."""
  return ingest_client.IngestClient(
    url, os.environ.get("TUNIX_MONITOR_TOKEN", "")
  )
