"""Trains a computer-use agent with AReaL, whose service plays the episodes.

    python -m examples.cua_agent.train --config examples/cua_agent/config.yaml
    python -m examples.cua_agent.train --dry-run

The first needs AReaL, which this package does not depend on; further arguments
override its settings, `actor.path=…`. `--dry-run` builds everything but AReaL's
trainer; without `--config`, with the settings' defaults and the environment.
Without AReaL, `rollout.agent=run_service` of this package's own trainer trains
on the same episodes: see docs/run_service.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Sequence

from . import configs
from . import cua_workflow
from . import dataset
from . import trainer as trainer_lib
from .cua_rl import ingest_client
from .cua_rl import monitor_context

WORKFLOW = f"{cua_workflow.__name__}.CUAAgentWorkflow"


def load_config(path: str, overrides: Sequence[str]) -> configs.CUAFields:
  """Reads AReaL's YAML with `CUAFields`; "" = `CUAFields` with its defaults.

  Raises:
    ImportError: AReaL is not installed.
  """
  if not path:
    return configs.CUAFields()
  from areal.api import cli_args  # pylint: disable=g-import-not-at-top

  kind = configs.config_class(cli_args.PPOConfig)
  config, _ = cli_args.load_expr_config(["--config", path, *overrides], kind)
  return config


def start_monitor(config: Any, rows: Sequence[Any]) -> Any:
  """Opens the run at the Training Monitor; None where none is set.

  Of several processes of AReaL's launcher, the first records.
  """
  if not config.monitor_base_url or os.environ.get("RANK", "0") != "0":
    return None
  client = ingest_client.IngestClient(
    config.monitor_base_url, os.environ.get("TUNIX_MONITOR_TOKEN", "")
  )
  names = (
    getattr(config, "experiment_name", "cua_agent"),
    getattr(config, "trial_name", ""),
  )
  training = {
    "run_name": "/".join(name for name in names if name),
    "status": "running",
    "current_phase": "rollout",
    "start_time": time.time(),
    "max_turns": config.max_turns,
    "seed": config.seed,
  }
  if hasattr(config, "actor"):
    training |= {
      "model_name": config.actor.path,
      "log_path": config.cluster.fileroot,
      "batch_size": config.train_dataset.batch_size,
      "group_size": config.gconfig.n_samples,
      "temperature": config.gconfig.temperature,
      "learning_rate": config.actor.optimizer.lr,
    }
  monitor_context.set_ingest_client(client)
  monitor_context.set_training_id(client.post_training(training))
  for row in rows:
    client.post_task(
      {
        "task_id": row["task_id"],
        "name": row["name"],
        "description": row["description"],
      }
    )
  return client


def end_monitor(client: Any, error: BaseException | None) -> None:
  """Records how the training ended, and forgets it."""
  if client is not None:
    ended = {"status": "completed"}
    if error is not None:
      ended = {"status": "failed", "error_message": repr(error)[:2000]}
    client.post_training(
      {
        "training_id": monitor_context.get_training_id(),
        "end_time": time.time(),
        **ended,
      }
    )
    client.close()
  monitor_context.clear_monitor_context()


def run_areal(
  config: Any, train_rows: Sequence[Any], eval_rows: Sequence[Any]
) -> None:
  """Hands the rows and the workflow to AReaL's trainer.

  Raises:
    ImportError: AReaL is not installed.
  """
  import areal  # pylint: disable=g-import-not-at-top
  import datasets  # pylint: disable=g-import-not-at-top

  with trainer_lib.recorded(areal.PPOTrainer)(
    config,
    train_dataset=datasets.Dataset.from_list(list(train_rows)),
    valid_dataset=datasets.Dataset.from_list(list(eval_rows)),
  ) as trainer:
    arguments = config.workflow_arguments()
    arguments["training_id"] = monitor_context.get_training_id()
    trainer.train(
      workflow=WORKFLOW,
      workflow_kwargs=arguments,
      eval_workflow=WORKFLOW,
      eval_workflow_kwargs={
        **arguments,
        "gconfig": config.eval_gconfig,
        "group_size": config.eval_gconfig.n_samples,
      },
    )


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--config", default="", help="AReaL's YAML")
  parser.add_argument("--dry-run", action="store_true")
  args, overrides = parser.parse_known_args(argv)
  if not args.config and not args.dry_run:
    parser.error("--config names AReaL's YAML; or try --dry-run")
  try:
    config = load_config(args.config, overrides)
    train_rows = dataset.rows(config, "train")
    eval_rows = dataset.rows(config, "eval")
    arguments = config.workflow_arguments()
    if not args.config:
      # AReaL's settings name the processor.
      arguments["multi_modal"] = lambda spans: {}
    cua_workflow.CUAAgentWorkflow(**arguments)
  except (ImportError, OSError, ValueError, RuntimeError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{len(train_rows)} tasks to train on, {len(eval_rows)} held out")
  if args.dry_run:
    return 0
  client = start_monitor(config, [*train_rows, *eval_rows])
  failure: BaseException | None = None
  try:
    run_areal(config, train_rows, eval_rows)
  except BaseException as error:
    failure = error
    raise
  finally:
    end_monitor(client, failure)
  return 0


if __name__ == "__main__":
  sys.exit(main())
