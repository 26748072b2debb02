"""The learner's side of a fleet: lends groups beside the engine's server.

One HTTP server: `/fleet/…` has the routes of `rollout_hosts.server` without
weights, everything else is the OpenAI-compatible server of the run's engine
(`run.proxy`), whose token opens both. Its address is written to `rollout.json`,
from which collectors join that others start.

Promises: groups are admitted, numbered, retried and made durable as always, and
only their episodes are played elsewhere; a collector that ends costs its
groups' time and nothing else: they are lent again with the same numbers and
seeds, their sessions at the server are dropped first, and a group that comes
from a former holder is refused, so each counts once.

Does not: know Ray.
"""

from __future__ import annotations

import functools
import logging
import pathlib
from typing import Any, Callable

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import proxy
from tunix.rl.multi_turn.run.fleet import collector as collector_lib
from tunix.rl.multi_turn.run.fleet import ray_launcher
from tunix.rl.multi_turn.run.fleet import supervisor as supervisor_lib
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib

_LOG = logging.getLogger(__name__)
PREFIX = "/fleet"
_PATIENCE_S = 600.0


def episodes_of_one(config: config_lib.TrainConfig) -> int:
  """Episodes that a collector plays at a time."""
  fleet, collect = config.fleet, config.collect
  if fleet.episodes:
    return fleet.episodes
  shares = fleet.collectors if fleet.via == "ray" else 1
  return max(collect.group_size, -(-collect.concurrency // shares))


class Fleet:
  """See the module docstring. A `lending.Lender`.

  Attributes:
    book: Leases of the groups that collectors play.
    serial: 0: collectors load no weights.
    address: Address of this learner, for collectors.
  """

  serial = 0

  def __init__(
      self,
      config: config_lib.TrainConfig,
      policy: models.LoadedPolicy,
      engine: engine_lib.RolloutEngine,
      images: images_lib.ImageStore,
      directory: pathlib.Path,
  ):
    """Listens, but does not answer before `start`.

    Args:
      config, policy, engine, images: of the run.
      directory: Directory of this process, for the address.

    Raises:
      ConfigError: a package is not installed, or the address is taken.
    """
    self._config = config
    self._directory = directory
    self.book = leases_lib.LeaseBook(config.rollout.silence_s, exclusive=True)
    settings = lending.settings_of(config) | {
        collector_lib.SECTION: {
            "episodes": episodes_of_one(config),
            "model": config.policy.name,
        }
    }
    try:
      self._routes = server_lib.LeaseRoutes(
          self.book,
          images,
          settings,
          needs_weights=False,
          relent=self._drop_sessions,
      )
    except ImportError as error:
      raise config_lib.ConfigError([
          f"fleet.via={config.fleet.via}: {error}; pip install"
          " 'tunix-multi-turn[serve,client]'"
      ]) from None
    self._proxy = proxy.RunProxy(
        config,
        policy,
        engine,
        images,
        token=self._routes.token,
        extra_apps={PREFIX: self._routes.app},
        sessions=self._most_sessions(),
    )
    root = config.rollout.public_url or self._proxy.url
    self.address = {
        "url": root.rstrip("/") + PREFIX,
        "policy": root.rstrip("/"),
        "token": self._routes.token,
    }
    self._supervisor: supervisor_lib.Supervisor | None = None
    self._launcher: ray_launcher.RayLauncher | None = None

  def _most_sessions(self) -> int:
    """As many as groups can be lent, and evaluations beside."""
    c = self._config
    groups = (c.queue.max_staleness + 1) * c.learner.groups_per_step
    extra = 2 * c.collect.concurrency + 16
    return 2 * groups * (c.collect.group_size + 1) + extra

  def start(self) -> None:
    """Serves, and starts the collectors that the run wants.

    Raises:
      ConfigError: there is no such cluster.
    """
    fleet = self._config.fleet
    if fleet.via == "ray":
      self._launcher = ray_launcher.RayLauncher(
          fleet, self.address, _PATIENCE_S
      )
    self._proxy.start()
    if self._launcher is not None:
      self._supervisor = supervisor_lib.Supervisor(
          self._launcher, self.book, fleet
      )
      self._supervisor.start()
    lending.write_address(self._directory, self.address)
    _LOG.info("collectors join at %s", self.address["url"])

  def remote_collector(
      self, mode: str
  ) -> Callable[..., lending.RemoteCollector]:
    """Returns a maker of collectors; see `episodes.make_collector`."""
    return functools.partial(lending.RemoteCollector, self, mode)

  def stats(self) -> dict[str, float]:
    """Collectors that were heard of in time, and counters of the leases."""
    supervisor = self._supervisor
    return {
        "collectors": float(len(self.book.hosts())),
        "collector_starts": float(supervisor.starts if supervisor else 0),
        "relent_groups": float(self.book.counts["taken back"]),
    }

  async def _drop_sessions(self, lease: leases_lib.Lease) -> None:
    """Drops what a former collector of a group left at the server."""
    service = self._proxy.app.service
    order = lease.order
    names = None
    if order["samples"] is not None:
      names = {f"{order['group_id']}.{n}" for n in order["samples"]}
    for session in service.store.of_tasks(f"{order['group_id']}."):
      if names is None or session.task_id in names:
        await service.drop(session.id)

  def close(self, wait: Callable[[Any], Any]) -> None:
    """Ends collectors, then the server.

    Args:
      wait: runs a coroutine on the loop of the episodes.
    """
    if self._supervisor is not None:
      self._supervisor.close()  # Those that end now are not started again.
    self._routes.end()
    (self._directory / player.ADDRESS).unlink(missing_ok=True)
    try:
      if self._launcher is not None:
        self._launcher.close()
    except Exception as error:  # pylint: disable=broad-except
      # The server is yet to be closed.
      _LOG.warning("the fleet's actors did not end: %r", error)
    self._proxy.close(wait)
