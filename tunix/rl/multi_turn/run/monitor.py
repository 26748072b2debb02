"""Attaches the Training Monitor to a run, and starts its embedded server.

The monitor is the package `training_monitor`, found by the entry points
`tunix.rl.multi_turn.monitor`: `event_log`, a module with `EventLog` and
`RunSpec`, and `program`, whose module runs as `python -m`.

Promises: without `monitor.url` or `monitor.embedded` nothing of the monitor is
imported. The embedded server ends with the run, however that ends: it reads the
end of a pipe that only the run holds. Its database stays; undelivered events
wait in the runs' folder for the next run.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any, Mapping
import uuid

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import monitor_settings as settings_lib
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.run import packages

_LOG = logging.getLogger(__name__)
_STOP_S = 15.0
_IDENTITY = "monitor.json"
_EMBEDDED = "monitor.embedded=true"
TOKEN_VARIABLE = settings_lib.TOKEN_VARIABLE


class RunMonitor:
  """A run's connection to the monitor; `observer` receives its events."""

  def __init__(
    self,
    config: config_lib.TrainConfig,
    images: images_lib.ImageStore,
    *,
    resume_step: int | None = None,
    tokenizer: pathlib.Path | None = None,
  ):
    """Starts the uploader, and the embedded server if it is configured.

    Args:
      config: Settings of the run.
      images: pixels of the screenshots.
      resume_step: updates made before this start.
      tokenizer: the policy's tokenizer.json, for the embedded server to show
        tokens as text; None shows ids where it has no other tokenizer.

    Raises:
      ConfigError: a package is missing, the URL is none, or the embedded server
        does not start.
    """
    monitor = config.monitor
    setting = f"monitor.url={monitor.url}" if monitor.url else _EMBEDDED
    event_log = packages.part("monitor", "event_log", setting).load()
    self.server: EmbeddedServer | None = None
    url, target, token = monitor.url, "", os.environ.get(TOKEN_VARIABLE, "")
    if monitor.embedded:
      database = _database(config)
      tokenizers = {} if tokenizer is None else {config.policy.name: tokenizer}
      self.server = EmbeddedServer(database, tokenizers)
      url, token = self.server.url, ""
      target = f"embedded:{database}"
    self.url = url
    try:
      training, session = _identity(config.run_dir)
      self.observer = event_log.EventLog(
        event_log.RunSpec(
          url=url,
          token=token,
          target=target,
          spool_dir=str(_root(config) / "monitor_spool"),
          name=f"{config.run_dir.name}-{uuid.uuid4().hex[:12]}",
          training_id=training,
          session=session,
          training=_training(config),
          start_step=resume_step or 0,
          task_source=_world(config),
          environment=_box(config),
          trajectories=str(config.run_dir.absolute() / "trajectories.jsonl")
          if config.report.episodes
          else "",
          max_turns=config.environment.max_turns,
        ),
        monitor,
        images=images if monitor.images else None,
      )
    except Exception as error:
      self._stop_server()
      raise config_lib.ConfigError([f"monitor.url={url}: {error}"]) from error

  def close(self) -> None:
    """Delivers for `monitor.close_timeout_s`, then ends the embedded server."""
    self.observer.close()
    self._stop_server()
    if self.server is not None:
      again = shell_hints.command(
        "monitor", "serve", "--database", _shown(self.server.database)
      )
      print(
        f"training monitor: look at it again with: {again}", file=sys.stderr
      )

  def _stop_server(self) -> None:
    if self.server is not None:
      self.server.close()


class EmbeddedServer:
  """Runs `monitor serve` as a process on a free port of this machine.

  Attributes:
    url: its address.
    database: its SQLite file.
  """

  def __init__(
    self,
    database: pathlib.Path,
    tokenizers: Mapping[str, pathlib.Path] | None = None,
  ):
    """Starts it.

    Args:
      database: its SQLite file, made with its folder when missing.
      tokenizers: policy.name -> the tokenizer.json of its tokens.

    Raises:
      ConfigError: The package is missing, or the server does not start.
    """
    program = packages.part("monitor", "program", _EMBEDDED).module
    database.parent.mkdir(parents=True, exist_ok=True)
    self.database = database
    options = [
      f"--tokenizer={name}={path.absolute()}"
      for name, path in (tokenizers or {}).items()
    ]
    self._log = database.with_suffix(".log")
    with open(self._log, "ab") as log:
      self._process = subprocess.Popen(
          [
              sys.executable, "-P", "-m", program, "serve", "--database",
              str(database), "--port", "0", "--until-eof", *options,
          ],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          # Ctrl-C is for the run, which ends its server itself. A session of
          # its own would make its niceness meaningless: Linux shares the CPU
          # among sessions first (autogroup), then among their processes.
          process_group=0,
          env={k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE},
      )  # fmt: skip
    if hasattr(os, "setpriority"):
      try:  # Training comes first.
        os.setpriority(
          os.PRIO_PROCESS, self._process.pid, settings_lib.SERVER_NICENESS
        )
      except OSError:
        pass
    self.url = self._announced()

  @property
  def pid(self) -> int:
    return self._process.pid

  def _announced(self) -> str:
    lines: list[str] = []
    stdout: Any = self._process.stdout
    reading = threading.Thread(
      target=lambda: lines.append(stdout.readline().decode("utf-8", "replace")),
      daemon=True,
    )
    reading.start()
    reading.join(settings_lib.START_S)
    line = lines[0].strip() if lines else ""
    if "http://" not in line:
      self.close()
      raise config_lib.ConfigError(
        [
          f"monitor.embedded=true: the server did not start; read {self._log},"
          " or set monitor.embedded=false"
        ]
      )
    return line[line.index("http://") :]

  def close(self) -> None:
    """Ends the server. Idempotent."""
    if self._process.stdin is not None:
      try:
        self._process.stdin.close()
      except OSError:
        pass
    try:
      self._process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      _LOG.warning("the embedded monitor server did not end by itself; killed")
      self._process.kill()
      self._process.wait(_STOP_S)
    if self._process.stdout is not None:
      self._process.stdout.close()


