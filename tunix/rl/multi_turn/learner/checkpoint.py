"""Saves and restores a learner: parameters, optimizer, counters, extras.

Orbax writes them: a checkpoint is complete or does not exist, the newest `keep`
stay, and saving runs in the background. Restoring places every array where the
learner at hand wants it, from any mesh.

Promises: a learner that is restored continues as if it had never stopped.
Random state is in the counters (see `Learner.progress`); other state of a run
(a sampler's position, the queue's) goes into `extras`.

Does not: save the model's architecture or tokenizer (see `policy.checkpoint`).
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import learner as learner_lib

CheckpointConfig = config_lib.CheckpointConfig


class LearnerCheckpoints:
  """The checkpoints of one run, numbered by the learner's version."""

  def __init__(
      self,
      directory: str | pathlib.Path,
      config: CheckpointConfig = CheckpointConfig(),
      *,
      background: bool = True,
  ):
    """Args:

      directory: made if absent.
      config: how many stay; its `every` is for the learner's loop.
      background: return from `save` once arrays are copied, before they are
        written.
    """
    self.config = config
    self.directory = pathlib.Path(directory).absolute()
    self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            create=True,
            enable_async_checkpointing=background,
        ),
    )

  def save(
      self, learner: learner_lib.Learner, extras: dict[str, Any] | None = None
  ) -> int:
    """Saves; returns the checkpoint's number, the learner's version.

    Args:
      learner: not updated while this call runs; may be after it.
      extras: JSON values returned by `restore`.

    Raises:
      ValueError: there is a checkpoint of this version already.
    """
    step = learner.version
    if step in self._manager.all_steps():
      raise ValueError(
          f"{self.directory} already has a checkpoint of version {step}"
      )
    self._manager.save(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(learner.arrays()),
            progress=ocp.args.JsonSave(
                {"learner": learner.progress(), "extras": extras or {}}
            ),
        ),
    )
    return step

  def steps(self) -> list[int]:
    """Numbers of the complete checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def restore(
      self, learner: learner_lib.Learner, step: int | None = None
  ) -> dict[str, Any]:
    """Loads into `learner`; returns the extras.

    Args:
      learner: built with the model and configuration of the run.
      step: number of the checkpoint; None is the newest.

    Raises:
      FileNotFoundError: no such checkpoint.
      ValueError: it is of another model or configuration.
    """
    self.wait()
    known = self.steps()
    if step is None:
      step = known[-1] if known else None
    if step is None or step not in known:
      raise FileNotFoundError(
          f"{self.directory} has no checkpoint"
          + ("" if step is None else f" {step}; it has {known}")
      )
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        learner.arrays(),
    )
    found = self._manager.restore(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardRestore(wanted),
            progress=ocp.args.JsonRestore(),
        ),
    )
    progress = found["progress"]
    learner.load(found["arrays"], progress["learner"])
    return progress["extras"]

  def wait(self) -> None:
    """Waits until everything saved is on disk; raises a failed write."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then releases threads."""
    self._manager.wait_until_finished()
    self._manager.close()

  def __enter__(self) -> LearnerCheckpoints:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
