"""A Ray cluster of two nodes on this machine, and the collectors on it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Iterator

_START_S = 120.0
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def _free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def _commands() -> dict[int, tuple[int, str]]:
  """pid -> (pid of its parent, command line)."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError, IndexError, ValueError):
      command = (path / "cmdline").read_text().replace("\0", " ")
      parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
      found[int(path.name)] = int(parent), command
  return found


class Cluster:
  """Two nodes: `head` without places for collectors, `desks` with them.

  Attributes:
    address: host:port.
  """

  def __init__(self, folder: str, environment: dict[str, str]):
    self.address = f"127.0.0.1:{_free_port()}"
    port = self.address.rpartition(":")[2]
    self._env = environment
    self._folder = folder
    self._nodes: list[subprocess.Popen[bytes]] = []
    try:
      self._start(port)
    except BaseException:
      self.close()
      raise

  def _start(self, port: str) -> None:
    folder = self._folder
    common = ["--object-store-memory=80000000", "--block"]
    self._head = self._node(
      "--head",
      f"--port={port}",
      "--num-cpus=1",
      "--include-dashboard=false",
      f"--temp-dir={folder}",
      *common,
    )
    self._wait_for(1)
    self._desks = self._node(
      f"--address={self.address}",
      "--num-cpus=8",
      '--resources={"desk": 8}',
      *common,
    )
    self._wait_for(2)

  def _node(self, *options: str) -> subprocess.Popen[bytes]:
    with open(os.path.join(self._folder, "log"), "ab") as log:
      process = subprocess.Popen(
        [*_RAY, "start", *options],
        env=self._env,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    self._nodes.append(process)
    return process

  def _wait_for(self, nodes: int) -> None:
    due = time.monotonic() + _START_S
    log = pathlib.Path(self._folder, "log")
    while log.read_text().count("Ray runtime started") < nodes:
      ended = any(node.poll() is not None for node in self._nodes)
      if ended or time.monotonic() > due:
        raise RuntimeError(f"Ray did not start: {log.read_text()[-2000:]}")
      time.sleep(0.1)

  def collectors(self) -> list[tuple[int, str]]:
    """Processes of the actors, and the node of each: "head" or "desks"."""
    known = _commands()
    nodes = {}
    for name, process in (("head", self._head), ("desks", self._desks)):
      nodes |= {
        pid: name
        for pid, (parent, command) in known.items()
        if parent == process.pid and "raylet/raylet" in command
      }
    return sorted(
      (pid, nodes[parent])
      for pid, (parent, command) in known.items()
      if parent in nodes and "ray::CollectorActor" in command
    )

  def close(self) -> None:
    for process in reversed(self._nodes):
      with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
      try:
        process.wait(20)
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


@contextlib.contextmanager
def two_nodes() -> Iterator[Cluster]:
  """A cluster; runs with fleet.address=auto find it."""
  settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
  before = {k: os.environ.get(k) for k in (*settings, "RAY_ADDRESS")}
  with tempfile.TemporaryDirectory(
    prefix="tr",
    ignore_cleanup_errors=True,  # Paths of sockets are short.
  ) as folder:
    os.environ.update(settings)
    cluster = Cluster(folder, dict(os.environ))
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
      yield cluster
    finally:
      for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
          os.environ[key] = value
      cluster.close()
