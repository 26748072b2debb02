"""TensorBoard, Weights & Biases and MLflow, told of a run.

Each is an observer with a thread of its own: `on_event` puts what there is to
tell into bounded memory, and that thread speaks to the backend. Told are the
configuration, the metrics of every step (`train/<metric>`), the figures of
every evaluation (`eval/<figure>`) at its step, and how the run ended. A run
that resumes goes on in the same tracked run.

Promises: a backend that is absent, unreachable, slow or broken is named in one
warning and disturbs nothing: it is given up after a few failures in a row, and
closing waits no longer than it may.

Upstream's `MetricsLogger` is not what carries this: it listens to all of the
process's `jax.monitoring`, keeps every value for good, and takes away everybody
else's listeners when it is closed. The Training Monitor has the episodes;
trackers have numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import netrc
import os
import pathlib
import queue
import threading
import time
from typing import Any, Callable, Mapping, Protocol
from urllib import parse
import uuid

from tunix.rl.multi_turn.core import events

_LOG = logging.getLogger(__name__)
_GIVE_UP_AFTER = 5
_MOST_PENDING = 10_000
_IDENTITY = "tracking.json"
_REQUEST_S = 10
_STATUSES = {
    "completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED",
}  # pyformat: disable
_STOP = object()


class Backend(Protocol):
  """Where numbers go. Called by one thread; may raise and may take its time."""

  def start(self, run_name: str, config: Mapping[str, Any]) -> None:
    ...

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    ...

  def finish(self, status: str) -> None:
    """`status` is "completed", "failed" or "interrupted"."""


class Tracker:
  """An `events.Observer`; see the module docstring. Close it.

  Attributes:
    failures: calls of the backend that raised.
    dropped: what was not told, for want of room or as the backend was given
      up.
  """

  def __init__(
      self, name: str, open_: Callable[[], Backend], *, close_s: float = 10.0
  ):
    """Args:

      name: of the backend, for people.
      open_: makes it; called by the tracker's thread.
      close_s: how long `close` may wait for what is not told yet.
    """
    self.name = name
    self.failures = 0
    self.dropped = 0
    self._open = open_
    self._close_s = close_s
    self._backend: Backend | None = None
    self._eval_step: dict[str, int] = {}
    self._step = 0
    self._in_a_row = 0
    self._given_up = False
    self._queue: queue.Queue[Any] = queue.Queue(_MOST_PENDING)
    self._closed = False
    self._thread = threading.Thread(
        target=self._run, name=f"tracker-{name}", daemon=True
    )
    self._thread.start()

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.RunStarted):
      self._put("start", event.run_name, dict(event.config))
    elif isinstance(event, events.StepFinished):
      self._step = event.step
      values = _numbers({**event.metrics, "version": event.version}, "train")
      self._put("scalars", event.step, values)
    elif isinstance(event, events.EvalStarted):
      self._eval_step[event.name] = event.step
    elif isinstance(event, events.EvalFinished):
      step = self._eval_step.get(event.name, self._step)
      self._put("scalars", step, _numbers(event.results, "eval"))
    elif isinstance(event, events.RunFinished):
      self._put("finish", event.status)

  def close(self) -> None:
    """Tells what it can in the time that it has. Idempotent."""
    if not self._closed:
      self._closed = True
      # Without room for the word, the thread is stuck; it is left behind.
      with contextlib.suppress(queue.Full):
        self._queue.put_nowait(_STOP)
    self._thread.join(self._close_s)
    if self._thread.is_alive() and not self._given_up:
      self._complain(f"did not take everything within {self._close_s:g} s")

  def _put(self, *call: Any) -> None:
    try:
      if self._given_up or self._closed:
        raise queue.Full
      self._queue.put_nowait(call)
    except queue.Full:
      self.dropped += 1

  # --- the tracker's thread ---------------------------------------------------

  def _run(self) -> None:
    while (call := self._queue.get()) is not _STOP:
      if self._given_up:
        self.dropped += 1
        continue
      method, *args = call
      try:
        if self._backend is None:
          self._backend = self._open()
        getattr(self._backend, method)(*args)
        self._in_a_row = 0
      except ImportError as error:
        self.failures += 1
        self._give_up(str(error))
      except BaseException as error:  # pylint: disable=broad-except
        # SystemExit is among what libraries raise for want of a login.
        self.failures += 1
        self._in_a_row += 1
        if method == "start" or self._in_a_row >= _GIVE_UP_AFTER:
          self._give_up(f"{type(error).__name__}: {error}")

  def _give_up(self, reason: str) -> None:
    self.dropped += 1
    self._complain(reason)
    self._given_up = True

  def _complain(self, reason: str) -> None:
    _LOG.warning(
        "%s is not told of this run any more, training goes on: %s",
        self.name,
        " ".join(reason.split())[:500],
    )


def _numbers(
    values: Mapping[str, Any], prefix: str
) -> dict[str, float]:
  """The numbers of nested mappings, under their names joined by slashes."""
  found: dict[str, float] = {}
  for key, value in values.items():
    name = f"{prefix}/{key}"
    if isinstance(value, Mapping):
      found |= _numbers(value, name)
    elif hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
      found[name] = float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      found[name] = float(value)
  return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Leaves of nested mappings, under their names joined by dots."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      found |= _flat(value, f"{prefix}{key}.")
    else:
      found[f"{prefix}{key}"] = value
  return found


# --- backends -----------------------------------------------------------------


class TensorBoard:
  """Event files, by tensorboardX, which comes with google-tunix."""

  def __init__(self, folder: pathlib.Path, resume_step: int | None):
    """Args:

      folder: of the files.
      resume_step: what was told of later steps is to be forgotten; None for a
        new run.
    """
    writer = _import("tensorboardX", "tensorboardX")
    folder.mkdir(parents=True, exist_ok=True)  # Says why it cannot be.
    self._writer = writer.SummaryWriter(
        str(folder),
        purge_step=None if resume_step is None else resume_step + 1,
        flush_secs=10,
    )

  def start(self, run_name: str, config: Mapping[str, Any]) -> None:
    text = json.dumps(config, indent=2, default=str)
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    self._writer.add_text("config", f"{run_name}\n\n{indented}")
    self._writer.flush()

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._writer.add_scalar(name, value, step)

  def finish(self, status: str) -> None:
    self._writer.add_text("status", status)
    self._writer.close()


class WeightsAndBiases:
  """A W&B run, online or kept in files for `wandb sync`."""

  def __init__(
      self, folder: pathlib.Path, project: str, mode: str, id_: str,
      close_s: float,
  ):  # pyformat: disable
    """Args:

      folder: that gets the folder `wandb`.
      project: of W&B.
      mode: "online" or "offline".
      id_: of the run; one that is known goes on.
      close_s: how long it may take to end.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    self._wandb = _import("wandb", "tunix-multi-turn[tracking]")
    if mode == "online" and not self._has_login():
      # It would ask on the terminal, in the middle of the training.
      raise PermissionError(
          "no API key; run `wandb login`, set WANDB_API_KEY, or use"
          " tracking.wandb=offline"
      )
    self._project, self._mode, self._id = project, mode, id_
    self._folder = folder
    self._close_s = close_s
    self._run: Any = None

  def _has_login(self) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get(
        "WANDB_IDENTITY_TOKEN_FILE"
    ):
      return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    path = os.environ.get("NETRC") or pathlib.Path.home() / ".netrc"
    try:
      return bool(netrc.netrc(str(path)).authenticators(
          parse.urlsplit(url).hostname or ""
      ))  # pyformat: disable
    except (OSError, netrc.NetrcParseError):
      return False

  def start(self, run_name: str, config: Mapping[str, Any]) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    self._run = self._wandb.init(
        project=self._project,
        name=run_name,
        id=self._id,
        resume="allow",
        dir=str(self._folder),
        config=dict(config),
        mode=self._mode,
        reinit="create_new",
        settings=self._wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=30.0,
            finish_timeout=self._close_s,
            x_save_requirements=False,
            quiet=True,
            # Else a button on its page, or an error of its own, sends this
            # process a Ctrl-C.
            stop_fn=_not_stopped,
        ),
    )
    # An axis of our own: W&B's only grows, and a resumed run goes back.
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({**values, "step": step})

  def finish(self, status: str) -> None:
    self._run.summary["status"] = status
    self._run.finish(exit_code=0 if status == "completed" else 1)


