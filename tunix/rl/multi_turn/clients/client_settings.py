"""Declares the settings of an engine in another process.

Does not connect to it; imports no JAX.
"""

from __future__ import annotations

from typing import Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting

SGLANG_TOP_K = 4096
"""Largest top_k at which SGLang returns log-probs of what it samples from,
unless it is started with another --sampling-mask-max-tokens."""


@settings.settings
class ExternalConfig:
  """The engine in another process that rollout.via=external samples with."""

  url: str = setting(
    default="", doc="Where it listens, e.g. http://127.0.0.1:8000/v1."
  )
  protocol: Literal["vllm", "sglang"] = setting(
    default="vllm", doc="Its protocol."
  )
  model: str = setting(
    default="", doc='Its name for the policy. "" = policy.name.'
  )
  transfer: Literal["reload", "adapter"] = setting(
    default="reload",
    doc="With vLLM: reload: its workers reload a checkpoint. adapter: the"
    " LoRA adapter alone is written and loaded (policy.lora_rank).",
  )
  probe_tolerance: float = setting(
    default=0.0,
    doc="Largest mean difference between the engine's log-probs and the"
    " policy's own after a hand-over; a larger one repeats the hand-over"
    " once, then ends the run. 0 = 0.001 in float32, 0.1 where weights or"
    " the policy's computations are narrower.",
    unit="nats",
    ge=0,
  )
  weights_dir: str = setting(
    default="",
    doc="Directory that new weights are written to; on a disk that it sees."
    ' "" = weights/ in the run directory.',
  )
  seen_at: str = setting(
    default="", doc='Its own path of external.weights_dir. "" = the same.'
  )
  keep: int = setting(
    default=2, doc="Versions of the weights left on the disk, the newest.", ge=1
  )
  dtype: Literal["", "float32", "bfloat16", "float16"] = setting(
    default="",
    doc="Type of the weights as they are written; the server's --dtype."
    ' "" = the type in config.json of policy.name, which the printed command'
    " starts vLLM with; float32 where it has none.",
  )
  load_timeout_s: float = setting(
    default=600.0,
    doc="Deadline of writing and loading weights.",
    unit="s",
    gt=0,
  )
