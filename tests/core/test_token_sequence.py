"""A token sequence that breaks its contract cannot be built."""

import numpy as np
import pytest
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import token_sequence

GOOD = dict(
  tokens=[5, 6, 7],
  loss_mask=[False, True, True],
  logprobs=[0.0, -0.5, -1.0],
  versions=[-1, 0, 1],
  turn_ids=[0, 0, 0],
)


@pytest.mark.parametrize(
  "change, problem",
  [
    (dict(logprobs=[0.0, np.nan, -1.0]), "logprobs must be finite"),
    (dict(logprobs=[0.0, -np.inf, -1.0]), "logprobs must be finite"),
    (dict(logprobs=[0.0, 0.1, -1.0]), "logprobs must be <= 0"),
    (dict(logprobs=[-0.1, -0.5, -1.0]), "not sampled carries a log-prob"),
    (dict(logprobs=[0.0, -0.5]), "logprobs has 2 entries for 3 tokens"),
    (dict(tokens=[5, -6, 7]), "negative id"),
    (dict(tokens=[[5, 6, 7]]), "tokens must be 1-D"),
    (dict(versions=[0, 0, 1]), "version"),
    (dict(versions=[-1, -1, 1]), "version"),
    (dict(entropies=[0.0, np.nan, 0.2]), "entropies must be finite"),
    (dict(entropies=[0.0, -0.1, 0.2]), "entropies must be >= 0"),
    (dict(entropies=[0.1, 0.1, 0.2]), "not sampled carries an entropy"),
  ],
)
def test_what_breaks_the_contract_is_named(change, problem):
  with pytest.raises(ValueError, match=problem):
    token_sequence.TokenSequence(**{**GOOD, **change})


def test_a_trimmed_token_keeps_no_support():
  sequence = token_sequence.TokenSequence(
    **GOOD, support=[[-1, -1], [6, 9], [7, -1]]
  )
  trimmed = sequence.trimmed(1)
  assert trimmed.loss_mask.tolist() == [False, False, True]
  assert trimmed.support.tolist() == [[-1], [-1], [7]]
  assert sequence.support.tolist() == [[-1, -1], [9, 6], [7, -1]]
  assert token_sequence.TokenSequence.from_json(trimmed.to_json()) == trimmed
  assert sequence.trimmed(2).support.tolist() == [[-1], [-1], [-1]]


@pytest.mark.parametrize(
  "change, problem",
  [
    (dict(tokens=[[5, 6]]), r"tokens must be 1-D, got shape \(1, 2\)"),
    (dict(entropies=[[0.1], [0.2]]), "Completion.entropies must be 1-D"),
    (dict(support=[5, 6]), "Completion.support must be 2-D"),
  ],
)
def test_a_completion_has_the_axes_that_it_documents(change, problem):
  fields = dict(
    tokens=[5, 6],
    logprobs=[-1.0, -2.0],
    versions=[0, 0],
    finish_reason=policy_client.FinishReason.STOP,
  )
  policy_client.Completion(**fields)
  with pytest.raises(ValueError, match=problem):
    policy_client.Completion(**{**fields, **change})
