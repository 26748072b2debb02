"""A learner that compiles before its data is there learns the same."""

import threading

import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.learner import update

from tests.learner import learner_cases


def test_what_compiled_ahead_is_what_the_update_runs():
  case = learner_cases.Case()  # Programs of its own: compilations are counted.
  ahead = case.learner()
  before = ahead.parameters()
  assert ahead.compile_ahead()
  assert ahead.compiles == {"accumulate": 1, "apply": 1, "score": 0}
  assert learner_cases.largest_difference(before, ahead.parameters()) == 0
  groups = case.groups(2, 4)
  ahead.update(groups)
  assert ahead.compiles == {"accumulate": 1, "apply": 1, "score": 0}
  # The same bits as of a learner that compiles when its data comes.
  case.programs = {}
  late = case.learner()
  late.update(groups)
  assert learner_cases.largest_difference(
      ahead.parameters(), late.parameters()
  ) == 0


def test_an_open_shape_compiles_nothing(case):
  learner = case.learner(patches=0)
  assert not learner.compile_ahead()
  assert learner.shape is None


def test_a_learner_begins_from_weights_that_came_later(case):
  groups = case.groups(2, 4)
  other, _ = learner_cases.policy(1)
  learner = case.learner()
  learner.begin_from(other)
  wanted = case.learner(model=other)
  assert learner_cases.largest_difference(
      learner.parameters(), wanted.parameters()
  ) == 0
  learner.update(groups)
  wanted.update(groups)
  assert learner_cases.largest_difference(
      learner.parameters(), wanted.parameters()
  ) == 0
  with pytest.raises(ValueError, match="has made 1 updates"):
    learner.begin_from(other)


def test_threads_that_need_one_program_compile_it_once():
  traced, begun = [], threading.Event()

  def slow(x):
    traced.append(x)
    begun.set()
    for _ in range(50):
      x = x * 2 + 1
    return x

  program = update.Program(jax.jit(slow))
  one = np.ones(4, np.float32)
  first = threading.Thread(target=program.prepare, args=(one,))
  first.start()
  begun.wait(30)
  found = program(one)
  first.join(30)
  assert len(traced) == program.compiles == 1
  np.testing.assert_allclose(found, 2.0**51 - 1, rtol=1e-6)
