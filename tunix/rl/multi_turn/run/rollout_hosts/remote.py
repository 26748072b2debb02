"""The learner's side of rollout hosts: an engine and a collector far away.

Stands where a run has its own engine and collectors: groups are admitted,
numbered, retried and made durable as always, and only their episodes are
played elsewhere.

Promises: a cancelled group is withdrawn from its host; each group's events are
emitted here when it arrives; weights are on the disk when their future ends,
and no group admitted afterwards is played with older ones.

Does not: wait for hosts: without any, the learner waits for groups, as it does
where gyms are slow, and reports so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import pathlib
from typing import Any, Callable, Iterable

from flax import nnx
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.policy import tensor_files
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib
from tunix.rl.multi_turn.trajectory_collector import groups

_LOG = logging.getLogger(__name__)
ADDRESS = "rollout.json"
"""File of a run's directory from which its hosts take URL and token."""


class HostsEngine:
  """In place of a run's rollout engine; see the module docstring.

  Attributes:
    book: of the groups that hosts collect.
    version: of the weights published last.
  """

  cache_tokens = cache_bytes = 0

  def __init__(
      self,
      config: config_lib.TrainConfig,
      images: images_lib.ImageStore,
      directory: pathlib.Path,
  ):
    """Args:

      config: of the run.
      images: receives the groups' screenshots.
      directory: of this process, for `ADDRESS` and weights.

    Raises:

      ConfigError: a package is not installed, or the address is taken.
    """
    self.version = 0
    self.book = leases_lib.LeaseBook(config.rollout.silence_s)
    self._directory = directory
    try:
      self._server = server_lib.RolloutServer(
          self.book,
          images,
          _settings(config),
          host=config.rollout.host,
          port=config.rollout.port,
      )
    except ImportError as error:
      raise config_lib.ConfigError([
          f"rollout.via=hosts: {error}; pip install 'tunix-multi-turn[serve]'"
      ]) from None
    except ValueError as error:
      raise config_lib.ConfigError([
          f"rollout.host={config.rollout.host}, rollout.port="
          f"{config.rollout.port}: {error}"
      ]) from None
    self._url = config.rollout.public_url or self._server.url
    self._started = False
    self._kept: list[pathlib.Path] = []

  @property
  def serial(self) -> int:
    """Number of the newest weights."""
    return self._server.serial

  def warm_up(self, progress: Callable[..., object] | None = None) -> None:
    """Opens the server and writes `ADDRESS`; hosts compile by themselves."""
    del progress
    self._server.start()
    self._started = True
    path = self._directory / ADDRESS
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
      json.dump({"url": self._url, "token": self._server.token}, file)
    durable.sync(path)
    _LOG.info("rollout hosts join at %s", self._url)

  def update_weights(
      self, version: int, state: nnx.State
  ) -> concurrent.futures.Future[int]:
    """Publishes weights; the future has ended."""
    folder = self._directory / "weights"
    folder.mkdir(exist_ok=True)
    # Two may have one version: random weights, and those of the warm start.
    path = folder / f"{self._server.serial + 1}.safetensors"
    tensor_files.save(path, messages.tensors_of(state))
    self._server.publish(version, path)
    self.version = version
    self._kept.append(path)
    for old in self._kept[:-2]:  # One may be on its way to a host.
      old.unlink(missing_ok=True)
    self._kept = self._kept[-2:]
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(version)
    return done

  @property
  def engines(self) -> int:
    """Hosts that were heard of in time; 1 at least."""
    return max(1, len(self.book.hosts()))

  def stats(self) -> dict[str, float]:
    """The sums of the hosts' engines."""
    return self.book.stats()

  def close(self, timeout_s: float = 30.0) -> None:
    """Ends the server; hosts end by themselves."""
    del timeout_s
    if self._started:
      (self._directory / ADDRESS).unlink(missing_ok=True)
    self._server.close()
    for path in self._kept:
      path.unlink(missing_ok=True)


def _settings(config: config_lib.TrainConfig) -> dict[str, Any]:
  """What a host builds the same episodes and policy from."""
  keep = (
      "environment", "gym", "task_source", "agent", "policy", "sampling",
      "engine", "collect", "algorithm", "rollout", "run",
  )  # pyformat: disable
  data = config.to_dict()
  # As `models.make_engine` decides for an engine of the run's own.
  data["engine"]["entropies"] |= config.monitor.on and config.monitor.entropies
  return {name: data[name] for name in keep} | {
      # Sections that contradict each other in a learner only: steps=0 has none.
      "learner": {
          "row_length": data["learner"]["row_length"],
          "steps": 0,
          "skip_zero_advantage": False,
      },
  }


class RemoteCollector(groups.GroupCollector):
  """A `GroupCollector` whose groups rollout hosts play."""

  def __init__(self, engine: HostsEngine, mode: str, *args: Any, **kwargs: Any):
    """Args:

      engine: the run's.
      mode: as of `episodes.make_collector`.
      *args, **kwargs: of `GroupCollector`.
    """
    super().__init__(*args, **kwargs)
    self._engine = engine
    self._mode = mode

  async def collect(
      self,
      task: Any,
      *,
      index: int = 0,
      attempt: int = 0,
      start_version: int = 0,
      group_size: int | None = None,
      samples: Iterable[int] | None = None,
  ) -> groups.TrajectoryGroup:
    book = self._engine.book
    lease = book.lend({
        "mode": self._mode,
        "task": task.to_json(),
        "index": index,
        "attempt": attempt,
        "start_version": start_version,
        "group_size": group_size,
        "samples": None if samples is None else list(samples),
        "serial": self._engine.serial,
    })
    try:
      group, faults = await asyncio.wrap_future(lease.result)
    finally:
      book.withdraw(lease)
    split = "train" if self._mode == "train" else "eval"
    for stage, kind, message, name in faults:
      self.emit(events.Fault(stage, kind, message, trajectory_id=name or None))
    known = dict(group_id=group.group_id, task_id=group.task_id, split=split)
    beside = () if group.greedy is None else (group.greedy,)
    for member in (*group, *beside):
      self.emit(
          events.EpisodeStarted(trajectory_id=member.trajectory_id, **known)
      )
      self.emit(events.EpisodeFinished(trajectory=member, **known))
    return group