def _not_stopped() -> None:
  _LOG.warning(
      "Weights & Biases asks to stop this run; training goes on, and Ctrl-C"
      " where it runs ends it"
  )


class MLflow:
  """A run of an MLflow tracking server, or of a database file."""

  def __init__(self, uri: str, experiment: str, identity: _Identity):
    """Args:

      uri: of the tracking server: http(s)://host:port or sqlite:///file.
      experiment: its name; made if it is new.
      identity: remembers the run.
    """
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_S)),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ):
      os.environ.setdefault(name, value)
    package = "tunix-multi-turn[tracking]"
    tracking = _import("mlflow.tracking", package)
    self._entities = _import("mlflow.entities", package)
    self._client = tracking.MlflowClient(tracking_uri=uri)
    found = self._client.get_experiment_by_name(experiment)
    self._experiment = (
        found.experiment_id
        if found is not None
        else self._client.create_experiment(experiment)
    )
    self._identity = identity
    self._run = ""

  def start(self, run_name: str, config: Mapping[str, Any]) -> None:
    known = self._identity.get("mlflow")
    if known:
      self._run = known
      self._client.update_run(known, status="RUNNING")
      return  # Parameters cannot be told twice.
    run = self._client.create_run(self._experiment, run_name=run_name)
    self._run = run.info.run_id
    self._identity.set("mlflow", self._run)
    params = [
        self._entities.Param(name, str(value)[:6000])
        for name, value in _flat(config).items()
    ]
    for start in range(0, len(params), 100):
      self._client.log_batch(self._run, params=params[start : start + 100])

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    found = [
        self._entities.Metric(name, value, now, step)
        for name, value in values.items()
        if math.isfinite(value)  # No store of MLflow's has all of them.
    ]
    for start in range(0, len(found), 1000):
      self._client.log_batch(self._run, metrics=found[start : start + 1000])

  def finish(self, status: str) -> None:
    self._client.set_terminated(self._run, _STATUSES.get(status, "FAILED"))


