"""Finds where a run stands; refuses damaged files and settings that must not
change.

Promises: a run continues with the settings it was begun with. config.yaml is
trusted while its seal holds, which every start of the run renews; a file that
was cut, emptied or edited is compared with the settings in the newest
checkpoint, and each difference is named. An override on the command line is a
deliberate change. Checking changes no file.

Does not restore anything; `training` and `warm_start.stage` do.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.environments.task_sources import source
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import summary_writer
from tunix.rl.multi_turn.run.evaluations import best_checkpoint

TrainConfig = config_lib.TrainConfig

_TASKS = (
  "gym.width",
  "gym.height",
  "gym.options",
  "environment.name",
  "environment.max_turns",
  "environment.options",
  "environment.reward",
  "agent.name",
  "agent.options",
  "agent.history",
  "agent.summary_at",
  "agent.summary_tokens",
  "agent.summary_images",
  "agent.summary_prompt",
  "agent.image_stride",
  "agent.parser",
  "agent.system_prompt",
  "agent.max_images",
  "agent.list_dropped_turns",
  "agent.show_tools",
  "agent.resize",
  "agent.min_pixels",
  "agent.max_pixels",
)
_SOURCE = tuple(
  f"task_source.{field.name}"
  for field in settings.fields(source.TaskSourceConfig)
)
_EVALUATION = (
  "eval.seed",
  "eval.episodes_per_task",
  "eval.attempts",
  "eval.split",
  "eval.modes",
)
_FIXED = (
  "run.seed",
  "gym.name",
  "policy.name",
  "policy.config",
  "policy.trajectory_pixels",
  "policy.lora_rank",
  "policy.lora_alpha",
  "policy.lora_experts",
  "warm_start.source",
  "warm_start.path",
  "warm_start.steps",
  "warm_start.families",
  "warm_start.recordings",
  "engine.weights",
  # Its presets lie below the values that the run recorded.
  "algorithm.name",
  "queue.path",
  # Checkpoints hold positions in the order of recorded groups.
  "offline.shuffle",
  "offline.split",
  # Indices of the queue are those of parts.
  "collect.part_size",
  *_TASKS,
  *_SOURCE,
  *_EVALUATION,
)
"""Settings that determine a run's weights, tasks and random numbers, and those
that its evaluations must share to be comparable."""

_FIXED_IN_PARTS = ("collect.group_size",)
"""Fixed while groups come in parts: they decide how many those are."""

_FIXED_WHERE_RECORDED = ("rollout.via",)
"""Fixed where it was or is one of `_RECORDED`: a checkpoint holds what those
have delivered."""
_RECORDED = ("buffer", "offline")

_FIXED_WHETHER_ZERO = ("learner.grad_clip",)
"""Whether they are 0 decides the structure of the optimizer's state."""


CONFIG, SUMMARY = "config.yaml", "summary.json"
RECORDED = "config"
"""Key of a checkpoint's extras: the settings that it was made with."""

MISSING = object()


def recorded(config: TrainConfig) -> TrainConfig:
  """The settings that a run directory and its checkpoints keep.

  They repeat the run; they do not resume it, nor name its processes.
  """
  repeat = dataclasses.replace(config.run, resume="", dry_run=False)
  processes = type(config.processes)()
  checkpoint = dataclasses.replace(config.checkpoint, resume_from="newest")
  return dataclasses.replace(
    config, run=repeat, processes=processes, checkpoint=checkpoint
  )


def check_directory(config: TrainConfig) -> None:
  """Refuses a path that is no directory.

  Raises:
    ConfigError: naming the directory.
  """
  directory = config.run_dir
  if not directory.is_dir():
    raise config_lib.ConfigError(
      [f"run.resume={config.run.resume} is not a directory; give runs/<name>"]
    )


def check_file(config: TrainConfig) -> None:
  """Refuses a damaged config.yaml, before its values are used.

  Raises:
    ConfigError: naming each setting that differs from the newest checkpoint's.
  """
  _, sealed = _written(config.run_dir)
  if not sealed:
    check(config)


