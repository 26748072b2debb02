"""Declares what clients ask for; numbers may be texts.

`rollout` reads the payload of `/start_rollout`. The service uses the keys of
`Start`; all keys, also those it does not know, reach the generator as they were
sent, with `remote_buffer_url`, `num_epoch`, `num_process`, `sampling_params`
and `skip_instance_ids` filled in where they are absent.

Promises: an error names the key, the value and the fix; every number, text,
list and object has a bound, which `schemas` states.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any, Literal, Mapping

import pydantic
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.net import json_models

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import rules

SCREEN = (128, 96)
"""Width and height of a desktop whose start names none, px."""
MOST_IDS = 1_000_000
_MOST = 2**31
_LONGEST_NUMBER = 32  # Characters.


# --- types of fields ----------------------------------------------------------


def _number(value: Any) -> Any:
  """Returns the number that a text spells; a whole one as an integer."""
  if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
    try:
      value = float(value) if value.isascii() else value
    except ValueError:
      return value
  if isinstance(value, float) and value.is_integer():
    return int(value)
  return value


_FromText = pydantic.BeforeValidator(_number)
_Count = Annotated[int, pydantic.Field(ge=1, le=65_536), _FromText]
_Processes = Annotated[int, pydantic.Field(ge=1, le=4096), _FromText]
_Tokens = Annotated[int, pydantic.Field(ge=1, le=1 << 20), _FromText]
_Turns = Annotated[int, pydantic.Field(ge=1, le=10_000), _FromText]
_Side = Annotated[int, pydantic.Field(ge=1, le=bounds.MAX_SIDE), _FromText]
_Items = Annotated[int, pydantic.Field(ge=0, le=_MOST), _FromText]
_Share = Annotated[float, pydantic.Field(ge=0, le=1), _FromText]
_Seconds = Annotated[
  float, pydantic.Field(gt=0, le=bounds.MAX_SECONDS), _FromText
]
_Wait = Annotated[float, pydantic.Field(ge=0, le=bounds.MAX_SECONDS), _FromText]
_Id = Annotated[
  str,
  pydantic.Field(min_length=1, max_length=items.MOST_ID),
  pydantic.BeforeValidator(lambda value: items.text_id(value, "id")),
]
_Ids = Annotated[list[_Id], pydantic.Field(max_length=MOST_IDS)]
_LeaseId = Annotated[str, pydantic.Field(min_length=1, max_length=64)]


# --- bodies -------------------------------------------------------------------


class OfBuffer(json_models.Request):
  """A call of a buffer; `items.buffer_name` reads its name."""

  buffer: bounds.Name | None = None


class Start(OfBuffer):
  """A payload of `/start_rollout`; further keys are the generator's."""

  model_config = pydantic.ConfigDict(
    extra="allow", json_schema_extra={"x-maxValues": bounds.MAX_VALUES}
  )

  task_type: Annotated[str, pydantic.Field(min_length=1, max_length=512)]
  num_repeat_per_sample: _Count
  num_process: _Processes = 100
  num_epoch: _Count = 1
  min_valid_group_size_ratio: _Share = 1.0
  min_valid_item_size_ratio: _Share = 0.7
  group_timeout_seconds: _Seconds = 300.0
  min_timeout_group_size_ratio: _Share = 0.7
  group_rules: Literal["normalized", "raw"] = "normalized"
  keep_items: json_models.Flag = False
  rollout_batch_size: _Count | None = None
  allowed_items: _Items | None = None
  max_tokens: _Tokens | None = None
  max_turns: _Turns | None = None
  width: _Side | None = None
  height: _Side | None = None
  sampling_params: bounds.Json = {}
  skip_instance_ids: _Ids = []

  @pydantic.model_validator(mode="before")
  @classmethod
  def _bounded(cls, data: object) -> Any:
    for key, value in data.items() if isinstance(data, Mapping) else ():
      problem = bounds.json_problem(value)
      if problem and key != "skip_instance_ids":
        raise ValueError(f"{key} {problem}")
    return data

  @pydantic.model_validator(mode="after")
  def _small_screen(self) -> Start:
    if self.width is not None and self.height is not None:
      if problem := bounds.screen_problem(self.width, self.height):
        raise ValueError(problem)
    return self


class Read(OfBuffer):
  """A body of a read; without `lease_s` the read is final."""

  batch_size: Annotated[int, pydantic.Field(ge=-1, le=_MOST), _FromText] = -1
  allowed_items: _Items | None = None
  lease_s: _Seconds | None = None
  lease: _LeaseId | None = None
  timeout: _Wait | None = None
  wait: json_models.Flag = True

  def check(self, limits: buffer_settings.BufferLimits) -> None:
    """Holds the read to the operator's bounds.

    Raises:
      ValueError: naming the key.
    """
    if self.batch_size > limits.max_items:
      raise ValueError(
        f"batch_size={self.batch_size} exceeds --max-items={limits.max_items},"
        " the items that a buffer can hold; start the service with --max-items"
        f" {self.batch_size} or more"
      )
    if self.lease is not None and self.lease_s is None:
      raise ValueError("lease needs lease_s, the seconds until its ack")
    for name, most in (
      ("lease_s", limits.max_lease),
      ("timeout", limits.max_wait),
    ):
      if (getattr(self, name) or 0.0) > most:
        raise ValueError(
          f"{name}={getattr(self, name):g} must be <= {most:g}, the service's"
          " own bound"
        )


