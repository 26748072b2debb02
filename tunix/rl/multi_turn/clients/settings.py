"""Declares the settings of an engine in another process.

Does not connect to it; imports no JAX.
"""

from __future__ import annotations

from typing import Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting


@settings.settings
class ExternalConfig:
  """The engine in another process that rollout.via=external samples with."""

  url: str = setting(
      "", "Where it listens, e.g. http://127.0.0.1:8000/v1."
  )
  protocol: Literal["vllm", "sglang"] = setting("vllm", "Its protocol.")
  model: str = setting(
      "", 'Its name for the policy. "" = policy.name.'
  )
  weights_dir: str = setting(
      "",
      "Directory that new weights are written to; on a disk that it sees."
      ' "" = weights/ in the run directory.',
  )
  seen_at: str = setting(
      "", 'Its own path of external.weights_dir. "" = the same.'
  )
  keep: int = setting(
      2, "Versions of the weights left on the disk, the newest.", ge=1
  )
  dtype: Literal["float32", "bfloat16", "float16"] = setting(
      "float32", "Type of the weights as they are written."
  )
  load_timeout_s: float = setting(
      600.0, "Deadline of writing and loading weights.", unit="s", gt=0
  )
