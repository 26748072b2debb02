"""Contains what called code raises, so that no `sys.exit()` in it ends a run.

asyncio passes SystemExit and KeyboardInterrupt of a task out of its event loop,
and `except Exception` lets every other BaseException through. Code that calls
an environment, an agent, a parser, a reward, a tool or a model does so inside
`contained()`, which turns each of them into an Exception.

Does not: contain exits of tasks that the called code starts for itself. They
leave the event loop and reach any code that awaits such a task; a loop of
`run_forever` survives them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

_LOG = logging.getLogger(__name__)


class ExitRaised(RuntimeError):
  """Called code raised something other than an Exception; see `__cause__`.

  SystemExit, KeyboardInterrupt, GeneratorExit, a CancelledError that no caller
  asked for, or any other BaseException; the message holds its kind and text.
  """


def describe(error: BaseException) -> str:
  """Kind and text of an exception, also of one whose text cannot be had."""
  kind = type(error).__name__
  try:
    text = str(error)
  except BaseException as other:  # pylint: disable=broad-except
    text = f"<its text raised {type(other).__name__}>"
  if isinstance(error, ExitRaised):
    return text
  return f"{kind}: {text}" if text else kind


def is_own_cancellation() -> bool:
  """Whether a CancelledError, just caught, is the awaited code's own doing.

  Passed on, it would look like a cancellation of the task that awaited it.
  """
  task = _current_task()
  return task is not None and not task.cancelling()


class contained:  # pylint: disable=invalid-name
  """A context that lets only Exceptions and the caller's own exits out.

  The caller's own are a cancellation of its task, the GeneratorExit of a
  coroutine that is being closed, and a KeyboardInterrupt in the main thread,
  where Ctrl-C arrives. All else becomes an `ExitRaised`.
  """

  def __init__(self, what: str = ""):
    """Args:

    what: names the call in the error of one that cancels itself.
    """
    self._what = what or "the called code"
    self._task: asyncio.Task[Any] | None = None

  def __enter__(self) -> None:
    self._task = _current_task()

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    tb: object,
  ) -> None:
    if error is None or isinstance(error, Exception):
      return
    if isinstance(error, asyncio.CancelledError):
      if self._task is None or is_own_cancellation():
        raise ExitRaised(f"{self._what} cancelled itself") from None
      return
    if isinstance(error, GeneratorExit):
      # A coroutine is closed while its task does not run.
      if self._task is not None and self._task is not _current_task():
        return
    elif isinstance(error, KeyboardInterrupt):
      if threading.current_thread() is threading.main_thread():
        return
    raise ExitRaised(describe(error)) from error


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
  """Runs an event loop until it is stopped, through exits of its tasks.

  For threads other than the main one. An exit that a task raises is set on that
  task, so that its awaiter has it; the loop's other callbacks are kept.
  """
  while True:
    try:
      loop.run_forever()
      return
    except (SystemExit, KeyboardInterrupt) as error:
      _LOG.warning(
        "a task of called code raised %s; the event loop continues",
        describe(error),
      )


def _current_task() -> asyncio.Task[Any] | None:
  try:
    return asyncio.current_task()
  except RuntimeError:  # No event loop runs in this thread.
    return None
