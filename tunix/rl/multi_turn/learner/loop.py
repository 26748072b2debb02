"""From the queue to new weights, step after step.

One step: take groups, update, publish the weights, tell the queue the new
version, emit events, save now and then. Synchronous and asynchronous training
are this same loop; how far collecting may run ahead is the queue's business.

Promises: weights are published before the queue admits groups of their
version; groups are acknowledged only when a checkpoint that contains them is
on disk, and that checkpoint names them, for a process that dies in between; no
wait is without a deadline or a way to stop it.

Does not collect, evaluate, or decide when training ends: the caller does, with
`step` or `run`.
"""

from __future__ import annotations

import concurrent.futures
import queue as std_queue
import threading
import time
from typing import Any, Callable

from flax import nnx
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.queue import data_queue

Publish = Callable[[int, nnx.State], Any]
"""(version, parameters) -> None, or a future that ends when they have arrived.
The parameters are a copy that belongs to the receiver."""

CONSUMED = "consumed_groups"
"""Where a checkpoint's extras name the groups to be acknowledged with it, by
their indices in the queue. A run that resumes removes them from the queue's
store before it takes a group."""

_POLL_S = 0.2


class StarvedError(TimeoutError):
  """No complete batch of groups came within the deadline."""


class LearnerLoop:
  """See the module docstring. One thread calls `step` or `run`."""

  def __init__(
      self,
      learner: learner_lib.Learner,
      queue: data_queue.AbstractDataQueue[trajectory.TrajectoryGroup],
      publish: Publish,
      *,
      groups_per_step: int,
      publish_every: int = 1,
      observers: events.Observer | None = None,
      checkpoints: checkpoint_lib.LearnerCheckpoints | None = None,
      checkpoint_every: int = 0,
      extras: Callable[[], dict[str, Any]] | None = None,
      updated: Callable[[], None] = lambda: None,
      wait_timeout_s: float | None = None,
      publish_timeout_s: float = 120.0,
  ):
    """Args:

      learner: what is trained.
      queue: of groups. A GroupQueue is also told versions and acknowledged
        groups; of any other queue only `get` is used.
      publish: e.g. the rollout engine's `update_weights`.
      groups_per_step: groups an update learns from.
      publish_every: updates between two publications.
      observers: get StepFinished and WeightsPublished.
      checkpoints: where to save; None does not.
      checkpoint_every: updates between two checkpoints; 0 leaves saving to
        `save`.
      extras: called at each save for what goes into the checkpoint beside the
        learner and `CONSUMED`.
      updated: called after each update, before the queue admits groups of its
        version.
      wait_timeout_s: longest wait for one step's groups, in seconds; None
        waits until the queue closes or fails.
      publish_timeout_s: longest wait for published weights to arrive.
    """
    for name, value in (
        ("groups_per_step", groups_per_step),
        ("publish_every", publish_every),
    ):
      if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
    staleness = getattr(queue, "max_staleness", None)
    if staleness is not None and publish_every - 1 > staleness:
      raise ValueError(
          f"publish_every={publish_every} lets tokens lag by"
          f" {publish_every - 1} versions, but max_staleness={staleness}; every"
          " group would be dropped"
      )
    if checkpoint_every and checkpoints is None:
      raise ValueError("checkpoint_every needs checkpoints")
    self.learner = learner
    self._queue = queue
    self._publish = publish
    self._groups_per_step = groups_per_step
    self._publish_every = publish_every
    self._observers = observers or events.Observers()
    self._checkpoints = checkpoints
    self._checkpoint_every = checkpoint_every
    self._extras = extras or dict
    self._updated = updated
    self._wait_timeout_s = wait_timeout_s
    self._publish_timeout_s = publish_timeout_s
    self._pending: list[trajectory.TrajectoryGroup] = []
    self._consumed: set[int] = set()  # Trained on and not acknowledged.
    self._unacknowledged = False

  def publish(self) -> None:
    """Publishes the present weights; also wanted once before the first step.

    Raises:
      TimeoutError: they did not arrive within the deadline.
    """
    started = time.perf_counter()
    version = self.learner.version
    arrived = self._publish(version, self.learner.policy_state())
    if isinstance(arrived, concurrent.futures.Future):
      try:
        arrived.result(timeout=self._publish_timeout_s)
      except concurrent.futures.TimeoutError as error:
        raise TimeoutError(
            f"weights of version {version} did not reach the rollout engine"
            f" within {self._publish_timeout_s:g} s"
        ) from error
    self._observers.on_event(
        events.WeightsPublished(version, time.perf_counter() - started)
    )

  def step(
      self, stop: threading.Event | None = None
  ) -> learner_lib.Metrics | None:
    """One update; None when `stop` was set while waiting for groups.

    Raises:
      StarvedError: groups did not come within the deadline.
      Exception: what the queue raises when it is closed or failed, and what
        the learner raises about bad data.
    """
    self.settle()
    started = time.perf_counter()
    before = self._delivered()
    groups = self._take(stop)
    if groups is None:
      return None
    waited = time.perf_counter() - started
    metrics = self.learner.update(groups)
    self._consumed |= self._delivered() - before
    self._updated()
    step = self.learner.counters.updates
    published = time.perf_counter()
    if step % self._publish_every == 0:
      self.publish()
    set_version = getattr(self._queue, "set_version", None)
    if set_version is not None:
      set_version(self.learner.version)
    metrics |= {
        "seconds_wait": waited,
        "seconds_publish": time.perf_counter() - published,
        "seconds_total": time.perf_counter() - started,
    }
    self._observers.on_event(
        events.StepFinished(
            step,
            self.learner.version,
            metrics,
            tuple(groups),
            {k: tuple(v.tolist()) for k, v in self.learner.advantages.items()},
            self.learner.left_out,
        )
    )
    if self._checkpoint_every and step % self._checkpoint_every == 0:
      self.save()
    return metrics

  def run(self, steps: int, stop: threading.Event | None = None) -> int:
    """Steps until the learner has made `steps` updates in all.

    Returns:
      Updates made by this call; fewer when `stop` was set.
    """
    made = 0
    while self.learner.counters.updates < steps:
      if stop is not None and stop.is_set():
        break
      if self.step(stop) is None:
        break
      made += 1
    self.settle()
    return made

  def save(self) -> None:
    """Saves a checkpoint, unless this version has one.

    It may be written in the background: after the last one call `settle`.
    """
    if self._checkpoints is None:
      raise ValueError("this loop has no checkpoints to save to")
    if self.learner.version not in self._checkpoints.steps():
      extras = {**self._extras(), CONSUMED: sorted(self._consumed)}
      self._checkpoints.save(self.learner, extras)
    self._unacknowledged = True

  def settle(self) -> None:
    """Waits until what was saved is on disk, then lets its groups go.

    `step` begins with it: no group is trained on between a save and its
    acknowledgement. Groups taken for an update that failed are not let go.
    """
    if not self._unacknowledged or self._checkpoints is None:
      return
    self._checkpoints.wait()
    acknowledge = getattr(self._queue, "ack", None)
    if acknowledge is not None:
      acknowledge(self._consumed)
    self._consumed.clear()
    self._unacknowledged = False

  def _delivered(self) -> set[int]:
    """What the queue has delivered to this loop and wants acknowledged."""
    unacked = getattr(self._queue, "unacked", None)
    return set() if unacked is None else set(unacked())

  def _take(
      self, stop: threading.Event | None
  ) -> list[trajectory.TrajectoryGroup] | None:
    """Exactly groups_per_step groups; None when stopped."""
    deadline = None
    if self._wait_timeout_s is not None:
      deadline = time.monotonic() + self._wait_timeout_s
    get_batch = getattr(self._queue, "get_batch", None)
    while True:
      try:
        if get_batch is not None:
          return get_batch(self._groups_per_step, timeout=_POLL_S)
        self._pending.append(self._queue.get(block=True, timeout=_POLL_S))
        if len(self._pending) == self._groups_per_step:
          groups, self._pending = self._pending, []
          return groups
        continue
      except std_queue.Empty:
        pass
      if stop is not None and stop.is_set():
        return None
      if deadline is not None and time.monotonic() > deadline:
        raise StarvedError(
            f"no {self._groups_per_step} groups came within"
            f" {self._wait_timeout_s:g} s (ready: {self._queue.qsize()}); are"
            " episodes failing? See the counts of faults"
        )
