"""Simulates asynchronous training: costs in, schedule out.

A discrete-event simulation of collecting and learning as two loops that meet at
the queue and at the weights. Costs are the seconds of an episode (log-normal,
a share of their variance its task's), engine slots, the slow-down of decoding
with the batch, the environment's share of an episode, an update's seconds and
those of handing over weights. Rules are those of the run: `queue.*`,
`collect.part_size`, `collect.concurrency`. Out come

* `rate`: updates a second, over those of a learner that never waits;
* `idle`: the share of time that learner and engine slots wait;
* `tokens`: the share of the sampled tokens that is trained on, `episodes`:
  of the episodes, `length`: mean length of an episode that is trained on over
  the mean of all (below 1: long ones are left out);
* `useful`: tokens trained on a second, over those that full slots sample;
* `staleness`: of the trained tokens, a histogram; `oldest`: the largest.

`--real` plays the same episodes through the real `GroupCollector`,
`CollectLoop`, `GroupQueue` and `LearnerLoop`, with environments that sleep and
an update of fixed length (`async_loop.py`). It measures what the machine added
to the sleeps, simulates with these costs (`expected`), and reports both.

The event loop is a heap of its own: one resource, decoding slots whose speed
depends on how many are taken, is all there is, and a process-based library
(simpy) has no such resource and would be a dependency for thirty lines.

  python benchmarks/simulate_async.py                     # the table of rules
  python benchmarks/simulate_async.py --sigma 1 --staleness 1 --real
  python benchmarks/simulate_async.py --learn 20 --episode 45 --slots 96 …
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import json
import math
import random
from typing import Any, Iterator

from tunix.rl.queue import admission


@dataclasses.dataclass(frozen=True)
class Costs:
  """Times and limits of the parts of a run.

  Attributes:
    episode_s: Mean seconds of an episode when the engine is full.
    sigma: Standard deviation of the logarithm of an episode's seconds.
    task_share: Share of that variance which a group's members have in common.
    tasks: Number of tasks, dealt in turn and shuffled anew each time; 0: each
      group has a task of its own.
    turns: Turns of an episode; an environment's call ends each.
    env_share: Share of an episode that its environment takes.
    slots: Requests that the engine decodes at once.
    concurrency: Episodes in flight.
    empty_speed: Speed of decoding with one request over that with all slots.
    learn_s: Seconds of an update.
    sync_s: Seconds from an update to its weights in the engine.
    turn_s: Seconds that each turn takes beside its share of `episode_s`.
  """

  episode_s: float = 1.0
  sigma: float = 1.0
  task_share: float = 0.0
  tasks: int = 0
  turns: int = 4
  env_share: float = 0.25
  slots: int = 64
  concurrency: int = 64
  empty_speed: float = 1.0
  learn_s: float = 1.0
  sync_s: float = 0.0
  turn_s: float = 0.0

  def speed(self, requests: int) -> float:
    """Returns the speed of each of `requests` requests; 1 on a full engine."""
    if self.slots < 2 or requests < 1:
      return 1.0
    free_share = (self.slots - min(requests, self.slots)) / (self.slots - 1)
    return 1.0 + (self.empty_speed - 1.0) * free_share


@dataclasses.dataclass(frozen=True)
class Rules:
  """Settings of a run; `queue` with max_staleness, admission, stale_policy."""

  queue: admission.QueueConfig = admission.QueueConfig(max_staleness=1)
  groups_per_step: int = 8
  group_size: int = 8
  part_size: int = 0

  @property
  def parts(self) -> int:
    return self.group_size // self.part_size if self.part_size else 1


@dataclasses.dataclass(frozen=True)
class Draw:
  """A group to come.

  Attributes:
    task: Number of the task.
    typical_s: Median seconds of the task's episodes.
    seconds: Seconds of each member's episode.
  """

  task: int
  typical_s: float
  seconds: tuple[float, ...]


def draw_groups(costs: Costs, rules: Rules, seed: int) -> Iterator[Draw]:
  """Group after group, for ever."""
  rng = random.Random(seed)
  shared, own = math.sqrt(costs.task_share), math.sqrt(1 - costs.task_share)
  for task, of_task in _draw_tasks(costs.tasks, rng):
    median = costs.episode_s * math.exp(
      costs.sigma * shared * of_task - costs.sigma**2 / 2
    )
    yield Draw(
      task,
      median,
      tuple(
        median * math.exp(costs.sigma * own * rng.gauss(0, 1))
        for _ in range(rules.group_size)
      ),
    )


def _draw_tasks(count: int, rng: random.Random) -> Iterator[tuple[int, float]]:
  """Numbers of tasks, and what each task's logarithms have in common."""
  if not count:
    for number in itertools.count():
      yield number, rng.gauss(0, 1)
  offsets = [rng.gauss(0, 1) for _ in range(count)]
  mean = sum(offsets) / count
  # Of mean 0 and variance 1, or few tasks would have other means than many.
  spread = math.sqrt(sum((x - mean) ** 2 for x in offsets) / count) or 1.0
  numbers = list(range(count))
  while True:
    rng.shuffle(numbers)
    for number in numbers:
      yield number, (offsets[number] - mean) / spread


