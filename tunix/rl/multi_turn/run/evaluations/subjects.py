"""Builds what an evaluation measures: a policy in this process, or a server.

Promises: the checkpoint that "newest" or "best" stands for is decided when the
evaluation begins, and is what it resumes with; another one in its place is
noticed by its fingerprint.

Does not: play episodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any, Callable

from flax import nnx
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.clients import chat_model
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.planning import dry_run
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import preflight
from tunix.rl.multi_turn.run import refusals
from tunix.rl.multi_turn.run.evaluations import best_checkpoint

EvaluationConfig = config_lib.EvaluationConfig
ConfigError = config_lib.ConfigError
_DIRECTORIES = ("policy", "warm_start")
_EDGE = 1 << 16  # Bytes of a file's beginning and end in a fingerprint.


def decided(config: EvaluationConfig) -> EvaluationConfig:
  """The configuration with evaluate.checkpoint a number or a directory's name.

  Raises:
    ConfigError: the run has no such checkpoint.
  """
  chosen = config.evaluate
  if chosen.server or not chosen.run:
    return config
  directory = pathlib.Path(chosen.run).expanduser()
  where = f"evaluate.run={chosen.run}"
  if not directory.is_dir():
    raise ConfigError([f"{where} is not a directory; give runs/<name>"])
  name = chosen.checkpoint
  steps = _steps(directory)
  there = [d for d in _DIRECTORIES if (directory / d / "config.json").exists()]
  if name == "best":
    best = best_checkpoint.load(directory)
    if best is None:
      raise ConfigError(
        [
          f"evaluate.checkpoint=best: {where} has chosen none; train with"
          " checkpoint.keep_best and eval.every, or evaluate"
          f" {', '.join(map(str, [*steps, *there])) or 'another run'}"
        ]
      )
    name = str(best.step)
  elif name == "newest":
    name = str(steps[-1]) if steps else next(iter(there), "")
  if not name or name not in [*map(str, steps), *there]:
    choices = ", ".join(map(str, [*steps, *there])) or "none"
    raise ConfigError(
      [
        f"evaluate.checkpoint={chosen.checkpoint}: {where} has"
        f" no such checkpoint; there are {choices}"
      ]
    )
  return dataclasses.replace(
    config, evaluate=dataclasses.replace(chosen, checkpoint=name)
  )


def _steps(directory: pathlib.Path) -> list[int]:
  """Numbers of a run's checkpoints; of one that is running, too."""
  # Not by orbax's manager, which might tidy what another process writes.
  folders = (directory / "checkpoints").glob("[0-9]*")
  return sorted(
    int(folder.name)
    for folder in folders
    if folder.name.isdigit() and (folder / "arrays").is_dir()
  )


