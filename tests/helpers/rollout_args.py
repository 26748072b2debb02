"""Arguments of a rollout function, as a run makes them of its settings."""

from __future__ import annotations

import types

import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run.recorded_data import sources


def make(url, *flags, tokenizer=None):
  """The arguments of a small run with `flags` of the command `train`."""
  config = config_lib.load_config(
    [
      *small_runs.SMALL,
      small_runs.NANO,
      "--agent-rollout-buffer-url",
      url,
      *flags,
    ]
  )
  return sources.rollout_arguments(
    types.SimpleNamespace(
      config=config,
      policy_server=("http://127.0.0.1:1/v1", "key"),
      policy=types.SimpleNamespace(
        renderer=types.SimpleNamespace(image_token_id=None), tokenizer=tokenizer
      ),
      tokenizer_path="",
    )
  )
