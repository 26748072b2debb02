"""Simulates rules of asynchronous collecting that a run does not have.

They are compared with those of a run by `simulate_async.py --other`; figures
are in docs/asynchrony.md. Each changes one decision of `simulate_async`:

* `count`, of admission: "expected": each running group counts by the chance
  that it ends before the last update that may train on tokens of now, and so
  does the new group; "overdue": groups of earlier versions count by that
  chance, groups that started in this version count in full. `extra_updates`
  raises the limit.
* `order`, of the next `window` tasks of the source: "longest": the one that is
  expected to take longest; "gain": that of which more tokens stay young enough
  when it starts now than at another moment between two updates. A task that
  was passed over often enough goes first.
* `by_part`: members start a part at a time as slots free, each part under a
  ticket of its own.
* `delivery`: "ended": in the order of ends; "expiring": most tokens first that
  the next update may not train on.

Lengths are estimated from the episodes that have ended: the task's mean
logarithm, drawn towards that of all, and all episodes' deviations from their
task's estimate. `true_medians`: the tasks' true medians instead, which no run
has.

Does not: model how lengths change while the policy learns, which makes
estimates worse than here.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from typing import Any

import simulate_async

Draw = simulate_async.Draw

_KEPT = 1024  # Episodes whose deviations are kept.
_LEARNED = 64  # Episodes before which nothing is estimated.
_WEIGHT = 4  # Episodes that the mean of all counts for in a task's.


@dataclasses.dataclass(frozen=True)
class OtherRules(simulate_async.Rules):
  """See the module docstring."""

  count: str = ""
  extra_updates: float = 0.0
  order: str = ""
  window: int = 32
  by_part: bool = False
  delivery: str = ""
  true_medians: bool = False

  @property
  def simulation(self) -> type[simulate_async.Simulation]:
    return OtherSimulation


class Lengths:
  """Estimates of episodes' seconds, from those that ended."""

  def __init__(self):
    self._of_task = collections.defaultdict(
      lambda: collections.deque[float](maxlen=32)
    )
    self._of_all: collections.deque[float] = collections.deque(maxlen=_KEPT)
    self._sum = 0.0
    self._deviations: collections.deque[float] = collections.deque()
    self._sorted: list[float] = []

  @property
  def learned(self) -> bool:
    return len(self._sorted) >= _LEARNED

  def add(self, task: int, seconds: float, typical: float) -> None:
    """An episode of the task, and the logarithm that was expected."""
    log = math.log(seconds)
    self._deviations.append(log - typical)
    bisect.insort(self._sorted, log - typical)
    if len(self._deviations) > _KEPT:
      old = self._deviations.popleft()
      del self._sorted[bisect.bisect_left(self._sorted, old)]
    if len(self._of_all) == _KEPT:
      self._sum -= self._of_all[0]
    self._of_all.append(log)
    self._sum += log
    self._of_task[task].append(log)

  def typical(self, task: int) -> float:
    """The mean logarithm of the task's episodes."""
    if not self._of_all:
      return 0.0
    mean = self._sum / len(self._of_all)
    own = self._of_task.get(task, ())
    return (sum(own) + _WEIGHT * mean) / (len(own) + _WEIGHT)

  def chance(self, typical: float, passed: float, within: float) -> float:
    """Returns the chance that an episode ends within `within` seconds.

    Args:
      typical: Logarithm of the seconds that are expected of the episode.
      passed: Seconds that the episode has run for.
      within: Seconds from now.
    """
    longer = self._rank(passed, typical)
    remaining = len(self._sorted) - longer
    return (self._rank(passed + within, typical) - longer) / max(remaining, 1)

  def _rank(self, seconds: float, typical: float) -> int:
    if seconds <= 0:
      return 0
    return bisect.bisect_right(self._sorted, math.log(seconds) - typical)

  def some(self, typical: float) -> list[float]:
    """A sample of the seconds that an episode may take."""
    deviations = self._sorted[:: max(1, len(self._sorted) // 16)]
    return [math.exp(typical + deviation) for deviation in deviations]


class OtherSimulation(simulate_async.Simulation):
  """Follows `OtherRules`."""

  _rules: OtherRules

  def __init__(self, costs: Any, rules: OtherRules, seed: int = 0):
    super().__init__(costs, rules, seed)
    self._lengths = Lengths()
    self._window: list[tuple[Draw, int]] = []  # With how often passed over.
    self._learned_at: float | None = None  # When the next update will end.
    self._took_at = math.nan
    self._interval = costs.learn_s + costs.sync_s  # Between two updates.
    self._means: dict[tuple[float, float], float] = {}
    self._to_start: list[Any] = []  # Members of a group with `by_part`.

  # --- Time, as expected ------------------------------------------------------

  def _to_update(self) -> float:
    """Seconds until groups are taken next; 0: as soon as enough are ready."""
    if self._learned_at is None:
      return 0.0
    return max(0.0, self._learned_at - self._now)

  def _to_last(self) -> float:
    """Seconds until the last update that may train on tokens of now."""
    staleness = self._rules.queue.max_staleness
    more = staleness - (self._learned_at is not None)
    return self._to_update() + more * self._interval

  def _take(self) -> None:
    learning = self._learning
    super()._take()
    if self._learning and not learning:
      if not math.isnan(self._took_at):
        passed = self._now - self._took_at
        self._interval = 0.8 * self._interval + 0.2 * passed
      self._took_at = self._now
      self._learned_at = self._now + self._costs.learn_s + self._costs.sync_s

  def _learned(self) -> None:
    super()._learned()
    self._learned_at = None

  def _acted(self, episode: Any) -> None:
    if episode.turns_left == 1:
      draw = episode.group.draw
      self._lengths.add(
        draw.task, self._now - episode.began, self._typical(draw)
      )
    super()._acted(episode)

  def _typical(self, draw: Draw) -> float:
    if self._rules.true_medians:
      return math.log(draw.typical_s)
    return self._lengths.typical(draw.task)

  # --- Admission --------------------------------------------------------------

  def _limit(self) -> float:
    return super()._limit() + self._rules.extra_updates * self._per_step

  def _counted(self) -> float:
    rules = self._rules
    if not rules.count or not self._lengths.learned:
      return super()._counted()
    count = float(self._consumed + len(self._ready))
    within = self._to_last()
    for group in self._running:
      if rules.count == "overdue" and group.ticket.start_version == (
        self._version
      ):
        count += group.parts
        continue
      chances = [
        self._lengths.chance(
          self._typical(group.draw),
          0.0 if math.isnan(e.began) else self._now - e.began,
          within,
        )
        for e in group.running
      ]
      count += self._parts_of(len(group.ended), chances, group.parts)
    if rules.count == "expected":  # The new group counts by its own chance.
      draw = self._window[self._choose()][0]
      chances = [self._lengths.chance(self._typical(draw), 0.0, within)]
      chances *= rules.group_size
      count += self._parts_of(0, chances, rules.parts) - rules.parts
    return count

  def _parts_of(self, ended: int, chances: list[float], parts: int) -> float:
    """Parts that are expected of a group."""
    if not self._rules.part_size:
      return math.prod(chances)
    return min(parts, (ended + sum(chances)) / self._rules.part_size)

  def _admit(self) -> None:
    self._choose()
    if self._rules.by_part:
      self._admit_parts()
    else:
      super()._admit()

  def _admit_parts(self) -> None:
    size = self._rules.part_size or self._rules.group_size
    while self._counted() + 1 <= self._limit():
      episodes = self._in_flight + len(self._waiting)
      if episodes + size > self._costs.concurrency:
        return
      if not self._to_start:
        self._to_start = list(self._next_group().running)
      members = self._to_start[:size]
      del self._to_start[:size]
      self._start(members[0].group, members, 1)

  # --- Order of tasks ---------------------------------------------------------

  def _choose(self) -> int:
    """Fills the window; returns the index in it of the task to start next."""
    rules = self._rules
    size = rules.window if rules.order else 1
    while len(self._window) < size:
      self._window.append((next(self._draws), 0))
    if size == 1 or not self._lengths.learned:
      return 0
    if self._window[0][1] >= 4 * size:
      return 0
    value = self._typical if rules.order == "longest" else self._gain
    return max(range(size), key=lambda i: value(self._window[i][0]))

  def _next_draw(self) -> Draw:
    chosen = self._choose()
    draw, _ = self._window.pop(chosen)
    for i in range(chosen):
      self._window[i] = (self._window[i][0], self._window[i][1] + 1)
    return draw

  def _gain(self, draw: Draw) -> float:
    """Returns the young tokens gained by starting now, not at a mean moment."""
    typical = self._typical(draw)
    key = round(typical, 1), round(self._interval, 2)
    if key not in self._means:
      moments = [self._interval * (i + 0.5) / 8 for i in range(8)]
      self._means[key] = sum(self._young(typical, m) for m in moments) / 8
    return self._young(typical, self._to_update()) - self._means[key]

  def _young(self, typical: float, to_update: float) -> float:
    """Seconds of an episode that are young enough when it is taken."""
    staleness = self._rules.queue.max_staleness
    lengths = self._lengths.some(typical)
    young = 0.0
    for seconds in lengths:
      missed = math.ceil(max(0.0, seconds - to_update) / self._interval)
      update_at = to_update + missed * self._interval
      young += seconds - max(0.0, update_at - staleness * self._interval)
    return young / len(lengths)

  # --- Delivery ---------------------------------------------------------------

  def _order(self) -> None:
    if not self._rules.delivery:
      super()._order()
    elif self._rules.delivery == "expiring":
      last = self._version - self._rules.queue.max_staleness
      self._ready.sort(key=lambda unit: -sum(e.tokens[last] for e in unit))


def named_rules(max_staleness: int) -> dict[str, OtherRules]:
  """Rules that are compared, by what they change."""
  trim = simulate_async.named_rules(max_staleness)["trim part_size=2"].queue
  recent = dataclasses.replace(trim, admission="recent")
  finished = dataclasses.replace(trim, admission="finished")

  def rules(queue: Any, **changes: Any) -> OtherRules:
    return OtherRules(queue, part_size=2, **changes)

  return {
    "started, in the order of ends": rules(trim, delivery="ended"),
    "finished, in the order of ends": rules(finished, delivery="ended"),
    "finished, expiring": rules(finished, delivery="expiring"),
    "by part": rules(trim, by_part=True),
    "a quarter ahead": rules(trim, extra_updates=0.25),
    "half ahead": rules(trim, extra_updates=0.5),
    "expected": rules(finished, count="expected"),
    "expected, known": rules(finished, count="expected", true_medians=True),
    "overdue": rules(finished, count="overdue"),
    "recent, longest": rules(recent, order="longest"),
    "recent, gain": rules(recent, order="gain"),
    "recent, gain, known": rules(recent, order="gain", true_medians=True),
    "finished, gain": rules(finished, order="gain"),
  }
