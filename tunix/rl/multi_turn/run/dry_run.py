"""Describes a run without running it: configuration, shapes, memory."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import config as algorithm_config
from tunix.rl.multi_turn.learner.algorithms import presets
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import checkpoint as policy_checkpoint
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import memory as memory_lib
from tunix.rl.multi_turn.run import models


def parameter_count(model: Any) -> int:
  """Parameters of a policy."""
  named = policy_checkpoint.named_parameters(model)
  return sum(int(np.prod(p.shape)) for p in named.values())


def describe(
    config: config_lib.TrainConfig,
    policy: models.LoadedPolicy,
    episodes: episodes_lib.EpisodeFactory,
    directory: pathlib.Path,
    engine: engine_lib.RolloutEngine | remote_engine.RemoteEngine,
    memory: memory_lib.Memory,
) -> str:
  """Configuration, shapes, and memory against what there is.

  Args:
    config: Settings of the run.
    policy: Its policy.
    episodes: Its agents and environments.
    directory: Directory of the run.
    engine: Engine of its rollouts.
    memory: Prediction of its memory.
  """
  parameters = parameter_count(policy.model)
  messages = getattr(episodes.make_agent(), "chat_completions", None) or []
  cache = "KV cache in another process"
  if engine.cache_tokens:
    cache = (
        f"KV cache of {engine.cache_tokens} tokens,"
        f" {memory_lib.human(engine.cache_bytes)}"
    )
  screen = "none"
  if episodes.acts_on_gym and config.gym.observation == "axtree":
    screen = "none, the page's accessibility tree"
  elif episodes.acts_on_gym:
    width, height = episodes_lib.screen_size(config)
    tokens = policy.processor.num_image_tokens(width, height)
    screen = f"{width}x{height}, {tokens} tokens"
  shapes = [
      ("policy", f"{config.policy.name}, {parameters:,} parameters"),
      ("devices", f"{jax.device_count()} x {jax.default_backend()}"),
      ("system prompt", f"{len(policy.renderer.render(messages))} tokens"),
      ("renderer", choice.described(policy.renderer)),
      ("screenshot", screen),
      *_images(policy.processor),
      (
          "rollout",
          f"{config.engine.slots} requests at a time of up to"
          f" {config.engine.context_length} tokens, {cache}",
      ),
      (
          "learner batch",
          f"{config.learner.rows} rows x {config.learner.row_length} tokens",
      ),
      (
          "step",
          f"{config.learner.groups_per_step} groups x"
          f" {config.collect.group_size} episodes",
      ),
      ("algorithm", _algorithm(config.algorithm)),
      ("run directory", str(directory)),
  ]
  return "\n".join(
      [config.to_yaml(), *_rows(shapes), "", "memory", *_rows(memory.table())]
  )


def _images(processor: Any) -> list[tuple[str, str]]:
  """Returns how the policy sees images, if its processor reports it."""
  describe = getattr(processor, "describe", None)
  return [("images", describe())] if callable(describe) else []


def _algorithm(config: algorithm_config.AlgorithmConfig) -> str:
  """The preset with its source, and the parts that make the loss."""
  parts = (
      f"advantage {config.advantage}, objective {config.objective}, importance"
      f" {config.importance}, {config.loss_aggregation}"
  )
  if not config.name:
    return parts
  preset = presets.get(config.name)
  note = f" {preset.note}" if preset.note else ""
  return f"{config.name} ({preset.paper}): {parts}.{note}"


def _rows(rows: list[tuple[str, str]]) -> list[str]:
  width = max(len(name) for name, _ in rows)
  return [f"  {name.ljust(width)}  {text}" for name, text in rows]
