"""Lends successes to groups that failed entirely: recent ones, or an expert's.

A group without a success has no gradient, while an earlier episode of the same
task may have succeeded: the group borrows the newest one that is young enough,
and compares its own episodes with it. A borrowed episode is off-policy by its
age, which the staleness bound limits or an importance correction weighs (see
`config.checks`); its log-probs and versions are those it was sampled with.

Promises: at most one success a task and update is kept, until it is too old or
`MOST` newer ones are; with a store all of them survive a crash, with their
images; one that is newer than the learner (a checkpoint was restored) is not
lent before the learner is as old. Statistics of rewards are of a group's own
episodes.

Does not: lend to a group with a success, or across tasks.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Iterable, Protocol, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory

MOST = 1024
"""Episodes kept."""

TrajectoryGroup = trajectory.TrajectoryGroup
Score = Callable[[Sequence[trajectory.TokenSequence]], list[np.ndarray]]
_SUCCEEDED = trajectory.TrajectoryStatus.SUCCEEDED


class Store(Protocol):
  """The part of a `GroupStore` that is used: of groups of one success."""

  def append(self, index: int, group: TrajectoryGroup) -> None: ...

  def remove(self, indices: Iterable[int]) -> None: ...

  def load(self) -> list[tuple[int, TrajectoryGroup]]: ...

  def known(self) -> set[int]: ...


def with_experts(
  groups: Sequence[TrajectoryGroup], score: Score
) -> tuple[list[TrajectoryGroup], frozenset[str]]:
  """Makes the expert of each group one of its members.

  A token that the expert's oracle wrote has log-prob 0: no policy sampled it.
  It gets that of the present weights, to which its ratio is 1.

  Args:
    groups: Groups of an update.
    score: float32[T] log-probs of each sequence by the present weights. Called
      once, also without a sequence: processes that learn together score
      together.

  Returns:
    Groups, and the trajectory ids of the experts' episodes.
  """
  experts = [g.expert for g in groups if g.expert is not None]
  scores = iter(score([s for e in experts for s in e.sequences]))
  out = []
  for group in groups:
    expert = group.expert
    if expert is not None:
      expert = dataclasses.replace(
        expert, sequences=[_scored(s, next(scores)) for s in expert.sequences]
      )
      group = dataclasses.replace(
        group, trajectories=(*group.trajectories, expert), extra=None
      )
    out.append(group)
  return out, frozenset(e.trajectory_id for e in experts)


def _scored(
  sequence: trajectory.TokenSequence, logprobs: np.ndarray
) -> trajectory.TokenSequence:
  is_unsampled = sequence.loss_mask & (sequence.logprobs == 0)
  return dataclasses.replace(
    sequence, logprobs=np.where(is_unsampled, logprobs, sequence.logprobs)
  )


class SuccessReplay:
  """See the module docstring; used by one learner's thread."""

  def __init__(self, max_age: int, store: Store | None = None):
    """Args:

      max_age: versions that a borrowed episode's oldest token may lag, >= 1.
      store: keeps successes beyond the process; those in it are taken over.

    Raises:
      ValueError: `max_age` below 1.
    """
    if max_age < 1:
      raise ValueError(f"max_age={max_age} must be >= 1 update")
    self._max_age = max_age
    self._store = store
    self._kept: dict[int, TrajectoryGroup] = {}
    self._next = 0
    if store is not None:
      self._kept = dict(store.load())
      self._next = max(store.known(), default=-1) + 1

  def __len__(self) -> int:
    return len(self._kept)

  def lend(
    self, groups: Sequence[TrajectoryGroup], version: int
  ) -> tuple[list[TrajectoryGroup], frozenset[str]]:
    """Extends each all-failed group by one stored success of its task.

    The groups' own successes are kept for later ones.

    Args:
      groups: Groups of an update.
      version: Version of the learner.

    Returns:
      Groups, and the trajectory ids of borrowed members, which are new.
    """
    self._forget_old(version)
    out, borrowed = [], set()
    for group in groups:
      stored = self._for(group, version)
      if stored is not None:
        name = f"{stored.trajectory_id}+{group.group_id}"
        borrowed.add(name)
        lent = dataclasses.replace(stored, trajectory_id=name)
        group = dataclasses.replace(
          group, trajectories=(*group.trajectories, lent)
        )
      out.append(group)
    self._keep(groups)
    return out, frozenset(borrowed)

  def lends_to(self, group: TrajectoryGroup, version: int) -> bool:
    """Returns whether `lend` at this version would give the group a success."""
    self._forget_old(version)
    return self._for(group, version) is not None

  def _for(
    self, group: TrajectoryGroup, version: int
  ) -> trajectory.Trajectory | None:
    """Returns the success that a group borrows.

    None if the group has a success itself, or no stored one is of its task.
    """
    if not group.valid or any(m.status is _SUCCEEDED for m in group.valid):
      return None
    return self._newest(group.task_id, version)

  def _newest(self, task_id: str, version: int) -> trajectory.Trajectory | None:
    candidates = [
      (entry.oldest_version, index)
      for index, entry in self._kept.items()
      if entry.task_id == task_id and entry.oldest_version <= version
    ]
    if not candidates:
      return None
    return self._kept[max(candidates)[1]].trajectories[0]

  def _forget_old(self, version: int) -> None:
    old = [
      index
      for index, entry in self._kept.items()
      if version - entry.oldest_version > self._max_age
    ]
    self._remove(old)

  def _keep(self, groups: Sequence[TrajectoryGroup]) -> None:
    newest: dict[str, TrajectoryGroup] = {}
    for group in groups:
      won = [m for m in group.valid if m.status is _SUCCEEDED and m.versions]
      if not won:
        continue
      best = max(won, key=lambda m: (m.reward, (m.versions or (0,))[0]))
      newest[group.task_id] = TrajectoryGroup(
        group.group_id, group.task_id, (best,), group.start_version
      )
    for entry in newest.values():
      index, self._next = self._next, self._next + 1
      if self._store is not None:
        self._store.append(index, entry)
      self._kept[index] = entry
    self._remove(sorted(self._kept)[: max(0, len(self._kept) - MOST)])

  def _remove(self, indices: Sequence[int]) -> None:
    for index in indices:
      del self._kept[index]
    if indices and self._store is not None:
      self._store.remove(indices)
