"""Sends a run's numbers to TensorBoard, Weights & Biases and MLflow.

Each tracker is an observer with a thread of its own: `on_event` puts calls into
bounded memory, and the thread makes them. A tracker receives the configuration,
the metrics of every step (`train/<metric>`), the figures of every evaluation
(`eval/<figure>`) at its step, and the run's final status. TensorBoard and W&B
also get film strips of some of an evaluation's episodes and a table of them. A
resumed run continues the same tracked run.

Promises: a backend that is absent, unreachable, slow or broken is named in one
warning and disturbs nothing: it is abandoned after a few failures in a row, and
closing waits no longer than `TrackingConfig.close_timeout_s`. MLflow gets what
waited for a slow answer in one request, and again what a failed one held.

Does not: use upstream's `MetricsLogger`, which listens to all of the process's
`jax.monitoring`, keeps every value forever, and removes all other listeners
when it is closed. Does not send whole episodes, or those of training; the
Training Monitor has them.
"""

from __future__ import annotations

import collections
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
from typing import Any, Callable, Mapping, Protocol, Sequence
from urllib import parse
import uuid

import numpy as np
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.reporting import tracker_media
from tunix.rl.multi_turn.reporting.reporting_settings import TrackingConfig

_LOG = logging.getLogger(__name__)
_IDENTITY = "tracking.json"
_STATUSES = {
  "completed": "FINISHED",
  "failed": "FAILED",
  "interrupted": "KILLED",
}
_STOP = object()
_MOST_METRICS = 1000  # Of a request to MLflow.


Pictures = Mapping[str, tuple[np.ndarray, str]]
"""Name -> (uint8[H, W, 3], caption)."""
Rows = list[tuple[Any, ...]]
"""Rows with `tracker_media.COLUMNS`."""


class Backend(Protocol):
  """A tracking service. One thread calls it; calls may raise or be slow."""

  def start(self, run_name: str, config: Mapping[str, Any]) -> None: ...

  def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

  def media(self, step: int, pictures: Pictures, rows: Rows) -> None:
    """Shows an evaluation's episodes."""

  def finish(self, status: str) -> None:
    """`status` is "completed", "failed" or "interrupted"."""


