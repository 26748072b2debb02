"""Reads items: what one write holds.

    {uid, instance_id, messages, reward, extra_info}

and, of a token-exact one, `tokens, loss_mask, logprobs, versions, images`, or
`sequences`, a list of objects with these keys. Ids may be texts or whole
numbers and are texts from here on; all other keys are the writer's.

Promises: an item that is returned can be trained on as far as its form goes: a
finite reward, messages with roles, sequences whose lists have one length. Its
body is JSON, the writer's own bytes where nothing had to change.

Does not look into `extra_info`, or decode pictures.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Iterator, Mapping

import orjson
from tunix.rl.multi_turn.core import json_models
from tunix.rl.multi_turn.core import reward_range

try:
  from zlib_ng.zlib_ng import crc32
except ImportError:
  from zlib import crc32

DEFAULT_BUFFER = "default"
REQUIRED = ("uid", "instance_id", "messages", "reward", "extra_info")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_ID = 512  # Characters.
_LISTS = ("tokens", "loss_mask", "logprobs", "versions")
_INT32 = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
  """One write.

  Attributes:
    buffer: that it goes to.
    uid, instance_id: of the episode and of its group.
    reward: finite.
    body: JSON of all of it.
    crc: of the body.
  """

  buffer: str
  uid: str
  instance_id: str
  reward: float
  body: bytes
  crc: int


class ItemError(ValueError):
  """An item that cannot be taken; names the field, the value and the fix."""


def buffer_name(value: Any) -> str:
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
    buffer: that all of them go to; None where each may name its own.

  Raises:
    ItemError: naming the item, where there are several, and the fault.
  """
  raw = raw.strip()
  lines = raw.split(b"\n") if raw[:1] == b"{" and b"\n" in raw else [raw]
  if len(lines) > 1:
    try:
      values = [_parse(line) for line in lines if line.strip()]
      bodies = [line.strip() for line in lines if line.strip()]
    except ItemError:
      # One object that is written over several lines.
      values, bodies = [_parse(raw)], [raw]
  else:
    values, bodies = [_parse(raw)], [raw]
    if isinstance(values[0], list):
      values = values[0]
      bodies = [orjson.dumps(value) for value in values]
  if not values:
    raise ItemError("the body holds no item; write at least one")
  if len(values) == 1:
    return [_item(values[0], bodies[0], buffer)]
  found = []
  for number, (value, body) in enumerate(zip(values, bodies)):
    try:
      found.append(_item(value, body, buffer))
    except ItemError as error:
      raise ItemError(f"item {number}: {error}") from None
  return found


def _parse(raw: bytes) -> Any:
  try:
    return orjson.loads(raw)
  except orjson.JSONDecodeError as error:
    raise ItemError(f"the body is not JSON: {error}") from None


def _item(value: Any, body: bytes, buffer: str | None) -> Item:
  if not isinstance(value, dict):
    raise ItemError(
        f"an item must be an object, got {json_models.short(value)}"
    )
  missing = [key for key in REQUIRED if key not in value]
  if missing:
    raise ItemError(
        f"{missing[0]} is missing; an item needs {', '.join(REQUIRED)}"
    )
  changed = False
  ids = {}
  for key in ("uid", "instance_id"):
    ids[key] = text_id(value[key], key)
    if ids[key] is not value[key]:
      value[key], changed = ids[key], True
  reward = value["reward"]
  if isinstance(reward, bool):
    value["reward"], changed = float(reward), True
  elif not isinstance(reward, (int, float)):
    raise ItemError(
        f"reward={json_models.short(reward)} must be a finite number"
    )
  try:
    reward_range.checked(value["reward"])
  except ValueError as error:
    raise ItemError(f"reward: {error}") from None
  _check_messages(value["messages"])
  if not isinstance(value["extra_info"], dict):
    raise ItemError(
        f"extra_info={json_models.short(value['extra_info'])} must be an"
        " object; {} where there is nothing to say"
    )
  for sequence, where in _sequences(value):
    _check_sequence(sequence, where)
  if changed:
    body = orjson.dumps(value)
  return Item(
      buffer_name(value.get("buffer")) if buffer is None else buffer,
      ids["uid"],
      ids["instance_id"],
      float(value["reward"]),
      body,
      crc32(body),
  )


