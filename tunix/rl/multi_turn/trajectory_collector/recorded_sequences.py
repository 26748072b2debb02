"""Token sequences of items: JSON to arrays and back.

    {"tokens", "loss_mask", "logprobs"?, "versions"?, "turn_ids"?, "images"?,
     "entropies"?, "support"?}

Promises: a log-prob or a version that was not recorded stays unrecorded (NaN,
-1) in a `Recorded`; one that was is as it was written. A sequence that
`token_sequence.TokenSequence` would refuse is refused here, with the name of
its field.

Does not: know what an item holds beside its sequences (`records` does).

Axis names: T = tokens of one sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from typing import Any, Mapping

import numpy as np
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import token_sequence

TOKEN_EXACT = ("tokens", "loss_mask", "logprobs", "versions")
NOT_RECORDED = np.float32(-0.0)
"""Stands for a log-prob until it is scored; a recorded 0 has the other sign."""
_OF_SEQUENCE = (*TOKEN_EXACT, "turn_ids", "entropies", "support")
_PER_TOKEN = ("loss_mask", "logprobs", "versions", "turn_ids", "entropies")


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
  """A token sequence of an item; what was not recorded is unknown.

  Attributes:
    tokens: int32[T].
    loss_mask: bool[T], True for tokens that the policy sampled.
    logprobs: float32[T]; NaN where not recorded, 0 where the mask is False.
    versions: int32[T]; -1 where not recorded or not sampled.
    turn_ids: int32[T]; the number of the run of sampled tokens, where the item
      has none.
    images: spans of placeholders.
    entropies, support: see `TokenSequence`; None without.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  turn_ids: np.ndarray
  images: tuple[token_sequence.ImageSpan, ...] = ()
  entropies: np.ndarray | None = None
  support: np.ndarray | None = None

  @property
  def has_logprobs(self) -> bool:
    """Whether every sampled token has its log-prob."""
    return not bool(np.isnan(self.logprobs[self.loss_mask]).any())

  @property
  def has_versions(self) -> bool:
    """Whether every sampled token has its version."""
    return bool((self.versions[self.loss_mask] >= 0).all())

  def token_sequence(
    self, *, version: int | None = None, placeholder_logprobs: bool = False
  ) -> token_sequence.TokenSequence:
    """The sequence.

    Args:
      version: stands for versions that were not recorded; None refuses them.
      placeholder_logprobs: `NOT_RECORDED` stands for all log-probs of a
        sequence that lacks one, until the caller scores it (see
        `awaits_logprobs`); False refuses such a sequence.

    Raises:
      ValueError: something was not recorded, or the values are illegal.
    """
    logprobs, versions = self.logprobs, self.versions
    if not self.has_logprobs:
      if not placeholder_logprobs:
        raise ValueError("a sampled token has no recorded log-prob")
      logprobs = np.where(self.loss_mask, NOT_RECORDED, np.float32(0.0))
    if not self.has_versions:
      if version is None:
        raise ValueError("a sampled token has no recorded version")
      unknown = self.loss_mask & (versions < 0)
      versions = np.where(unknown, version, versions)
    return token_sequence.TokenSequence(
      self.tokens,
      self.loss_mask,
      logprobs,
      versions,
      self.turn_ids,
      self.images,
      self.entropies,
      self.support,
    )


def of_item(item: Mapping[str, Any]) -> tuple[Recorded, ...]:
  """The sequences of an item; () of one that is text only.

  Raises:
    ValueError: naming the field and what it must be.
  """
  listed = item.get("sequences")
  if listed is None:
    # The short form; `images` beside it are spans unless it is an object.
    if item.get("tokens") is None:
      return ()
    short = {k: item[k] for k in _OF_SEQUENCE if k in item}
    if isinstance(item.get("images"), list):
      short["images"] = item["images"]
    listed = [short]
  if not isinstance(listed, list):
    got = json_text.short(listed, 60)
    raise ValueError(f"sequences must be a list, got {got}")
  return tuple(_sequence(s, f"sequences[{i}]") for i, s in enumerate(listed))


def _listed(value: object, name: str, length: int | None = None) -> list[Any]:
  if not isinstance(value, list):
    raise ValueError(f"{name} must be a list, got {json_text.short(value, 60)}")
  if length is not None and len(value) != length:
    raise ValueError(f"{name} has {len(value)} entries for {length} tokens")
  return value


def _whole(values: list[Any], name: str) -> np.ndarray:
  """int64[T] of whole numbers."""
  try:
    return _packed(values, "q", np.int64)
  except struct.error:
    raise ValueError(
      f"{name} must be a flat list of numbers, whole ones"
    ) from None


def _packed(
  values: list[Any], code: str, dtype: np.typing.DTypeLike
) -> np.ndarray:
  """The numbers, as `struct` packs them: twice as fast as numpy's own way.

  Raises:
    struct.error: another value, or one that is out of range.
  """
  return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype)


def _sampled(
  values: list[Any], name: str, mask_T: np.ndarray, whole: bool = False
) -> np.ndarray:
  """float64[T]: the numbers at sampled tokens; NaN for null and elsewhere."""
  out = np.full(len(values), np.nan)
  chosen = list(itertools.compress(values, mask_T.tolist()))
  try:
    out[mask_T] = (
      _packed(chosen, "q", np.int64)
      if whole
      else _packed(chosen, "d", np.float64)
    )
    return out
  except (struct.error, OverflowError):
    pass  # Some were not recorded.
  try:
    numbers = np.array(chosen, np.float64)
  except (TypeError, ValueError, OverflowError):
    numbers = np.zeros((0, 0))
  present = numbers[~np.isnan(numbers)]
  if numbers.ndim != 1 or (
    whole and not np.array_equal(present, np.rint(present))
  ):
    raise ValueError(f"{name} must be a flat list of numbers or nulls")
  out[mask_T] = numbers
  return out


