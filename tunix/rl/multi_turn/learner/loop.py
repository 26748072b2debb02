"""Runs the learner on the groups of a queue, step after step.

One step: take groups, update, publish the weights, set the queue's version,
emit events, save when a checkpoint is due. Synchronous and asynchronous
training are this same loop; the queue decides how far collecting may run ahead.

Promises: weights are published before the queue admits groups of their
version; groups are acknowledged only when a checkpoint that contains them is
on disk, and that checkpoint names them, for a process that dies in between; no
wait is without a deadline or a way to stop it. With `dynamic_sampling`, groups
of equal rewards are replaced, a bounded number of times, and counted, but for
those that borrow a success. What a closed queue still holds is trained on: the
last step is smaller where the groups do not fill it, with the same programs.
Where several processes learn, one whose groups do not come in time gives those
that it has, and the others give more; while all are in time, each gives its
share. One whose queue is closed gives what it has, and the others theirs.

Does not: collect, evaluate, or decide when training ends: the caller does,
with `step` or `run`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue as std_queue
import sys
import threading
import time
from typing import Any, Callable, cast, Iterator, Protocol

from flax import nnx
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner.batches import replay as replay_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.queue import admission
from tunix.rl.queue import group_queue

Publish = Callable[[int, nnx.State], Any]
"""(version, parameters) -> None, or a future that ends when they have arrived.
The parameters are a copy that belongs to the receiver."""

PROCESSES = "processes"
"""Key of a checkpoint's extras: those of each process, where several learn."""
CONSUMED = "consumed_groups"
"""Key of a checkpoint's extras: the groups to be acknowledged with it, by their
indices in the queue. A run that resumes removes them from the queue's store
before it takes a group."""

_POLL_S = 0.2
_MOST_SKIPS = 16
_READY, _LATE, _STOPPED, _CLOSED = "ready", "late", "stopped", "closed"


PHASES = ("wait", "learn", "publish", "save", "evaluate", "report")


class StepSeconds:
  """Wall seconds of one thread, by phase."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._since = self._at = clock()
    self._phase = "other"
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Time within is of `phase`, one of PHASES."""
    if phase not in PHASES:
      raise ValueError(f"phase must be one of {PHASES}, got {phase!r}")
    before = self._phase
    self._advance(phase)
    try:
      yield
    finally:
      self._advance(before)

  def take(self) -> dict[str, float]:
    """`time/step` and `time/<phase>` since the last call, in seconds."""
    self._advance(self._phase)
    step, self._since = self._at - self._since, self._at
    spent, self._seconds = self._seconds, {}
    return {"time/step": step} | {
      f"time/{phase}": spent.get(phase, 0.0) for phase in (*PHASES, "other")
    }

  def _advance(self, phase: str) -> None:
    now = self._clock()
    spent = self._seconds.get(self._phase, 0.0) + now - self._at
    self._seconds[self._phase] = spent
    self._at, self._phase = now, phase


class DataQueue(Protocol):
  """The methods that the loop calls; google-tunix's queues have them too."""

  def get(
    self, block: bool = True, timeout: float | None = None
  ) -> trajectory.TrajectoryGroup: ...

  def qsize(self) -> int: ...


class _Ungated:
  """A queue that knows no versions and no leases, as if it were a `GroupQueue`.

  Of that class it has what the loop of a single process calls.
  """

  max_staleness = sys.maxsize

  def __init__(self, queue: DataQueue):
    self._get, self.qsize = queue.get, queue.qsize
    self._taken: list[trajectory.TrajectoryGroup] = []
    self.ack = self.refund = self.set_version = lambda *_: None

  def unacked(self) -> list[int]:
    return []

  def get_batch(
    self, n: int, timeout: float | None
  ) -> list[trajectory.TrajectoryGroup]:
    """As of `GroupQueue`; groups that are too few stay for the next call."""
    while len(self._taken) < n:
      self._taken.append(self._get(block=True, timeout=timeout))
    groups, self._taken = self._taken[:n], self._taken[n:]
    return groups


class StarvedError(TimeoutError):
  """No complete batch of groups came within the deadline."""


