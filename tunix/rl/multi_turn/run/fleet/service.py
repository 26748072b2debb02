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

import asyncio
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import pathlib
import sys
import threading
import time
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import line_process
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import proxy
from tunix.rl.multi_turn.run.fleet import collector as collector_lib
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib

_LOG = logging.getLogger(__name__)
PREFIX = "/fleet"
_PATIENCE_S = 600.0


_START_S = 180.0
_CALL_S = 60.0
_MODULE = "run.fleet.ray_cluster"


_POLL_S = 0.2
_LONGEST_PAUSE_S = 60.0


class FleetFailed(RuntimeError):
  """All collectors of a run are gone for good."""


@dataclasses.dataclass
class _Place:
  """One of the collectors that a run wants.

  Attributes:
    number: Number of the place.
    name: Name of its latest collector.
    runs: whether that has not ended.
    since: Time of that collector's start.
    waits: whether it was reported that no node has room for it.
    due: Time of the next start.
    failures: ends in a row without a group.
    reason: Reason of the latest end.
    given_up: no other is started.
  """

  number: int
  name: str = ""
  runs: bool = False
  since: float = 0.0
  waits: bool = False
  due: float = 0.0
  failures: int = 0
  reason: str = ""
  given_up: bool = False


class Supervisor:
  """Keeps `fleet.collectors` collectors running, in a thread.

  A collector that ends is started again under another name, after pauses that
  double; its groups are lent to others. One that ends more than
  `fleet.restarts` times in a row without a group is given up. Once all are
  given up, or have waited `fleet.place_s` for a node, the run fails with
  `FleetFailed`, unless a collector that was started by hand is connected.

  Attributes:
    starts: Collectors started so far, restarts included.
  """

  def __init__(
    self,
    launcher: RayLauncher,
    book: leases_lib.LeaseBook,
    config: run_sections.FleetConfig,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._launcher = launcher
    self._book = book
    self._config = config
    self._clock = clock
    self._places = [_Place(number) for number in range(config.collectors)]
    self._stop = threading.Event()
    self._failed = False
    self._thread = threading.Thread(
      target=self._run, name="tunix-fleet", daemon=True
    )
    self.starts = 0

  @property
  def running(self) -> int:
    """Collectors that were started and have not ended."""
    return sum(place.runs for place in self._places)

  def start(self) -> None:
    self._thread.start()

  def close(self, timeout_s: float = 30.0) -> None:
    """Ends the thread; collectors end with their launcher. Idempotent."""
    self._stop.set()
    if self._thread.ident is not None:
      self._thread.join(timeout_s)

  def step(self) -> None:
    """Looks at each collector once."""
    ended = self._launcher.ended()
    for place in self._places:
      if place.runs:
        if place.name in ended:
          self._ended(place, ended[place.name])
      elif not place.given_up and self._clock() >= place.due:
        self.starts += 1
        place.name = f"collector-{place.number}-{self.starts}"
        self._launcher.start(place.name)
        place.runs, place.since, place.waits = True, self._clock(), False
    self._look_for_room()
    if all(place.given_up for place in self._places) and not self._failed:
      if not self._book.hosts():
        self._failed = True
        self._book.fail(FleetFailed(self._why()))

  def _look_for_room(self) -> None:
    """Reports collectors that wait for a node; ends the run if all do."""
    waiting = self._launcher.waiting()
    due = self._clock() - self._config.place_s
    new = False
    for place in self._places:
      late = place.runs and place.name in waiting and place.since < due
      new |= late and not place.waits
      place.waits = late
    if new:
      _LOG.warning("%s", self._no_room())
    if (
      any(place.waits for place in self._places)
      and all(place.waits or place.given_up for place in self._places)
      and not self._book.hosts()
      and not self._failed
    ):
      self._failed = True
      self._book.fail(FleetFailed(self._no_room()))

  def _no_room(self) -> str:
    count = sum(place.waits for place in self._places)
    return (
      f"{count} of {len(self._places)} collectors have waited for a node for"
      f" fleet.place_s={self._config.place_s:g} s: {self._launcher.room()};"
      " claim less (fleet.cpus, fleet.memory, fleet.resources), lower"
      " fleet.collectors, or add nodes"
    )

  def _ended(self, place: _Place, reason: str) -> None:
    place.runs, place.reason = False, reason or "it ended by itself"
    self._book.lose(place.name)
    delivered = self._book.finished[place.name] > 0
    place.failures = 0 if delivered else place.failures + 1
    if place.failures > self._config.restarts:
      place.given_up = True
      _LOG.warning("%s is given up: %s", place.name, place.reason)
      return
    pause = min(
      _LONGEST_PAUSE_S, self._config.backoff_s * 2 ** max(0, place.failures - 1)
    )
    place.due = self._clock() + pause
    _LOG.warning(
      "%s ended and is started again in %g s: %s",
      place.name,
      pause,
      place.reason,
    )

  def _why(self) -> str:
    last = self._places[-1]
    return (
      f"all {len(self._places)} collectors were given up after"
      f" fleet.restarts={self._config.restarts} ends without a group; the"
      f" last one: {last.reason}"
    )

  def _run(self) -> None:
    try:
      while not self._stop.wait(_POLL_S):
        self.step()
    except Exception as error:  # pylint: disable=broad-except
      # The launcher's own failure: no process would collect any more.
      _LOG.exception("the fleet cannot be looked after any more")
      self._book.fail(FleetFailed(f"{type(error).__name__}: {error}"))


class RayLauncher:
  """Starts collectors on a cluster; calls come from one thread."""

  def __init__(
    self,
    config: run_sections.FleetConfig,
    address: Mapping[str, str],
    patience_s: float,
  ):
    """Connects to the cluster, or begins one.

    Args:
      config: names it, and what an actor claims.
      address: The learner's address, for the actors.
      patience_s: an actor's, with a learner that does not answer.

    Raises:
      ConfigError: ray is not installed, or there is no such cluster.
    """
    self._waiting: set[str] = set()
    if importlib.util.find_spec("ray") is None:
      raise config_lib.ConfigError(
        [
          "fleet.via=ray needs the package ray; pip install"
          " 'tunix-multi-turn[ray]', or set fleet.via=local"
        ]
      )
    # Where a clone is used without being installed.
    spec = importlib.util.find_spec("tunix_multi_turn")
    package = ""
    if spec is not None and spec.origin is not None:
      package = str(pathlib.Path(spec.origin).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH", "")
    try:
      self._worker = line_process.Worker(
        [sys.executable, "-m", "tunix_multi_turn", _MODULE],
        "Ray",
        {
          "address": config.address,
          "collectors": config.collectors,
          "cpus": config.cpus,
          "memory": config.memory << 20,
          "resources": dict(config.resources),
          "placement": config.placement,
          "learner": {
            "address": json.dumps(dict(address)),
            "patience_s": patience_s,
          },
        },
        _START_S,
        path=os.pathsep.join(filter(None, (package, inherited))),
      )
    except line_process.WorkerError as error:
      text = " ".join(str(error).split())[:400]
      raise config_lib.ConfigError(
        [
          f"fleet.address={config.address!r}: {text}; give the address of a"
          ' running cluster (ray start --head), or leave it "" for one on this'
          " machine"
        ]
      ) from None

  def start(self, name: str) -> None:
    """Starts the collector of that name; does not wait for it."""
    self._call(start=name)

  def ended(self) -> dict[str, str]:
    """The collectors that have ended since the last call, by name: the reason,
    "" where there is none."""
    answer = self._call(look=True)
    self._waiting = set(answer["waiting"])
    return answer["ended"]

  def waiting(self) -> set[str]:
    """The collectors that no node has had room for, at the last call of
    `ended`."""
    return self._waiting

  def room(self) -> str:
    """Describes what a collector claims and what the cluster has."""
    return self._call(room=True)["room"]

  def close(self) -> None:
    """Ends the actors, and the cluster if it is the run's own. Idempotent."""
    try:
      if self._worker.alive:
        self._call(stop=True)
    finally:
      self._worker.end("the run ended")

  def _call(self, **request: Any) -> dict[str, Any]:
    return asyncio.run(self._worker.play(request, _CALL_S))


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
    engine: models.Engine,
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
    with server_lib.opening(
      config,
      f"fleet.via={config.fleet.via}",
      "pip install 'tunix-multi-turn[serve,client]'",
    ):
      self._routes = server_lib.LeaseRoutes(
        self.book,
        images,
        settings,
        needs_weights=False,
        relent=self._drop_sessions,
      )
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
    self._supervisor: Supervisor | None = None
    self._launcher: RayLauncher | None = None

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
      self._launcher = RayLauncher(fleet, self.address, _PATIENCE_S)
    self._proxy.start()
    if self._launcher is not None:
      self._supervisor = Supervisor(self._launcher, self.book, fleet)
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
