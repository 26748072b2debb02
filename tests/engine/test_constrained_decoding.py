"""Constraints of completions, without an engine."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
from tunix.rl.multi_turn.engine import constrained_decoding


def allowed(grammar, vocabulary):
  """The ids that may come next."""
  words = grammar.allowed()
  assert words.dtype == np.uint32 and len(words) == -(-vocabulary // 32)
  bits = np.unpackbits(words.view(np.uint8), bitorder="little")
  return set(np.flatnonzero(bits).tolist())


@given(
  vocabulary=st.integers(2, 100),
  least=st.integers(1, 5),
  stops=st.lists(st.integers(0, 200), max_size=4),
)
def test_min_tokens_allows_all_but_stops_and_then_all(vocabulary, least, stops):
  grammar = constrained_decoding.MinTokens(least, stops, vocabulary)
  everything = set(range(vocabulary))
  for token in range(least + 2):
    banned = set(stops) if token < least else set()
    assert allowed(grammar, vocabulary) == everything - banned
    grammar.advance(token)