class LearnerLoop:
  """See the module docstring. One thread calls `step` or `run`.

  Attributes:
    seconds: accounts for that thread's time; a caller that evaluates between
      two steps does it `with loop.seconds("evaluate")`.
  """

  def __init__(
    self,
    learner: learner_lib.Learner,
    queue: DataQueue,
    publish: Publish,
    *,
    observers: events.Observer | None = None,
    checkpoints: checkpoint_lib.LearnerCheckpoints | None = None,
    extras: Callable[[], dict[str, Any]] | None = None,
    updated: Callable[[], None] = lambda: None,
    parts: int = 1,
    publish_ahead: bool = False,
    wait_timeout_s: float | None = None,
    publish_timeout_s: float = 120.0,
    processes: peers_lib.Peers = peers_lib.ALONE,
    share_timeout_s: float | None = None,
    replay: replay_lib.SuccessReplay | None = None,
    experts: bool = False,
    prepare: Callable[
      [list[trajectory.TrajectoryGroup]], list[trajectory.TrajectoryGroup]
    ] = lambda groups: groups,
  ):
    """Args:

    learner: the learner; its settings give `groups_per_step` and
      `publish_every`.
    queue: Queue of groups. A `GroupQueue` also receives versions and
      acknowledgements; of any other queue only `get` is used.
    publish: e.g. the rollout engine's `update_weights`.
    observers: receive StepFinished and WeightsPublished.
    checkpoints: saved to every `checkpoints.config.every` updates; None
      never saves.
    extras: called at each save; returns values that the checkpoint holds
      beside the learner and `CONSUMED`.
    updated: called after each update, before the queue admits groups of its
      version.
    parts: Number of parts that each group comes in; a step takes that many
      times `groups_per_step` from the queue.
    publish_ahead: do not wait, after an update, until its weights have
      arrived, but before the next ones are published. For an engine that
      serves requests sent after `publish` returns with these weights or
      newer ones, as the rollout engine in the process does.
    wait_timeout_s: longest wait for a step's next groups, in seconds,
      however many times other processes are asked meanwhile; None waits
      until the queue closes or fails.
    publish_timeout_s: longest wait for published weights to arrive.
    processes: Processes that learn together, each from a queue of its own.
    share_timeout_s: longest wait for this process's share of a step's groups
      before others' take their place; None waits without end. Where nothing
      of it came, the next step does not wait, and after n such waits 2^n at
      most.
    replay: lends successes to groups that failed; None lends none.
    experts: whether groups may come with an expert's episode.
    prepare: called with the groups of each update; learned from are those
      that it returns.
    """
    publish_every = learner.config.publish_every
    gated = isinstance(queue, group_queue.GroupQueue)
    taken_from = queue if gated else _Ungated(queue)
    self._queue = cast(group_queue.GroupQueue, taken_from)
    if publish_every - 1 > self._queue.max_staleness:
      raise ValueError(
        f"publish_every={publish_every} lets tokens lag by"
        f" {publish_every - 1} versions, but"
        f" max_staleness={self._queue.max_staleness}; every group would be"
        " dropped"
      )
    self.learner = learner
    self.seconds = StepSeconds()
    self._publish = publish
    self._processes = processes
    self._per_step = learner.groups_per_step * parts
    self._wanted = self._per_step  # Of the step to come.
    self._dealt = 0
    self._missed = 0  # Waits for a share of which nothing came, in a row.
    self._skips = 0  # Steps to come that do not wait for it.
    self._share_timeout_s = share_timeout_s if gated else None
    self._replay = replay
    self._experts = experts
    self._prepare = prepare
    self._publish_every = publish_every
    self._publish_ahead = publish_ahead
    self._arriving: tuple[int, concurrent.futures.Future[Any]] | None = None
    self._observers = observers or events.Observers()
    self._checkpoints = checkpoints
    self._extras = extras or dict
    self._updated = updated
    self._wait_timeout_s = wait_timeout_s
    self._publish_timeout_s = publish_timeout_s
    self._kept: list[trajectory.TrajectoryGroup] = []  # Of the step to come.
    self._replaced = 0
    self._closed: admission.QueueClosed | None = None
    self._deadline: float | None = None  # Of the groups that come next.
    self._before: set[int] = set()
    self._replaceable = (
      learner.config.dynamic_sampling * learner.config.groups_per_step * parts
    )
    self._consumed: set[int] = set()  # Trained on and not acknowledged.
    self._unacknowledged = False

  def publish(self, stop: threading.Event | None = None) -> bool:
    """Publishes the present weights; whether they have arrived.

    Call it once before the first step. Arguments and errors as of
    `await_weights`.
    """
    self._publish_now(stop)
    return self.await_weights(stop)

  def await_weights(self, stop: threading.Event | None = None) -> bool:
    """Waits until the weights published last have arrived; whether they have.

    Args:
      stop: Ends the wait seconds after it was set.

    Raises:
      TimeoutError: they did not within the deadline.
    """
    if self._arriving is None:
      return True
    version, arriving = self._arriving
    with self.seconds("publish"):
      if not concurrency.finished(arriving, self._publish_timeout_s, stop):
        if stop is not None and stop.is_set():
          return False
        raise TimeoutError(
          f"weights of version {version} did not reach the rollout engine"
          f" within {self._publish_timeout_s:g} s"
        )
      arriving.result()
    self._arriving = None
    return True

  def _publish_now(self, stop: threading.Event | None) -> None:
    if not self.await_weights(stop):
      return
    started = time.perf_counter()
    version = self.learner.version
    with self.seconds("publish"):
      arriving = self._publish(version, self.learner.policy_state())
    if isinstance(arriving, concurrent.futures.Future):
      self._arriving = version, arriving
    if not self._publish_ahead and not self.await_weights(stop):
      return
    self._observers.on_event(
      events.WeightsPublished(version, time.perf_counter() - started)
    )

  def step(
    self, stop: threading.Event | None = None
  ) -> learner_lib.Metrics | None:
    """One update; None when `stop` was set while waiting for groups.

    The last one before the queue's end may be of fewer groups.

    Raises:
      StarvedError: groups did not come within the deadline.
      QueueClosed: the queue is closed and empty, in every process.
      Exception: the queue's, when it failed, and the learner's about bad data.
    """
    self.settle()
    started = time.perf_counter()
    if not (self._kept or self._replaced):
      self._before = self._delivered()
    with self.seconds("wait"):
      batch = self._take_together(stop)
    if not batch:
      return None
    groups, self._kept = self._kept, []
    dealt, self._dealt = self._dealt, 0
    self._wanted = self._per_step
    replaced, self._replaced = self._replaced, 0
    waited = time.perf_counter() - started
    self._observers.on_event(
      events.UpdateStarted(self.learner.counters.updates + 1)
    )
    with self.seconds("learn"):
      groups = self._prepare(groups)
      metrics = self._update(groups)
    self._consumed |= self._delivered() - self._before
    self._updated()
    step = self.learner.counters.updates
    published = time.perf_counter()
    if step % self._publish_every == 0:
      self._publish_now(stop)
    self._queue.set_version(self.learner.version)
    metrics |= {
      "seconds_wait": waited,
      "seconds_publish": time.perf_counter() - published,
      "seconds_total": time.perf_counter() - started,
    }
    if self._replaceable:
      metrics["replaced_groups"] = float(replaced)
    if self._processes.count > 1:
      metrics["dealt_groups"] = float(dealt)
    advantages = {
      k: tuple(v.tolist()) for k, v in self.learner.advantages.items()
    }
    finished = events.StepFinished(
      step,
      self.learner.version,
      metrics | self.seconds.take(),
      tuple(groups),
      advantages,
      self.learner.left_out,
    )
    metrics = dict(finished.metrics)
    with self.seconds("report"):
      self._observers.on_event(finished)
    every = self._checkpoints.config.every if self._checkpoints else 0
    if every and step % every == 0:
      self.save()
    return metrics

  def _update(
    self, groups: list[trajectory.TrajectoryGroup]
  ) -> learner_lib.Metrics:
    if not self._experts and self._replay is None:
      return self.learner.update(groups)
    further: learner_lib.Metrics = {}
    borrowed: frozenset[str] = frozenset()
    if self._experts:
      score = self.learner.sequence_logprobs
      groups, borrowed = replay_lib.with_experts(groups, score)
      further["expert_episodes"] = float(len(borrowed))
    if self._replay is not None:
      groups, lent = self._replay.lend(groups, self.learner.version)
      further["borrowed_episodes"] = float(len(lent))
      borrowed |= lent
    return self.learner.update(groups, borrowed=borrowed) | further

  def run(self, steps: int, stop: threading.Event | None = None) -> int:
    """Steps until the learner has made `steps` updates in all.

    Returns:
      Updates made by this call; fewer when `stop` was set, or when the queue
      was closed and had no group left.
    """
    updates = 0
    while self.learner.counters.updates < steps:
      if stop is not None and stop.is_set():
        break
      try:
        if self.step(stop) is None:
          break
      except admission.QueueClosed:
        break
      updates += 1
    self.await_weights()
    self.settle()
    return updates

  def save(self) -> None:
    """Saves a checkpoint, unless this version has one.

    It may be written in the background: after the last one call `settle`.
    """
    if self._checkpoints is None:
      raise ValueError("this loop has no checkpoints to save to")
    with self.seconds("save"):
      if self.learner.version not in self._checkpoints.steps():
        extras = {**self._extras(), CONSUMED: sorted(self._consumed)}
        if self._processes.count > 1:
          extras[PROCESSES] = self._processes.gather("extras", extras)
        self._checkpoints.save(self.learner, extras)
        if self._processes.first:
          path = self._checkpoints.directory / str(self.learner.version)
          self._observers.on_event(
            events.CheckpointSaved(self.learner.counters.updates, str(path))
          )
    self._unacknowledged = True

  def settle(self) -> None:
    """Waits until the saved checkpoint is on disk, then lets its groups go.

    `step` begins with it: no group is trained on between a save and its
    acknowledgement. Groups taken for an update that failed are not let go.
    """
    if not self._unacknowledged or self._checkpoints is None:
      return
    with self.seconds("save"):
      self._checkpoints.wait()
    self._queue.ack(self._consumed)
    self._consumed.clear()
    self._unacknowledged = False

  def _delivered(self) -> set[int]:
    """Indices of delivered groups that the queue wants acknowledged."""
    return set(self._queue.unacked())

  def _take_together(self, stop: threading.Event | None) -> bool:
    """Fills `_kept` in every process; False when some process is stopped.

    1. Every process takes its share of the step's groups, for as long as
       `share_timeout_s` at most: a process whose episodes are slow must not
       hold up the others.
    2. If all have their shares, the step begins.
    3. Else the late ones take the groups that are ready at that time and give
       up the others.
    4. The groups given up are dealt to the processes that were in time, one
       after the other, and these take them: a step has the same number of
       groups whichever process collected them.

    A process that gives up everything several times in a row waits for no
    groups in the next steps (`_skips`), ever longer, up to a limit.
    """
    alone = self._processes.count == 1
    seconds = None if alone else self._share_timeout_s
    skip = seconds is not None and self._skips > 0
    self._skips = max(0, self._skips - 1)
    out = False  # Has given what it had, and is dealt nothing more.
    self._restart_deadline()
    while True:
      wait = 0.0 if skip or out else seconds
      states = self._processes.together(
        "take", functools.partial(self._take, stop, wait)
      )
      if _STOPPED in states:
        return False
      if self._closed is not None and set(states) == {_CLOSED}:
        raise self._closed
      late = [state == _LATE for state in states]
      if not any(late):
        if not out:
          self._missed = self._skips = 0
        return True
      index = self._processes.index
      self._processes.together(
        "take what is ready", self._take_ready if late[index] else _nothing
      )
      missing = self._wanted - len(self._kept)
      over = out or self._closed is not None
      shares = self._processes.gather("deal", [missing, over])
      taking = [
        i for i, (_, ended) in enumerate(shares) if not (ended or late[i])
      ]
      if not taking:  # No process to deal to: wait for groups instead.
        skip = False
        continue
      short = sum(count for count, _ in shares)
      if late[index]:
        out = True
        self._give_up(missing)
      elif index in taking:
        more = len(range(taking.index(index), short, len(taking)))
        self._wanted += more
        if more:
          self._restart_deadline()
        self._queue.refund(more)

  def _take_ready(self) -> None:
    """Takes ready groups without waiting, up to this process's share."""
    missing = self._wanted - len(self._kept)
    while missing > 0 and self._queue.qsize():
      try:
        self._kept += self._queue.get_batch(1, timeout=0.0)
      except (std_queue.Empty, admission.QueueClosed):
        return  # An earlier group is awaited, or the queue ended just now.
      missing -= 1

  def _give_up(self, missing: int) -> None:
    """Leaves the rest of the step's groups to other processes."""
    self._wanted -= missing
    self._dealt += missing
    self._queue.forfeit(missing)
    if self._kept:
      self._missed = self._skips = 0
    elif not self._skips:
      self._missed += 1
      self._skips = min(1 << (self._missed - 1), _MOST_SKIPS)

  def _take(self, stop: threading.Event | None, seconds: float | None) -> str:
    """Fills `_kept` with exactly the groups wanted, within `seconds`.

    Yu et al. 2025, "DAPO", section 3.2 (arXiv:2503.14476): groups without a
    gradient are replaced until `dynamic_sampling` times a step's groups were.
    """
    due = None if seconds is None else time.monotonic() + seconds
    while missing := self._wanted - len(self._kept):
      count = min(missing, self._per_step)
      if self._closed is not None:
        # What is left comes one by one; some may be on its way to the store.
        count, due = 1, None
      try:
        groups = self._take_exactly(count, stop, due)
      except admission.QueueClosed as closed:
        if stop is not None and stop.is_set():
          return _STOPPED
        if self._closed is not None:
          self._wanted = len(self._kept)
          break
        self._closed = closed
        continue
      if groups is None:
        stopped = stop is not None and stop.is_set()
        return _STOPPED if stopped else _LATE
      self._restart_deadline()
      flat = [g for g in groups if not (g.varies or self._lends_to(g))]
      flat = flat[: self._replaceable - self._replaced]
      replaced = {id(g) for g in flat}
      self._kept += [g for g in groups if id(g) not in replaced]
      self._replaced += len(flat)
      if flat:
        self._queue.refund(len(flat))
      for group in flat:
        self._observers.on_event(
          events.GroupFinished(
            group, "dropped", "all its episodes got the same reward"
          )
        )
    if self._closed is None:
      return _READY
    if stop is not None and stop.is_set():
      return _STOPPED
    return _READY if self._kept else _CLOSED

  def _restart_deadline(self) -> None:
    if self._wait_timeout_s is not None:
      self._deadline = time.monotonic() + self._wait_timeout_s

  def _check_deadline(self, count: int) -> None:
    if self._deadline is not None and time.monotonic() > self._deadline:
      raise StarvedError(
        f"no {count} groups came within"
        f" {self._wait_timeout_s:g} s (ready: {self._queue.qsize()}); are"
        " episodes failing? See the counts of faults"
      )

  def _lends_to(self, group: trajectory.TrajectoryGroup) -> bool:
    """Returns whether a success would make the group vary."""
    if group.expert is not None:
      return True
    return self._replay is not None and self._replay.lends_to(
      group, self.learner.version
    )

  def _take_exactly(
    self, count: int, stop: threading.Event | None, due: float | None
  ) -> list[trajectory.TrajectoryGroup] | None:
    """Exactly `count` groups; None when stopped, or at the time `due`."""
    while True:
      try:
        remaining = _POLL_S if due is None else due - time.monotonic()
        return self._queue.get_batch(count, min(_POLL_S, max(0.0, remaining)))
      except std_queue.Empty:
        pass
      if stop is not None and stop.is_set():
        return None
      self._check_deadline(count)
      if due is not None and time.monotonic() >= due:
        return None


def _nothing() -> None:
  pass
