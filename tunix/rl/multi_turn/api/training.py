"""Trains from a notebook or a script: what the command `train` does, as a call.

    run = mt.train(steps=40, gym="desktop", learner={"rows": 4})
    run            # its curve so far
    run.stop()     # after this update, with a checkpoint
    run = run.resume()

Promises: the settings, their checks and the run are those of the command;
`train` raises what the command prints before it would start. In a notebook it
returns once the run is built, and the run goes on in a thread: cells stay
usable, and the cell shows its progress in place. Elsewhere it returns when the
run has ended.
"""

from __future__ import annotations

import json
import pathlib
import sys
import threading
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train as train_lib
from tunix.rl.multi_turn.api import cell as cell_lib
from tunix.rl.multi_turn.api import runs
from tunix.rl.multi_turn.reporting import run_data


class TrainingRun(runs.Run):
  """A run that trains in this process."""

  def __init__(self, run: train_lib.Run, place: cell_lib.Place):
    self.directory = run.directory
    self._place = place
    self._run: train_lib.Run | None = run
    self._stop = run.stop
    self._ended = threading.Event()
    self._failure: BaseException | None = None
    self._thread: threading.Thread | None = None

  def _read(self) -> run_data.RunDirectory:
    try:
      return run_data.load(self.directory)
    except FileNotFoundError:  # It has not written anything yet.
      return run_data.RunDirectory(self.directory, {}, (), (), "")

  @property
  def status(self) -> str:
    if not self._ended.is_set():
      return "stopping" if self._stop.is_set() else "running"
    return super().status

  @property
  def done(self) -> bool:
    """Whether it has ended, however."""
    return self._ended.is_set()

  def stop(self) -> None:
    """Asks it to end after the present update, with a checkpoint; returns at
    once. `wait` waits for the end."""
    self._stop.set()

  def wait(self, timeout_s: float | None = None) -> TrainingRun:
    """Returns when it has ended.

    An interrupt of the waiting (the notebook's stop button) leaves the run
    going.

    Raises:
      TimeoutError: it has not ended within `timeout_s`.
      RuntimeError: the run failed; `error` says the same.
    """
    if not self._ended.wait(timeout_s):
      raise TimeoutError(
        f"{self.name} still trains after {timeout_s:g} s (step {self.step});"
        " stop() asks it to end"
      )
    if self._failure is not None:
      raise RuntimeError(f"{self.name} failed") from self._failure
    if self.status == "failed":
      raise RuntimeError(f"{self.name} failed: {self.error}")
    return self

  def resume(self, **settings: Any) -> TrainingRun:
    """Waits for its end, then goes on from the newest checkpoint."""
    if not self._ended.is_set() and not self._stop.is_set():
      raise RuntimeError(f"{self.name} is still training; stop() it first")
    self._ended.wait()
    return super().resume(**settings)

  def _work(self, quiet: bool) -> None:
    run, self._run = self._run, None
    try:
      assert run is not None
      train_lib.run_to_end(run, quiet=quiet)
    except BaseException as failure:  # pylint: disable=broad-except
      # `wait` raises it; a thread's traceback is lost.
      self._failure = failure
    finally:
      self._place.release()
      self._ended.set()

  def _start(self, background: bool, quiet: bool) -> None:
    if not background:
      self._work(quiet)
      return
    self._thread = threading.Thread(
      target=self._work, args=(quiet,), name="tunix-run", daemon=True
    )
    self._thread.start()


def train(
  config: str | pathlib.Path | Mapping[str, Any] | None = None,
  *,
  wait: bool | None = None,
  **settings: Any,
) -> TrainingRun:
  """Starts a run.

  Args:
    config: a YAML file, or a mapping as one would hold.
    wait: return when the run has ended; None: except in a notebook.
    **settings: Settings as on the command line: `steps=40`, `gym="miniwob"`; a
      section
      is a mapping, `learner={"rows": 4}`; a dotted key goes as
      `**{"learner.rows": 4}`. A function or class stands for its name:
      `reward=my_reward`.

  Raises:
    ConfigError: lists every problem of the settings, or what cannot be built.
    BusyError: this process still trains or plays something else.
    RuntimeError: the run failed, where this waits for its end.
  """
  argv = arguments(config, settings)
  cell = cell_lib.current()
  if cell is not None and not sets(argv, "report.progress"):
    argv.append("report.progress=none")  # The cell shows it.
  place = cell_lib.take("a run is being built")
  built = None
  try:
    settings_of_run = config_lib.load_config(argv)
    if settings_of_run.run.dry_run:
      raise config_lib.ConfigError(
        ["run.dry_run=true: the command prints what would run; leave it out"]
      )
    built = train_lib.build(settings_of_run)
    place.what = f"{built.config.run.name} is still training"
    run = TrainingRun(built, place)
    if cell is not None:
      cell.follow(built)
  except BaseException:
    if built is not None:
      built.engine.close()
    place.release()
    raise
  background = cell is not None if wait is None else not wait
  run._start(background, quiet=cell is not None)
  if not background:
    run.wait()
  return run


def arguments(
  config: str | pathlib.Path | Mapping[str, Any] | None,
  settings: Mapping[str, Any],
) -> list[str]:
  """The command line that says the same.

  Raises:
    ConfigError: a value that no command line can say.
  """
  argv, problems = [], []
  if isinstance(config, Mapping):
    settings = {**config, **settings}
  elif config is not None:
    argv.append(str(config))
    if not argv[0].endswith((".yaml", ".yml")):
      problems.append(
        f"{argv[0]} is no YAML file; settings are keywords: steps=40"
      )
  for key, value in settings.items():
    try:
      text = json.dumps(value, default=_name, allow_nan=False)
    except (TypeError, ValueError) as error:
      problems.append(f"{key}={value!r}: {error}")
      continue
    argv.append(f"{key}={text}")
  if problems:
    raise config_lib.ConfigError(problems)
  return argv


def _name(value: object) -> Any:
  """Returns the plain value that a configuration holds for `value`."""
  if isinstance(value, pathlib.PurePath):
    return str(value)
  if isinstance(value, (tuple, set, frozenset)):
    return list(value)
  if callable(value):
    return importable_name(value)
  raise TypeError(
    f"a {type(value).__name__} cannot be written to config.yaml; give"
    " numbers, text, lists, mappings, or functions and classes"
  )


def importable_name(value: Callable[..., Any]) -> str:
  """ "module:name" of a function or class.

  Raises:
    ValueError: it has none, as it was defined within a function.
  """
  module = getattr(value, "__module__", None)
  name = getattr(value, "__qualname__", None)
  if not module or not name or "<" in name:
    raise ValueError(
      f"{name or value!r} has no name to import it by; define it at the top"
      " of a module or a cell, with def or class"
    )
  target: Any = sys.modules.get(module)
  for part in name.split("."):
    target = getattr(target, part, None)
  if target is not value:
    raise ValueError(
      f"{module}:{name} is not this object any more; give the present one"
    )
  return f"{module}:{name}"


def sets(argv: Sequence[str], key: str) -> bool:
  """Whether a command line gives the dotted key."""
  section, _, leaf = key.partition(".")
  for argument in argv:
    name, _, value = argument.partition("=")
    if name == key or (name == section and leaf in value):
      return True
  return False
