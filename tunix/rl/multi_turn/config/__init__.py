"""The configuration of a training run.

`load_config(argv)` merges, later wins: the defaults below, the preset of the
chosen gym, a YAML file, `key=value` overrides. The result is frozen, complete
and checked: no unknown key, no value out of range, no two values that
contradict each other. `to_yaml` and `from_yaml` are inverse, so the
`config.yaml` of a run directory repeats the run.

Does not build anything and imports no JAX: `train.py` does the building.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any, Iterator, Mapping, Sequence

from tunix.rl.multi_turn import gym_facts
from tunix.rl.multi_turn.config import documentation
from tunix.rl.multi_turn.config import learning
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import rollout
from tunix.rl.multi_turn.config import running
from tunix.rl.multi_turn.config import tasks
from tunix.rl.multi_turn.config.learning import AlgorithmConfig
from tunix.rl.multi_turn.config.learning import LearnerConfig
from tunix.rl.multi_turn.config.learning import MeshConfig
from tunix.rl.multi_turn.config.learning import QueueConfig
from tunix.rl.multi_turn.config.learning import WarmStartConfig
from tunix.rl.multi_turn.config.loader import ConfigError
from tunix.rl.multi_turn.config.rollout import CollectConfig
from tunix.rl.multi_turn.config.rollout import ExternalConfig
from tunix.rl.multi_turn.config.rollout import PolicyConfig
from tunix.rl.multi_turn.config.rollout import RolloutConfig
from tunix.rl.multi_turn.config.rollout import SamplingConfig
from tunix.rl.multi_turn.config.running import CheckpointConfig
from tunix.rl.multi_turn.config.running import EvalConfig
from tunix.rl.multi_turn.config.running import MonitorConfig
from tunix.rl.multi_turn.config.running import ReportConfig
from tunix.rl.multi_turn.config.running import RunConfig
from tunix.rl.multi_turn.config.running import TrackingConfig
from tunix.rl.multi_turn.config.tasks import AgentConfig
from tunix.rl.multi_turn.config.tasks import GymConfig
from tunix.rl.multi_turn.config.tasks import TaskSourceConfig
import yaml


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Everything `train.py` needs to know."""

  run: RunConfig = RunConfig()
  gym: GymConfig = GymConfig()
  task_source: TaskSourceConfig = TaskSourceConfig()
  agent: AgentConfig = AgentConfig()
  policy: PolicyConfig = PolicyConfig()
  sampling: SamplingConfig = SamplingConfig()
  rollout: RolloutConfig = RolloutConfig()
  external: ExternalConfig = ExternalConfig()
  collect: CollectConfig = CollectConfig()
  algorithm: AlgorithmConfig = AlgorithmConfig()
  learner: LearnerConfig = LearnerConfig()
  queue: QueueConfig = QueueConfig()
  mesh: MeshConfig = MeshConfig()
  warm_start: WarmStartConfig = WarmStartConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  report: ReportConfig = ReportConfig()
  monitor: MonitorConfig = MonitorConfig()
  tracking: TrackingConfig = TrackingConfig()

  @property
  def run_dir(self) -> pathlib.Path:
    """The run's directory; needs a name, which `load_config` always gives."""
    if self.run.resume:
      return pathlib.Path(self.run.resume).expanduser()
    return pathlib.Path(self.run.dir).expanduser() / self.run.name

  @property
  def queue_capacity(self) -> int:
    """Groups the queue holds, 0 resolved."""
    return self.queue.capacity or (
        (self.queue.max_staleness + 1) * self.learner.groups_per_step
    )

  @property
  def lockstep(self) -> bool:
    """rollout.lockstep with auto resolved."""
    if self.rollout.lockstep == "auto":
      return (
          self.queue.max_staleness == 0 and self.rollout.via == "in_process"
      )
    return self.rollout.lockstep == "true"

  def to_dict(self) -> dict[str, Any]:
    return loader.to_dict(self)

  def to_yaml(self) -> str:
    return loader.to_yaml(self)

  @classmethod
  def from_dict(cls, data: Mapping[str, Any], source: str = "config"):
    """From nested or dotted keys; what is absent has its default.

    Raises:
      ConfigError: naming every unknown key and wrong or contradictory value.
    """
    return _resolve([loader.flatten(data, cls, ALIASES, source)])

  @classmethod
  def from_yaml(cls, text: str, source: str = "config") -> TrainConfig:
    return cls.from_dict(_parse_yaml(text, source), source)


