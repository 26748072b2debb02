"""The first signal asks for a stop, and is named; the second ends at once."""

import os
import signal
import threading

import pytest
from tunix.rl.multi_turn.run import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_message_names_the_signal_and_the_second_ends(number, capsys):
  stop = threading.Event()
  before = signal.getsignal(number)
  with pytest.raises(KeyboardInterrupt):
    with interrupts.asked(stop, "stopping"):
      os.kill(os.getpid(), number)
      assert stop.wait(10)
      # The output explains an exit status of 130: a
      # `timeout` around the command, or Ctrl-C.
      assert f"\n{number.name}: stopping; press" in capsys.readouterr().err
      os.kill(os.getpid(), number)
      stop.wait(0.1)
  assert signal.getsignal(number) == before


def test_a_notice_and_the_signal_after_it_are_one_request(capsys):
  stop = threading.Event()
  with interrupts.asked(stop, "stopping"):
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
      os.kill(os.getpid(), number)
      stop.wait(10)
  stderr = capsys.readouterr().err
  assert stderr.count("SIGUSR1: ") == 2 and stderr.count("SIGTERM: ") == 1


def test_a_background_job_s_ignored_ctrl_c_is_ignored_again_afterwards():
  """Shells start background jobs with SIGINT ignored."""
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with interrupts.asked(threading.Event(), "stopping"):
      assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)
