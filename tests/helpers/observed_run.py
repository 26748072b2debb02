"""Episodes of every kind, told to a monitor by an observer in this process."""

import synthetic_run
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner import examples as example_lib
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.monitor.client import observer as observer_lib
from tunix.rl.multi_turn.monitor.client import png

Status = trajectory_lib.TrajectoryStatus


def observed(server, folder, store, **options):
  client = ingest_client.IngestClient(server.url, spool_dir=folder)
  return observer_lib.MonitorObserver(
      client,
      observer_lib.RunIdentity("T", options.pop("session", 0)),
      {"model_name": "m", "group_size": 4, "groups_per_batch": 1,
       "total_steps": options.pop("total_steps", 5), "temperature": 1.0},
      png_of=png.files_of(store),
      close_s=60.0,  # A busy machine is no failure.
      **options,
  )


def play(tell, store, steps=5):
  """What `train` would tell, with failures of every kind among it."""
  tell(events.RunStarted("run", {"a": 1}))
  kinds = [*Status]
  kinds.remove(Status.RUNNING)

  def episode(name, split, step, seed, status):
    success = status is Status.SUCCEEDED
    played = synthetic_run.episode(
        store, seed=seed, success=success, status=status, version=step,
        turns=1 + seed % 4,
    )
    played.trajectory_id = name
    common = dict(
        group_id=name.partition(".")[0], task_id=played.task["task_id"],
        split=split,
    )
    tell(events.EpisodeStarted(trajectory_id=name, **common))
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
        episode(f"train-{step:06d}.{i}", "train", step - 1, step * 4 + i,
                kinds[(step * 4 + i) % len(kinds)])
        for i in range(4)
    )  # pyformat: disable
    group = trajectory_lib.TrajectoryGroup(f"train-{step:06d}", "t", members)
    tell(events.GroupFinished(group, "accepted"))
    tell(events.UpdateStarted(step))
    tell(events.WeightsPublished(step, 0.1))
    tell(events.StepFinished(
        step, step, {"loss": 0.5 / step, "grad_norm": 0.1}, (group,),
        {m.trajectory_id: (0.25 * i,) * m.num_turns
         for i, m in enumerate(members) if i},
        example_lib.left_out((group,), ()),
    ))  # pyformat: disable
    if step == 3:
      measure("step_3", 3)
  measure("final", steps)
  tell(events.RunFinished("completed"))
