"""Rolls out for a run whose learner is elsewhere (`rollout.via=hosts`).

Builds the run's episodes and policy, samples with its own devices, collects the
groups that the learner lends, and loads weights as they are published, between
two decode steps.

Promises: a group is begun with the weights that were the newest when it was
lent, or newer; when the learner is gone the host waits for it, `patience_s` at
most, and joins it again at its new address; groups that were taken back are
cancelled, and their gyms closed.

Does not: keep anything that must survive: it can be killed at any time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import json
import logging
import pathlib
import tempfile
import time
from typing import Any, Mapping
import uuid

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.policy import tensor_files
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.run.rollout_hosts import remote

_LOG = logging.getLogger(__name__)
_ANSWER_S = 60.0
_TRANSFER_S = 1800.0
_BEAT_S = 0.5


class LearnerGone(RuntimeError):
  """The learner was not there for longer than the host's patience."""


class _RunEnded(Exception):
  """The run has taken its address away."""


class _Learner:
  """HTTP calls of the learner at its present address."""

  def __init__(self, directory: pathlib.Path, patience_s: float):
    self._file = directory / remote.ADDRESS
    self._patience_s = patience_s
    self.name = f"host-{uuid.uuid4().hex[:8]}"
    self._http = http.Http()
    self._joined = False

  async def call(
      self, method: str, path: str, seconds: float = _ANSWER_S, **request: Any
  ) -> bytes:
    """The body of the answer; waits for a learner that is not there.

    Raises:
      LearnerGone: for too long.
      _RunEnded: the run has ended since this host joined it.
      CallError: the learner refuses the request.
    """
    due = time.monotonic() + self._patience_s
    while True:
      try:
        known = json.loads(self._file.read_text(encoding="utf-8"))
        found = await self._http.call(
            method,
            known["url"] + path,
            seconds,
            headers={"Authorization": f"Bearer {known['token']}"},
            **request,
        )
        self._joined = True
        return found
      except http.CallError as error:
        # 401: of a learner that has just begun anew.
        if error.status not in (0, 401):
          raise
        reason: Exception = error
      except FileNotFoundError as error:
        if self._joined:  # A learner that is killed leaves it.
          raise _RunEnded from None
        reason = error
      except (OSError, ValueError, KeyError) as error:
        reason = error  # Not yet whole.
      if time.monotonic() > due:
        raise LearnerGone(
            f"no learner for {self._patience_s:g} s at {self._file}: {reason}"
        ) from None
      await asyncio.sleep(_BEAT_S)

  async def ask(self, path: str, **body: Any) -> dict[str, Any]:
    """The JSON that answers a POST."""
    found = await self.call(
        "POST", path, _TRANSFER_S, body={"host": self.name, **body}
    )
    return json.loads(found)

  async def aclose(self) -> None:
    await self._http.aclose()


class _Faults:
  """Observer that keeps the faults of a group's episodes."""

  def __init__(self):
    self.found: list[list[str]] = []

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.Fault):
      self.found.append([
          event.stage, event.kind, event.message, event.trajectory_id or "",
      ])  # pyformat: disable


