"""Builds a run's learner and compiles its programs beside the first stages.

A cold start compiles the learner's programs while the engine's compile and the
first evaluations are played, instead of when the first groups have come. The
learner is built with the weights that the run has then; where GRPO begins with
others, it takes them over when the training stage asks for it.

Promises: the learner equals the one that `models.make_learner` makes of its
weights; an error of building it is raised where it is taken; once it is taken,
or this is closed, nothing here keeps the learner or weights alive; the devices
never hold the learner's state twice.

Does not: help where the shape of batches is open before there is data: without
learner.patches and learner.targets, and with a policy whose programs depend on
the largest image (`reads_image_patches`: Qwen-VL and GLM); nor where several
processes learn, nor after cloning, whose own learner would stand beside this
one. There the first update compiles.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from typing import Any, TYPE_CHECKING

from flax import nnx
import jax
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.run import models

if TYPE_CHECKING:
  from tunix.rl.multi_turn.run import run

_LOG = logging.getLogger(__name__)
_Building = concurrent.futures.Future[learner_lib.Learner]
_NO_UPDATES = "no updates"


class LearnerAhead:
  """See the module docstring; belongs to the run's main thread."""

  def __init__(self, run: run.Run):
    """Begins, in a thread of its own.

    Args:
      run: a `run.Run` that is built.
    """
    self._building: _Building | None = _Building()
    self._kl = bool(run.config.algorithm.kl_coef)
    # What the learner begins with, even if the model gets other arrays.
    self._weights = _arrays_of(run.policy.model)
    self._made_of: list[Any] = [
      run.config,
      run.policy,
      run.images,
      run.mesh,
      run.teacher,
    ]
    self._thread = threading.Thread(
      target=self._work,
      args=(self._building,),
      name="tunix-learner-compile",
      daemon=True,
    )
    self._thread.start()

  @classmethod
  def where_it_helps(cls, run: run.Run) -> LearnerAhead | None:
    """Begins where the run's batches have a known shape; else None."""
    why = _why_not(run)
    if why == _NO_UPDATES:
      return None
    if why:
      _LOG.info("the first update compiles the learner's programs: %s", why)
      return None
    return cls(run)

  @property
  def taken(self) -> bool:
    """Whether the learner was taken, or cannot be any more."""
    return self._building is None

  def _work(self, building: _Building) -> None:
    try:
      config, policy, images, mesh, teacher = self._made_of
      learner = models.make_learner(
        config, policy, images, mesh, teacher=teacher
      )
    except BaseException as error:  # pylint: disable=broad-except
      building.set_exception(error)  # Raised by `take`.
      return
    del config, policy, images, mesh, teacher
    building.set_result(learner)
    del building
    started = time.perf_counter()
    try:
      compiled = learner.compile_ahead()
    except Exception:  # pylint: disable=broad-except
      _LOG.warning(
        "the learner's programs did not compile ahead of the first update,"
        " which compiles them again",
        exc_info=True,
      )
      return
    if compiled:
      _LOG.info(
        "the learner's programs compiled ahead of the first update in %.1f s",
        time.perf_counter() - started,
      )
    else:
      _LOG.info("the shape of batches is open: the first update compiles")

  def take(self, policy: models.LoadedPolicy) -> learner_lib.Learner:
    """The learner, with this policy's weights; its programs may still compile.

    Where these are not the weights it was built with, it waits for the
    programs, and lets those weights go before it copies these. Call it once.

    Raises:
      ConfigError: See `models.make_learner`.
      RuntimeError: it was taken, or this is closed.
    """
    if self._building is None:
      raise RuntimeError("the learner was taken already; make another")
    try:
      learner = self._building.result()
      now = _arrays_of(policy.model)
      same = len(now) == len(self._weights) and all(
        a is b for a, b in zip(now, self._weights)
      )
    finally:
      self._release()
    if not same:
      self._thread.join()
      learner.begin_from(policy.model, policy.model if self._kl else None)
    return learner

  def close(self, timeout_s: float) -> None:
    """Waits for the thread, which cannot be stopped. Idempotent."""
    self._thread.join(timeout_s)
    self._release()
    if self._thread.is_alive():
      _LOG.warning("compiling did not end within %g s", timeout_s)

  def _release(self) -> None:
    self._building = None
    self._weights, self._made_of = [], []


def _why_not(run: run.Run) -> str:
  """Why the learner is not built ahead; "" where it is."""
  config = run.config
  if not config.learner.steps:
    return _NO_UPDATES
  if not (config.learner.patches and config.learner.targets):
    return "learner.patches and learner.targets are open until there is data"
  if base.optional(run.policy.model, "reads_image_patches"):
    return "the policy's programs depend on the largest image of the data"
  if config.warm_start.steps:
    return "cloning has a learner of its own before"
  if run.processes.count > 1:
    return "several processes learn"
  return ""


def _arrays_of(model: base.Policy) -> list[jax.Array]:
  """A model's arrays themselves, by whose identity weights are compared."""
  return jax.tree.leaves(nnx.state(model))
