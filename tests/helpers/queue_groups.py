"""Groups to put into queues."""

import numpy as np
from tunix.rl.multi_turn.core import trajectory as trajectory_lib


def sequence(version):
  return trajectory_lib.TokenSequence(
    tokens=[5, 6],
    loss_mask=np.array([False, True]),
    logprobs=[0.0, -0.5],
    versions=[-1, version],
    turn_ids=[0, 0],
  )


def group(name="g", *versions):
  """A group with one trainable member a version."""
  return trajectory_lib.TrajectoryGroup(
    group_id=str(name),
    task_id="t",
    trajectories=[
      trajectory_lib.Trajectory(
        status=trajectory_lib.TrajectoryStatus.SUCCEEDED,
        sequences=[sequence(v)],
      )
      for v in versions or (0,)
    ],
  )


def names(batch):
  return [g.group_id for g in batch]