class Peek(OfBuffer):
  batch_size: Annotated[
    int,
    pydantic.Field(ge=1, le=_MOST),
    pydantic.BeforeValidator(
      lambda value: bounds.whole(str(_number(value)), "batch_size", 1, _MOST)
    ),
  ] = 1


class Lease(OfBuffer):
  lease: _LeaseId


class Known(OfBuffer):
  uids: _Ids


DEFAULTS: Mapping[str, Any] = {
  name: field.default
  for name, field in Start.model_fields.items()
  if not field.is_required() and field.default not in (None, {}, [])
}


# --- a rollout ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rollout:
  """A start payload, read.

  Attributes:
    start: Fields that the service uses.
    rules: Rules of the groups.
    payload: Argument of the generator.
  """

  start: Start
  rules: rules.GroupRules
  payload: dict[str, Any]


def rollout(payload: object, buffer_url: str = "") -> Rollout:
  """Reads a start payload.

  Args:
    payload: JSON.
    buffer_url: Address of this service, where the payload names none.

  Raises:
    ValueError: naming the key.
  """
  start = json_models.validate(Start, payload)
  assert isinstance(payload, Mapping)
  sent = {k: v for k, v in payload.items() if v is not None}
  for key in ("remote_engine_url", "remote_buffer_url"):
    if sent.get(key):
      http.address(sent[key], key, "http://127.0.0.1:8000")
  if not sent.get("remote_buffer_url"):
    sent["remote_buffer_url"] = buffer_url
  group_rules = rules.GroupRules(
    group_size=start.num_repeat_per_sample,
    min_valid_group_size_ratio=start.min_valid_group_size_ratio,
    min_valid_item_size_ratio=start.min_valid_item_size_ratio,
    group_timeout_seconds=start.group_timeout_seconds,
    min_timeout_group_size_ratio=start.min_timeout_group_size_ratio,
    raw=start.group_rules == "raw",
  )
  filled = {
    "num_process": start.num_process,
    "num_epoch": start.num_epoch,
    "sampling_params": {},
  }
  skip = {"skip_instance_ids": start.skip_instance_ids}
  return Rollout(start, group_rules, {**filled, **sent, **skip})


def check_step(rollout: Rollout, max_items: int) -> None:
  """Checks that a buffer can hold the groups of a trainer's step.

  Raises:
    ValueError: naming both numbers.
  """
  members = rollout.rules.group_size
  groups = rollout.start.rollout_batch_size or 1
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
  start = rollout.start
  width, height = start.width or SCREEN[0], start.height or SCREEN[1]
  screens = start.num_process
  if width * height * screens > max_megapixels * 1_000_000:
    episodes = start.num_epoch * rollout.rules.group_size
    screens = min(screens, episodes * _tasks(rollout.payload, screens))
  pixels = width * height * screens
  if pixels > max_megapixels * 1_000_000:
    raise ValueError(
      f"width={width} and height={height} of {screens} episodes at a time"
      f" (num_process={start.num_process}) are {pixels} pixels, and"
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


# --- for documents ------------------------------------------------------------


def schemas() -> dict[str, dict[str, Any]]:
  """JSON schemas of the bodies, by the path of their call.

  Numbers may also be texts of digits, and ids whole numbers. `x-boundedBy:
  body` marks what only the size of the body bounds.
  """
  by_body = {"x-boundedBy": "body"}
  name = {"type": "string", "minLength": 1, "maxLength": items.MOST_ID}
  item = {
    "uid": name,
    "instance_id": name,
    "reward": {
      "type": "number",
      "minimum": -reward_range.MAX_REWARD,
      "maximum": reward_range.MAX_REWARD,
    },
    "messages": {"type": "array", "items": by_body, **by_body},
    "extra_info": by_body,
  }
  models: dict[str, type[OfBuffer]] = {
    "/start_rollout": Start,
    "/stop_rollout": OfBuffer,
    "/get_rollout_data": Read,
    "/buffer/read": Read,
    "/buffer/ack": Lease,
    "/buffer/release": Lease,
    "/buffer/known": Known,
    "/buffer/peek": Peek,
    "/buffer/stats": OfBuffer,
  }
  return {
    "/buffer/write": {"type": "object", "properties": item},
    **{path: model.model_json_schema() for path, model in models.items()},
  }