def _import(module: str, package: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(f"{error}; pip install '{package}'") from None


# --- of a run -----------------------------------------------------------------


class _Identity:
  """What a run is called by trackers, in its folder."""

  def __init__(self, run_dir: pathlib.Path, resuming: bool):
    self._path = run_dir / _IDENTITY
    self._lock = threading.Lock()
    self._known: dict[str, str] = {}
    if resuming:
      try:
        found = json.loads(self._path.read_text())
        self._known = {str(k): str(v) for k, v in found.items()}
      except (OSError, ValueError, AttributeError):
        pass  # Then it is tracked as a new run.

  def get(self, name: str) -> str | None:
    with self._lock:
      return self._known.get(name)

  def set(self, name: str, value: str) -> None:
    with self._lock:
      self._known[name] = value
      self._path.parent.mkdir(parents=True, exist_ok=True)
      partial = self._path.with_suffix(".part")
      partial.write_text(json.dumps(self._known))
      partial.replace(self._path)


def of_run(
    tracking: Any, run_dir: pathlib.Path, resume_step: int | None
) -> list[Tracker]:
  """The trackers that a configuration asks for.

  Args:
    tracking: `config.TrackingConfig`.
    run_dir: of the run.
    resume_step: updates that were made before; None for a new run.
  """
  identity = _Identity(run_dir, resume_step is not None)
  found = []

  def add(name: str, open_: Callable[[], Backend]) -> None:
    found.append(Tracker(name, open_, close_s=tracking.close_timeout_s))

  if tracking.tensorboard:
    add(
        "TensorBoard",
        lambda: TensorBoard(run_dir / "tensorboard", resume_step),
    )
  if tracking.wandb != "off":

    def open_wandb() -> Backend:
      id_ = identity.get("wandb")
      if id_ is None:
        id_ = uuid.uuid4().hex[:12]
        identity.set("wandb", id_)
      return WeightsAndBiases(
          run_dir, tracking.project, tracking.wandb, id_,
          tracking.close_timeout_s,
      )  # pyformat: disable

    add("Weights & Biases", open_wandb)
  if tracking.mlflow:
    add(
        "MLflow",
        lambda: MLflow(tracking.mlflow, tracking.project, identity),
    )
  return found
