"""Finds the servers that a run calls, and tries to connect to them.

Promises: all of them together take no longer than a deadline, names that do not
resolve included; nothing is sent to a server. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
import time
from typing import Iterator, Mapping
import urllib.parse

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import credentials

TrainConfig = config_lib.TrainConfig
REACH_S = 3.0
"""Seconds in which the servers of a run must take connections."""
_OURS = ("rollout.public_url",)  # An address of the run itself.


@dataclasses.dataclass(frozen=True)
class Server:
  """A server that a run calls.

  Attributes:
    key: The setting that names it.
    shown: `key=address`, with credentials masked.
    problem: Why it takes no connection; "" if it does.
  """

  key: str
  shown: str
  problem: str


def addresses(config: TrainConfig) -> dict[str, str]:
  """Returns the http(s) addresses that a run calls, by their setting."""
  urls = dict(_of_values(config.to_dict(), ""))
  if config.rollout.agent == "run_service":
    urls["run_service.base_url"] = config.run_service.url
  if config.plays and environment_spec.get(config.environment.name).gym:
    try:
      options = gyms.get(config.gym.name, "operator").options
    except ImportError:
      options = {}  # `gym` reports it.
    for name, option in options.items():
      key = f"gym.options.{name}"
      if key not in urls:
        urls |= _of_values(option.default, key)
  else:
    urls = {k: v for k, v in urls.items() if not k.startswith("gym.")}
  return {key: url for key, url in urls.items() if key not in _OURS}


def _of_values(value: object, key: str) -> Iterator[tuple[str, str]]:
  if isinstance(value, Mapping):
    for name, inner in value.items():
      yield from _of_values(inner, f"{key}.{name}" if key else str(name))
  elif isinstance(value, (list, tuple)):
    for inner in value:
      yield from _of_values(inner, key)
  elif isinstance(value, str) and value.startswith(("http://", "https://")):
    yield key, value


def servers(config: TrainConfig, seconds: float = REACH_S) -> list[Server]:
  """Tries to connect to every server of a run at once.

  Args:
    config: Settings of the run.
    seconds: Deadline of all servers together.
  """
  due = time.monotonic() + seconds
  pending: list[tuple[str, str, queue.Queue[str]]] = []
  for key, url in addresses(config).items():
    answer: queue.Queue[str] = queue.Queue()
    pending.append((key, url, answer))
    # Daemons: looking a name up cannot be stopped.
    threading.Thread(
      target=lambda url=url, answer=answer: answer.put(
        _connected(url, seconds)
      ),
      daemon=True,
    ).start()
  results = []
  for key, url, answer in pending:
    try:
      problem = answer.get(timeout=max(0.0, due - time.monotonic()))
    except queue.Empty:
      problem = f"no connection within {seconds:g} s"
    results.append(Server(key, f"{key}={credentials.masked(url)}", problem))
  return results


def _connected(url: str, seconds: float) -> str:
  """Why no connection to the host of a URL is possible; "" if one is."""
  try:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not parts.hostname:
      return "no host in it"
    with socket.create_connection((parts.hostname, port), seconds):
      return ""
  except OSError as error:
    return error.strerror or str(error)
  except ValueError as error:  # No port, or a name that no host has.
    return str(error)


def unreachable(config: TrainConfig) -> str:
  """Lines about the servers that take no connection, for a dry run."""
  return "".join(
    f"\n  cannot be reached: {one.shown}: {one.problem}; start it, or correct"
    f" {one.key}"
    for one in servers(config)
    if one.problem
  )
