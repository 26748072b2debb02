"""Training runs small enough for tests, as the command makes them."""

from __future__ import annotations

import json
import pathlib

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train

NANO = (
  "policy.config={width: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16,"
  " vision_heads: 2, mlp: 64, vision_mlp: 64, stem: [8, 8, 16]}"
)
ONE_LAYER = NANO.replace("layers: 2", "layers: 1")
"""For runs that start often: most of a start is tracing programs."""
SMALL = (
  "tasks=[click-color, enter-text]",
  "collect.group_size=4",
  "collect.min_valid=2",
  "learner.groups_per_step=2",
  "learner.rows=4",
  "engine.slots=8",
  "collect.concurrency=8",
  "engine.context_length=384",
  "learner.row_length=384",
  "eval.episodes_per_task=2",
  "report.progress=none",
)


def directory_of(tmp_path: pathlib.Path, overrides) -> list[str]:
  """Directory of a run; a resumed one keeps its own."""
  if any(o.startswith("resume=") for o in overrides):
    return []
  return [f"run.dir={tmp_path}"]


def run_train(tmp_path: pathlib.Path, *overrides: str) -> int:
  return train.main([*directory_of(tmp_path, overrides), *SMALL, *overrides])


def make_run(tmp_path: pathlib.Path, *overrides: str) -> train.Run:
  return train.Run(
    config_lib.load_config([f"run.dir={tmp_path}", *SMALL, *overrides])
  )


def metrics_of(directory: pathlib.Path) -> list[dict]:
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def summary_of(directory: pathlib.Path) -> dict:
  return json.loads((directory / "summary.json").read_text())
