"""Cloning: what is learned from, and what happens to what cannot be shown."""

import itertools
import types

import numpy as np
import pytest
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.run.warm_start import stage


class Recorder:
  """A learner that notes its batches."""

  def __init__(self):
    self.batches = []

  def update_on_sequences(self, sequences):
    self.batches.append(list(sequences))
    return {"loss": 1.0}


def clone(play, seed=0, first_step=0, **settings):
  learner = Recorder()
  fields = {"steps": 4, "batch_size": 8, "demonstrations": 16, **settings}
  stage.clone(
    learner,
    play,
    itertools.count(),
    run_sections.WarmStartConfig(**fields),
    longest=10,
    seed=seed,
    observers=events.Observers(),
    first_step=first_step,
  )
  return learner.batches


class Sequence(int):
  """The number of its task."""

  length = 10

  def __len__(self):
    return self.length


class LongSequence(Sequence):
  length = 11


def shown(task, kind=Sequence):
  return types.SimpleNamespace(sequences=(Sequence(task), kind(task)))


def test_demonstrations_are_played_once_and_drawn_again():
  played = []

  def play(pairs):
    played.extend(pairs)
    return [shown(task) for task, _ in pairs]

  batches = clone(play)
  assert played == [(i, i) for i in range(16)]
  assert [len(b) for b in batches] == [16] * 4
  assert set(batches[0]) <= set(range(8))
  assert max(itertools.chain(*batches)) > 7
  assert clone(play) == batches != clone(play, seed=1)


def test_what_was_done_before_leaves_the_batches_as_they_are():
  play = lambda pairs: [shown(task) for task, _ in pairs if task % 8]
  complete = clone(play)
  assert clone(play, first_step=3) == complete[3:]
  assert clone(play, first_step=4) == []


def test_tasks_that_cannot_be_shown_are_left_out():
  tried = []

  def play(pairs):
    tried.extend(seed for _, seed in pairs)
    return [shown(task) for task, _ in pairs if task % 8]

  batches = clone(play)
  assert tried == list(range(16))
  assert not set(itertools.chain(*batches)) & {0, 8}


def test_an_oracle_that_mostly_fails_ends_the_cloning():
  with pytest.raises(RuntimeError, match="4 of 8 tasks.*warm_start.steps=0"):
    clone(lambda pairs: [shown(t) for t, _ in pairs if t % 2 == 0])
  assert np.isclose(1 - stage._LEFT_OUT_AT_MOST, 0.8)


def test_demonstrations_too_long_for_the_policy_are_left_out():
  kinds = {1: LongSequence, 9: LongSequence}
  batches = clone(
    lambda pairs: [shown(t, kinds.get(t, Sequence)) for t, _ in pairs]
  )
  assert not set(itertools.chain(*batches)) & {1, 9}
  assert max(itertools.chain(*batches)) > 9
  with pytest.raises(
    RuntimeError, match="8 of 8 demonstrations.*10 tokens; raise engine"
  ):
    clone(lambda pairs: [shown(1, LongSequence) for _ in pairs])
