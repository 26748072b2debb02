"""Places sequences: rows first-fit decreasing, images once a buffer.

An item is placed as a whole: a sequence, or a tree of sequences that begin with
the same tokens and pixels. A tree lies in a row depth first: each sequence from
where it leaves the one before it. A tree that is longer than a row is cut into
several items, each of which repeats the prefix of its sequences.

Promises: every example is in exactly one item; no sequence is cut; the result
depends on the examples and their order only.

Does not: touch pixels or make arrays (see `batching`).

Axis names: R = rows of all batches opened so far; and those of `batching`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.policy.layers import kernels

Example = example_lib.Example
_EMPTY = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """The shape of every batch; programs are compiled for it.

  Attributes:
    rows: B, a multiple of `buffers`.
    row_length: T.
    buffers: S.
    patches: P, a multiple of the processor's patches a token; 0 for a text
      policy.
    targets: M.
    image_patches: patches of the largest image; a larger one is refused. 0 =
      one may fill a buffer.
    aligned: whether no image crosses a multiple of `image_patches` in its
      buffer, where that is not 0; else one begins anywhere.
  """

  rows: int
  row_length: int
  buffers: int
  patches: int
  targets: int
  image_patches: int = 0
  aligned: bool = True

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = 1
      if field.name in ("patches", "image_patches", "aligned"):
        least = 0
      if getattr(self, field.name) < least:
        raise ValueError(
          f"BatchShape.{field.name} must be >= {least}, got"
          f" {getattr(self, field.name)}"
        )
    if self.rows % self.buffers:
      raise ValueError(
        f"rows={self.rows} must be a multiple of the {self.buffers} batch"
        " shards (data x fsdp)"
      )

  @property
  def rows_per_buffer(self) -> int:
    return self.rows // self.buffers

  def windows(self) -> Windows:
    """Returns an empty buffer's places for images."""
    return Windows(self.patches, self.image_patches * self.aligned)

  def bounded(
    self, image_patches: int, patches: int = 0, *, multiple: int = 1
  ) -> BatchShape:
    """Returns this shape for images of up to `image_patches` patches.

    A buffer is rounded up to what attention within images computes by: whole
    windows where images are aligned; else blocks of the splash kernel, unless
    it is smaller than one. Rounding again changes nothing.

    Args:
      image_patches: Patches of the largest image; 0 = any, and nothing is
        rounded.
      patches: Least patches of a buffer, which never gets fewer than it has.
      multiple: Divisor of `patches` and `image_patches`: a vision token's
        patches.
    """
    patches = max(patches, self.patches)
    if image_patches and self.aligned:
      patches = _up_to(patches, image_patches)
    elif image_patches and patches > kernels.SPLASH_BLOCK:
      patches = _up_to(patches, math.lcm(kernels.SPLASH_BLOCK, multiple))
    return dataclasses.replace(
      self, image_patches=image_patches, patches=patches
    )


class Windows:
  """Free places of a patch buffer, in windows that no image crosses.

  Attention within an image then needs the keys of the image's window only.
  An image lies in the first window with room for it, behind earlier images.
  """

  def __init__(self, places: int, window: int = 0):
    """Args:

    places: Places of the buffer.
    window: places of a window; 0 = the buffer is one.
    """
    window = window or max(places, 1)
    self._start = np.arange(0, places, window)
    self._end = np.minimum(self._start + window, places)
    self._next = self._start.copy()

  @property
  def used(self) -> int:
    """Places up to the end of the last image."""
    is_used = self._next > self._start
    return int(self._next[is_used].max(initial=0))

  def fit(self, sizes: Iterable[int]) -> tuple[list[int], np.ndarray] | None:
    """Returns the first places of images of the given sizes.

    Returns:
      The places, and the next free place of each window once they are taken;
      None without room for all.
    """
    following, places = self._next.copy(), []
    for size in sizes:
      room = following + size <= self._end
      if not room.any():
        return None
      at = int(np.argmax(room))
      places.append(int(following[at]))
      following[at] += size
    return places, following

  def take(self, sizes: Sequence[int]) -> list[int]:
    """Takes places for images of sizes that `fit`; returns the first places."""
    result = self.fit(sizes)
    assert result is not None, f"no room for images of {sizes} patches"
    places, self._next = result
    return places