@dataclasses.dataclass
class Account:
  """Adds up what was sampled and what was trained on, after the warm-up.

  Tokens are in seconds of decoding with all slots taken.
  """

  sampled: float = 0.0
  ended: list[float] = dataclasses.field(default_factory=list)
  trained: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )
  lengths: list[float] = dataclasses.field(default_factory=list)

  def report(
    self, rate: float, learner_idle: float, slots_idle: float
  ) -> dict[str, Any]:
    trained = sum(self.trained.values())
    mean = lambda values: sum(values) / max(len(values), 1)
    share = trained / max(self.sampled, 1e-9)
    return {
      "rate": rate,
      "idle": {"learner": learner_idle, "slots": slots_idle},
      "tokens": share,
      "useful": share * (1 - slots_idle),
      "episodes": len(self.lengths) / max(len(self.ended), 1),
      "length": mean(self.lengths) / max(mean(self.ended), 1e-9),
      "staleness": {
        lag: round(n / max(trained, 1e-9), 3)
        for lag, n in sorted(self.trained.items())
      },
      "oldest": max(self.trained, default=0),
    }


@dataclasses.dataclass(eq=False)
class _Episode:
  group: _Group
  seconds: float
  turns_left: int
  began: float = math.nan  # When it took a slot among the episodes in flight.
  mark: float = 0.0  # The engine's clock at its last counted token.
  tokens: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )  # By weights version.


@dataclasses.dataclass(eq=False)
class _Group:
  ticket: admission.Ticket
  draw: Draw
  parts: int = 0  # That are admitted and still to come.
  running: list[_Episode] = dataclasses.field(default_factory=list)
  ended: list[_Episode] = dataclasses.field(default_factory=list)


