"""Defines environments: reset, step, close; each sync or async.

`reset() -> (observation, info)`, `step(action) -> (observation, reward, done,
info)`. Callers in this package use `maybe_await`; `SyncEnv` serves callers
without an event loop.

`info` may hold `success` (bool) and `status` (a `TrajectoryStatus` value, how
the episode ended as the environment sees it).
"""

from __future__ import annotations

import abc
import asyncio
import threading
from typing import Any, Awaitable, Coroutine, Mapping

from tunix.rl.multi_turn.core import containment
from tunix.rl.multi_turn.net import concurrency

maybe_await = concurrency.maybe_await
ResetResult = tuple[Any, dict[str, Any]]
StepResult = tuple[Any, float, bool, dict[str, Any]]


class BaseEnv(abc.ABC):
  """One environment plays one episode at a time."""

  @abc.abstractmethod
  def reset(self) -> ResetResult | Awaitable[ResetResult]:
    """Starts an episode. May be async."""

  @abc.abstractmethod
  def step(self, action: object) -> StepResult | Awaitable[StepResult]:
    """Carries out an action. May be async."""

  def close(self) -> Any:
    """Frees the environment's resources; idempotent. May be async."""

  @classmethod
  def from_dict(cls, env_args: Mapping[str, Any]) -> BaseEnv:
    """Builds an environment from a config.

    On a subclass, the config holds constructor arguments. On `BaseEnv`, its
    "type" names a registered environment ("tool", "cua", …) that gets the
    rest. The config is not changed.

    Raises:
      ValueError: no such type.
      TypeError: an argument that the class does not take.
    """
    args = dict(env_args)
    if cls is BaseEnv:
      from tunix.rl.multi_turn.environments import spec  # pylint: disable=g-import-not-at-top

      if "type" not in args:
        raise ValueError(
          "an environment config needs 'type', one of"
          f" {', '.join(spec.ENVIRONMENTS.names())}"
        )
      make: Any = spec.get(args.pop("type"), "request").factory
      return make.from_dict(args)
    return cls(**args)


class SyncEnv:
  """A blocking view of any environment.

  Coroutines run on one event loop in a thread of its own, so that an
  environment that keeps connections finds the same loop at every call. With a
  timeout, sync methods run in threads; one that does not return in time keeps
  the environment to itself, see `concurrency.Guarded`.

  Attributes:
    env: the environment.
    timeout: seconds each call may take, None for no limit.
  """

  def __init__(self, env: Any, timeout: float | None = None):
    self.env = env
    self.timeout = timeout
    self._calls = concurrency.Guarded(env, inline=timeout is None)
    self._loop: asyncio.AbstractEventLoop | None = None

  def reset(self) -> tuple[Any, dict[str, Any]]:
    return self._wait(self._calls.call("reset", seconds=self.timeout))

  def step(self, action: object) -> StepResult:
    return self._wait(self._calls.call("step", action, seconds=self.timeout))

  def close(self) -> None:
    """Closes the environment and the loop; idempotent.

    An environment whose call is stuck is closed when that returns.
    """
    try:
      self._wait(self._calls.close(seconds=self.timeout))
    except concurrency.StillRunningError:
      pass
    finally:
      if self._loop is not None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

  def __enter__(self) -> SyncEnv:
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def __getattr__(self, name: str) -> Any:
    return getattr(self.env, name)

  def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
    if self._loop is None:
      self._loop = asyncio.new_event_loop()
      threading.Thread(
        target=_run_loop, args=(self._loop,), name="tunix-sync-env", daemon=True
      ).start()
    return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
  try:
    containment.run_forever(loop)
  finally:
    loop.close()
