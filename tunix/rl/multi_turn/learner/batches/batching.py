"""Packs examples into batches of one fixed shape.

Sequences are packed into rows (see `packing`), images into one patch buffer a
batch shard. Two things are stored once and used many times: an image
that several sequences of a buffer show, and (for policies that support it) the
tokens that several sequences begin with: the row is then a tree of prefixes,
whose tokens are seen by their descendants only. The result depends on the
examples and their order only.

Targets are flat: `index` points at the position whose hidden state predicts
the token, so that log-probs are computed for sampled tokens only. A token that
is sampled in several sequences is a target of each. Position t predicts token
t + 1; tokens after a sequence's last sampled one predict nothing and are left
out.

Promises: every sampled token of every packed example is a target exactly
once; a batch has the given shape, and examples that do not fit go to a further
batch; nothing is cut. No batch has an image larger than its shape's bound.

Axis names: B = rows, T = tokens of a row, S = buffers (one a batch shard, row
b belongs to buffer b // (B // S)), P = patches of a buffer, F = bytes of a
patch, M = targets of a buffer.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import patch_cache

Example = example_lib.Example
BatchShape = packing.BatchShape
PackStats = packing.PackStats
PATCH_CACHE_BYTES = 256 << 20
"""Of a packer, on the host."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  """A packed batch.

  Attributes:
    inputs: Inputs of the policy.
    index: int32[S, M], position among the buffer's B/S * T tokens whose hidden
      state predicts the target.
    targets: int32[S, M], token ids.
    mask: bool[S, M], False for padding.
    logprobs: float32[S, M], as sampled.
    advantages: float32[S, M].
    weights: float32[S, M], weight in the loss; 0 for padding.
    versions: int32[S, M], of the weights that sampled the token; -1 padding.
    sequences: int32[S, M], number of the example; -1 padding.
    groups: int32[S, M], number of its group; -1 padding.
    streams: name -> float32[S, M], of `Example.streams`; 0 for padding.
    support: int32[S, M, K], see `TokenSequence.support`; -1 for padding. None
      where truncation is not reproduced.
  """

  inputs: base.PolicyInputs
  index: base.Array
  targets: base.Array
  mask: base.Array
  logprobs: base.Array
  advantages: base.Array
  weights: base.Array
  versions: base.Array
  sequences: base.Array
  groups: base.Array
  streams: dict[str, base.Array] = dataclasses.field(default_factory=dict)
  support: base.Array | None = None


class Packer:
  """Packs examples; owns the cache of patched images.

  One user at a time.
  """

  def __init__(
    self,
    processor: base.Processor,
    store: image_lib.ImageStore,
    *,
    tree: bool = False,
    pad_token_id: int = 0,
    banned_token_ids: Sequence[int] = (),
    cache_bytes: int = PATCH_CACHE_BYTES,
    streams: Sequence[str] = (),
    support: int = 0,
  ):
    """Args:

    processor: host side of the policy.
    store: pixels of the images that sequences refer to.
    tree: whether sequences share the tokens they begin with; the policy
      must read `PolicyInputs.seen_until`.
    pad_token_id: fills rows.
    banned_token_ids: a target among them is refused: its log-prob is -inf.
    cache_bytes: Most bytes of patched images.
    streams: names of `Example.streams` that batches hold; 0 where an example
      has none of that name.
    support: K of `Batch.support`, the most tokens of a sampling mask for a
      sampled token; 0 holds none.
    """
    self._processor = processor
    self._patches = patch_cache.PatchCache(store, processor, cache_bytes)
    self._tree = tree
    self._pad = pad_token_id
    self._banned = np.array(sorted(banned_token_ids), np.int32)
    self._streams = tuple(streams)
    self._support = support

  def check(self, examples: Sequence[Example], row_length: int) -> list[int]:
    """Returns the numbers of the examples longer than a row.

    Raises:
      ValueError: a target that cannot have been sampled.
    """
    long = []
    for i, example in enumerate(examples):
      sequence = example.sequence
      if len(self._banned):
        targets = sequence.tokens[sequence.loss_mask]
        wrong = np.intersect1d(targets, self._banned)
        if len(wrong):
          raise ValueError(
            f"example {i} holds the sampled token {int(wrong[0])}, which"
            " samplers are banned from drawing; its log-prob is -inf. The"
            " sampler and the learner must use the same banned_token_ids"
          )
      if self._support:
        self._check_support(i, sequence)
      if packing.used_length(sequence) > row_length:
        long.append(i)
    return long

  def _check_support(
    self, number: int, sequence: trajectory.TokenSequence
  ) -> None:
    if sequence.support is None:
      raise ValueError(
        f"example {number} has no sampling mask, which keep_sampling_mask"
        " needs; sample with it, or set keep_sampling_mask=False"
      )
    width = int((sequence.support >= 0).sum(axis=1).max(initial=0))
    if width > self._support:
      raise ValueError(
        f"example {number} has a sampling mask of {width} tokens, a batch"
        f" holds {self._support}; lower sampling.top_k"
      )

  def suggest(
    self,
    examples: Sequence[Example],
    rows: int,
    row_length: int,
    buffers: int,
    patches: int = 0,
    targets: int = 0,
    image_patches: int = 0,
    aligned: bool = True,
  ) -> packing.BatchShape:
    """Returns the shape for examples like these; 0 = as these need.

    Rows are planned without limits on patches and targets, then the fullest
    buffer's need is rounded up by a tenth. A buffer never holds less than one
    row may need, so an example that fits a row still fits later, in more
    batches.
    """
    ppt = self._processor.patches_per_token
    per_buffer = max(rows // max(buffers, 1), 1) * row_length
    most = packing.BatchShape(
      rows,
      row_length,
      buffers,
      per_buffer * ppt,
      per_buffer,
      image_patches,
      aligned,
    )
    if image_patches and aligned:
      # Windows may be half empty, all but the last.
      most = most.bounded(image_patches, 2 * most.patches + image_patches)
    plan = self.plan(examples, most)
    used_patches = used_targets = 1
    for batch in plan.placed:
      by_buffer = [most.windows() for _ in range(buffers)]
      targets_by: collections.Counter[int] = collections.Counter()
      for row, item, new in batch:
        buffer = row // most.rows_per_buffer
        by_buffer[buffer].take([self._size(s, item) for s in new])
        targets_by[buffer] += item.targets
      used_patches = max(used_patches, *(w.used for w in by_buffer))
      used_targets = max(used_targets, *targets_by.values())
    roomy_patches = _round_up(used_patches, 1.1, 32 * max(ppt, 1))
    roomy_targets = _round_up(used_targets, 1.1, 32)
    shape = dataclasses.replace(
      most,
      patches=patches
      or max(row_length * ppt, min(roomy_patches, most.patches)),
      targets=targets or max(row_length, min(roomy_targets, most.targets)),
    )
    return shape.bounded(image_patches, multiple=max(ppt, 1))

  def places_of_one(
    self, examples: Sequence[Example], shape: packing.BatchShape
  ) -> int:
    """Returns the most places that an example's images take when alone.

    An aligned image that shares its window with none leaves the rest of it
    empty, so that they may be more than `shape.patches` although the patches
    are not.
    """
    most = 0
    for example in examples:
      images = packing.make_item([example], [(0, 0)]).images
      sizes = [self._image_size(image) for image in images]
      if sum(sizes) > shape.patches:
        continue  # Refused by `plan`.
      windows = dataclasses.replace(
        shape, patches=len(sizes) * shape.image_patches
      ).windows()
      windows.take(sizes)
      most = max(most, windows.used)
    return most

  def largest_image(self, examples: Sequence[Example], limit: int = 0) -> int:
    """Returns the patches of the examples' largest image, 0 without images.

    Args:
      examples: Examples to be packed.
      limit: patches that an image may have; 0 = any number.

    Raises:
      ValueError: an image has more.
    """
    most = 0
    for image in {span.image for e in examples for span in e.sequence.images}:
      size = self._image_size(image)
      most = max(most, size)
      if limit and size > limit:
        raise ValueError(
          f"an image of {image.width}x{image.height} has {size} patches,"
          f" policy.config.max_image_patches={limit}; raise it (0 = no"
          " limit), or lower policy.config.max_pixels or the size of the"
          " screenshots"
        )
    return most

  def plan(
    self, examples: Sequence[Example], shape: packing.BatchShape
  ) -> packing.Plan:
    """Places examples.

    Raises:
      ValueError: an example that cannot fit a batch of this shape.
    """
    if shape.image_patches % max(self._processor.patches_per_token, 1):
      raise ValueError(
        f"BatchShape.image_patches={shape.image_patches} must be a multiple"
        f" of a vision token's {self._processor.patches_per_token} patches"
      )
    # 1. Make items: sequences, or trees of sequences that begin alike.
    items = packing.make_items(examples, shape.row_length, self._tree)
    # 2. Refuse images that a window cannot hold.
    sizes: dict[str, int] = {}
    for item in items:
      for image in item.images:
        if image.sha256 not in sizes:
          sizes[image.sha256] = self._image_size(image)
        if 0 < shape.image_patches < sizes[image.sha256]:
          raise ValueError(
            f"image {image.sha256[:12]}… of {image.width}x{image.height} has"
            f" {sizes[image.sha256]} patches, BatchShape.image_patches="
            f"{shape.image_patches}: patches further apart would not see"
            " each other; raise it to `image_bound(largest_image(examples))`"
          )
    # 3. Halve items that no empty buffer holds.
    items = [
      part
      for item in items
      for part in self._split(examples, item, sizes, shape)
    ]
    # 4. Place the longest first: short ones fill the gaps. Equal lengths keep
    #    their order, hence their group.
    order = sorted(range(len(items)), key=lambda i: -items[i].length)
    bins = packing.Bins(shape)
    placed: list[list[tuple[int, packing.Item, list[str]]]] = []
    used_patches = 0
    for i in order:
      row, new = bins.place(items[i], sizes)
      while len(placed) < bins.batches:
        placed.append([])
      placed[row // shape.rows].append((row % shape.rows, items[i], new))
      used_patches += sum(sizes[s] for s in new)
    stats = packing.PackStats(
      batches=len(placed),
      sequences=len(examples),
      sequence_tokens=sum(packing.used_length(e.sequence) for e in examples),
      row_tokens=sum(item.length for item in items),
      row_capacity=len(placed) * shape.rows * shape.row_length,
      targets=sum(item.targets for item in items),
      patches=used_patches,
      patch_capacity=len(placed) * shape.buffers * shape.patches,
    )
    return packing.Plan(shape, placed, stats)

  def fill(
    self, plan: packing.Plan, examples: Sequence[Example], weights_N: np.ndarray
  ) -> list[Batch]:
    """Returns the batches of a plan.

    Args:
      plan: The result of `plan` for the same examples.
      examples: N of them.
      weights_N: weight in the loss of every token of each example.

    Raises:
      KeyError: the store no longer has an image.
      ValueError: an image's placeholders do not match its size.
    """
    return [
      self._fill_one(plan.shape, placed, examples, weights_N)
      for placed in plan.placed
    ]

  # -- one image, one item --

  def _image_size(self, image: trajectory.ImageRef) -> int:
    tokens = self._processor.num_image_tokens(image.width, image.height)
    return tokens * self._processor.patches_per_token

  def _size(self, sha: str, item: packing.Item) -> int:
    return next(
      self._image_size(image) for image in item.images if image.sha256 == sha
    )

  def _split(
    self,
    examples: Sequence[Example],
    item: packing.Item,
    sizes: dict[str, int],
    shape: packing.BatchShape,
  ) -> list[packing.Item]:
    """Halves an item with several pieces until it fits an empty buffer."""
    shown = [sizes[image.sha256] for image in item.images]
    patches = sum(shown)
    if (
      item.length <= shape.row_length
      and shape.windows().fit(shown) is not None
      and item.targets <= shape.targets
    ):
      return [item]
    if len(item.pieces) == 1:
      for kind, need, have, field in (
        ("tokens", item.length, shape.row_length, "row_length"),
        ("patches", patches, shape.patches, "patches"),
        ("sampled tokens", item.targets, shape.targets, "targets"),
      ):
        if need > have:
          raise ValueError(
            f"example {item.pieces[0].example} has {need} {kind}, a batch"
            f" takes {have}; raise {field}"
          )
      raise ValueError(
        f"example {item.pieces[0].example} has {len(shown)} images of"
        f" {patches} patches, which do not fit {shape.patches} patches in"
        f" windows of {shape.image_patches}; raise patches"
      )
    members = [(p.example, p.start) for p in item.pieces]
    middle = len(members) // 2
    return [
      part
      for half in (members[:middle], members[middle:])
      for part in self._split(
        examples, packing.make_item(examples, half), sizes, shape
      )
    ]

  # -- one batch --

  def _fill_one(
    self,
    shape: packing.BatchShape,
    placed: Sequence[tuple[int, packing.Item, list[str]]],
    examples: Sequence[Example],
    weights_N: np.ndarray,
  ) -> Batch:
    # 1. Images first: a row refers to the places of their vision tokens.
    patches, patch_segments, patch_positions, first_token = self._buffers(
      shape, placed, examples
    )
    rows = _Rows(shape, self._pad, self._streams, self._support)
    for row, item, _ in placed:
      buffer = row // shape.rows_per_buffer
      rows.begin(row)
      # 2. The place of each token of a sequence: up to where a piece starts
      #    they are those of the sequence before it.
      path = np.zeros(0, np.int64)
      for piece in item.pieces:
        sequence = examples[piece.example].sequence
        # 3. The tokens behind the branching point have no more descendants.
        path = rows.close(row, path, piece.start)
        here = rows.take(row, piece.end - piece.start)
        path = np.concatenate([path, np.arange(here.start, here.stop)])
        rows.tokens[row, here] = sequence.tokens[piece.start : piece.end]
        rows.positions[row, here] = self._processor.positions(
          sequence.tokens[: piece.end],
          [i for i in sequence.images if i.offset < piece.end],
          piece.start,
        )
        for span in sequence.images:
          if piece.start <= span.offset < piece.end:
            where = here.start + span.offset - piece.start
            numbers = span.numbers(sequence.tokens)
            first = first_token[buffer, span.image.sha256]
            rows.vision[row, where : where + span.num_tokens] = np.where(
              numbers >= 0, first + numbers, -1
            )
        rows.add_targets(
          row,
          piece.example,
          examples[piece.example],
          path,
          weights_N[piece.example],
        )
      rows.close(row, path, 0)
    extra = {"seen_until": rows.seen_until} if self._tree else {}
    inputs = base.PolicyInputs(
      tokens=rows.tokens,
      positions=rows.positions,
      segment_ids=rows.segments,
      vision_index=rows.vision,
      patches=patches,
      patch_segments=patch_segments,
      patch_positions=patch_positions,
      image_patches=shape.image_patches,
      aligned_images=shape.aligned and bool(shape.image_patches),
      **extra,
    )
    return Batch(
      inputs=inputs,
      mask=rows.mask,
      streams=rows.streams,
      support=rows.support,
      **rows.ints,
      **rows.floats,
    )

  def _buffers(
    self,
    shape: packing.BatchShape,
    placed: Sequence[tuple[int, packing.Item, list[str]]],
    examples: Sequence[Example],
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[tuple[int, str], int]]:
    """Patch buffers, and where each image's vision tokens begin."""
    s, p = shape.buffers, shape.patches
    ppt = self._processor.patches_per_token
    patches = np.zeros((s, p, self._processor.patch_bytes), np.uint8)
    segments = np.zeros((s, p), np.int32)
    positions = np.zeros((s, p, self._processor.position_axes), np.int32)
    windows = [shape.windows() for _ in range(s)]
    count = np.zeros(s, np.int64)
    first_token: dict[tuple[int, str], int] = {}
    for row, item, new in placed:
      buffer = row // shape.rows_per_buffer
      spans = {
        span.image.sha256: span
        for piece in item.pieces
        for span in examples[piece.example].sequence.images
      }
      starts = windows[buffer].take([self._size(sha, item) for sha in new])
      for sha, at in zip(new, starts):
        image = self._patches.get(spans[sha])
        stop = at + len(image.patches)
        count[buffer] += 1
        patches[buffer, at:stop] = image.patches
        positions[buffer, at:stop] = image.positions
        segments[buffer, at:stop] = count[buffer]
        first_token[buffer, sha] = at // ppt
    return patches, segments, positions, first_token


