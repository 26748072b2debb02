"""Builds a run's learner and compiles its programs beside the first stages.

A cold start compiles the learner's programs while the engine's compile and the
first evaluations are played, instead of when the first groups have come. The
learner is built with the weights that the run has then; it takes over those
that GRPO begins with when the training stage asks for it.

Promises: the learner is the one that `models.make_learner` makes of these
weights; an error of building it is raised where it is taken.

Does not: know the shape of batches before there is data. Where neither
learner.patches and learner.targets nor anything else decides it, the first
update compiles; so it does where several processes learn, and after cloning,
whose own learner would stand beside this one.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from typing import Any

from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.run import models

_LOG = logging.getLogger(__name__)


class LearnerAhead:
  """See the module docstring; belongs to the run's main thread."""

  def __init__(self, run: Any):
    """Begins, in a thread of its own.

    Args:
      run: a `run.Run` that is built.
    """
    self._building: concurrent.futures.Future[learner_lib.Learner] = (
        concurrent.futures.Future()
    )
    self._parts = (run.config, run.policy, run.images, run.mesh)
    self._teacher = run.teacher
    self._thread = threading.Thread(
        target=self._work, name="tunix-learner-compile", daemon=True
    )
    self._thread.start()

  @classmethod
  def where_it_helps(cls, run: Any) -> LearnerAhead | None:
    """Begins where the run's batches have a known shape; else None."""
    config = run.config
    learner = config.learner
    if (
        not (learner.steps and learner.patches and learner.targets)
        or config.warm_start.steps
        or run.processes.count > 1
    ):
      return None
    return cls(run)

  def _work(self) -> None:
    try:
      learner = models.make_learner(*self._parts, teacher=self._teacher)
    except BaseException as error:  # pylint: disable=broad-except
      self._building.set_exception(error)  # Raised by `take`.
      return
    self._building.set_result(learner)
    try:
      learner.compile_ahead()
    except Exception:  # pylint: disable=broad-except
      _LOG.warning(
          "the learner's programs did not compile ahead of the first update,"
          " which compiles them again",
          exc_info=True,
      )

  def take(self, policy: models.LoadedPolicy) -> learner_lib.Learner:
    """The learner, with this policy's weights; its programs may still compile.

    Raises:
      ConfigError: as `models.make_learner`.
    """
    learner = self._building.result()
    config = self._parts[0]
    learner.begin_from(
        policy.model, policy.model if config.algorithm.kl_coef else None
    )
    return learner

  def close(self, timeout_s: float) -> None:
    """Waits for the thread, which cannot be stopped. Idempotent."""
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      _LOG.warning("compiling did not end within %g s", timeout_s)
