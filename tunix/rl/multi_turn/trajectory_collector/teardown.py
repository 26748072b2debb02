"""Ends an episode: releases the policy's session and closes the environment.

Promises: both are tried under their own deadline, whatever went wrong before
and even if the caller is cancelled meanwhile; an environment with a call that
could not be stopped is left alone until that call returns, and closed then.
Failures are reported as faults, never raised.
"""

from __future__ import annotations

from typing import Callable

from tunix.rl.multi_turn.net import concurrency

FaultFn = Callable[[str, str, str], None]
"""(stage, kind, message) -> None."""


async def run(
  env: concurrency.Guarded,
  session: object,
  *,
  runner: concurrency.CallRunner,
  seconds: float,
  fault: FaultFn,
) -> dict[str, float]:
  """Cleans up after an episode.

  Args:
    env: the environment; closed if it has a `close`.
    session: Owner of `sessions()` and `release(name)`, or None.
    runner: runs the releases.
    seconds: deadline of each call.
    fault: receives the failures.

  Returns:
    Metrics: `close_failed` and `quarantined`, 1 where it happened.

  Raises:
    asyncio.CancelledError: the caller was cancelled; the cleanup keeps
      running.
  """
  return await concurrency.to_the_end(
    _release_and_close(env, session, runner, seconds, fault)
  )


async def _release_and_close(
  env, session, runner, seconds, fault
) -> dict[str, float]:
  for name in session.sessions() if session is not None else ():
    try:
      await runner.call(session.release, name, seconds=seconds)
    except Exception as e:  # pylint: disable=broad-except
      fault("release", type(e).__name__, concurrency.describe(e))
  name = type(env.target).__name__

  def closed(error: Exception | None) -> dict[str, float]:
    if error is None:
      return {}
    if isinstance(error, concurrency.CallTimeout):
      kind = "EnvCloseTimeout"
      text = f"{name}.close took longer than {seconds:g} s (deadlines.close)"
    else:
      kind, text = "EnvCloseError", concurrency.describe(error)
    fault("close", kind, text)
    return {"close_failed": 1}

  stuck = env.stuck
  try:
    await env.close(seconds=seconds, closed_late=closed)
  except concurrency.StillRunningError as e:
    if stuck is None:  # One of the environment's own, inside its close.
      return closed(e)
    fault(
      "close",
      "Quarantined",
      f"{stuck.description} did not stop; {name} stays open until it returns",
    )
    return {"quarantined": 1}
  except Exception as e:  # pylint: disable=broad-except
    return closed(e)
  return {}