ALIASES: dict[str, str] = {
    "gym": "gym.name",
    "tasks": "gym.tasks",
    "policy": "policy.name",
    "seed": "run.seed",
    "steps": "learner.steps",
    "name": "run.name",
    "resume": "run.resume",
    "time_budget_s": "run.time_budget_s",
}
"""Short keys. A section's own name with a plain value is one of them."""

POLICY_PRESETS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_tiny": {"warm_start.source": "none"},
    "qwen3_text_tiny": {"warm_start.source": "none"},
}
"""Defaults that depend on policy.name: not all come with weights."""

_SHIPPED = ("tiny_vl", "qwen3_vl_tiny")


def _parse_yaml(text: str, source: str) -> dict[str, Any]:
  try:
    data = yaml.safe_load(text)
  except yaml.YAMLError as error:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark else ""
    raise ConfigError([f"{source} is not valid YAML{where}: {error}"]) from None
  if data is None:
    return {}
  if not isinstance(data, dict):
    raise ConfigError(
        [f"{source} must hold sections, got a {type(data).__name__}"]
    )
  return data


def _resolve(layers: Sequence[Mapping[str, Any]]) -> TrainConfig:
  """Preset of the chosen gym, then the layers; built and checked."""
  merged: dict[str, Any] = {}
  for layer in layers:
    for path, value in layer.items():
      merged[path] = loader.merge(
          loader.unwrap(merged.get(path)), value
      )
  gym = loader.unwrap(merged.get("gym.name", GymConfig.name))
  name = loader.unwrap(merged.get("policy.name"))
  # Names that are none of ours, and start from no embedded weights.
  is_open = isinstance(name, str) and (
      rollout.is_directory(name) or rollout.is_factory(name)
  )
  merged = {
      **gym_facts.of(str(gym)).preset,
      **({"warm_start.source": "none"} if is_open else {}),
      **POLICY_PRESETS.get(str(name), {}),
      **merged,
  }
  imports = merged.get("run.imports")
  if is_open:
    merged.pop("policy.name")
  else:
    name = None

  def build(values: Mapping[str, Any]) -> TrainConfig:
    return loader.build(
        TrainConfig, values, open_names=bool(loader.unwrap(imports))
    )

  config = build(merged)
  if name is not None:
    config = dataclasses.replace(
        config, policy=dataclasses.replace(config.policy, name=name)
    )
  elif _can_clone(config):
    config = build({**gym_facts.of(config.gym.name).cloning_preset, **merged})
  problems = contradictions(config)
  if problems:
    raise ConfigError(problems)
  return config


def _can_clone(config: TrainConfig) -> bool:
  """Whether demonstrations for the embedded policy can be had."""
  if config.warm_start.source != "embedded" or not config.gym.tasks:
    return False
  known = gym_facts.of(config.gym.name).oracle_families
  return all(task in known for task in config.gym.tasks)


def contradictions(config: TrainConfig) -> list[str]:
  """Values that cannot go together: which fields, why, and what to change."""
  c = config
  return [
      *tasks.problems(c.gym, c.task_source),
      *rollout.problems(
          c.policy, c.sampling, c.rollout, c.external, c.collect
      ),
      *learning.problems(
          c.algorithm, c.learner, c.queue, c.mesh, c.warm_start
      ),
      *running.problems(c.eval, c.monitor, c.tracking),
      *_between_collecting_and_learning(c),
      *_warm_start_problems(c),
  ]


def _between_collecting_and_learning(c: TrainConfig) -> Iterator[str]:
  size, valid = c.collect.group_size, c.collect.min_valid
  if c.learner.steps > 0 and size < 2:
    yield (
        f"collect.group_size={size}: {c.algorithm.advantage} compares the"
        " episodes of a group, so it needs >= 2 (or steps=0)"
    )
  if c.learner.steps > 0 and valid < 2:
    yield (
        f"collect.min_valid={valid}: one episode has nothing to be compared"
        " with; set it >= 2"
    )
  if c.learner.row_length < c.rollout.context_length:
    yield (
        f"learner.row_length={c.learner.row_length} is shorter than"
        f" rollout.context_length={c.rollout.context_length}, and sequences"
        " are never cut; raise the first or lower the second"
    )
  if c.rollout.lockstep == "true" and c.queue.max_staleness > 0:
    yield (
        "rollout.lockstep=true is for repeatable runs, which"
        f" queue.max_staleness={c.queue.max_staleness} cannot give (new"
        " weights arrive at any time); set queue.max_staleness=0 or"
        " rollout.lockstep=auto"
    )
  if c.rollout.weights == "int8" and c.algorithm.importance == "none":
    yield (
        "rollout.weights=int8 samples from another policy than the one that"
        " learns; set algorithm.importance=tis"
    )
  if (
      (c.sampling.top_k > 0 or c.sampling.top_p < 1)
      and c.algorithm.importance == "none"
      and c.learner.steps > 0
  ):
    yield (
        f"sampling.top_k={c.sampling.top_k}, sampling.top_p={c.sampling.top_p}"
        " sample from a truncated distribution that the learner does not"
        " reproduce; set them to 0 and 1, or algorithm.importance=tis"
    )