class Tracker:
  """An `events.Observer`; see the module docstring. Close it.

  Attributes:
    failures: calls of the backend that raised.
    dropped: calls not made, for want of room or as the backend was abandoned.
  """

  def __init__(
    self,
    name: str,
    open_: Callable[[], Backend],
    config: TrackingConfig = TrackingConfig(),
    images: images_lib.ImageStore | None = None,
  ):
    """Args:

    name: Name of the backend, for people.
    open_: makes it; called by the tracker's thread.
    config: `close_timeout_s`, `max_pending`, `give_up_after` and
      `film_strips`.
    images: screens of film strips; None draws none.
    """
    self.name = name
    self.failures = 0
    self.dropped = 0
    self._open = open_
    self._config = config
    self._backend: Backend | None = None
    self._images = images
    self._eval_step: dict[str, int] = {}
    self._media = tracker_media.EvalMedia(config.film_strips)
    self._step = 0
    self._in_a_row = 0
    self._given_up = False
    self._queue: queue.Queue[Any] = queue.Queue(config.max_pending)
    self._ahead: collections.deque[Any] = collections.deque()
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
    elif isinstance(event, events.EpisodeFinished):
      if event.split == "eval" and self._config.film_strips:
        self._media.add(event)
    elif isinstance(event, events.EvalFinished):
      step = event.step
      if step is None:
        step = self._eval_step.get(event.name, self._step)
      self._put("scalars", step, _numbers(event.results, "eval"))
      media = self._media
      self._media = tracker_media.EvalMedia(self._config.film_strips)
      if media.rows:
        self._put("media", step, media)
    elif isinstance(event, events.RunFinished):
      self._put("finish", event.status)

  def close(self) -> None:
    """Makes pending calls for `close_timeout_s`. Idempotent."""
    if not self._closed:
      self._closed = True
      # Without room for this, the thread is stuck; it is left behind.
      with contextlib.suppress(queue.Full):
        self._queue.put_nowait(_STOP)
    allowed = self._config.close_timeout_s
    self._thread.join(allowed)
    if self._thread.is_alive() and not self._given_up:
      self._complain(f"did not take everything within {allowed:g} s")

  def _put(self, *call: Any) -> None:
    try:
      if self._given_up or self._closed:
        raise queue.Full
      self._queue.put_nowait(call)
    except queue.Full:
      self.dropped += 1

  # --- the tracker's thread ---------------------------------------------------

  def _run(self) -> None:
    while (call := self._taken()) is not _STOP:
      if self._given_up:
        self.dropped += 1
        continue
      method, *args = call
      try:
        if self._backend is None:
          self._backend = self._open()
        if method == "media":
          self._show(self._backend, *args)
        elif method == "scalars" and hasattr(self._backend, "series"):
          self._backend.series([(*args,), *self._following()])
        else:
          getattr(self._backend, method)(*args)
        self._in_a_row = 0
      except ImportError as error:
        self.failures += 1
        self._give_up(str(error))
      except BaseException as error:  # pylint: disable=broad-except
        # Libraries raise SystemExit, too, for want of a login.
        self.failures += 1
        self._in_a_row += 1
        if method == "start" or self._in_a_row >= self._config.give_up_after:
          self._give_up(f"{type(error).__name__}: {error}")

  def _taken(self) -> Any:
    return self._ahead.popleft() if self._ahead else self._queue.get()

  def _following(self) -> list[tuple[int, Mapping[str, float]]]:
    """The steps' values that wait behind the present ones."""
    steps: list[tuple[int, Mapping[str, float]]] = []
    while not self._ahead:
      try:
        call = self._queue.get_nowait()
      except queue.Empty:
        break
      if call is _STOP or call[0] != "scalars":
        self._ahead.append(call)
      else:
        steps.append(call[1:])
    return steps

  def _show(
    self, backend: Backend, step: int, media: tracker_media.EvalMedia
  ) -> None:
    """Draws the strips: here, and not in the thread that emits."""
    pictures = {}
    for number, one in enumerate(media.strips):
      if self._images is None:
        break
      pixels = tracker_media.strip(one, self._images)
      if pixels is not None:
        kind = "solved" if one.success else "failed"
        pictures[f"episodes/{kind}_{number}"] = (pixels, one.caption)
    backend.media(step, pictures, media.rows)

  def _give_up(self, reason: str) -> None:
    self.dropped += 1
    self._complain(reason)
    self._given_up = True

  def _complain(self, reason: str) -> None:
    _LOG.warning(
      "%s receives nothing more of this run, training continues: %s",
      self.name,
      credentials.masked(" ".join(reason.split())[:500]),
    )


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
  """The numbers of nested mappings, under their names joined by slashes."""
  numbers: dict[str, float] = {}
  for key, value in values.items():
    name = f"{prefix}/{key}"
    if isinstance(value, Mapping):
      numbers |= _numbers(value, name)
    elif hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
      numbers[name] = float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      numbers[name] = float(value)
  return numbers


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Leaves of nested mappings, under their names joined by dots."""
  leaves: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      leaves |= _flat(value, f"{prefix}{key}.")
    else:
      leaves[f"{prefix}{key}"] = value
  return leaves


# --- backends -----------------------------------------------------------------


class TensorBoard:
  """Event files, by tensorboardX."""

  def __init__(self, folder: pathlib.Path, resume_step: int | None):
    """Args:

    folder: Folder of the files.
    resume_step: later steps are removed from the files; None for a new run.
    """
    writer = _import("tensorboardX", "tensorboardX")
    folder.mkdir(parents=True, exist_ok=True)  # Raises with the reason.
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

  def media(self, step: int, pictures: Pictures, rows: Rows) -> None:
    for name, (pixels, caption) in pictures.items():
      self._writer.add_image(name, pixels, step, dataformats="HWC")
      self._writer.add_text(f"{name}/caption", caption, step)
    table = tracker_media.markdown(rows)
    self._writer.add_text("episodes/table", table, step)

  def finish(self, status: str) -> None:
    self._writer.add_text("status", status)
    self._writer.close()


def has_wandb_login() -> bool:
  """Whether Weights & Biases has a key here, and need not ask for one."""
  if os.environ.get("WANDB_API_KEY") or os.environ.get(
    "WANDB_IDENTITY_TOKEN_FILE"
  ):
    return True
  url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
  path = os.environ.get("NETRC") or pathlib.Path.home() / ".netrc"
  try:
    return bool(
      netrc.netrc(str(path)).authenticators(parse.urlsplit(url).hostname or "")
    )
  except (OSError, netrc.NetrcParseError):
    return False


class WeightsAndBiases:
  """A W&B run, online or kept in files for `wandb sync`."""

  def __init__(
    self,
    folder: pathlib.Path,
    project: str,
    mode: str,
    id_: str,
    close_s: float,
  ):
    """Args:

    folder: Parent of the folder `wandb`.
    project: Project at W&B.
    mode: "online" or "offline".
    id_: Id of the run; a known one continues.
    close_s: deadline of its end.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    self._wandb = _import("wandb", "tunix-multi-turn[tracking]")
    if mode == "online" and not has_wandb_login():
      # It would ask on the terminal, in the middle of the training.
      raise PermissionError(
        "no API key; run `wandb login`, set WANDB_API_KEY, or use"
        " tracking.wandb=offline"
      )
    self._project, self._mode, self._id = project, mode, id_
    self._folder = folder
    self._close_s = close_s
    self._run: Any = None

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

  def media(self, step: int, pictures: Pictures, rows: Rows) -> None:
    shown: dict[str, Any] = {
      name: self._wandb.Image(pixels, caption=caption)
      for name, (pixels, caption) in pictures.items()
    }
    shown["episodes/table"] = self._wandb.Table(
      columns=list(tracker_media.COLUMNS), data=[list(row) for row in rows]
    )
    self._run.log({**shown, "step": step})

  def finish(self, status: str) -> None:
    self._run.summary["status"] = status
    self._run.finish(exit_code=0 if status == "completed" else 1)


