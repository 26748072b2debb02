"""Nests the components' own settings into the configuration of a run.

Each section is the class that its component takes: nothing is declared here.
`TrainConfig` is frozen and complete; `to_yaml` and `resolution.from_yaml` are
inverse, so the `config.yaml` of a run directory repeats the run.

Does not: read command lines (`resolution` does), check one section against
another (`checks` does), build anything, or import JAX.
"""

from __future__ import annotations

import pathlib
from typing import Any

from tunix.rl.multi_turn.agents.agent_settings import AgentConfig
from tunix.rl.multi_turn.agents.agent_settings import RunServiceConfig
from tunix.rl.multi_turn.clients.client_settings import ExternalConfig
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.config import former_names
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.core.monitor_settings import MonitorConfig
from tunix.rl.multi_turn.core.policy_client import SamplingConfig
from tunix.rl.multi_turn.engine.config import EngineConfig
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.environment_settings import (
  EnvironmentConfig,
)
from tunix.rl.multi_turn.environments.environment_settings import GymConfig
from tunix.rl.multi_turn.environments.task_sources.source import (
  TaskSourceConfig,
)
from tunix.rl.multi_turn.learner.config import AlgorithmConfig
from tunix.rl.multi_turn.learner.config import CheckpointConfig
from tunix.rl.multi_turn.learner.config import LearnerConfig
from tunix.rl.multi_turn.policy.policy_settings import MeshConfig
from tunix.rl.multi_turn.policy.policy_settings import PolicyConfig
from tunix.rl.multi_turn.reporting.reporting_settings import ReportConfig
from tunix.rl.multi_turn.reporting.reporting_settings import TrackingConfig
from tunix.rl.multi_turn.reporting.reporting_settings import WatchdogConfig
from tunix.rl.multi_turn.trajectory_collector.collect_settings import (
  CollectConfig,
)
from tunix.rl.queue.admission import QueueConfig

_section = settings.section


@settings.settings
class TrainConfig:
  """The complete configuration of a training run."""

  run: run_sections.RunConfig = _section(default=run_sections.RunConfig())
  environment: EnvironmentConfig = _section(default=EnvironmentConfig())
  gym: GymConfig = _section(default=GymConfig())
  task_source: TaskSourceConfig = _section(default=TaskSourceConfig())
  agent: AgentConfig = _section(default=AgentConfig())
  policy: PolicyConfig = _section(default=PolicyConfig())
  sampling: SamplingConfig = _section(default=SamplingConfig())
  rollout: run_sections.RolloutConfig = _section(
    default=run_sections.RolloutConfig()
  )
  buffer: data_sections.BufferConfig = _section(
    default=data_sections.BufferConfig()
  )
  offline: data_sections.OfflineConfig = _section(
    default=data_sections.OfflineConfig()
  )
  fleet: run_sections.FleetConfig = _section(default=run_sections.FleetConfig())
  run_service: RunServiceConfig = _section(default=RunServiceConfig())
  engine: EngineConfig = _section(default=EngineConfig())
  external: ExternalConfig = _section(default=ExternalConfig())
  collect: CollectConfig = _section(default=CollectConfig())
  algorithm: AlgorithmConfig = _section(default=AlgorithmConfig())
  learner: LearnerConfig = _section(default=LearnerConfig())
  queue: QueueConfig = _section(default=QueueConfig())
  mesh: MeshConfig = _section(default=MeshConfig())
  processes: run_sections.ProcessesConfig = _section(
    default=run_sections.ProcessesConfig()
  )
  warm_start: run_sections.WarmStartConfig = _section(
    default=run_sections.WarmStartConfig()
  )
  eval: run_sections.EvalConfig = _section(default=run_sections.EvalConfig())
  checkpoint: CheckpointConfig = _section(default=CheckpointConfig())
  report: ReportConfig = _section(default=ReportConfig())
  watchdog: WatchdogConfig = _section(default=WatchdogConfig())
  monitor: MonitorConfig = _section(default=MonitorConfig())
  tracking: TrackingConfig = _section(default=TrackingConfig())

  @property
  def run_dir(self) -> pathlib.Path:
    """The run's directory; needs a name, which `load_config` always gives."""
    if self.run.resume:
      return pathlib.Path(self.run.resume).expanduser()
    return pathlib.Path(self.run.dir).expanduser() / self.run.name

  @property
  def lockstep(self) -> bool:
    """engine.lockstep with auto resolved."""
    if self.engine.lockstep == "auto":
      return (
        self.queue.max_staleness == 0
        and self.rollout.via == "in_process"
        and not self.fleet.away
      )
    return self.engine.lockstep == "true"

  @property
  def collects(self) -> bool:
    """Whether the run plays the episodes that it trains on."""
    return self.rollout.via not in ("buffer", "offline")

  @property
  def samples_exactly(self) -> bool:
    """Whether engine and learner agree where their weights are equal."""
    sampling = self.sampling
    truncated = sampling.top_p < 1 or sampling.top_k or sampling.min_p
    return (
      self.collects
      and self.engine.weights == "same"
      and self.rollout.other_sampling != "train"
      and (not truncated or self.algorithm.keep_sampling_mask)
    )

  @property
  def evaluates(self) -> bool:
    """eval.on with auto resolved."""
    if self.eval.on == "auto":
      return self.collects or self.eval.every > 0
    return self.eval.on == "true"

  @property
  def evaluated_families(self) -> tuple[str, ...]:
    """Families that evaluations play."""
    return self.eval.families or self.task_source.families

  @property
  def sees_screenshots(self) -> bool:
    """Whether the policy's prompts hold the screenshots of a gym."""
    gym = environment_spec.get(self.environment.name).gym
    return gym and self.gym.observation != "axtree"

  @property
  def plays(self) -> bool:
    """Whether the run plays any episode itself."""
    return self.collects or self.evaluates or self.warm_start.steps > 0

  @property
  def samples(self) -> bool:
    """Whether the run needs a rollout engine."""
    return self.rollout.via != "offline" or self.evaluates

  @property
  def has_engine(self) -> bool:
    """Whether the run's own processes hold that engine."""
    return self.samples and self.rollout.via not in ("external", "hosts")

  def to_dict(self) -> dict[str, Any]:
    return loader.to_dict(self)

  def to_yaml(self) -> str:
    return loader.to_yaml(self)


ALIASES: dict[str, str] = {
  "environment": "environment.name",
  "gym": "gym.name",
  "tasks": "task_source.families",
  "agent": "agent.name",
  "policy": "policy.name",
  "algorithm": "algorithm.name",
  "reward": "environment.reward",
  "fleet": "fleet.via",
  "seed": "run.seed",
  "steps": "learner.steps",
  "name": "run.name",
  "resume": "run.resume",
  "time_budget_s": "run.time_budget_s",
  "profile": "report.profile",
  **data_sections.ROLLOUT_FLAGS,
  **former_names.SETTINGS,
}
"""Short keys. A section's own name with a plain value is one of them."""
