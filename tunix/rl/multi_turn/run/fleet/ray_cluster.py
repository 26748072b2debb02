"""Process that starts collectors as actors of a Ray cluster.

The one module that imports ray; `service.RayLauncher` starts it beside the
learner, whose process stays without Ray's threads, forks and signal handlers.
Lines are those of `net.line_process`: the first one has `address` (of the
cluster), `collectors`, `cpus`, `memory` (bytes), `resources`, `placement` and
`learner` (JSON for the actors); a request is one of

- `start` name: starts the collector of that name
- `look`: `{ended: {name: reason}}`, each once, and `{waiting: [name]}` of the
  collectors that no node has had room for
- `room`: `{room}`, what a collector claims and what the cluster has, as text
- `stop`: ends all collectors, and the cluster if this process began it

Promises: only text crosses Ray: an actor's arguments are the learner's address
as JSON and the collector's name, and its result is JSON; groups, screenshots
and tokens travel by HTTP. (Ray itself pickles these texts, and the class of the
actor.) A cluster that this process began ends with it, one that it joined does
not; its actors do.

Does not: restart actors by Ray's own means: `service` does, with a bound and
pauses, and takes groups back.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
from typing import Any, Mapping

from tunix.rl.multi_turn.environments.verifiers import worker

from tunix_multi_turn import collector_actor

_MOST_NODES = 8  # That an error describes.
_STORE_BYTES = 100 << 20  # No object of size travels by Ray.
_REACH_S = 10.0  # Seconds.


def _reach(address: str) -> None:
  """Raises if no server listens at "host:port" or "ray://host:port".

  Ray itself tries for three minutes before it says so.
  """
  host, colon, port = address.rpartition("://")[2].rpartition(":")
  if not colon or not port.isdecimal():
    return  # "auto", or what Ray itself is to judge.
  try:
    socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
  except OSError as error:
    raise ConnectionError(f"nobody listens at {address} ({error})") from error


class Cluster:
  """The actors of one run, by name."""

  def __init__(self, setup: Mapping[str, Any]):
    """Connects to the cluster, or begins one.

    Raises:
      ImportError: ray is not installed.
      Exception: Ray's, where there is no such cluster.
    """
    # A cluster of one run reports its use to no service.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # pylint: disable=g-import-not-at-top

    self._ray = ray
    self._learner = setup["learner"]
    self._running: dict[str, tuple[Any, Any]] = {}
    self._waiting: dict[Any, str] = {}  # Name, by what ends with its placing.
    claimed = {name: float(n) for name, n in setup["resources"].items()}
    options: dict[str, Any] = {
      "logging_level": logging.WARNING,
      "log_to_driver": False,
    }
    if setup["address"]:
      options["address"] = setup["address"]
      _reach(setup["address"])
    else:
      # Collectors share what this machine has, however many they are.
      needed = math.ceil(setup["cpus"] * setup["collectors"])
      options |= {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, needed),
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "resources": {
          name: amount * setup["collectors"] for name, amount in claimed.items()
        },
      }
    ray.init(**options)
    # Ctrl-C is the run's, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    claims: dict[str, Any] = {
      "num_cpus": setup["cpus"],
      "max_restarts": 0,
      "max_task_retries": 0,
    }
    if setup["placement"] == "spread":
      claims["scheduling_strategy"] = "SPREAD"
    if setup["memory"]:
      claims["memory"] = setup["memory"]
    if claimed:
      claims["resources"] = claimed
    self._claims = claims
    self._class: Any = ray.remote(collector_actor.CollectorActor)

  async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a request; see the module docstring."""
    if name := request.get("start"):
      actor = self._class.options(**self._claims).remote()
      placed = actor.__ray_ready__.remote()
      result = actor.collect.remote(
        self._learner["address"], name, self._learner["patience_s"]
      )
      self._running[name] = actor, result
      self._waiting[placed] = name
      return {}
    if "look" in request:
      return {"ended": self._ended(), "waiting": self._unplaced()}
    if "room" in request:
      return {"room": self._room()}
    if "stop" in request:
      for actor, _ in self._running.values():
        self._ray.kill(actor)
      self._running.clear()
      self._ray.shutdown()
      return {}
    raise ValueError(f"a request starts, looks or stops; got {request!r}")

  def _unplaced(self) -> list[str]:
    if not self._waiting:
      return []
    every = list(self._waiting)
    ready, _ = self._ray.wait(every, num_returns=len(every), timeout=0)
    for placed in ready:  # Or it has ended, which `_ended` reports.
      del self._waiting[placed]
    return [name for name in self._waiting.values() if name in self._running]

  def _room(self) -> str:
    claimed = {"CPU": self._claims["num_cpus"]}
    if "memory" in self._claims:
      claimed["memory"] = self._claims["memory"]
    claimed |= self._claims.get("resources", {})
    nodes = [node for node in self._ray.nodes() if node["Alive"]]
    free = self._ray.available_resources()
    has = "; ".join(
      _amounts(node["Resources"], claimed) for node in nodes[:_MOST_NODES]
    )
    more = len(nodes) - _MOST_NODES
    return (
      f"each claims {_amounts(claimed, claimed)}, and the cluster's"
      f" {len(nodes)} nodes have {has}"
      + (f"; and {more} more" if more > 0 else "")
      + f" (free in all: {_amounts(free, claimed)})"
    )

  def _ended(self) -> dict[str, str]:
    if not self._running:
      return {}
    names = {result: name for name, (_, result) in self._running.items()}
    ready, _ = self._ray.wait(list(names), num_returns=len(names), timeout=0)
    reasons = {}
    for result in ready:
      name = names[result]
      del self._running[name]  # The actor ends with its last reference.
      try:
        reasons[name] = str(json.loads(self._ray.get(result))["error"])
      except self._ray.exceptions.RayError as error:
        # The ids that follow are Ray's own.
        text = " ".join(str(error).split()).partition(" class_name:")[0][:300]
        reasons[name] = f"{type(error).__name__}: {text}"
    return reasons


def _amounts(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
  """The amounts of the named resources, for people."""
  texts = []
  for name in names:
    amount = amounts.get(name, 0.0)
    if name == "memory":
      texts.append(f"{amount / 2**20:.0f} MiB of memory")
    else:
      texts.append(f"{amount:g} {name}")
  return ", ".join(texts)


def prepare(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
  """For `worker.serve`."""
  cluster = Cluster(setup)
  return {}, cluster.play


if __name__ == "__main__":
  sys.exit(worker.serve(prepare))