def _warm_start_problems(c: TrainConfig) -> Iterator[str]:
  start = c.warm_start
  if start.source == "embedded" and c.policy.name not in _SHIPPED:
    yield (
        f"warm_start.source=embedded holds weights of {' and '.join(_SHIPPED)},"
        f" not of policy.name={c.policy.name}; set warm_start.source=none (a"
        " directory brings its own weights) or path"
    )
  if (
      start.steps > 0
      and not gym_facts.of(c.gym.name).oracle
      and not start.recordings
      and not c.run.imports
  ):
    yield (
        f"warm_start.steps={start.steps} needs demonstrations, and"
        f" gym.name={c.gym.name} has no oracle; set warm_start.steps=0 or"
        " warm_start.recordings, or clone on desktop first and start from its"
        " checkpoint"
    )


def load_config(argv: Sequence[str]) -> TrainConfig:
  """`[config.yaml] key=value … [--dry-run]` to a checked configuration.

  `run.name` is filled in when absent. With `run.resume`, that run's
  config.yaml is the base unless a file is given.

  Raises:
    ConfigError: listing every problem.
    SystemExit: after `--help` was printed.
  """
  layers: list[dict[str, Any]] = []
  overrides: list[dict[str, Any]] = []
  problems: list[str] = []
  file = None
  for argument in argv:
    if argument in ("--help", "-h"):
      print(documentation.help_text(TrainConfig, ALIASES))
      raise SystemExit(0)
    if argument == "--dry-run":
      overrides.append({"run.dry_run": True})
    elif argument.startswith("-"):
      hint = loader.nearest(argument, ("--help", "--dry-run"))
      raise ConfigError([
          f"unknown option {argument}{hint or '.'} Settings are key=value,"
          " without dashes"
      ])
    elif "=" not in argument and argument.endswith((".yaml", ".yml")):
      if file is not None:
        raise ConfigError([
            f"two configuration files, {file} and {argument}; give one"
        ])
      file = argument
    else:
      try:
        key, value = loader.parse_override(argument)
        overrides.append(
            loader.flatten(
                {key: value}, TrainConfig, ALIASES, "command line"
            )
        )
      except ConfigError as error:
        problems += error.problems
  if file is not None:
    layers.append(_read(pathlib.Path(file)))
  if problems:
    raise ConfigError(problems)
  merged: dict[str, Any] = {}
  for layer in [*layers, *overrides]:
    merged.update(layer)
  resume = str(loader.unwrap(merged.get("run.resume")) or "")
  if resume:
    given = {path for layer in overrides for path in layer}
    elsewhere = sorted(given & {"run.name", "run.dir"})
    if elsewhere:
      raise ConfigError([
          f"{' and '.join(elsewhere)} together with run.resume={resume}: a"
          " resumed run goes on in its own directory; leave out one of them"
      ])
    directory = pathlib.Path(resume).expanduser()
    if not (directory / "config.yaml").is_file():
      raise ConfigError([
          f"run.resume={resume} is not a run directory (no config.yaml in"
          " it); give runs/<name>"
      ])
    if file is None:
      layers.append(_read(directory / "config.yaml"))
  config = _resolve([*layers, *overrides])
  if not config.run.name:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.gym.name}-{stamp}"
    config = dataclasses.replace(
        config, run=dataclasses.replace(config.run, name=name)
    )
  return config


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    text = path.read_text(encoding="utf-8")
  except OSError as error:
    raise ConfigError([f"cannot read {path}: {error.strerror}"]) from error
  return loader.flatten(
      _parse_yaml(text, str(path)), TrainConfig, ALIASES, str(path)
  )


def reference() -> str:
  """docs/configuration.md."""
  gyms = gym_facts.GYMS.items()
  return documentation.reference(
      TrainConfig,
      ALIASES,
      {
          **{f"`{name}`": facts.preset for name, facts in gyms},
          **{f"`{name}`": preset for name, preset in POLICY_PRESETS.items()},
          **{
              f"`{name}`, if its oracle knows every task": facts.cloning_preset
              for name, facts in gyms
          },
      },
  )
