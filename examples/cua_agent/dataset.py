"""The gym's tasks as rows: one row, one task, one episode."""

from __future__ import annotations

from typing import Any

from . import configs
from .cua_rl import task_loader


def rows(config: configs.CUAFields, split: str) -> list[dict[str, Any]]:
  """Rows of the split, "train" or "eval".

  Raises:
    ValueError: nothing is left of the list.
    GenvError: the server's list cannot be read.
  """
  chosen = config.tasks if split == "train" else config.eval_tasks
  source = task_loader.TaskSourceConfig(
    source="gym",
    names=tuple(chosen),
    limit=config.limit,
    seed=config.seed,
    train_ratio=0.8,
  )
  tasks = task_loader.load_tasks_from_config(
    source,
    config.split_type if split == "train" else "eval",
    options={"base_url": config.gym_base_url, "gym_id": config.gym_id},
  )
  return [
    {**task.to_row(), "item_idx": index} for index, task in enumerate(tasks)
  ]
