"""Hooks that a training loop calls at its stages; no-ops without a client.

The names are those of the ingest protocol's hooks. They read and set
`monitor_context`. None of them raises or waits.
"""

from __future__ import annotations

import time
from typing import Any, Mapping
import uuid

from training_monitor.client import monitor_context as context

_METRICS = {
  "loss": "loss",
  "kl": "kl_divergence",
  "grad_norm": "policy_gradient_norm",
  "learning_rate": "learning_rate",
  "reward_mean": "reward_mean",
  "reward_std": "reward_std",
  "episodes": "num_trajectories",
  "tokens": "num_tokens",
}
"""Metric of docs/metrics.md -> column of a step."""


def step_fields(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the columns of a step that its metrics fill."""
  fields: dict[str, Any] = {}
  for name, column in _METRICS.items():
    value = metrics.get(name)
    if value is None and name == "kl":
      value = metrics.get("kl_loss")
    if value is not None:
      is_count = column in ("num_trajectories", "num_tokens")
      fields[column] = int(value) if is_count else float(value)
  fields["metrics_json"] = dict(metrics)
  return fields


def step_name(training: object, step: int) -> str:
  """Returns the client id of a step that these hooks post."""
  return f"step-{training}-{step}"


def _post_step(step: int, **fields: Any) -> Any:
  client, training = context.get_ingest_client(), context.get_training_id()
  if client is None or training is None:
    return None
  return client.post_step(
    {"training_id": training, "step": step, **fields}, step_name(training, step)
  )


def record_step_before_rollout(
  step: int, model_path: str | None = None, **fields: Any
) -> Any:
  """Begins a step; its id becomes the context's. Returns the id."""
  now = time.time()
  step_id = _post_step(
    step,
    status="rollout_collecting",
    current_phase="rollout_collection",
    model_path=model_path,
    start_time=now,
    rollout_start_time=now,
    **fields,
  )
  if step_id is not None:
    context.set_step_id(step_id)
  return step_id


def record_step_after_rollout(step: int, model_path: str | None = None) -> Any:
  return _post_step(
    step,
    status="rollout_running",
    current_phase="rollout_execution",
    model_path=model_path,
    rollout_end_time=time.time(),
  )


def record_step_before_training(step: int) -> Any:
  return _post_step(
    step,
    status="training",
    current_phase="training",
    training_start_time=time.time(),
  )


def record_step_after_training(
  step: int,
  model_path: str | None = None,
  checkpoint_path: str | None = None,
  metrics: Mapping[str, Any] | None = None,
  **fields: Any,
) -> Any:
  """Completes a step with its metrics."""
  now = time.time()
  return _post_step(
    step,
    status="completed",
    model_path=model_path,
    checkpoint_path=checkpoint_path,
    training_end_time=now,
    end_time=now,
    **step_fields(metrics or {}),
    **fields,
  )


def create_baseline_via_monitor(model_path: str) -> Any:
  """Begins a measurement before training; its id becomes the context's."""
  return _begin("baseline", uuid.uuid4().hex, model_path=model_path)


def create_eval_via_monitor(step: int, model_path: str) -> Any:
  """Begins a measurement at a step; its id becomes the context's."""
  return _begin("eval", step, step=step, model_path=model_path)


def _begin(kind: str, name: object, **fields: Any) -> Any:
  client, training = context.get_ingest_client(), context.get_training_id()
  if client is None or training is None:
    return None
  id_ = getattr(client, f"post_{kind}")(
    {
      "training_id": training,
      **fields,
      "status": "running",
      "start_time": time.time(),
    },
    f"{kind}-{training}-{name}",
  )
  if id_ is not None:
    getattr(context, f"set_{kind}_id")(id_)
  return id_
