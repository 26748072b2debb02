"""Simulates a fleet: thousands of collectors, one engine server, one learner.

A discrete-event simulation of what `fleet` does. A collector holds a lease and
plays its group's episodes; a turn waits for the learner's process (one CPU:
Python's lock), for the engine, and for the gym; a group that has ended is
decoded by the same process and stored; the learner takes `groups_per_step` at a
time, and the queue's gate (`max_staleness`) decides how many may be under way.
Collectors beat as the server tells them to. Costs of the process are those that
`fleet_costs.py` measured (`COSTS`), the engine's tokens a second, an update's
seconds and a gym's are given. Out come turns and groups a second, the share of
time that each part is busy, the share of collectors that have a group, the
seconds that a turn takes, the longest that a beat waited for its answer (above
`silence_s` the collector would have lost its group), and the part that
saturates.

    python benchmarks/simulate_fleet.py             # the table of docs/fleet.md
    python benchmarks/simulate_fleet.py --collectors 10000 --staleness 16

Like `simulate_async.py`, the event loop is a heap of its own.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import json
import pathlib
import random
from typing import Any, Callable

BEATS = 50  # Shares of the collectors that beat together.
COSTS = pathlib.Path(__file__).parent / "fleet_costs.json"


@dataclasses.dataclass(frozen=True)
class Fleet:
  """A fleet and what it works on.

  Attributes:
    collectors: Number of collectors; each plays one group at a time.
    group_size, turns: Episodes of a group, turns of an episode.
    gym_s: Seconds of an environment's step.
    tokens: Tokens sampled in a turn.
    engine_tokens_s: Tokens sampled a second by the engine with all slots taken.
    slots: Requests that the engine decodes at once.
    groups_per_step, staleness: Settings of the learner and its queue's gate.
    learn_s: Seconds of an update.
    servers: Processes that share the requests; each a learner's, or more.
    silence_s: `rollout.silence_s`, a fifth of which is the longest pause
      between two beats.
    hosts: Rollout hosts (`rollout.via=hosts`) among which the collectors, that
      is places for a group, are divided; each has an engine with these slots.
      0 = a fleet.
    weights_gb: Weights that each host fetches from the learner's first process
      after an update.
    link_gb_s: What a process's network carries, GB a second.
    shared: Each host reads the weights from the run's directory instead.
  """

  collectors: int = 10_000
  group_size: int = 8
  turns: int = 10
  gym_s: float = 1.0
  tokens: int = 64
  engine_tokens_s: float = 20_000.0
  slots: int = 256
  groups_per_step: int = 64
  staleness: int = 1
  learn_s: float = 10.0
  servers: int = 1
  silence_s: float = 30.0
  hosts: int = 0
  weights_gb: float = 4.0
  link_gb_s: float = 3.0
  shared: bool = False


@dataclasses.dataclass(frozen=True)
class Costs:
  """CPU seconds of the learner's process, as `fleet_costs.py` measures them.

  The disk is not waited for: `store_wall_s` of that script, on a disk with
  nothing else to do, tells whether that is fair.
  """

  turn_cpu_s: float
  turn_group_cpu_s: float
  episode_cpu_s: float
  beat_cpu_s: float
  store_cpu_s: float
  turn_bytes: float
  weights_gb_cpu_s: float

  @classmethod
  def measured(cls, path: pathlib.Path = COSTS) -> Costs:
    data = json.loads(path.read_text(encoding="utf-8"))
    return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls)})


class _Line:
  """Places before which jobs wait in order; counts their busy seconds."""

  def __init__(self, world: World, places: int):
    self._world, self._free = world, places
    self._places = places
    self._waiting: collections.deque[tuple[float, Any]] = collections.deque()
    self.busy = 0.0

  def do(self, seconds: float, then: Callable[[], None]) -> None:
    self._waiting.append((seconds, then))
    self._next()

  def _next(self) -> None:
    while self._free and self._waiting:
      seconds, then = self._waiting.popleft()
      self._free -= 1
      if self._world.warm:
        self.busy += seconds
      self._world.after(seconds, lambda then=then: self._done(then))

  def _done(self, then: Callable[[], None]) -> None:
    self._free += 1
    then()
    self._next()

  def share(self, seconds: float) -> float:
    return min(1.0, self.busy / (self._places * seconds))


class World:
  """The events of one fleet; `run` gives the figures."""

  def __init__(self, fleet: Fleet, costs: Costs, seed: int = 0):
    self.now, self.warm = 0.0, False
    self._fleet, self._costs = fleet, costs
    self._rng = random.Random(seed)
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._ids = itertools.count()
    self._server = _Line(self, fleet.servers)
    self._engine = _Line(self, fleet.slots * max(1, fleet.hosts))
    self._link = _Line(self, 1)
    self._store = _Line(self, 1)
    self._version = self._started = self._ready = 0
    self._learning = False
    self._idle = fleet.collectors
    self._count: collections.Counter[str] = collections.Counter()
    self._held = 0.0  # Collector seconds with a group.
    self._looked = 0.0
    self._beats: list[float] = []  # Seconds until an answer.

  def after(self, seconds: float, then: Callable[[], None]) -> None:
    heapq.heappush(self._events, (self.now + seconds, next(self._ids), then))

  # --- the parts -------------------------------------------------------------

  def _lend(self) -> None:
    """Groups that the gate admits, to collectors that wait."""
    fleet = self._fleet
    allowed = (fleet.staleness + self._version + 1) * fleet.groups_per_step
    while self._idle and self._started < allowed:
      self._account()
      self._idle -= 1
      self._started += 1
      remaining = [fleet.group_size]
      # A fleet is met in the midst of its work: its groups do not end at once.
      turns = fleet.turns
      if not self.now:
        turns = self._rng.randint(1, turns)
      for _ in range(fleet.group_size):
        self._turn(turns, remaining)

  def _turn(self, turns: int, remaining: list[int]) -> None:
    fleet, costs = self._fleet, self._costs
    if not turns:
      remaining[0] -= 1
      if not remaining[0]:
        of_group = fleet.group_size * (
          costs.episode_cpu_s + fleet.turns * costs.turn_group_cpu_s
        )
        self._server.do(of_group + costs.store_cpu_s, self._stored)
      return

    def answered() -> None:
      self._count["turns"] += self.warm
      gym = fleet.gym_s * self._rng.lognormvariate(-0.125, 0.5)
      self.after(gym, lambda: self._turn(turns - 1, remaining))

    def asked() -> None:
      seconds = fleet.tokens * fleet.slots / fleet.engine_tokens_s
      self._engine.do(seconds, answered)

    if fleet.hosts:  # Its own engine answers.
      asked()
      return
    # A turn's share of its group is paid when that ends.
    self._server.do(max(0.0, costs.turn_cpu_s - costs.turn_group_cpu_s), asked)

  def _stored(self) -> None:
    self._store.do(self._costs.store_cpu_s, self._put)

  def _put(self) -> None:
    self._account()
    self._idle += 1
    self._ready += 1
    self._count["groups"] += self.warm
    self._lend()
    self._learn()

  def _learn(self) -> None:
    fleet = self._fleet
    if self._learning or self._ready < self._fleet.groups_per_step:
      return
    self._learning = True
    self._ready -= self._fleet.groups_per_step
    self._count["learning"] += self.warm

    def loaded() -> None:
      self._version += 1
      self._lend()

    def updated() -> None:
      self._learning = False
      self._count["updates"] += self.warm
      if not fleet.hosts:
        loaded()
      else:
        # All hosts fetch at once, and begin groups of the new version then.
        sent = fleet.weights_gb * (1 if fleet.shared else fleet.hosts)
        self._server.do(sent * self._costs.weights_gb_cpu_s, lambda: None)
        self._link.do(sent / fleet.link_gb_s, loaded)
      self._learn()

    self.after(self._fleet.learn_s, updated)

  def _beat(self) -> None:
    """One beat each of a share of the collectors, as one job.

    A collector's next beat waits for the answer to its last one.
    """
    fleet = self._fleet
    players = fleet.hosts or fleet.collectors
    pause = max(0.5, min(players / 400, fleet.silence_s / 5))
    sent_at = self.now

    def answered() -> None:
      if self.warm:
        self._beats.append(self.now - sent_at)
      self.after(pause, self._beat)

    self._server.do(players / BEATS * self._costs.beat_cpu_s, answered)

  def _account(self) -> None:
    if self.warm:
      self._held += (self._fleet.collectors - self._idle) * (
        self.now - self._looked
      )
    self._looked = self.now

  # --- the run ---------------------------------------------------------------

  def run(self, seconds: float, warm_up_s: float) -> dict[str, Any]:
    """The figures of `seconds` after a warm-up."""
    for k in range(BEATS):
      self.after(self._fleet.silence_s / 5 * k / BEATS, self._beat)
    self._lend()
    end = warm_up_s + seconds
    while self._events and self._events[0][0] < end:
      at, _, then = heapq.heappop(self._events)
      if not self.warm and at >= warm_up_s:
        self.now = self._looked = warm_up_s
        self.warm = True
      self.now = at
      then()
    self.now = end
    self._account()
    fleet = self._fleet
    busy = {
      "server": self._server.share(seconds),
      "engine": self._engine.share(seconds),
      "store": self._store.share(seconds),
      "link": self._link.share(seconds),
      "learner": min(1.0, self._count["learning"] * fleet.learn_s / seconds),
      "collectors": self._held / (fleet.collectors * seconds),
    }
    turns = self._count["turns"] / seconds
    return {
      "turns_s": turns,
      "groups_s": self._count["groups"] / seconds,
      "updates_min": 60 * self._count["updates"] / seconds,
      "mbit_s": turns * self._costs.turn_bytes * 8 / 1e6,
      # By Little's law.
      "turn_s": self._held / seconds * fleet.group_size / max(turns, 1e-9),
      "beat_s": max(self._beats, default=seconds),
      "busy": busy,
      "limit": limit(busy),
    }


def limit(busy: dict[str, float]) -> str:
  """The part that holds up the others.

  A part of the learner's side that is busy nearly all the time; else
  collectors, where all have groups, and the gate where they have none.
  """
  parts = {k: v for k, v in busy.items() if k != "collectors"}
  fullest = max(parts, key=lambda k: parts[k])
  if parts[fullest] > 0.9:
    return fullest
  return "collectors" if busy["collectors"] > 0.9 else "gate"


TABLE = (
  ("50 collectors", dict(collectors=50, staleness=2)),
  ("100", dict(collectors=100, staleness=2)),
  ("1,000", dict(collectors=1_000, staleness=16, silence_s=150.0)),
  ("10,000", dict(silence_s=150.0)),
  ("10,000, gate open", dict(staleness=160, silence_s=900.0)),
  ("and 8 servers", dict(staleness=160, silence_s=900.0, servers=8)),
  (
    "and 8 engines",
    dict(
      staleness=160,
      silence_s=900.0,
      servers=8,
      engine_tokens_s=160_000.0,
      slots=2048,
    ),
  ),
)


_HOSTS = dict(staleness=2, learn_s=30.0, groups_per_step=512, slots=64)
HOSTS_TABLE = tuple(
  (name, _HOSTS | changes)
  for name, changes in (
    ("16 hosts", dict(hosts=16, collectors=128)),
    ("64", dict(hosts=64, collectors=512)),
    ("256", dict(hosts=256, collectors=2048)),
    ("256, staleness 8", dict(hosts=256, collectors=2048, staleness=8)),
    ("256, shared directory",
     dict(hosts=256, collectors=2048, shared=True)),
    ("and 8 learner processes",
     dict(hosts=256, collectors=2048, shared=True, servers=8)),
    ("and updates of 7.5 s",
     dict(hosts=256, collectors=2048, shared=True, servers=8, learn_s=7.5)),
  )
)  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--costs", type=pathlib.Path, default=COSTS)
  parser.add_argument("--seconds", type=float, default=3000.0)
  parser.add_argument("--warm-up", type=float, default=6000.0)
  parser.add_argument(
    "--rollout-hosts", action="store_true", help="the table of docs/pods.md"
  )
  for field in dataclasses.fields(Fleet):
    parser.add_argument(
      f"--{field.name.replace('_', '-')}", type=type(field.default)
    )
  args = parser.parse_args()
  costs = Costs.measured(args.costs)
  overrides = {
    f.name: getattr(args, f.name)
    for f in dataclasses.fields(Fleet)
    if getattr(args, f.name) is not None
  }
  rows = HOSTS_TABLE if args.rollout_hosts else TABLE
  if overrides:
    rows = (("", overrides),)
  for name, changes in rows:
    report = World(Fleet(**changes), costs).run(args.seconds, args.warm_up)
    busy = " | ".join(f"{v:.0%}" for v in report["busy"].values())
    print(
      f"| {name} | {report['turns_s']:.0f} | {report['groups_s']:.1f} |"
      f" {report['updates_min']:.1f} | {report['turn_s']:.1f} |"
      f" {report['beat_s']:.1f} | {busy} | {report['limit']} |",
      flush=True,
    )


if __name__ == "__main__":
  main()
