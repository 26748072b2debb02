"""Run by test_learner_mesh in a process of its own with eight CPU devices.

Trains the same batches on one device and on three meshes and prints, as JSON,
how far they are apart.
"""

import json
import pathlib
import re
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.policy import sharding

from tests.learner import learner_cases

MESHES = {
  "data": dict(data=8),
  "fsdp": dict(data=1, fsdp=8),
  "mixed": dict(data=2, fsdp=2, tensor=2),
}


def gathered_shapes(text):
  """Shapes of the results of all all-gathers in compiled code."""
  shapes = []
  for line in text.splitlines():
    if " all-gather(" not in line and " all-gather-start(" not in line:
      continue
    result = line.split(" all-gather")[0]
    for shape in re.findall(r"\w+\[([\d,]+)\]", result):
      shapes.append(tuple(int(n) for n in shape.split(",")))
  return shapes


def largest_gather(text):
  """Elements of the largest result of an all-gather in compiled code."""
  return max((int(np.prod(s)) for s in gathered_shapes(text)), default=0)


def main(directory):
  jax.config.update("jax_disable_most_optimizations", True)
  assert jax.device_count() == 8
  config = dict(
    rows=8,
    targets=24,
    # With a tiny epsilon Adam's first steps are signs of gradients, and
    # signs of zeros are noise.
    adam_eps=1e-3,
  )
  case = learner_cases.Case()
  data = [case.groups(3, 4) + case.rewritten(3, 4) for _ in range(2)]
  examples = learner_cases.examples_of(data[0])
  # One device computes each sequence by itself, a mesh those of trees.
  single = case.learner(tree="false", **config)
  want_grads, want_sums, _ = learner_cases.gradients(single, examples)
  want_metrics = [single.update(groups) for groups in data]
  scale = max(float(np.abs(g).max()) for g in want_grads.values())

  vocabulary = case.model.config.vocab_size
  report = {"devices": jax.device_count()}
  learners = {}
  for name, sizes in MESHES.items():
    mesh = sharding.make_mesh(**sizes)
    learner = learners[name] = case.learner(mesh=mesh, **config)
    grads, sums, stats = learner_cases.gradients(learner, examples)
    metrics = [learner.update(groups) for groups in data]
    shape = learner.shape
    report[name] = {
      "batches": stats.batches,
      "shared": stats.sequence_tokens - stats.row_tokens,
      "loss": abs(float(sums.loss) - float(want_sums.loss)),
      "gradient": learner_cases.largest_difference(grads, want_grads) / scale,
      "later_loss": max(
        abs(a["loss"] - b["loss"]) for a, b in zip(metrics, want_metrics)
      ),
      "parameters": learner_cases.largest_difference(
        learner.parameters(), single.parameters()
      ),
      "compiles": learner.compiles,
      "gather": largest_gather(
        learner._programs.accumulate.compiled[0].as_text()
      ),
      "logits": shape.buffers * shape.targets * vocabulary,
      "shard_logits": shape.targets * vocabulary,
      # Bytes of parameters and optimizer state on the fullest device.
      "bytes": max(
        sum(
          s.data.nbytes
          for x in jax.tree.leaves(learner.arrays())
          for s in x.addressable_shards
          if s.device == device
        )
        for device in jax.devices()
      ),
    }

  # Weight is counted over all devices, and all of them keep their parts.
  idle = case.learner(
    mesh=sharding.make_mesh(**MESHES["mixed"]),
    skip_zero_advantage=False,
    **config,
  )
  idle.update(data[0])
  before = jax.tree.map(np.array, idle.arrays())
  metrics = idle.update([case.group([0.3, 0.3, 0.1 + 0.2])])
  report["empty"] = {
    "moved": sum(
      not np.array_equal(a, np.asarray(b))
      for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(idle.arrays()))
    ),
    "updates": metrics["empty_updates"],
    "steps": metrics["optimizer_steps"],
  }

  # Sums over sequences are of one buffer, wherever it lies; the coefficient of
  # the KL is on all devices.
  per_sequence = dict(
    objective="gspo",
    importance="mis_sequence",
    tis_cap=1e6,
    kl_coef=0.1,
    kl_target=0.01,
    skip_zero_advantage=False,
    reference=case.model,
    **config,
  )
  pair = [
    case.learner(**per_sequence),
    case.learner(mesh=sharding.make_mesh(**MESHES["mixed"]), **per_sequence),
  ]
  metrics = [[one.update(groups) for groups in data] for one in pair]
  report["whole_sequences"] = {
    "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(*metrics)),
    "norm": max(
      abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(*metrics)
    ),
    "kl": metrics[1][1]["kl"],
    "parameters": learner_cases.largest_difference(
      *(one.parameters() for one in pair)
    ),
    "compiles": pair[1].compiles,
  }

  # A value head is on all devices, and its values are of the whole batch.
  ppo = dict(
    advantage="gae",
    value_learning_rate=1e-2,
    skip_zero_advantage=False,
    minibatches=2,
    groups_per_step=6,
    **config,
  )
  pair = [
    case.learner(**ppo),
    case.learner(mesh=sharding.make_mesh(**MESHES["mixed"]), **ppo),
  ]
  metrics = [[one.update(groups) for groups in data] for one in pair]
  report["critic"] = {
    "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(*metrics)),
    "value_loss": max(
      abs(a["value_loss"] / b["value_loss"] - 1) for a, b in zip(*metrics)
    ),
    "parameters": learner_cases.largest_difference(
      *(one.arrays()["params"] for one in pair)
    ),
    "compiles": pair[1].compiles,
  }

  muon = case.learner(
    mesh=sharding.make_mesh(**MESHES["mixed"]), optimizer="muon", **config
  )
  # State of a parameter lies like the parameter.
  report["muon_placed"] = all(
    any(
      x.sharding.is_equivalent_to(p.sharding, 2)
      for p in muon._params.values()
      if p.shape == x.shape
    )
    for x in jax.tree.leaves(muon.arrays()["optimizer"])
    if x.ndim == 2
  )

  with checkpoint.LearnerCheckpoints(directory) as checkpoints:
    checkpoints.save(learners["fsdp"])
    checkpoints.wait()
    for name in ("mixed", "data"):
      checkpoints.restore(learners[name])
      report[name]["restored"] = max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(
          jax.tree.leaves(learners[name].arrays()),
          jax.tree.leaves(learners["fsdp"].arrays()),
          strict=True,
        )
      )
      learners[name].update(data[0])
      report[name]["compiles_after"] = learners[name].compiles
  report["half"] = _half(config, data)
  print(json.dumps(report))


