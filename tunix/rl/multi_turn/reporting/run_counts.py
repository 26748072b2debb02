"""Counts a run's episodes, groups and contained faults, each once.

A run that was killed does some work again: groups after its last checkpoint,
an evaluation that had not ended. So a count belongs to the work that it is of.
Counts of a training group are settled when the group is trained on or dropped;
a checkpoint keeps the settled ones. Counts of an evaluation are kept when it
ends.

A group that comes in parts is one group: each of its episodes counts once, and
each of its outcomes, with whichever part comes first.

Promises: after a resumption every group that the run has trained on, still has
in its queue's store, or dropped is counted once, and every evaluation once.
Thread-safe.

Does not: know of attempts at a group, or of faults, between the last checkpoint
and a kill, where the group itself was stored; those are not counted.
"""

from __future__ import annotations

import collections
import re
import threading
from typing import Any, Iterable, Mapping

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib

KINDS = ("episodes", "groups", "faults")
_ATTEMPT = re.compile(r"-r\d+$")
_REMEMBERED = 4096  # Settled groups whose late faults still are theirs.
_RECORDED = 1024  # Settled groups in a checkpoint, for their later parts.

Counts = dict[str, collections.Counter[str]]


def _new(data: object = None) -> Counts:
  data = data if isinstance(data, Mapping) else {}
  return {k: collections.Counter(data.get(k) or {}) for k in KINDS}


def _add(counts: Counts, more: Counts) -> None:
  for kind in KINDS:
    counts[kind].update(more[kind])


def _json(counts: Counts) -> dict[str, dict[str, int]]:
  return {k: dict(sorted(c.items())) for k, c in counts.items() if c}


def _total(*parts: Counts) -> dict[str, dict[str, int]]:
  total = _new()
  for counts in parts:
    _add(total, counts)
  return {k: dict(sorted(c.items())) for k, c in total.items()}


