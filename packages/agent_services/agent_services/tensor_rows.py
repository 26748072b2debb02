"""Writes training sequences as AReaL's tensors, and collates them.

A row has input_ids, loss_mask, versions int32[1, T], logprobs float32[1, T],
attention_mask bool[1, T], rewards float32[1], and multi_modal_input, a list
with one entry a row. `collate` right-pads rows with 0 to one batch; `as_torch`
turns arrays into torch tensors where torch is installed.

Promises: nothing is lost on the way: a row without images has an empty entry,
lest another row's take its place.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import token_sequence

MultiModal = Callable[[Sequence[token_sequence.ImageSpan]], Any]
IMAGES = "multi_modal_input"


def row_of(
  sequence: token_sequence.TokenSequence,
  reward: float,
  multi_modal: MultiModal | None = None,
) -> dict[str, Any]:
  """A sequence as a batch of one row; see the module docstring.

  Args:
    sequence: Sequence to be trained on.
    reward: Reward of the row.
    multi_modal: images' spans -> {pixel_values, image_grid_thw}.

  Raises:
    ValueError: images, but no `multi_modal`.
  """
  if sequence.images and multi_modal is None:
    raise ValueError("the sequence has images; pass multi_modal for them")
  pictures = (
    [multi_modal(sequence.images)]
    if sequence.images and multi_modal is not None
    else [{}]
  )
  return {
    "input_ids": sequence.tokens[None].copy(),
    "attention_mask": np.ones((1, len(sequence)), np.bool_),
    "loss_mask": sequence.loss_mask[None].astype(np.int32),
    "logprobs": sequence.logprobs[None].copy(),
    "versions": sequence.versions[None].copy(),
    "rewards": np.array([reward], np.float32),
    IMAGES: pictures,
  }


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """One batch of several: arrays [N, T] padded with 0, lists joined.

  Args:
    rows: batches of any number of rows; arrays of numpy.

  Raises:
    ValueError: none, or rows with different arrays.
  """
  if not rows:
    raise ValueError("there is no row to collate")
  names = {name for name in rows[0] if name != IMAGES}
  for row in rows:
    differing = names ^ {name for name in row if name != IMAGES}
    if differing or "attention_mask" not in row:
      raise ValueError(
        "rows must have the same arrays, attention_mask among them; only"
        f" some have {sorted(differing) or ['attention_mask']}"
      )
  width = max(row["attention_mask"].shape[1] for row in rows)
  columns: dict[str, Any] = {}
  for name in rows[0]:
    if name == IMAGES:
      continue
    parts = []
    for row in rows:
      part = np.asarray(row[name])
      if part.ndim > 1:
        part = np.pad(part, ((0, 0), (0, width - part.shape[1])))
      parts.append(part)
    columns[name] = np.concatenate(parts)
  columns[IMAGES] = [
    entry
    for row in rows
    for entry in row.get(IMAGES) or [{}] * len(row["attention_mask"])
  ]
  return columns


def has_torch() -> bool:
  """Whether torch is installed."""
  return importlib.util.find_spec("torch") is not None


def as_torch(value: object) -> Any:
  """Arrays as torch tensors, in mappings and lists too.

  Raises:
    ImportError: torch is not installed.
  """
  import torch  # pylint: disable=g-import-not-at-top

  if isinstance(value, np.ndarray):
    return torch.from_numpy(np.array(value))
  if isinstance(value, Mapping):
    return {k: as_torch(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [as_torch(v) for v in value]
  return value