def _half(config, data):
  """bfloat16 parameters on a mesh against one device."""
  model, processor = learner_cases.policy(0)
  model = nnx.clone(model)
  nnx.update(
    model,
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)),
  )
  case = learner_cases.Case(own=(model, processor))
  groups = [case.groups(6, 4) for _ in data]
  single = case.learner(**config)
  # Adds up the same gradients in another order, on one device as well.
  reordered = case.learner(tree="false", **config)
  mesh = case.learner(mesh=sharding.make_mesh(**MESHES["mixed"]), **config)
  for part in groups:
    for learner in (single, reordered, mesh):
      learner.update(part)
  published = mesh._programs.publish(mesh._params)
  moments = [x for x in jax.tree.leaves(mesh.arrays()["optimizer"]) if x.ndim]
  named = list(mesh._params.values())
  return {
    "masters": learner_cases.largest_difference(
      mesh.parameters(), single.parameters()
    ),
    "reordered": learner_cases.largest_difference(
      reordered.parameters(), single.parameters()
    ),
    "types": sorted({str(x.dtype) for x in (*named, *moments)}),
    "published": sorted({str(x.dtype) for x in published.values()}),
    "placed": all(
      x.sharding.is_equivalent_to(published[k].sharding, x.ndim)
      and x.sharding.is_equivalent_to(mesh._placement.params[k], x.ndim)
      for k, x in mesh._params.items()
    ),
    "bytes": max(
      sum(
        s.data.nbytes
        for x in jax.tree.leaves(mesh.arrays())
        for s in x.addressable_shards
        if s.device == device
      )
      for device in jax.devices()
    ),
  }


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
