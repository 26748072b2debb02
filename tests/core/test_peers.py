"""Processes that agree, here threads with one store."""

import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import peer_threads
import pytest
from tunix.rl.multi_turn.net import peers as peers_lib


@settings(max_examples=20, deadline=None)
@given(
  st.integers(2, 4),
  st.lists(st.lists(st.integers() | st.text(), max_size=3), max_size=4),
)
def test_all_get_everyone_s_values_at_every_step(count, values):
  store = peer_threads.Store()

  def work(peers):
    return [
      peers.gather(f"step {i}", [peers.index, value])
      for i, value in enumerate(values)
    ]

  want = [[[i, value] for i in range(count)] for value in values]
  assert peer_threads.run_all(count, work, store) == [want] * count
  assert store.most <= 2 * count  # What all have read is deleted.


def test_values_may_be_larger_than_a_message():
  big = "x" * (5 << 20)
  results = peer_threads.run_all(
    2, lambda peers: peers.gather("big", big + str(peers.index))
  )
  assert results[0] == results[1] == [big + "0", big + "1"]


def test_flags_shares_and_the_first():
  def work(peers):
    return (
      peers.any("a", peers.index == 1),
      peers.any("b", False),
      peers.of_first("c", f"of {peers.index}"),
      list(peers.share("abcdefg")),
      [peers.number(i) for i in range(2)],
      peers.first,
    )

  results = peer_threads.run_all(3, work)
  for i, (a, b, c, share, numbers, first) in enumerate(results):
    assert (a, b, c, first) == (True, False, "of 0", i == 0)
    assert share == list("abcdefg")[i::3]
    assert numbers == [i, i + 3]


def test_a_process_at_another_step_is_named():
  for i, error in enumerate(
    peer_threads.run_all(
      2, lambda peers: peers.gather(f"step {peers.index}", None)
    )
  ):
    assert isinstance(error, RuntimeError)
    words = f"'step {i}' where process {1 - i} is at 'step {1 - i}'"
    assert words in str(error)


def test_a_process_that_does_not_come_is_named_in_time():
  store = peer_threads.Store()
  peers = peers_lib.StorePeers(store, 0, 2, deadline_s=0.2)
  started = time.monotonic()
  with pytest.raises(TimeoutError, match="process 1 did not come to 'take'"):
    peers.gather("take", 1)
  assert time.monotonic() - started < 5


def test_work_that_fails_in_one_fails_in_all():
  def work(peers):
    def fail_in_one():
      if peers.index == 1:
        raise ValueError("no\nroom")
      return peers.index

    try:
      peers.together("work", fail_in_one)
    finally:
      # All are still in step.
      assert peers.together("after", lambda: peers.index) == [0, 1, 2]

  first, own, last = peer_threads.run_all(3, work)
  assert isinstance(own, ValueError) and str(own) == "no\nroom"
  for error in (first, last):
    assert isinstance(error, peers_lib.PeerError)
    assert str(error) == "process 1: ValueError: no room"
    assert error.kind == "ValueError"


def test_a_note_is_found_by_the_others_without_a_step():
  def work(peers):
    if peers.index == 1:
      peers.announce(peers_lib.STOP, "a word")
      peers.announce(peers_lib.STOP, "and no other")
    peers.gather("after", None)
    return peers.announced(peers_lib.STOP), peers.announced("another")

  assert peer_threads.run_all(3, work) == [
    ({1: "a word"}, {}),
    ({}, {}),
    ({1: "a word"}, {}),
  ]


def test_who_waits_for_a_process_that_failed_ends_with_its_reason():
  def work(peers):
    if peers.index == 1:
      error = MemoryError("no room on the device")
      assert peers.part(error) and peers.parted
      raise error
    peers.gather("never", None)

  started = time.monotonic()
  for i, error in enumerate(peer_threads.run_all(3, work, deadline_s=60.0)):
    if i != 1:
      assert isinstance(error, peers_lib.PeerEnded)
      words = "process 1 failed: MemoryError: no room on the device"
      assert (str(error), error.kind) == (words, "MemoryError")
  assert time.monotonic() - started < 20


def test_an_error_that_all_have_parts_nobody():
  def work(peers):
    def fail_in_one():
      if peers.index == 1:
        raise ValueError("no")

    try:
      peers.together("work", fail_in_one)
    except (ValueError, peers_lib.PeerError) as error:
      assert not peers.part(error)
      try:
        raise RuntimeError("in other words") from error
      except RuntimeError as other:
        assert not peers.part(other)
    peers.gather("still in step", None)
    return peers.announced(peers_lib.FAILED)

  assert peer_threads.run_all(2, work) == [{}, {}]
  assert not peers_lib.ALONE.part(ValueError("of one process"))


def test_alone_nothing_is_exchanged():
  alone = peers_lib.ALONE
  thing = object()
  assert alone.gather("x", thing) == [thing]
  assert alone.together("x", lambda: thing) == [thing]
  assert list(alone.share("abc")) == list("abc") and alone.number(7) == 7
  with pytest.raises(KeyError):
    alone.together("x", lambda: {}[1])