class _Rows:
  """Rows and targets of one batch while they are filled."""

  def __init__(
    self,
    shape: packing.BatchShape,
    pad: int,
    streams: Sequence[str],
    support: int,
  ):
    b, t, s, m = shape.rows, shape.row_length, shape.buffers, shape.targets
    self._shape = shape
    self.tokens = np.full((b, t), pad, np.int32)
    self.positions = np.zeros((b, t, 3), np.int32)
    self.segments = np.zeros((b, t), np.int32)
    # A place that holds no token is seen by itself.
    self.seen_until = np.tile(np.arange(1, t + 1, dtype=np.int32), (b, 1))
    self.vision = np.full((b, t), -1, np.int32)
    self.ints = {
      name: np.full((s, m), fill, np.int32)
      for name, fill in (
        ("index", 0),
        ("targets", 0),
        ("versions", -1),
        ("sequences", -1),
        ("groups", -1),
      )
    }
    self.floats = {
      name: np.zeros((s, m), np.float32)
      for name in ("logprobs", "advantages", "weights")
    }
    self.streams: dict[str, base.Array] = {
      name: np.zeros((s, m), np.float32) for name in streams
    }
    self.support = np.full((s, m, support), -1, np.int32) if support else None
    self.mask = np.zeros((s, m), bool)
    self._used = np.zeros(b, np.int64)
    self._segments = np.zeros(b, np.int64)
    self._filled = np.zeros(s, np.int64)

  def begin(self, row: int) -> None:
    """Begins a row's next segment."""
    self._segments[row] += 1

  def take(self, row: int, length: int) -> slice:
    """Takes a row's next free places for tokens of its last segment."""
    start = int(self._used[row])
    here = slice(start, start + length)
    self._used[row] = here.stop
    self.segments[row, here] = self._segments[row]
    return here

  def close(self, row: int, path: np.ndarray, length: int) -> np.ndarray:
    """Returns a path's first places; no later token sees the other ones."""
    self.seen_until[row, path[length:]] = self._used[row]
    return path[:length]

  def add_targets(
    self,
    row: int,
    number: int,
    example: Example,
    path: np.ndarray,
    weight: float,
  ) -> None:
    """Adds the sampled tokens of a sequence.

    Args:
      row: number of the row.
      number: number of the example.
      example: the example.
      path: Places in the row of the sequence's tokens.
      weight: Weight of each token in the loss.
    """
    sequence = example.sequence
    sampled = np.flatnonzero(sequence.loss_mask)
    source = path[sampled - 1]
    buffer, place = divmod(row, self._shape.rows_per_buffer)
    low = int(self._filled[buffer])
    high = low + len(sampled)
    self._filled[buffer] = high
    out = (buffer, slice(low, high))
    self.ints["index"][out] = place * self._shape.row_length + source
    self.ints["targets"][out] = sequence.tokens[sampled]
    self.ints["versions"][out] = sequence.versions[sampled]
    self.ints["sequences"][out] = number
    self.ints["groups"][out] = example.group
    self.floats["logprobs"][out] = sequence.logprobs[sampled]
    self.floats["advantages"][out] = example.advantages[sampled]
    self.floats["weights"][out] = weight
    if self.support is not None and sequence.support is not None:
      support = sequence.support[sampled]
      self.support[out][:, : support.shape[1]] = support
    for name, stream in self.streams.items():
      if name in example.streams:
        stream[out] = example.streams[name][sampled]
    self.mask[out] = True


def _round_up(need: int, slack: float, multiple: int) -> int:
  return -(-int(np.ceil(need * slack)) // multiple) * multiple