def check(config: TrainConfig) -> list[str]:
  """Refuses what the run at `config.run.resume` cannot continue with.

  Args:
    config: resolved, overrides included.

  Returns:
    The settings that are others than in the newest checkpoint, for the user.

  Raises:
    ConfigError: naming each setting with both its values, or the file that is
      damaged.
  """
  directory = config.run_dir
  now = recorded(config).to_dict()
  written, sealed = _written(directory)
  step, before = _newest(directory)
  problems, notes = [], []
  if wrong := summary_writer.problem(directory / SUMMARY):
    problems.append(
      f"{directory / SUMMARY} is damaged: {wrong}; restore it from a copy, or"
      " delete it: the run then resumes without the evaluations in it"
    )
  if before is None and written is not None and not sealed:
    problems.append(
      f"{directory / CONFIG} is not as the run wrote it (its last line is no"
      " digest of the others), and the run has no checkpoint to compare it"
      " with; give the run's settings as a file:"
      f" train <file>.yaml resume={directory}, without {CONFIG} there"
    )
  if before is None:
    before = written
  fixed_keys = (*_FIXED, *_FIXED_WHETHER_ZERO)
  if config.collect.part_size:
    fixed_keys += _FIXED_IN_PARTS
  ways = (value_of(before, "rollout.via"), config.rollout.via)
  if any(way in _RECORDED for way in ways):
    fixed_keys += _FIXED_WHERE_RECORDED
  for key in fixed_keys if before is not None else ():
    old, new = value_of(before, key), value_of(now, key)
    same = old == new or old is MISSING
    if key in _FIXED_WHETHER_ZERO:
      same = same or bool(old) == bool(new)
    if not same:
      problems.append(
        f"{key}={new}: {config.run.resume} was begun with {old}, which"
        " cannot change; leave it out, or begin a new run"
      )
  steps = config.learner.steps
  updates = step
  if config.checkpoint.resume_from != "newest":
    updates = checkpoint_step(config)
  was_lowered = steps != value_of(before, "learner.steps")
  if updates and 0 < steps < updates and was_lowered:
    problems.append(
      f"learner.steps={steps}: {config.run.resume} has made {updates} updates"
      " where it goes on, and learner.steps counts them too; for"
      f" {steps} more give learner.steps={updates + steps}"
    )
  fixed = {problem.partition("=")[0] for problem in problems}
  for key in loader.leaves(TrainConfig):
    old, new = value_of(before, key), value_of(now, key)
    if key in fixed or old == new or old is MISSING:
      continue
    there = value_of(written, key)
    # A file that does not have it leaves its default.
    if not sealed and there in (new, MISSING):
      problems.append(
        f"{key}={new} in {directory / CONFIG}, which is not as the run wrote"
        f" it; checkpoint {step} has {old}: write that back, or give"
        f" {key}={old}"
      )
    else:
      notes.append(f"{key}={new}, {old} before")
  if problems:
    raise config_lib.ConfigError(problems)
  return notes


def _written(directory: pathlib.Path) -> tuple[dict[str, Any] | None, bool]:
  """(the settings in config.yaml or None, whether its seal holds)."""
  file = directory / CONFIG
  try:
    text = file.read_text(encoding="utf-8")
  except FileNotFoundError:
    return None, False
  except (OSError, UnicodeDecodeError) as error:
    raise config_lib.ConfigError(
      [f"{file} cannot be read: {error}; restore it from a copy"]
    ) from None
  return config_lib.parse_yaml(text, str(file)), config_lib.is_sealed(text)


def _newest(
  directory: pathlib.Path,
) -> tuple[int | None, dict[str, Any] | None]:
  """(number of the newest checkpoint, its settings), None without."""
  names = ["checkpoints"]
  if not (directory / "warm_start" / durable.SUMS).exists():
    names.append("cloning")  # Else about to be deleted.
  for name in names:
    if not (directory / name).is_dir():
      continue
    # It imports JAX.
    from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib

    try:
      with checkpoint_lib.LearnerCheckpoints(directory / name) as checkpoints:
        if steps := checkpoints.steps():
          return steps[-1], checkpoints.extras(steps[-1]).get(RECORDED)
    except checkpoint_lib.DamagedCheckpoint as error:
      raise config_lib.ConfigError([str(error)]) from None
  return None, None


def value_of(data: object, key: str) -> Any:
  """Returns the value of a dotted key in nested mappings, or `MISSING`."""
  for name in key.split("."):
    if not isinstance(data, Mapping) or name not in data:
      return MISSING
    data = data[name]
  return data


def delete_leftovers(directory: pathlib.Path) -> None:
  """Deletes what a killed process left unfinished; the run must be locked."""
  for name in ("policy", "warm_start"):
    durable.recover(directory / name)
  for name in ("checkpoints", "cloning"):
    for half in (directory / name).glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(half, ignore_errors=True)
  for name in (".", "images", "image_cache"):
    for half in (directory / name).glob("*.part"):
      half.unlink(missing_ok=True)


def checkpoint_step(config: TrainConfig) -> int:
  """Updates in the checkpoint that a run resumes from; 0 without one.

  Raises:
    ConfigError: checkpoint.resume_from is not there.
  """
  directory, choice = config.run_dir, config.checkpoint.resume_from
  steps: list[int] = []
  if (directory / "checkpoints").is_dir():
    from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib

    with checkpoint_lib.LearnerCheckpoints(
      directory / "checkpoints", read_only=True
    ) as checkpoints:
      steps = checkpoints.steps()
  if choice == "newest":
    return max(steps, default=0)
  step = int(choice) if choice != "best" else None
  if choice == "best":
    best = best_checkpoint.load(directory)
    step = None if best is None else best.step
  if step not in steps:
    raise config_lib.ConfigError(
      [
        f"checkpoint.resume_from={choice}: {directory} has no such checkpoint;"
        f" there are {', '.join(map(str, steps)) or 'none'}"
      ]
    )
  return step


def stages_measured(directory: pathlib.Path) -> dict[str, Any]:
  """The evaluations of a run's stages so far, in their order."""
  measured = evaluations(directory)
  stages = ("initial", "warm_start", "final")
  return {name: measured[name] for name in stages if name in measured}


def evaluations(directory: pathlib.Path) -> dict[str, Any]:
  """Every evaluation in a run's summary, by name."""
  return files.read_json(directory / SUMMARY).get("eval", {})
