"""Holds the current training, step and evaluation for recorders.

One holder a process, live: an episode reads it when it starts, and gets the
step of that moment, not of the moment its arguments were made. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()
_context: dict[str, Any] = {}


def _get(name: str) -> Any:
  with _lock:
    return _context.get(name)


def _set(name: str, value: object) -> None:
  with _lock:
    _context[name] = value


def get_training_id() -> Any:
  return _get("training_id")


def set_training_id(training_id: object) -> None:
  _set("training_id", training_id)


def get_baseline_id() -> Any:
  return _get("baseline_id")


def set_baseline_id(baseline_id: object) -> None:
  _set("baseline_id", baseline_id)


def get_eval_id() -> Any:
  return _get("eval_id")


def set_eval_id(eval_id: object) -> None:
  _set("eval_id", eval_id)


def get_step_id() -> Any:
  return _get("step_id")


def set_step_id(step_id: object) -> None:
  _set("step_id", step_id)


def get_ingest_client() -> Any:
  return _get("ingest_client")


def set_ingest_client(ingest_client: object) -> None:
  _set("ingest_client", ingest_client)


def clear_monitor_context() -> None:
  """Forgets all of it."""
  with _lock:
    _context.clear()