@dataclasses.dataclass(frozen=True)
class PackStats:
  """Fill of a list of batches.

  Attributes:
    batches: their number.
    sequences: examples packed.
    sequence_tokens: tokens these hold on their own (up to the last sampled
      one).
    row_tokens: tokens in rows, shared prefixes once; of `row_capacity`.
    targets: sampled tokens.
    patches: patches in buffers; of `patch_capacity`.
  """

  batches: int
  sequences: int
  sequence_tokens: int
  row_tokens: int
  row_capacity: int
  targets: int
  patches: int
  patch_capacity: int

  @classmethod
  def total(cls, stats: Iterable[PackStats]) -> PackStats:
    """Returns the fill of several lists of batches together."""
    stats = list(stats)
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{n: sum(getattr(s, n) for s in stats) for n in names})

  def metrics(self) -> dict[str, float]:
    out = {
      "micro_batches": float(self.batches),
      "sequences": float(self.sequences),
      "tokens": float(self.sequence_tokens),
      "sampled_tokens": float(self.targets),
      "shared_tokens": float(self.sequence_tokens - self.row_tokens),
    }
    if self.batches:
      out["packing_efficiency"] = self.row_tokens / self.row_capacity
      if self.patch_capacity:
        out["patch_efficiency"] = self.patches / self.patch_capacity
    return out


def image_bound(patches: int, multiple: int = 1) -> int:
  """Returns a bound of an image's patches that few sizes of images exceed.

  Rounded up by at most an eighth (or to 8): a program is compiled for each
  bound, and attention within images costs in proportion to it.

  Args:
    patches: Patches of the largest image.
    multiple: Divisor of the bound: a vision token's patches.
  """
  step = max(8, 1 << max(patches.bit_length() - 4, 0))
  step = math.lcm(step, multiple)
  return _up_to(patches, step)