def _sequence(data: object, name: str) -> Recorded:
  if not isinstance(data, Mapping):
    got = json_text.short(data, 60)
    raise ValueError(f"{name} must be an object, got {got}")
  for key in ("tokens", "loss_mask"):
    if data.get(key) is None:
      raise ValueError(f"{name} lacks {key}")
  tokens = _whole(_listed(data["tokens"], f"{name}.tokens"), f"{name}.tokens")
  fields = {
    key: _listed(data[key], f"{name}.{key}", len(tokens))
    for key in _PER_TOKEN
    if data.get(key) is not None
  }
  if len(tokens) and not (
    0 <= int(tokens.min()) and int(tokens.max()) < 1 << 31
  ):
    raise ValueError(f"{name}.tokens must be ids >= 0 of 31 bits")
  marks = _whole(fields["loss_mask"], f"{name}.loss_mask")
  mask = marks == 1
  if not (mask | (marks == 0)).all():
    raise ValueError(f"{name}.loss_mask must be 0 or 1 for each token")

  def sampled(key: str, whole: bool = False) -> np.ndarray:
    if key not in fields:
      return np.full(len(tokens), np.nan)
    return _sampled(fields[key], f"{name}.{key}", mask, whole)

  versions = sampled("versions", whole=True)
  if np.nanmax(versions, initial=0) >= 1 << 31:
    raise ValueError(f"{name}.versions must be numbers of 31 bits")
  if "turn_ids" not in fields:
    turn_ids = turns_of(mask)
  else:
    turn_ids = _whole(fields["turn_ids"], f"{name}.turn_ids")
    if len(turn_ids) and not (
      0 <= int(turn_ids.min()) and int(turn_ids.max()) < 1 << 31
    ):
      raise ValueError(f"{name}.turn_ids must be >= 0 and of 31 bits")
  entropies = None
  if "entropies" in fields:
    entropies = _single(np.where(mask, sampled("entropies"), 0.0))
  # A recorded -0.0 is 0.0, see `NOT_RECORDED`.
  logprobs = np.where(mask, sampled("logprobs") + 0.0, 0.0)
  recorded = Recorded(
    tokens=tokens.astype(np.int32),
    loss_mask=mask,
    logprobs=_single(logprobs),
    versions=np.where(versions >= 0, versions, -1).astype(np.int32),
    turn_ids=turn_ids.astype(np.int32),
    images=_spans(data.get("images"), name),
    entropies=entropies,
    support=_support(data.get("support"), mask, name),
  )
  try:  # What the policy's own sequences promise.
    recorded.token_sequence(version=0, placeholder_logprobs=True)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from None
  return recorded


def _single(values_T: np.ndarray) -> np.ndarray:
  """float32[T]; what is too large is infinite, and refused as such."""
  with np.errstate(over="ignore"):
    return values_T.astype(np.float32)


def _support(rows: Any, mask_T: np.ndarray, name: str) -> np.ndarray | None:
  try:
    return token_sequence.support_of(rows, mask_T)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(
      f"{name}.support must be a list of token ids for each sampled token"
    ) from None


def awaits_logprobs(sequence: token_sequence.TokenSequence) -> bool:
  """Whether placeholders stand for the log-probs of a sequence."""
  logprobs = sequence.logprobs[sequence.loss_mask]
  return bool(
    len(logprobs) and not logprobs.any() and np.signbit(logprobs).all()
  )


def turns_of(loss_mask: np.ndarray) -> np.ndarray:
  """int32[T], the number of the run of sampled tokens that T leads to."""
  mask = np.asarray(loss_mask, bool)
  ends = np.zeros(len(mask), np.int32)
  if len(mask):
    ends[1:] = mask[:-1] & ~mask[1:]
  turns = np.cumsum(ends, dtype=np.int32)
  last = int(turns[mask][-1]) if mask.any() else 0
  return np.minimum(turns, last)  # What follows the last turn belongs to it.


def _spans(data: Any, name: str) -> tuple[token_sequence.ImageSpan, ...]:
  try:
    return tuple(
      token_sequence.ImageSpan(
        token_sequence.ImageRef.from_json(s),
        int(s["start"]),
        int(s["num_tokens"]),
        int(s.get("row", 0)),
      )
      for s in data or ()
    )
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{name}.images: each needs sha256, width, height, start and"
      f" num_tokens ({error})"
    ) from None
  except ValueError as error:
    raise ValueError(f"{name}.images: {error}") from None


def write(sequence: token_sequence.TokenSequence | Recorded) -> dict[str, Any]:
  """JSON of a sequence; null where nothing was sampled or recorded."""
  mask = sequence.loss_mask
  present = mask & ~np.isnan(sequence.logprobs)

  def told(values: np.ndarray, where: np.ndarray) -> list[Any]:
    out = values.astype(object)
    out[~where] = None
    return out.tolist()

  result: dict[str, Any] = {
    "tokens": sequence.tokens.tolist(),
    "loss_mask": mask.astype(int).tolist(),
    "logprobs": told(sequence.logprobs, present),
    "versions": told(sequence.versions, mask & (sequence.versions >= 0)),
    "turn_ids": sequence.turn_ids.tolist(),
    "images": [
      {
        **s.image.to_json(),
        "start": s.offset,
        "num_tokens": s.num_tokens,
        **({"row": s.row} if s.row else {}),
      }
      for s in sequence.images
    ],
  }
  if sequence.entropies is not None:
    result["entropies"] = told(sequence.entropies, mask)
  if sequence.support is not None:
    result["support"] = [
      row[row >= 0].tolist() for row in sequence.support[mask]
    ]
  return result
