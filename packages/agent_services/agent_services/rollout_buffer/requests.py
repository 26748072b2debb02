"""Reads what clients ask for; whole numbers may be texts.

`rollout` reads the payload of `/start_rollout`. The service uses the keys of
`KEYS`; all keys, also those it does not know, reach the generator as they were
sent, with `remote_buffer_url`, `num_epoch`, `num_process`, `sampling_params`
and `skip_instance_ids` filled in where they are absent.

Promises: an error names the key, the value and the fix; every number, text,
list and object has a bound, which `schemas` states.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Mapping

from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.net import json_models

from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import rules

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
SCREEN = (128, 96)
"""Width and height of a desktop whose start names none, px."""
RULES = ("normalized", "raw")
_MOST_LEASE_ID = 64
WHOLE: Mapping[str, tuple[int, int]] = {
  "num_repeat_per_sample": (1, 65_536),
  "rollout_batch_size": (1, 65_536),
  "num_process": (1, 4096),
  "num_epoch": (1, 65_536),
  "max_tokens": (1, 1 << 20),
  "max_turns": (1, 10_000),
  "width": (1, bounds.MAX_SIDE),
  "height": (1, bounds.MAX_SIDE),
  "batch_size": (-1, 2**31),
  "allowed_items": (0, 2**31),
}
"""Bounds of whole numbers by their key, those of this package's generators
included."""
REAL: Mapping[str, tuple[float, float]] = {
  "min_valid_group_size_ratio": (0, 1),
  "min_valid_item_size_ratio": (0, 1),
  "min_timeout_group_size_ratio": (0, 1),
  "group_timeout_seconds": (0, bounds.MAX_SECONDS),
  "lease_s": (0, bounds.MAX_SECONDS),
  "timeout": (0, bounds.MAX_SECONDS),
}
"""The same of other numbers; the operator's limits of leases and waits may be
lower."""
MOST_IDS = 1_000_000
MOST_NAME = 512


@dataclasses.dataclass(frozen=True)
class Rollout:
  """A start payload, read.

  Attributes:
    task_type: Name of the generator.
    rules: Rules of the groups.
    keep_items: the buffer keeps what it holds; else it begins empty.
    payload: Argument of the generator.
  """

  task_type: str
  rules: rules.GroupRules
  keep_items: bool
  payload: dict[str, Any]


def rollout(payload: object, buffer_url: str = "") -> Rollout:
  """Reads a start payload.

  Args:
    payload: JSON.
    buffer_url: Address of this service, where the payload names none.

  Raises:
    ValueError: naming the key.
  """
  if not isinstance(payload, dict):
    raise ValueError(
      f"the payload must be an object, got {json_models.short(payload)}"
    )
  task_type = payload.get("task_type")
  if not isinstance(task_type, str) or not 0 < len(task_type) <= MOST_NAME:
    raise ValueError(
      f"task_type={json_models.short(task_type)} must name a generator"
    )
  values = {**DEFAULTS, **{k: v for k, v in payload.items() if v is not None}}
  for key, value in values.items():
    problem = bounds.json_problem(value)
    if problem and key != "skip_instance_ids":
      raise ValueError(f"{key} {problem}")
  integers = {
    key: whole_number(values, key, *WHOLE[key])
    for key in WHOLE
    if key in values or key == "num_repeat_per_sample"
  }
  if "width" in integers and "height" in integers:
    problem = bounds.screen_problem(integers["width"], integers["height"])
    if problem:
      raise ValueError(problem)
  sampling = values.get("sampling_params", {})
  if not isinstance(sampling, Mapping):
    raise ValueError(
      f"sampling_params={json_models.short(sampling)} must be an object such"
      ' as {"max_tokens": 8192, "temperature": 0.8}'
    )
  for key in ("remote_engine_url", "remote_buffer_url"):
    if values.get(key):
      http.address(values[key], key, "http://127.0.0.1:8000")
  if values["group_rules"] not in RULES:
    raise ValueError(
      f"group_rules={json_models.short(values['group_rules'])} must be one of"
      f" {', '.join(RULES)}"
    )
  group_rules = rules.GroupRules(
    group_size=integers["num_repeat_per_sample"],
    min_valid_group_size_ratio=_share(values, "min_valid_group_size_ratio"),
    min_valid_item_size_ratio=_share(values, "min_valid_item_size_ratio"),
    group_timeout_seconds=number(
      values, "group_timeout_seconds", 0, REAL["group_timeout_seconds"][1]
    ),
    min_timeout_group_size_ratio=_share(values, "min_timeout_group_size_ratio"),
    raw=values["group_rules"] == "raw",
  )
  skipped = values.get("skip_instance_ids", [])
  if not isinstance(skipped, list) or len(skipped) > MOST_IDS:
    raise ValueError(
      f"skip_instance_ids={json_models.short(skipped)} must be a list of up"
      f" to {MOST_IDS} ids"
    )
  skip = [items.text_id(one, "skip_instance_ids") for one in skipped]
  filled = {
    "num_process": integers["num_process"],
    "num_epoch": integers["num_epoch"],
    "sampling_params": {},
    "remote_buffer_url": buffer_url,
  }
  sent = {k: v for k, v in payload.items() if v is not None}
  if not sent.get("remote_buffer_url"):
    sent.pop("remote_buffer_url", None)
  return Rollout(
    task_type,
    group_rules,
    values["keep_items"] is True,
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
    if isinstance(value, str):
      return bounds.whole(value, key, least, most)
    integer = value if isinstance(value, int) else _exact(value)
  except (TypeError, ValueError, OverflowError):
    integer = None
  if integer is None or not least <= integer <= most:
    if value is None:
      raise ValueError(f"{key} is missing; give a whole number >= {least}")
    raise ValueError(
      f"{key}={json_models.short(value)} must be a whole number in"
      f" [{least}, {most}]"
    )
  return integer


def _exact(value: object) -> int:
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
    if isinstance(value, bool) or not str(value).isascii():
      raise ValueError
    result = float(value)  # type: ignore[arg-type]
    right = math.isfinite(result) and result <= most
    right = right and (above is None or result > above)
  except (TypeError, ValueError, OverflowError):
    right, result = False, 0.0
  if not right:
    bound = "" if above is None else f" > {above:g}"
    bound += "" if math.isinf(most) else f" and <= {most:g}"
    raise ValueError(
      f"{key}={json_models.short(value)} must be a number{bound}"
    )
  return result


def _share(data: Mapping[str, Any], key: str) -> float:
  share = number(data, key)
  if not 0 <= share <= 1:
    raise ValueError(
      f"{key}={json_models.short(data[key])} must be a share in [0, 1]"
    )
  return share


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
  size = whole_number(data, "batch_size", *WHOLE["batch_size"])
  if size > max_items:
    raise ValueError(
      f"batch_size={size} exceeds --max-items={max_items}, the items that a"
      f" buffer can hold; start the service with --max-items {size} or more"
    )
  return size


def allowed_items(data: Mapping[str, Any]) -> int | None:
  """Returns `allowed_items` of a start or a read; None where it is absent.

  Raises:
    ValueError: It is no whole number, or out of range.
  """
  if data.get("allowed_items") is None:
    return None
  return whole_number(data, "allowed_items", *WHOLE["allowed_items"])


def check_step(rollout: Rollout, max_items: int) -> None:
  """Checks that a buffer can hold the groups of a trainer's step.

  Raises:
    ValueError: naming both numbers.
  """
  members = rollout.rules.group_size
  groups = 1
  if rollout.payload.get("rollout_batch_size") is not None:
    groups = whole_number(
      rollout.payload, "rollout_batch_size", *WHOLE["rollout_batch_size"]
    )
  if groups * members > max_items:
    raise ValueError(
      f"rollout_batch_size={groups} groups of num_repeat_per_sample={members}"
      f" are {groups * members} items, and --max-items={max_items} is what a"
      " buffer can hold; start the service with --max-items"
      f" {groups * members} or more"
    )


def check_screens(rollout: Rollout, max_megapixels: int) -> None:
  """Checks the screens of the episodes that play at a time.

  Raises:
    ValueError: naming the numbers.
  """
  data = {"width": SCREEN[0], "height": SCREEN[1], **rollout.payload}
  numbers = {
    key: whole_number(data, key, *WHOLE[key])
    for key in ("width", "height", "num_process", "num_epoch")
  }
  width, height, processes, epochs = numbers.values()
  screens = processes
  if width * height * processes > max_megapixels * 1_000_000:
    episodes = epochs * rollout.rules.group_size
    screens = min(screens, episodes * _tasks(data, processes))
  pixels = width * height * screens
  if pixels > max_megapixels * 1_000_000:
    raise ValueError(
      f"width={width} and height={height} of {screens} episodes at a time"
      f" (num_process={processes}) are {pixels} pixels, and"
      f" --max-megapixels={max_megapixels}; lower num_process or the screen"
    )


def _tasks(data: Mapping[str, Any], most: int) -> int:
  """The number of lines of `input_file`, up to `most`."""
  path = data.get("input_file")
  try:
    with open(path or "", "rb") as file:
      return sum(1 for _ in itertools.islice(filter(bytes.strip, file), most))
  except OSError as error:
    raise ValueError(
      f"input_file={json_models.short(path)} cannot be read by the service:"
      f" {error}"
    ) from None


def lease(data: Mapping[str, Any]) -> str:
  """`lease`, the id of a read's lease.

  Raises:
    ValueError: absent, or no text of up to 64 characters.
  """
  value = data.get("lease")
  if value is None:
    raise ValueError("lease is missing; give the lease of a read")
  if not isinstance(value, str) or not 0 < len(value) <= _MOST_LEASE_ID:
    raise ValueError(
      f"lease={json_models.short(value)} must be the id of a lease, a text of"
      f" 1 to {_MOST_LEASE_ID} characters"
    )
  return value


# --- for documents ------------------------------------------------------------


def schemas() -> dict[str, dict[str, Any]]:
  """JSON schemas of the bodies, by the path of their call.

  Numbers may also be texts of digits. `x-boundedBy: body` marks what only the
  size of the body bounds.
  """
  name = {"type": "string", "maxLength": MOST_NAME}
  ids = {"type": "array", "items": _ID, "maxItems": MOST_IDS}
  integers = {
    key: {"type": "integer", "minimum": low, "maximum": high}
    for key, (low, high) in WHOLE.items()
  }
  numbers = {
    key: {"type": "number", "minimum": low, "maximum": high}
    for key, (low, high) in REAL.items()
  }
  by_body = {"x-boundedBy": "body"}
  read = {
    **{key: integers[key] for key in ("batch_size", "allowed_items")},
    **{key: numbers[key] for key in ("lease_s", "timeout")},
  }
  item = {
    "uid": _ID,
    "instance_id": _ID,
    "reward": {
      "type": "number",
      "minimum": -reward_range.MAX_REWARD,
      "maximum": reward_range.MAX_REWARD,
    },
    "messages": {"type": "array", "items": by_body, **by_body},
    "extra_info": by_body,
  }
  lease = {"lease": {"type": "string", "maxLength": _MOST_LEASE_ID}}
  bodies: dict[str, dict[str, Any]] = {
    "/start_rollout": {
      **{k: v for k, v in integers.items() if k != "batch_size"},
      **{k: v for k, v in numbers.items() if k not in read},
      "task_type": name,
      "skip_instance_ids": ids,
      "sampling_params": {"x-maxValues": bounds.MAX_VALUES, **by_body},
      "group_rules": {"enum": list(RULES)},
      "keep_items": {"type": "boolean"},
    },
    "/stop_rollout": {},
    "/buffer/write": item,
    "/get_rollout_data": read,
    "/buffer/read": {**read, **lease, "wait": {"type": "boolean"}},
    "/buffer/ack": lease,
    "/buffer/release": lease,
    "/buffer/known": {"uids": ids},
    "/buffer/peek": {"batch_size": integers["batch_size"]},
    "/buffer/stats": {},
  }
  return {
    path: {"type": "object", "properties": {**fields, "buffer": name}}
    for path, fields in bodies.items()
  }


_ID = {
  "type": ["string", "integer"],
  "minLength": 1,
  "maxLength": items.MOST_ID,
  "minimum": -bounds.LARGEST - 1,
  "maximum": bounds.LARGEST,
}
