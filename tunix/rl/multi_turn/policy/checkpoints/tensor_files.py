"""Reads slices of safetensors files, and writes a tensor at a time.

A directory holds its tensors in one file, or in several and an index of which
tensor is in which file.

Does not: know more than names, shapes and bytes; `hf_checkpoint` and
`lora_files` interpret them.

Promises: reading a slice allocates the slice; nothing stays mapped between
reads; writing holds the tensor that is being written.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import struct
from typing import Any, Callable, Iterator, Mapping

# Importing it also teaches numpy the name "bfloat16", by which safetensors
# asks for the dtype.
import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Types that can be written -> their names in a safetensors file."""

READABLE = ("F64", *DTYPES.values())
"""Types that can be read."""


class Reader:
  """The tensors of a directory, read slice by slice.

  Attributes:
    directory: Directory of the files.
    shapes: Shape of each tensor, by key.
    dtypes: their names in the file.

  Raises:
    FileNotFoundError: the directory or a file is missing.
    ValueError: a file is damaged.
  """

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    self._home: dict[str, pathlib.Path] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    listed: dict[str, str] = {}
    index = directory / INDEX
    if index.is_file():
      listed = read_json(index).get("weight_map") or {}
      names = sorted(set(listed.values()))
    elif (directory / SINGLE).is_file():
      names = [SINGLE]
    else:
      raise FileNotFoundError(
        f"{directory} has neither {SINGLE} nor {INDEX}; give the directory"
        " of a checkpoint in safetensors format"
      )
    for name in names:
      path = directory / name
      if not path.is_file():
        raise FileNotFoundError(
          f"{directory} lacks {name}, which {INDEX} lists; copy or download"
          " that file too"
        )
      with opened(path) as file:
        for key in file.keys():
          # Two files may hold a tensor; the index decides.
          if listed.get(key, name) == name:
            part = file.get_slice(key)
            self._home[key] = path
            self.shapes[key] = tuple(part.get_shape())
            self.dtypes[key] = part.get_dtype()

  def read(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor in host memory, and nothing more of it.

    The file is mapped for as long as this takes: its pages count as memory of
    this process while it is open.
    """
    with opened(self._home[key]) as file:
      return file.get_slice(key)[index]


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
  """An open file of numpy arrays; ValueError names it if it is damaged."""
  try:
    file = safetensors.safe_open(str(path), "numpy")
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is not a whole safetensors file ({error}); copy or download"
      " it again"
    ) from None
  with file as entered:
    yield entered


def save(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Replaces a file in one step; small models only, as all is in memory."""
  partial = part(path)
  try:
    safetensors_numpy.save_file(dict(tensors), partial)
    durable.sync(partial)
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def write(
  path: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  dtypes: Mapping[str, str],
  value_of: Callable[[str], np.ndarray],
) -> None:
  """Writes a file, asking for one tensor at a time.

  The format: length of the header (uint64), the header in JSON, the data.
  safetensors' own writer wants all of the file in memory, twice.

  Args:
    path: the file.
    shapes: Shape of each tensor, by key, in the order of writing.
    dtypes: Type of each tensor, a key of `DTYPES`.
    value_of: the array of a key, contiguous and of that shape and dtype.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for key, shape in shapes.items():
    start, end = end, end + num_bytes(shape, dtypes[key])
    header[key] = {
      "dtype": DTYPES[dtypes[key]],
      "shape": list(shape),
      "data_offsets": [start, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # Data begin at a multiple of 8.
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for key in shapes:
      # Without a name, so that each is gone before the next is made.
      file.write(value_of(key).view(np.uint8).data)


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
  return math.prod(shape) * numpy_dtype(dtype).itemsize


def split(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
  """File name -> keys, in order, none above `most` bytes if it can be."""
  groups: list[list[str]] = [[]]
  used = 0
  for key, size in sizes.items():
    if groups[-1] and used + size > most:
      groups.append([])
      used = 0
    groups[-1].append(key)
    used += size
  if len(groups) == 1:
    return {SINGLE: groups[0]}
  total = len(groups)
  return {
    f"model-{i:05d}-of-{total:05d}.safetensors": keys
    for i, keys in enumerate(groups, 1)
  }


def numpy_dtype(dtype: str) -> np.dtype:
  """Returns the dtype of a name, "bfloat16" among them."""
  return np.dtype(getattr(ml_dtypes, dtype, dtype))


def part(path: pathlib.Path) -> pathlib.Path:
  """Returns a file's name until all of it is written."""
  return path.with_name(path.name + ".part")


def json_bytes(value: object) -> bytes:
  return (json.dumps(value, indent=2) + "\n").encode()


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Returns an object in a file; ValueError names the file if it is none."""
  try:
    value = json_text.read(file)
  except ValueError as error:
    raise ValueError(
      f"{file} is not valid JSON ({error}); copy or download it again"
    ) from None
  if not isinstance(value, dict):
    raise ValueError(f"{file} is not a JSON object; copy or download it again")
  return value