class Simulation:
  """One run; `run` gives its report."""

  def __init__(self, costs: Costs, rules: Rules, seed: int = 0):
    self._costs, self._rules = costs, rules
    self._draws = draw_groups(costs, rules, seed)
    self._per_step = rules.groups_per_step * rules.parts
    self._events: list[tuple[float, int, str, Any]] = []  # By time.
    self._decoding: list[tuple[float, int, _Episode]] = []  # By engine clock.
    self._numbers = itertools.count()
    self._now = self._clock = 0.0
    self._version = 0
    self._waiting: collections.deque[_Episode] = collections.deque()
    self._queued: collections.deque[_Episode] = collections.deque()
    self._in_flight = self._started = self._consumed = 0
    self._running: dict[_Group, None] = {}
    self._ready: list[list[_Episode]] = []
    self._learning = False
    self._account = Account()
    self._busy = self._taken = 0.0

  # --- collecting -------------------------------------------------------------

  def _admit(self) -> None:
    room = self._rules.queue.bounds_running
    while room or self._has_room():
      if self._counted() + self._rules.parts > self._limit():
        return
      group = self._next_group()
      self._start(group, group.running, self._rules.parts)

  def _has_room(self) -> bool:
    """Whether an episode would start at once."""
    return not self._waiting and self._in_flight < self._costs.concurrency

  def _limit(self) -> float:
    """Parts of groups that may have been admitted by now."""
    staleness = self._rules.queue.max_staleness
    return (staleness + self._version + 1) * self._per_step

  def _counted(self) -> float:
    """Parts of groups that count against the admission of new ones."""
    running = sum(
      group.parts
      for group in self._running
      if self._rules.queue.counts(group.ticket, self._version)
    )
    return self._consumed + len(self._ready) + running

  def _next_draw(self) -> Draw:
    """The task of the next group, and its episodes."""
    return next(self._draws)

  def _next_group(self) -> _Group:
    draw = self._next_draw()
    ticket = admission.Ticket(self._started, self._version)
    self._started += 1
    group = _Group(ticket, draw)
    for seconds in draw.seconds:
      group.running.append(_Episode(group, seconds, self._costs.turns))
    return group

  def _start(self, group: _Group, members: list[_Episode], parts: int) -> None:
    group.parts += parts
    self._running[group] = None
    self._waiting.extend(members)
    self._fill()

  def _fill(self) -> None:
    while self._waiting and self._in_flight < self._costs.concurrency:
      self._in_flight += 1
      episode = self._waiting.popleft()
      episode.began = self._now
      self._ask(episode)

  def _ask(self, episode: _Episode) -> None:
    """A turn's request."""
    self._queued.append(episode)
    self._serve()

  def _serve(self) -> None:
    while self._queued and len(self._decoding) < self._costs.slots:
      episode = self._queued.popleft()
      share = (1 - self._costs.env_share) / self._costs.turns
      episode.mark = self._clock
      end = self._clock + episode.seconds * share
      heapq.heappush(self._decoding, (end, next(self._numbers), episode))

  def _count(self, episode: _Episode) -> None:
    episode.tokens[self._version] += self._clock - episode.mark
    episode.mark = self._clock

  def _sampled(self, episode: _Episode) -> None:
    """Ends the sampling of a turn's tokens; the environment acts."""
    self._count(episode)
    self._serve()
    costs = self._costs
    wait = episode.seconds * costs.env_share / costs.turns + costs.turn_s
    self._later(wait, "acted", episode)

  def _acted(self, episode: _Episode) -> None:
    episode.turns_left -= 1
    if episode.turns_left:
      self._ask(episode)
      return
    self._in_flight -= 1
    self._account.sampled += sum(episode.tokens.values())
    self._account.ended.append(episode.seconds)
    group = episode.group
    group.running.remove(episode)
    group.ended.append(episode)
    if len(group.ended) == (self._rules.part_size or self._rules.group_size):
      group.parts -= 1
      self._ready.append(group.ended)
      group.ended = []
      self._purge()
    if not group.parts:
      del self._running[group]
    self._fill()

  # --- learning ---------------------------------------------------------------

  def _purge(self) -> None:
    config = self._rules.queue
    which = max if config.stale_policy == "trim" else min
    bound = self._version - config.max_staleness
    self._ready = [
      unit
      for unit in self._ready
      if which(which(e.tokens) for e in unit) >= bound
    ]

  def _take(self) -> None:
    count = self._per_step
    if self._learning or len(self._ready) < count:
      return
    # In the order of admission.
    self._ready.sort(key=lambda unit: unit[0].group.ticket.index)
    units, self._ready = self._ready[:count], self._ready[count:]
    self._consumed += count
    bound = self._version - self._rules.queue.max_staleness
    for episode in itertools.chain.from_iterable(units):
      young = {v: n for v, n in episode.tokens.items() if v >= bound}
      for version, tokens in young.items():
        self._account.trained[self._version - version] += tokens
      if young:
        self._account.lengths.append(episode.seconds)
    self._learning = True
    self._later(self._costs.learn_s + self._costs.sync_s, "learned", None)

  def _learned(self) -> None:
    for _, _, episode in self._decoding:
      self._count(episode)
    self._learning = False
    self._version += 1
    self._purge()

  # --- time -------------------------------------------------------------------

  def _later(self, seconds: float, kind: str, episode: Any) -> None:
    heapq.heappush(
      self._events, (self._now + seconds, next(self._numbers), kind, episode)
    )

  def _advance(self) -> None:
    """To the next event, and handles it."""
    speed = self._costs.speed(len(self._decoding))
    at = math.inf
    if self._decoding:
      at = self._now + (self._decoding[0][0] - self._clock) / speed
    decodes = not self._events or at < self._events[0][0]
    if not decodes:
      at = self._events[0][0]
    if at == math.inf:
      raise RuntimeError("the rules admit nothing and nothing runs")
    passed = at - self._now
    self._now = at
    self._busy += passed * self._learning
    self._taken += passed * min(self._in_flight, self._costs.concurrency)
    if decodes:
      end, _, episode = heapq.heappop(self._decoding)
      self._clock = end
      self._sampled(episode)
      return
    self._clock += passed * speed
    _, _, kind, episode = heapq.heappop(self._events)
    if kind == "learned":
      self._learned()
    else:
      self._acted(episode)

  def run(self, steps: int, warm: int) -> dict[str, Any]:
    """The report of `steps` updates that follow `warm` others."""
    began = 0.0
    warmed = False
    while self._version < steps + warm:
      self._admit()
      self._take()
      self._advance()
      if not warmed and self._version >= warm:
        warmed, began = True, self._now
        self._account, self._busy, self._taken = Account(), 0.0, 0.0
    seconds = self._now - began
    return self._account.report(
      steps * self._costs.learn_s / seconds,
      1 - self._busy / seconds,
      1 - self._taken / seconds / self._costs.concurrency,
    )


