"""Saves and restores a learner: parameters, optimizer, counters, extras.

Orbax writes them: a checkpoint is complete or does not exist, the newest `keep`
and those that are `pinned` stay, and saving runs in the background. Restoring
places every array where the restoring learner wants it, from any mesh.

Promises: a learner that is restored continues as if it had never stopped.
Random state is in the counters (see `Learner.progress`); other state of a run
(a sampler's position, the queue's) goes into `extras`. A checkpoint that `wait`
has returned after survives a power loss. What is restored is what was saved: a
checksum of each array, computed on its devices, and a digest of everything else
are saved with it and compared; damage is an error that names the checkpoint. A
disk that hangs is an error after `CheckpointConfig.deadline_s`; so is a wall
clock that is set back, as TensorStore may start no thread until it catches up.

Does not: save the model's architecture or tokenizer (see
`policy.checkpoints`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pathlib
import sys
import traceback
from typing import Any, Callable, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.net import worker_pool
from tunix.rl.multi_turn.policy import base

CheckpointConfig = config_lib.CheckpointConfig

_NO_TIMEOUT_S = 50 * 365 * 86400
"""Orbax measures its timeouts by the wall clock: a clock that is set forward
would end a run in the midst of a save."""


class _RaisedOnce(logging.Filter):
  """Drops the records that orbax and asyncio log of a failed checkpoint."""

  def filter(self, record: logging.LogRecord) -> bool:
    if not record.exc_info:
      # A reader of a run's checkpoints asked for it.
      return "directory is read only" not in record.msg
    frames = traceback.extract_tb(record.exc_info[2])
    origins = [record.pathname, *(frame.filename for frame in frames)]
    return not any(
      "orbax/checkpoint" in origin.replace(os.sep, "/") for origin in origins
    )


@functools.cache
def _report_once() -> None:
  """Leaves the report of a failed save or restore to the error it raises.

  Each array's task and each background thread would print a traceback too,
  some of them when they are collected: hundreds for one full disk.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_RaisedOnce())
  before = sys.unraisablehook

  def report(unraisable: Any) -> None:
    # Callbacks of an event loop that orbax has closed.
    closed = isinstance(unraisable.exc_value, RuntimeError) and (
      "Event loop is closed" in str(unraisable.exc_value)
    )
    code = getattr(unraisable.object, "cr_code", None)
    if not closed and "orbax" not in getattr(code, "co_filename", ""):
      before(unraisable)

  sys.unraisablehook = report


class DamagedCheckpoint(ValueError):
  """A checkpoint's files cannot be read, or do not hold what was saved."""


def checksums(arrays: object) -> dict[str, int]:
  """Path, type and shape -> a number that any changed bit of the array changes.

  The sum of the array's words, each with an odd factor of its place, modulo
  2^32; the same on every mesh. 0 where there are shapes in place of arrays.
  """
  # Fetched one by one: on a mesh each is a collective, and many of them in
  # flight at a time can block one another for ever.
  return {
    f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}": (
      int(_checksum(leaf)) if isinstance(leaf, jax.Array) else 0
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
  }


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
  words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(
    array.dtype.itemsize, jnp.uint32
  )
  if array.dtype == jnp.bool_:
    bits = array.astype(jnp.uint32)
  else:
    bits = jax.lax.bitcast_convert_type(array, words).astype(jnp.uint32)
  factor = jnp.uint32(1)
  for axis in range(bits.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    factor = factor * jnp.uint32(0x01000193) + place
  return jnp.sum(bits * (2 * factor + 1), dtype=jnp.uint32)


def _digest(progress: dict[str, Any]) -> str:
  # As it will be read: with text as keys, and lists for tuples.
  text = json.dumps(json.loads(json.dumps(progress)), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


class _NewestAndPinned:
  """Orbax's preservation policy of `LearnerCheckpoints`."""

  def __init__(self, newest: int, pinned: set[int]):
    self._newest = newest
    self._pinned = pinned

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: object
  ) -> list[bool]:
    del context
    first = len(checkpoints) - self._newest
    return [
      place >= first or one.step in self._pinned
      for place, one in enumerate(checkpoints)
    ]


def _trained_shapes(
  model: nnx.Module, left_out: Sequence[str] = ()
) -> tuple[update.SplitModel, dict[str, Any]]:
  """Returns a model's trained parameters and their shapes in a checkpoint."""
  split = update.SplitModel(model, left_out)
  return split, {
    "params": {
      name: jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=value.sharding
      )
      for (name, value), shape in zip(
        split.params_of(model).items(), split.shapes
      )
    }
  }


