"""The learner's side of a Ray cluster: a process of `ray_cluster`.

Promises: the learner's process imports no ray; calls have deadlines; when this
process ends, however, so do the actors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import line_process

_START_S = 180.0
_CALL_S = 60.0
_MODULE = "run.fleet.ray_cluster"


class RayLauncher:
  """A `supervisor.Launcher` on a cluster."""

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
      raise config_lib.ConfigError([
          "fleet.via=ray needs the package ray; pip install"
          " 'tunix-multi-turn[ray]', or set fleet.via=local"
      ])
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
      raise config_lib.ConfigError([
          f"fleet.address={config.address!r}: {text}; give the address of a"
          ' running cluster (ray start --head), or leave it "" for one on this'
          " machine"
      ]) from None

  def start(self, name: str) -> None:
    self._call(start=name)

  def ended(self) -> dict[str, str]:
    answer = self._call(look=True)
    self._waiting = set(answer["waiting"])
    return answer["ended"]

  def waiting(self) -> set[str]:
    return self._waiting

  def room(self) -> str:
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
