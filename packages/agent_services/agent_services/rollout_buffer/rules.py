"""Decides which groups may be read, and what a reader gets of them.

A group is the items of one `instance_id` in the order of their arrival, at most
`group_size` of them. A read applies, in this order: validity and time-outs
(`verdict`), the filter of items, normalisation, padding. A generator's `Hooks`
replace any of them; both forms are taken:

    older: is_valid_group(group, min_size, task_type) -> (valid, finished),
           filter_item(item, task_type) -> bool,
           normalize_group_data(group) -> group,
           pad_group_data(group, group_size) -> group
    newer: is_valid_group(group, min_size, task_type) -> bool,
           transform_group(group, task_type) -> group
    both:  get_group_data_meta_info({instance_id: [items]}) -> dict

A group is the pair (instance_id, items).

Promises: pure functions; times are the caller's. Valid groups are finished.

Does not call hooks under a deadline (`buffers` does).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Literal, Mapping, Sequence

from tunix.rl.multi_turn.core import reward_equality

Items = list[dict[str, Any]]
Group = tuple[str, Items]
Verdict = Literal["waits", "use", "drop"]
EPSILON = 1e-8
HOOKS = (
  "is_valid_group",
  "filter_item",
  "normalize_group_data",
  "pad_group_data",
  "transform_group",
  "get_group_data_meta_info",
)


@dataclasses.dataclass(frozen=True)
class GroupRules:
  """Rules of a rollout for its groups.

  Attributes:
    group_size: members of a whole group.
    min_valid_group_size_ratio: a group is finished with this share of members.
    min_valid_item_size_ratio: share that must be left after the filter.
    group_timeout_seconds: a group is given up this long after its last write.
    min_timeout_group_size_ratio: one that was given up is used if it has this
      share of its members, else dropped.
    raw: groups are read as they were written: any whole group is valid, nothing
      is filtered, normalised or padded.
  """

  group_size: int = 16
  min_valid_group_size_ratio: float = 1.0
  min_valid_item_size_ratio: float = 0.7
  group_timeout_seconds: float = 300.0
  min_timeout_group_size_ratio: float = 0.7
  raw: bool = False

  @property
  def min_valid_group_size(self) -> int:
    return int(self.group_size * self.min_valid_group_size_ratio)

  @property
  def min_valid_item_size(self) -> int:
    return max(1, int(self.group_size * self.min_valid_item_size_ratio))


@dataclasses.dataclass(frozen=True)
class Hooks:
  """A generator's own rules; None for the default."""

  is_valid_group: Callable[..., Any] | None = None
  filter_item: Callable[..., Any] | None = None
  normalize_group_data: Callable[..., Any] | None = None
  pad_group_data: Callable[..., Any] | None = None
  transform_group: Callable[..., Any] | None = None
  get_group_data_meta_info: Callable[..., Any] | None = None


class HookError(ValueError):
  """A hook returned what its form does not have."""


# --- which groups -------------------------------------------------------------


def is_valid_group(
  rewards: Sequence[float], rules: GroupRules
) -> tuple[bool, bool]:
  """(valid, finished) of a group by its rewards: the default.

  A finished group is valid when its rewards differ by more than rounding: else
  there is nothing to learn from it. A group of one cannot differ, and is valid;
  with `raw` all are.
  """
  finished = len(rewards) >= max(1, rules.min_valid_group_size)
  differ = (
    rules.raw or rules.group_size == 1 or not reward_equality.all_equal(rewards)
  )
  return finished and differ, finished


def judged(answer: object) -> tuple[bool, bool]:
  """(valid, finished) of an `is_valid_group` of either form.

  Raises:
    HookError: another value; or a group that is valid and not finished.
  """
  if isinstance(answer, (tuple, list)) and len(answer) == 2:
    valid, finished = bool(answer[0]), bool(answer[1])
  elif isinstance(answer, bool):
    valid = finished = answer
  else:
    raise HookError(
      f"is_valid_group returned {answer!r}; return (valid, finished), or a bool"
    )
  if valid and not finished:
    raise HookError(
      "is_valid_group returned (True, False); a valid group is finished"
    )
  return valid, finished


def verdict(
  valid: bool, finished: bool, size: int, idle_s: float, rules: GroupRules
) -> Verdict:
  """Decides what becomes of a group.

  Args:
    valid, finished: Results of `is_valid_group`.
    size: Number of its members.
    idle_s: Seconds since its last write.
    rules: Rules of the rollout.
  """
  if finished:
    return "use" if valid else "drop"
  if idle_s > rules.group_timeout_seconds:
    enough = size / rules.group_size >= rules.min_timeout_group_size_ratio
    return "use" if enough else "drop"
  return "waits"


