"""The longest stored beginning of a sequence, compared with a slow search."""

from agent_services.serving.sessions import interactions
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

_TEXTS = st.text("ab", max_size=8).map(str.encode)


@settings(deadline=None, max_examples=300)
@given(
  sequences=st.lists(_TEXTS, max_size=12), queries=st.lists(_TEXTS, min_size=1)
)
def test_the_longest_beginning_is_found_and_of_equal_ones_the_newest(
  sequences, queries
):
  prefixes = interactions.Prefixes[int]()
  for i, text in enumerate(sequences, 1):
    half = len(text) // 2
    grown = interactions.RunningHash().extended(text[:half], b"")
    grown = grown.extended(text[half:])
    assert grown.length == len(text)
    prefixes.add(grown, i)
  for text in queries:
    best = max(
      ((len(k), i) for i, k in enumerate(sequences, 1) if text.startswith(k)),
      default=(0, None),
    )
    assert prefixes.longest(text) == (best[1], best[0])


def test_extending_a_copy_leaves_the_sequence_alone():
  one = interactions.RunningHash().extended(b"ab")
  before = one.digest()
  assert one.extended(b"c").digest() != before == one.digest()
  assert one.extended(b"").digest() == before
