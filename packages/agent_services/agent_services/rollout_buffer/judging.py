"""Applies a rollout's rules and its generator's hooks to a buffer's groups.

Promises: a hook or a group that fails, or that cannot be written as JSON, is
recorded, and costs that group only; each call of a hook has a deadline.

Does not: decide what leaves the buffer (`buffers` does), or lock; calls come
one at a time.
"""

from __future__ import annotations

import collections
import logging
from typing import Any, Callable, Sequence

import orjson
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.trajectory_collector import records

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import groups
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import rules
from agent_services.rollout_buffer import store
from agent_services.rollout_buffer import tally

_LOG = logging.getLogger(__name__)
_MOST_ERRORS = 20


class Judge:
  """See the module docstring.

  Attributes:
    rules: Rules of the buffer's rollout.
    hooks, task_type: of its generator; none and "" before one.
    errors: the newest faults of hooks and groups, oldest first.
    failures: their number.
  """

  def __init__(
    self,
    name: str,
    item_store: store.Store,
    limits: buffer_settings.BufferLimits,
  ):
    """Args:

    name: Name of the buffer, for errors.
    item_store: The store.
    limits: Bounds of the service.
    """
    self.rules = rules.GroupRules(
      group_size=limits.group_size, raw=limits.group_rules == "raw"
    )
    self.hooks = rules.Hooks()
    self.task_type = ""
    self.errors: collections.deque[str] = collections.deque(maxlen=_MOST_ERRORS)
    self.failures = 0
    self._name = name
    self._store = item_store
    self._limits = limits

  def judged(self, group: groups.Group, count: int) -> tuple[bool, bool] | None:
    """A hook's judgement, made once for each size of a group."""
    hook = self.hooks.is_valid_group
    if hook is None or self.rules.raw:
      return None
    if group.judged is None or group.judged[0] != count:
      try:
        contents = self._parsed(group.seqs[:count])
        answer = rules.judged(
          self._call(
            hook,
            (group.instance_id, contents),
            self.rules.min_valid_group_size,
            self.task_type,
          )
        )
      except Exception as error:  # pylint: disable=broad-except
        self._note(f"is_valid_group of group {group.instance_id!r}", error)
        answer = (False, True)  # It cannot be judged, and is dropped.
      group.judged = (count, *answer)
    return group.judged[1:]

  def contents(self, group: groups.Group) -> list[bytes] | None:
    """The items that a reader gets of a group, as JSON; None: drop it."""
    try:
      pair = (group.instance_id, self._parsed(group.seqs))
      if not pair[1]:
        return None
      args = (pair, self.rules, self.hooks, self.task_type)
      if self.hooks == rules.Hooks():
        delivered = rules.delivered(*args)
      else:
        delivered = self._call(rules.delivered, *args)
      if delivered is None:
        return None
      for item in delivered:
        records.number(item.get("reward"), "reward")
      return [items.encoded(item) for item in delivered]
    except Exception as error:  # pylint: disable=broad-except
      # Another read would fail on it again, and all groups behind it wait.
      self._note(f"group {group.instance_id!r}", error)
      return None

  def _parsed(self, seqs: Sequence[int]) -> list[dict[str, Any]]:
    result = []
    for seq, body in zip(seqs, self._store.bodies(seqs)):
      if body is None:
        self._note(f"item {seq}", store.StoreError("the disk has lost it"))
      else:
        result.append(orjson.loads(body))
    return result

  def meta_info(self, counted: Sequence[tally.Counted]) -> dict[str, Any]:
    """Statistics of the items that a read counts."""
    hook = self.hooks.get_group_data_meta_info
    if hook is not None:
      try:
        room = self._limits.read_mib << 20
        seqs: list[int] = []
        for one in reversed(counted):
          room -= one.size
          if room < 0 and seqs:
            break
          seqs.append(one.seq)
        by_instance: dict[str, list[Any]] = {}
        # Without those that were dropped, or that another read has taken.
        for body in self._store.bodies(seqs[::-1], may_lack=True):
          if body is not None:
            item = orjson.loads(body)
            by_instance.setdefault(item["instance_id"], []).append(item)
        meta = self._call(hook, by_instance)
        items.encoded(meta)
        return dict(meta)
      except Exception as error:  # pylint: disable=broad-except
        self._note("get_group_data_meta_info", error)
    rewards: dict[str, list[float]] = {}
    for one in counted:
      rewards.setdefault(one.instance_id, []).append(one.reward)
    return rules.meta_info(rewards)

  def _call(self, hook: Callable[..., Any], *args: Any) -> Any:
    return concurrency.call(
      hook,
      *args,
      seconds=self._limits.hook_timeout,
      what=f"the generator's {getattr(hook, '__name__', 'hook')}",
    )

  def _note(self, what: str, error: Exception) -> None:
    self.failures += 1
    text = f"{what}: {concurrency.describe(error)}"
    self.errors.append(text[:500])
    _LOG.error("buffer %s: %s", self._name, text, exc_info=error)
