"""Plays our workflow by AReaL's own resolver, executor and `prepare_batch`.

    python areal_executor.py '{"model", "broken", "rows", "tokenizer", …}'

Runs in the environment that `make areal` makes, which has neither JAX nor
google-tunix; the servers run elsewhere. Prints a JSON object: what each
scenario gave. Nothing of AReaL is replaced.
"""

import json
import sys
import tempfile

from agent_services import cua_workflow
from areal.api import cli_args
from areal.api import workflow_api
from areal.engine import RemotevLLMEngine
from areal.infra import workflow_executor
from areal.trainer import PPOTrainer
from areal.utils import data as data_lib
from areal.utils import dataloader
from areal.utils import stats_tracker
import datasets
import torch
import transformers

NAME = "agent_services.cua_workflow.CUAAgentWorkflow"


def engine_of(address, batch, **options):
  config = cli_args.InferenceEngineConfig(
    backend="vllm:d1",
    consumer_batch_size=batch,
    setup_timeout=30,
    check_trajectory_format=True,
    **options,
  )
  engine = RemotevLLMEngine(config)
  engine.initialize(addr=address)
  return engine


def loader(rows, batch):
  return dataloader.create_dataloader(
    datasets.Dataset.from_list(rows),
    rank=0,
    world_size=1,
    dataset_config=cli_args.TrainDatasetConfig(
      path="", type="rl", batch_size=batch, shuffle=False, num_workers=0
    ),
  )


def brief(trajectories):
  """Returns shapes, types and sums of each trajectory of a batch."""
  return [
    {
      "dtypes": {
        key: str(value.dtype).removeprefix("torch.")
        for key, value in one.items()
        if isinstance(value, torch.Tensor)
      },
      "shape": list(one["input_ids"].shape),
      "sampled": one["loss_mask"].sum(1).tolist(),
      "images": one["mm_token_type_ids"].sum(1).tolist(),
      "patches": [
        entry["image_grid_thw"].prod(1).sum().item() // 4
        for entry in one["multi_modal_input"]
      ],
      "rewards": one["rewards"].tolist(),
      "versions": sorted(set(one["versions"].flatten().tolist())),
      "logprob": one["logprobs"].min().item(),
      "unsampled": (one["logprobs"] * (1 - one["loss_mask"])).min().item(),
    }
    for one in trajectories
  ]


def batches(request, workflow, kwargs, *, group_size=1, steps=1, batch=2):
  """`steps` batches, each by the next version of the weights."""
  engine = engine_of(request["model"], batch)
  try:
    data = loader(request["rows"], batch)
    result = []
    for step in range(steps):
      result.append(
        engine.prepare_batch(
          data, workflow=workflow, workflow_kwargs=kwargs, group_size=group_size
        )
      )
      # As its trainer does; it wakes what waits for the version.
      engine.pause()
      engine.set_version(step + 1)
      engine.resume()
    stats = engine.workflow_executor.staleness_manager.get_stats()
    return result, {"accepted": stats.accepted, "rejected": stats.rejected}
  finally:
    engine.destroy()


def vision_row(length):
  """A row as AReaL's VisionRLVRWorkflow makes it."""
  return {
    "input_ids": torch.arange(length)[None],
    "mm_token_type_ids": torch.zeros(1, length, dtype=torch.long),
    "loss_mask": torch.ones(1, length, dtype=torch.int32),
    "logprobs": torch.full((1, length), -0.5),
    "multi_modal_input": [
      {
        "pixel_values": torch.zeros(4, 6),
        "image_grid_thw": torch.ones(1, 3, dtype=torch.long),
      }
    ],
    "versions": torch.zeros(1, length, dtype=torch.int32),
    "attention_mask": torch.ones(1, length, dtype=torch.bool),
    "rewards": torch.tensor([1.0]),
  }


def main(request):
  result = {"jax": "jax" in sys.modules}
  folder = tempfile.mkdtemp()
  transformers.Qwen2VLImageProcessor(
    patch_size=8,
    min_pixels=256,
    size={"shortest_edge": 256, "longest_edge": 1 << 20},
  ).save_pretrained(folder)
  kwargs = {
    "gconfig": cli_args.GenerationHyperparameters(max_new_tokens=24),
    "tokenizer": request["tokenizer"],
    "processor": folder,
    # What AReaL's forks add to the arguments.
    "step_id": "step-1",
    "global_step": 1,
    "batch": 1,
    "group_size": 2,
    **request["kwargs"],
  }

  # 1. Its resolver takes the class, its name and an instance, without a proxy.
  make = cua_workflow.CUAAgentWorkflow
  engine = engine_of(request["model"], 1)
  resolve = engine._engine._resolve_workflow
  instance = make(**kwargs)
  resolved = [
    resolve(make, kwargs),
    resolve(NAME, kwargs),
    resolve(instance, None),
    resolve(NAME, kwargs, 3).workflow,
  ]
  engine.destroy()
  result["resolved"] = [
    type(one) is make and isinstance(one, workflow_api.RolloutWorkflow)
    for one in resolved
  ]
  trainer = PPOTrainer.__new__(PPOTrainer)
  result["needs_proxy"] = [
    trainer._requires_proxy_workflow(one) for one in (make, NAME, instance)
  ]

  # 2. By name: two steps of two rows, each played twice.
  got, stats = batches(request, NAME, kwargs, group_size=2, steps=2)
  result["named"] = {"steps": [brief(one) for one in got], **stats}
  result["reward"] = stats_tracker.export_all()["rollout/reward"]

  # 3. The batch, and one row of another workflow.
  rows = [*got[0], vision_row(500)]
  for row in rows:
    workflow_executor.check_trajectory_format(row)
  both = data_lib.concat_padded_tensors(rows)
  result["both"] = {
    "shape": list(both["input_ids"].shape),
    "lengths": both["attention_mask"].sum(1).tolist(),
    "pictures": len(both["multi_modal_input"]),
  }

  # 4. An instance, and a policy that fails every second episode.
  broken = {**kwargs, "model_base_url": request["broken"]}
  instance = make(**broken)
  got, stats = batches(request, instance, None)
  result["broken"] = {
    "batch": len(got[0]),
    "accepted": instance.accepted,
    "rejected": dict(instance.rejected),
    "running": instance.running,
    "stats": stats,
  }

  # 5. Groups of it: one episode of each is left.
  instance = make(**broken)
  got, stats = batches(request, instance, None, group_size=2)
  result["groups"] = {
    "rows": [len(one["rewards"]) for one in got[0]],
    "accepted": instance.accepted,
    "rejected": dict(instance.rejected),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
