"""Episodes of every kind, told to a monitor by its event log."""

import synthetic_run
from trainer_core import events
from trainer_core import monitor_settings as settings_lib
from trainer_core import trajectory as trajectory_lib
from training_monitor.client import event_log

Status = trajectory_lib.TrajectoryStatus


FACTS = {
  "training_id": "T",
  "training": {
    "model_name": "m",
    "group_size": 4,
    "groups_per_batch": 1,
    "total_steps": 5,
    "temperature": 1.0,
  },
}
"""Of a run, as `event_log.RunSpec` has them."""


def observed(server, folder, store, total_steps=5, **facts):
  """The event log of a run."""
  training = FACTS["training"] | {"total_steps": total_steps}
  return event_log.EventLog(
    event_log.RunSpec(
      url=server.url,
      spool_dir=str(folder),
      name="observed",
      **FACTS | {"training": training} | facts,
    ),
    # A busy machine is no failure.
    settings_lib.MonitorConfig(close_timeout_s=60.0),
    images=store,
  )


def play(tell, store, steps=5):
  """The events of a `train`, with failures of every kind among them."""
  tell(events.RunStarted("run", {"a": 1}))
  kinds = [*Status]
  kinds.remove(Status.RUNNING)

  def episode(name, split, step, seed, status):
    success = status is Status.SUCCEEDED
    played = synthetic_run.episode(
      store,
      seed=seed,
      success=success,
      status=status,
      version=step,
      turns=1 + seed % 4,
    )
    played.trajectory_id = name
    common = dict(
      group_id=name.partition(".")[0],
      task_id=played.task["task_id"],
      split=split,
    )
    tell(events.EpisodeStarted(trajectory_id=name, **common))
    tell(events.EnvironmentReady(name))
    for turn in range(played.num_turns):
      tell(events.TurnFinished(name, turn, {"model": 1e-4, "env": 1e-5}))
    if not status.is_policy_outcome:
      tell(events.Fault("step", "EnvStepError", "gone", name))
    tell(events.EpisodeFinished(played, **common))
    return played

  def measure(name, step):
    for mode in ("sampled", "greedy"):
      tell(events.EvalStarted(name, mode, 4, step))
      for n in range(2):
        episode(f"eval-{n:06d}.0", "eval", step, n, Status.SUCCEEDED)
    tell(events.EvalFinished(name, synthetic_run.results(0.5)))

  measure("initial", 0)
  tell(events.WeightsPublished(0, 0.1))
  for step in range(1, steps + 1):
    members = tuple(
      episode(
        f"train-{step:06d}.{i}",
        "train",
        step - 1,
        step * 4 + i,
        kinds[(step * 4 + i) % len(kinds)],
      )
      for i in range(4)
    )
    group = trajectory_lib.TrajectoryGroup(f"train-{step:06d}", "t", members)
    tell(events.GroupFinished(group, "accepted"))
    tell(events.UpdateStarted(step))
    tell(events.WeightsPublished(step, 0.1))
    tell(events.CheckpointSaved(step, f"/runs/a/checkpoints/{step}"))
    tell(events.StepFinished(
        step, step, {"loss": 0.5 / step, "grad_norm": 0.1}, (group,),
        {m.trajectory_id: (0.25 * i,) * m.num_turns
         for i, m in enumerate(members) if i},
        {m.trajectory_id: ("" if m.is_trainable else "invalid",)
         * m.num_turns for m in members},
    ))  # fmt: skip
    if step == 3:
      measure("step_3", 3)
  measure("final", steps)
  tell(events.RunFinished("completed"))
