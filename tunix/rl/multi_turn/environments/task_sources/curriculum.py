"""Draws tasks that are neither hopeless nor solved already more often.

An arm (a task of a list, or a family of a gym that makes its own) is drawn
with a weight of `4 p (1 - p)`, at least `floor`, where p is its success rate,
a moving average that begins at 1/2. GRPO learns from groups whose episodes
differ, and this weight measures their share.

Promises: each draw is a function of the seed and of earlier results: draw i, of
round `i // round_size`, uses the results of rounds before the previous one
only. In a synchronous run these rounds are complete, whatever the timing, so
that equal seeds give equal runs. The state is JSON; a sampler restored from it
draws the same tasks.

A sampler of `CollectLoop`, and an observer: attach it to the run's events.
"""

from __future__ import annotations

import collections
import random
import threading
from typing import Any, Callable, Iterator, Mapping, Sequence

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.gyms import base

Draw = Callable[[str, int], base.Task]
"""(arm, how often it was drawn before) -> the task."""


class CurriculumSampler:
  """See the module docstring; never ends."""

  def __init__(
    self,
    arms: Sequence[str],
    draw: Draw,
    *,
    seed: int = 0,
    round_size: int = 1,
    floor: float = 0.1,
    decay: float = 0.7,
  ):
    """Args:

      arms: names, in an order that does not change.
      draw: makes an arm's next task.
      seed: Seed of the draws.
      round_size: draws between two looks at the results: groups of an update.
      floor: least weight of an arm; 1 draws all equally often.
      decay: Weight of an arm's old success rate when a group of it ends; the
        group's own rate has the rest.

    Raises:
      ValueError: no arms, one twice, or a number out of range.
    """
    if not arms or len(set(arms)) != len(arms):
      raise ValueError(
        f"a curriculum needs arms of different names, got {list(arms)[:8]}"
      )
    if not 0 < floor <= 1:
      raise ValueError(f"floor={floor} must be in (0, 1]")
    if not 0 <= decay < 1:
      raise ValueError(f"decay={decay} must be in [0, 1)")
    if round_size < 1:
      raise ValueError(f"round_size={round_size} must be >= 1")
    self._arms = tuple(arms)
    self._draw = draw
    self._seed = seed
    self._round = round_size
    self._floor = floor
    self._decay = decay
    self._lock = threading.Lock()
    self._position = 0
    self._rates = dict.fromkeys(self._arms, 0.5)
    self._counts = dict.fromkeys(self._arms, 0)
    # Drawn and not yet decided: task id -> its draws, oldest first.
    self._drawn: dict[str, list[tuple[int, str]]] = collections.defaultdict(
      list
    )
    # Decided and not yet used: draw -> (arm, success rate of the group).
    self._results: dict[int, tuple[str, float]] = {}

  def __iter__(self) -> Iterator[base.Task]:
    return self

  def __next__(self) -> base.Task:
    with self._lock:
      index = self._position
      self._position += 1
      self._use(before=(index // self._round - 1) * self._round)
      weights = [self.weight(arm) for arm in self._arms]
      chance = random.Random(f"{self._seed}/{index}")
      (arm,) = chance.choices(self._arms, weights)
      task = self._draw(arm, self._counts[arm])
      self._counts[arm] += 1
      self._drawn[task.task_id].append((index, arm))
      return task

  def weight(self, arm: str) -> float:
    """Returns the arm's weight among the others."""
    rate = self._rates[arm]
    return max(self._floor, 4 * rate * (1 - rate))

  @property
  def rates(self) -> dict[str, float]:
    """Success rates that the next draw goes by."""
    with self._lock:
      return dict(self._rates)

  def _use(self, before: int) -> None:
    for index in sorted(i for i in self._results if i < before):
      arm, rate = self._results.pop(index)
      if arm in self._rates:
        carried = self._decay * self._rates[arm]
        self._rates[arm] = carried + (1 - self._decay) * rate

  def on_event(self, event: events.Event) -> None:
    """Learns how a group of a drawn task went."""
    if not isinstance(event, events.GroupFinished) or (
      event.outcome == "requeued"
    ):
      return
    group = event.group
    if group.group_id.startswith("eval-"):
      return
    with self._lock:
      waiting = self._drawn.get(group.task_id)
      if not waiting:
        return
      index, arm = waiting.pop(0)
      if not waiting:
        del self._drawn[group.task_id]
      # A broken gym is no evidence about the task.
      decided = [t.status for t in group if t.status.is_policy_outcome]
      if event.outcome == "accepted" and decided:
        won = sum(s is trajectory.TrajectoryStatus.SUCCEEDED for s in decided)
        self._results[index] = (arm, won / len(decided))

  def state_dict(self) -> dict[str, Any]:
    with self._lock:
      return {
        "position": self._position,
        "arms": list(self._arms),
        "rates": dict(self._rates),
        "counts": dict(self._counts),
        "drawn": {k: [list(d) for d in v] for k, v in self._drawn.items()},
        "results": {str(k): list(v) for k, v in self._results.items()},
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Restores the sampler from a state of `state_dict`.

    Raises:
      ValueError: the state belongs to another sampler or to other arms.
    """
    if list(state.get("arms") or ()) != list(self._arms):
      raise ValueError(
        "the checkpoint's curriculum has other tasks than this run; give the"
        " same task_source.families and task_source to resume"
      )
    with self._lock:
      self._position = int(state["position"])
      self._rates = {k: float(v) for k, v in state["rates"].items()}
      self._counts = {k: int(v) for k, v in state["counts"].items()}
      self._drawn = collections.defaultdict(list)
      for task_id, draws in state["drawn"].items():
        self._drawn[task_id] = [(int(i), str(arm)) for i, arm in draws]
      self._results = {
        int(k): (str(v[0]), float(v[1])) for k, v in state["results"].items()
      }
