"""Writes and reads what travels between the learner and its rollout hosts.

A collected group travels as the JSON that the queue's store keeps, with the
pixels of every screenshot that it names, zlib-compressed. Nothing is pickled.

Promises: a group that `read_group` returns is the one that was written: each
image is checked against its SHA-256.

Does not import JAX; weights travel by `weights`.
"""

from __future__ import annotations

import base64
from typing import Any, Iterator, Mapping
import zlib

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib

MAX_GROUP = 1 << 30
"""Bytes of a group with its screenshots."""


def write_group(
  group: trajectory_lib.TrajectoryGroup, images: images_lib.ImageStore
) -> dict[str, Any]:
  """JSON of a group and its screenshots.

  Raises:
    KeyError: the store no longer has one.
  """
  data = group.to_json()
  pixels = {}
  for ref in set(_refs(data)):
    raw = zlib.compress(images.get(ref).tobytes(), 1)
    pixels[ref.sha256] = [ref.width, ref.height, base64.b64encode(raw).decode()]
  return {"group": data, "images": pixels}


def read_group(
  data: Mapping[str, Any], images: images_lib.ImageStore
) -> trajectory_lib.TrajectoryGroup:
  """The group of `write_group`; its screenshots are put into `images`.

  Raises:
    ValueError, KeyError, TypeError, zlib.error: it is not whole.
  """
  for sha256, (width, height, text) in data["images"].items():
    raw = zlib.decompress(base64.b64decode(text, validate=True))
    pixels = np.frombuffer(raw, np.uint8).reshape(height, width, 3)
    if images.put(pixels).sha256 != sha256:
      raise ValueError(f"its image {sha256[:12]}… is another one")
  return trajectory_lib.TrajectoryGroup.from_json(data["group"])


def _refs(data: object) -> Iterator[trajectory_lib.ImageRef]:
  """Every reference to an image in JSON."""
  if isinstance(data, dict):
    if {"sha256", "width", "height"} <= set(data):
      yield trajectory_lib.ImageRef(
        data["sha256"], data["width"], data["height"]
      )
    for value in data.values():
      yield from _refs(value)
  elif isinstance(data, list):
    for value in data:
      yield from _refs(value)