def _world(config: config_lib.TrainConfig) -> str:
  """The gym of a run's episodes, or their environment without one."""
  spec = environment_spec.get(config.environment.name)
  return config.gym.name if spec.gym else config.environment.name


def _box(config: config_lib.TrainConfig) -> str:
  if not environment_spec.get(config.environment.name).gym:
    return "linux"
  name = config.gym.name
  if name == "genv":
    # What the server plays, where its id is a gym's name here.
    served = str(config.gym.options.get("gym_id") or "desktop")
    if served in gyms.names():
      name = served
    elif config.rollout.agent == "run_service":
      mobile = config.run_service.action_space == "mobile"
      return "android" if mobile else "linux"
  return gyms.get(name, "operator").box


def _root(config: config_lib.TrainConfig) -> pathlib.Path:
  """Folder of all runs: the next run in it delivers this one's unsent rows."""
  return config.run_dir.absolute().parent


def _database(config: config_lib.TrainConfig) -> pathlib.Path:
  named = config.monitor.database
  if named:
    return pathlib.Path(named).expanduser().absolute()
  return _root(config) / "monitor.db"


def _shown(path: pathlib.Path) -> str:
  """A path as a person types it here: relative if it lies below."""
  here = pathlib.Path.cwd()
  return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _identity(run_dir: pathlib.Path) -> tuple[str, int]:
  """(client id of the run, earlier starts), kept in the run directory."""
  path = run_dir / _IDENTITY
  try:
    identity = json_text.read(path)
    training, session = str(identity["training"]), int(identity["starts"])
  except FileNotFoundError:
    training, session = uuid.uuid4().hex, 0
  except (OSError, ValueError, KeyError, TypeError) as error:
    _LOG.warning(
      "%s is damaged (%r): the monitor shows the run from here on as a new"
      " one; restore the file from a copy before resuming to go on in the"
      " old one",
      path,
      error,
    )
    training, session = uuid.uuid4().hex, 0
  run_dir.mkdir(parents=True, exist_ok=True)
  durable.write_text(
    path,
    json.dumps(
      {"training": training, "starts": session + 1, "time": time.time()}
    ),
  )
  return training, session


def _tracked(config: config_lib.TrainConfig) -> dict[str, str]:
  """The run's project and name at W&B, if it is tracked there."""
  if config.tracking.wandb == "off":
    return {}
  return {
    "wandb_project": config.tracking.project,
    "wandb_name": config.run.name,
  }


def _training(config: config_lib.TrainConfig) -> dict[str, Any]:
  """Columns of the training's row that the configuration fills."""
  learner, collect = config.learner, config.collect
  return {
    "log_path": str(config.run_dir.absolute()),
    "model_name": config.policy.name,
    # Left out when empty: an older server refuses the field.
    **({"tags": list(config.monitor.tags)} if config.monitor.tags else {}),
    **_tracked(config),
    "lora_rank": config.policy.lora_rank or None,
    "learning_rate": learner.learning_rate,
    "batch_size": learner.groups_per_step * collect.group_size,
    "group_size": collect.group_size,
    "groups_per_batch": learner.groups_per_step,
    "max_tokens": config.sampling.max_new_tokens,
    "temperature": config.sampling.temperature,
    "kl_penalty_coef": config.algorithm.kl_coef,
    "num_substeps": learner.minibatches * learner.epochs,
    "max_turns": config.environment.max_turns,
    "seed": config.run.seed,
    "box_type": _box(config),
    "renderer_name": config.agent.parser,
    "total_steps": learner.steps,
  }