def _up_to(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


# --- items: placed as a whole -----------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
  """Tokens [start, end) of an example's sequence.

  The tokens before `start` are those of the piece before it, or of its prefix.
  """

  example: int
  start: int
  end: int


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
  """Sequences that share a row's tokens, depth first: one piece of each."""

  pieces: tuple[Piece, ...]
  length: int
  targets: int
  images: tuple[trajectory.ImageRef, ...]


def used_length(sequence: trajectory.TokenSequence) -> int:
  """Returns the number of tokens before the last sampled one."""
  return example_lib.length_in_row(sequence)


def make_items(
  examples: Sequence[Example], row_length: int, tree: bool
) -> list[Item]:
  """Makes items of at most `row_length` tokens where sequences allow it.

  Args:
    examples: Examples to pack.
    row_length: T.
    tree: whether sequences share the tokens and pixels they begin with.
  """
  if not tree:
    return [make_item(examples, [(i, 0)]) for i in range(len(examples))]
  # 1. In lexicographic order the sequences are the leaves of the tree, depth
  #    first, and neighbours share what any two sequences between them share.
  images: dict[str, int] = {}
  codes = [_codes(example.sequence, images) for example in examples]
  order = sorted(
    range(len(examples)), key=lambda i: codes[i].astype(">i8").tobytes()
  )
  shared = [_common(codes[i], codes[j]) for i, j in zip(order, order[1:])]
  # 2. Walk the branching points, the deepest first. The clusters below one are
  #    merged as far as a row holds them, with the prefix they share once.
  opened: list[tuple[int, list[_Cluster]]] = []
  for rank, (number, behind) in enumerate(zip(order, [*shared, 0])):
    clusters = [_Cluster([rank], len(codes[number]))]
    while opened and opened[-1][0] > behind:
      depth, earlier = opened.pop()
      clusters = _merged([*earlier, *clusters], depth, row_length)
    if opened and opened[-1][0] == behind:
      opened[-1][1].extend(clusters)
    else:
      opened.append((behind, clusters))
  # 3. Sequences that share nothing are apart: rows are filled with items later.
  items = []
  for _, clusters in opened:
    for cluster in clusters:
      ranks = sorted(cluster.ranks)
      starts = [min(shared[a:b]) for a, b in zip(ranks, ranks[1:])]
      members = [order[rank] for rank in ranks]
      items.append(make_item(examples, list(zip(members, [0, *starts]))))
  return sorted(items, key=lambda item: min(p.example for p in item.pieces))


@dataclasses.dataclass
class _Cluster:
  """Sequences of one item, by their ranks, and at most as many tokens."""

  ranks: list[int]
  length: int


def _merged(
  clusters: Sequence[_Cluster], depth: int, row_length: int
) -> list[_Cluster]:
  """Merges clusters that share `depth` tokens: first-fit decreasing."""
  merged: list[_Cluster] = []
  for cluster in sorted(clusters, key=lambda c: -c.length):
    more = cluster.length - depth
    roomy = (c for c in merged if c.length + more <= row_length)
    room = next(roomy, None)
    if room is None:
      merged.append(_Cluster([*cluster.ranks], cluster.length))
    else:
      room.ranks += cluster.ranks
      room.length += more
  return merged


def _codes(
  sequence: trajectory.TokenSequence, images: dict[str, int]
) -> np.ndarray:
  """Returns int64[T], equal for equal tokens of equal pixels.

  Args:
    sequence: A sequence; T tokens of it are in a row.
    images: SHA-256 -> number of an image; new ones are added.
  """
  codes = sequence.tokens[: used_length(sequence)].astype(np.int64)
  for span in sequence.images:
    number = images.setdefault(span.image.sha256, len(images) + 1)
    codes[span.offset : span.end] += number << 32
  return codes


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """Returns the length of the longest common prefix."""
  length = min(len(a), len(b))
  differ = a[:length] != b[:length]
  return int(np.argmax(differ)) if differ.any() else length


def make_item(
  examples: Sequence[Example], members: Sequence[tuple[int, int]]
) -> Item:
  """Returns the item of members, depth first.

  Args:
    examples: Examples to pack.
    members: Number of each example, and how many tokens it shares with the
      member before it; the first one's is not read.
  """
  numbers = [number for number, _ in members]
  starts = [0, *(start for _, start in members[1:])]
  pieces = tuple(
    Piece(i, start, used_length(examples[i].sequence))
    for i, start in zip(numbers, starts)
  )
  images = {
    span.image.sha256: span.image
    for piece in pieces
    for span in examples[piece.example].sequence.images
    if span.offset < piece.end
  }
  return Item(
    pieces=pieces,
    length=sum(p.end - p.start for p in pieces),
    targets=sum(examples[i].sequence.num_sampled for i in numbers),
    images=tuple(images.values()),
  )


# --- placing ----------------------------------------------------------------


class Bins:
  """Rows and buffers that are being filled, in order of opening."""

  def __init__(self, shape: BatchShape):
    self._shape = shape
    self.batches = 0
    self.free_R = _EMPTY  # Tokens free in each row.
    self.buffer_R = _EMPTY  # Buffer of each row.
    self.windows: list[Windows] = []  # Of each buffer.
    self.patches_free = _EMPTY
    self.targets_free = _EMPTY
    self.holders: dict[str, list[int]] = {}

  def _open(self) -> None:
    shape = self._shape
    first = self.batches * shape.buffers
    self.free_R = np.concatenate(
      [self.free_R, np.full(shape.rows, shape.row_length)]
    )
    self.buffer_R = np.concatenate(
      [self.buffer_R, first + np.arange(shape.rows) // shape.rows_per_buffer]
    )
    self.windows += [shape.windows() for _ in range(shape.buffers)]
    self.patches_free = np.concatenate(
      [self.patches_free, np.full(shape.buffers, shape.patches)]
    )
    self.targets_free = np.concatenate(
      [self.targets_free, np.full(shape.buffers, shape.targets)]
    )
    self.batches += 1

  def place(self, item: Item, sizes: dict[str, int]) -> tuple[int, list[str]]:
    """(row, images new to its buffer); opens a batch when none has room."""
    row = self._find(item, sizes)
    if row is None:
      self._open()
      row = self._find(item, sizes)
      assert row is not None, "an item that fits no empty batch was let in"
    buffer = int(self.buffer_R[row])
    new = [
      image.sha256
      for image in item.images
      if buffer not in self.holders.get(image.sha256, ())
    ]
    self.windows[buffer].take([sizes[sha] for sha in new])
    for sha in new:
      self.holders.setdefault(sha, []).append(buffer)
      self.patches_free[buffer] -= sizes[sha]
    self.free_R[row] -= item.length
    self.targets_free[buffer] -= item.targets
    return row, new

  def _find(self, item: Item, sizes: dict[str, int]) -> int | None:
    # 1. Patches that each buffer lacks: an image it holds costs nothing.
    total = sum(sizes[image.sha256] for image in item.images)
    cost = np.full(len(self.patches_free), total)
    for image in item.images:
      for buffer in self.holders.get(image.sha256, ()):
        cost[buffer] -= sizes[image.sha256]
    # 2. Rows with room for the item's tokens, patches and targets.
    room = (cost <= self.patches_free) & (item.targets <= self.targets_free)
    fits = (self.free_R >= item.length) & room[self.buffer_R]
    if not fits.any():
      return None
    # 3. The first row whose buffer needs the fewest new patches: plain first
    #    fit unless some buffer holds an image already.
    rows = np.flatnonzero(fits)
    rows = rows[np.argsort(cost[self.buffer_R[rows]], kind="stable")]
    # 4. The free places may be too scattered for the images' windows.
    full: set[int] = set()
    for row in rows:
      buffer = int(self.buffer_R[row])
      if buffer in full:
        continue
      new = [
        sizes[image.sha256]
        for image in item.images
        if buffer not in self.holders.get(image.sha256, ())
      ]
      if self.windows[buffer].fit(new) is not None:
        return int(row)
      full.add(buffer)
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """The place of every example; `Packer.fill` makes its batches."""

  shape: BatchShape
  placed: list[list[tuple[int, Item, list[str]]]]  # Per batch.
  stats: PackStats
