"""Run by test_learner_processes: one of several processes that learn together.

Each gives its share of the groups. Compares with a learner of its own, on one
device, that has all of them, and prints what it found as JSON.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.run.multiprocess import processes as processes_lib

from tests.learner import learner_cases

CONFIG = dict(rows=8, targets=24, adam_eps=1e-3, groups_per_step=6)
MESHES = {"data": dict(data=8), "mixed": dict(data=2, fsdp=2, tensor=2)}


def whole(copies, state):
  """Host copies of a state's arrays."""
  local = copies.of_state(state)
  return [np.asarray(x) for x in jax.tree.leaves(local)]


def largest(got, want):
  return max(float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True))


def main(directory, address, count, index):
  jax.config.update("jax_disable_most_optimizations", True)
  processes = processes_lib.join(
    processes_lib.ProcessesConfig(
      coordinator=address, count=count, index=index, step_s=120
    )
  )
  assert (processes.index, processes.count) == (index, count)
  case = learner_cases.Case()
  data = [case.groups(6, 4) for _ in range(3)]
  single = case.learner(**CONFIG)
  want = [single.update(groups) for groups in data[:2]]
  parameters = [np.asarray(x) for x in jax.tree.leaves(single.policy_state())]
  sequences = [
    s for g in data[2][index::count] for t in g.valid for s in t.sequences
  ]
  scored = single.sequence_logprobs(sequences)
  report = {"devices": jax.device_count(), "local": jax.local_device_count()}
  for name, sizes in MESHES.items():
    mesh = sharding.make_mesh(**sizes)
    copies = sharding.HostCopies(mesh)
    learner = case.learner(mesh=mesh, processes=processes, **CONFIG)
    readings = [learner.update(groups[index::count]) for groups in data[:2]]
    state = learner.policy_state()
    local = copies.of_state(state)
    report[name] = {
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(readings, want)),
        "metrics": {
            key: max(abs(a[key] - b[key]) for a, b in zip(readings, want))
            for key in (
                "groups", "episodes", "reward_mean", "reward_std",
                "success_rate", "turns_mean", "advantage_std",
                "completion_tokens", "sampled_tokens", "grad_norm",
                "staleness_mean", "zero_advantage_groups",
            )
        },
        "parameters": largest(whole(copies, state), parameters),
        "logprobs": largest(learner.sequence_logprobs(sequences), scored),
        "here": all(x.is_fully_addressable for x in jax.tree.leaves(local)),
        "mesh": dict(copies.mesh.shape),
    }  # fmt: skip
    with checkpoint.LearnerCheckpoints(directory / name) as checkpoints:
      checkpoints.save(learner, {"at": 2})
      checkpoints.wait()
      again = case.learner(mesh=mesh, processes=processes, **CONFIG)
      report[name]["extras"] = checkpoints.restore(again)
    report[name]["restored"] = largest(
      whole(copies, again.policy_state()), whole(copies, state)
    )
  # A process without anything to learn from joins in.
  first = case.learner(
    mesh=sharding.make_mesh(**MESHES["data"]), processes=processes, **CONFIG
  )
  alone = case.learner(**CONFIG)
  share = data[0][:3] if index == 0 else [flat(g) for g in data[0][3:]]
  got = first.update(share)
  expected = alone.update(data[0][:3] + [flat(g) for g in data[0][3:]])
  report["one_learns"] = abs(got["loss"] - expected["loss"])
  # And one without any group, whose own others gave.
  first = case.learner(
    mesh=sharding.make_mesh(**MESHES["mixed"]), processes=processes, **CONFIG
  )
  alone = case.learner(**CONFIG)
  got = first.update(data[0] if index == 0 else [])
  expected = alone.update(data[0])
  report["one_gives"] = {
    name: abs(got[name] - expected[name])
    for name in ("loss", "grad_norm", "reward_mean", "groups", "tokens")
  }
  own_sequences = sequences if index == 0 else []
  readings = first.sequence_logprobs(own_sequences)
  report["one_asks"] = [
    len(readings),
    largest(readings, alone.sequence_logprobs(own_sequences))
    if own_sequences
    else 0.0,
  ]
  # Advantages of the whole step, and prices of a reference's log-probs.
  changes = CONFIG | dict(
    advantage="reinforce_pp",
    kl_coef=0.1,
    kl_in="reward",
    kl_target=1.0,
    reference=learner_cases.policy(1)[0],
  )
  whole_step = case.learner(
    mesh=sharding.make_mesh(**MESHES["data"]), processes=processes, **changes
  )
  alone = case.learner(**changes)
  got = [whole_step.update(groups[index::count]) for groups in data[:2]]
  expected = [alone.update(groups) for groups in data[:2]]
  report["whole_step"] = {
    name: max(abs(a[name] - b[name]) for a, b in zip(got, expected))
    for name in ("loss", "grad_norm", "kl", "kl_coef", "advantage_mean")
  }
  # A process at another step gets an error that says so.
  try:
    processes.gather(f"step of {index}", None)
  except RuntimeError as error:
    report["apart"] = str(error)
  print(json.dumps(report), flush=True)
  processes_lib.leave(processes)


def flat(group):
  """The group with equal rewards: no advantage."""
  return dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(t, reward=1.0) for t in group.trajectories
    ),
  )


if __name__ == "__main__":
  main(
    pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
  )