def config_of(
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    folder: pathlib.Path,
) -> config_lib.TrainConfig:
  """The configuration of a host.

  Args:
    settings: of the run, by section, as the learner sends them.
    overrides: the host's own, by dotted key.
    folder: in place of the run's directory.

  Raises:
    ConfigError: the run cannot be rolled out with these.
  """
  data = copy.deepcopy(dict(settings))
  data["rollout"] = {"via": "in_process"}
  # Groups come when they come; lockstep would wait for those to come.
  data["engine"]["lockstep"] = "false"
  data["run"] |= {"dir": str(folder), "resume": "", "dry_run": False}

  def size(axis: str) -> int:
    text = str(overrides.get(f"mesh.{axis}", 1))
    return max(1, int(text)) if text.isdecimal() else 1

  # Rows are the learner's: here they need only suit a mesh of another size.
  learner, shards = data["learner"], size("sequence")
  learner["rows"] = size("data") * size("fsdp")
  learner["row_length"] = -(-learner["row_length"] // shards) * shards
  for key, value in overrides.items():
    *above, name = key.split(".")
    place = data
    for part in above:
      place = place.setdefault(part, {})
      if not isinstance(place, dict):
        raise config_lib.ConfigError([
            f"{key}={value}: {part} has no fields; set {key.rpartition('.')[0]}"
        ])
    place[name] = value
  return config_lib.from_dict(data, "the run's settings")


class RolloutHost:
  """One host; call `run` on an event loop of its own."""

  def __init__(
      self,
      directory: str | pathlib.Path,
      overrides: Mapping[str, Any],
      patience_s: float,
  ):
    """Args:

      directory: of the run, where its `rollout.json` is or will be.
      overrides: settings of this host in place of the run's, e.g. its mesh.
      patience_s: longest wait for a learner that is not there.
    """
    self._learner = _Learner(pathlib.Path(directory), patience_s)
    self._overrides = dict(overrides)
    self._work: dict[int, asyncio.Task[None]] = {}
    self._episodes_of: dict[int, int] = {}
    self._loading: asyncio.Lock | None = None
    self._serial = 0
    self._newer = asyncio.Event()
    self.collected = 0
    """Groups that the learner took."""

  async def run(self) -> None:
    """Rolls out until the run ends.

    Raises:
      ConfigError: the run cannot be rolled out here.
      LearnerGone: the learner did not come, or come back.
    """
    try:
      settings = json.loads(await self._learner.call("GET", "/run"))
      with tempfile.TemporaryDirectory(prefix="tunix-rollout-") as folder:
        self._build(settings, pathlib.Path(folder))
        try:
          await asyncio.to_thread(self._engine.warm_up)
          await self._serve()
        except _RunEnded:
          pass
        finally:
          for task in self._work.values():
            task.cancel()
          await asyncio.gather(*self._work.values(), return_exceptions=True)
          await asyncio.to_thread(self._engine.close)
    finally:
      await self._learner.aclose()

  def _build(self, settings: Mapping[str, Any], folder: pathlib.Path) -> None:
    self._config = config = config_of(settings, self._overrides, folder)
    mesh = models.make_mesh(config)
    self._images = images_lib.ImageStore(folder / "images")
    self._episodes = episodes.EpisodeFactory(config, self._images)
    self._policy = models.make_policy(config, mesh, "")
    self._engine = models.make_engine(config, self._policy, self._images)

  async def _serve(self) -> None:
    beat = asyncio.ensure_future(self._beat())
    most = self._config.collect.concurrency
    try:
      while not beat.done():
        if sum(self._episodes_of.values()) >= most:
          await asyncio.wait(
              [beat, *self._work.values()],
              return_when=asyncio.FIRST_COMPLETED,
          )
          continue
        asking = asyncio.ensure_future(self._learner.ask("/lease"))
        await asyncio.wait([beat, asking], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
          asking.cancel()
          break
        if lease := asking.result():
          number, order = int(lease["number"]), lease["order"]
          self._episodes_of[number] = self._size(order)
          task = asyncio.ensure_future(self._collect(number, order))
          self._work[number] = task
          task.add_done_callback(functools.partial(self._ended, number))
      await beat
    finally:
      beat.cancel()
      await asyncio.gather(beat, return_exceptions=True)

  def _size(self, order: Mapping[str, Any]) -> int:
    """Episodes of a group."""
    if order["samples"] is not None:
      return len(order["samples"])
    if order["mode"] != "train":
      return 1
    return order["group_size"] or self._config.collect.group_size

  def _ended(self, number: int, task: asyncio.Task[None]) -> None:
    self._work.pop(number, None)
    self._episodes_of.pop(number, None)
    if not task.cancelled() and (error := task.exception()) is not None:
      # The learner takes the lease back; other groups go on.
      _LOG.warning("group of lease %d was not collected: %r", number, error)

  async def _beat(self) -> None:
    """Ends when the run has."""
    while True:
      found = await self._learner.ask(
          "/beat", leases=list(self._work), stats=self._numbers()
      )
      if found["ended"]:
        return
      for number in found["withdrawn"]:
        if number in self._work:
          self._work[number].cancel()
      if found["serial"] > self._serial:
        await self._load(found["serial"], found["version"])
      await asyncio.sleep(_BEAT_S)

  def _numbers(self) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in self._engine.stats().items()
        if isinstance(v, (int, float))
    }

  async def _load(self, serial: int, version: int) -> None:
    """Loads weights; newer ones if they have come meanwhile."""
    try:
      raw = await self._learner.call(
          "GET", f"/weights/{serial}", _TRANSFER_S, limit=1 << 40
      )
    except http.CallError as error:
      if error.status == 404:
        return  # The next beat names newer ones.
      raise

    def load() -> concurrent.futures.Future[int]:
      with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(raw)
        file.flush()
        with tensor_files.opened(pathlib.Path(file.name)) as tensors:
          values = {k: tensors.get_tensor(k) for k in tensors.keys()}
      state = messages.state_like(self._policy.model, values)
      return self._engine.update_weights(version, state)

    await asyncio.wrap_future(await asyncio.to_thread(load))
    self._serial = serial
    self._newer.set()
    self._newer = asyncio.Event()

  async def _collect(self, number: int, order: Mapping[str, Any]) -> None:
    while self._serial < order["serial"]:
      await self._newer.wait()
    faults = _Faults()
    collector = episodes.make_collector(
        self._config,
        self._episodes,
        self._engine,
        self._policy.renderer,
        observers=faults,
        mode=order["mode"],
    )
    group = await collector.collect(
        gym_base.Task.from_json(order["task"]),
        index=order["index"],
        attempt=order["attempt"],
        start_version=order["start_version"],
        group_size=order["group_size"],
        samples=order["samples"],
    )
    collected = await asyncio.to_thread(
        messages.write_group, group, self._images
    )
    found = await self._learner.ask(
        f"/leases/{number}", collected=collected, faults=faults.found
    )
    self.collected += bool(found["taken"])


