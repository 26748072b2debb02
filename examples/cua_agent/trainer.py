"""AReaL's trainer, with its steps and evaluations at the Training Monitor.

`recorded(PPOTrainer)` derives from it. Each step is posted when it starts and
when it ends, with AReaL's statistics; a baseline is measured before the first
step, with the initial weights; each evaluation is posted with its mean reward.
The loop, the schedule of evaluations (`evaluator.freq_steps`) and all of the
training are AReaL's.

The workflow's arguments name the step: AReaL's controller hands them to its
rollout workers for each row, and in one process `monitor_context` has the step.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping

from .cua_rl import monitor_context
from .cua_rl import monitor_training_hooks as hooks

# AReaL's statistics -> columns of a step.
_COLUMNS = {
  "loss": "ppo_actor/update/actor_loss/avg",
  "grad_norm": "ppo_actor/update/grad_norm",
  "learning_rate": "ppo_actor/update/lr",
  "reward_mean": "rollout/reward",
}
_EVALUATED = "eval-rollout/reward"


class _Statistics:
  """AReaL's logger of statistics; also hands them to `record`."""

  def __init__(self, logger: Any, record: Callable[[int, Any], None]):
    self._logger = logger
    self._record = record

  def commit(self, epoch: int, step: int, global_step: int, data: Any) -> None:
    self._logger.commit(epoch, step, global_step, data)
    self._record(global_step, data)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._logger, name)


def recorded(base: type) -> type:
  """Returns AReaL's trainer class `base` as one that records its steps."""

  class CUATrainer(base):
    """See the module docstring."""

    def __init__(self, config: Any, *args: Any, **options: Any):
      super().__init__(config, *args, **options)
      self.stats_logger = _Statistics(self.stats_logger, self._step_ended)
      self._arguments: dict[str, Any] = {}
      self._steps = 0
      self._step = 0
      self._measured: tuple[str, Any] | None = None

    def train(
      self,
      workflow: Any = None,
      eval_workflow: Any = None,
      workflow_kwargs: dict[str, Any] | None = None,
      eval_workflow_kwargs: dict[str, Any] | None = None,
      dynamic_filter_fn: Any = None,
      total_epochs: int | None = None,
    ) -> None:
      """Trains as AReaL does; see the module docstring."""
      config, info = self.config, self.recover_info
      first = info.last_step_info.next().global_step if info else 0
      steps = (total_epochs or config.total_train_epochs) * len(
        self.train_dataloader
      )
      self._steps = min(steps, config.total_train_steps or steps)
      self._arguments = {} if workflow_kwargs is None else workflow_kwargs
      measured = eval_workflow is not None and self.valid_dataloader is not None
      if config.baseline and measured and not first:
        self._baseline(eval_workflow, eval_workflow_kwargs or {})
      self._step_begins(first)
      super().train(
        workflow,
        eval_workflow,
        self._arguments,
        eval_workflow_kwargs,
        dynamic_filter_fn,
        total_epochs,
      )

    def _step_begins(self, step: int) -> None:
      self._step = step
      name = hooks.record_step_before_rollout(step + 1, self.config.actor.path)
      self._arguments.update(step_id=name, global_step=step + 1)

    def _step_ended(self, step: int, data: Any) -> None:
      """Records a step's statistics, and that the next one begins."""
      statistics: dict[str, Any] = {}
      for part in data if isinstance(data, list) else [data]:
        statistics.update(part)
      self._evaluated(statistics.get(_EVALUATED))
      for name, key in _COLUMNS.items():
        if key in statistics:
          statistics[name] = statistics[key]
      substeps = self.config.actor.ppo_n_minibatches
      hooks.record_step_after_training(
        step + 1,
        self.config.actor.path,
        metrics=statistics,
        current_phase="training",
        training_progress={
          "completed_substeps": substeps,
          "total_substeps": substeps,
        },
      )
      client = monitor_context.get_ingest_client()
      if client is not None:
        client.post_training(
          {
            "training_id": monitor_context.get_training_id(),
            "current_step": step + 1,
            "progress_percent": 100.0 * (step + 1) / self._steps,
          }
        )
      if step + 1 < self._steps:
        self._step_begins(step + 1)

    # --- measurements -------------------------------------------------------

    def _baseline(self, workflow: Any, arguments: Mapping[str, Any]) -> None:
      """Plays the evaluation's tasks before any weight has changed."""
      name = hooks.create_baseline_via_monitor(self.config.actor.path)
      self._measured = "baseline", name
      super()._evaluate_fn(workflow, {**arguments, "baseline_id": name})
      self._evaluated(self.eval_rollout.export_stats().get(_EVALUATED))

    def _evaluate_fn(self, eval_workflow: Any, eval_workflow_kwargs: Any):
      """Plays an evaluation that AReaL's schedule has statistics due."""
      name = hooks.create_eval_via_monitor(
        self._step + 1, self.config.actor.path
      )
      self._measured = "eval", name
      super()._evaluate_fn(
        eval_workflow, {**(eval_workflow_kwargs or {}), "eval_id": name}
      )
      monitor_context.set_eval_id(None)

    def _evaluated(self, reward: float | None) -> None:
      """Records the mean reward of the measurement that has ended."""
      if self._measured is None:
        return
      kind, name = self._measured
      self._measured = None
      client = monitor_context.get_ingest_client()
      if client is None or name is None:
        return
      post = client.post_eval if kind == "eval" else client.post_baseline
      post(
        {
          "training_id": monitor_context.get_training_id(),
          "status": "completed",
          "avg_reward": reward,
          "end_time": time.time(),
        },
        name,
      )

  return CUATrainer
