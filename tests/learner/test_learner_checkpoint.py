"""Saving and continuing: as if it had never stopped."""

import os
import re
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.net import worker_pool

from tests.learner import learner_cases

CONFIG = dict(minibatches=2, schedule="linear", steps=20, seed=7)


def _batches(case, count):
  return [case.groups(3, 3) for _ in range(count)]


@pytest.mark.parametrize("background", trials.by_default([True], [True, False]))
def test_resumed_training_is_the_same_to_the_bit(case, tmp_path, background):
  data = _batches(case, 4)
  straight = case.learner(**CONFIG)
  want = [straight.update(groups) for groups in data]

  first = case.learner(**CONFIG)
  with checkpoint.LearnerCheckpoints(
    tmp_path, background=background
  ) as checkpoints:
    for groups in data[:2]:
      first.update(groups)
    assert checkpoints.save(first, {"sampler": [1, 2], "at": "x"}) == 2
    # Goes on at once: the save has its own copy.
    first.update(data[2])

  second = case.learner(**CONFIG)
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    assert checkpoints.restore(second) == {"sampler": [1, 2], "at": "x"}
  assert second.version == 2
  assert second.counters.optimizer_steps == 4
  got = [second.update(groups) for groups in data[2:]]
  for a, b in zip(got, want[2:], strict=True):
    for name in ("loss", "grad_norm", "learning_rate", "version"):
      assert a[name] == b[name]
  assert (
    learner_cases.largest_difference(second.parameters(), straight.parameters())
    == 0
  )


def test_the_automatic_shape_comes_back(case, tmp_path):
  learner = case.learner(patches=0, targets=0)
  learner_cases.pack(learner, case.groups(1, 2))
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(learner)
    other = case.learner(patches=0, targets=0)
    checkpoints.restore(other)
  assert other.shape == learner.shape is not None


def test_a_stored_shape_that_some_row_would_not_fit_is_not_taken(case):
  learner = case.learner(patches=0, targets=0)
  learner_cases.pack(learner, case.groups(1, 2))
  progress = learner.progress()
  for name, value in (("patches", 32), ("targets", 48), ("row_length", 32)):
    small = progress | {"shape": progress["shape"] | {name: value}}
    other = case.learner(patches=0, targets=0)
    other.load(other.arrays(), small)
    assert other.shape is None, name


def test_the_shape_of_the_configuration_wins_over_a_stored_one(case):
  learner = case.learner(patches=64, targets=64)
  other = case.learner(patches=96, targets=80)
  other.load(other.arrays(), learner.progress())
  assert (other.shape.patches, other.shape.targets) == (96, 80)


def test_only_the_newest_are_kept_and_any_of_them_restored(case, tmp_path):
  learner = case.learner()
  versions = {}
  with checkpoint.LearnerCheckpoints(
    tmp_path, checkpoint.CheckpointConfig(keep=2)
  ) as checkpoints:
    for groups in _batches(case, 3):
      learner.update(groups)
      checkpoints.save(learner)
      versions[learner.version] = learner.parameters()
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    with pytest.raises(ValueError, match="version 3"):
      checkpoints.save(learner)
    checkpoints.restore(learner, 2)
    assert learner.version == 2
    assert (
      learner_cases.largest_difference(learner.parameters(), versions[2]) == 0
    )
    with pytest.raises(FileNotFoundError, match=r"\[2, 3\]"):
      checkpoints.restore(learner, 1)


def test_what_does_not_fit_is_refused(case, tmp_path):
  learner = case.learner()
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
      checkpoints.restore(learner)
    checkpoints.save(learner)
    checkpoints.wait()
    other = case.learner(seed=3)
    before = other.parameters()
    with pytest.raises(ValueError, match="seed 0"):
      checkpoints.restore(other)
    assert learner_cases.largest_difference(before, other.parameters()) == 0
  with pytest.raises(ValueError, match="keep"):
    checkpoint.CheckpointConfig(keep=0)