class LearnerCheckpoints:
  """The checkpoints of one run, numbered by the learner's version.

  Attributes:
    pinned: Numbers of checkpoints that stay in spite of newer ones. The next
      save deletes one that is no longer pinned.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    config: CheckpointConfig = CheckpointConfig(),
    *,
    background: bool = True,
    read_only: bool = False,
  ):
    """Args:

    directory: made if absent.
    config: how many stay, and for how long a save may run; its `every` is
      for the learner's loop.
    background: return from `save` once arrays are copied, before they are
      written.
    read_only: nothing is saved, made or deleted: another process may save
      there.
    """
    self.config = config
    self.directory = pathlib.Path(directory).absolute()
    _report_once()
    self.pinned: set[int] = set()
    self._unsynced: set[int] = set()
    self._hangs = False
    # Not the pool of gyms' calls, which stuck gyms may fill.
    self._thread = worker_pool.WorkerPool(1, 1, name="tunix-checkpoints")
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=_NewestAndPinned(config.keep, self.pinned),
        create=not read_only,
        read_only=read_only,
        save_interval_steps=0 if read_only else 1,
        enable_async_checkpointing=background,
        async_options=ocp.options.AsyncOptions(
          timeout_secs=_NO_TIMEOUT_S,
          # A failed one would leave threads that wait for it for ever.
          create_directories_asynchronously=False,
        ),
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
      DeadlineExceeded: the one before it is still not on disk.
    """
    step = learner.version
    if step in self._manager.all_steps():
      raise ValueError(
        f"{self.directory} already has a checkpoint of version {step}"
      )
    arrays = learner.arrays()
    progress = {
      "learner": learner.progress(),
      "extras": extras or {},
      "checksums": checksums(arrays),
    }
    self._in_time(
      self._manager.save,
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays),
        progress=ocp.args.JsonSave({**progress, "digest": _digest(progress)}),
      ),
    )
    self._unsynced.add(step)
    return step

  def steps(self) -> list[int]:
    """Returns the numbers of the complete checkpoints, ascending."""
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
      DamagedCheckpoint: its files are damaged.
      ValueError: it is of another model or configuration.
    """
    self.wait()
    steps = self.steps()
    if step is None:
      step = steps[-1] if steps else None
    if step is None or step not in steps:
      raise FileNotFoundError(
        f"{self.directory} has no checkpoint"
        + ("" if step is None else f" {step}; it has {steps}")
      )
    progress = self._progress(step)
    reason = ""
    targets = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      learner.arrays(),
    )
    expected = progress.get("checksums")
    try:
      restored = self._manager.restore(
        step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(targets))
      )
    except Exception as error:  # pylint: disable=broad-except
      # Orbax has no class of its own for a file that is damaged.
      if expected is None or list(expected) != list(checksums(targets)):
        raise  # Of another model or optimizer.
      restored, reason = {}, str(error)
    if not restored:
      raise self._damaged(step, reason)
    arrays = restored["arrays"]
    if expected is not None and (
      other := [k for k in checksums(targets) if k not in expected]
    ):
      raise ValueError(
        f"{self.directory / str(step)} holds no {other[0]}, which this"
        " learner trains; policy.config.param_dtype, learner.optimizer,"
        " learner.freeze_vision and algorithm.advantage=gae (its value head)"
        " must be as they were, and checkpoints of bfloat16 parameters"
        " without float32 masters cannot be resumed: start a new run from"
        " its policy directory (policy=runs/<name>/policy)"
      )
    if expected is not None:
      wrong = [k for k, v in checksums(arrays).items() if expected.get(k) != v]
      if wrong:
        raise self._damaged(step, f"array {wrong[0]} is not what was saved")
    learner.load(arrays, progress["learner"])
    return progress["extras"]

  def delete_newer(self, step: int) -> bool:
    """Deletes the checkpoints after one; whether there were any."""
    newer = [s for s in self.steps() if s > step]
    for one in newer:
      self._manager.delete(one)
    return bool(newer)

  def restore_parameters(self, model: Any, step: int) -> Any:
    """Returns the parameters alone, for a policy that is not trained.

    Args:
      model: the policy's module, with the adapter if one was trained; gives
        the parameters that were not, and everyone's place on the devices.
      step: number of the checkpoint.

    Returns:
      An `nnx.State` of all parameters in the model's types.

    Raises:
      FileNotFoundError: no such checkpoint.
      DamagedCheckpoint: its files are damaged.
      ValueError: it is of another model.
    """
    if step not in self.steps():
      raise FileNotFoundError(
        f"{self.directory} has no checkpoint {step}; it has {self.steps()}"
      )
    expected = self._progress(step).get("checksums")
    split, targets = _trained_shapes(model)
    other = [k for k in checksums(targets) if k not in (expected or ())]
    if expected is not None and other:
      # A run with learner.freeze_vision keeps the tower of its model.
      split, targets = _trained_shapes(
        model, base.optional(model, "vision_modules")
      )
      missing = [k for k in checksums(targets) if k not in expected]
      other = other if missing else []
    if expected is not None and other:
      raise ValueError(
        f"{self.directory / str(step)} holds no {other[0]}: it is of another"
        " policy, or with another policy.lora_rank"
      )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      try:
        restored = reader.restore(
          self.directory / str(step) / "arrays",
          args=ocp.args.PyTreeRestore(
            item=targets,
            restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
            partial_restore=True,
          ),
        )
      except Exception as error:  # pylint: disable=broad-except
        # Orbax has no class of its own for a file that is damaged.
        if expected is None:
          raise
        raise self._damaged(step, error) from error
    if expected is not None:
      for key, value in checksums(restored).items():
        if expected.get(key) != value:
          raise self._damaged(step, f"array {key} is not what was saved")
    return split.state(restored["params"], split.frozen_of(model))

  def extras(self, step: int) -> dict[str, Any]:
    """Returns the extras of a checkpoint; reads no array.

    Raises:
      DamagedCheckpoint: its files are damaged.
    """
    return self._progress(step)["extras"]

  def _progress(self, step: int) -> dict[str, Any]:
    try:
      progress = self._manager.restore(
        step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())
      )["progress"]
      digest = progress.pop("digest", None)
      is_complete = {"learner", "extras"} <= set(progress)
    except Exception as error:  # pylint: disable=broad-except
      raise self._damaged(step, error) from error
    if not is_complete or digest not in (None, _digest(progress)):
      raise self._damaged(step, "progress/metadata is not what was saved")
    return progress

  def _damaged(self, step: int, reason: object) -> DamagedCheckpoint:
    other_steps = [s for s in self.steps() if s != step]
    instead = "the run begins without one"
    if other_steps:
      instead = f"the run resumes from {other_steps[-1]}"
    text = " ".join(str(reason).split())
    return DamagedCheckpoint(
      f"{self.directory / str(step)} is damaged: {text[:300]}; restore it"
      f" from a copy, or delete the directory, after which {instead}"
    )

  def wait(self) -> None:
    """Waits until everything saved is on disk; raises a failed write.

    Raises:
      DeadlineExceeded: it is not there in time.
    """
    self._in_time(self._flush)

  def _flush(self) -> None:
    self._manager.wait_until_finished()
    while self._unsynced:
      step = self.directory / str(self._unsynced.pop())
      if step.is_dir():
        durable.sync_tree(step)
        durable.sync(self.directory)

  def close(self) -> None:
    """Waits, then releases threads."""
    try:
      self.wait()
    finally:
      if not self._hangs:
        self._manager.close()
      self._thread.close()

  def _in_time(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls `fn` within the deadline; once it was missed, not any more."""
    what = f"saving to {self.directory}"
    seconds = self.config.deadline_s
    if not self._hangs:
      try:
        self._thread.run(functools.partial(fn, *args, **kwargs), seconds, what)
        return
      except worker_pool.DeadlineExceeded:
        self._hangs = True
    raise worker_pool.DeadlineExceeded(
      f"{what} took longer than checkpoint.deadline_s={seconds:g} s; is the"
      " disk there, or was the clock set back? The run resumes from the"
      " newest checkpoint that is whole"
    )

  def __enter__(self) -> LearnerCheckpoints:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
