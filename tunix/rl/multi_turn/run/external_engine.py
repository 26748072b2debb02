"""The engine in another process that a run samples with
(`rollout.via=external`)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, TYPE_CHECKING

import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.learner import reference
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import refusals

if TYPE_CHECKING:
  from tunix.rl.multi_turn.run import models

ADAPTER = "-adapter"
"""Suffix of the served model's name: the adapter that a run trains on it."""


def weights_dtype(config: config_lib.TrainConfig) -> str:
  """Type of the engine's weights: `external.dtype` with "" resolved.

  Raises:
    ConfigError: The policy's config.json is damaged.
  """
  with refusals.refused("policy.name", ValueError):
    stored = vllm.stored_dtype(vllm.config_of(config.policy.name) or {})
  return config.external.dtype or stored or "float32"


def make_engine(
  config: config_lib.TrainConfig,
  policy: models.LoadedPolicy,
  image_store: images_lib.ImageStore,
  tokenizer: str,
  model: base.Policy,
) -> remote_engine.RemoteEngine:
  """Makes the client of a running engine; sends no request yet.

  Args:
    config: names it, in `external`.
    policy: a `models.LoadedPolicy`, of the architecture that it serves.
    image_store: Pixels of the prompts' images.
    tokenizer: directory whose files are put beside weights.
    model: The policy's, on the devices that published weights lie on.

  Raises:
    ConfigError: naming the setting, or a package that is not installed.
  """
  external, renderer = config.external, policy.renderer
  url = external.url.rstrip("/")
  directory = external.weights_dir or str(config.run_dir / "weights")
  timeout_s = external.load_timeout_s
  dtype = weights_dtype(config)
  # Of the server, as its own command sets it.
  key = os.environ.get("VLLM_API_KEY", "")

  def make_client() -> openai_client.OpenAIClient:
    return openai_client.OpenAIClient(
      url,
      external.model or config.policy.name,
      image_store,
      protocol=external.protocol,
      api_key=key or "none",
      timeout_s=config.collect.deadlines.model,
      context_length=config.engine.context_length,
      max_images=_most_images(config),
      banned_token_ids=policy.model.config.banned_token_ids,
      vocab_size=policy.model.config.vocab_size,
      tokenize=renderer.encode,
      end_of_turn_id=renderer.end_of_turn_id,
      resize=base.optional(policy.processor, "resize"),
    )

  served = external.model or config.policy.name
  adapter = f"{served}{ADAPTER}" if external.transfer == "adapter" else ""

  def make_adapter_client() -> openai_client.OpenAIClient:
    client = make_client()
    client.model = adapter or client.model
    return client

  bad = ImportError, OSError, ValueError
  with refusals.refused("rollout.via=external", *bad):
    if adapter:
      save = disk_weights.adapter_saver(policy.model, served)
    else:
      save = disk_weights.policy_saver(
        policy.model, tokenizer, dtype, untied=external.protocol == "vllm"
      )
    options: dict[str, Any] = dict(api_key=key, timeout_s=timeout_s)
    engine: disk_weights.Engine
    if external.protocol == "vllm":
      engine = disk_weights.VllmEngine(
        url, transfer=external.transfer, adapter=adapter, **options
      )
    else:
      engine = disk_weights.SglangEngine(url, **options)
    probe = _make_probe(
      config, policy, image_store, model, make_adapter_client, dtype
    )
    return remote_engine.RemoteEngine(
      make_client,
      disk_weights.DiskWeights(
        directory,
        save,
        [engine],
        keep=external.keep,
        seen_at=external.seen_at,
        probes=[probe],
      ),
      context_length=config.engine.context_length,
      prompts=lambda: first_prompts(config, policy, image_store),
      sampling=policy_client.SamplingParams(
        **dataclasses.asdict(config.sampling),
        stop_token_ids=tuple(map(int, renderer.stop_token_ids)),
      ),
      adapter=adapter,
      cpu_problem=(
        vllm.head_problem(vllm.config_of(config.policy.name) or {})
        if external.protocol == "vllm"
        else ""
      ),
    )


def _make_probe(
  config: config_lib.TrainConfig,
  policy: models.LoadedPolicy,
  image_store: images_lib.ImageStore,
  model: base.Policy,
  make_client: Callable[..., Any],
  dtype: str,
) -> hand_over_probe.Probe:
  """Makes the comparison of engine and policy after each hand-over."""
  external = config.external
  sampled = hand_over_probe.SAMPLING.max_new_tokens
  prompts = first_prompts(config, policy, image_store)[:2]
  longest = max(len(prompt) for prompt in prompts) + sampled
  adapted = external.transfer == "adapter"
  wide = all(
    kind == "float32"
    for kind in (
      dtype,
      base.optional(model.config, "param_dtype"),
      base.optional(model.config, "compute_dtype"),
    )
  )
  return hand_over_probe.Probe(
    make_client,
    prompts,
    reference.Scorer(
      model,
      policy.processor,
      image_store,
      row_length=-(-longest // 128) * 128,
      temperature=hand_over_probe.SAMPLING.temperature,
      # An adapter on its own is not rounded.
      stored="float32" if adapted else dtype,
      merged=not adapted,
    ),
    external.probe_tolerance or (1e-3 if wide else 0.1),
  )


def _most_images(config: config_lib.TrainConfig) -> int:
  """Screenshots of the longest prompt: one before each turn, one at the end."""
  return config.environment.max_turns + 1


def first_prompts(
  config: config_lib.TrainConfig,
  policy: models.LoadedPolicy,
  image_store: images_lib.ImageStore,
) -> list[policy_client.TokenPrompt]:
  """One prompt of each kind that the run will send.

  Without images; where the agent sees screens also with one, and with as many
  as prompts of this run can have.
  """

  def prompt(images: int) -> policy_client.TokenPrompt:
    parts = [{"type": "image", "image": screen}] * images
    parts.append({"type": "text", "text": "What comes next?"})
    return policy.renderer.render([{"role": "user", "content": parts}])

  sees = config.sees_screenshots
  if not sees or not policy.processor.patches_per_token:
    return [prompt(0)]
  width, height = episodes.screen_size(config)
  # Of one colour: a server caches what it computes of it.
  screen = image_store.put(np.full((height, width, 3), 127, np.uint8))
  empty, first = prompt(0), prompt(1)
  room = config.engine.context_length - 2 - len(empty)
  images = min(
    config.agent.max_images or _most_images(config),
    room // (len(first) - len(empty)),
  )
  return [empty, first] + ([prompt(images)] if images > 1 else [])