def test_an_interrupted_save_leaves_the_last_complete_one(case, tmp_path):
  learner = case.learner()
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(learner)
  # What a killed process leaves behind: a directory under a temporary name.
  half = tmp_path / "5.orbax-checkpoint-tmp"
  half.mkdir()
  (half / "garbage").write_bytes(np.arange(9).tobytes())
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    assert checkpoints.steps() == [0]
    checkpoints.restore(learner)


def test_any_flipped_bit_and_any_two_places_exchanged_change_the_checksum():
  for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8):
    array = np.array(jnp.arange(1, 25).reshape(2, 3, 4), dtype)
    (plain,) = checkpoint.checksums({"a": jnp.array(array)}).values()
    raw = array.view(np.uint8).reshape(-1)
    for bit in range(8 * raw.size):
      raw[bit // 8] ^= 1 << bit % 8
      (other,) = checkpoint.checksums({"a": jnp.array(array)}).values()
      raw[bit // 8] ^= 1 << bit % 8
      assert other != plain, (dtype, bit)
    swapped = array.copy()
    swapped[0, 0, 0], swapped[1, 2, 3] = array[1, 2, 3], array[0, 0, 0]
    (other,) = checkpoint.checksums({"a": jnp.array(swapped)}).values()
    assert other != plain


@pytest.fixture(name="saved")
def _saved(case, tmp_path):
  """The files of a checkpoint, and the learner that saved it."""
  learner = case.learner()
  learner.update(case.groups(3, 3))
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(learner, {"sampler": {3: (1, 2), 10: 4}})
  files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
  return learner, tmp_path, files


@pytest.mark.slow
def test_damage_is_named_and_never_restored(saved):
  """Of every file of it, cut in half, emptied, and with a flipped bit."""
  learner, directory, files = saved
  named = {}
  for path, data in files.items():
    if not data:
      continue
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
    for kind, damaged in (
      ("flipped", flipped),
      ("cut", data[:middle]),
      ("empty", b""),
    ):
      path.write_bytes(damaged)
      before = learner.parameters()
      try:
        with checkpoint.LearnerCheckpoints(directory) as checkpoints:
          checkpoints.restore(learner)
      except checkpoint.DamagedCheckpoint as error:
        message = str(error)
        assert re.search(r"/1 is damaged: .*; restore it from a copy", message)
        assert len(message.splitlines()) == 1 and len(message) < 800
        named[path.name, kind] = message
      else:  # A file that nothing is read from.
        after = learner.parameters()
        assert learner_cases.largest_difference(before, after) == 0
      path.write_bytes(data)
  assert {"metadata", "manifest.ocdbt"} <= {name for name, _ in named}
  largest = max(files, key=lambda p: len(files[p])).name
  assert (largest, "flipped") in named and (largest, "cut") in named


def test_a_checkpoint_is_on_the_disk_when_wait_returns(
  case, tmp_path, monkeypatch
):
  """Its groups are let go then."""
  synced = set()
  fsync = os.fsync
  monkeypatch.setattr(
    os,
    "fsync",
    lambda f: (synced.add(os.readlink(f"/proc/self/fd/{f}")), fsync(f)),
  )
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(case.learner())
    checkpoints.wait()
    expected = {str(p) for p in (tmp_path / "0").rglob("*")}
    assert expected | {str(tmp_path)} <= synced


def test_a_disk_that_hangs_ends_a_save_in_time(case, tmp_path, monkeypatch):
  hangs = threading.Event()
  monkeypatch.setattr(checkpoint.durable, "sync_tree", lambda _: hangs.wait(60))
  learner = case.learner(**CONFIG)
  config = checkpoint.CheckpointConfig(deadline_s=2.0)
  checkpoints = checkpoint.LearnerCheckpoints(tmp_path, config)
  try:
    checkpoints.save(learner)
    started = time.monotonic()
    words = re.escape(f"{tmp_path} took longer than checkpoint.deadline_s=2 s")
    for end in (checkpoints.wait, checkpoints.close):
      with pytest.raises(worker_pool.DeadlineExceeded, match=words):
        end()
    assert time.monotonic() - started < 5
  finally:
    hangs.set()