class PolicySubject:
  """A policy, sampled by an engine in this process.

  Attributes:
    policy, engine: as of a run.
    memory: Memory that they take.
  """

  connection: Any = None

  def __init__(
    self,
    config: EvaluationConfig,
    images: images_lib.ImageStore,
    agent: base_agent.BaseAgent,
  ):
    """Loads the weights and builds the engine; compiles nothing.

    Raises:
      ConfigError: no such weights, or no room for them.
    """
    preflight.size_of_weights(config)
    mesh = models.make_mesh(config)
    chosen = config.evaluate
    self._weights = models.warm_start_source(config)
    step = None
    if chosen.run:
      run = pathlib.Path(chosen.run).expanduser()
      if chosen.checkpoint in _DIRECTORIES:
        self._weights = str(run / chosen.checkpoint)
      else:
        step = int(chosen.checkpoint)
        begun = run / "warm_start"
        self._weights = str(begun) if begun.is_dir() else self._begun_with(run)
    self.policy = models.make_policy(config, mesh, self._weights)
    if step is None:
      self.policy = models.without_adapter(self.policy)
    else:
      self._load(self.policy.model, run, step)
    self.memory = preflight.with_policy(config, self.policy, agent, mesh)
    self.version = 0 if step is None else step
    self.engine = models.make_engine(
      config, self.policy, images, version=self.version
    )
    self._place = self._weights
    if step is not None:
      self._place = str(run / "checkpoints" / str(step))

  def _begun_with(self, run: pathlib.Path) -> str:
    """The weights that a run without a warm start of its own began with."""
    text = (run / "config.yaml").read_text(encoding="utf-8")
    data = config_lib.parse_yaml(text, str(run / "config.yaml"))
    recorded = config_lib.from_dict(
      {
        name: data[name]
        for name in ("policy", "warm_start", "run", "agent", "environment")
        if name in data
      }
    )
    return models.warm_start_source(recorded)

  def _load(self, model: base.Policy, run: pathlib.Path, step: int) -> None:
    where = f"evaluate.checkpoint={step} of {run}"
    with (
      refusals.refused(where, OSError, ValueError),
      checkpoint_lib.LearnerCheckpoints(
        run / "checkpoints", read_only=True
      ) as checkpoints,
    ):
      state = checkpoints.restore_parameters(model, step)
    nnx.update(model, state)

  def facts(self) -> dict[str, Any]:
    """For evaluation.json."""
    return {
      "kind": "policy",
      "weights": self._place,
      "version": self.version,
      "fingerprint": fingerprint(self._place),
      "parameters": dry_run.parameter_count(self.policy.model),
    }

  def describe(self, config: Any, factory: Any, directory: pathlib.Path) -> str:
    return dry_run.describe(
      config, self.policy, factory, directory, self.engine, self.memory
    )

  def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
    self.engine.warm_up(progress)

  async def check(self) -> list[str]:
    return []

  def tokens_of(self, trajectory_id: str) -> int:
    del trajectory_id
    return 0

  async def aclose(self) -> None:
    pass

  def close(self, timeout_s: float) -> None:
    self.engine.close(timeout_s)


class ServerSubject:
  """A model behind an OpenAI-compatible server."""

  policy: Any = None
  engine: Any = None

  def __init__(self, config: EvaluationConfig, images: images_lib.ImageStore):
    self._config = config
    self.connection = before_jax.chat_connection(config, images)

  def facts(self) -> dict[str, Any]:
    return {
      "kind": "server",
      "url": self.connection.url,
      "model": self.connection.name,
      "fingerprint": self.connection.name,
      "left_out": sorted(self.connection.left_out),
    }

  def describe(self, config: Any, factory: Any, directory: pathlib.Path) -> str:
    del factory
    return (
      f"{config.to_yaml()}\n  server  {self.connection.url}\n  model  "
      f" {self.connection.name}\n  directory  {directory}"
    )

  def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
    del progress

  async def check(self) -> list[str]:
    """Raises:

    ConfigError: the server cannot be evaluated.
    """
    config = self._config
    sees = config.sees_screenshots
    with refusals.refused("", chat_model.ServerRefusal):
      return await self.connection.check(
        episodes.sampling_of(config, config.eval.modes[0]),
        episodes.screen_size(config) if sees else None,
      )

  def tokens_of(self, trajectory_id: str) -> int:
    return self.connection.sampled_tokens(trajectory_id)

  async def aclose(self) -> None:
    await self.connection.aclose()

  def close(self, timeout_s: float) -> None:
    del timeout_s


def make(
  config: EvaluationConfig,
  images: images_lib.ImageStore,
  agent: base_agent.BaseAgent,
) -> PolicySubject | ServerSubject:
  """Raises:

  ConfigError: it cannot be built.
  """
  if config.evaluate.server:
    return ServerSubject(config, images)
  return PolicySubject(config, images, agent)


def fingerprint(weights: str) -> str:
  """Digest by which other weights at one place are noticed; "" for none.

  Of names, sizes and both ends of the files: reading all of a large policy
  would take longer than many an evaluation.
  """
  if not weights:
    return ""
  try:
    place = policy_files.resolve(weights)
  except (OSError, ValueError):
    place = pathlib.Path(weights)
  digest = hashlib.sha256()
  for file in sorted(place.rglob("*")):
    if not file.is_file():
      continue
    size = file.stat().st_size
    digest.update(f"{file.relative_to(place)} {size}\n".encode())
    with file.open("rb") as data:
      digest.update(data.read(_EDGE))
      data.seek(max(0, size - _EDGE))
      digest.update(data.read(_EDGE))
  return digest.hexdigest()