def simulate(
  costs: Costs, rules: Rules, steps: int = 200, warm: int = 30, seed: int = 0
) -> dict[str, Any]:
  """The schedule of `steps` updates; see the module docstring."""
  return Simulation(costs, rules, seed).run(steps, warm)


def named_rules(max_staleness: int) -> dict[str, Rules]:
  """Rules that are compared, by their settings."""
  queue = admission.QueueConfig(max_staleness=max_staleness)
  change = dataclasses.replace
  trim = change(queue, stale_policy="trim")
  recent = change(trim, admission="recent")
  finished = change(trim, admission="finished")
  return {
    "default": Rules(queue),
    "part_size=2": Rules(queue, part_size=2),
    "trim": Rules(trim),
    "trim part_size=4": Rules(trim, part_size=4),
    "trim part_size=2": Rules(trim, part_size=2),
    "trim recent part_size=2": Rules(recent, part_size=2),
    "trim finished": Rules(finished),
    "trim finished part_size=2": Rules(finished, part_size=2),
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  defaults = Costs()
  parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0])
  parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
  parser.add_argument("--rules", nargs="+", help="names of the table; all")
  parser.add_argument("--episode", type=float, default=defaults.episode_s)
  parser.add_argument("--learn", type=float, default=defaults.learn_s)
  for name in ("task_share", "env_share", "empty_speed", "sync_s"):
    value = getattr(defaults, name)
    parser.add_argument(f"--{name}", type=float, default=value)
  for name in ("tasks", "turns", "slots", "concurrency"):
    value = getattr(defaults, name)
    parser.add_argument(f"--{name}", type=int, default=value)
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument("--warm", type=int, default=30)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--seeds", type=int, default=1, help="mean of so many")
  parser.add_argument("--real", action="store_true")
  parser.add_argument(
    "--unit", type=float, default=0.4, help="real seconds a second, --real"
  )
  args = parser.parse_args()
  names = ("task_share", "tasks", "env_share", "empty_speed", "sync_s",
           "turns", "slots", "concurrency")  # fmt: skip
  settings = {name: getattr(args, name) for name in names}
  for sigma in args.sigma:
    costs = Costs(
      episode_s=args.episode, sigma=sigma, learn_s=args.learn, **settings
    )
    for staleness in args.staleness:
      for name, rules in named_rules(staleness).items():
        if args.rules and name not in args.rules:
          continue
        row = {"sigma": sigma, "max_staleness": staleness, "rules": name}
        run = (costs, rules, args.steps, args.warm, args.seed)
        row |= _rounded(
          _mean([simulate(*run[:-1], args.seed + i) for i in range(args.seeds)])
        )
        if args.real:
          import async_loop  # pylint: disable=g-import-not-at-top

          real, measured = async_loop.play(*run, unit=args.unit)
          # What this machine added to each sleep is a cost like others.
          measured_costs = dataclasses.replace(
            costs, learn_s=measured["learn_s"], turn_s=measured["turn_s"]
          )
          expected = simulate(measured_costs, *run[1:])
          expected["rate"] *= costs.learn_s / measured_costs.learn_s
          row["measured"] = _rounded(measured)
          row["expected"] = _rounded(expected)
          row["real"] = _rounded(real)
          row["real / expected"] = round(real["rate"] / expected["rate"], 3)
        print(json.dumps(row), flush=True)


def _mean(reports: list[dict[str, Any]]) -> dict[str, Any]:
  """Of runs; the largest of `oldest`, and `staleness` of the last."""
  mean = dict(reports[-1])
  for name, value in mean.items():
    if isinstance(value, float):
      mean[name] = sum(r[name] for r in reports) / len(reports)
  mean["oldest"] = max(r["oldest"] for r in reports)
  mean["idle"] = {
    who: sum(r["idle"][who] for r in reports) / len(reports)
    for who in mean["idle"]
  }
  return mean


def _rounded(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _rounded(v) for k, v in value.items()}
  return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
  main()
