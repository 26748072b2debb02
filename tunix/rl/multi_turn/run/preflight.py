"""Refuses a run that cannot go well, before anything is compiled or played.

A run and a dry run make the same checks, in two parts: `before_building` needs
the configuration alone, `with_policy` also the policy. What they find is
reported at once, by the settings to change.

Promises: nothing is written, and no program is compiled, except that of the
learner's update where `memory` needs its size.

Does not: check what one section or its names can tell (`config` does), or a
server that is not asked yet.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import tempfile
from typing import Iterator

import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.planning import run_memory
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import settings as policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import packages
from tunix.rl.multi_turn.run import run_lock
from tunix.rl.queue import admission

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
_ROWS = 64
"""Lines of a file of tasks whose prompts are measured."""


def before_building(config: TrainConfig) -> None:
  """Checks the places that a run writes to, and the size of its weights.

  Raises:
    ConfigError: listing what is wrong.
  """
  problems = [
    *_directories(config),
    *_own_agent(config),
    *_services(config),
    *_learner(config),
    *_weights(config),
    *_beside(config),
  ]
  if problems:
    raise ConfigError(problems)


def size_of_weights(config: TrainConfig) -> None:
  """Checks that the weights fit, before they are read.

  Raises:
    ConfigError: they do not.
  """
  if problems := [*_weights(config)]:
    raise ConfigError(problems)


def place_of_evaluation(config: TrainConfig) -> None:
  """Checks the directory that an evaluation writes to.

  Raises:
    ConfigError: it cannot be written, or another process has it.
  """
  directory = config.run_dir
  reasons = [run_lock.conflict(directory)]
  if why := _unwritable(directory):
    reasons.append(f"run.dir={config.run.dir}: {why}; choose another directory")
  if problems := [one for one in reasons if one]:
    raise ConfigError(problems)


def with_policy(
  config: TrainConfig,
  policy: models.LoadedPolicy,
  agent: base_agent.BaseAgent,
  mesh: jax.sharding.Mesh | None,
) -> run_memory.Memory:
  """Checks that a first turn fits the context, and that the run fits memory.

  Args:
    config: Settings of the run.
    policy: Policy that the run begins with.
    agent: one of its agents, fresh.
    mesh: Mesh of the policy.

  Returns:
    The run's memory, exact for a dry run.

  Raises:
    ConfigError: listing what does not fit.
  """
  problems = [*_context(config, policy, agent)] if config.plays else []
  if config.rollout.via == "buffer" and config.buffer.start:
    problems += _prompts_of_file(config, policy)
  if problems:
    raise ConfigError(problems)
  # First without the seconds that compiling takes.
  for exact in (False, True) if config.run.dry_run else (False,):
    memory = run_memory.of_run(
      config, policy.model, policy.processor, mesh, exact=exact
    )
    if problems := memory.problems(config):
      raise ConfigError(problems)
  return memory


def taken(config: TrainConfig) -> str:
  """The refusal of a new run whose directory holds one; "" where it is free."""
  if not (config.run_dir / "metrics.jsonl").exists():
    return ""
  return (
    f"run.name={config.run.name}: {config.run_dir} holds a run already;"
    f" choose another name, or continue it with resume={config.run_dir}"
  )


# --- places -------------------------------------------------------------------


def _directories(config: TrainConfig) -> Iterator[str]:
  """Places that cannot be written, or hold something else."""
  directory = config.run_dir
  if config.run.resume:
    where = f"run.resume={config.run.resume}"
  else:
    where = f"run.dir={config.run.dir}"
    yield from filter(None, [run_lock.conflict(directory) or taken(config)])
  if why := _unwritable(directory):
    yield f"{where}: {why}; choose another directory"
  file = config.queue.path
  if file == admission.AUTO:
    file = ""  # In the run's directory.
  if file and pathlib.Path(file).expanduser().is_dir():
    yield (
      f"queue.path={file} cannot be a queue's file: it is a directory; give a"
      " file that is new, in a folder that can be written"
    )
  for key, folder in (
    ("queue.path", os.path.dirname(file) if file else ""),
    ("external.weights_dir", config.external.weights_dir),
    ("monitor.database", os.path.dirname(config.monitor.database)),
  ):
    if folder and (why := _unwritable(pathlib.Path(folder).expanduser())):
      yield f"{key}={loader.value_of(config, key)}: {why}; choose another place"


def _unwritable(directory: pathlib.Path) -> str:
  """Why no directory can be made or written there; "" if it can."""
  place = pathlib.Path(os.path.abspath(directory))
  try:
    while not os.path.lexists(place):
      place = place.parent
    if not place.is_dir():
      return f"{place} is a file, not a directory"
    # Without a name: nothing is seen or left behind.
    with tempfile.TemporaryFile(dir=place):
      pass
  except OSError as error:
    return f"{place} cannot be written ({error.strerror or error})"
  except ValueError as error:  # A null character.
    return str(error)
  return ""


# --- an agent of one's own ----------------------------------------------------


def _own_agent(config: TrainConfig) -> Iterator[str]:
  name = config.rollout.agent
  if name in ("", episodes.RUN_SERVICE):
    return
  try:
    agent_session.load(name)
  except ValueError as error:
    yield f"rollout.agent={name}: {error}"


def _services(config: TrainConfig) -> Iterator[str]:
  """Looks for the package that serves the policy to other programs."""
  setting = f"rollout.via={config.rollout.via}"
  if config.fleet.away:
    setting = f"fleet.via={config.fleet.via}"
  elif config.rollout.via not in ("proxy", "buffer"):
    return
  try:
    packages.part("services", "policy_server", setting)
  except ConfigError as error:
    yield from error.problems


# --- learner ------------------------------------------------------------------


def _learner(config: TrainConfig) -> Iterator[str]:
  """Settings that the learner would refuse after everything was compiled."""
  if not config.learner.steps:
    return
  try:
    algorithm = parts.Algorithm.of(config.algorithm)
    algorithm.check_sampling(config.sampling)
  except ValueError as error:
    yield f"algorithm: {error}"
  except Exception as error:  # pylint: disable=broad-except
    # Parts may be a user's own.
    yield f"algorithm: {type(error).__name__}: {error}"


# --- evaluation ---------------------------------------------------------------


def _beside(config: TrainConfig) -> Iterator[str]:
  if config.eval.beside and jax.process_count() > 1:
    yield (
      "eval.beside=true: a run of several processes evaluates while"
      " collecting waits; leave it out"
    )


# --- what fits ----------------------------------------------------------------


def bytes_of_weights(config: TrainConfig) -> int | None:
  """Bytes of the policy's weights; None where only making it would tell."""
  name = config.policy.name
  if policy_settings.is_factory(name):
    return None
  try:
    return checkpoint.parameter_bytes(
      by_name.BUILT_IN.get(name, name),
      **config.policy.changes(
        config.agent.max_images or config.environment.max_turns
      ),
    )
  except (OSError, ValueError, TypeError):
    return None  # Making the policy reports it, by its setting.


