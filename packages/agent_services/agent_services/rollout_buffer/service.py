"""The buffers of a service and their rollouts.

Promises: a rollout that ran when the service was killed is started again with
it, and told what is written already; a `start` that is sent again while the
first one is under way starts one rollout; how a rollout ended is known to the
services that follow.

Does not know HTTP.
"""

from __future__ import annotations

import json
import logging
import pathlib
import threading
import time
from typing import Any, Callable, Mapping, Sequence
import uuid

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import buffers
from agent_services.rollout_buffer import generators_run
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import plugins
from agent_services.rollout_buffer import requests
from agent_services.rollout_buffer import rights as rights_lib
from agent_services.rollout_buffer import rules
from agent_services.rollout_buffer import store
from agent_services.rollout_buffer import store_work

_LOG = logging.getLogger(__name__)


class UnknownTaskType(ValueError):
  """No generator has the task type."""


class TooManyBuffers(RuntimeError):
  """A further buffer may not be made."""


class Service:
  """See the module docstring. Close it.

  Attributes:
    limits: its bounds.
    store: its items.
    url: Address for generators; set before a rollout starts.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    limits: buffer_settings.BufferLimits = buffer_settings.BufferLimits(),
    rights: rights_lib.Rights = rights_lib.Rights(),
    generators: Sequence[pathlib.Path] = (),
    token: str = "",
    url: str = "",
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:

      folder: Folder of the database.
      limits: see `BufferLimits`.
      rights: Choices that the payload of a start may make.
      generators: folders of generators besides the package's own.
      token: Bearer token, for its generators.
      url: Address of the service.
      clock: seconds, of groups' ages and leases.

    Raises:
      ValueError: another service has the folder, or a folder is none.
      OSError: it cannot be written.
    """
    plugins.discover(generators)
    self.limits = limits
    self._rights = rights
    self.url = url
    self._generators = tuple(generators)
    self._token = token
    self._clock = clock
    self._lock = threading.RLock()
    self._buffers: dict[str, buffers.Buffer] = {}
    self._runs: dict[str, generators_run.GeneratorRun] = {}
    self._starts: dict[str, tuple[float, Any]] = {}
    self._problems: dict[str, str] = {}
    # Of rollouts that ended before this service began.
    self._ended: dict[str, dict[str, Any]] = {}
    self.store = store.Store(folder / "buffer.db", limits.queue_mib << 20)
    try:
      for name, text in self.store.rows(
        "SELECT name, rollout FROM buffers ORDER BY id"
      ):
        self._restore(name, json.loads(text) if text else None)
      self.buffer(items.DEFAULT_BUFFER)
    except BaseException:
      self.close()
      raise

  # --- buffers ----------------------------------------------------------------

  @property
  def names(self) -> list[str]:
    return list(self._buffers)

  def buffer(self, name: str, make: bool = True) -> buffers.Buffer:
    """The buffer of a name.

    Raises:
      KeyError: there is none, and none is to be made.
      TooManyBuffers: none may be made.
    """
    current = self._buffers.get(name)
    if current is not None:
      return current
    if not make:
      raise KeyError(
        f"no buffer is called {name!r}; there is {', '.join(self._buffers)}"
      )
    with self._lock:
      if name not in self._buffers:
        if len(self._buffers) >= self.limits.max_buffers:
          raise TooManyBuffers(
            f"there are {len(self._buffers)} buffers, as many as there may be"
            f" (--max-buffers); no {name!r} is made"
          )
        current = self._make(name)
        current.configure(current.judge.rules, current.judge.hooks, "")
        self._buffers[name] = current
      return self._buffers[name]

  def _make(self, name: str) -> buffers.Buffer:
    number = self.store.do(store_work.make_buffer(name))
    return buffers.Buffer(number, name, self.store, self.limits, self._clock)

  def _restore(self, name: str, record: Mapping[str, Any] | None) -> None:
    buffer = self._make(name)
    self._buffers[name] = buffer
    if record is not None and record.get("run"):
      self._ended[name] = record["run"]
    if record is None:
      buffer.configure(buffer.judge.rules, buffer.judge.hooks, "")
      return
    rollout = requests.rollout(record["payload"], self.url)
    hooks = rules.Hooks()
    try:
      generator = self._generator(rollout.start.task_type)
      hooks = plugins.hooks_of(generator)
      if record["state"] == "running":  # The operator may list less by now.
        self._check(rollout, generator)
    except ValueError as error:
      # What is stored is readable all the same.
      self._problems[name] = f"the rollout is not resumed: {error}"
      _LOG.error("buffer %s: %s", name, self._problems[name])
      buffer.configure(rollout.rules, hooks, rollout.start.task_type)
      return
    buffer.configure(rollout.rules, hooks, rollout.start.task_type)
    if record["state"] != "running":
      return
    buffer.allowed_items = rollout.start.allowed_items
    skip = [*rollout.payload["skip_instance_ids"], *self._written(buffer)]
    _LOG.info("buffer %s: its rollout is resumed", name)
    self._run(buffer, generator, {**rollout.payload, "skip_instance_ids": skip})

  def _written(self, buffer: buffers.Buffer) -> list[str]:
    """The instance of each whole group that was written."""
    rows = self.store.rows(
      "SELECT instance_id, COUNT(*) FROM items WHERE buffer = ? GROUP BY"
      " instance_id",
      buffer.id,
    )
    size = buffer.judge.rules.group_size
    return [name for name, count in rows for _ in range(count // size)]

  def known(self, buffer: buffers.Buffer, uids: Sequence[str]) -> list[str]:
    """Returns the uids of items that the buffer has, or had."""
    known_uids: list[str] = []
    for start in range(0, len(uids), 500):
      part = uids[start : start + 500]
      marks = ",".join("?" * len(part))
      rows = self.store.rows(
        f"SELECT uid FROM items WHERE buffer = ? AND uid IN ({marks})",
        buffer.id,
        *part,
      )
      known_uids.extend(uid for (uid,) in rows)
    return known_uids

  # --- rollouts ---------------------------------------------------------------

  def _generator(self, task_type: str) -> plugins.Generator:
    discovery = plugins.discover(self._generators)
    generator = discovery.generators.get(task_type)
    if generator is None:
      why = f" ({'; '.join(discovery.problems)})" if discovery.problems else ""
      raise UnknownTaskType(
        f"task_type={task_type!r} has no generator; there is"
        f" {', '.join(sorted(discovery.generators))}{why}"
      )
    return generator

  def _check(
    self, rollout: requests.Rollout, generator: plugins.Generator
  ) -> None:
    """Raises ValueError unless the operator allows the rollout."""
    self._rights.check(rollout.payload, generator.reads, self.url)
    if rollout.start.task_type == "desktop":
      requests.check_screens(rollout, self.limits.max_megapixels)

  def start(self, name: str, payload: object) -> None:
    """Starts a rollout in a buffer, in place of the one that runs there.

    Raises:
      UnknownTaskType, ValueError: of the payload.
      OSError: the generator's process cannot be started.
    """
    arrived = time.monotonic()
    rollout = requests.rollout(payload, self.url)
    requests.check_step(rollout, self.limits.max_items)
    generator = self._generator(rollout.start.task_type)
    self._check(rollout, generator)
    hooks = plugins.hooks_of(generator)
    buffer = self.buffer(name)
    with self._lock:
      run = self._runs.get(name)
      started, before = self._starts.get(name, (0.0, None))
      if before == payload and started > arrived:
        return  # Its client did not wait for the answer.
      if run is not None:
        run.stop()
      if not rollout.start.keep_items:
        buffer.reset()
      buffer.judge.errors.clear()
      self._problems.pop(name, None)
      sent = {**rollout.payload, "rollout_id": uuid.uuid4().hex}
      self._keep(buffer, sent, "running")
      buffer.configure(rollout.rules, hooks, rollout.start.task_type)
      buffer.allowed_items = rollout.start.allowed_items
      self._run(buffer, generator, sent)
      self._starts[name] = (time.monotonic(), payload)

  def _run(
    self,
    buffer: buffers.Buffer,
    generator: plugins.Generator,
    payload: Mapping[str, Any],
  ) -> None:
    def ended(run: generators_run.GeneratorRun) -> None:
      try:
        self._keep(buffer, dict(payload), run.state, run.describe())
      except (store.StoreError, TimeoutError) as error:
        _LOG.error("buffer %s: %s", buffer.name, error)

    self._runs[buffer.name] = generators_run.GeneratorRun(
      generator,
      {
        **payload,
        "buffer": buffer.name,
        rights_lib.ALLOWED: {
          "gyms": self._rights.gyms,
          "client_settings": self._rights.client_settings,
        },
      },
      timeout_s=self.limits.rollout_timeout,
      grace_s=self.limits.stop_grace,
      token=self._token,
      on_end=ended,
    )

  def _keep(
    self,
    buffer: buffers.Buffer,
    payload: Mapping[str, Any],
    state: str,
    run: Mapping[str, Any] | None = None,
  ) -> None:
    if payload.get("remote_buffer_url") == self.url:
      # This one's own, which may be another when it starts again.
      payload = {**payload, "remote_buffer_url": ""}
    text = json.dumps({"payload": payload, "state": state, "run": run})
    self.store.do(store_work.set_rollout(buffer.id, text))

  def stop(self, name: str) -> bool:
    """Stops a buffer's generator; whether one ran."""
    buffer = self.buffer(name, make=False)
    with self._lock:
      run = self._runs.get(name)
      if run is None or not run.running:
        return False
      run.stop()
      (row,) = self.store.rows(
        "SELECT rollout FROM buffers WHERE id = ?", buffer.id
      )
      self._keep(
        buffer,
        json.loads(row[0])["payload"],
        "stopped",
        # It may take longer to end than a stop waits.
        {**run.describe(), "state": "stopped"},
      )
      return True

  def stats(self, name: str) -> dict[str, Any]:
    """Figures of a buffer and its rollout.

    Raises:
      KeyError: there is none.
    """
    figures = self.buffer(name, make=False).stats()
    run = self._runs.get(name)
    last = run.describe() if run is not None else self._ended.get(name)
    figures["generator"] = last
    if name in self._problems:
      figures["errors"].append(self._problems[name])
    if last and last["error"] and last["state"] != "stopped":
      figures["errors"].append(
        f"generator {last['task_type']}: {last['error']}"
      )
    figures["store_failures"] = self.store.failures
    figures["store_error"] = self.store.last_error
    return figures

  def sweep(self) -> None:
    """Ends what is overdue, in each buffer."""
    for buffer in list(self._buffers.values()):
      buffer.sweep()

  def close(self) -> None:
    """Stops generators, which are resumed by the next service. Idempotent."""
    with self._lock:
      for run in self._runs.values():
        run.stop()
    self.store.close()
