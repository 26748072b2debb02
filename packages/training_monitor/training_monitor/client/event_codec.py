"""Encodes events as bytes for the uploader process, and decodes them there.

MessagePack has values that JSON lacks (NaN, bytes, keys of any kind) and copies
an array's memory without converting it. An object is a list whose first item is
an extension that no plain value has, with the number of its type. The types of
events survive the round trip; a value of any other type becomes the nearest
plain value, or else text.

Promises: `dump` costs about as much as copying; it fails only for values nested
hundreds deep. `load` runs nothing that the bytes name: it builds the types
below and no others.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import re
from typing import Any, Callable, Iterator, Mapping, Sequence

import msgpack
import numpy as np

from training_monitor.client import event_types
from training_monitor.client.rows import ingest_rows
from training_monitor.client.rows import live_turns
from training_monitor.client.rows import task_rows
from training_monitor.core import events
from training_monitor.core import token_sequence
from training_monitor.core import trajectory as trajectory_lib

_TYPED, _ARRAY, _NUMBER, _IMAGE = 1, 2, 3, 4
_TYPES: tuple[type[Any], ...] = (
  events.RunStarted,
  events.RunFinished,
  events.TasksListed,
  events.EpisodeStarted,
  events.TurnFinished,
  events.EpisodeFinished,
  events.GroupFinished,
  events.Fault,
  events.UpdateStarted,
  events.StepFinished,
  events.WeightsPublished,
  events.EvalStarted,
  events.EvalFinished,
  events.Progress,
  trajectory_lib.Trajectory,
  trajectory_lib.TrajectoryGroup,
  trajectory_lib.Step,
  trajectory_lib.Action,
  trajectory_lib.ToolCall,
  trajectory_lib.ToolOutput,
  token_sequence.TokenSequence,
  token_sequence.ImageSpan,
  ingest_rows.RunningEpisode,
  task_rows.Verdict,
  # New ones at the end: a spool names types by their place.
  events.EnvironmentReady,
  events.CheckpointSaved,
)
_FIELDS = {
  # `steps` first: the only field that needs an encoding of its own.
  kind: tuple(
    sorted((f.name for f in dataclasses.fields(kind)), key="steps".__ne__)
  )
  for kind in _TYPES
}
_STEP = tuple(
  f.name
  for f in dataclasses.fields(trajectory_lib.Step)
  if f.name != "chat_completions"
)
_ARRAYS = (
  ("tokens", "i4"),
  ("loss_mask", "?"),
  ("logprobs", "f4"),
  ("versions", "i4"),
  ("turn_ids", "i4"),
)
_DTYPE = re.compile(r"[<>|=][biuf]\d{1,2}")
RECORDED = frozenset(kind for kind in _TYPES if issubclass(kind, events.Event))
"""Types of events that the uploader takes."""


def _taking(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
  """Returns a function that reads the named attributes into a tuple."""
  take = operator.attrgetter(*names)
  return take if len(names) > 1 else lambda value: (take(value),)


_TAKING = {
  kind: (msgpack.ExtType(_TYPED, bytes([number])), _taking(_FIELDS[kind]))
  for number, kind in enumerate(_TYPES)
}
_OF_STEP = _taking(_STEP)


def dump(event: events.Event) -> bytes:
  """Returns an event of a kind in `RECORDED`, as bytes.

  Episodes of a group become their ids and statuses: each was recorded when it
  ended. A turn keeps what is shown of it while its episode runs.

  Raises:
    ValueError: it is nested too deeply.
  """
  if event_types.is_a(event, events.GroupFinished):
    return pack(dataclasses.replace(event, group=_names(event.group)))
  if event_types.is_a(event, events.StepFinished):
    groups = tuple(map(_names, event.groups))
    return pack(dataclasses.replace(event, groups=groups))
  if event_types.is_a(event, events.TurnFinished):
    return pack(dataclasses.replace(event, step=live_turns.shown(event)))
  return pack(event)


def load(data: bytes) -> events.Event:
  """Decodes an event that `dump` encoded.

  Raises:
    ValueError: they are no event.
  """
  try:
    event = unpack(data)
  except Exception as error:  # pylint: disable=broad-except
    # Constructors may fail in any way at values that they were not made for.
    raise ValueError(f"no event: {error!r}") from None
  if type(event) not in RECORDED:
    raise ValueError(f"a {type(event).__name__} is not an event")
  return event


# --- there --------------------------------------------------------------------


def pack(value: object) -> bytes:
  """Returns the bytes of a value made of plain values and the types above."""
  # Lax about types: a tuple is a list, an enum its text or number.
  return msgpack.Packer(
    default=_typed, unicode_errors="surrogatepass", buf_size=1 << 14
  ).pack(value)


def _typed(value: Any) -> Any:
  """Encodes a value that MessagePack does not know."""
  kind = event_types.carried(type(value))
  if kind is token_sequence.ImageRef:
    line = f"{value.sha256} {value.width} {value.height}"
    return msgpack.ExtType(_IMAGE, line.encode())
  encoder = _TAKING.get(kind)
  if encoder is not None:
    mark, fields = encoder
    if kind is trajectory_lib.Trajectory:
      values = fields(value)
      return mark, _steps(values[0]), *values[1:]
    if kind is token_sequence.TokenSequence:
      return mark, *_fields_of_sequence(value)
    return mark, *fields(value)
  if kind is np.ndarray and value.dtype.kind in "biuf":
    body = [value.dtype.str, value.shape, value.tobytes()]
    return msgpack.ExtType(_ARRAY, msgpack.packb(body))
  return _nearest(value)


def _nearest(value: object) -> Any:
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, int):  # Of more than 64 bits.
    return msgpack.ExtType(_NUMBER, hex(value).encode())
  if isinstance(value, Mapping):
    return dict(value)
  if isinstance(value, np.ndarray):
    return value.tolist()
  if isinstance(value, Sequence):
    return list(value)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  return str(value)


def _steps(steps: Sequence[trajectory_lib.Step]) -> list[Any]:
  """Messages that a step shares with the one before are sent once."""
  packed = []
  previous: Sequence[Any] = ()
  for step in steps:
    messages = step.chat_completions
    shared = 0
    for old, new in zip(previous, messages):
      if old is not new:
        break
      shared += 1
    packed.append([shared, list(messages[shared:]), _OF_STEP(step)])
    previous = messages
  return packed


def _fields_of_sequence(sequence: token_sequence.TokenSequence) -> list[Any]:
  """Returns length, concatenated arrays and image spans of a sequence."""
  arrays = [getattr(sequence, name) for name, _ in _ARRAYS]
  if sequence.entropies is not None:
    arrays.append(sequence.entropies)
  return [
    len(sequence),
    b"".join(array.tobytes() for array in arrays),
    [
      (span.image, span.offset, span.num_tokens, span.row)
      for span in sequence.images
    ],
  ]


def _names(group: trajectory_lib.TrajectoryGroup) -> Any:
  return dataclasses.replace(
    group,
    trajectories=tuple(
      type(episode)(trajectory_id=episode.trajectory_id, status=episode.status)
      for episode in group
    ),
  )


# --- and back -----------------------------------------------------------------


def unpack(data: bytes) -> Any:
  """Returns the value that `pack` encoded. Raises any error for other bytes."""
  return msgpack.unpackb(
    data,
    ext_hook=_extension_back,
    list_hook=_object_back,
    strict_map_key=False,
    unicode_errors="surrogatepass",
  )


def _extension_back(code: int, data: bytes) -> Any:
  if code == _TYPED:
    (number,) = data
    return _TYPES[number]
  if code == _NUMBER:
    return int(data, 16)
  if code == _IMAGE:
    sha, width, height = data.decode().split()
    return token_sequence.ImageRef(sha, int(width), int(height))
  if code == _ARRAY:
    dtype, shape, body = msgpack.unpackb(data)
    if not _DTYPE.fullmatch(dtype):
      raise ValueError(f"no dtype of an event's: {dtype!r}")
    return np.frombuffer(body, dtype).reshape(shape)
  raise ValueError(f"MessagePack extension {code} is none of an event's")


def _object_back(items: list[Any]) -> Any:
  if not items or not isinstance(items[0], type):
    return items
  kind, *values = items
  if kind is token_sequence.TokenSequence:
    return _sequence_back(*values)
  named = dict(zip(_FIELDS[kind], values, strict=True))
  if kind is trajectory_lib.Trajectory:
    named["status"] = trajectory_lib.TrajectoryStatus(named["status"])
    named["steps"] = list(_steps_back(named["steps"]))
  return kind(**named)


def _steps_back(packed: list[Any]) -> Iterator[trajectory_lib.Step]:
  messages: list[Any] = []
  for shared, new, values in packed:
    messages = [*messages[:shared], *new]
    named = dict(zip(_STEP, values, strict=True))
    yield trajectory_lib.Step(chat_completions=messages, **named)


def _sequence_back(
  length: int, data: bytes, images: list[Any]
) -> token_sequence.TokenSequence:
  arrays, at = {}, 0
  for name, dtype in (*_ARRAYS, ("entropies", "f4")):
    if at < len(data) or name != "entropies":
      arrays[name] = np.frombuffer(data, dtype, length, at)
      at += arrays[name].nbytes
  spans = tuple(token_sequence.ImageSpan(*span) for span in images)
  return token_sequence.TokenSequence(images=spans, **arrays)