def _not_stopped() -> None:
  _LOG.warning(
    "Weights & Biases asks to stop this run; training continues, and Ctrl-C"
    " where it runs ends it"
  )


class MLflow:
  """A run of an MLflow tracking server, or of a database file."""

  def __init__(self, uri: str, experiment: str, identity: _Identity):
    """Args:

    uri: Tracking server: http(s)://host:port or sqlite:///file.
    experiment: its name; made if it is new.
    identity: keeps the run's id.
    """
    for name, value in (
      ("MLFLOW_DISABLE_TELEMETRY", "true"),
      ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
      ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ):
      os.environ.setdefault(name, value)
    package = "tunix-multi-turn[tracking]"
    tracking = _import("mlflow.tracking", package)
    self._entities = _import("mlflow.entities", package)
    self._client = tracking.MlflowClient(tracking_uri=uri)
    existing = self._client.get_experiment_by_name(experiment)
    self._experiment = (
      existing.experiment_id
      if existing is not None
      else self._client.create_experiment(experiment)
    )
    self._identity = identity
    self._run = ""
    self._unsent: list[Any] = []

  def start(self, run_name: str, config: Mapping[str, Any]) -> None:
    run_id = self._identity.get("mlflow")
    if run_id:
      self._run = run_id
      self._client.update_run(run_id, status="RUNNING")
      return  # MLflow refuses parameters that it has.
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
    self.series([(step, values)])

  def series(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """Sends several steps' values, after those of requests that failed.

    A server keeps one of two equal values of a step and time, so that one may
    be sent again although the server has it.
    """
    now = int(time.time() * 1000)
    self._unsent += [
      self._entities.Metric(name, value, now, step)
      for step, values in steps
      for name, value in values.items()
      if math.isfinite(value)  # No MLflow store takes them all.
    ]
    while self._unsent:
      self._client.log_batch(self._run, metrics=self._unsent[:_MOST_METRICS])
      del self._unsent[:_MOST_METRICS]

  def media(self, step: int, pictures: Pictures, rows: Rows) -> None:
    """Nothing: artifacts of a database's runs would lie where this runs."""

  def finish(self, status: str) -> None:
    try:
      self.series([])
    finally:
      self._client.set_terminated(self._run, _STATUSES.get(status, "FAILED"))


def _import(module: str, package: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(f"{error}; pip install '{package}'") from None


# --- of a run -----------------------------------------------------------------


class _Identity:
  """Keeps the trackers' ids of a run in its directory."""

  def __init__(self, run_dir: pathlib.Path, resuming: bool):
    self._path = run_dir / _IDENTITY
    self._lock = threading.Lock()
    self._known: dict[str, str] = {}
    if resuming:
      try:
        ids = json_text.read(self._path)
        self._known = {str(k): str(v) for k, v in ids.items()}
      except FileNotFoundError:
        pass  # Nothing was tracked.
      except (OSError, ValueError, AttributeError) as error:
        _LOG.warning(
          "%s is damaged (%s): trackers show the run from here on as a new"
          " one; restore the file from a copy before resuming to go on in"
          " the old one",
          self._path,
          error,
        )

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
  config: TrackingConfig,
  run_dir: pathlib.Path,
  resume_step: int | None,
  images: images_lib.ImageStore | None = None,
) -> list[Tracker]:
  """Starts the configured trackers of a run.

  Args:
    config: the section `tracking`.
    run_dir: Directory of the run.
    resume_step: step of the checkpoint that the run resumes from; None for a
      new run.
    images: Images of the run, for film strips.
  """
  identity = _Identity(run_dir, resume_step is not None)

  def open_wandb() -> Backend:
    id_ = identity.get("wandb")
    if id_ is None:
      id_ = uuid.uuid4().hex[:12]
      identity.set("wandb", id_)
    return WeightsAndBiases(
      run_dir, config.project, config.wandb, id_, config.close_timeout_s
    )

  backends: list[tuple[bool, str, Callable[[], Backend]]] = [
    (
      config.tensorboard,
      "TensorBoard",
      lambda: TensorBoard(run_dir / "tensorboard", resume_step),
    ),
    (config.wandb != "off", "Weights & Biases", open_wandb),
    (
      bool(config.mlflow),
      "MLflow",
      lambda: MLflow(config.mlflow, config.project, identity),
    ),
  ]
  return [
    Tracker(name, open_, config, images)
    for is_on, name, open_ in backends
    if is_on
  ]
