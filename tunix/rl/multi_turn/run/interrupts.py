"""Turns Ctrl-C, SIGTERM and SIGUSR1 into a request to stop.

The second of a kind, Ctrl-C or SIGTERM, ends at once.

Does not: catch anything in another thread than the main one, where signals
cannot be handled.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import Iterator


@contextlib.contextmanager
def asked(stop: threading.Event, announcement: str) -> Iterator[None]:
  """Sets `stop` at the first signal within the context.

  SIGUSR1 is a notice that SIGTERM follows (SLURM's, before it ends a job); the
  two are one request.

  Args:
    stop: Event that the stages poll.
    announcement: printed then.

  Raises:
    KeyboardInterrupt: at the second of a kind.
  """

  signals = set()

  def interrupt(signum, frame):
    del frame
    if signum in signals and signum != signal.SIGUSR1:
      signal.signal(signum, signal.SIG_DFL)
      raise KeyboardInterrupt
    print(
        f"\n{signal.Signals(signum).name}: {announcement}; press Ctrl-C again"
        " to quit at once",
        file=sys.stderr,
    )
    signals.add(signum)
    stop.set()

  before = {s: signal.signal(s, interrupt) for s in _signals()}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _signals() -> tuple[signal.Signals, ...]:
  if threading.current_thread() is not threading.main_thread():
    return ()
  return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
