"""Reads items: what one write holds.

    {uid, instance_id, messages, reward, extra_info}

and, of a token-exact one, `tokens, loss_mask, logprobs, versions, images`, or
`sequences`, a list of objects with these keys. Ids may be texts or whole
numbers and are texts from here on; all other keys are the writer's.

Promises: an item that is returned can be read by a trainer: a finite reward,
messages with roles, sequences: all that `records` takes. Its body is the
JSON of `encoded`, and parses to the values that its writer sent: what no
encoder writes again (nesting, whole numbers of more than 64 bits, numbers that
no float holds, half a surrogate pair) is refused.

Does not look into `extra_info`, or decode pictures.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any, Mapping

import orjson
import pydantic_core
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.trajectory_collector import records

try:
  from zlib_ng.zlib_ng import crc32
except ImportError:
  from zlib import crc32

DEFAULT_BUFFER = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_ID = 512  # Characters.
_SHA256 = re.compile(r"[0-9a-f]{64}")
DEEPEST = 128
"""Levels of lists and objects in an item."""
_ENCODER_LEVELS = 254  # Of orjson.
_WRAPS = _ENCODER_LEVELS - DEEPEST


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
  """One write.

  Attributes:
    buffer: Name of its buffer.
    uid, instance_id: of the episode and of its group.
    reward: finite.
    body: JSON of the whole item.
    crc: Checksum of the body.
  """

  buffer: str
  uid: str
  instance_id: str
  reward: float
  body: bytes
  crc: int


class ItemError(ValueError):
  """An item that cannot be taken; names the field, the value and the fix."""


class _Infinite(ItemError):
  """A number that no float holds."""


def buffer_name(value: object) -> str:
  """A buffer's name; None is the default buffer's.

  Raises:
    ItemError: no name.
  """
  if value is None:
    return DEFAULT_BUFFER
  if not isinstance(value, str) or not _NAME.fullmatch(value):
    raise ItemError(
      f"buffer={json_models.short(value)} must be a name of up to 64 letters,"
      " digits, '.', '_' and '-'"
    )
  return value


def read(raw: bytes, buffer: str | None = None) -> list[Item]:
  """The items of a body: one object, a list, or one object a line.

  Args:
    raw: JSON, or lines of JSON (NDJSON).
    buffer: Buffer of all items; None where each may name its own.

  Raises:
    ItemError: naming the item, where there are several, and the fault.
  """
  raw = raw.strip()
  if raw[:1] == b"{" and b"\n" in raw:
    try:
      # Line by line: a list of millions of them takes a gigabyte.
      values = [_parse(line) for line in io.BytesIO(raw) if line.strip()]
    except _Infinite:
      raise
    except ItemError:
      # One object that is written over several lines.
      values = [_parse(raw)]
  else:
    value = _parse(raw)
    values = value if isinstance(value, list) else [value]
  if not values:
    raise ItemError("the body holds no item; write at least one")
  result = []
  for number, value in enumerate(values):
    try:
      result.append(_item(value, buffer))
    except ItemError as error:
      if len(values) == 1:
        raise
      raise ItemError(f"item {number}: {error}") from None
  return result


_LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{19}")
"""Matches wherever an integer may not fit into 64 bits."""
_SLICE = 1 << 20
"""Bytes of one search: the interpreter runs no other thread meanwhile."""
_ZEROS = b"0" * 19
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)


def _may_hold_long_integer(raw: bytes) -> bool:
  """Whether `_LONG_INTEGER` matches anywhere in a body."""
  for start in range(0, len(raw), _SLICE):
    part = raw[max(start - 1, 0) : start + _SLICE + len(_ZEROS) - 1]
    # The pattern, which looks at the byte before, is slow and rarely needed.
    may = _ZEROS in part.translate(_DIGITS_TO_ZERO)
    if may and _LONG_INTEGER.search(part, min(start, 1)):
      return True
  return False


def _parse(raw: bytes) -> Any:
  try:
    # orjson is the faster one. It makes floats of integers beyond 64 bits, and
    # does not name the place of a number that no float holds (1e400).
    if not _may_hold_long_integer(raw):
      return orjson.loads(raw)
  except ValueError as error:
    if "depth limit" in str(error) or "ecursion" in str(error):
      raise ItemError(
        f"the body is not JSON: it nests deeper than {DEEPEST} levels"
      ) from None
    if "infinity" not in str(error):
      raise ItemError(f"the body is not JSON: {error}") from None
  try:
    value = pydantic_core.from_json(raw, allow_inf_nan=False)
  except ValueError as error:
    raise ItemError(f"the body is not JSON: {error}") from None
  if place := json_models.infinite(value):  # Encoded, it would be null.
    raise _Infinite(f"{place} is larger than any float; write a smaller one")
  return value


def encoded(item: object) -> bytes:
  """The JSON of an item, or of statistics, at most `DEEPEST` levels deep.

  An answer has levels around its items, and a reader's parser has a limit of
  its own: both stay below theirs.

  Raises:
    ItemError: the encoder does not write it.
  """
  wrapped = item
  for _ in range(_WRAPS):
    wrapped = [wrapped]
  try:
    return orjson.dumps(wrapped)[_WRAPS:-_WRAPS]
  except orjson.JSONEncodeError as error:
    what = str(error)
    if "ecursion" in what:
      what = f"it nests deeper than {DEEPEST} levels"
    raise ItemError(f"it cannot be written as JSON: {what}") from None


def _item(value: dict[str, Any], buffer: str | None) -> Item:
  try:
    record = records.read(value)  # As its reader does.
    if value["extra_info"] is None:
      raise ValueError("extra_info=None must be an object")
  except ValueError as error:
    raise ItemError(str(error)) from None
  for key in ("uid", "instance_id"):
    value[key] = text_id(value[key], key)
  if isinstance(value["reward"], bool):
    value["reward"] = record.reward
  _check_images(value)
  body = encoded(value)
  return Item(
    buffer_name(value.get("buffer")) if buffer is None else buffer,
    value["uid"],
    value["instance_id"],
    record.reward,
    body,
    crc32(body),
  )


def text_id(value: object, key: str) -> str:
  """An id as text; a whole number is its decimal digits.

  Raises:
    ItemError: neither, or too long.
  """
  if isinstance(value, str) and 0 < len(value) <= MOST_ID:
    return value
  if isinstance(value, int) and not isinstance(value, bool):
    if len(digits := str(value)) <= MOST_ID:
      return digits
  raise ItemError(
    f"{key}={json_models.short(value)} must be a text of 1 to {MOST_ID}"
    " characters, or a whole number"
  )


def _check_images(value: Mapping[str, Any]) -> None:
  """Of pictures by their hash; they are not decoded."""
  images = value.get("images")
  if images is None or isinstance(images, list):
    return
  if not isinstance(images, dict):
    raise ItemError(
      f"images={json_models.short(images)} must be an object, SHA-256 to"
      " base64 PNG, or the list of a sequence's images"
    )
  for sha256, picture in images.items():
    if not _SHA256.fullmatch(sha256) or not isinstance(picture, str):
      raise ItemError(
        f"images.{sha256[:80]}={json_models.short(picture)} must be a base64"
        " PNG under the 64 hex digits of its SHA-256"
      )
