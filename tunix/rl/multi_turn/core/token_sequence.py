"""Tokens of an episode with their log-probs, versions and image spans.

Promises: no illegal value can be built. A trainable token always has a
log-prob and a policy version, an untrainable one never has; an image
placeholder is never trainable and always belongs to an image. Everything here
round-trips through JSON.

Does not: hold pixels (see `images.py`) or know a tokenizer. Imports numpy
only. `trajectory` gives these names too.

Axis names: T = tokens of one sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class ImageRef:
  """A screenshot by content: SHA-256 of the RGB bytes the policy saw.

  Attributes:
    sha256: 64 lower-case hex digits, see `images.hash_pixels`.
    width: pixels.
    height: pixels.
  """

  sha256: str
  width: int
  height: int

  def __post_init__(self):
    if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
      raise ValueError(
        f"ImageRef.sha256 must be 64 hex digits, got {self.sha256!r}"
      )
    if self.width <= 0 or self.height <= 0:
      raise ValueError(
        f"ImageRef size must be positive, got {self.width}x{self.height}"
      )

  def __repr__(self) -> str:
    return f"ImageRef({self.sha256[:8]}…, {self.width}x{self.height})"

  def to_json(self) -> dict[str, Any]:
    return {"sha256": self.sha256, "width": self.width, "height": self.height}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ImageRef:
    return cls(data["sha256"], int(data["width"]), int(data["height"]))


@dataclasses.dataclass(frozen=True)
class ImageSpan:
  """An image and the placeholder tokens that stand for it.

  Attributes:
    image: Reference to the image.
    offset: index of the first placeholder token.
    num_tokens: Number of tokens up to the last placeholder.
    row: placeholders of a run, where other tokens stand between the runs
      (Pixtral's rows, SmolVLM's tiles); 0: all are one run.
  """

  image: ImageRef
  offset: int
  num_tokens: int
  row: int = 0

  def __post_init__(self):
    if not 0 <= self.row <= self.num_tokens:
      raise ValueError(
        f"ImageSpan of {self.num_tokens} tokens has no runs of {self.row}"
      )
    if self.offset < 0 or self.num_tokens <= 0:
      raise ValueError(
        f"ImageSpan needs offset >= 0 and num_tokens > 0, got {self.offset}"
        f" and {self.num_tokens}"
      )

  @property
  def end(self) -> int:
    return self.offset + self.num_tokens

  def numbers(self, tokens_T: np.ndarray) -> np.ndarray:
    """Returns int32[num_tokens], each placeholder's number; -1 between runs."""
    numbers: np.ndarray = np.arange(self.num_tokens, dtype=np.int32)
    if self.row:
      run = tokens_T[self.offset : self.end]
      shown = run == run[0]
      numbers = np.where(shown, np.cumsum(shown, dtype=np.int32) - 1, -1)
    return numbers

  def shifted(self, by: int) -> ImageSpan:
    return dataclasses.replace(self, offset=self.offset + by)

  def to_json(self) -> dict[str, Any]:
    return {
      "image": self.image.to_json(),
      "offset": self.offset,
      "num_tokens": self.num_tokens,
      **({"row": self.row} if self.row else {}),
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ImageSpan:
    return cls(
      ImageRef.from_json(data["image"]),
      int(data["offset"]),
      int(data["num_tokens"]),
      int(data.get("row", 0)),
    )


def check_spans(tokens_T: np.ndarray, images: Sequence[ImageSpan]) -> None:
  """Raises ValueError unless spans are ordered, inside, and uniform.

  All placeholders of all spans carry one id, and that id stands nowhere else.
  """
  if not images:
    return
  placeholder = None
  cursor = 0
  covered = 0
  for span in images:
    if span.offset < cursor or span.end > len(tokens_T):
      raise ValueError(
        f"image span [{span.offset}, {span.end}) overlaps an earlier one or"
        f" leaves the {len(tokens_T)} tokens"
      )
    run = tokens_T[span.offset : span.end]
    if placeholder is None:
      placeholder = int(run[0])
    if span.row:
      shown = run == placeholder
      edges = np.flatnonzero(np.diff(shown, prepend=False, append=False))
      lengths = np.diff(edges)[::2]
      if not (shown[0] and shown[-1]) or np.any(lengths != span.row):
        raise ValueError(
          f"image span [{span.offset}, {span.end}) is not made of runs of"
          f" {span.row} placeholders with other tokens between each two"
        )
      run = run[shown]
    if not np.all(run == placeholder):
      raise ValueError(
        f"image span [{span.offset}, {span.end}) holds tokens other than the"
        f" placeholder id {placeholder}"
      )
    cursor = span.end
    covered += len(run)
  if int(np.sum(tokens_T == placeholder)) != covered:
    raise ValueError(
      f"placeholder id {placeholder} stands outside every image span; a"
      " policy must be banned from sampling it"
    )


def check_numbers(
  tokens_T: np.ndarray, logprobs_T: np.ndarray, entropies_T: np.ndarray | None
) -> None:
  """Raises ValueError unless ids, log-probs and entropies can be such."""
  # Every turn comes here, and np.any takes twice as long as an array's any.
  if (tokens_T < 0).any():
    raise ValueError("TokenSequence.tokens holds a negative id")
  if not np.isfinite(logprobs_T).all():
    raise ValueError("TokenSequence.logprobs must be finite")
  if (logprobs_T > 1e-4).any():
    raise ValueError("TokenSequence.logprobs must be <= 0")
  if entropies_T is not None:
    if not np.isfinite(entropies_T).all():
      raise ValueError("TokenSequence.entropies must be finite")
    if (entropies_T < 0).any():
      raise ValueError("TokenSequence.entropies must be >= 0")


def check_versions(versions_S: np.ndarray) -> None:
  """Raises ValueError unless each sampled token has a policy version."""
  if (versions_S < 0).any():
    raise ValueError("a sampled token carries no policy version")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSequence:
  """One token-exact training sequence.

  Attributes:
    tokens: int32[T], prompt and sampled ids in the order the policy saw them.
    loss_mask: bool[T], True exactly where the policy sampled the token.
    logprobs: float32[T], log-prob (nats) of each sampled token under the
      distribution it was drawn from, after temperature and truncation; 0 where
      the mask is False.
    versions: int32[T], version of the weights that sampled the token; -1 where
      the mask is False.
    turn_ids: int32[T], 0-based turn whose prompt extension or completion the
      token belongs to; never decreases.
    images: spans of image placeholders, in order.
    entropies: float32[T], nats, entropy of the policy's distribution before
      each sampled token, at temperature 1, nothing truncated (see
      `policy_client.Completion`); 0 where the mask is False. None unless the
      sampler reported it for every sampled token.
    support: int32[T, K], ids of the tokens that truncation left to be sampled
      at each sampled one (see `policy_client.Completion`), largest first, -1
      where there are fewer; as narrow as it can be. None unless the sampler
      reported it for every sampled token.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  turn_ids: np.ndarray
  images: tuple[ImageSpan, ...] = ()
  entropies: np.ndarray | None = None
  support: np.ndarray | None = None

  def __post_init__(self):
    fields = {
      "tokens": np.int32,
      "loss_mask": np.bool_,
      "logprobs": np.float32,
      "versions": np.int32,
      "turn_ids": np.int32,
    }
    if self.entropies is not None:
      fields["entropies"] = np.float32
    for name, dtype in fields.items():
      array: np.ndarray = np.array(getattr(self, name), dtype=dtype)
      if array.ndim != 1:
        raise ValueError(f"TokenSequence.{name} must be 1-D")
      array.flags.writeable = False
      object.__setattr__(self, name, array)
    object.__setattr__(self, "images", tuple(self.images))
    length = len(self.tokens)
    for name in fields:
      if len(getattr(self, name)) != length:
        raise ValueError(
          f"TokenSequence.{name} has {len(getattr(self, name))} entries for"
          f" {length} tokens"
        )
    check_numbers(self.tokens, self.logprobs, self.entropies)
    mask = self.loss_mask
    unmasked = ~mask
    if self.logprobs[unmasked].any():
      raise ValueError("a token that was not sampled carries a log-prob")
    if self.entropies is not None and self.entropies[unmasked].any():
      raise ValueError("a token that was not sampled carries an entropy")
    if (self.versions[unmasked] != -1).any():
      raise ValueError("a token that was not sampled carries a version")
    check_versions(self.versions[mask])
    if (self.turn_ids[1:] < self.turn_ids[:-1]).any():
      raise ValueError("TokenSequence.turn_ids must not decrease")
    if self.support is not None:
      self._check_support()
    check_spans(self.tokens, self.images)
    for span in self.images:
      if np.any(mask[span.offset : span.end]):
        raise ValueError("an image placeholder is marked as sampled")

  def __repr__(self) -> str:
    return (
      f"TokenSequence({len(self.tokens)} tokens, {self.num_sampled} sampled,"
      f" {len(self.images)} images)"
    )

  def _check_support(self) -> None:
    support: np.ndarray = np.array(self.support, np.int32)
    if support.ndim != 2 or len(support) != len(self.tokens):
      raise ValueError(
        f"TokenSequence.support has shape {support.shape} for"
        f" {len(self.tokens)} tokens; it must be [T, K]"
      )
    # One form for one support: no filling that no token needs.
    support = -np.sort(-support, axis=1)
    width = int((support >= 0).sum(axis=1).max(initial=1))
    support = np.ascontiguousarray(support[:, :width])
    support.flags.writeable = False
    object.__setattr__(self, "support", support)
    if np.any(support[~self.loss_mask] != -1):
      raise ValueError("a token that was not sampled carries a support")
    truncated = np.any(support >= 0, axis=1)
    inside = np.any(support == self.tokens[:, None], axis=1)
    if np.any(truncated & ~inside):
      raise ValueError("a sampled token is outside of its support")

  def __len__(self) -> int:
    return len(self.tokens)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, TokenSequence):
      return NotImplemented
    return self.images == other.images and all(
      np.array_equal(getattr(self, f), getattr(other, f))
      for f in (
        "tokens",
        "loss_mask",
        "logprobs",
        "versions",
        "turn_ids",
        "entropies",
        "support",
      )
    )

  @property
  def num_sampled(self) -> int:
    return int(self.loss_mask.sum())

  def trimmed(self, oldest: int) -> TokenSequence:
    """A copy in which tokens of versions below `oldest` count as context.

    Itself when there are none.
    """
    return self._as_context(self.loss_mask & (self.versions < oldest))

  def without_turns(self, turn_ids: Iterable[int]) -> TokenSequence:
    """Returns a copy whose loss mask is 0 for the tokens of the given turns.

    Itself when there are none.
    """
    turns = np.isin(self.turn_ids, list(turn_ids))
    return self._as_context(self.loss_mask & turns)

  def _as_context(self, tokens_T: np.ndarray) -> TokenSequence:
    if not tokens_T.any():
      return self
    entropies = self.entropies
    return dataclasses.replace(
      self,
      loss_mask=self.loss_mask & ~tokens_T,
      logprobs=np.where(tokens_T, 0, self.logprobs),
      versions=np.where(tokens_T, -1, self.versions),
      entropies=None if entropies is None else np.where(tokens_T, 0, entropies),
      support=None
      if self.support is None
      else np.where(tokens_T[:, None], -1, self.support),
    )

  def to_json(self) -> dict[str, Any]:
    """JSON values; `entropies` and `support` only where there are any."""
    record = {}
    if self.entropies is not None:
      record["entropies"] = self.entropies.tolist()
    if self.support is not None:
      # Of sampled tokens, without filling.
      record["support"] = [
        row[row >= 0].tolist() for row in self.support[self.loss_mask]
      ]
    return {
      "tokens": self.tokens.tolist(),
      "loss_mask": self.loss_mask.astype(int).tolist(),
      "logprobs": self.logprobs.tolist(),
      "versions": self.versions.tolist(),
      "turn_ids": self.turn_ids.tolist(),
      "images": [span.to_json() for span in self.images],
      **record,
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> TokenSequence:
    return cls(
      tokens=data["tokens"],
      loss_mask=np.asarray(data["loss_mask"], bool),
      logprobs=data["logprobs"],
      versions=data["versions"],
      turn_ids=data["turn_ids"],
      images=tuple(ImageSpan.from_json(s) for s in data["images"]),
      entropies=data.get("entropies"),
      support=support_of(data.get("support"), data["loss_mask"]),
    )


def support_of(
  rows: Sequence[Sequence[int]] | None, mask: Sequence[int] | np.ndarray
) -> np.ndarray | None:
  """int32[T, K] of the lists of sampled tokens; None of None."""
  if rows is None:
    return None
  width = max(map(len, rows), default=0)
  support = np.full((len(mask), max(width, 1)), -1, np.int32)
  for at, row in zip(np.flatnonzero(mask), rows, strict=True):
    support[at, : len(row)] = row
  return support
