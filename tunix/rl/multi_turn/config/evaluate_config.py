"""Declares the configuration of the command `evaluate`.

It is that of a run with one section more: what is evaluated. A run's settings
that decide what its policy sees and does are its lowest layer.

Does not: resolve layers (`resolution` does), or build anything.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.net import http

_setting = settings.setting


@settings.settings
class EvaluateConfig:
  """Chooses what `evaluate` measures; of that command only."""

  run: str = _setting(
    default="",
    doc="Run directory: its settings, and the policy of evaluate.checkpoint."
    ' "" = the policy that policy.name and warm_start name, or a server\'s.',
  )
  checkpoint: str = _setting(
    default="newest",
    doc="Weights of the run: newest, best (checkpoint.keep_best), the number"
    " of an update with a checkpoint, or policy or warm_start, its"
    " directories.",
  )
  server: str = _setting(
    default="",
    doc="An OpenAI-compatible server whose model is evaluated instead, e.g."
    " http://127.0.0.1:8000/v1. Messages and screenshots are sent to it.",
  )
  model: str = _setting(
    default="",
    doc='The server\'s name of the model. "" = the one that it serves.',
  )
  api_key_env: str = _setting(
    default="OPENAI_API_KEY",
    doc="Environment variable with the server's key. Unset: none is sent.",
  )
  tries: int = _setting(
    default=4,
    doc="Attempts at a request to the server whose failure may pass, within"
    " collect.deadlines.model.",
    ge=1,
  )
  give_up_after: int = _setting(
    default=16,
    doc="Episodes in a row that a gym or server broke, after which the"
    " evaluation ends, to be resumed. 0 = never.",
    ge=0,
  )
  replay_invalid: bool = _setting(
    default=True,
    doc="A resumed evaluation plays episodes again that a gym or server broke.",
  )

  def problems(self) -> Iterator[str]:
    if self.server:
      try:
        http.address(self.server, "server", "http://127.0.0.1:8000/v1")
      except ValueError as error:
        yield str(error)
    elif self.model:
      yield f"model={self.model} is a server's; set evaluate.server"


@settings.settings
class EvaluationConfig(train_config.TrainConfig):
  """The complete configuration of an evaluation."""

  evaluate: EvaluateConfig = settings.section(default=EvaluateConfig())


ALIASES: Mapping[str, str] = {
  **{
    key: value
    for key, value in train_config.ALIASES.items()
    if value != "learner.steps" and not value.startswith("buffer.")
  },
  "run": "evaluate.run",
  "checkpoint": "evaluate.checkpoint",
  "server": "evaluate.server",
  "model": "evaluate.model",
  "attempts": "eval.attempts",
  "modes": "eval.modes",
  "split": "eval.split",
  "dir": "run.dir",
}

DEFAULTS: Mapping[str, Any] = {
  "run.dir": "evaluations",
  "learner.steps": 0,
  "warm_start.steps": 0,
  "eval.split": "all",
}
"""Below everything that is given."""

OF_A_RUN: Mapping[str, Any] = {"eval.split": "held_out"}
"""Beside them where a run is evaluated: its own tasks were trained on."""

# A row holds the whole context.
_POLICY = ("policy.", "sampling.", "engine.", "learner.row_length")
_TASKS = ("environment.", "gym.", "task_source.")
TAKEN = (
    *_POLICY, *_TASKS, "agent.", "collect.", "report.", "rollout.",
    "run_service.", "eval.seed", "eval.modes", "eval.episodes_per_task",
    "run.seed", "run.imports", "run.compile_cache", "queue.max_staleness",
)  # fmt: skip
"""Settings of a run that its evaluation begins with."""

REPLACED: Mapping[str, tuple[str, ...]] = {
  "environment.name": (*_TASKS, "agent."),
  "gym.name": _TASKS,
  "agent.name": ("agent.", "sampling.max_new_tokens"),
  "policy.name": _POLICY,
}
"""Choices that bring presets of their own -> settings of the run that must not
hide those."""


def of_run(
  recorded: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a run's settings as the layer below an evaluation's.

  Args:
    recorded: The run's settings by dotted key.
    overrides: The evaluation's settings by dotted key.
  """
  hidden = tuple(
    prefix
    for choice, prefixes in REPLACED.items()
    if choice in overrides
    for prefix in prefixes
  )
  layer = {
    key: value
    for key, value in recorded.items()
    if key.startswith(TAKEN) and not (hidden and key.startswith(hidden))
  }
  if layer.get("rollout.via") in ("external", "hosts", "buffer", "offline"):
    # It is the run's weights that are evaluated, here.
    layer["rollout.via"] = "in_process"
  return {**layer, **OF_A_RUN}
