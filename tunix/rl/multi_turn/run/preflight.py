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
import pathlib
from typing import Iterator

import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.planning import run_memory
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
_ROWS = 64
"""Lines of a file of tasks whose prompts are measured."""


def before_building(config: TrainConfig) -> None:
  """Makes the checks of `before_jax`, and that of the weights' size.

  Raises:
    ConfigError: listing what is wrong.
  """
  problems = [
    *before_jax.problems(config),
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
  bound = config.agent.summary_bound(context)
  if bound:
    yield from _summaries(config, policy, prompt, screen, bound)


def _summaries(
  config: TrainConfig,
  policy: models.LoadedPolicy,
  prompt: int,
  screen: int,
  bound: int,
) -> Iterator[str]:
  """A bound that each turn passes, or after which a summary has no room."""
  agent, turn = config.agent, config.sampling.max_new_tokens
  least = prompt + agent.summary_images * screen + agent.summary_tokens
  setting = f"agent.summary_at={agent.summary_at:g} ({bound} tokens)"
  if least >= bound:
    yield (
      f"{setting} is passed by every turn: the system prompt, a summary and"
      f" agent.summary_images={agent.summary_images} screenshots have {least}"
      f" tokens; raise it above {least + turn}"
    )
  asks = {"role": "user", "content": agent.summary_prompt}
  request = len(policy.renderer.bridge([asks], last_sampled_is_eot=True))
  most = bound + turn + screen + request + agent.summary_tokens
  if most > config.engine.context_length:
    yield (
      f"{setting} leaves no room for a summary in engine.context_length="
      f"{config.engine.context_length}: a turn of {turn} tokens, a"
      f" screenshot of {screen}, the request of {request} and"
      f" agent.summary_tokens={agent.summary_tokens} may come on top; lower it"
      f" to {config.engine.context_length - most + bound}"
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