def text_id(value: Any, key: str) -> str:
  """An id as text; a whole number is its decimal digits.

  Raises:
    ItemError: neither, or too long.
  """
  if isinstance(value, str) and 0 < len(value) <= _MOST_ID:
    return value
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  raise ItemError(
      f"{key}={json_models.short(value)} must be a text of 1 to {_MOST_ID}"
      " characters, or a whole number"
  )


def _check_messages(messages: Any) -> None:
  if not isinstance(messages, list):
    raise ItemError(
        f"messages={json_models.short(messages)} must be a list of objects"
        " with 'role' and 'content'"
    )
  for number, message in enumerate(messages):
    if not isinstance(message, dict) or not isinstance(
        message.get("role"), str
    ):
      raise ItemError(
          f"messages.{number}={json_models.short(message)} must be an object"
          " with a text 'role'"
      )


def is_token_exact(item: Mapping[str, Any]) -> bool:
  """Whether an item holds the tokens that were sampled."""
  return any(True for _ in _sequences(item))


def _sequences(
    item: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """(sequence, name for errors) of each of an item's sequences."""
  if item.get("tokens") is not None:
    yield item, ""
  several = item.get("sequences")
  if several is None:
    return
  if not isinstance(several, list):
    raise ItemError(
        f"sequences={json_models.short(several)} must be a list of objects"
    )
  for number, one in enumerate(several):
    where = f"sequences.{number}."
    if not isinstance(one, dict) or not isinstance(one.get("tokens"), list):
      raise ItemError(
          f"{where}tokens is missing; a sequence needs tokens and loss_mask"
      )
    yield one, where


def _check_sequence(sequence: Mapping[str, Any], where: str) -> None:
  tokens = sequence["tokens"]
  for key in _LISTS:
    values = sequence.get(key)
    if values is None and key in ("logprobs", "versions"):
      continue  # Not recorded.
    if not isinstance(values, list):
      raise ItemError(
          f"{where}{key}={json_models.short(values)} must be a list with one"
          " value a token"
      )
    if len(values) != len(tokens):
      raise ItemError(
          f"{where}{key} has {len(values)} values for {len(tokens)} tokens;"
          " write one a token"
      )
    problem = _CHECKS[key](values)
    if problem:
      raise ItemError(f"{where}{key} must hold {problem}")
  _check_images(sequence, len(tokens), where)


def _tokens(values: list[Any]) -> str:
  right = set(map(type, values)) <= {int}
  if right and values:
    right = min(values) >= 0 and max(values) < _INT32
  return "" if right else "token ids, whole numbers in [0, 2**31)"


def _mask(values: list[Any]) -> str:
  right = set(map(type, values)) <= {int, bool} and set(values) <= {0, 1}
  return "" if right else "0 or 1 a token"


def _logprobs(values: list[Any]) -> str:
  right = set(map(type, values)) <= {int, float, type(None)}
  return "" if right else "numbers, or null where none was recorded"


def _versions(values: list[Any]) -> str:
  right = set(map(type, values)) <= {int, type(None)}
  return "" if right else "whole numbers, or null where none was recorded"


_CHECKS = {
    "tokens": _tokens,
    "loss_mask": _mask,
    "logprobs": _logprobs,
    "versions": _versions,
}


def _check_images(sequence: Mapping[str, Any], length: int, where: str) -> None:
  # At the top level `images` may be the pictures themselves, by their hash.
  images = sequence.get("images")
  if images is None or isinstance(images, dict):
    return
  if not isinstance(images, list):
    raise ItemError(
        f"{where}images={json_models.short(images)} must be a list of objects"
        " with sha256, width, height and start"
    )
  for number, image in enumerate(images):
    right = isinstance(image, dict) and isinstance(image.get("sha256"), str)
    for key, least in (("width", 1), ("height", 1), ("start", 0)):
      size = image.get(key) if right else None
      right = right and type(size) is int and size >= least
    if not right or image["start"] >= max(1, length):
      raise ItemError(
          f"{where}images.{number}={json_models.short(image)} must be an object"
          " with sha256, width, height and start, a place among the tokens"
      )
