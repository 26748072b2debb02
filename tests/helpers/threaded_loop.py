"""Collecting loops in threads of their own."""

import asyncio
import threading

from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.net import concurrency


class ThreadedLoop(tc.CollectLoop):
  """A loop that `start` runs beside the test's thread."""

  def start(self):
    self._thread = threading.Thread(target=self._main, daemon=True)
    self._thread.start()

  def _main(self):
    try:
      asyncio.run(self.run())
    except Exception:  # pylint: disable=broad-except
      pass  # The queue's consumer has it.
    except BaseException as error:  # pylint: disable=broad-except
      self._queue.fail(concurrency.ExitRaised(concurrency.describe(error)))

  def join(self, timeout):
    """Whether the loop has ended in time."""
    self._thread.join(timeout)
    return not self._thread.is_alive()
