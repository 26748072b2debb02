"""`HttpRolloutRecorder`: records one episode as it happens.

For agents and workflows that run outside this package's collector, under the
protocol's names. Nothing waits, and nothing raises on the monitor's behalf.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Mapping

from training_monitor.client import ingest_client as client_lib

Reference = client_lib.Reference


class HttpRolloutRecorder:
  """Records the rollout `rollout_uuid`."""

  def __init__(
    self,
    ingest_client: client_lib.IngestClient | None,
    rollout_uuid: str,
    training_id: Reference | None,
    source_type: str,
    model_path: str,
    step_id: Reference | None = None,
    eval_id: Reference | None = None,
    baseline_id: Reference | None = None,
  ):
    """Args:

    ingest_client: None records nothing.
    rollout_uuid: name of the rollout, unique everywhere.
    training_id: Training that the rollout belongs to.
    source_type: "step", "eval" or "baseline"; the id of that name must be
      there when the rollout starts.
    model_path: the acting policy.
    """
    self.ingest_client = ingest_client
    self.rollout_uuid = rollout_uuid
    self.training_id = training_id
    self.source_type = source_type
    self.model_path = model_path
    self.step_id = step_id
    self.eval_id = eval_id
    self.baseline_id = baseline_id
    self._started: client_lib.IngestClient | None = None
    """The client, once it has the rollout."""
    self._turns: set[int] = set()
    self._counts: dict[tuple[str, int], int] = {}

  @property
  def env_client_id(self) -> str:
    return f"{self.rollout_uuid}:env"

  def start_rollout(
    self,
    task_id_str: str,
    task_description: str,
    model_path: str,
    env_type: str,
    source_type: str,
    step_id: Reference | None = None,
    eval_id: Reference | None = None,
    baseline_id: Reference | None = None,
    batch: int | None = None,
    group_num: int | None = None,
    env_index: int | None = None,
    is_eval: bool = False,
    group_id: Reference | None = None,
    box_type: str | None = None,
    max_turns: int | None = None,
  ) -> bool:
    """Begins the episode.

    Returns:
      False when it is not recorded: no client, no source, or no room.
    """
    del is_eval  # The source decides it.
    self.source_type, self.model_path = source_type, model_path
    self.step_id, self.eval_id = step_id, eval_id
    self.baseline_id = baseline_id
    source = self._source()
    client = self.ingest_client
    if client is None or source is None:
      return False
    now = time.time()
    task = {
      "task_id": task_id_str,
      "name": task_description or task_id_str,
      "description": task_description or task_id_str,
      "source_type": "gym",
    }
    rollout = {
        **source, "task_id": task_id_str, "batch": batch, "group": group_num,
        "group_id": group_id, "env_index": env_index, "max_turns": max_turns,
        "status": "env_creation", "current_phase": "env_creation",
        "start_time": now,
    }  # fmt: skip
    environment = {
      "client_id": self.env_client_id,
      "rollout_id": self.rollout_uuid,
      "env_type": env_type,
      "status": "creating",
      "box_type": box_type,
      "creation_time": now,
    }
    # One part: the server gets all three rows or none.
    accepted = client.sender.put(
      {
        "tasks": [{"client_id": task_id_str, **task}],
        "rollouts": [{"client_id": self.rollout_uuid, **rollout}],
        "environments": [environment],
      }
    )
    self._started = client if accepted else None
    return accepted

  def update_environment(
    self,
    *,
    gbox_id: str | None = None,
    status: str | None = None,
    status_message: str | None = None,
    error_message: str | None = None,
    termination_time: object = None,
    config_json: object = None,
    **kwargs: Any,
  ) -> None:
    """Sends changed columns of the environment."""
    if self._started is not None:
      self._started.post_environment(
        {
          "gbox_id": gbox_id,
          "status": status,
          "status_message": status_message,
          "error_message": error_message,
          "termination_time": _time(termination_time),
          "config_json": config_json,
          **kwargs,
        },
        self.env_client_id,
      )

  def update(self, **kwargs: Any) -> None:
    """Sends changed columns of the rollout."""
    if self._started is not None:
      self._started.post_rollout(kwargs, self.rollout_uuid)

  def update_status(
    self,
    status: str | None = None,
    current_phase: str | None = None,
    status_message: str | None = None,
    error_message: str | None = None,
    progress_percent: float | None = None,
    **kwargs: Any,
  ) -> None:
    self.update(
      status=status,
      current_phase=current_phase,
      status_message=status_message,
      error_message=error_message,
      progress_percent=progress_percent,
      **kwargs,
    )

  def start_turn(
    self, turn_num: int, start_time: object = None
  ) -> Reference | None:
    """Begins a turn; returns its client id."""
    return self._turn(turn_num, start_time=_time(start_time) or time.time())

  def end_turn(
    self,
    turn_num: int,
    end_time: object = None,
    turn_time: float | None = None,
    reward: float | None = None,
    episode_done: bool | None = None,
    **kwargs: Any,
  ) -> None:
    """Ends a turn; `metrics` becomes its metrics_json."""
    fields = dict(kwargs)
    if "metrics" in fields:
      fields.setdefault("metrics_json", fields.pop("metrics"))
    if "model_specific_input" in fields:
      fields.setdefault(
        "model_specific_input_json", fields.pop("model_specific_input")
      )
    self._turn(
      turn_num,
      end_time=_time(end_time),
      turn_time=turn_time,
      reward=reward,
      episode_done=episode_done,
      **fields,
    )

  def record_action(
    self,
    turn_num: int,
    action_type: str | None = None,
    action: Mapping[str, Any] | None = None,
    **kwargs: Any,
  ) -> Reference | None:
    """Records an action: `action` is {name, args, callId}."""
    fields: dict[str, Any] = {"action_type": action_type}
    if action:
      fields |= {
        "action_type": action_type or action.get("name"),
        "tool_name": action.get("name"),
        "tool_args": action.get("args"),
        "action_call_id": action.get("callId"),
        "action_json": action,
      }
    return self._of_turn("action", turn_num, {**fields, **kwargs})

  def record_observation(
    self, turn_num: int, **kwargs: Any
  ) -> Reference | None:
    """Records obs_type, screenshot_uri, text_content and model_input."""
    fields = dict(kwargs)
    if "model_input" in fields:
      fields.setdefault("model_input_json", fields.pop("model_input"))
    return self._of_turn("observation", turn_num, fields)

  def record_validation(
    self,
    validator_id: Reference | None = None,
    validation_time: object = None,
    validation_query: str | None = None,
    expected_result: str | None = None,
    actual_result: str | None = None,
    success: bool | None = None,
    execution_time: float | None = None,
    error_message: str | None = None,
    details_json: object = None,
    screenshot_uri: str | None = None,
  ) -> None:
    """Records a validation; nothing without a verdict."""
    if success is None or self._started is None:
      return
    self._started.post_validation(
      {
        "rollout_id": self.rollout_uuid,
        "validator_id": validator_id,
        "validation_time": _time(validation_time) or time.time(),
        "validation_query": validation_query,
        "expected_result": expected_result,
        "actual_result": actual_result,
        "success": bool(success),
        "execution_time": execution_time,
        "error_message": error_message,
        "details_json": details_json,
        "screenshot_uri": screenshot_uri,
      },
      self._numbered("validation", 0),
    )

  def complete_rollout(self, **kwargs: Any) -> None:
    """Ends the episode with `status`, "completed" by default."""
    fields = {"status": "completed", "end_time": time.time(), **kwargs}
    if "summary" in fields:
      fields.setdefault("summary_json", fields.pop("summary"))
    self.update(**fields)

  # --- helpers --------------------------------------------------------------

  def _source(self) -> dict[str, Any] | None:
    id_ = {
      "step": self.step_id,
      "eval": self.eval_id,
      "baseline": self.baseline_id,
    }.get(self.source_type)
    if id_ is None:
      return None
    return {
      "rollout_id": self.rollout_uuid,
      "source_type": self.source_type,
      f"{self.source_type}_id": id_,
      "model_path": self.model_path,
    }

  def _turn(self, number: int, **fields: Any) -> Reference | None:
    if self._started is None:
      return None
    if number not in self._turns:
      self._turns.add(number)
      self.update(
        status="running", current_phase="task_execution", current_turn=number
      )
    return self._started.post_turn(
      {"rollout_id": self.rollout_uuid, "turn": number, **fields},
      f"{self.rollout_uuid}:turn:{number}",
    )

  def _of_turn(
    self, kind: str, number: int, fields: Mapping[str, Any]
  ) -> Reference | None:
    if self._started is None:
      return None
    if number not in self._turns:
      self.start_turn(number)
    turn = f"{self.rollout_uuid}:turn:{number}"
    post = getattr(self._started, f"post_{kind}")
    return post({"turn_id": turn, **fields}, self._numbered(kind, number))

  def _numbered(self, kind: str, turn: int) -> str:
    self._counts[kind, turn] = n = self._counts.get((kind, turn), 0) + 1
    return f"{self.rollout_uuid}:{kind}:{turn}:{n}"


def _time(value: object) -> Any:
  if isinstance(value, datetime.datetime):
    return value.isoformat()
  return value
