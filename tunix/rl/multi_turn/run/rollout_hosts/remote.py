"""The learner's side of rollout hosts: an engine far away.

Stands where a run has its own engine: weights are published to the hosts, and
groups lent to them (`lending`).

Where several processes learn, each lends the groups that it admits, from a
server of its own; process 0 writes the weights, which all of them gather a
tensor at a time, and the one file of addresses that hosts read.

Promises: weights are on the disk when their future ends, and no group admitted
afterwards is played with older ones. Hosts of a run whose processes part, as
one of them died, wait for the run to resume.

Does not: wait for hosts: without any, the learner waits for groups, as it does
where gyms are slow, and reports so.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import pathlib
from typing import Any, Callable, Mapping

from flax import nnx
import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib
from tunix.rl.multi_turn.run.rollout_hosts import weights

_LOG = logging.getLogger(__name__)
ADDRESS = player.ADDRESS


class HostsEngine:
  """In place of a run's rollout engine; see the module docstring.

  Attributes:
    book: Leases of the groups that hosts collect.
    version: Version of the weights published last.
  """

  cache_tokens = cache_bytes = 0

  def __init__(
    self,
    config: config_lib.TrainConfig,
    images: images_lib.ImageStore,
    directory: pathlib.Path,
    processes: peers_lib.Peers = peers_lib.ALONE,
    copies: sharding.HostCopies | None = None,
    types: Mapping[str, Any] | None = None,
  ):
    """Args:

      config: Settings of the run.
      images: receives the groups' screenshots.
      directory: Directory of the run, for `ADDRESS` and weights.
      processes: Processes that learn; all call `warm_up` and `update_weights`
        together.
      copies: Copies of weights that lie over all of them.
      types: narrower ones in which parameters travel, by dotted path.

    Raises:

      ConfigError: a package is not installed, or the address is taken.
    """
    self.version = 0
    self.book = leases_lib.LeaseBook(config.rollout.silence_s)
    self._directory = directory
    self._processes = processes
    self._copies = copies
    self._types = types or {}
    with server_lib.opening(
      config, "rollout.via=hosts", "pip install 'tunix-multi-turn[serve]'"
    ):
      self._server = server_lib.RolloutServer(
        self.book,
        images,
        lending.settings_of(config),
        host=config.rollout.host,
        port=config.rollout.port,
      )
    self._url = config.rollout.public_url or self._server.url
    self._started = False

  @property
  def serial(self) -> int:
    """Number of the newest weights."""
    return self._server.serial

  def remote_collector(
    self, mode: str
  ) -> Callable[..., lending.RemoteCollector]:
    """Returns a maker of collectors; see `episodes.make_collector`."""
    return functools.partial(lending.RemoteCollector, self, mode)

  def warm_up(self, progress: Callable[..., object] | None = None) -> None:
    """Opens the server and writes `ADDRESS`; hosts compile by themselves."""
    del progress
    self._server.start()
    own = {"url": self._url, "token": self._server.token}
    hosts = self._processes.gather("hosts", [own, self._server.serial])
    # Above that of any learner which this one follows, see `server`.
    self._server.serial = max(serial for _, serial in hosts)
    if self._processes.first:
      self._started = True
      lending.write_address(self._directory, *(own for own, _ in hosts))
    _LOG.info("rollout hosts join at %s", self._url)

  def update_weights(
    self, version: int, state: nnx.State
  ) -> concurrent.futures.Future[int]:
    """Publishes weights; the future has ended."""
    first = self._processes.first
    tensors = weights.tensors_of(state, self._copies, first, self._types)
    path = self._write(tensors) if first else None
    self._server.publish(version, path)
    self.version = version
    result: concurrent.futures.Future[int] = concurrent.futures.Future()
    result.set_result(version)
    return result

  def _write(self, tensors: Mapping[str, np.ndarray]) -> pathlib.Path:
    folder = self._directory / "weights"
    folder.mkdir(exist_ok=True)
    # Two may have one version: random weights, and those of the warm start.
    path = folder / f"{self._server.serial + 1}.safetensors"
    tensor_files.save(path, tensors)
    self._keep(2)  # One may be on its way to a host.
    return path

  def _keep(self, count: int) -> None:
    """Deletes older weights, also those that a killed learner left."""
    files = (self._directory / "weights").glob("*")
    for old in sorted(files, reverse=True)[count:]:
      old.unlink(missing_ok=True)

  @property
  def engines(self) -> int:
    """Hosts that were heard of in time; 1 at least. 0 beside process 0, as all
    processes hear of the same hosts, and the numbers are added up."""
    return max(1, len(self.book.hosts())) if self._processes.first else 0

  def stats(self) -> dict[str, float]:
    """The sums of the hosts' engines."""
    return self.book.stats()

  def close(self, timeout_s: float = 30.0) -> None:
    """Ends the server; hosts end by themselves, see the promises."""
    del timeout_s
    goes_on = self._processes.parted
    if self._started and not goes_on:
      (self._directory / ADDRESS).unlink(missing_ok=True)
    self._server.close(notify=not goes_on)
    if self._processes.first:
      self._keep(0)
