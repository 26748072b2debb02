"""Rolls out for a run whose learner is another process (`rollout.via=hosts`).

    python -m tunix.rl.multi_turn.commands.rollout runs/<name> [key=value ...]

Start it on as many hosts as there are, before or after the learner. Each takes
the run's settings from the learner, whose address and token stand in
`rollout.json` of the run's directory, and samples with all devices that JAX
sees here; `mesh.*` split the policy over them.

Promises: ends with 0 when the run does, with one line and 2 where it cannot
roll out for it, and with 1 when no learner was there for `--patience` seconds.
SIGTERM gives its groups back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import pathlib
import sys
import tempfile
from typing import Any, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import weights

_PARTS = 8
_PART_BYTES = 1 << 16
"""Weights come over so many connections, in parts of this size at least."""


class RolloutHost(player.GroupPlayer):
  """One host; call `run` on an event loop of its own."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    overrides: Mapping[str, Any],
    patience_s: float,
  ):
    """Args:

    directory: Directory of the run, for its `rollout.json`.
    overrides: settings of this host in place of the run's, e.g. its mesh.
    patience_s: longest wait for a learner that is not there.
    """
    super().__init__(player.Learner.of_directory(directory, patience_s))
    self._directory, self._patience_s = directory, patience_s
    self._known: list[dict[str, str]] = []  # Addresses that are served.
    self._overrides = dict(overrides)
    self._serial = 0
    self._newer = asyncio.Event()
    self._loading: asyncio.Task[None] | None = None

  async def run(self) -> None:
    """Rolls out until the run ends.

    Raises:
      ConfigError: the run cannot be rolled out here.
      LearnerGone: the learner did not come, or come back.
    """
    try:
      settings = json_text.parse(await self._learner.call("GET", "/run"))
      with tempfile.TemporaryDirectory(prefix="tunix-rollout-") as folder:
        self._build(settings, pathlib.Path(folder))
        try:
          await asyncio.to_thread(self._engine.warm_up)
          while not await self._served():
            await self._abandon()  # Of learners that are no more.
        except player.RunEnded:
          pass
        finally:
          await self._abandon()
          await asyncio.to_thread(self._engine.close)
    finally:
      await self._leave()

  async def _served(self) -> bool:
    """Serves the present learners; False once they are others.

    Raises:
      ValueError: their weights are of another policy.
      RunEnded, LearnerGone, CallError: as of `player.Learner.call`.
    """
    await self._learner.call("GET", "/run")  # Waits until a learner answers.
    try:
      self._known = player.addresses(self._directory)
    except (OSError, ValueError, KeyError):
      return False  # Just written, or taken away, which the next call tells.
    former = self._learners[1:]
    self._learners = [self._learner] + [
      player.Learner.of_directory(
        self._directory, self._patience_s, self._learner.name, i
      )
      for i in range(1, len(self._known))
    ]
    await asyncio.gather(*(l.aclose() for l in former))
    try:
      await self._serve(self._config.collect.concurrency)
    except player.Moved:
      return False
    finally:
      if self._loading is not None:
        self._loading.cancel()
        await asyncio.gather(self._loading, return_exceptions=True)
        self._loading = None
    return True

  def _build(self, settings: Mapping[str, Any], folder: pathlib.Path) -> None:
    self._config = config = player.config_of(settings, self._overrides, folder)
    mesh = models.make_mesh(config)
    self._images = images_lib.ImageStore(folder / "images")
    self._episodes = episodes.EpisodeFactory(config, self._images)
    self._policy = models.make_policy(config, mesh, "")
    self._engine = models.make_engine(config, self._policy, self._images)

  def _numbers(self) -> dict[str, float]:
    return {
      k: float(v)
      for k, v in self._engine.stats().items()
      if isinstance(v, (int, float))
    }

  async def _heard(self, answer: Mapping[str, Any]) -> None:
    try:
      if player.addresses(self._directory) != self._known:
        raise player.Moved
    except (OSError, ValueError, KeyError):
      pass  # Taken away, which the next beat finds, or not yet whole.
    if self._loading is not None and self._loading.done():
      self._loading.result()
      self._loading = None
    if self._loading is None and answer["serial"] > self._serial:
      # Beside the beats: a host that loads for long is not silent.
      self._loading = asyncio.ensure_future(
        self._load(answer["serial"], answer["version"], answer["bytes"])
      )

  async def _load(self, serial: int, version: int, size: int) -> None:
    """Loads `size` bytes of weights; newer ones if they have come meanwhile."""
    shared = pathlib.Path(self._directory, "weights", f"{serial}.safetensors")
    tensors = await asyncio.to_thread(_shared_tensors, shared, size)
    parts: list[bytes] = []
    if tensors is None:
      try:
        parts = await self._fetched(serial, size)
      except http.CallError as error:
        if error.status == 404:
          return  # The next beat names newer ones.
        raise

    def load() -> concurrent.futures.Future[int]:
      values = tensors
      if values is None:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
          file.writelines(parts)
          file.flush()
          values = _tensors(pathlib.Path(file.name))
      state = weights.state_like(self._policy.model, values)
      return self._engine.update_weights(version, state)

    loading = asyncio.ensure_future(asyncio.to_thread(load))
    try:
      arrived = await asyncio.shield(loading)
    except asyncio.CancelledError:
      await asyncio.wait([loading])  # It must not overtake newer weights.
      raise
    await asyncio.wrap_future(arrived)
    self._serial = serial
    self._newer.set()
    self._newer = asyncio.Event()

  async def _fetched(self, serial: int, size: int) -> list[bytes]:
    """Fetches a file of weights in parts at once.

    On a path that loses packets a connection's rate falls with the loss, not
    with what the path carries.
    """
    step = max(_PART_BYTES, -(-size // _PARTS))
    ranges = [(at, min(size, at + step) - 1) for at in range(0, size, step)]
    calls = [
      self._learner.call(
        "GET",
        f"/weights/{serial}",
        player.TRANSFER_S,
        headers={"Range": f"bytes={first}-{last}"},
        limit=last - first + 1,
      )
      for first, last in ranges
    ]
    return await asyncio.gather(*calls)

  async def _play(
    self, order: Mapping[str, Any], faults: player.Faults
  ) -> trajectory_lib.TrajectoryGroup:
    while self._serial < order["serial"]:
      await self._newer.wait()
    collector = episodes.make_collector(
      self._config,
      self._episodes,
      self._engine,
      self._policy.renderer,
      observers=faults,
      mode=order["mode"],
    )
    return await player.collect_order(collector, order)


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  with tensor_files.opened(path) as file:
    return {key: file.get_tensor(key) for key in file.keys()}


def _shared_tensors(
  path: pathlib.Path, size: int
) -> dict[str, np.ndarray] | None:
  """Reads weights that the learner wrote, if this host sees its directory.

  None if it does not, or the file has been replaced: they come by HTTP then.
  """
  try:
    return _tensors(path) if path.stat().st_size == size else None
  except (OSError, ValueError):
    return None


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.commands.rollout",
    description=__doc__.partition("\n")[0],
  )
  parser.add_argument("directory", help="the run's directory")
  player.add_arguments(parser, "mesh.fsdp=4 engine.slots=32")
  args = parser.parse_args(argv)
  host_memory.tune()
  compile_cache.enable("auto")

  def play() -> tuple[player.GroupPlayer, str]:
    overrides = player.overrides_of(args.overrides, "mesh.fsdp=4")
    host = RolloutHost(args.directory, overrides, args.patience)
    return host, asyncio.run(host.until_terminated())

  return player.exit_status(play)


if __name__ == "__main__":
  sys.exit(main())
