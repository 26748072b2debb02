"""How episodes are made: the policy, sampling, the engine, groups, deadlines.

Sections whose fields carry default, meaning, unit and range, and what of them
cannot go together. Loads nothing.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Iterator

from tunix.rl.multi_turn.config import loader

_opt = loader.option


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """The vision-language model."""

  name: str = _opt(
      "tiny_vl",
      "tiny_vl: small, and shipped with weights. qwen3_vl_tiny: the published"
      " architecture at a size for CPUs, shipped with weights too."
      " qwen2_5_vl_tiny: likewise, random weights. qwen3_text_tiny: Qwen3"
      " without a vision tower, random weights. Or a directory: one saved"
      " here, or a checkpoint of Qwen2.5(-VL) or Qwen3(-VL). Or"
      " package.module:factory, see docs/policies.md.",
      choices=(
          "tiny_vl", "qwen3_vl_tiny", "qwen2_5_vl_tiny", "qwen3_text_tiny",
      ),
  )
  config: dict[str, Any] = _opt(
      {},
      "Overrides of the model's own configuration, e.g."
      " policy.config.layers=6 with warm_start.source=none: weights of another"
      " shape do not load.",
  )
  dtype: str = _opt(
      "float32",
      "Type of activations and matrix products; parameters and optimizer"
      " state stay float32.",
      choices=("float32", "bfloat16"),
  )
  trajectory_pixels: int = _opt(
      0,
      "Pixels that all screenshots of a prompt may have together; each is"
      " resized to its share, by agent.max_images or gym.max_turns (Qwen-VL"
      " only). 0 = as large as the policy takes them.",
      unit="pixels",
      at_least=0,
  )
  lora_rank: int = _opt(
      0,
      "GRPO trains a low-rank adapter of this rank on frozen weights (Qwen"
      " only). 0 = all weights.",
      at_least=0,
  )
  lora_alpha: float = _opt(
      0.0, "The adapter counts alpha / rank times. 0 = twice the rank.",
      at_least=0,
  )


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How episodes are sampled; evaluation's greedy mode has temperature 0."""

  temperature: float = _opt(
      1.0, "Softens (> 1) or sharpens (< 1) the distribution.", above=0
  )
  top_p: float = _opt(
      1.0,
      "Keep the smallest set of tokens with this probability. 1 = all.",
      above=0,
      at_most=1,
  )
  top_k: int = _opt(0, "Keep this many tokens. 0 = all.", at_least=0)
  max_new_tokens: int = _opt(
      32, "A turn's completion is cut here.", unit="tokens", at_least=1
  )


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """The engine that generates for many episodes at once."""

  slots: int = _opt(
      96, "Requests that are sampled at a time; more wait.", at_least=1
  )
  cache_tokens: int = _opt(
      0,
      "Tokens whose keys and values are held at a time, at least"
      " context_length; when they do not suffice, episodes that rest are"
      " computed again. 0 = slots times context_length.",
      unit="tokens",
      at_least=0,
  )
  context_length: int = _opt(
      512,
      "Tokens of one sequence, screenshots included. An episode that needs"
      " more ends with status context_limit.",
      unit="tokens",
      at_least=16,
  )
  concurrency: int = _opt(
      96,
      "Episodes in flight. More than rollout.slots keeps the engine busy while"
      " gyms work.",
      at_least=1,
  )
  via: str = _opt(
      "in_process",
      "How episodes reach the engine. in_process: as tokens. proxy: through an"
      " OpenAI-compatible server that the run opens on the loopback interface,"
      " as messages with screenshots; what the server keeps is trained on."
      " Needs the extras serve and client. external: the engine is vLLM or"
      " SGLang in another process, see external.",
      choices=("in_process", "proxy", "external"),
  )
  agent: str = _opt(
      "",
      "With via=proxy: module:function of a coroutine function that plays"
      " episodes in its own loop, with an openai client and a computer; see"
      ' rollout/agent_session.py. "" = this package\'s agent.',
  )
  lockstep: str = _opt(
      "auto",
      "true: requests are batched in an order that does not depend on timing,"
      " so that equal seeds give equal bits. auto: true when"
      " queue.max_staleness is 0 and rollout.via is in_process.",
      choices=("auto", "true", "false"),
  )
  update_policy: str = _opt(
      "immediate",
      "When new weights take over. immediate: between two tokens."
      " between_turns: after the running completions.",
      choices=("immediate", "between_turns"),
  )
  on_update: str = _opt(
      "keep_kv",
      "What happens to the KV cache of running episodes under new weights."
      " keep_kv: kept, a small mismatch. recompute: prefilled again, exact.",
      choices=("keep_kv", "recompute"),
  )
  weights: str = _opt(
      "same",
      "What rolls out. same: the policy's weights. int8: a copy with its"
      " matrices rounded to a byte a number, half of bfloat16; correct for"
      " the difference with algorithm.importance=tis. Qwen-VL only.",
      choices=("same", "int8"),
  )
  prefill_buckets: tuple[int, ...] = _opt(
      (),
      "Lengths a turn's new tokens are padded to, ascending; each compiles"
      " once. [] = chosen by the engine.",
      unit="tokens",
      at_least=1,
  )


@dataclasses.dataclass(frozen=True)
class ExternalConfig:
  """The engine in another process that rollout.via=external asks."""

  url: str = _opt(
      "", "Where it listens, e.g. http://127.0.0.1:8000/v1."
  )
  protocol: str = _opt(
      "vllm", "What it is.", choices=("vllm", "sglang")
  )
  model: str = _opt(
      "", 'What it calls the policy. "" = policy.name.'
  )
  weights_dir: str = _opt(
      "",
      "Where new weights are written for it; on a disk that it sees."
      ' "" = weights/ in the run directory.',
  )
  seen_at: str = _opt(
      "", 'external.weights_dir as it calls that. "" = the same.'
  )
  dtype: str = _opt(
      "float32",
      "Type of the weights as they are written.",
      choices=("float32", "bfloat16", "float16"),
  )
  load_timeout_s: float = _opt(
      600.0, "Deadline of writing and loading weights.", unit="s", above=0
  )


