"""Presents a checkpoint's tensors as the policies hold them.

`views_of` wraps a directory's reader where the files hold a mixture's experts
one by one (`experts.7.up_proj.weight`), as transformers saves some families:
one tensor [experts, out, in], gate and up side by side.

Promises: a slice reads its own part of the files and nothing more.

Does not: write experts one by one.
"""

from __future__ import annotations

import re
from typing import Any, Protocol, Sequence

import numpy as np

_EXPERT = re.compile(
  r"(?P<experts>.*\.experts)\.(?P<number>\d+)"
  r"\.(?P<part>gate|up|down)_proj\.weight"
)


class Tensors(Protocol):
  """Tensors by key; see `tensor_files.Reader`."""

  directory: Any
  shapes: dict[str, tuple[int, ...]]
  dtypes: dict[str, str]

  def read(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor in host memory."""
    ...


def views_of(files: Tensors) -> Tensors:
  """Returns the tensors of a directory.

  Raises:
    ValueError: experts that are not all there.
  """
  if any(_EXPERT.fullmatch(key) for key in files.shapes):
    files = JoinedExperts(files)
  return files


class JoinedExperts:
  """Tensors of which experts' matrices are one tensor a layer."""

  def __init__(self, files: Tensors):
    """Args:

      files: Reader with `<layer>.experts.<number>.<part>_proj.weight`, where
        part is gate, up or down.

    Raises:
      ValueError: an expert's matrix is missing or of another shape.
    """
    self.directory = files.directory
    self._files = files
    self.shapes, self.dtypes = {}, {}
    self._keys: dict[str, list[Sequence[str]]] = {}
    layers: dict[str, set[int]] = {}
    for key, shape in files.shapes.items():
      match = _EXPERT.fullmatch(key)
      if match:
        layers.setdefault(match["experts"], set()).add(int(match["number"]))
      else:
        self.shapes[key], self.dtypes[key] = shape, files.dtypes[key]
    for experts, numbers in layers.items():
      for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        keys: list[Sequence[str]] = [
          tuple(f"{experts}.{i}.{part}_proj.weight" for part in parts)
          for i in range(max(numbers) + 1)
        ]
        self._join(f"{experts}.{name}_proj", keys)

  def _join(self, name: str, keys: list[Sequence[str]]) -> None:
    shapes = self._files.shapes
    first = shapes.get(keys[0][0])
    for key in (key for parts in keys for key in parts):
      if shapes.get(key) is None or shapes[key] != first:
        raise ValueError(
          f"{self.directory}: tensor {key} has shape {shapes.get(key)}, the"
          f" other experts' have {first}; copy or download the checkpoint"
          " again"
        )
    assert first is not None
    self._keys[name] = keys
    self.shapes[name] = (len(keys), len(keys[0]) * first[0], first[1])
    self.dtypes[name] = self._files.dtypes[keys[0][0]]

  def read(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice; of experts, each one's own part."""
    if key not in self._keys:
      return self._files.read(key, index)
    rows = self.shapes[key][1]
    slices = (*index, *(slice(None),) * (3 - len(index)))
    start, stop, _ = slices[1].indices(rows)
    experts = []
    for parts in self._keys[key][slices[0].start or 0 : slices[0].stop]:
      size = rows // len(parts)
      halves = []
      for i, part in enumerate(parts):
        low, high = max(start - i * size, 0), min(stop - i * size, size)
        if low < high:
          halves.append(self._files.read(part, (slice(low, high), slices[2])))
      experts.append(np.concatenate(halves))
    return np.stack(experts)
