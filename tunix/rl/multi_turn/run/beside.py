"""Evaluates updates with an engine of its own while training continues.

The second engine holds the weights of the update that is evaluated, from the
first episode to the last, whatever the learner does meanwhile: its results are
those that `evaluation.evaluate` gives at these weights and seeds. To evaluate
with the engine that collects would mix the weights of several updates in one
figure, and to keep two versions in one engine takes the same memory and two
calls a decode step.

Promises: at most one evaluation is under way; the next one waits for its end,
and the learner with it. The update's checkpoint, which holds the weights, stays
until the evaluation has ended, so that a run that is stopped evaluates it when
it is resumed. The results hold `beside: true`, their wall seconds, and
`seconds_waited`, in which the learner waited for them.

Does not: with several processes, or with an engine elsewhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import evaluation
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import tasks as run_tasks

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2


@dataclasses.dataclass
class _UnderWay:
  name: str
  playing: concurrent.futures.Future[dict[str, Any]]
  waited: float = 0.0


class BesideEvaluations:
  """The evaluations of a run between its updates; see the module docstring.

  Belongs to the thread of the learner.
  """

  def __init__(self, run: run_lib.Run):
    """Builds the second engine; run.policy gives its first weights."""
    config = run.config
    slots = config.eval.slots or config.engine.slots
    self._run = run
    self._concurrency = episodes.evaluated_beside(config)
    self._planned = evaluation.plan(
        config, run_tasks.eval_tasks(config, run.task_source)
    )
    self._engine = models.make_engine(
        dataclasses.replace(
            config, engine=dataclasses.replace(config.engine, slots=slots)
        ),
        run.policy,
        run.images,
    )
    self._now: _UnderWay | None = None

  @property
  def under_way(self) -> str:
    """Name of the evaluation that is being played, "" for none."""
    return "" if self._now is None else self._now.name

  def warm_up(self) -> None:
    """Compiles the second engine's programs, before anything waits for it."""
    self._engine.warm_up()

  def start(self, name: str, step: int, state: Any) -> None:
    """Begins an evaluation; none may be under way.

    Args:
      name: Key of its results in the summary.
      step: the update whose weights are evaluated, at least the one before.
      state: its parameters, a copy.
    """
    if self._now is not None:
      raise RuntimeError(f"evaluation {self._now.name} has not ended")
    run = self._run
    self._engine.update_weights(step, state).result(
        run.config.external.load_timeout_s
    )
    outcomes = evaluation.Outcomes()

    def make_collector(mode: str) -> Any:
      return episodes.make_collector(
          run.config,
          run.episodes,
          self._engine,
          run.policy.renderer,
          observers=run.observers,
          mode=mode,
          concurrency=self._concurrency,
      )

    async def play() -> dict[str, Any]:
      await evaluation.play(
          self._planned,
          make_collector,
          lambda mode: run.observers.on_event(
              events.EvalStarted(name, mode, len(self._planned), step)
          ),
          outcomes.add,
      )
      return outcomes.to_json()

    self._now = _UnderWay(name, run.loop.submit(play()))

  def finished(self) -> tuple[str, dict[str, Any]] | None:
    """(name, results) of an evaluation that has ended since the last call.

    Raises:
      Exception: The failure that ended it.
    """
    now = self._now
    if now is None or not now.playing.done():
      return None
    self._now = None
    results = evaluation.merged(
        [now.playing.result()], self._run.config.eval.modes
    )
    results |= {"beside": True, "seconds_waited": now.waited}
    self._run.observers.on_event(events.EvalFinished(now.name, results))
    return now.name, results

  def wait(self) -> None:
    """Waits until none is under way.

    Raises:
      loop_thread.Interrupted: the run was asked to stop.
      loop_thread.LoopDiedError: no episode is played any more.
    """
    now = self._now
    if now is None:
      return
    since = time.monotonic()
    while not now.playing.done():
      self._run.wait(asyncio.sleep(_POLL_S))
    now.waited += time.monotonic() - since

  def close(self) -> None:
    """Ends the one under way without a result, and the engine. Idempotent."""
    now, self._now = self._now, None
    if now is not None:
      now.playing.cancel()
      timeout_s = loop_thread.STOP_TIMEOUT_S
      if not concurrent.futures.wait([now.playing], timeout_s).done:
        _LOG.warning("%s did not stop within %g s", now.name, timeout_s)
    self._engine.close(loop_thread.STOP_TIMEOUT_S)
