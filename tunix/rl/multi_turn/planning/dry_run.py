"""Describes a run without running it: configuration, shapes, memory."""

from __future__ import annotations

import pathlib
from typing import Any, Sequence

from flax import nnx
import jax
import numpy as np
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.learner import config as algorithm_config
from tunix.rl.multi_turn.learner.algorithms import presets
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy.checkpoints import (
  checkpoint as policy_checkpoint,
)


def parameter_count(model: nnx.Module) -> int:
  """Parameters of a policy."""
  named = policy_checkpoint.named_parameters(model)
  return sum(int(np.prod(p.shape)) for p in named.values())


def describe(
  config: train_config.TrainConfig,
  policy: Any,
  episodes: Any,
  directory: pathlib.Path,
  engine: Any,
  memory: Any,
) -> str:
  """Configuration, shapes, and memory against what is available.

  The arguments are attributes of a run, or of an evaluation and its subject.
  """
  parameters = parameter_count(policy.model)
  messages = getattr(episodes.make_agent(), "chat_completions", None) or []
  cache = "KV cache in another process"
  if engine.cache_tokens:
    cache = (
      f"KV cache of {engine.cache_tokens} tokens,"
      f" {memory_limits.human(engine.cache_bytes)}"
    )
  screen = "none"
  if episodes.acts_on_gym and config.gym.observation == "axtree":
    screen = "none, the page's accessibility tree"
  elif episodes.acts_on_gym:
    gym = config.gym
    width, height = agent_registry.screenshot_size(
      config.agent, gym.width, gym.height
    )
    tokens = policy.processor.num_image_tokens(width, height)
    screen = f"{width}x{height}, {tokens} tokens"
  # How the policy sees images, if its processor reports it.
  images = base.optional(policy.processor, "describe")
  shapes = [
    ("policy", f"{config.policy.name}, {parameters:,} parameters"),
    ("devices", f"{jax.device_count()} x {jax.default_backend()}"),
    ("system prompt", f"{len(policy.renderer.render(messages))} tokens"),
    ("renderer", choice.described(policy.renderer)),
    ("screenshot", screen),
    *([("images", images())] if callable(images) else []),
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
  memory = aligned(memory.table())
  return "\n".join([config.to_yaml(), *aligned(shapes), "", "memory", *memory])


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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns indented lines: the first column to the left, numbers right.

  Args:
    rows: Cells of each line; of two cells both stand to the left.
  """
  widths = [max(map(len, column)) for column in zip(*rows)]
  right = len(widths) > 2
  return [
    "  "
    + "  ".join(
      cell.rjust(width) if right and i else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  ]
