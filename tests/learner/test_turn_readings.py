"""Gap and entropy by turn and by images, against sums made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.core.statistics import turn_groups
from tunix.rl.multi_turn.learner import readings


def test_numbers_are_grouped():
  numbers = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 500]
  groups = [turn_groups.NAMES[g] for g in turn_groups.group_of(numbers)]
  assert groups == [
      "00", "01", "02", "03-04", "03-04", "05-08", "05-08", "09-16", "09-16",
      "17-32", "17-32", "33+", "33+",
  ]  # fmt: skip
  assert list(turn_groups.NAMES) == sorted(turn_groups.NAMES)


def test_images_before_a_token_are_counted(case):
  sequence = case.sequence(
    [
      ("text", case.text(2)),
      ("image", case.image()),
      ("sampled", case.text(2)),
      ("image", case.image()),
      ("sampled", case.text(1)),
    ],
    turn=4,
  )
  by_images = turn_groups.tokens_T(sequence, "images")
  assert by_images[:2].tolist() == [0, 0]
  assert by_images[sequence.loss_mask].tolist() == [1, 1, 2]
  assert set(turn_groups.tokens_T(sequence, "turn")) == {
    turn_groups.NAMES.index("05-08")
  }


@pytest.mark.parametrize("minibatches", (1, 2))
def test_a_learners_readings_are_the_means_of_their_groups(case, minibatches):
  """Turns 1 to 4 of real sequences; the learner's own log-probs judge."""
  groups = case.groups(turns=4)
  learner = case.learner(advantage="dr_grpo", minibatches=minibatches)
  sequences = [s for g in groups for t in g.valid for s in t.sequences]
  logprobs = learner.sequence_logprobs(sequences)
  metrics = learner.update(groups)
  for by in turn_groups.BY:
    gaps = {}
    for sequence, now in zip(sequences, logprobs):
      mask = sequence.loss_mask
      moved = (now - sequence.logprobs)[mask]
      of_token = turn_groups.tokens_T(sequence, by)[mask]
      for group, d in zip(of_token, moved):
        gaps.setdefault(turn_groups.NAMES[group], []).append(np.expm1(d) - d)
    start = f"sampler_kl_by_{by}/"
    readings = {
      k.removeprefix(start): v
      for k, v in metrics.items()
      if k.startswith(start)
    }
    if len(gaps) < 2:
      assert not readings
      continue
    assert set(readings) == set(gaps)
    if minibatches == 1:  # Steps of other sizes weigh the same.
      for name, values in gaps.items():
        assert readings[name] == pytest.approx(np.mean(values), rel=1e-4)
  assert {k for k in metrics if k.startswith("entropy_by_turn/")} == {
    "entropy_by_turn/01",
    "entropy_by_turn/02",
    "entropy_by_turn/03-04",
  }
  assert not [k for k in metrics if "turn_group" in k]


def test_one_group_alone_has_no_readings(case):
  metrics = case.learner(advantage="dr_grpo").update(case.groups(turns=1))
  assert "sampler_kl" in metrics and not [k for k in metrics if "_by_" in k]


def test_padding_counts_nowhere():
  """A token outside the mask may hold anything, and another group's number."""
  stream = jnp.array([[0.0, 9.0, 9.0]])
  values = jnp.array([[1.0, 2.0, jnp.nan]])
  mask = jnp.array([[True, True, False]])
  got = jax.jit(readings.turn_sums)(stream, mask, (values, values))
  np.testing.assert_array_equal(got[0, 0], [1, 1, 0, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(got[1, 1], [1, 2, 0, 0, 0, 0, 0, 0])
