"""A learner that compiles before its data has come learns the same."""

import gc
import threading
import weakref

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.learner import program as program_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

from tests.learner import learner_cases


def test_what_compiled_ahead_is_what_the_update_runs():
  case = learner_cases.Case()  # Programs of its own: compilations are counted.
  compiled_first = case.learner()
  before = compiled_first.parameters()
  assert compiled_first.compile_ahead()
  assert compiled_first.compiles == {"accumulate": 1, "apply": 1, "score": 0}
  after = compiled_first.parameters()
  assert learner_cases.largest_difference(before, after) == 0
  groups = case.groups(2, 4)
  compiled_first.update(groups)
  assert compiled_first.compiles == {"accumulate": 1, "apply": 1, "score": 0}
  # The same bits as of a learner that compiles when its data comes.
  case.programs = {}
  late = case.learner()
  late.update(groups)
  assert (
    learner_cases.largest_difference(
      compiled_first.parameters(), late.parameters()
    )
    == 0
  )


def test_an_open_shape_compiles_nothing(case):
  learner = case.learner(patches=0)
  assert not learner.compile_ahead()
  assert learner.shape is None


def test_a_learner_begins_from_weights_that_came_later(case):
  groups = case.groups(2, 4)
  other, _ = learner_cases.policy(1)
  learner = case.learner()
  learner.begin_from(other)
  expected = case.learner(model=other)
  assert (
    learner_cases.largest_difference(
      learner.parameters(), expected.parameters()
    )
    == 0
  )
  learner.update(groups)
  expected.update(groups)
  assert (
    learner_cases.largest_difference(
      learner.parameters(), expected.parameters()
    )
    == 0
  )
  with pytest.raises(ValueError, match="has made 1 updates"):
    learner.begin_from(other)


@pytest.mark.parametrize(
  "settings",
  trials.by_default(
    [],
    [
      dict(kl_coef=0.1, kl_target=0.1),
      dict(value_warmup=1, advantage="gae"),
      dict(epochs=2, importance="tis"),
    ],
    unlike=[dict(value_warmup=1, advantage="gae")],
  ),
  ids=lambda settings: next(iter(settings)),
)
def test_shapes_compile_the_programs_of_an_update(settings):
  case = learner_cases.Case()
  if "kl_coef" in settings:
    settings = settings | dict(reference=case.model)
  compiled_first = case.learner(**settings)
  assert compiled_first.compile_ahead()
  compiled = {k: v for k, v in compiled_first.compiles.items() if k != "value"}
  compiled_first.update(case.groups(2, 4))
  assert {k: compiled_first.compiles[k] for k in compiled} == compiled


@pytest.mark.slow
def test_shapes_compile_the_scores_of_rounded_masters():
  model, processor, _ = checkpoint.create_policy("nano", seed=0, layers=1)
  nnx.update(
    model,
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)),
  )
  case = learner_cases.Case(own=(model, processor))
  compiled_first = case.learner(kl_coef=0.1, reference=model)
  assert compiled_first.compile_ahead()
  compiled = compiled_first.compiles
  assert compiled == {"accumulate": 1, "apply": 1, "score": 1}
  compiled_first.update(case.groups(2, 4))
  assert compiled_first.compiles == compiled


def test_compiling_pins_no_array_and_bears_that_an_update_donates_them(
  monkeypatch,
):
  case = learner_cases.Case()
  learner = case.learner()
  lower, begun, go = (
    program_lib.Program.lower,
    threading.Event(),
    (threading.Event()),
  )

  def held(self, *args):
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(args))
    begun.set()
    assert go.wait(60)
    return lower(self, *args)

  monkeypatch.setattr(program_lib.Program, "lower", held)
  results = []
  thread = threading.Thread(
    target=lambda: results.append(learner.compile_ahead())
  )
  thread.start()
  assert begun.wait(60)
  for x in jax.tree.leaves(learner.arrays()):
    x.delete()  # As an update's donation does.
  go.set()
  thread.join(120)
  assert results == [True]


@pytest.mark.slow
def test_weights_of_before_are_gone_when_new_ones_are_made(monkeypatch):
  case = learner_cases.Case()
  learner = case.learner(kl_coef=0.1, reference=case.model)
  old = [weakref.ref(x) for x in jax.tree.leaves(learner.arrays())]
  old += [weakref.ref(x) for x in learner._referred().values()]
  masters, alive = learner._programs.masters, []

  def made(params):
    gc.collect()
    alive.extend(x for x in old if x() is not None)
    return masters(params)

  monkeypatch.setattr(learner._programs, "masters", made)
  other, _ = learner_cases.policy(1)
  learner.begin_from(other, other)
  assert old and not alive


def test_refused_weights_leave_the_learner_as_it_was(case):
  learner = case.learner(kl_coef=0.1, reference=case.model)
  before = learner.parameters()
  with pytest.raises(ValueError, match="needs a reference"):
    learner.begin_from(learner_cases.policy(1)[0])
  assert learner_cases.largest_difference(before, learner.parameters()) == 0


def test_threads_that_need_one_program_compile_it_once():
  traced, begun = [], threading.Event()

  def slow(x):
    traced.append(x)
    begun.set()
    for _ in range(50):
      x = x * 2 + 1
    return x

  program = program_lib.Program(jax.jit(slow))
  one = np.ones(4, np.float32)
  first = threading.Thread(target=program.prepare, args=(one,))
  first.start()
  begun.wait(30)
  results = program(one)
  first.join(30)
  assert len(traced) == program.compiles == 1
  np.testing.assert_allclose(results, 2.0**51 - 1, rtol=1e-6)