# --- what a reader gets -------------------------------------------------------


def filter_item(item: Mapping[str, Any], task_type: str) -> bool:
  """Whether an item is kept: its reward lies in [0, 1]."""
  del task_type
  reward = item.get("reward")
  if not isinstance(reward, (int, float)):
    return False
  return 0 <= reward <= 1 and isinstance(item.get("messages"), list)


def normalize_group_data(group: Group, epsilon: float = EPSILON) -> Group:
  """Rewards as deviations from their group's mean, in standard deviations.

  The deviation is the population's. Where all rewards are 0, they stay; where
  all are equal, they become 0. Rewards outside [0, 1] neither count nor change.
  `raw_reward` keeps each reward as it was.
  """
  name, items = group
  rewards = [item["reward"] for item in items]
  counted = [r for r in rewards if 0 <= r <= 1]
  change: Callable[[float], float] = lambda r: r
  if counted and any(counted):
    mean = math.fsum(counted) / len(counted)
    variance = math.fsum((r - mean) ** 2 for r in counted) / len(counted)
    deviation = math.sqrt(variance)
    if reward_equality.all_equal(counted):
      change = lambda r: 0.0
    else:
      change = lambda r: (r - mean) / (deviation + epsilon)
  return name, [
    {**item, "reward": change(r) if 0 <= r <= 1 else r, "raw_reward": r}
    for item, r in zip(items, rewards)
  ]


def pad_group_data(group: Group, group_size: int) -> Group:
  """The group with `group_size` items: copies of the first ones are appended.

  Rewards are multiplied by group_size / items, and those of an item and its
  copies are its own, split evenly, so that the sum is the scaled group's.
  """
  name, items = group
  if not items:
    return group
  count = len(items)
  size = max(count, group_size)
  places = [place % count for place in range(size)]
  copies = [size // count + (p < size % count) for p in range(count)]
  scale = group_size / count
  return name, [
    {**items[p], "reward": items[p]["reward"] * scale / copies[p]}
    for p in places
  ]


def delivered(
  group: Group, rules: GroupRules, hooks: Hooks, task_type: str
) -> Items | None:
  """The items that a reader gets of a group that may be used.

  Returns:
    New items, each with `raw_reward`; None where the filter leaves too few.

  Raises:
    HookError: a hook returned no group.
    Exception: a hook's own.
  """
  name, items = group
  items = [dict(item) for item in items]
  if hooks.transform_group is not None:
    items = _items_of(hooks.transform_group((name, items), task_type))
  elif not rules.raw:
    keep = hooks.filter_item or filter_item
    items = [item for item in items if keep(item, task_type)]
    if len(items) < rules.min_valid_item_size:
      return None
    normalize = hooks.normalize_group_data or normalize_group_data
    items = _items_of(normalize((name, items)))
    pad = hooks.pad_group_data or pad_group_data
    items = _items_of(pad((name, items), rules.group_size))
  if not items:
    return None
  for item in items:
    item.setdefault("raw_reward", item.get("reward"))
  return items


def _items_of(answer: object) -> Items:
  pair = answer if isinstance(answer, (tuple, list)) else ()
  if len(pair) != 2 or not isinstance(pair[1], list):
    raise HookError(
      f"a hook returned {str(answer)[:80]!r}; return (instance_id, items)"
    )
  if not all(isinstance(item, dict) for item in pair[1]):
    raise HookError("a hook returned an item that is no dict")
  return pair[1]


# --- meta information ---------------------------------------------------------


def meta_info(rewards: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """Statistics of all items since the last successful read, before any rule.

  Args:
    rewards: instance_id -> the rewards of its items.

  Returns:
    `total_samples, num_groups, avg_group_size, avg_reward, reward_std` (of a
    sample: n - 1), `reward_min, reward_max`; 0 where there is nothing.
  """
  every = [r for group in rewards.values() for r in group]
  if not every:
    keys = (
      "total_samples",
      "num_groups",
      "avg_group_size",
      "avg_reward",
      "reward_std",
      "reward_min",
      "reward_max",
    )
    return dict.fromkeys(keys, 0)
  mean = math.fsum(every) / len(every)
  spread = 0.0
  if len(every) > 1:
    squares = math.fsum((r - mean) ** 2 for r in every)
    spread = math.sqrt(squares / (len(every) - 1))
  return {
    "total_samples": len(every),
    "num_groups": len(rewards),
    "avg_group_size": len(every) / len(rewards),
    "avg_reward": mean,
    "reward_std": spread,
    "reward_min": min(every),
    "reward_max": max(every),
  }
