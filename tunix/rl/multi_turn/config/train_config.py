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

from tunix.rl.multi_turn.agents.settings import AgentConfig
from tunix.rl.multi_turn.clients.settings import ExternalConfig
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.core.policy_client import SamplingConfig
from tunix.rl.multi_turn.engine.config import EngineConfig
from tunix.rl.multi_turn.environments.settings import EnvironmentConfig
from tunix.rl.multi_turn.environments.settings import GymConfig
from tunix.rl.multi_turn.environments.task_sources.source import (
  TaskSourceConfig,
)
from tunix.rl.multi_turn.learner.config import AlgorithmConfig
from tunix.rl.multi_turn.learner.config import CheckpointConfig
from tunix.rl.multi_turn.learner.config import LearnerConfig
from tunix.rl.multi_turn.monitor.settings import MonitorConfig
from tunix.rl.multi_turn.policy.settings import MeshConfig
from tunix.rl.multi_turn.policy.settings import PolicyConfig
from tunix.rl.multi_turn.reporting.settings import ReportConfig
from tunix.rl.multi_turn.reporting.settings import TrackingConfig
from tunix.rl.multi_turn.trajectory_collector.settings import CollectConfig
from tunix.rl.queue.admission import QueueConfig

_setting = settings.setting


@settings.settings
class TrainConfig:
  """Everything `train` needs to know."""

  run: run_sections.RunConfig = _setting(run_sections.RunConfig(), "")
  environment: EnvironmentConfig = _setting(EnvironmentConfig(), "")
  gym: GymConfig = _setting(GymConfig(), "")
  task_source: TaskSourceConfig = _setting(TaskSourceConfig(), "")
  agent: AgentConfig = _setting(AgentConfig(), "")
  policy: PolicyConfig = _setting(PolicyConfig(), "")
  sampling: SamplingConfig = _setting(SamplingConfig(), "")
  rollout: run_sections.RolloutConfig = _setting(
      run_sections.RolloutConfig(), ""
  )
  engine: EngineConfig = _setting(EngineConfig(), "")
  external: ExternalConfig = _setting(ExternalConfig(), "")
  collect: CollectConfig = _setting(CollectConfig(), "")
  algorithm: AlgorithmConfig = _setting(AlgorithmConfig(), "")
  learner: LearnerConfig = _setting(LearnerConfig(), "")
  queue: QueueConfig = _setting(QueueConfig(), "")
  mesh: MeshConfig = _setting(MeshConfig(), "")
  warm_start: run_sections.WarmStartConfig = _setting(
      run_sections.WarmStartConfig(), ""
  )
  eval: run_sections.EvalConfig = _setting(run_sections.EvalConfig(), "")
  checkpoint: CheckpointConfig = _setting(CheckpointConfig(), "")
  report: ReportConfig = _setting(ReportConfig(), "")
  monitor: MonitorConfig = _setting(MonitorConfig(), "")
  tracking: TrackingConfig = _setting(TrackingConfig(), "")

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
          self.queue.max_staleness == 0 and self.rollout.via == "in_process"
      )
    return self.engine.lockstep == "true"

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
    "reward": "environment.reward",
    "seed": "run.seed",
    "steps": "learner.steps",
    "name": "run.name",
    "resume": "run.resume",
    "time_budget_s": "run.time_budget_s",
}
"""Short keys. A section's own name with a plain value is one of them."""
