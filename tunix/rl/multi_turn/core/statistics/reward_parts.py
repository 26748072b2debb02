"""Reads the parts of a weighted reward from an episode's last step.

`environment.reward` may be a mapping of parts to weights; each part's value,
before its weight, and the weight are kept in the step's info.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Mapping

from .. import trajectory as trajectory_lib


@dataclasses.dataclass(frozen=True)
class Part:
  """One part of an episode's reward.

  Attributes:
    value: Value before the weight.
    weight: Weight in the sum; 1 where the record has none.
  """

  value: float
  weight: float = 1.0


def of_episode(episode: trajectory_lib.Trajectory) -> dict[str, Part]:
  """Returns the parts by name; {} for a reward of one piece.

  Of the metadata, only an entry whose reward and weight are finite numbers is a
  part.
  """
  info = episode.steps[-1].info if episode.steps else {}
  entries: dict[str, object] = {}
  for of_key in map(info.get, ("reward_metadata", "final_reward")):
    if isinstance(of_key, Mapping):
      of_parts = of_key.get("parts")
      entries |= of_parts if isinstance(of_parts, Mapping) else of_key
  return {
    name: Part(*map(float, pair))
    for name, entry in entries.items()
    if isinstance(entry, Mapping)
    for pair in [(entry.get("reward", math.nan), entry.get("weight", 1.0))]
    if all(isinstance(v, float) or type(v) is int for v in pair)
    if all(abs(v) <= 1e308 for v in pair)
  }