class RunCounts:
  """Counts of a run, from the events that the summary's writer passes on."""

  receives = (
    events.EpisodeFinished,
    events.GroupFinished,
    events.Fault,
    events.StepFinished,
    events.EvalStarted,
    events.EvalFinished,
  )

  def __init__(self, parts: int = 1):
    """Args:

    parts: Number of parts of each training group.
    """
    self._in_parts = parts > 1
    # Where groups come in parts: what of a group was counted, by its key.
    self._seen: dict[str, set[str]] = {}
    self._lock = threading.Lock()
    self._settled = _new()
    self._open: dict[str, Counts] = {}
    self._recent: collections.OrderedDict[str, None] = collections.OrderedDict()
    self._evaluations: dict[str, Counts] = {}
    self._evaluating: tuple[str, Counts] = ("", _new())
    self._others = _new()

  def on_event(self, event: events.Event) -> None:
    with self._lock:
      if isinstance(event, events.EpisodeFinished):
        counts = self._of(event.group_id, event.split)
        name = f"{event.split}/{event.trajectory.status.value}"
        member = event.trajectory.trajectory_id
        if event.split == "eval" or self._first(event.group_id, member):
          counts["episodes"][name] += 1
      elif isinstance(event, events.GroupFinished):
        group = _key(event.group.group_id)
        first = self._first(group, event.outcome)
        if first or event.outcome == "requeued":
          self._of(group)["groups"][event.outcome] += 1
        if event.outcome == "dropped":
          self._settle(group)
      elif isinstance(event, events.Fault):
        group = (event.trajectory_id or "").rpartition(".")[0]
        split = "eval" if group.startswith("eval-") else "train"
        self._of(group, split)["faults"][f"{event.stage}/{event.kind}"] += 1
      elif isinstance(event, events.StepFinished):
        for trained in event.groups:
          self._settle(_key(trained.group_id))
      elif isinstance(event, events.EvalStarted):
        if event.name != self._evaluating[0]:
          self._evaluating = (event.name, _new())
      elif isinstance(event, events.EvalFinished):
        self._evaluations[event.name] = self._evaluating[1]
        self._evaluating = ("", _new())

  def _of(self, group: str, split: str = "train") -> Counts:
    """Returns the counts that an event belongs to."""
    if split == "eval":
      return self._evaluating[1]
    key = _key(group)
    if not key or key in self._recent:
      return self._settled
    return self._open.setdefault(key, _new())

  def _settle(self, key: str) -> None:
    group = self._open.pop(key, None)
    if group is not None:
      _add(self._settled, group)
    self._recent[key] = None
    if len(self._recent) > _REMEMBERED:
      self._seen.pop(self._recent.popitem(last=False)[0], None)

  def _first(self, group: str, what: str) -> bool:
    """Whether an episode or outcome of a group was not counted before."""
    key = _key(group)
    if not (self._in_parts and key):
      return True
    parts = self._seen.setdefault(key, set())
    what = what.removeprefix(key)
    first = what not in parts
    parts.add(what)
    return first

  def totals(self) -> dict[str, dict[str, int]]:
    """Counts episodes by split and status, groups by outcome, faults by kind.

    Work that is under way is in it, and what other processes have told.
    """
    with self._lock:
      return _total(
        self._settled,
        *self._open.values(),
        *self._evaluations.values(),
        self._evaluating[1],
        self._others,
      )

  # --- several processes, of which the first writes the summary --------------

  def of_training(self) -> dict[str, Any]:
    """Returns, as JSON, what this process has counted in training."""
    with self._lock:
      return _total(self._settled, *self._open.values())

  def of_evaluation(self) -> dict[str, Any]:
    """Returns, as JSON, what it has counted in the present evaluation."""
    with self._lock:
      return _total(self._evaluating[1])

  def set_training_of_others(
    self, of_processes: Iterable[Mapping[str, Any]]
  ) -> None:
    """Takes what each other process has counted in training so far."""
    with self._lock:
      self._others = _new()
      for counts in of_processes:
        _add(self._others, _new(counts))

  def add_evaluation_of_others(
    self, of_processes: Iterable[Mapping[str, Any]]
  ) -> None:
    """Adds what each other process has counted in the present evaluation."""
    with self._lock:
      for counts in of_processes:
        _add(self._evaluating[1], _new(counts))

  # --- what a kill must not change -------------------------------------------

  def training(self) -> dict[str, Any]:
    """Returns, as JSON for a checkpoint, the counts of training."""
    with self._lock:
      accepted = {
        group: _json(counts)
        for group, counts in self._open.items()
        if counts["groups"]["accepted"]
      }
      state: dict[str, Any] = {
        "settled": _json(self._settled),
        "accepted": accepted,
      }
      if self._in_parts:
        state["seen"] = {
          key: sorted(self._seen.get(key, ()))
          for key in (*accepted, *list(self._recent)[-_RECORDED:])
        }
      return state

  def restore_training(
    self,
    state: Mapping[str, Any] | None,
    stored: Iterable[trajectory_lib.TrajectoryGroup] | None,
  ) -> None:
    """Restores the counts of training from a checkpoint and a queue's store.

    Args:
      state: Result of `training`; None without a checkpoint.
      stored: groups that the run need not collect again; None where nothing
        keeps any.
    """
    state = state or {}
    accepted = state.get("accepted") or {}
    with self._lock:
      self._settled = _new(state.get("settled"))
      parts = (state.get("seen") or {}) if self._in_parts else {}
      self._seen = {key: set(names) for key, names in parts.items()}
      self._recent.clear()
      self._recent.update((k, None) for k in parts if k not in accepted)
      self._open, stored_keys = {}, set()
      for group in stored or ():
        key = _key(group.group_id)
        stored_keys.add(key)
        if key in accepted and key not in self._open:
          self._open[key] = _new(accepted[key])
        if key not in accepted or self._in_parts:
          self._add_stored(self._of(key), group)
      for key in accepted if stored is not None else ():
        if key not in stored_keys:  # Dropped after the checkpoint.
          _add(self._settled, _new(accepted[key]))
          self._settled["groups"]["dropped"] += 1

  def _add_stored(
    self, counts: Counts, group: trajectory_lib.TrajectoryGroup
  ) -> None:
    """Adds a stored group, or what of it was not counted before."""
    for member in group.played:
      if self._first(group.group_id, member.trajectory_id):
        counts["episodes"][f"train/{member.status.value}"] += 1
    if self._first(group.group_id, "accepted"):
      counts["groups"]["accepted"] += 1
    if group.attempt and self._first(group.group_id, "requeued"):
      counts["groups"]["requeued"] += group.attempt

  def evaluations(self) -> dict[str, Any]:
    """Returns, as JSON, the counts of each evaluation that has ended."""
    with self._lock:
      return {name: _json(c) for name, c in self._evaluations.items()}

  def restore_evaluations(self, state: Mapping[str, Any]) -> None:
    """Takes over the counts of evaluations that still hold."""
    with self._lock:
      self._evaluations = {name: _new(c) for name, c in state.items()}


def _key(group_id: str) -> str:
  """Returns a group's name, without the number of its attempt."""
  return _ATTEMPT.sub("", group_id)
