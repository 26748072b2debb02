"""Writes and reads what travels between the learner and its rollout hosts.

A collected group travels as the JSON that the queue's store keeps, with the
pixels of every screenshot that it names, zlib-compressed. Nothing is pickled.

Promises: a group that `read_group` returns is the one that was written: each
image is checked against its SHA-256.

Does not import JAX; weights travel by `weights`.
"""

from __future__ import annotations

import base64
from typing import Any, Mapping

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.trajectory_collector import records

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
  pixels = {
    sha256: [ref.width, ref.height, base64.b64encode(images.pack(ref)).decode()]
    for sha256, ref in records.refs_of(data).items()
  }
  return {"group": data, "images": pixels}


def read_group(
  data: Mapping[str, Any], images: images_lib.ImageStore
) -> trajectory_lib.TrajectoryGroup:
  """The group of `write_group`; its screenshots are put into `images`.

  Raises:
    ValueError, KeyError, TypeError, zlib.error: it is not whole.
  """
  for sha256, (width, height, text) in data["images"].items():
    ref = trajectory_lib.ImageRef(sha256, width, height)
    images.put_packed(ref, base64.b64decode(text, validate=True))
  return trajectory_lib.TrajectoryGroup.from_json(data["group"])
