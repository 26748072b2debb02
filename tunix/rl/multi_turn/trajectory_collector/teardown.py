"""The end of an episode: the policy's session released, the environment closed.

Promises: both are tried under their own deadline, whatever went wrong before
and even if the caller is cancelled meanwhile; an environment with a call that
could not be stopped is left alone until that call returns, and closed then.
Failures are reported as faults, never raised.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Callable

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.trajectory_collector import adapters
from tunix.rl.multi_turn.trajectory_collector import deadlines

FaultFn = Callable[[str, str, str], None]
"""(stage, kind, message) -> None."""

# Cleanups that outlived the task that asked for them; asyncio itself holds
# tasks weakly.
_BACKGROUND: set[asyncio.Future[Any]] = set()


async def run(
    env: Any,
    session: Any,
    *,
    runner: deadlines.CallRunner,
    limit: float,
    inline: bool,
    stuck: deadlines.StuckCall | None,
    fault: FaultFn,
) -> dict[str, float]:
  """Cleans up after an episode.

  Args:
    env: closed if it has a `close`.
    session: with `sessions()` to be released by `release(name)`, or None.
    runner: runs the calls.
    limit: seconds for each of them.
    inline: the environment is cheap, see the engine.
    stuck: a call into the environment that still runs.
    fault: told about failures.

  Returns:
    Metrics: `close_failed` and `quarantined`, 1 where it happened.

  Raises:
    asyncio.CancelledError: the caller was cancelled; the cleanup goes on by
      itself.
  """
  close = getattr(env, "close", None)
  names = session.sessions() if session is not None else []
  if not names and stuck is None and close is not None:
    if inline and not deadlines.is_async(close):
      # The fast way, without a task.
      try:
        result = close()
      except (Exception, asyncio.CancelledError) as e:  # pylint: disable=broad-except
        # Nothing was awaited: a cancellation is close's own.
        fault("close", "EnvCloseError", adapters.describe(e))
        return {"close_failed": 1}
      if not inspect.isawaitable(result):
        return {}
      close = lambda: result
  return await concurrency.to_the_end(
      _release_and_close(
          env, close, session, names, runner, limit, inline, stuck, fault
      )
  )


async def _release_and_close(
    env, close, session, names, runner, limit, inline, stuck, fault
) -> dict[str, float]:
  for name in names:
    try:
      await runner.call(session.release, name, limit=limit)
    except Exception as e:  # pylint: disable=broad-except
      fault("release", type(e).__name__, adapters.describe(e))
  if close is None:
    return {}
  if stuck is not None:
    fault(
        "close",
        "Quarantined",
        f"{stuck.description} did not stop; {type(env).__name__} stays open"
        " until it returns",
    )
    _close_later(env, close, runner, limit, stuck, fault)
    return {"quarantined": 1}
  return await _close(env, close, runner, limit, inline, fault)


async def _close(env, close, runner, limit, inline, fault) -> dict[str, float]:
  try:
    await runner.call(close, limit=limit, inline=inline)
    return {}
  except deadlines.CallTimeout:
    fault(
        "close",
        "EnvCloseTimeout",
        f"{type(env).__name__}.close took longer than {limit:g} s"
        " (deadlines.close)",
    )
  except Exception as e:  # pylint: disable=broad-except
    fault("close", "EnvCloseError", adapters.describe(e))
  return {"close_failed": 1}


def _close_later(env, close, runner, limit, stuck, fault) -> None:
  """Closes the environment when its stuck call comes back, if ever."""
  loop = asyncio.get_running_loop()

  def start():
    _keep(loop.create_task(_close(env, close, runner, limit, False, fault)))

  def returned():
    try:
      loop.call_soon_threadsafe(start)
      return
    except RuntimeError:
      pass  # The loop is gone; close where the call returned.
    if deadlines.is_async(close):
      fault("close", "Abandoned", "the event loop ended before the stuck call")
      return
    try:
      close()
    except Exception as e:  # pylint: disable=broad-except
      fault("close", "EnvCloseError", adapters.describe(e))

  stuck.then(returned)


def _keep(work: asyncio.Future[Any]) -> None:
  _BACKGROUND.add(work)
  work.add_done_callback(_BACKGROUND.discard)