@dataclasses.dataclass(frozen=True)
class CollectConfig:
  """Groups of episodes of one task, and how long anything may take."""

  group_size: int = _opt(
      8, "Episodes of one task that are compared.", at_least=1
  )
  min_valid: int = _opt(
      4,
      "A group with fewer episodes that the policy decided (and not a broken"
      " gym) is dropped and its task tried again.",
      at_least=1,
  )
  max_requeues: int = _opt(
      2, "How often a dropped group's task is tried again.", at_least=0
  )
  gamma: float = _opt(
      1.0,
      "Discount a turn, of the returns in trajectories and of turn_returns.",
      at_least=0,
      at_most=1,
  )
  reset_timeout_s: float = _opt(
      30.0, "Deadline of starting a task.", unit="s", above=0
  )
  model_timeout_s: float = _opt(
      120.0,
      "Deadline of one completion, compilation included.",
      unit="s",
      above=0,
  )
  step_timeout_s: float = _opt(
      30.0, "Deadline of one action.", unit="s", above=0
  )
  evaluate_timeout_s: float = _opt(
      30.0, "Deadline of the gym's verdict and of rewards.", unit="s", above=0
  )
  close_timeout_s: float = _opt(
      10.0, "Deadline of closing a gym.", unit="s", above=0
  )
  turn_timeout_s: float = _opt(
      180.0, "Deadline of a whole turn.", unit="s", above=0
  )
  episode_timeout_s: float = _opt(
      600.0, "Deadline of a whole episode.", unit="s", above=0
  )


def is_directory(policy_name: str) -> bool:
  """Whether policy.name is a path, and not one of the names we know."""
  return os.sep in policy_name or policy_name.startswith((".", "~"))


def is_factory(policy_name: str) -> bool:
  """Whether policy.name is "package.module:factory", code of the user's."""
  return ":" in policy_name and not is_directory(policy_name)


def problems(
    policy: PolicyConfig,
    sampling: SamplingConfig,
    rollout: RolloutConfig,
    external: ExternalConfig,
    collect: CollectConfig,
) -> Iterator[str]:
  """Values that cannot go together: which fields, why, and what to change."""
  yield from _engine_problems(sampling, rollout)
  yield from _external_problems(policy, rollout, external)
  yield from _collect_problems(collect)


def _engine_problems(
    sampling: SamplingConfig, rollout: RolloutConfig
) -> Iterator[str]:
  if sampling.max_new_tokens >= rollout.context_length:
    yield (
        f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for"
        f" a prompt in rollout.context_length={rollout.context_length}; lower"
        " the first or raise the second"
    )
  buckets = rollout.prefill_buckets
  if list(buckets) != sorted(set(buckets)):
    yield (
        f"rollout.prefill_buckets={list(buckets)} must ascend without repeats"
    )
  if buckets and max(buckets) > rollout.context_length:
    yield (
        f"rollout.prefill_buckets={list(buckets)} go beyond"
        f" rollout.context_length={rollout.context_length}; drop the longer"
        " ones"
    )
  if rollout.lockstep == "true" and rollout.via != "in_process":
    yield (
        "rollout.lockstep=true waits for sessions in the order in which they"
        f" open, which rollout.via={rollout.via} does not tell the engine; set"
        " rollout.lockstep=auto (equal seeds still give equal tokens, up to"
        " rounding)"
    )
  if rollout.agent and rollout.via != "proxy":
    yield (
        f"rollout.agent={rollout.agent} asks an OpenAI-compatible server, which"
        f" rollout.via={rollout.via} does not open; set rollout.via=proxy"
    )


def _external_problems(
    policy: PolicyConfig, rollout: RolloutConfig, external: ExternalConfig
) -> Iterator[str]:
  if rollout.via != "external":
    if external.url:
      yield (
          f"external.url={external.url} is not asked with"
          f" rollout.via={rollout.via}; set rollout.via=external"
      )
    return
  if not external.url:
    yield (
        "rollout.via=external needs external.url, where vLLM or SGLang listens;"
        " python -m tunix.rl.multi_turn.clients.vllm prints how to start it"
    )
  if not is_directory(policy.name):
    yield (
        f"rollout.via=external: policy.name={policy.name} is no directory that"
        " another process could load; save one and give its path"
    )
  if rollout.weights != "same":
    yield (
        f"rollout.weights={rollout.weights} is of the engine in this process;"
        " leave it at same with rollout.via=external"
    )


def _collect_problems(collect: CollectConfig) -> Iterator[str]:
  size, valid = collect.group_size, collect.min_valid
  if valid > size:
    yield (
        f"collect.min_valid={valid} exceeds collect.group_size={size}, so every"
        f" group would be dropped; set collect.min_valid={max(2, size // 2)} or"
        " a larger group"
    )
  if collect.turn_timeout_s > collect.episode_timeout_s:
    yield (
        f"collect.turn_timeout_s={collect.turn_timeout_s} exceeds"
        f" collect.episode_timeout_s={collect.episode_timeout_s}; lower the"
        " first"
    )
  slowest = max(collect.model_timeout_s, collect.step_timeout_s)
  if slowest > collect.turn_timeout_s:
    yield (
        f"collect.turn_timeout_s={collect.turn_timeout_s} is shorter than what"
        f" one call in it may take ({slowest} s: collect.model_timeout_s and"
        " collect.step_timeout_s); raise the first or lower those"
    )
