"""Encodes messages between a server and its workers: JSON and raw pixels.

A message is the length of its JSON (4 bytes, big-endian), the JSON, and the
bytes of the screenshot whose shape the JSON gives, if there is one.

Promises: decoding never evaluates or imports any part of a message.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, Callable

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments.gyms import base

_LENGTH = struct.Struct(">I")
_READ: dict[str, Callable[[dict[str, Any]], Any]] = {
    "task": base.Task.from_json,
    "action": gui_action.GuiAction.from_json,
    "evaluation": lambda data: base.Evaluation(**data),
}


def encode(message: dict[str, Any], value: Any = None) -> bytes:
  """A message.

  Args:
    message: JSON values.
    value: sent with it: None, JSON, or a Task, GuiAction, Observation or
      Evaluation.

  Raises:
    TypeError: it holds a value that JSON cannot.
  """
  pixels = b""
  kind = "json"
  if isinstance(value, base.Task):
    kind, value = "task", value.to_json()
  elif isinstance(value, gui_action.GuiAction):
    kind, value = "action", value.to_json()
  elif isinstance(value, base.Evaluation):
    kind, value = "evaluation", dataclasses.asdict(value)
  elif isinstance(value, base.Observation):
    kind = "observation"
    screenshot = np.ascontiguousarray(value.screenshot, np.uint8)
    pixels = screenshot.tobytes()
    value = {
        "shape": screenshot.shape,
        "instruction": value.instruction,
        "text": value.text,
        "done": value.done,
        "info": dict(value.info),
    }
  header = json.dumps(
      {**message, "kind": kind, "value": value}, default=_plain
  ).encode()
  return _LENGTH.pack(len(header)) + header + pixels


def decode(data: bytes) -> tuple[dict[str, Any], Any]:
  """(message, value) of `encode`.

  Raises:
    ValueError: `data` is not such a message.
  """
  try:
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    message = json_text.parse(data[_LENGTH.size : start])
    kind, value = message.pop("kind"), message.pop("value")
    if kind == "observation":
      shape = value.pop("shape")
      screenshot = np.frombuffer(data, np.uint8, offset=start).reshape(shape)
      return message, base.Observation(screenshot, **value)
    return message, value if kind == "json" else _READ[kind](value)
  except (KeyError, TypeError, AttributeError, struct.error) as error:
    raise ValueError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
  """JSON of the arrays that gyms put into `info`."""
  if isinstance(value, (np.ndarray, np.generic)):
    return value.tolist()
  raise TypeError(
      f"{type(value).__name__} {value!r:.80} has no JSON; a gym in a worker"
      " process receives and returns JSON values only"
  )
