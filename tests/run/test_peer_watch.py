"""A process notices the failures and stops of other processes."""

import threading

import peer_threads
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.run.multiprocess import peer_watch


def test_a_stop_of_one_is_a_stop_of_all(capsys):
  stops = [threading.Event() for _ in range(3)]
  stops[1].set()

  def work(peers):
    watch = peer_watch.PeerWatch(peers, stops[peers.index], poll_s=0.01)
    watch.start()
    stopped = stops[peers.index].wait(20)
    peers.gather("seen", None)
    watch.close()
    return stopped

  assert peer_threads.run_all(3, work) == [True] * 3
  assert "process 1 was asked to stop" in capsys.readouterr().err


def test_who_hangs_after_another_s_failure_is_ended_with_the_reason(capsys):
  ended = threading.Event()
  statuses = {}

  def work(peers):
    def end(status):
      statuses[peers.index] = status
      ended.set()

    if peers.index == 0:
      watch = peer_watch.PeerWatch(
        peers, threading.Event(), poll_s=0.01, grace_s=0.05, end=end
      )
      watch.start()
      assert ended.wait(20)  # As in a program of all devices.
    else:
      peers.part(MemoryError("no room"))

  assert peer_threads.run_all(2, work) == [None, None]
  assert statuses == {0: 1}
  assert "process 1 failed: MemoryError: no room" in capsys.readouterr().err


def test_a_run_of_one_watches_nothing():
  watch = peer_watch.PeerWatch(peers_lib.ALONE, threading.Event(), poll_s=0.01)
  before = threading.active_count()
  watch.start()
  assert threading.active_count() == before
  watch.close()