def _weights(config: TrainConfig) -> Iterator[str]:
  size = bytes_of_weights(config)
  if size is not None:
    yield from run_memory.of_weights(config, size).problems(config)


def _context(
  config: TrainConfig, policy: models.LoadedPolicy, agent: base_agent.BaseAgent
) -> Iterator[str]:
  """A context that the first turn of every episode would exceed.

  The prompts of an agent of another program are known once it asks; see
  `evaluation.try_outside_agent`. This package's run service is sent the
  settings of the run's own agent.
  """
  if config.rollout.agent and not (
    config.rollout.agent == episodes.RUN_SERVICE
    and config.run_service.backend == "run_service"
  ):
    return
  messages = getattr(agent, "chat_completions", None) or []
  prompt = len(policy.renderer.render(messages))
  screen = 0
  if config.sees_screenshots:
    width, height = episodes.screen_size(config)
    try:
      screen = policy.processor.num_image_tokens(width, height)
    except ValueError as error:
      yield f"gym.width={width}, gym.height={height}: {error}"
      return
  context = config.engine.context_length
  if prompt + screen >= context:
    yield (
      f"engine.context_length={context} ends before the first turn: the"
      f" system prompt (agent.system_prompt={config.agent.system_prompt})"
      f" has {prompt} tokens and a screenshot {screen}; raise it above"
      f" {prompt + screen + config.sampling.max_new_tokens}"
      + (", or lower gym.width and gym.height" if screen else "")
    )


def _prompts_of_file(
  config: TrainConfig, policy: models.LoadedPolicy
) -> Iterator[str]:
  """A file of a buffer's tasks whose first prompts all exceed the context.

  A file that only the service can read is not checked, nor are prompts that
  are no messages of text: its generator writes them in its own way.
  """
  key = "buffer.input_file" if config.buffer.input_file else "task_source.path"
  path = pathlib.Path(loader.value_of(config, key)).expanduser()
  shortest, line_of = math.inf, 0
  try:
    with path.open(encoding="utf-8") as file:
      for number, line in enumerate(itertools.islice(file, _ROWS), 1):
        messages = json_text.parse(line)["prompt"] if line.strip() else None
        if isinstance(messages, str):  # A text is one message of the user.
          messages = [{"role": "user", "content": messages}]
        if messages:
          length = len(policy.renderer.render(messages))
          if length < shortest:
            shortest, line_of = length, number
  except (OSError, ValueError, TypeError, KeyError):
    return
  context = config.engine.context_length
  if line_of and shortest >= context:
    yield (
      f"{key}={path}: the shortest prompt of its first {_ROWS} lines (line"
      f" {line_of}) has {shortest} tokens, and engine.context_length="
      f"{context}; raise engine.context_length and learner.row_length above"
      f" {shortest + config.sampling.max_new_tokens}, or shorten the prompts"
    )
