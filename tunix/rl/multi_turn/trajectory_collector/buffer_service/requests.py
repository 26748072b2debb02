"""Reads what clients ask for; whole numbers may be texts.

`rollout` reads the payload of `/start_rollout`. The service uses the keys of
`KEYS`; all keys, also those it does not know, reach the generator as they were
sent, with `remote_buffer_url`, `num_epoch`, `num_process`, `sampling_params`
and `skip_instance_ids` filled in where they are absent.

Promises: an error names the key, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping

from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.core import json_models
from tunix.rl.multi_turn.trajectory_collector.buffer_service import items
from tunix.rl.multi_turn.trajectory_collector.buffer_service import rules

DEFAULTS: Mapping[str, Any] = {
    "num_process": 100,
    "num_epoch": 1,
    "min_valid_group_size_ratio": 1.0,
    "min_valid_item_size_ratio": 0.7,
    "group_timeout_seconds": 300.0,
    "min_timeout_group_size_ratio": 0.7,
    "group_rules": "normalized",
    "keep_items": False,
}
RULES = ("normalized", "raw")
_MOST_MEMBERS = 65_536


@dataclasses.dataclass(frozen=True)
class Rollout:
  """A start payload, read.

  Attributes:
    task_type: of the generator.
    rules: of the groups.
    keep_items: the buffer keeps what it holds; else it begins empty.
    payload: for the generator.
  """

  task_type: str
  rules: rules.GroupRules
  keep_items: bool
  payload: dict[str, Any]


def rollout(payload: Any, buffer_url: str = "") -> Rollout:
  """Reads a start payload.

  Args:
    payload: JSON.
    buffer_url: of this service, where the payload names none.

  Raises:
    ValueError: naming the key.
  """
  if not isinstance(payload, dict):
    raise ValueError(
        f"the payload must be an object, got {json_models.short(payload)}"
    )
  task_type = payload.get("task_type")
  if not isinstance(task_type, str) or not task_type:
    raise ValueError(
        f"task_type={json_models.short(task_type)} must name a generator"
    )
  found = {**DEFAULTS, **{k: v for k, v in payload.items() if v is not None}}
  whole = {
      key: whole_number(found, key, most=_MOST_MEMBERS)
      for key in ("num_repeat_per_sample", "num_process", "num_epoch")
  }
  if "max_tokens" in found:
    whole_number(found, "max_tokens", most=2**31)
  sampling = found.get("sampling_params", {})
  if not isinstance(sampling, Mapping):
    raise ValueError(
        f"sampling_params={json_models.short(sampling)} must be an object such"
        ' as {"max_tokens": 8192, "temperature": 0.8}'
    )
  for key in ("remote_engine_url", "remote_buffer_url"):
    if found.get(key):
      http.address(found[key], key, "http://127.0.0.1:8000")
  if found["group_rules"] not in RULES:
    raise ValueError(
        f"group_rules={json_models.short(found['group_rules'])} must be one of"
        f" {', '.join(RULES)}"
    )
  asked = rules.GroupRules(
      group_size=whole["num_repeat_per_sample"],
      min_valid_group_size_ratio=_share(found, "min_valid_group_size_ratio"),
      min_valid_item_size_ratio=_share(found, "min_valid_item_size_ratio"),
      group_timeout_seconds=number(found, "group_timeout_seconds", above=0),
      min_timeout_group_size_ratio=_share(
          found, "min_timeout_group_size_ratio"
      ),
      raw=found["group_rules"] == "raw",
  )
  skipped = found.get("skip_instance_ids", [])
  if not isinstance(skipped, list):
    raise ValueError(
        f"skip_instance_ids={json_models.short(skipped)} must be a list of ids"
    )
  skip = [items.text_id(one, "skip_instance_ids") for one in skipped]
  filled = {
      "num_process": whole["num_process"],
      "num_epoch": whole["num_epoch"],
      "sampling_params": {},
      "remote_buffer_url": buffer_url,
  }
  sent = {k: v for k, v in payload.items() if v is not None}
  if not sent.get("remote_buffer_url"):
    sent.pop("remote_buffer_url", None)
  return Rollout(
      task_type,
      asked,
      found["keep_items"] is True,
      {**filled, **sent, "skip_instance_ids": skip},
  )


def whole_number(
    data: Mapping[str, Any], key: str, least: int = 1, most: int = 2**31
) -> int:
  """A whole number, which may be a text.

  Raises:
    ValueError: absent, no whole number, or out of range.
  """
  value = data.get(key)
  try:
    if isinstance(value, bool) or value is None:
      raise ValueError
    found = int(value) if isinstance(value, (int, str)) else _exact(value)
  except (TypeError, ValueError, OverflowError):
    found = None
  if found is None or not least <= found <= most:
    if value is None:
      raise ValueError(f"{key} is missing; give a whole number >= {least}")
    raise ValueError(
        f"{key}={json_models.short(value)} must be a whole number in"
        f" [{least}, {most}]"
    )
  return found


def _exact(value: Any) -> int:
  if not isinstance(value, float) or not value.is_integer():
    raise ValueError
  return int(value)


def number(
    data: Mapping[str, Any],
    key: str,
    above: float | None = None,
    most: float = math.inf,
) -> float:
  """A finite number, which may be a text.

  Raises:
    ValueError: no number, not > `above`, or beyond `most`.
  """
  value = data.get(key)
  try:
    if isinstance(value, bool):
      raise ValueError
    found = float(value)  # type: ignore[arg-type]
    right = math.isfinite(found) and found <= most
    right = right and (above is None or found > above)
  except (TypeError, ValueError):
    right, found = False, 0.0
  if not right:
    bound = "" if above is None else f" > {above:g}"
    bound += "" if math.isinf(most) else f" and <= {most:g}"
    raise ValueError(
        f"{key}={json_models.short(value)} must be a number{bound}"
    )
  return found


def _share(data: Mapping[str, Any], key: str) -> float:
  found = number(data, key)
  if not 0 <= found <= 1:
    raise ValueError(
        f"{key}={json_models.short(data[key])} must be a share in [0, 1]"
    )
  return found


def batch_size(data: Mapping[str, Any], max_items: int) -> int:
  """`batch_size` of a read; -1, the default, for all items.

  Args:
    data: Body or query.
    max_items: Items that a buffer can hold; a read of more would never end.

  Raises:
    ValueError: no whole number, or too large a one.
  """
  if data.get("batch_size") is None:
    return -1
  size = whole_number(data, "batch_size", least=-1)
  if size > max_items:
    raise ValueError(
        f"batch_size={size} exceeds --max-items={max_items}, the items that a"
        f" buffer can hold; start the service with --max-items {size} or more"
    )
  return size


def check_step(rollout: Rollout, max_items: int) -> None:
  """Checks that a buffer can hold the groups of a trainer's step.

  Raises:
    ValueError: naming both numbers.
  """
  members = rollout.rules.group_size
  groups = 1
  if rollout.payload.get("rollout_batch_size") is not None:
    groups = whole_number(
        rollout.payload, "rollout_batch_size", most=_MOST_MEMBERS
    )
  if groups * members > max_items:
    raise ValueError(
        f"rollout_batch_size={groups} groups of num_repeat_per_sample={members}"
        f" are {groups * members} items, and --max-items={max_items} is what a"
        " buffer can hold; start the service with --max-items"
        f" {groups * members} or more"
    )
